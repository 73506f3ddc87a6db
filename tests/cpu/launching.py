"""What the tests of the CPU lane launch."""

from __future__ import annotations

import shlex
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

TOY_MODEL = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 3 --eval-interval 1000 --eval-iters 0
    --transformer-impl local --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --tokenizer-type NullTokenizer
    --distributed-timeout-minutes 5 --pipeline-model-parallel-size 2
""")
