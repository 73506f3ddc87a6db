"""Train one small GPT on four CPU ranks with stock Megatron and with this package, and compare losses and memory.

./scripts/quickstart.sh [--iterations N] [--only NAME ...] [--output DIR] [--verbose]

Every run starts from scratch, with dropout, and reads the same text: the sources of Python's own asyncio package.
Initial weights and dropout are drawn by layer (--pipemem-rng layerwise), so they do not depend on the layer's rank.
Losses are compared bit for bit with stock Megatron's 1F1B. Asynchronous schedules train differently. Their losses are
compared with a run of their update rule in one process. Results are in OUTPUT/summary.json, with a log and pictures of
every run.

Gradients are not clipped. The gradient norm is a sum over ranks, and its last bit depends on the layers of each rank.
Clipping would carry that bit into the losses. Stock 1F1B and stock interleaved differ in the same way.

Chimera, GEMS and DualPipe train two replicas of the model and add up their gradients in another order. Their losses are
compared within 1e-6 and marked ~, even if a processor rounds them to the same bits.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megatron_pipemem.files import write_whole
from megatron_pipemem.flags import words
from megatron_pipemem.run import run as run_script
from megatron_pipemem.schedule.registry import build_schedule, family
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.stream import family_window, steady
from megatron_pipemem.tools.cpu.flags import CPU_FLAGS
from megatron_pipemem.tools.cpu.ranks import end_ranks, start_ranks
from megatron_pipemem.tools.report import save_comparison
from megatron_pipemem.tools.report.terminal import FittingTable

SCRIPTS = Path(__file__).resolve().parent
DEVICES, MICROBATCHES = 4, 8
POLL_SECONDS = 0.2
ROUNDING = 1e-6
"""The largest relative difference of losses that another order of summation may cause."""
UNTIED = ("--untie-embeddings-and-output-weights",)
TWO_CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
LOGGED = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+).*lm loss: ([\d.E+-]+)")

MODEL = {
    "--num-layers": 8,
    "--hidden-size": 128,
    "--num-attention-heads": 4,
    "--seq-length": 128,
    "--max-position-embeddings": 128,
    "--make-vocab-size-divisible-by": 1,
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": 257,
    "--attention-dropout": 0.1,
    "--hidden-dropout": 0.1,
}
TRAINING = {
    "--micro-batch-size": 1,
    "--global-batch-size": MICROBATCHES,
    "--pipeline-model-parallel-size": DEVICES,
    "--lr": 5e-4,  # with twice as much, the delayed updates of pipedream-2bw diverge at first
    "--lr-decay-style": "constant",
    "--clip-grad": 0,
    "--seed": 1234,
    "--pipemem-rng": "layerwise",
    "--eval-iters": 1,
    "--eval-interval": 1000,
    "--log-interval": 1,
    "--distributed-timeout-minutes": 2,
}


class RunFailed(Exception):
    """The error of a training run that failed. The message is the end of its log."""


@dataclass(frozen=True)
class Run:
    """A training run. With engine ``stock``, Megatron's own schedule trains, and this package only measures."""

    schedule: str
    engine: str

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.schedule}"

    @property
    def is_asynchronous(self) -> bool:
        return self.engine == "pipemem" and family(self.schedule).asynchronous

    def flags(self) -> list[str]:
        if self.engine == "stock":
            return ["--pipemem-schedule", "stock", *(TWO_CHUNKS if self.schedule == "interleaved" else ())]
        return ["--pipemem-schedule", self.schedule, *(UNTIED if self.is_asynchronous else ())]


RUNS = (
    Run("1f1b", "stock"),
    Run("interleaved", "stock"),
    *(Run(name, "pipemem") for name in ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min", "1f1b-v")),
    *(Run(name, "pipemem") for name in ("chimera", "gems", "dualpipe", "pipedream-2bw", "pipedream")),
)


def launch(
    arguments: Sequence[str],
    log: Path,
    on_line: Callable[[str], object],
    emulated: str | None = None,
    verbose: bool = False,
) -> None:
    """Train on ``DEVICES`` ranks, and call ``on_line`` with every line of the log. Raise RunFailed after an error.

    If ``emulated`` names an update rule, one rank trains by this rule without a pipeline instead. ``verbose`` logs all
    of Megatron's messages. Those at import need ranks that are not forked.
    """
    script, ranks = SCRIPTS / "pretrain_gpt.py", DEVICES
    if emulated:
        arguments = [emulated, str(DEVICES), str(script), *arguments]
        script, ranks = SCRIPTS / "emulate.py", 1
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    log.touch()
    every_rank = (True, script, list(arguments), verbose)
    processes = start_ranks(run_script, [every_rank] * ranks, [log] * ranks, forked=not verbose)
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            begun = ""
            while True:
                running = [process.sentinel for process in processes if process.exitcode is None]
                *lines, begun = (begun + file.read()).split("\n")
                for line in lines:
                    on_line(line)
                if not running:
                    break
                wait(running, timeout=POLL_SECONDS)
    finally:
        end_ranks(processes)
    if failed := [process.exitcode for process in processes if process.exitcode]:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
        raise RunFailed(f"{tail}\nexit code {failed[0]}; the whole log is {log}")


def prepare_text(folder: Path) -> list[str]:
    """Convert asyncio's sources to Megatron datasets in ``folder``, and return the flags that read them.

    Raise RunFailed if that fails.
    """
    source = Path(sysconfig.get_path("stdlib")) / "asyncio"
    prefix = folder / "asyncio"
    folder.mkdir(parents=True, exist_ok=True)
    # Megatron caches its index by the path of the text, but another Python has other sources at the same path.
    shutil.rmtree(folder / "cache", ignore_errors=True)
    tool = [sys.executable, "-W", "ignore", str(SCRIPTS / "text_to_dataset.py"), str(source), str(prefix)]
    done = subprocess.run([*tool, "--glob", "*.py", "--valid-fraction", "0.1"], capture_output=True, text=True)
    if done.returncode:
        raise RunFailed(done.stderr)
    return [
        *("--train-data-path", f"{prefix}_train", "--valid-data-path", f"{prefix}_valid"),
        *("--data-cache-path", str(folder / "cache")),
    ]


def train(run: Run, flags: list[str], output: Path, on_line: Callable[[str], object], verbose: bool = False) -> dict:
    """Train one run, and return its row of the summary. ``compare`` adds the comparison later.

    An asynchronous schedule's update rule is then run in one process, and the row has its losses. Raise RunFailed after
    an error.
    """
    report, seconds = output / "reports" / f"{run.name}.json", [0.0]

    def count(line: str) -> None:
        if match := LOGGED.search(line):
            seconds[0] += float(match[2]) / 1e3
        on_line(line)

    measured = ["--pipemem-report", str(report), "--pipemem-trace", str(output / "timelines" / run.name)]
    launch([*flags, *run.flags(), *measured], output / "logs" / f"{run.name}.log", count, verbose=verbose)
    seen = json.loads(report.read_text(encoding="utf-8"))
    emulated = {}
    if run.is_asynchronous:
        other = report.with_name(f"emulator-{run.schedule}.json")
        alone = ["--pipeline-model-parallel-size", "1", "--pipemem-schedule", "stock", "--pipemem-report", str(other)]
        log = output / "logs" / f"emulator-{run.schedule}.log"
        launch([*flags, *UNTIED, *alone], log, lambda line: None, run.schedule, verbose)
        emulated = {"emulator_losses": json.loads(other.read_text(encoding="utf-8"))["losses"]}
    return emulated | {
        "schedule": run.schedule,
        "engine": run.engine,
        "losses": seen["losses"],
        "predicted_peak_bytes": [rank["predicted_peak_bytes"] for rank in seen["ranks"]],
        "counted_peak_bytes": [rank["counted_peak_bytes"] for rank in seen["ranks"]],
        "predicted_weight_bytes": [rank["predicted_weight_bytes"] for rank in seen["ranks"]],
        "counted_weight_bytes": [rank["counted_weight_bytes"] for rank in seen["ranks"]],
        "seconds": round(seconds[0], 3),
    }


def stock_row(rows: Sequence[dict]) -> dict | None:
    """Return the row of stock 1F1B, to which all others are compared, or None if that run failed."""
    return next((row for row in rows if (row["schedule"], row["engine"]) == ("1f1b", "stock")), None)


def compare(rows: Sequence[dict]) -> list[dict]:
    """Return the rows with ``bit_identical_to_stock``: whether the losses equal those of stock 1F1B bit for bit.

    It is None if stock 1F1B failed. ``identical`` says the same for the run in ``compared_with``. For an asynchronous
    schedule that is the emulator.
    """
    stock = stock_row(rows)
    losses = stock["losses"] if stock is not None else None
    compared = []
    for row in rows:
        as_stock = row["losses"] == losses if losses else None
        emulated = row.get("emulator_losses")
        identical = as_stock if emulated is None else row["losses"] == emulated
        other = "stock" if emulated is None else "emulator"
        compared.append(row | {"bit_identical_to_stock": as_stock, "compared_with": other, "identical": identical})
    return compared


def planned(name: str) -> Timeline:
    """Return the simulated timeline of one step. For an asynchronous schedule it is a step in the middle of a run."""
    if family(name).asynchronous:
        return family_window(name, DEVICES, MICROBATCHES, steady(DEVICES, MICROBATCHES)).simulate()
    return simulate(build_schedule(name, num_devices=DEVICES, num_microbatches=MICROBATCHES))


def is_right(row: dict, stock: dict | None) -> bool:
    """Return whether a row's losses equal the reference's, or with two replicas are within 1e-6 of them.

    The result is true without a reference.
    """
    if row["identical"] is not False:
        return True
    if stock is None or family(row["schedule"]).replicas == 1 or len(row["losses"]) != len(stock["losses"]):
        return False
    return all(abs(a - b) <= ROUNDING * abs(b) for a, b in zip(row["losses"], stock["losses"], strict=True))


def _equality(row: dict, stock: dict | None) -> str:
    """Return the mark in the column "equal to stock": ``yes``, ``NO``, ``emulator``, ``~`` or ``-``.

    Two replicas have ``~`` in place of ``yes``, because only some processors round their losses to stock's bits.
    """
    if row["identical"] is None:
        return "-"
    if not is_right(row, stock):
        return "NO"
    if family(row["schedule"]).replicas > 1:
        return "~"
    return "yes" if row["compared_with"] == "stock" else "emulator"


def table(rows: Sequence[dict]) -> FittingTable:
    """Return the rows of ``compare`` as a table. It needs 98 columns."""
    stock = stock_row(rows)
    words = ("schedule", "engine", "final\nloss", "equal\nto stock")
    numbers = ("peak,\npredicted", "peak,\ncounted", "of\n1f1b", "weight\nMB", "planned\nbubble", "seconds")
    result = FittingTable(
        (*words, *numbers),
        text=words,
        title=f"GPT, {MODEL['--num-layers']} layers, {DEVICES} CPU ranks, {MICROBATCHES} microbatches",
        caption="Losses: fp32, from scratch, dropout 0.1, no gradient clipping. Peak: activation bytes of the fullest rank. "
        "Weights: of all its parameters. ~: within 1e-6, as two replicas of the model add up their gradients. emulator: "
        "asynchronous schedules train differently; equal to their update rule in one process. Bubble: planned, with F = I = "
        "W. Seconds: all training steps by the clock, on ranks that share cores; they are no measure of speed on GPUs.",
    )
    for row in rows:
        predicted, counted = row["predicted_peak_bytes"], max(row["counted_peak_bytes"])
        result.add_row(
            row["schedule"],
            row["engine"],
            f"{row['losses'][-1]:.6f}",
            _equality(row, stock),
            "-" if None in predicted else str(max(predicted)),
            str(counted),
            "-" if stock is None else f"{counted / max(stock['counted_peak_bytes']):.2f}",
            f"{max(row['counted_weight_bytes']) / 1e6:.1f}",
            f"{planned(row['schedule']).bubble_rate:.1%}",
            f"{row['seconds']:.1f}",
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10, help="training steps of every run (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these of our schedules")
    parser.add_argument("--output", type=Path, default=SCRIPTS.parent / "out" / "quickstart")
    parser.add_argument(
        "--verbose", action="store_true", help="log all warnings and messages of Megatron, which takes longer"
    )
    arguments = parser.parse_args()
    known = [run.schedule for run in RUNS if run.engine == "pipemem"]
    wanted = arguments.only or known
    if unknown := sorted(set(wanted) - set(known)):
        parser.error(f"unknown schedule {', '.join(unknown)}; choose from {', '.join(known)}")
    if arguments.iterations < 1:
        parser.error("--iterations must be at least 1")
    runs = [run for run in RUNS if run.engine == "stock" or run.schedule in wanted]
    output, began = arguments.output, time.monotonic()
    console = Console()
    console.width = max(console.width, 100)  # the table needs this width

    pairs = {**MODEL, **TRAINING}
    common = [*words(CPU_FLAGS), *(str(part) for pair in pairs.items() for part in pair)]
    rows, failed = [], []
    name, loss = TextColumn("{task.description}"), TextColumn("{task.fields[loss]}")
    columns = (SpinnerColumn(), name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), loss)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("text", total=1, loss="")
        try:
            common += prepare_text(output / "data")
        except RunFailed as error:
            progress.update(task, loss="failed")
            console.print("[red]no text, so there is nothing to train on[/red]")
            console.print(str(error), highlight=False, markup=False, soft_wrap=True)
            return 1
        progress.update(task, completed=1)
        common += ["--train-iters", str(arguments.iterations)]
        for run in runs:
            task = progress.add_task(f"{run.engine} {run.schedule}", total=arguments.iterations, loss="starting")

            def on_line(line: str, task=task) -> None:
                if match := LOGGED.search(line):
                    progress.update(task, completed=int(match[1]), loss=f"loss {float(match[3]):.4f}")

            try:
                rows.append(train(run, common, output, on_line, arguments.verbose))
            except RunFailed as error:
                failed.append(run.name)
                progress.update(task, loss="failed")
                console.print(f"[red]{run.name} failed[/red]")
                console.print(str(error), highlight=False, markup=False, soft_wrap=True)
    rows = compare(rows)
    summary = output / "summary.json"
    if rows:
        console.print(table(rows))
    write_whole(summary, json.dumps(rows, indent=2) + "\n")
    timelines = [planned(name) for name in dict.fromkeys(run.schedule for run in runs)]
    save_comparison(timelines, output / "comparison.png")
    console.print(
        f"summary: {summary}\npictures: {output / 'comparison.png'}, {output / 'timelines'}/*/plan.png and run.png\n"
        f"{time.monotonic() - began:.0f} s in all",
        soft_wrap=True,
    )
    ours = [row for row in rows if row["engine"] == "pipemem"]
    different = [row for row in ours if not is_right(row, stock_row(rows))]
    for other in ("stock", "emulator"):
        if names := [row["schedule"] for row in different if row["compared_with"] == other]:
            console.print(f"[red]not the losses of {other}: {', '.join(names)}[/red]")
    return 1 if failed or different else 0


if __name__ == "__main__":
    sys.exit(main())
