"""In the place of a training script: does at once what tests of launching need."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


rank = int(os.environ["RANK"])
print(f"rank {rank} of {os.environ['WORLD_SIZE']} on {os.environ['SLURMD_NODENAME']}", flush=True)
if flag("--behaviour") == "fail":
    started = Path(flag("--save"))
    started.mkdir(parents=True, exist_ok=True)
    (started / f"rank-{rank}").touch()
    while len(list(started.glob("rank-*"))) < 4:
        time.sleep(0.1)
    if rank == 3:
        sys.exit(7)
if flag("--behaviour") == "save":
    saved = Path(flag("--save")) / "latest_checkpointed_iteration.txt"
    if saved.exists():
        print(f"rank {rank} goes on", flush=True)

    def save(number: int, frame: object) -> None:
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.write_text("5")
        sys.exit(0)

    signal.signal(signal.SIGUSR1, save)
    print(f"rank {rank} is ready", flush=True)
time.sleep(300)
