"""The one-GPU proof: what can only be shown on a GPU, as one program with one table.

| experiment | shows |
|---|---|
| A `offload.py` | bandwidths, what offloading costs, equal bits, memory as predicted |
| B `solo_rank.py` | one rank's real program at real size: predicted bytes against the allocator's |
| C `four_ranks.py` | every family on four NCCL ranks that share the GPU: no hang, losses equal to stock's |
| D `split_cost.py` | F, I and W against a fused B |
| E `head_passes.py` | the passes of a cut LM head against their matrix products |
| F `device_waits.py` | which operations of a host wait for a kernel that runs on another stream |
| G `waiting_hosts.py` | a waiting host hangs where the model of hosts says so, and nowhere else |

C and G need NCCL 2.30. Where Transformer Engine is installed, B, C and D run with its layers, too. Each experiment is a
process with a limit of its own and writes every row when it is known. Run again, the program goes on with the rows that are
missing on this machine. Exit status: 0, all rows are there and hold; 1, a row does not hold or an experiment failed; 3, the
time was over before the last row.

    python benchmarks/gpu/prove.py                  # one CUDA GPU; half an hour
    python benchmarks/gpu/prove.py --minutes 9      # stop after so long; call it again while its status is 3
    python benchmarks/gpu/prove.py --only B D       # some of it
    python benchmarks/gpu/prove.py --rehearse       # every line of it on CPU with tiny sizes; the numbers mean nothing
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import proof

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Experiment:
    """One program beside this one. ``minutes`` is the most it may take."""

    letter: str
    program: str
    minutes: float


EXPERIMENTS = (
    Experiment("F", "device_waits", 2),
    Experiment("D", "split_cost", 3),
    Experiment("E", "head_passes", 3),
    Experiment("B", "solo_rank", 10),
    Experiment("A", "offload", 10),
    Experiment("G", "waiting_hosts", 6),
    Experiment("C", "four_ranks", 30),
)
"""Short ones first, so that a lease that ends early has shown most."""
FAILED, UNFINISHED = 1, 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    letters = sorted(each.letter for each in EXPERIMENTS)
    parser.add_argument("--only", nargs="+", choices=letters, default=letters, help="experiments to run")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on CPU, to see that the program works")
    parser.add_argument("--again", action="store_true", help="also what came to its end before")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many; the next call goes on")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/prove"), help="folder of the results")
    options = parser.parse_args()
    if not options.rehearse:
        import torch

        if not torch.cuda.is_available():
            sys.stderr.write("no CUDA GPU here, so there is nothing to prove; --rehearse runs the program on CPU\n")
            return 2
    deadline = time.monotonic() + 60 * options.minutes
    chosen = [each for each in EXPERIMENTS if each.letter in options.only]
    if options.again:
        for each in chosen:
            (options.output / f"{each.program}.json").unlink(missing_ok=True)
    statuses = [
        run(each, options.output / f"{each.program}.json", options.rehearse, deadline - time.monotonic())
        for each in chosen
    ]
    rows = [row for each in EXPERIMENTS for row in read(each, options.output / f"{each.program}.json")]
    proof.say("\n" + table(rows))
    if any(missed for *_, missed in rows) or {*statuses} - {0, UNFINISHED}:
        return FAILED
    return UNFINISHED if UNFINISHED in statuses else 0


def run(experiment: Experiment, path: Path, rehearse: bool, seconds: float) -> int:
    """Return the exit status of an experiment, which runs in a process of its own.

    Args:
        experiment: does nothing if it came to its end before.
        path: of its results.
        rehearse: on CPU.
        seconds: left to all experiments.
    """
    name = f"{experiment.letter} {experiment.program}"
    if _is_done(path, rehearse):
        proof.say(f"{name}: done already, --again repeats it")
        return 0
    seconds = min(seconds, 60 * experiment.minutes)
    if seconds <= 0:
        return UNFINISHED
    proof.say(f"\n{name}: at most {seconds / 60:.3g} minutes")
    command = [sys.executable, str(HERE / f"{experiment.program}.py"), "--output", str(path)]
    # In a session of its own, so that its ranks end with it.
    process = subprocess.Popen([*command, *(["--rehearse"] if rehearse else [])], start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        proof.say(f"{name}: stopped after {seconds / 60:.3g} minutes, run again to go on")
        return UNFINISHED
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_done(path: Path, rehearse: bool) -> bool:
    """Whether the experiment came to its end on this machine, with these versions."""
    if not path.exists():
        return False
    data = json.loads(path.read_text(encoding="utf-8"))
    return data.get("complete", False) and data.get("machine") == proof.machine(rehearse)


def read(experiment: Experiment, path: Path) -> list[tuple[str, str, str, str]]:
    """Letter, case, what was measured and what was missed, of every row that is there."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [
        (experiment.letter, row["case"], "; ".join(map(_value, row["values"].items())), "; ".join(row["missed"]))
        for row in rows
    ]


def _value(item: tuple[str, object]) -> str:
    name, value = item
    words = name.replace("_", " ")
    if isinstance(value, float):
        return f"{words} {value:.4g}"
    return f"{words} {value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{words} {value}"


def table(rows: list[tuple[str, str, str, str]]) -> str:
    """Of all experiments, in Markdown, for docs/what-runs-where.md."""
    lines = [f"| {letter} | {case} | {values} | {missed or 'holds'} |" for letter, case, values, missed in rows]
    return "\n".join(["| | case | measured | claim |", "|---|---|---|---|", *lines])


if __name__ == "__main__":
    sys.exit(main())
