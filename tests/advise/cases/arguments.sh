# Called with the number of layers and of pipeline ranks.
source ./common.sh
torchrun --nproc-per-node 8 pretrain_gpt.py ${COMMON[@]} --num-layers $1 --pipeline-model-parallel-size $2 --global-batch-size 32
