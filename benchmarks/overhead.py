"""Measure the host time of a step: the cost of a schedule's Python code with a model that computes almost nothing.

Goal: a step takes no more host time with this plugin than with stock Megatron-Core's own functions. Both run
the same chunks through Megatron's own forward and backward steps, in turn in one process. The ratio is the result.

    python benchmarks/overhead.py            # p = 2 and 4 on gloo ranks; p = 4, 8 and 16 played by one rank; many minutes
    python benchmarks/overhead.py --quick    # fewer sizes, fewer steps
    python benchmarks/overhead.py --layers   # only the rows with Transformer Engine's layers

With ``TE``, a chunk has two layers of Transformer Engine's own Python at the widths of TP8, with sequence parallelism. Its
kernels compute next to nothing. ``1f1b`` and ``zb-h1`` are compared with stock's 1F1B of the same layers.

The number of calls of Python functions does not depend on the machine's load. It leaves out the functions that
replace CUDA and NCCL on CPU. Below the table are the five functions with the most calls beyond stock's.

Host time is processor time of the rank's main thread (``time.thread_time``). Waiting for a neighbour does not count,
and a busy machine only affects the caches. All gloo groups of a rank share one device, as everywhere on the CPU lane.
With a polling thread per group, a rank would measure how its main thread and gloo's threads share few cores, which is
irrelevant for NCCL. A played rank runs its real program alone. Its neighbours are torch's ``fake`` backend, whose
messages arrive at once. An action is one forward or one backward of a chunk; I and W count as one.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast
from unittest import mock

from fresh_ranks import run_ranks
from rich import box
from rich.console import Console
from rich.table import Table
from transformer_engine_step import connect_fake_ranks, find_transformer_engine, layers_step

from megatron_pipemem.files import write_whole

ROWS, WIDTH = 2, 8
"""Tokens and features of a message, as few as possible."""

TURN_ACTIONS = 600
"""Least number of a rank's actions in an engine's turn. A shorter turn would measure the machine's fluctuations."""

SCHEDULES = {"1f1b": 1, "interleaved": 2}
"""The schedules of stock Megatron-Core, with their chunks per device."""

LAYER_SCHEDULES = ("1f1b", "zb-h1")
"""The schedules with Transformer Engine's layers. Both are compared with stock's 1F1B."""

LAYER_ACTIONS = 60
"""``TURN_ACTIONS`` with these layers. An action takes a hundred times as long."""

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
    layers: bool = False  # whether chunks have Transformer Engine's layers

    @property
    def actions(self) -> int:
        """Number of forwards and backwards of one rank."""
        return 2 * self.microbatches * SCHEDULES.get(self.schedule, 1)

    @property
    def engines(self) -> tuple[str, ...]:
        return ENGINES[:2] if self.layers else ENGINES


@dataclass(frozen=True)
class Row:
    """Host microseconds of one engine's step, of the slowest rank: the median over rounds.

    ``ratio`` is the median of each round's ratio to stock, so that a change of the machine's speed affects both.
    ``calls`` is the number of calls of Python functions in a step, and ``most_calls`` has the functions with the most
    calls beyond stock's, with the number per action.
    """

    size: Size
    engine: str
    microseconds: float
    ratio: float
    calls: int
    calls_ratio: float
    most_calls: dict[str, float] = field(default_factory=dict)

    @property
    def per_action(self) -> float:
        return self.microseconds / self.size.actions


def sizes(quick: bool) -> list[Size]:
    """Return sizes with all ranks up to p = 4, and with one played middle rank up to p = 16, v = 2, m = 128."""
    if quick:
        tiny = [*(Size(name, 2, 8) for name in SCHEDULES), *(Size(name, 4, 16, played=1) for name in SCHEDULES)]
        return [*tiny, Size("zb-h1", 4, 4, played=1, layers=True)]
    real = [Size(name, p, m) for p, m in ((2, 16), (4, 32)) for name in SCHEDULES]
    played = [Size(name, p, m, played=p // 2) for p, m in ((4, 32), (8, 64), (16, 128)) for name in SCHEDULES]
    return real + played + layer_sizes()


def layer_sizes() -> list[Size]:
    """Return sizes with two numbers of microbatches, because a step also has calls that do not grow with them."""
    return [Size(name, 4, m, played=1, layers=True) for name in LAYER_SCHEDULES for m in (8, 32)]


def run_sizes(all_sizes: Iterable[Size], rounds: int) -> list[Row]:
    """Run every size on fresh processes, with ``rounds`` turns of every engine."""
    rows = []
    for size in all_sizes:
        with tempfile.TemporaryDirectory() as folder:
            processes = size.devices if size.played is None else 1
            steps = max(3, (LAYER_ACTIONS if size.layers else TURN_ACTIONS) // size.actions)
            run_ranks(_rank, (size, rounds, steps, folder), processes, has_imported_megatron=not size.layers)
            measured = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
        rows += [_row(size, engine, measured) for engine in size.engines]
    return rows


def _row(size: Size, engine: str, measured: list[dict[str, Any]]) -> Row:
    """Return an engine's row. ``measured`` has the result of ``measure`` of every process."""

    def slowest(engine: str) -> list[float]:
        return [max(seconds) for seconds in zip(*(own["seconds"][engine] for own in measured), strict=True)]

    def calls(engine: str) -> Counter[str]:
        return max((Counter(own["calls"][engine]) for own in measured), key=Counter.total)

    more = calls(engine) - calls("stock")
    return Row(
        size,
        engine,
        _median(slowest(engine)) * 1e6,
        _median([ours / stock for ours, stock in zip(slowest(engine), slowest("stock"), strict=True)]),
        calls(engine).total(),
        calls(engine).total() / calls("stock").total(),
        {name: number / size.actions for name, number in more.most_common(5)},
    )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _rank(process: int, size: Size, rounds: int, steps: int, folder: str) -> None:
    from megatron_pipemem.tools.cpu import activate

    if size.layers:
        find_transformer_engine()
    activate()
    import torch.distributed as dist

    if size.layers:
        connect_fake_ranks(size.devices, cast(int, size.played))
    elif size.played is None:
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=process, world_size=size.devices)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=size.played, world_size=size.devices)
    # The fake backend invents the other ranks' broadcasts and layers, and no step needs them.
    with ExitStack() as invented:
        if size.played is not None:
            invented.enter_context(mock.patch.object(dist, "broadcast_object_list"))
        if size.layers:
            from megatron_pipemem.mcore.step import forward_backward

            invented.enter_context(mock.patch.object(forward_backward, "check_whole_model"))
        measured = measure(size, rounds, steps, Path(folder) / f"report-{process}")
    write_whole(Path(folder) / f"{process}.json", json.dumps(measured))
    if size.played is None:
        dist.barrier()
    dist.destroy_process_group()


def measure(size: Size, rounds: int, steps: int, report: Path) -> dict[str, Any]:
    """Return this thread's processor time per step (``seconds``), per engine and round, and one step's ``calls``."""
    import torch.distributed as dist

    import megatron_pipemem
    from megatron_pipemem.mcore import plugin
    from megatron_pipemem.mcore.report.run_record import RunRecord

    always = mock.patch.object(RunRecord, "counts", lambda record, program: True)
    steps_of = prepare(size)
    spent: dict[str, list[float]] = {engine: [] for engine in size.engines}
    calls: dict[str, Counter[str]] = {}
    for number, engine in itertools.product(range(rounds + 1), size.engines):
        call = steps_of[engine]
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
            if not number:  # the first round warms up
                calls[engine] = count_calls(call)
        gc.enable()
        if number:
            spent[engine].append(seconds)
        plugin.disable()
    return {"seconds": spent, "calls": calls}


def count_calls(step: Callable[[], object]) -> Counter[str]:
    """Return the number of calls of each Python function in a step, without those that replace CUDA and NCCL on CPU."""
    calls: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/tools/cpu/" not in frame.f_code.co_filename:
            calls[frame.f_code] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    named: Counter[str] = Counter()
    for code, number in calls.items():
        path = Path(code.co_filename)
        named["/".join((*path.parts[-3:-1], f"{path.stem}.{code.co_qualname}"))] += number
    return named


def prepare(size: Size) -> dict[str, Callable[[], object]]:
    """Return each engine's step, with the function that Megatron's module has when it is called."""
    if size.layers:
        return _layers_steps(size)
    import torch
    from stock_steps import tiny_step

    chunks = SCHEDULES[size.schedule]
    step = tiny_step(
        size.devices, chunks, WIDTH, lambda: torch.zeros(ROWS, 1, WIDTH), lambda _: {}, deallocate_pipeline_outputs=True
    )
    keywords = {"num_microbatches": size.microbatches, "seq_length": ROWS, "micro_batch_size": 1}
    return dict.fromkeys(size.engines, lambda: step(data_iterator=[None] * chunks, **keywords))


def _layers_steps(size: Size) -> dict[str, Callable[[], object]]:
    import megatron_pipemem
    from megatron_pipemem.mcore import plugin

    stock = layers_step(size.devices, size.microbatches)
    megatron_pipemem.enable(size.schedule)
    ours = layers_step(size.devices, size.microbatches)
    plugin.disable()
    return {"stock": stock, "pipemem": ours}


def table(rows: list[Row]) -> Table:
    """Return a table of every engine's host time per step and per action, and its ratio to stock's."""
    caption = (
        "p, m: devices, microbatches; us: microseconds of the host; calls: of Python functions per action; to stock: / "
        "stock's, of the columns before"
    )
    printed = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for heading in ("ranks", "schedule", "p", "m", "engine", "us/step", "us/action", "to stock", "calls", "to stock"):
        left = heading in ("ranks", "schedule", "engine")
        printed.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        printed.add_row(
            "gloo" if row.size.played is None else f"rank {row.size.played}" + ", TE" * row.size.layers,
            row.size.schedule,
            str(row.size.devices),
            str(row.size.microbatches),
            row.engine,
            f"{row.microseconds:.0f}",
            f"{row.per_action:.1f}",
            f"{row.ratio:.3f}",
            f"{row.calls / row.size.actions:.0f}",
            f"{row.calls_ratio:.3f}",
        )
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and steps")
    parser.add_argument("--layers", action="store_true", help="only the rows with Transformer Engine's layers")
    parser.add_argument("--rounds", type=int, help="turns of every engine (default: 15, quick 3)")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/overhead.json"), help="JSON of the rows")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (3 if arguments.quick else 15)
    rows = run_sizes(layer_sizes() if arguments.layers else sizes(arguments.quick), rounds)
    console = Console(width=100)
    console.print(table(rows))
    for row in rows:
        if row.size.layers and row.most_calls:
            most = ", ".join(f"{name} {number:.1f}" for name, number in row.most_calls.items())
            console.print(f"{row.size.schedule}, most calls per action beyond stock's: {most}")
    data = [asdict(row) | {"per_action": row.per_action} for row in rows]
    write_whole(arguments.output, json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
