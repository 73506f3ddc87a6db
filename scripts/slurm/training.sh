#!/usr/bin/env bash
# What the batch files share; they source it. Slurm runs a copy of a batch file, so the repository is where sbatch was
# called, or PIPEMEM_ROOT.
root=${PIPEMEM_ROOT:-$SLURM_SUBMIT_DIR}

# train RUN.yaml [--set key=value ...]: trains on all nodes of the job, one torchrun on each. Sets $code to the exit code.
#
# USR1, which #SBATCH --signal sends before the time limit, makes the ranks save a checkpoint and end; the job then goes
# back to the queue. So it does, by Slurm, when a node crashes. Started again, it resumes from the last checkpoint.
train() {
    local nodes step stopped=no
    nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR=${nodes%%$'\n'*}
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # two jobs may share a node
    NNODES=$SLURM_JOB_NUM_NODES
    export MASTER_ADDR MASTER_PORT NNODES
    if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
        export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun no longer takes it over from sbatch
    fi
    echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on ${nodes//$'\n'/ }"

    # In the background, because bash runs a trap only between commands or in `wait`.
    srun --kill-on-bad-exit=1 --cpu-bind=none "$root/scripts/pretrain_gpt.sh" "$@" &
    step=$!
    trap 'stopped=yes; kill -USR1 "$step"' USR1
    for _ in 1 2 3; do
        wait "$step" && code=0 || code=$?
        [ "$code" -eq $((128 + $(kill -l USR1))) ] || break # else it was the trap that ended `wait`
    done
    trap - USR1

    if [ "$stopped" = yes ] && [ "$code" -eq 0 ] && "$root/scripts/pipemem.sh" unfinished "$@"; then
        echo "job $SLURM_JOB_ID: time is nearly up, back to the queue"
        scontrol requeue "$SLURM_JOB_ID" && sleep 60 # it ends this script meanwhile
    fi
}
