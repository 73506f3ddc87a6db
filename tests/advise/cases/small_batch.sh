source ./common.sh
torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py ${COMMON[@]} --num-layers 16 --global-batch-size 8 --pipeline-model-parallel-size 4
