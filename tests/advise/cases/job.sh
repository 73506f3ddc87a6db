#!/bin/bash
#SBATCH -N 4
#SBATCH --gres=gpu:4
source ./common.sh
srun bash <<EOF
if ! torchrun --nnodes \$SLURM_JOB_NUM_NODES --nproc-per-node $SLURM_GPUS_ON_NODE pretrain_gpt.py ${COMMON[@]} --num-layers 16 \
  --global-batch-size 32 --pipeline-model-parallel-size 2 --tensor-model-parallel-size $SLURM_GPUS_ON_NODE; then exit 1; fi
EOF
