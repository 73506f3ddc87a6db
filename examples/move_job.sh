#!/usr/bin/env bash
# Moves a job from stock Megatron to v-half and back, on 2 CPU ranks, as docs/moving-a-job.md says. Every part of the job
# writes a report with its losses, which equal those of one stock run of 6 steps (whole.json).
# Usage: ./move_job.sh FOLDER
set -euo pipefail
folder=$1
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")/../scripts" && pwd)

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 64
    --num-attention-heads 4
    --seq-length 32
    --max-position-embeddings 32
    --transformer-impl local
    --attention-dropout 0
    --hidden-dropout 0
    --untie-embeddings-and-output-weights
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 4
    --lr 1e-3
    --lr-decay-style constant
    --clip-grad 0
    --bf16
    --use-distributed-optimizer
    --eval-iters 0
    --eval-interval 1000
    --pipeline-model-parallel-size 2
)
DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 127
)

# part NAME SCHEDULE LAST_STEP FLAGS...
part() {
    torchrun --nproc-per-node 2 --master-port "${MASTER_PORT:-29500}" -m megatron_pipemem run --cpu "$scripts/pretrain_gpt.py" \
        "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" --override-opt_param-scheduler \
        --pipemem-schedule "$2" --pipemem-report "$folder/$1.json" --train-iters "$3" "${@:4}"
}

part whole stock 6
part before stock 2 --save "$folder/before" --save-interval 2
# The optimizer's state of "before" fits stock's placement only. One step of stock saves it in the form that fits all.
part convert stock 3 --load "$folder/before" --save "$folder/any" --save-interval 3 --dist-ckpt-optim-fully-reshardable
part v-half v-half 5 --load "$folder/any" --save "$folder/v-half" --save-interval 5 --dist-ckpt-optim-fully-reshardable
part back stock 6 --load "$folder/v-half" --dist-ckpt-optim-fully-reshardable
