"""The one-GPU proof: what can only be shown on a GPU, as one program with one table.

| experiment | shows |
|---|---|
| A `offload.py` | bandwidths, what offloading costs, equal bits, memory as predicted |
| B `solo_rank.py` | one rank's real program at real size: predicted bytes against the allocator's |
| C `four_ranks.py` | every family on four NCCL ranks that share the GPU: no hang, losses equal to stock's |
| D `split_cost.py` | F, I and W against a fused B, on the device and on the host |
| E `head_passes.py` | the passes of a cut LM head against their matrix products |
| F `device_waits.py` | which operations of a host wait for a kernel that runs on another stream |
| G `waiting_hosts.py` | a waiting host hangs where the model of hosts says so, and nowhere else |
| H `one_process.py` | step times of schedules against simulated ones, in one process with a share of the GPU per rank |
| I `processes.py` | the same in four NCCL processes with the whole plugin, and their memory |
| J `waiting_kernels.py` | how much longer passes take beside messages that wait |

C, G and I need NCCL 2.30, H `cuda-bindings`, and I CUDA's multi-process service (MPS). What the machine lacks is said before
anything starts, and the other experiments run. Where Transformer Engine is installed, B, C, D, H and I run with its layers,
too. Each experiment is a process with a limit of its own and writes every row when it is known. Run again, the program goes
on with the rows that are missing on this machine. Exit status: 0, all rows are there and hold; 1, a row does not hold, or an
experiment failed or could not run; 2, none could run; 3, the time was over before the last row.

    python benchmarks/gpu/prove.py                  # one CUDA GPU; nine minutes, call it again while its status is 3
    python benchmarks/gpu/prove.py --only H I       # some of it: the speed of schedules
    python benchmarks/gpu/prove.py --note benchmarks/notes/one-gpu.md     # also write the tables of H, I and J there
    python benchmarks/gpu/prove.py --rehearse       # every line of it on CPU with tiny sizes; the numbers mean nothing
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import needs
import proof

from megatron_pipemem.files import write_whole

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Experiment:
    """One program beside this one, or a part of its rows. ``minutes`` is the most it may take."""

    letter: str
    program: str
    minutes: float
    part: str = ""

    def __str__(self) -> str:
        return f"{self.letter} {self.program}" + (f", part {self.part}" if self.part else "")

    def path(self, folder: Path) -> Path:
        """Return the file of its results."""
        return folder / f"{self.program}{f'-{self.part}' if self.part else ''}.json"


EXPERIMENTS = (
    Experiment("H", "one_process", 4, "p4"),
    Experiment("I", "processes", 5, "p4"),
    Experiment("C", "four_ranks", 2, "timers"),
    Experiment("C", "four_ranks", 2, "passes"),
    Experiment("J", "waiting_kernels", 2),
    Experiment("H", "one_process", 4, "p8"),
    Experiment("C", "four_ranks", 3, "usual-order"),
    Experiment("D", "split_cost", 3),
    Experiment("B", "solo_rank", 10),
    Experiment("F", "device_waits", 2),
    Experiment("E", "head_passes", 3),
    Experiment("A", "offload", 10),
    Experiment("G", "waiting_hosts", 6),
    Experiment("C", "four_ranks", 30, "families"),
    Experiment("H", "one_process", 60, "more"),
    Experiment("I", "processes", 60, "more"),
)
"""The most telling first, so that a lease that ends early has shown most."""
FAILED, NOTHING, UNFINISHED = 1, 2, 3
NOTE_BEGIN, NOTE_END = "<!-- speed -->", "<!-- end of speed -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    letters = sorted({experiment.letter for experiment in EXPERIMENTS})
    parser.add_argument("--only", nargs="+", choices=letters, default=letters, help="experiments to run")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on CPU, to see that the program works")
    parser.add_argument("--again", action="store_true", help="also what came to its end before")
    parser.add_argument(
        "--minutes", type=float, default=9, help="stop after so many; the next call goes on (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/prove"), help="folder of the results")
    parser.add_argument("--note", type=Path, help="Markdown file that gets the tables of H, I and J")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    chosen = [experiment for experiment in EXPERIMENTS if experiment.letter in options.only]
    faults = {} if options.rehearse else faults_of(chosen)
    for fault, unable in faults.items():
        sys.stderr.write(f"{', '.join(unable)} cannot run: {fault}\n")
    able = [experiment for experiment in chosen if not any(experiment.letter in unable for unable in faults.values())]
    if not able:
        return NOTHING
    if options.again:
        for experiment in able:
            experiment.path(options.output).unlink(missing_ok=True)
    statuses = [
        run(experiment, experiment.path(options.output), options.rehearse, deadline - time.monotonic())
        for experiment in able
    ]
    rows = [row for experiment in EXPERIMENTS for row in read(experiment, experiment.path(options.output))]
    proof.say("\n" + table(rows))
    if options.note is not None:
        write_note(options.note, rows, proof.machine(options.rehearse))
    if any(row["missed"] for _, row in rows) or {*statuses} - {0, UNFINISHED} or faults:
        return FAILED
    return UNFINISHED if UNFINISHED in statuses else 0


def faults_of(experiments: list[Experiment]) -> dict[str, list[str]]:
    """Return what the machine lacks, a sentence each, with the letters of the experiments that need it."""
    faults: dict[str, list[str]] = {}
    for letter, program in sorted({(experiment.letter, experiment.program) for experiment in experiments}):
        if (fault := needs.fault(program)) is not None:
            faults.setdefault(fault, []).append(letter)
    return faults


def run(experiment: Experiment, path: Path, rehearse: bool, seconds: float) -> int:
    """Return the exit status of an experiment, which runs in a process of its own.

    Args:
        experiment: does nothing if it came to its end before.
        path: of its results.
        rehearse: on CPU.
        seconds: left to all experiments.
    """
    if _is_done(path, rehearse):
        proof.say(f"{experiment}: done already, --again repeats it")
        return 0
    seconds = min(seconds, 60 * experiment.minutes)
    if seconds <= 0:
        return UNFINISHED
    proof.say(f"\n{experiment}: at most {seconds / 60:.3g} minutes")
    command = [sys.executable, str(HERE / f"{experiment.program}.py"), "--output", str(path)]
    # In a session of its own, so that its ranks end with it.
    command += ["--part", experiment.part] if experiment.part else []
    process = subprocess.Popen([*command, *(["--rehearse"] if rehearse else [])], start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        proof.say(f"{experiment}: stopped after {seconds / 60:.3g} minutes, run again to go on")
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


def read(experiment: Experiment, path: Path) -> list[tuple[str, dict]]:
    """Letter and row of every row that is there."""
    if not path.exists():
        return []
    return [(experiment.letter, row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(map(shown, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def claim(row: dict) -> str:
    return "; ".join(row["missed"]) or "holds"


def table(rows: list[tuple[str, dict]]) -> str:
    """Of all experiments, in Markdown."""
    lines = ["| | case | measured | claim |", "|---|---|---|---|"]
    for letter, row in rows:
        values = (f"{name.replace('_', ' ')} {shown(value)}" for name, value in row["values"].items())
        lines.append(f"| {letter} | {row['case']} | {'; '.join(values)} | {claim(row)} |")
    return "\n".join(lines)


def write_note(path: Path, rows: list[tuple[str, dict]], machine: str) -> None:
    """Write the rows of H, I and J to a Markdown file, between two marks, with a column for every value."""
    parts = [f"Measured on {date.today()}: {machine}."]
    for letter in "HIJ":
        tables: dict[str, list[dict]] = {}
        for row in (row for other, row in rows if other == letter and row["values"]):
            tables.setdefault(next(iter(row["values"])), []).append(row)
        for alike in tables.values():
            names = list(dict.fromkeys(name for row in alike for name in row["values"]))
            lines = [["case", *(name.replace("_", " ") for name in names), "claim"], ["---"] * (len(names) + 2)]
            lines += [[row["case"], *(shown(row["values"].get(n, "")) for n in names), claim(row)] for row in alike]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        failures = [f"{row['case']}: {claim(row)}" for other, row in rows if other == letter and not row["values"]]
        parts += failures
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    before, _, marked = text.partition(NOTE_BEGIN)
    after = marked.partition(NOTE_END)[2]
    if not marked:
        before = f"{text.rstrip()}\n\n## H, I and J: the speed of schedules\n\n"
    section = "\n\n".join([NOTE_BEGIN, *parts, NOTE_END])
    write_whole(path, before + section + (after or "\n"))


if __name__ == "__main__":
    sys.exit(main())
