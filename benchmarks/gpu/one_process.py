"""Experiment H: step times of pipeline schedules on one GPU whose multiprocessors are divided among the ranks.

One process plays all ranks (``hands.py``). Each has a stream of a green context with a quarter, or an eighth, of the
multiprocessors (``shares.py``). So real kernels of all ranks run at once, a rank that waits leaves its share idle, and a
step shows its bubble. This project's executor and transport, and stock Megatron-Core's own functions, run chunks of
Megatron's GPT that start from the same weights. Messages are copies on streams of their own.

Claims: a step takes its simulated time within 3 %, with the passes as they were in the step; the order of the schedules
by time is the simulated one; losses are those of stock's 1F1B, to the bit.

    python benchmarks/gpu/one_process.py [--part p4 | p8 | more] [--rehearse]

In a rehearsal, passes and messages take virtual time, and each step of ours must take exactly as long as its simulation.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import proof

if TYPE_CHECKING:
    from speed import Case, Measured, Table, Workload

    from megatron_pipemem import Costs
    from megatron_pipemem.schedule.action import Action
    from megatron_pipemem.schedule.placement import Placement
    from megatron_pipemem.schedule.schedule import Program, Schedule

PARTS = ("p4", "p8", "more")
"""Four ranks, eight ranks, and all other workloads."""
TOLERANCE, REHEARSED_TOLERANCE = 0.03, 1e-9
PRICES, MESSAGE_SECONDS = {"F": 1.0, "I": 1.25, "W": 0.75, "B": 2.0}, 0.05
"""Virtual seconds of the passes of a device's share, and of a message."""


def main() -> int:
    # With fewer hardware queues than streams, streams would wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    options = proof.arguments(__doc__, "one_process", PARTS)
    import torch.distributed as dist
    from speed import Table
    from torch.testing._internal.distributed.fake_pg import FakeStore

    report = proof.Report(options.output, options.rehearse)
    for workload in workloads(options.part, options.rehearse):
        table = Table(report, workload, REHEARSED_TOLERANCE if options.rehearse else TOLERANCE)
        if table.missing():
            # Megatron asks for the size of the world. The other ranks of this backend do not answer.
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workload.devices)
            measure(table, options.rehearse)
            dist.destroy_process_group()
        table.add_order()
    return report.finish()


def workloads(part: str, rehearse: bool) -> list[Workload]:
    """Return the workloads of a part."""
    import speed

    if rehearse:
        return [speed.Workload(int(part[1:]), 8, 32)] if part != "more" else []
    eight = speed.Workload(8, 16)
    if part == "more":
        return [workload for workload in speed.workloads((4, 8)) if workload != eight]
    return [speed.FIRST if part == "p4" else eight]


def measure(table: Table, rehearse: bool) -> None:
    """Add the missing rows of a workload."""
    from hands import without_groups
    from megatron.core import parallel_state

    bench = Bench(table.workload, rehearse)
    if not rehearse:
        table.report.measure(f"shares of the multiprocessors, p = {table.workload.devices}", bench.shares)
    for case in table.missing():
        proof.say(f"{case}, {table.workload}")
        with without_groups(), nullcontext() if case.stock else enabled():
            table.add(case, bench.run(case, table.costs()))
    bench.release()
    parallel_state.destroy_model_parallel()


@contextmanager
def enabled() -> Iterator[None]:
    """Let linear layers split their backwards where a pass collects weight gradients. The schedule does not matter."""
    import megatron_pipemem

    megatron_pipemem.enable("zb-h1")
    try:
        yield
    finally:
        megatron_pipemem.disable()


class Bench:
    """The ranks of a workload: their streams, their chunks, and the steps that they run.

    Args:
        workload: what the ranks train.
        virtual: whether passes and messages take virtual time.
    """

    def __init__(self, workload: Workload, virtual: bool):
        import torch
        from gpt_chunks import Size, open_pipelines
        from hands import Crew, Gpu, Virtual
        from shares import green_streams
        from speed import LAYERS, SEQUENCE, VOCABULARY

        self.workload, self.virtual = workload, virtual
        self.machine: Any
        if virtual:
            self.machine = Virtual(workload.devices, MESSAGE_SECONDS)
            self.size = Size(workload.hidden, 2, LAYERS, 16, 64, dtype=torch.float32)
        else:
            self.machine = Gpu(green_streams(workload.devices))
            self.size = Size(workload.hidden, workload.hidden // 128, LAYERS, SEQUENCE, VOCABULARY)
        self.crew = Crew(workload.devices)
        self._chunks: tuple[object, list[list[Any]]] = (None, [])
        open_pipelines(workload.devices, 1)

    def shares(self) -> tuple[dict[str, object], list[str]]:
        """Return where each rank's kernels run, and how much slower they are while all ranks run them."""
        import shares
        import torch

        streams = self.machine.streams
        values, missed = shares.overlaps([shares.multiprocessors_of(stream) for stream in streams])
        for name in shares.WORKS:
            works = [shares.WORKS[name]() for _ in streams]
            with torch.cuda.stream(streams[0]):
                alone = shares.milliseconds(works[0])

            def together(works=works) -> None:
                begin = self.machine.now()
                for rank, work in enumerate(works):
                    with self.machine.on(rank):
                        self.machine.wait(begin)
                        work()
                        end = self.machine.now()
                    self.machine.wait(end)

            values[f"{name}_slower_together"] = shares.milliseconds(together) / alone
        return values, missed

    def run(self, case: Case, costs: Costs | None) -> Measured:
        """Return what a case measured. ``costs`` are the prices of ``auto``."""
        from speed import Measured, summary

        from megatron_pipemem.schedule.lowering import lower
        from megatron_pipemem.schedule.validator import validate_program

        schedule = self._schedule(case, costs)
        if case.stock:
            seconds, losses = self._timed(lambda: self._stock_step(case, schedule.placement))
            with self._memory() as memory:
                self._stock_step(case, schedule.placement)
            return Measured(seconds, losses, *memory)
        program = lower(schedule)
        validate_program(program)
        seconds, losses = self._timed(lambda: self._step(program))
        observations: dict[int, Any] = {}
        with self._memory() as memory:
            self._step(program, observations)
        medians, predicted = summary(program, observations)
        return Measured(seconds, losses, *memory, medians, self._message_seconds(), predicted, schedule.to_csv())

    def release(self) -> None:
        """Free the chunks."""
        import torch

        self._chunks = (None, [])
        gc.collect()
        torch.cuda.empty_cache()

    def _schedule(self, case: Case, costs: Costs | None) -> Schedule:
        from megatron_pipemem import build_schedule, search_schedule

        size: dict[str, Any] = {
            "num_devices": self.workload.devices,
            "num_microbatches": self.workload.microbatches,
        }
        if case.cap is None:
            return build_schedule(case.schedule, **size)
        return search_schedule(**size, costs=costs, memory_cap=case.cap, max_chunks=case.chunks).schedule

    def _timed(self, step: Callable[[], list[Any]]) -> tuple[list[float], list[float]]:
        """Return the seconds of steps that follow each other, and the losses of the last one."""
        import torch
        from speed import STEPS, WARM

        for _ in range(1 if self.virtual else WARM):
            step()
        torch.cuda.synchronize()
        marks = [self.machine.mark()]
        for _ in range(1 if self.virtual else STEPS):
            losses = step()
            marks.append(self.machine.mark())
        torch.cuda.synchronize()
        seconds = [self.machine.seconds(*ends) for ends in zip(marks, marks[1:], strict=False)]
        return seconds, [loss["lm loss"].item() for loss in losses]

    def _play(self, work: Callable[[int, Any], Any]) -> list[Any]:
        """Run ``work(rank, office)`` of all ranks from a common start, and return the results that are not empty."""
        from hands import Office, Turns

        turns = Turns(self.crew)
        office = Office(self.machine, turns)
        start, ends = self.machine.mark(), []

        def one(rank: int) -> Any:
            with self.machine.on(rank):
                self.machine.wait(start)
                result = work(rank, office)
                ends.append(self.machine.now())
                return result

        results = turns.run(one)
        for end in ends:
            self.machine.join(end)
        return next((result for result in results if result), [])

    def _step(self, program: Program, observations: dict[int, Any] | None = None) -> list[Any]:
        """Run a step of this project, and return its losses. Ranks add to ``observations`` if there are any."""
        from hands import VirtualTrace, pipeline

        from megatron_pipemem.mcore.step.extension import Observation, observe
        from megatron_pipemem.runtime.executor import Executor
        from megatron_pipemem.runtime.transport import Transport, polls_departures

        placement = program.placement
        chunks = self._built(placement, stock=False)

        def price(action: Action) -> float:
            return PRICES[str(action.kind)] / placement.num_chunks

        def work(rank: int, office: Any) -> list[Any]:
            observation = Observation(None, None) if observations is None else observe(chunks[rank])
            if self.virtual:
                observation = Observation(observation.ledger, VirtualTrace(self.machine, price))  # type: ignore[arg-type]
            if observations is not None:
                observations[rank] = observation
            excludes = () if observation.ledger is None else (observation.ledger.exclude,)
            stages = self._stages(placement, rank, chunks[rank], excludes)
            transport = Transport(pipeline(placement, rank, office), self._message(), polls=polls_departures(program))
            Executor(program, rank, stages, transport, ledger=observation.ledger, trace=observation.trace).run()
            return next(iter(stages.values())).step.loss_data

        return self._play(work)

    def _stages(self, placement: Placement, rank: int, chunks: Sequence[Any], excludes: tuple) -> dict[int, Any]:
        import torch
        from gpt_chunks import batches, forward_step

        from megatron_pipemem.mcore.model.stages import ChunkStage, StepContext, watch_batches
        from megatron_pipemem.mcore.model.transformer_engine import delayed_modules

        context = StepContext(
            chunks[0].config,
            forward_step,
            self.workload.microbatches,
            1,
            False,
            False,
            None,
            False,
            num_tokens=torch.zeros([], dtype=torch.int, device=torch.cuda.current_device()),
        )
        return {
            stage: ChunkStage(
                context,
                chunk,
                watch_batches(batches(self.size), *excludes),
                number,
                len(chunks),
                placement.next_stage(stage) is None,
                AnyRank(),  # type: ignore[arg-type]
                delayed_modules(chunk),
                excludes,
            )
            for number, (stage, chunk) in enumerate(zip(placement.stages[rank], chunks, strict=True))
        }

    def _stock_step(self, case: Case, placement: Placement) -> list[Any]:
        """Run a step of Megatron's own function, and return its losses."""
        from gpt_chunks import batches, forward_step
        from hands import Communicator, Rank
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.process_groups_config import ProcessGroupCollection

        chunks = self._built(placement, stock=True)
        function = getattr(
            schedules, f"forward_backward_pipelining_with{'' if case.chunks > 1 else 'out'}_interleaving"
        )

        def work(rank: int, office: Any) -> list[Any]:
            groups = ProcessGroupCollection()
            groups.pp = Rank(rank, self.workload.devices)
            groups.tp = groups.cp = Rank(0, 1)
            return function(
                forward_step_func=forward_step,
                data_iterator=[batches(self.size) for _ in chunks[rank]],
                model=chunks[rank],
                num_microbatches=self.workload.microbatches,
                p2p_communicator=Communicator(groups.pp, chunks[rank][0].config, office),
                pg_collection=groups,
                **self.size.message,
            )

        with self._virtual_passes(case.chunks) if self.virtual else nullcontext():
            return self._play(work)

    @contextmanager
    def _virtual_passes(self, chunks: int) -> Iterator[None]:
        """Let the passes of Megatron's functions take virtual time within a ``with`` block."""
        from megatron.core.pipeline_parallel import schedules

        def slowed(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> Any:
                result = original(*arguments, **named)
                self.machine.run(PRICES[kind] / chunks)
                return result

            return run

        forward, backward = slowed(schedules.forward_step, "F"), slowed(schedules.backward_step, "B")
        with mock.patch.multiple(schedules, forward_step=forward, backward_step=backward):
            yield

    def _built(self, placement: Placement, stock: bool) -> list[list[Any]]:
        """Return the chunks of every rank. Those of the last placement are kept."""
        key = placement.devices, stock
        if self._chunks[0] != key:
            self.release()
            self._chunks = key, [self._chunks_of(placement, rank) for rank in range(self.workload.devices)]
        return self._chunks[1]

    def _chunks_of(self, placement: Placement, rank: int) -> list[Any]:
        from gpt_chunks import builder, make_config, same_values
        from megatron.core.process_groups_config import ProcessGroupCollection
        from speed import DEVIATION

        layers, stages = self.workload.layers, placement.stages[rank]
        config = make_config(self.size, self.workload.devices, len(stages), layers)
        build, groups = builder(self.size, config, layers), ProcessGroupCollection.use_mpu_process_groups()
        chunks = []
        for number, stage in enumerate(stages):
            chunk = build(
                pre_process=stage == 0,
                post_process=placement.next_stage(stage) is None,
                vp_stage=number if len(stages) > 1 else None,
                pg_collection=groups,
            )
            # Megatron numbers the layers of this process's rank.
            for layer, number_in_model in zip(
                chunk.decoder.layers, self._layer_numbers(stage, len(stages)), strict=True
            ):
                layer.layer_number = number_in_model
            same_values(chunk, DEVIATION)
            chunks.append(chunk)
        return chunks

    def _layer_numbers(self, stage: int, chunks: int) -> range:
        count = self.size.layers // chunks
        return range(stage * count + 1, (stage + 1) * count + 1)

    def _message(self) -> Any:
        import torch

        from megatron_pipemem.runtime.transport import MessageFormat

        shape = (self.size.sequence, self.size.batch, self.size.hidden)
        return MessageFormat(shape, self.size.dtype, torch.cuda.current_device())

    def _message_seconds(self) -> float:
        if self.virtual:
            return MESSAGE_SECONDS
        import shares
        import torch

        message = self._message()
        payload = torch.empty(message.shape, dtype=message.dtype, device="cuda")
        return shares.milliseconds(lambda: torch.empty_like(payload).copy_(payload)) / 1e3

    @contextmanager
    def _memory(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield lists of every rank's most allocated and reserved bytes in the block, which end with the block."""
        import torch

        results: tuple[list[int], list[int]] = ([], [])
        if self.virtual:  # PyTorch's CPU allocator has no statistics
            yield results
            return
        memory = torch.cuda.memory
        torch.cuda.synchronize()
        before = memory._snapshot()["segments"]
        try:
            memory._record_memory_history(enabled="all", context=None, max_entries=1 << 20)
            yield results
            torch.cuda.synchronize()
            snapshot = memory._snapshot()
        finally:
            memory._record_memory_history(enabled=None)
        streams = [stream.cuda_stream for stream in self.machine.streams]
        for result, peaks in zip(results, peaks_of(streams, before, snapshot), strict=True):
            result += peaks


class AnyRank:
    """Takes the place of the plugin's chunk placement: no chunk needs Megatron to see another rank."""

    def chunk(self, chunk: int) -> ExitStack:
        return ExitStack()


def peaks_of(
    streams: Sequence[int], before: Sequence[Mapping[str, Any]], snapshot: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """Return the most bytes that the streams' blocks had in a recorded step, and the reserved ones, over ``before``.

    ``before`` has the allocator's segments at the start of the step, and ``snapshot`` the segments and the trace at its
    end, as ``torch.cuda.memory._snapshot`` gives them.
    """
    held: dict[int, int] = defaultdict(int)
    peak: dict[int, int] = defaultdict(int)
    for entry in snapshot["device_traces"][0]:
        sign = {"alloc": 1, "free_completed": -1}.get(entry["action"], 0)
        held[entry["stream"]] += sign * entry["size"]
        peak[entry["stream"]] = max(peak[entry["stream"]], held[entry["stream"]])
    reserved: dict[int, int] = defaultdict(int)
    for segment in before:
        reserved[segment["stream"]] -= segment["allocated_size"]
    for segment in snapshot["segments"]:
        reserved[segment["stream"]] += segment["total_size"]
    return [peak[stream] for stream in streams], [reserved[stream] for stream in streams]


if __name__ == "__main__":
    sys.exit(main())
