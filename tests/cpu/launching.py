"""What the tests of the CPU lane launch."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

TOY_MODEL = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 3 --eval-interval 1000 --eval-iters 0
    --transformer-impl local --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --tokenizer-type NullTokenizer
    --distributed-timeout-minutes 5 --pipeline-model-parallel-size 2
""")


def tell(number: int) -> None:
    """Print what a rank finds, as one line of JSON."""
    import torch

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    found = {name: os.environ[name] for name in names}
    found |= {"number": number, "imported": "megatron.training" in sys.modules, "cuda": torch.cuda.is_available()}
    print(json.dumps(found | {"devices": torch.cuda.device_count()}), flush=True)


def sleep_beside_a_child() -> None:
    """Print the number of a process that this one has started, and sleep."""
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)
