"""Offload and recomputation of a run: its options, the budget of its hosts, and the engine."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.utils import set_ideal_affinity_for_current_gpu

from megatron_pipemem.choose.knowledge import Choice
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.offload.runtime import OffloadEngine
from megatron_pipemem.features.offload.runtime.engine import OffloadActions
from megatron_pipemem.features.offload.runtime.host import available_memory, measure_host_link
from megatron_pipemem.mcore.agreement import done_by_all, gather, tell
from megatron_pipemem.mcore.programs import Programs
from megatron_pipemem.mcore.step.extension import Extension, Step, device_of
from megatron_pipemem.request import DEFAULT_HOST_SHARE, Request, TransferOptions
from megatron_pipemem.runtime.executor import StepFeature
from megatron_pipemem.schedule.memory_cap import format_bytes
from megatron_pipemem.schedule.prices import HostLink

logger = logging.getLogger(__name__)


class _Node(NamedTuple):
    """A host, as its ranks see it."""

    name: str
    available: int


class Offloading(Extension):
    """The host side of a run: its budget, an engine, and the speed of its link.

    Every rank of the job makes the first calls of ``budget``, ``engine``, ``switches`` and ``links`` at the same time,
    after ``device`` is set. ``host_memory`` are bytes per node, shared by its ranks; ``None`` for a part of the
    available memory.
    """

    def __init__(self, options: TransferOptions, host_memory: float | None = None):
        self._options = options
        self._host_memory = host_memory
        self.device = torch.device("cpu")
        self._budget: int | None = None
        self._engine: OffloadEngine | None = None
        self._reserved_for: Choice | None = None
        self._links: tuple[HostLink, ...] | None = None
        self._switches: tuple[tuple[int, ...], ...] | None = None

    def budget(self) -> int:
        """Return the bytes of host memory that every rank may take: an equal part of its node's, and the least of all
        nodes.

        Raises:
            UnsupportedError: the nodes do not have that much.
        """
        if self._budget is None:
            nodes = gather(done_by_all(lambda: _Node(socket.gethostname(), available_memory())))
            self._budget = _rank_budget(nodes, self._host_memory)
            tell(logger, "every rank may keep %s of activations on its host", format_bytes(self._budget))
        return self._budget

    def engine(self) -> OffloadEngine:
        """Return the engine of this rank, kept from step to step."""
        if self._engine is None:
            self._engine = OffloadEngine.on(
                self.device,
                self.budget(),
                bandwidth=self._options.bandwidth,
                min_bytes=self._options.min_bytes,
                guard=self._options.guard,
            )
        return self._engine

    def switches(self) -> tuple[tuple[int, ...], ...]:
        """Places in the pipeline that share a channel to the host, by the options of a node."""
        if self._switches is None:
            self._switches = ()
            if self._options.switches:
                self._switches = _shared_channels(gather((socket.gethostname(), _place())), self._options.switches)
                tell(logger, "places that share a channel to the host: %s", self._switches)
        return self._switches

    def links(self, num_devices: int) -> tuple[HostLink, ...]:
        """Return the link of every place in the pipeline: the slowest that any rank at that place measures."""
        if self._links is None:
            self.budget()
            engine = done_by_all(self.engine)
            place, groups = _place(), self.switches()
            own: HostLink | None = None
            own_turn = next((group.index(place) for group in groups if place in group), 0)
            # A plan takes turns on a channel that it knows to be shared. Who shares one unknown to it measures it together.
            for turn in range(max(map(len, groups), default=1)):
                own = done_by_all(partial(_measured, engine, turn == own_turn)) or own
            seen = [(at, link) for at, link in gather((place, own)) if link is not None]
            self._links = tuple(_slowest([link for at, link in seen if at == device]) for device in range(num_devices))
            tell(logger, "links to the host: %s", self._links)
        return self._links

    def choose(self, step: Step) -> None:
        self.device = device_of(step.chunks)

    def prepare(self, step: Step) -> None:
        if step.program.schedule.offloads:
            engine = self.engine()
            self._reserve(engine, step)
            step.counters.append(engine)
            step.offload_statistics = engine.statistics_for_later

    def _reserve(self, engine: OffloadEngine, step: Step) -> None:
        """Take the host memory of a plan in bytes before the step. Page-locking takes seconds, and may wait for the device."""
        plan = step.own_plan or step.plan
        if plan is None or plan is self._reserved_for or plan.costs.memory is None:
            return
        self._reserved_for = plan
        with _near_the_gpu(self.device):
            engine.pool.reserve(int(plan.timeline.host_peaks[step.pipeline.device]))

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        return [OffloadActions(self.engine())] if step.program.schedule.offloads else []

    def around(self, step: Step) -> AbstractContextManager:
        if not step.program.schedule.offloads:
            return nullcontext()
        return self.engine().step(step.permanent, step.observation.on_device)

    def close(self, orderly: bool) -> None:
        """Give up the engine's threads, streams and memory."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def extensions(request: Request, programs: Programs, _: object) -> list[Extension]:
    """Return the extensions of a run, and give its programs access to the host."""
    programs.host = Offloading(request.offload_options, request.host_memory)
    return [programs.host]


@contextmanager
def _near_the_gpu(device: torch.device) -> Iterator[None]:
    """Run the block on processors of the GPU's socket, where Megatron can find them: memory comes from the socket that asks."""
    if device.type != "cuda":
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        set_ideal_affinity_for_current_gpu()
    except Exception as error:  # cuda-python or pynvml is not installed, or the driver refuses
        logger.info("host memory is taken from any socket, because the GPU's is not known (%s)", error)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _place() -> int:
    """Return the place of this rank in its pipeline."""
    return parallel_state.get_pipeline_model_parallel_rank() if parallel_state.is_initialized() else 0


def _shared_channels(
    ranks: Sequence[tuple[str, int]], switches: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return places in the pipeline of which some ranks share a switch, directly or through others: all pipelines have
    one plan.

    ``ranks`` has host and place of every rank of the job. ``switches`` has ranks of a node, counted on every node from
    0.
    """
    seen: Counter[str] = Counter()
    behind: dict[tuple[str, int], set[int]] = {}
    for host, place in ranks:
        for number, members in enumerate(switches):
            if seen[host] in members:
                behind.setdefault((host, number), set()).add(place)
        seen[host] += 1
    groups: list[set[int]] = []
    for places in behind.values():
        joined = places.union(*(group for group in groups if group & places))
        groups = [group for group in groups if not group & places] + [joined]
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group) > 1))


def _measured(engine: OffloadEngine, is_our_turn: bool) -> HostLink | None:
    return measure_host_link(engine.channel) if is_our_turn else None


def _slowest(links: Sequence[HostLink]) -> HostLink:
    return HostLink(
        min(link.out for link in links), min(link.back for link in links), all(link.duplex for link in links)
    )


def _rank_budget(nodes: Sequence[_Node], per_node: float | None) -> int:
    """Return the least of the ranks' equal parts of their nodes, or raise an UnsupportedError if a node has less
    memory.
    """
    ranks = Counter(node.name for node in nodes)
    available = {name: min(node.available for node in nodes if node.name == name) for name in ranks}
    for name, nbytes in available.items():
        if per_node is not None and per_node > nbytes:
            raise UnsupportedError(
                "host-memory",
                f"host {name} has {format_bytes(nbytes)} of memory available, less than --pipemem-host-memory "
                f"{format_bytes(per_node)}; lower it",
            )
    shares = [
        (DEFAULT_HOST_SHARE * available[name] if per_node is None else per_node) / count
        for name, count in ranks.items()
    ]
    return int(min(shares))
