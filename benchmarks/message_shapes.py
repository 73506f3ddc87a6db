"""Count messages, and waits of hosts for devices, in steps whose microbatches differ.

Under ``variable_seq_lengths`` the receiver of a message does not know its shape. Stock Megatron-Core's functions exchange
shapes before every message. This plugin does so with ``message_shapes="message"``. By default it exchanges all shapes of a step
at its start.

    python benchmarks/message_shapes.py      # under a minute

The counts are from four gloo ranks, in the second step of chunks that compute almost nothing. Nothing is timed. A wait
is a place where the host reads a number from a device or synchronises with it. On a GPU it stops the host's launches.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from unittest import mock

from fresh_ranks import run_ranks
from rich.console import Console
from rich.table import Table

from megatron_pipemem.files import write_whole

DEVICES, WIDTH = 4, 8
MICROBATCHES = 16
SCHEDULES = {"1f1b": 1, "interleaved": 2}
"""The schedules of stock Megatron-Core, with their chunks per device."""
ENGINES = {"stock": None, "pipemem, headers": "message", "pipemem": "step"}


@dataclass(frozen=True)
class Row:
    """The counts of one engine's step."""

    schedule: str
    engine: str
    messages: int  # between all ranks, point to point
    collectives: int  # over the pipeline
    waits: int  # of the host that waits most often


def run() -> list[Row]:
    """Count the steps of all engines on fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_rank, (folder,), DEVICES)
        counts = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(DEVICES)]
    return [
        Row(
            schedule,
            engine,
            sum(own["send"] for own in everyones),
            max(own["allreduce_"] for own in everyones),
            max(own["waits"] for own in everyones),
        )
        for (schedule, engine), *everyones in zip(product(SCHEDULES, ENGINES), *counts, strict=True)
    ]


def _rank(rank: int, folder: str) -> None:
    import torch.distributed as dist

    import megatron_pipemem

    logging.disable(logging.INFO)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=DEVICES)
    counts = []
    for schedule, chunks in SCHEDULES.items():
        step = _step(chunks)
        for shapes in ENGINES.values():
            if shapes is not None:
                megatron_pipemem.enable(schedule, message_shapes=shapes)
            step()  # compiles the program and opens its channels
            dist.barrier()
            with _counting() as counted:
                step()
            counts.append({kind: counted[kind] for kind in ("send", "allreduce_", "waits")})
            megatron_pipemem.disable()
    write_whole(Path(folder) / f"{rank}.json", json.dumps(counts))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _counting() -> Iterator[Counter[str]]:
    """Count the messages and waits of this process within the block."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counted: Counter[str] = Counter()

    class Communication(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "c10d":
                counted[function._schema.name.removeprefix("c10d::")] += 1
            return function(*args, **kwargs or {})

    def noting(original: Callable) -> Callable:
        def call(*args, **kwargs):
            counted["waits"] += 1
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name in ((torch.Tensor, "tolist"), (torch.Tensor, "item"), (torch.cuda, "synchronize")):
            stack.enter_context(mock.patch.object(owner, name, noting(getattr(owner, name))))
        stack.enter_context(Communication())
        yield counted


def _step(chunks: int) -> Callable[[], object]:
    """Return a step of chunks that compute almost nothing, with the function that Megatron's module has when it is called."""
    import torch
    from stock_steps import tiny_step

    step = tiny_step(
        DEVICES,
        chunks,
        WIDTH,
        lambda input_ids: input_ids.t().unsqueeze(-1).expand(-1, -1, WIDTH),
        lambda data: {"input_ids": next(data)},
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # Megatron requires it for variable lengths, even without experts
    )
    return lambda: step(
        data_iterator=[(torch.ones(1, 1 + number % 5) for number in range(MICROBATCHES)) for _ in range(chunks)],
        num_microbatches=MICROBATCHES,
        seq_length=5,
        micro_batch_size=1,
    )


def table(rows: list[Row]) -> Table:
    """Return a table of every engine's messages and waits."""
    printed = Table(title=f"one step of {MICROBATCHES} microbatches that differ, {DEVICES} pipeline ranks")
    for heading in ("schedule", "engine", "messages", "collectives", "waits of a host"):
        printed.add_column(heading, justify="left" if heading in ("schedule", "engine") else "right")
    for row in rows:
        printed.add_row(row.schedule, row.engine, str(row.messages), str(row.collectives), str(row.waits))
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("out/benchmarks/message_shapes.json"), help="JSON of the rows"
    )
    arguments = parser.parse_args()
    rows = run()
    Console(width=100).print(table(rows))
    write_whole(arguments.output, json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
