# bash drops the quotes of a default, also of one within another.
source ./common.sh
A=${A:-"24"}
B=${B:-"${C:-'4'}"}
torchrun --nproc-per-node 8 pretrain_gpt.py ${COMMON[@]} --num-layers "$A" --global-batch-size 32 \
  --pipeline-model-parallel-size ${B//\'/}
