# Flags of forks; none stops the reading.
source ./common.sh
torchrun --nproc-per-node 8 pretrain_fork.py ${COMMON[@]} --num-layers 16 --global-batch-size 32 --pipeline-model-parallel-size 4 \
  --patch-size 14 --gemm-gradient-accumulation-fusion --checkpoint-activations --schedules-method dualpipev --noop-layers 15
