"""Predict the memory that PyTorch's caching allocator takes of a GPU, without a GPU.

One rank of a pipeline runs its program as in experiment B (``gpu/solo_rank.py``), at real size, but with fake tensors,
which hold no memory. Every storage that is made and freed is noted. Two models of the allocator replay the notes: whole
segments, its default, and ``expandable_segments``. They follow the rules of ``CUDACachingAllocator.cpp``: sizes are
rounded up to 512 bytes; at most 1 MiB comes from segments of 2 MiB, less than 10 MiB from segments of 20 MiB, and more
from a segment of its own; the smallest free block that is large enough is taken, and split; free neighbours are joined.

Columns, over the predicted activations as in the table of experiment B: the peak of allocated memory; the peak of
reserved memory, with expandable segments too; the working memory of one action, which is its peak above the larger of
its begin and its end. ``gaps`` is free memory at the peak of reserved memory, and the sizes
that did not fit into it.

With ``--graphs``, every pass is a CUDA graph. Captures allocate from a pool of their own, which keeps its memory. They begin
with giving back the memory that earlier steps have cached.

    python benchmarks/allocator.py [--graphs] [--schedules 1f1b zbv] [--devices 8] [--hidden 4096] [--sequence 4096]
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from weakref import ref

KiB, MiB = 1 << 10, 1 << 20
QUANTUM, SMALL, SMALL_SEGMENT, LARGE_SEGMENT, MIDDLE = 512, MiB, 2 * MiB, 20 * MiB, 10 * MiB
STEPS = 2
"""Steps that allocate gradients before the measured ones, and measured steps, which repeat."""


def rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment. ``before`` and ``after`` are its neighbours in the segment."""

    start: int
    size: int
    is_small: bool
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass(eq=False)
class Allocator:
    """PyTorch's caching allocator of one stream, without a device and without limit."""

    expandable: bool = False
    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    missed: Counter[int] = field(default_factory=Counter)
    """Sizes for which memory was reserved although as much was free, and how often."""
    _free: dict[bool, list[tuple[int, int, Block]]] = field(default_factory=lambda: {True: [], False: []})
    _last: dict[bool, Block] = field(default_factory=dict)
    _top: int = 0

    def allocate(self, nbytes: int) -> Block:
        """Return a new block."""
        size = max(QUANTUM, rounded(nbytes, QUANTUM))
        is_small = size <= SMALL
        free = self._free[is_small]
        at = bisect_left(free, (size, 0))
        if at < len(free):
            block = free.pop(at)[2]
        else:
            if sum(entry[0] for entry in free) >= size:
                self.missed[size] += 1
            block = self._extended(size, is_small) if self.expandable else self._segment(size, is_small)
        block.is_free = False
        if block.size - size >= QUANTUM if is_small else block.size - size > SMALL:
            self._split(block, size)
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back, and join it with its free neighbours."""
        self.allocated -= block.size
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                low, high = sorted((block, other), key=lambda part: part.start)
                low.size, low.after = low.size + high.size, high.after
                if high.after is not None:
                    high.after.before = low
                if self._last.get(block.is_small) is high:
                    self._last[block.is_small] = low
                block = low
        block.is_free = True
        self._add(block)

    def empty_cache(self) -> None:
        """Give back the segments of which no block is in use. Do not call it with ``expandable``."""
        for entries in self._free.values():
            unused = [entry for entry in entries if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(size for size, _, _ in unused)
            entries[:] = [entry for entry in entries if entry not in unused]

    def _segment(self, size: int, is_small: bool) -> Block:
        nbytes = LARGE_SEGMENT if size < MIDDLE else rounded(size, SMALL_SEGMENT)
        nbytes = SMALL_SEGMENT if is_small else nbytes
        self.reserved += nbytes
        self._top += nbytes
        return Block(self._top - nbytes, nbytes, is_small)

    def _extended(self, size: int, is_small: bool) -> Block:
        """Return the block at the end of the pool's segment, extended by whole units to this size at least."""
        last = self._last.get(is_small)
        if last is not None and last.is_free:
            block = last
            self._remove(block)
        else:
            start = 0 if last is None else last.start + last.size
            block = self._last[is_small] = Block(start, 0, is_small, before=last)
            if last is not None:
                last.after = block
        more = rounded(size - block.size, SMALL_SEGMENT if is_small else LARGE_SEGMENT)
        block.size += more
        self.reserved += more
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.start + size, block.size - size, block.is_small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        if self._last.get(block.is_small) is block:
            self._last[block.is_small] = rest
        block.after, block.size = rest, size
        self._add(rest)

    def _add(self, block: Block) -> None:
        insort(self._free[block.is_small], (block.size, block.start, block))

    def _remove(self, block: Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect_left(free, (block.size, block.start)))


class Event(NamedTuple):
    """A storage that is made or freed, or an action that begins. ``nbytes`` is 0 if the storage is freed."""

    storage: int = 0
    nbytes: int = 0
    action: str = ""
    is_captured: bool = False


class Replay(NamedTuple):
    """Bytes in addition to those that are allocated before the measured steps."""

    allocated: int
    reserved: int
    working: int  # of one action
    missed: Counter[int]


BEGIN, END = "begin of a step", "end of a step"
EMPTY_CACHE = "cached memory is given back"


def replay(events: Iterable[Event], allocator: Allocator, pool: Allocator | None = None) -> Replay:
    """Return the bytes that the steps after the first ``STEPS`` take. Captures allocate from ``pool``."""
    pool = pool or allocator
    owners = {id(owner): owner for owner in (allocator, pool)}.values()
    blocks: dict[int, tuple[Allocator, Block]] = {}
    steps = permanent = begin = highest = working = peak = allocated = reserved = 0
    for storage, nbytes, action, is_captured in events:
        if action == EMPTY_CACHE:
            allocator.empty_cache()
            reserved = 0
        elif action:
            if steps > STEPS:
                working = max(working, highest - max(begin, allocated))
            begin = highest = allocated
            if action == BEGIN:
                steps += 1
                if steps == 1:
                    allocator.missed.clear()
                if steps == STEPS + 1:
                    permanent = peak = allocated
        elif nbytes:
            owner = pool if is_captured else allocator
            blocks[storage] = owner, owner.allocate(nbytes)
        elif storage in blocks:  # storages of no bytes have none
            owner, block = blocks.pop(storage)
            owner.free(block)
        allocated = sum(owner.allocated for owner in owners)
        highest, peak = max(highest, allocated), max(peak, allocated)
        reserved = max(reserved, sum(owner.reserved for owner in owners))
    missed = sum((owner.missed for owner in owners), Counter[int]())
    return Replay(peak - permanent, reserved - permanent, working, missed)


class _Storage(ref):
    """A weak reference to a storage, with its number."""

    __slots__ = ("number",)

    def __new__(cls, storage: Any, freed: Any, number: int) -> _Storage:
        return super().__new__(cls, storage, freed)

    def __init__(self, storage: Any, freed: Any, number: int):
        self.number = number


class _Graph:
    """Replaces ``torch.cuda.CUDAGraph``. The storages that are made in its capture are noted as such."""

    capturing = False

    def capture_begin(self, **_: Any) -> None:
        _Graph.capturing = True

    def capture_end(self) -> None:
        _Graph.capturing = False

    def replay(self) -> None: ...


@contextmanager
def noted(events: list[Event]) -> Iterator[None]:
    """Note the storages that operations make, and the actions of executors, while the block runs."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from megatron_pipemem.runtime.executor import Executor, Handler, Instruction

    storages: dict[int, _Storage] = {}

    def note(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        earlier = storages.get(storage._cdata)
        if earlier is None or earlier() is None:
            number = len(events) + 1
            storages[storage._cdata] = _Storage(storage, lambda gone: events.append(Event(gone.number)), number)
            events.append(Event(number, storage.nbytes(), is_captured=_Graph.capturing))

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            for value in tree_leaves(result):
                if isinstance(value, torch.Tensor):
                    note(value)
            return result

    run = Executor.run

    def named(handler: Handler) -> Handler:
        def handle(instruction: Instruction) -> None:
            events.append(Event(action=str(instruction.action)))
            handler(instruction)

        return handle

    def run_noted(executor: Executor, until: int | None = None) -> None:
        executor.handlers |= {kind: named(handler) for kind, handler in executor.handlers.items()}
        events.append(Event(action=BEGIN))
        run(executor, until)
        events.append(Event(action=END))

    with (
        mock.patch.object(Executor, "run", run_noted),
        mock.patch.object(torch.cuda, "CUDAGraph", _Graph),
        mock.patch.object(torch.cuda, "graph_pool_handle", object),
        mock.patch.object(torch.cuda, "empty_cache", lambda: events.append(Event(action=EMPTY_CACHE))),
        Notes(),
    ):
        yield


def trace(model: Any, devices: int, name: str, graphs: bool = False) -> tuple[list[Event], int]:
    """Return the notes of the first rank's steps, and the bytes of activations that the plugin predicts."""
    import json
    from tempfile import TemporaryDirectory

    import gpt_chunks
    import solo_rank
    import torch
    import torch.distributed as dist
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatron_pipemem.features.graphs.megatron import step as graphed

    def as_own(results: list[Any], own: Any, group: Any = None) -> None:
        results[:] = [own] * len(results)

    def batches(size: Any, step: int = 0) -> Iterator[dict[str, torch.Tensor | None]]:
        tokens, places = (torch.zeros(size.batch, size.sequence + more, dtype=torch.int64) for more in (1, 0))
        while True:
            labels = tokens[:, 1:].contiguous()
            yield {"input_ids": tokens[:, :-1], "position_ids": places, "attention_mask": None, "labels": labels}

    def convert(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        for parameter in module.parameters():  # fake parameters cannot be swapped, as PyTorch's method does
            parameter.data = parameter.data.to(dtype)
        return module

    events: list[Event] = []
    with ExitStack() as stack:
        for owner, attribute, stand_in in (
            (dist, "all_gather_object", as_own),
            (gpt_chunks, "batches", batches),
            (torch.nn.Module, "to", convert),
            (random, "_get_share_storage", lambda: lambda output, source: None),
            (tensor_parallel.get_cuda_rng_tracker(), "fork", nullcontext),
            # Fake parameters have no addresses, and these have no gradient buffers.
            (graphed, "_parameters", lambda chunks: ()),
            (graphed, "check_chunks_for_graphs", lambda chunks: None),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, stand_in))
        folder = stack.enter_context(TemporaryDirectory())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        with noted(events):
            solo_rank.run_steps(name, "local", model, devices, None, steps=STEPS, graphs=graphs)
        report = Path(folder) / "report.json"
        solo_rank.run_steps(name, "local", model, devices, report, steps=1)
        return events, json.loads(report.read_text())["ranks"][0]["predicted_peak_bytes"]


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1", "zbv", "v-half", "v-min"])
    for name, default in (("devices", 8), ("hidden", 4096), ("sequence", 4096), ("layers", 4), ("vocabulary", 32000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--graphs", action="store_true", help="capture every pass as a CUDA graph")
    options = parser.parse_args()
    from megatron_pipemem.tools.cpu import activate

    activate()
    sys.path.insert(0, str(Path(__file__).parent / "gpu"))
    import solo_rank
    import torch.distributed as dist
    from gpt_chunks import Size
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = Size(options.hidden, options.hidden // 128, options.layers, options.sequence, options.vocabulary)
    model = solo_rank.Model(
        "GPT", size, ("local",), (options.devices,), (0,), (), 3, options={"cuda_graph_warmup_steps": STEPS}
    )
    write(
        "| schedule | activations GB | allocated | reserved | expandable | working MB | gaps MB: sizes that did not fit |"
    )
    write("|---|---|---|---|---|---|---|")
    for name in options.schedules:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.devices)
        events, activations = trace(model, options.devices, name, options.graphs)
        dist.destroy_process_group()
        segments = replay(events, Allocator(), Allocator() if options.graphs else None)
        reserved = (
            [segments.reserved] if options.graphs else [segments.reserved, replay(events, Allocator(True)).reserved]
        )
        over = [f"{100 * (nbytes / activations - 1):.1f} %" for nbytes in (segments.allocated, *reserved)]
        over += ["-"] * options.graphs
        sizes = ", ".join(f"{nbytes / MiB:.4g} MiB x {times}" for nbytes, times in segments.missed.most_common(3))
        gaps = (segments.reserved - segments.allocated) / 1e6
        row = [f"`{name}`", f"{activations / 1e9:.3f}", *over, f"{segments.working / 1e6:.0f}", f"{gaps:.0f}: {sizes}"]
        write(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
