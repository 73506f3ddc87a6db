"""Measure the host time of a step: the cost of a schedule's Python code with a model that computes almost nothing.

Goal: 1F1B and interleaved 1F1B take no more host time with this plugin than with stock Megatron-Core's own functions. Both run
the same chunks through Megatron's own forward and backward steps, in turn in one process. The ratio is the result.

    python benchmarks/overhead.py            # p = 2 and 4 on gloo ranks; p = 4, 8 and 16 played by one rank; many minutes
    python benchmarks/overhead.py --quick    # fewer sizes, fewer steps

Host time is processor time of the rank's main thread (``time.thread_time``). Waiting for a neighbour does not count,
and a busy machine only affects the caches. All gloo groups of a rank share one device, as everywhere on the CPU lane.
With a polling thread per group, a rank would measure how its main thread and gloo's threads share few cores, which is
irrelevant for NCCL. A played rank runs its real program alone. Its neighbours are torch's ``fake`` backend, whose
messages arrive at once. An action is one forward or one backward of a chunk.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

from fresh_ranks import run_ranks
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_pipemem.files import write_whole

ROWS, WIDTH = 2, 8
"""Tokens and features of a message, as few as possible."""

TURN_ACTIONS = 600
"""Least number of a rank's actions in an engine's turn. A shorter turn would measure the machine's fluctuations."""

SCHEDULES = {"1f1b": 1, "interleaved": 2}
"""The schedules of stock Megatron-Core, with their chunks per device."""

ENGINES = ("stock", "pipemem", "pipemem, recording", "pipemem, counting")
"""With ``recording``, a run writes a report, and its bytes are known. With ``counting``, it counts them in every step."""

SETTLING_STEPS = 3
"""The first compiles the program and opens its channels. The report counts bytes until two steps hold the same."""


@dataclass(frozen=True)
class Size:
    """One comparison."""

    schedule: str
    devices: int
    microbatches: int
    played: int | None = None  # the only rank that runs; ``None`` if all ranks run

    @property
    def actions(self) -> int:
        """Number of forwards and backwards of one rank."""
        return 2 * self.microbatches * SCHEDULES[self.schedule]


@dataclass(frozen=True)
class Row:
    """Host microseconds of one engine's step, of the slowest rank: the median over rounds.

    ``ratio`` is the median of each round's ratio to stock, so that a change of the machine's speed affects both.
    """

    size: Size
    engine: str
    microseconds: float
    ratio: float

    @property
    def per_action(self) -> float:
        return self.microseconds / self.size.actions


def sizes(quick: bool) -> list[Size]:
    """Return sizes with all ranks up to p = 4, and with one played middle rank up to p = 16, v = 2, m = 128."""
    if quick:
        return [*(Size(name, 2, 8) for name in SCHEDULES), *(Size(name, 4, 16, played=1) for name in SCHEDULES)]
    real = [Size(name, p, m) for p, m in ((2, 16), (4, 32)) for name in SCHEDULES]
    played = [Size(name, p, m, played=p // 2) for p, m in ((4, 32), (8, 64), (16, 128)) for name in SCHEDULES]
    return real + played


def run_sizes(all_sizes: Iterable[Size], rounds: int, turn_actions: int = TURN_ACTIONS) -> list[Row]:
    """Run every size on fresh processes, with ``rounds`` turns of every engine."""
    rows = []
    for size in all_sizes:
        with tempfile.TemporaryDirectory() as folder:
            processes = size.devices if size.played is None else 1
            steps = max(3, turn_actions // size.actions)
            run_ranks(_rank, (size, rounds, steps, folder), processes)
            spent = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
        rows += _rows(size, spent)
    return rows


def _rows(size: Size, spent: list[dict[str, list[float]]]) -> list[Row]:
    """Return a row per engine. ``spent`` has, per process and engine, the seconds per step of every round."""
    worst = {engine: [max(at) for at in zip(*(own[engine] for own in spent), strict=True)] for engine in ENGINES}
    return [
        Row(
            size,
            engine,
            _median(worst[engine]) * 1e6,
            _median([ours / stock for ours, stock in zip(worst[engine], worst["stock"], strict=True)]),
        )
        for engine in ENGINES
    ]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _rank(process: int, size: Size, rounds: int, steps: int, folder: str) -> None:
    from megatron_pipemem.tools.cpu import activate

    activate()
    import torch.distributed as dist

    if size.played is None:
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=process, world_size=size.devices)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=size.played, world_size=size.devices)
    # The fake backend invents rank 0's broadcasts, and no step needs one.
    broadcast = mock.patch.object(dist, "broadcast_object_list") if size.played is not None else nullcontext()
    with broadcast:
        spent = measure(size, rounds, steps, Path(folder) / f"report-{process}")
    write_whole(Path(folder) / f"{process}.json", json.dumps(spent))
    if size.played is None:
        dist.barrier()
    dist.destroy_process_group()


def measure(size: Size, rounds: int, steps: int, report: Path) -> dict[str, list[float]]:
    """Return the seconds of this thread's processor time per step, per engine and round."""
    import torch.distributed as dist

    import megatron_pipemem
    from megatron_pipemem.mcore import plugin
    from megatron_pipemem.mcore.report.run_record import RunRecord

    always = mock.patch.object(RunRecord, "counts", lambda record, program: True)
    call = prepare(size)
    spent: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for number, engine in itertools.product(range(rounds + 1), ENGINES):
        if engine != "stock":
            megatron_pipemem.enable(size.schedule, report=str(report) if "," in engine else None)
        with always if engine.endswith("counting") else nullcontext():
            for _ in range(SETTLING_STEPS):
                call()
            gc.collect()
            gc.disable()
            if size.played is None:
                dist.barrier()
            begin = time.thread_time()
            for _ in range(steps):
                call()
            seconds = (time.thread_time() - begin) / steps
        gc.enable()
        if number:  # the first round warms up
            spent[engine].append(seconds)
        plugin.disable()
    return spent


def prepare(size: Size) -> Callable[[], object]:
    """Return a step of chunks that compute almost nothing, with the function that Megatron's module has when it is called."""
    import torch
    from stock_steps import tiny_step

    chunks = SCHEDULES[size.schedule]
    step = tiny_step(
        size.devices, chunks, WIDTH, lambda: torch.zeros(ROWS, 1, WIDTH), lambda _: {}, deallocate_pipeline_outputs=True
    )
    keywords = {"num_microbatches": size.microbatches, "seq_length": ROWS, "micro_batch_size": 1}
    return lambda: step(data_iterator=[None] * chunks, **keywords)


def table(rows: list[Row]) -> Table:
    """Return a table of every engine's host time per step and per action, and its ratio to stock's."""
    printed = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("ranks", "schedule", "p", "m", "engine", "us/step", "us/action", "to stock"):
        left = heading in ("ranks", "schedule", "engine")
        printed.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        printed.add_row(
            "gloo" if row.size.played is None else f"rank {row.size.played}",
            row.size.schedule,
            str(row.size.devices),
            str(row.size.microbatches),
            row.engine,
            f"{row.microseconds:.0f}",
            f"{row.per_action:.1f}",
            f"{row.ratio:.3f}",
        )
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and steps")
    parser.add_argument("--rounds", type=int, help="turns of every engine (default: 15, quick 3)")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/overhead.json"), help="JSON of the rows")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (3 if arguments.quick else 15)
    rows = run_sizes(sizes(arguments.quick), rounds)
    console = Console(width=100)
    console.print(table(rows))
    data = [asdict(row) | {"per_action": row.per_action} for row in rows]
    write_whole(arguments.output, json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
