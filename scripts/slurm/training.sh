#!/usr/bin/env bash
# What the batch files share; they source it. Slurm runs a copy of a batch file, so the repository is where sbatch was
# called, or PIPEMEM_ROOT.
root=${PIPEMEM_ROOT:-$SLURM_SUBMIT_DIR}
options=() # of srun
inside=()  # what starts a command in an image of Apptainer

# take_options [--OPTION=VALUE ...] ARGUMENT ...: takes srun's options from the front; $rest is what follows them.
#
# --container-image and --container-mounts are pyxis' own. Slurm knows nothing of Apptainer, so an image that ends in .sif
# is started by its command. Either way the container has the folder of the scripts and the working directory, and runs
# PYTHON, or else its own python3.
take_options() {
    local image='' mounts=$PWD:$PWD
    [ "$root" = "$PWD" ] || mounts+=,$root:$root
    while [[ ${1-} == -* ]]; do
        case $1 in
            --container-image=*) image=${1#*=} ;;
            --container-mounts=*) mounts+=,${1#*=} ;;
            -*=*) options+=("$1") ;;
            *)
                echo "$1: write options of srun as --OPTION=VALUE" >&2
                exit 2
                ;;
        esac
        shift
    done
    rest=("$@")
    case $image in
        '') return ;;
        *.sif) inside=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$image") ;;
        *) options+=("--container-image=$image" "--container-mounts=$mounts" "--container-workdir=$PWD") ;;
    esac
    export PYTHON=${PYTHON:-python3}
    contained=yes
}

# pipemem ARGUMENT ...: runs the command on this node, in the container if there is one.
pipemem() {
    if [ "${contained:-no}" = yes ]; then
        srun --nodes=1 --ntasks=1 "${options[@]}" "${inside[@]}" "$root/scripts/pipemem.sh" "$@"
    else
        "$root/scripts/pipemem.sh" "$@"
    fi
}

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
    srun --kill-on-bad-exit=1 --cpu-bind=none "${options[@]}" "${inside[@]}" "$root/scripts/pretrain_gpt.sh" "$@" &
    step=$!
    trap 'stopped=yes; kill -USR1 "$step"' USR1
    for _ in 1 2 3; do
        wait "$step" && code=0 || code=$?
        [ "$code" -eq $((128 + $(kill -l USR1))) ] || break # else it was the trap that ended `wait`
    done
    trap - USR1

    if [ "$stopped" = yes ] && [ "$code" -eq 0 ] && pipemem unfinished "$@"; then
        echo "job $SLURM_JOB_ID: time is nearly up, back to the queue"
        scontrol requeue "$SLURM_JOB_ID" && sleep 60 # it ends this script meanwhile
    fi
}
