"""The one-GPU proof: what can only be shown on a GPU, as one program with one table.

| experiment | shows |
|---|---|
| A `offload.py` | bandwidths, what offloading costs, equal bits, memory as foretold |
| B `solo_rank.py` | one rank's real program at real size: predicted bytes against the allocator's, host time |
| C `four_ranks.py` | every family on four NCCL ranks that share the GPU: no hang, losses equal to stock's |
| D `split_cost.py` | F, I and W against a fused B |
| E `head_passes.py` | the passes of a cut LM head against their matrix products |

Where Transformer Engine is installed, B, C and D run with its layers, too. Each experiment is a process with a limit of its
own and writes what it has as it goes. Run again, the program goes on with what is missing: an experiment that came to its end
on the same machine is not repeated.

    python benchmarks/gpu/prove.py                  # one CUDA GPU; half an hour
    python benchmarks/gpu/prove.py --only B D       # some of it
    python benchmarks/gpu/prove.py --rehearse       # every line of it on CPU with tiny sizes; the numbers mean nothing
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
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
    Experiment("D", "split_cost", 2),
    Experiment("B", "solo_rank", 8),
    Experiment("E", "head_passes", 2),
    Experiment("C", "four_ranks", 10),
    Experiment("A", "offload", 8),
)
"""Short ones first, so that a lease that ends early has shown most."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    letters = sorted(each.letter for each in EXPERIMENTS)
    parser.add_argument("--only", nargs="+", choices=letters, default=letters, help="experiments to run")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on CPU, to see that the program works")
    parser.add_argument("--again", action="store_true", help="also what came to its end before")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/prove"), help="folder of the results")
    options = parser.parse_args()
    if not options.rehearse:
        import torch

        if not torch.cuda.is_available():
            sys.stderr.write("no CUDA GPU here, so there is nothing to prove; --rehearse runs the program on CPU\n")
            return 2
    failed = False
    for experiment in EXPERIMENTS:
        if experiment.letter in options.only:
            path = options.output / f"{experiment.program}.json"
            if options.again or not _is_done(path, options.rehearse):
                failed |= run(experiment, path, options.rehearse) != 0
            else:
                proof.say(f"{experiment.letter} {experiment.program}: done already, --again repeats it")
    rows = [row for each in EXPERIMENTS for row in read(each, options.output / f"{each.program}.json")]
    proof.say("\n" + table(rows))
    return int(failed or any(missed for *_, missed in rows))


def run(experiment: Experiment, path: Path, rehearse: bool) -> int:
    """Run an experiment in a process of its own; its exit status, or 124 when it took too long."""
    proof.say(f"\n{experiment.letter} {experiment.program}: at most {experiment.minutes:g} minutes")
    command = [sys.executable, str(HERE / f"{experiment.program}.py"), "--output", str(path)]
    try:
        return subprocess.run(
            [*command, *(["--rehearse"] if rehearse else [])], timeout=experiment.minutes * 60, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        proof.say(f"{experiment.letter} {experiment.program}: stopped after {experiment.minutes:g} minutes")
        return 124


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
    """Of all experiments, in Markdown, for docs/gpu.md."""
    lines = [f"| {letter} | {case} | {values} | {missed or 'holds'} |" for letter, case, values, missed in rows]
    return "\n".join(["| | case | measured | claim |", "|---|---|---|---|", *lines])


if __name__ == "__main__":
    sys.exit(main())
