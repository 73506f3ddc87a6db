#!/bin/bash
#SBATCH --job-name=llama3-70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --output=out/%x-%j.log
# The launch script of this folder as a Slurm job: sbatch examples/slurm_job.sh CHECKPOINTS TOKENIZER DATA
# `pipemem launch RUN.yaml --launcher slurm` writes such a job from a run file.

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
export NNODES=$SLURM_NNODES
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec examples/launch_after.sh "$@"' launch "$@"
