"""Attach activation offload to a Megatron run: its options, the host memory of each rank, and the copy engine."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from megatron_pipemem.logs import tell
from megatron_pipemem.mcore.agreement import Groups, gather, run_on_all_ranks
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.mcore.step.extension import Extension, Step, device_of
from megatron_pipemem.request import DEFAULT_HOST_SHARE, Request, TransferOptions
from megatron_pipemem.runtime.executor import StepFeature
from megatron_pipemem.schedule.memory_cap import format_bytes
from megatron_pipemem.schedule.prices import HostLink

logger = logging.getLogger(__name__)


class _Node(NamedTuple):
    """A host and its available memory in bytes, as one rank of the host reads it."""

    name: str
    available: int


class Offloading(Extension):
    """The extension that offloads activations. It holds the host memory budget, the copy engine and the link speeds.

    ``host_memory`` is the number of bytes that all ranks of a node share, or ``None`` for a fixed part of the memory
    that is available on the node. ``budget``, ``engine``, ``shared_links`` and ``links`` exchange values between ranks when
    they are called for the first time, so every rank of the model (``groups``) makes these first calls together.
    """

    def __init__(
        self,
        options: TransferOptions,
        host_memory: float | None = None,
        groups: Callable[[], Groups | None] = lambda: None,
    ):
        self._options = options
        self._host_memory = host_memory
        self._groups = groups
        self.device = torch.device("cpu")
        self._budget: int | None = None
        self._engine: OffloadEngine | None = None
        self._reserved_for: Choice | None = None
        self._links: tuple[HostLink, ...] | None = None
        self._shared_links: tuple[tuple[int, ...], ...] | None = None

    def budget(self) -> int:
        """Return the bytes of host memory that each rank may use for activations, the same number on every rank.

        Raises:
            UnsupportedError: a node has less memory available than ``host_memory``.
        """
        if self._budget is None:
            own = run_on_all_ranks(lambda: _Node(socket.gethostname(), available_memory()), self._groups())
            nodes = gather(own, self._groups())
            self._budget = _rank_budget(nodes, self._host_memory)
            tell(logger, "every rank may keep %s of activations on its host", format_bytes(self._budget))
        return self._budget

    def engine(self) -> OffloadEngine:
        """Return this rank's copy engine. The first call creates it, and later steps use the same one."""
        if self._engine is None:
            self._engine = OffloadEngine.on(
                self.device,
                self.budget(),
                bandwidth=self._options.bandwidth,
                min_bytes=self._options.min_bytes,
                guard=self._options.guard,
            )
        return self._engine

    def shared_links(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups of pipeline ranks that share a channel to the host, by the option; ``((0, 1), (2, 3))``."""
        if self._shared_links is None:
            self._shared_links = ()
            if self._options.switches:
                places = gather((socket.gethostname(), _place()), self._groups())
                self._shared_links = _shared_channels(places, self._options.switches)
                tell(logger, "pipeline ranks that share a channel to the host: %s", self._shared_links)
        return self._shared_links

    def links(self, num_devices: int) -> tuple[HostLink, ...]:
        """Return the speed of the link to the host of each pipeline rank; the slowest of its data- and tensor-parallel
        ranks.
        """
        if self._links is None:
            self.budget()
            engine = run_on_all_ranks(self.engine, self._groups())
            place, groups = _place(), self.shared_links()
            own: HostLink | None = None
            own_turn = next((group.index(place) for group in groups if place in group), 0)
            # Ranks that share a channel by ``switches`` take turns, as in a plan. All others measure at the same time,
            # so that the result includes their contention.
            for turn in range(max(map(len, groups), default=1)):
                measure: Callable[[], HostLink | None] = partial(measure_host_link, engine.channel)
                own = run_on_all_ranks(measure if turn == own_turn else lambda: None, self._groups()) or own
            seen = [(at, link) for at, link in gather((place, own), self._groups()) if link is not None]
            self._links = tuple(_slowest([link for at, link in seen if at == device]) for device in range(num_devices))
            tell(logger, "links to the host, by pipeline rank: %s", self._links)
        return self._links

    def choose(self, step: Step) -> None:
        self.device = device_of(step.chunks)

    def prepare(self, step: Step) -> None:
        if step.program.schedule.offloads:
            engine = self.engine()
            self._reserve(engine, step)
            step.excludes.append(engine.exclude)
            step.offload_statistics = engine.statistics_for_later

    def _reserve(self, engine: OffloadEngine, step: Step) -> None:
        """Allocate the host memory of a new plan before its step: page-locking takes seconds and may wait for the
        device.
        """
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
        ledger = step.observation.ledger
        return self.engine().step(step.permanent, None if ledger is None else ledger.hold)

    def close(self, orderly: bool) -> None:
        """Free the engine's threads, streams and host memory."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def extensions(request: Request, programs: ProgramStore, _: object) -> list[Extension]:
    """Return the offload extension of a run.

    It is also stored in ``programs.host``, where planning finds the host memory budget and the link speeds.
    """
    programs.host = Offloading(request.offload_options, request.host_memory, lambda: programs.deciding_groups)
    return [programs.host]


@contextmanager
def _near_the_gpu(device: torch.device) -> Iterator[None]:
    """Run the block on CPU cores of the GPU's socket, so that memory allocated in it is memory of that socket.

    If Megatron cannot find the socket, the block runs on the same cores as before.
    """
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
    """Return this rank's pipeline rank; 0 if Megatron's process groups do not exist."""
    return parallel_state.get_pipeline_model_parallel_rank() if parallel_state.is_initialized() else 0


def _shared_channels(
    ranks: Sequence[tuple[str, int]], switches: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the groups of pipeline ranks that share a channel, for example ``((0, 1),)``.

    Two pipeline ranks are in one group if any two ranks of the model with these pipeline ranks share a switch. Groups
    with a common member are merged, because all pipelines of the model run one plan. ``ranks`` has host names and
    pipeline ranks; ``switches`` counts the ranks of a node from 0 on every node.
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


def _slowest(links: Sequence[HostLink]) -> HostLink:
    out, back = min(link.out for link in links), min(link.back for link in links)
    return HostLink(out, back, all(link.duplex for link in links))


def _rank_budget(nodes: Sequence[_Node], per_node: float | None) -> int:
    """Return the bytes of the smallest share that a rank has of the memory for activations on its node.

    This memory is ``per_node`` bytes, or if that is ``None`` a fixed part of the node's available memory.
    """
    ranks = Counter(node.name for node in nodes)
    available = {name: min(node.available for node in nodes if node.name == name) for name in ranks}
    for name, nbytes in available.items():
        if per_node is not None and per_node > nbytes:
            raise UnsupportedError(
                "host-memory",
                f"host {name} has {format_bytes(nbytes)} of memory available, less than --pipemem-host-memory "
                f"{format_bytes(per_node)}; pass a lower value",
            )
    shares = [
        (DEFAULT_HOST_SHARE * available[name] if per_node is None else per_node) / count
        for name, count in ranks.items()
    ]
    return int(min(shares))
