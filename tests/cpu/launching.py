"""What the tests of the CPU lane launch."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
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


def run_ranks(count: int, command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[int], list[str]]:
    """Run ranks as srun would, with nothing but their environment; exit codes, and stderr of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            command, env={**environment, **rendezvous, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(count)
    ]
    try:
        errors = [rank.communicate()[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], errors
