"""Experiment I: step times of pipeline schedules in four NCCL processes, each with a quarter of one GPU.

CUDA's multi-process service (MPS) lets kernels of several processes run at once, and gives each process a share of the
multiprocessors, so a step shows its bubble. Everything else is as on four GPUs: the plugin as ``enable()`` starts it,
stock Megatron-Core's own functions, NCCL's messages (2.30 and later; one thread block each, a thirty-third of a share),
an all-reduce after every step as for the norm of the gradients, and each process's own allocator.

Claims: a step takes its simulated time within 5 %, with passes and messages as measured; the order of the schedules by
time is the simulated one; losses are those of stock's 1F1B, to the bit.

    python benchmarks/gpu/processes.py [--part p4 | more] [--rehearse]
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest import mock

import proof
from four_ranks import RANKS, Setting, await_result, start, stop

from megatron_pipemem.files import write_whole

if TYPE_CHECKING:
    from speed import Case, Measured, Table, Workload

    from megatron_pipemem import Costs

PARTS = ("p4", "more")
"""The first workload, and all others."""
TOLERANCE = 0.05
COSTS = "costs.json"
"""The prices of ``auto``, which the ranks await in the folder of their results."""
REHEARSED = ("1f1b", "zb-h1", "interleaved", "auto")
FIRST_SECONDS, CASE_SECONDS, REHEARSED_SECONDS = 150, 60, 600
"""How long the ranks may take to start, and for each case, before they count as stuck. A rehearsal may share a busy machine."""


@dataclass(frozen=True)
class Attempt:
    """A way to divide the GPU.

    Args:
        name: stands in its row.
        has_limit: whether MPS limits a process to its share. Otherwise, a green context does.
        environment: of the ranks.
    """

    name: str
    has_limit: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


ATTEMPTS = (
    Attempt("MPS"),
    Attempt("green contexts under MPS", has_limit=False),
    Attempt("MPS, messages through the host", environment={"NCCL_P2P_DISABLE": "1"}),
)
"""The next one runs the missing cases if shares overlap, or if a case does not end."""


def main() -> int:
    if "--rank" in sys.argv:
        return run_rank(json.loads(sys.argv[sys.argv.index("--rank") + 1]))
    options = proof.arguments(__doc__, "processes", PARTS)
    import speed

    report = proof.Report(options.output, options.rehearse)
    workloads = [speed.FIRST] if options.part == "p4" else speed.workloads((RANKS,))
    cases: Sequence[Case] = speed.CASES
    if options.rehearse:
        workloads = [speed.Workload(RANKS, 4, 32)] if options.part == "p4" else []
        cases = [case for case in speed.CASES if case.schedule in REHEARSED and case.cap != 0.75]
    for workload in workloads:
        table = speed.Table(report, workload, None if options.rehearse else TOLERANCE)
        for attempt in ATTEMPTS[:1] if options.rehearse else ATTEMPTS:
            if not table.missing(cases) or run_attempt(attempt, table, cases, options.rehearse):
                break
        table.add_order(cases)
    return report.finish()


def run_attempt(attempt: Attempt, table: Table, cases: Sequence[Case], rehearse: bool) -> bool:
    """Add the rows of missing cases. Return whether the shares are apart and every case has ended."""
    from speed import PRICED, Measured

    missing, report = table.missing(cases), table.report
    with ranks_of(attempt, table.workload, missing, rehearse) as (folder, ranks):
        shares = await_result(folder / "0", ranks, REHEARSED_SECONDS if rehearse else FIRST_SECONDS)
        if isinstance(shares, str):
            shares = {"values": {}, "missed": [shares]}
        name = f"shares of the multiprocessors, {attempt.name}"
        if not rehearse and not report.has(name):
            report.add(name, shares["values"], shares["missed"])
        if shares["missed"]:
            proof.say(f"{name}: {'; '.join(shares['missed'])}")
            return False
        for number, case in enumerate(missing, start=1):
            proof.say(f"{case}, {table.workload}, {attempt.name}")
            result: dict | str = f"{PRICED} has not run, whose passes are the prices"
            if case.cap is None or write_costs(folder / COSTS, table.costs()):
                result = await_result(folder / str(number), ranks, REHEARSED_SECONDS if rehearse else CASE_SECONDS)
            if isinstance(result, str):
                table.add_failure(case, result)
                return False
            table.add(case, Measured(**result))
    return True


@contextmanager
def ranks_of(
    attempt: Attempt, workload: Workload, cases: Sequence[Case], rehearse: bool
) -> Iterator[tuple[Path, list[Any]]]:
    """Start the ranks, and yield the folder of their results and their processes, which end with the block."""
    from shares import mps

    plan = {
        "cases": [asdict(case) for case in cases],
        "workload": asdict(workload),
        "is_green": not attempt.has_limit,
        "rehearse": rehearse,
    }
    limit = 100 // RANKS if attempt.has_limit else None
    service: AbstractContextManager[Mapping[str, str]] = nullcontext({}) if rehearse else mps(limit)
    with service as environment, TemporaryDirectory() as folder:
        more = {"NCCL_NVLS_ENABLE": "0", **environment, **attempt.environment}
        with mock.patch.dict(os.environ, more):
            setting = Setting(8, bound=False)
            ranks = start(Path(__file__), plan, setting, Path(folder), run_rank if rehearse else None)
        try:
            yield Path(folder), ranks
        finally:
            stop(ranks)


def write_costs(path: Path, costs: Costs | None) -> bool:
    """Write the file that the ranks await, and return whether there are costs."""
    names = ("forward", "backward_input", "backward_weight", "p2p")
    if costs is not None:
        write_whole(path, json.dumps({name: getattr(costs, name) for name in names}))
    return costs is not None


def run_rank(plan: dict) -> int:
    """One rank: the shares, then every case in turn. The first rank leaves the results of all in files."""
    if plan["rehearse"]:
        from megatron_pipemem.tools.cpu import activate

        activate()
    import torch
    import torch.distributed as dist
    from speed import Case, Workload

    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    folder = Path(plan["folder"])
    if plan["is_green"]:
        from shares import green_streams

        torch.cuda.set_stream(green_streams(RANKS)[dist.get_rank()])
    values, missed = ({}, []) if plan["rehearse"] else shares_of_ranks()
    leave(folder / "0", {"values": values, "missed": missed})
    for number, fields in enumerate(plan["cases"], start=1):
        measured = measure(Case(**fields), Workload(**plan["workload"]), folder / COSTS, plan["rehearse"])
        leave(folder / str(number), asdict(measured))
    dist.destroy_process_group()
    return 0


def leave(path: Path, result: dict[str, Any]) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        write_whole(path, json.dumps(result))


def gathered(own: Any) -> list[Any]:
    """Return the values of all ranks."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    return values


def shares_of_ranks() -> tuple[dict[str, object], list[str]]:
    """Return where each rank's kernels run, and how much slower they are while all ranks run them."""
    import shares
    import torch
    import torch.distributed as dist

    values, missed = shares.overlaps(gathered(shares.multiprocessors_of(torch.cuda.current_stream())))
    for name, make_work in shares.WORKS.items():
        work = make_work()
        together = max(gathered(shares.milliseconds(work)))
        alone = 0.0
        for rank in range(RANKS):
            dist.barrier()
            if dist.get_rank() == rank:
                alone = shares.milliseconds(work)
        dist.barrier()
        values[f"{name}_slower_together"] = together / max(gathered(alone))
    return values, missed


@dataclass
class Watch:
    """Keeps what the plugin makes for its steps on this rank, and observes a step on demand.

    Args:
        observes: whether the next step counts its bytes and times its passes.
        program: of the last step.
        transport: of the last step.
        observation: of the last step.
        bytes_per_edge: what the channels of the pipeline took of the GPU, over their number.
    """

    observes: bool = False
    program: Any = None
    transport: Any = None
    observation: Any = None
    bytes_per_edge: float = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        module = "megatron_pipemem.mcore.step.forward_backward"
        watched = {"observe": self._observe, "Executor": self._make, "connect": self._connect}
        with ExitStack() as stack:
            for name, stand_in in watched.items():
                stack.enter_context(mock.patch(f"{module}.{name}", stand_in))
            yield

    def _observe(self, chunks: Any, *arguments: Any, **named: Any) -> Any:
        from megatron_pipemem.mcore.step.extension import observe

        self.observation = observe(chunks) if self.observes else observe(chunks, *arguments, **named)
        return self.observation

    def _make(self, program: Any, device: int, stages: Any, transport: Any, *more: Any, **named: Any) -> Any:
        from megatron_pipemem.runtime.executor import Executor

        self.program, self.transport = program, transport
        return Executor(program, device, stages, transport, *more, **named)

    def _connect(self, placement: Any, group: Any, device: Any) -> Any:
        import torch
        import torch.distributed as dist

        from megatron_pipemem.runtime.transport import connect, edges

        def free_bytes() -> int:
            torch.cuda.synchronize()
            dist.barrier(group)  # the first one opens the group's own connections
            return torch.cuda.mem_get_info()[0]

        before = free_bytes()
        pipeline = connect(placement, group, device)
        self.bytes_per_edge = (before - free_bytes()) / len(edges(placement))
        return pipeline


def measure(case: Case, workload: Workload, costs: Path, rehearse: bool) -> Measured:
    """Return what all ranks have measured of a case."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from speed import WARM, Measured, summary

    import megatron_pipemem
    from megatron_pipemem.runtime.transport import destroy_groups, measure_links

    gc.collect()
    torch.cuda.empty_cache()
    watch, norm = Watch(), torch.ones(1, device=torch.cuda.current_device())
    if case.cap is not None:
        while not costs.exists():
            time.sleep(0.05)
        megatron_pipemem.enable(case.schedule, memory_cap=case.cap, costs=str(costs))
    elif not case.stock:
        megatron_pipemem.enable(case.schedule)
    try:
        run = step_of(case, workload, rehearse)

        def step() -> list[Any]:
            losses = run()
            dist.all_reduce(norm)  # every rank waits for all, as for the norm of the gradients
            return losses

        with watch.watching():
            for _ in range(1 if rehearse else WARM):
                step()
            torch.cuda.synchronize()
            permanent = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            seconds, host_ahead, losses = timed(step, rehearse)
            peaks = [torch.cuda.max_memory_allocated() - permanent, torch.cuda.max_memory_reserved() - permanent]
            medians: list[tuple[str, int, float]] = []
            predicted: list[int] = []
            links: list[float] = []
            if not case.stock:
                watch.observes = True
                step()
                torch.cuda.synchronize()
                medians, predicted = summary(watch.program, {dist.get_rank(): watch.observation})
                links = [*measure_links(watch.transport.pipeline, watch.transport.message).values()]
    finally:
        megatron_pipemem.disable()
        parallel_state.destroy_model_parallel()
        destroy_groups([group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD])
    names = ("seconds", "losses", "peaks", "medians", "predicted", "links", "ahead")
    own = (seconds, [loss["lm loss"].item() for loss in losses], peaks, medians, predicted, links, host_ahead)
    ranks = {name: [values[at] for values in gathered(own)] for at, name in enumerate(names)}
    every_link = [*chain.from_iterable(ranks["links"])]
    return Measured(
        # All ranks end a step together, with its all-reduce.
        seconds=[max(times) for times in zip(*ranks["seconds"], strict=True)],
        losses=next(losses for losses in ranks["losses"] if losses),
        allocated_bytes=[] if rehearse else [allocated for allocated, _ in ranks["peaks"]],
        reserved_bytes=[] if rehearse else [reserved for _, reserved in ranks["peaks"]],
        medians=[*chain.from_iterable(ranks["medians"])],
        message_seconds=statistics.median(every_link) if every_link else 0.0,
        predicted_bytes=[*chain.from_iterable(ranks["predicted"])],
        orders="" if case.stock else watch.program.schedule.to_csv(),
        host_ahead_seconds=ranks["ahead"],
        connection_bytes=watch.bytes_per_edge,
    )


def step_of(case: Case, workload: Workload, rehearse: bool) -> Callable[[], list[Any]]:
    """Build this rank's chunks, and return a step."""
    import torch
    from gpt_chunks import Size, batches, builder, forward_step, make_config, open_pipelines, same_values
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from speed import DEVIATION, LAYERS, SEQUENCE, VOCABULARY

    import megatron_pipemem

    size = Size(workload.hidden, workload.hidden // 128, LAYERS, SEQUENCE, VOCABULARY)
    if rehearse:
        size = Size(workload.hidden, 2, LAYERS, 16, 64, dtype=torch.float32)
    open_pipelines(RANKS, case.chunks)
    build_chunk = builder(size, make_config(size, RANKS, case.chunks, workload.layers), workload.layers)

    def build(**ends: Any) -> Any:
        chunk = build_chunk(**ends)
        same_values(chunk, DEVIATION)
        return chunk

    if case.stock:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        rank = groups.pp.rank()
        chunks = [
            build(
                pre_process=rank == number == 0,
                post_process=rank == RANKS - 1 and number == case.chunks - 1,
                vp_stage=number if case.chunks > 1 else None,
                pg_collection=groups,
            )
            for number in range(case.chunks)
        ]
    else:
        chunks = megatron_pipemem.build_model_chunks(build)

    def step() -> list[Any]:
        data = [batches(size) for _ in chunks]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if case.chunks > 1 else data[0],
            model=chunks if case.chunks > 1 else chunks[0],
            num_microbatches=workload.microbatches,
            **size.message,
        )

    return step


def timed(step: Callable[[], list[Any]], rehearse: bool) -> tuple[list[float], float, list[Any]]:
    """Return the seconds of steps by the device's clock, the host's lead at their end, and the last step's losses."""
    import torch
    import torch.distributed as dist
    from speed import STEPS

    dist.barrier()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3 if rehearse else STEPS + 1)]
    marks[0].record()
    begin = time.perf_counter()
    losses: list[Any] = []
    for mark in marks[1:]:
        losses = step()
        mark.record()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    ahead = time.perf_counter() - begin - host
    return [a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:], strict=False)], ahead, losses


if __name__ == "__main__":
    sys.exit(main())
