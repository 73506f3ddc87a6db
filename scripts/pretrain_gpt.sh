#!/usr/bin/env bash
# Trains the run of a file: starts this node's ranks under torchrun, and exits with torchrun's exit code.
#
#     scripts/pretrain_gpt.sh configs/runs/tiny-cpu.yaml [--set key=value ...]
#
# For several nodes, start it once on every node, with the same arguments and:
#     NNODES        number of nodes
#     NODE_RANK     number of this node, from 0 (under srun: SLURM_NODEID)
#     MASTER_ADDR   name or address of node 0
#     MASTER_PORT   a free port there (default 29500)
# PYTHON is the interpreter. The default is that of scripts/setup.sh, or else python3.
#
# All flags of the training script come from the file. If the file has a save_interval, a second start resumes from
# the last checkpoint, and SIGUSR1 makes the ranks save one and exit.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# The signal would kill torchrun and ranks that are still starting. Ranks that train have a handler.
trap '' USR1
exec "$scripts/pipemem.sh" launch "$@"
