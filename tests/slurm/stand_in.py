"""In the place of a training script: does at once what tests of launching need."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# One write: where Python does not buffer, print() writes the end of a line by itself, and another rank's line may come first.
os.write(1, f"rank {rank} of {size} on {os.environ['SLURMD_NODENAME']}\n".encode())
started = Path(flag("--save"))
started.mkdir(parents=True, exist_ok=True)
if flag("--behaviour") == "hang" and not (started / f"rank-{rank}").exists():
    (started / f"rank-{rank}").touch()
    os.write(1, f"rank {rank} hangs\n".encode())
    time.sleep(300)
(started / f"rank-{rank}").touch()
while len(list(started.glob("rank-*"))) < size:
    time.sleep(0.1)
if rank == size - 1:
    sys.exit(7)
time.sleep(300)
