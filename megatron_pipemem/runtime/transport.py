"""Carry messages between pipeline ranks: one first-in-first-out channel per directed edge.

NCCL has no tags. It serves what two ranks exchange within one process group in the order in which they posted it, and once
``init_process_group(device_id=...)`` has bound the default group to a device, everything that one rank posts to a group,
whoever the peers are. Edges that share a device thus never share a group here. That leaves every edge its own order, which
both ends share and the validator has proved, and which replaces the tags.
"""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, zip_longest
from math import prod
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.messages import Edge, Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Program

MESSAGE_CTAS = 4
"""Thread blocks that NCCL may take for one group of messages. Receives are posted ahead, and a kernel that waits for its
message keeps its multiprocessors from the computation: NCCL's default is up to 32 of them."""


@functools.cache
def within_node(group: dist.ProcessGroup) -> bool:
    """Return whether all ranks of a group are of one node, where nodes have consecutive ranks."""
    ranks, size = (
        dist.get_process_group_ranks(group),
        int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count())),
    )
    return min(ranks) // size == max(ranks) // size


def new_groups(
    wanted: Iterable[Sequence[int]],
    parent: dist.ProcessGroup,
    description: str,
    *,
    messages: bool = False,
    backend: str | None = None,
) -> list[dist.ProcessGroup]:
    """Open process groups that wait as long as another one does. Every rank of the job must call this at the same time.

    Torch has every rank take part in the creation of every group, in one order, so the ranks first tell each other what
    they want.

    Args:
        wanted: global ranks of every group; the same on all ranks of ``parent``.
        parent: whose timeout the groups get, instead of torch's default. Of NCCL, ours run on streams of high priority, and
            with the limits on thread blocks that the parent has (``--nccl-communicator-config-path``).
        description: shown in torch's logs.
        backend: of the groups; by default the default group's.
        messages: the groups carry messages; NCCL may take ``MESSAGE_CTAS`` thread blocks for them if the parent sets no limit.
            While the default group is bound to no device, NCCL connects pairs of ranks when they exchange a first message, so
            the groups of all parents with one number are one group then: a job of many pipelines opens no more than one.

    Returns:
        The groups in the order of ``wanted``; ``GroupMember.NON_GROUP_MEMBER`` for those without this rank.
    """
    ours = tuple(tuple(ranks) for ranks in wanted)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, ours)
    theirs: Any = parent._get_backend(parent._device_types[0])  # its options are those of its kind
    timeout = None if theirs.options is None else theirs.options._timeout  # not every backend has options

    def create(ranks: Sequence[int]) -> dist.ProcessGroup:
        is_nccl = backend is None and theirs.name() == dist.Backend.NCCL
        options = nccl_options(theirs.options, messages) if is_nccl else None
        return dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options, group_desc=description)

    world: Any = dist.group.WORLD
    if messages and theirs.name() == dist.Backend.NCCL and world.bound_device_id is None:
        return [create(ranks) for ranks in _joined(everyones)][: len(ours)]
    created = {each: [create(ranks) for ranks in each] for each in sorted({*everyones})}
    return created[ours]


def _joined(everyones: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Return the ranks of the groups with the same number, in order."""
    return [sorted({rank for each in same for rank in each}) for same in zip_longest(*everyones, fillvalue=())]


def nccl_options(parent: dist.ProcessGroupNCCL.Options, messages: bool) -> dist.ProcessGroupNCCL.Options:
    """Return what a group of ours asks of NCCL; see ``new_groups``. Every group needs an object of its own."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = parent._timeout
    unset = options.config.max_ctas
    for name in ("min_ctas", "max_ctas", "cga_cluster_size"):
        setattr(options.config, name, getattr(parent.config, name))
    if messages and options.config.max_ctas == unset:
        options.config.max_ctas = max(MESSAGE_CTAS, options.config.min_ctas)
    return options


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close groups on which nothing is under way. Those that went with the default group are skipped."""
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


_MAX_DIMS = 8


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A pipeline as one of its ranks sees it, connected.

    Args:
        group: its process group.
        placement: of the stages on its devices.
        device: this rank's place in it.
        ranks: of the world, of every device.
        channels: the process group that carries each directed edge of this rank.
    """

    group: dist.ProcessGroup
    placement: Placement
    device: int
    ranks: Sequence[int]
    channels: Mapping[Edge, dist.ProcessGroup]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages on this rank, in the order of its chunks."""
        return self.placement.stages[self.device]


def edges(placement: Placement) -> list[Edge]:
    """Return all directed edges that messages of this placement use, in one order that every rank shares."""
    return sorted(Router(placement).edges, key=lambda edge: (min(edge), max(edge), edge))


def colour(directed: Iterable[Edge]) -> dict[Edge, int]:
    """Number edges so that those of one number share no device: each gets the smallest number free at both its ends.

    Neighbours in a line or an even ring take 4 numbers, an odd ring 6.
    """
    taken: dict[int, set[int]] = defaultdict(set)
    colours: dict[Edge, int] = {}
    for edge in directed:
        ends = [taken[device] for device in edge]
        colours[edge] = next(number for number in count() if not any(number in end for end in ends))
        for end in ends:
            end.add(colours[edge])
    return colours


def connect(placement: Placement, group: dist.ProcessGroup, device: torch.device | int | str) -> Pipeline:
    """Open the channels of one pipeline. Every rank of the job must call this at the same time.

    Backends open a connection at its first message and block until the other end does the same, so all are opened here, in
    one order that every rank shares.

    Args:
        placement: says which devices are neighbours.
        group: the pipeline's process group; its ranks are the devices, in order.
        device: where the messages are, which decides the backend that carries them.
    """
    ranks = dist.get_process_group_ranks(group)
    colours = colour(edges(placement))
    members: dict[int, set[int]] = defaultdict(set)
    for edge, number in colours.items():
        members[number] |= {ranks[end] for end in edge}
    opened = new_groups(
        [sorted(members[number]) for number in sorted(members)], group, "PIPEMEM_MESSAGES", messages=True
    )
    own = group.rank()
    hello = torch.zeros(1, device=device)
    channels = {}
    for (source, destination), number in colours.items():
        if own not in (source, destination):
            continue
        channel = channels[source, destination] = opened[number]
        if own == source:
            dist.send(hello, ranks[destination], group=channel)
        else:
            dist.recv(hello, ranks[source], group=channel)
    return Pipeline(group, placement, own, ranks, channels)


@dataclass(frozen=True)
class MessageFormat:
    """Describe the tensors between two stages.

    Args:
        shape: shape of every message, or ``None`` when it changes from microbatch to microbatch.
        dtype: element type.
        device: where received tensors are allocated.
        shapes: if it changes, the shape of every microbatch's messages, alike on all ranks. Without them a header with the
            shape goes before every payload, and receives are no longer posted ahead.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device | int
    shapes: Sequence[tuple[int, ...]] | None = None

    def shape_of(self, microbatch: int) -> tuple[int, ...] | None:
        """Return the shape of a microbatch's messages; ``None`` if the receiver cannot know it."""
        return self.shape if self.shapes is None else self.shapes[microbatch]

    @property
    def typical(self) -> tuple[int, ...] | None:
        """The shape that stands for all when one message is timed: that of the middle one by size."""
        return self.shape if self.shapes is None else sorted(self.shapes, key=prod)[len(self.shapes) // 2]

    def check(self, action: Action, tensor: torch.Tensor) -> None:
        """Raises:
        UnsupportedError: the tensor that ``action`` sends is not of the shape that its receiver knows.
        """
        known = self.shape_of(action.microbatch)
        if known is not None and tensor.shape != known:
            way_out = (
                "set variable_seq_lengths=True in the model's configuration where microbatches differ"
                if self.shapes is None
                else "pass --pipemem-message-shapes message where they do not follow from the tokens that the model gets"
            )
            raise UnsupportedError(
                "message-shape",
                f"{action} has a tensor of shape {tuple(tensor.shape)}, and its receiver expects {tuple(known)}; {way_out}",
            )


SHAPES, DEPARTURES, TRANSFERS = "shapes of messages", "departures of messages", "transfers to the host"


def host_queries(program: Program, message: MessageFormat) -> frozenset[str]:
    """Return the questions to its device for which a host stops in the middle of a step; none on a linear placement that trains
    with messages of one shape.

    Args:
        program: of the step.
        message: format of its messages.
    """
    placement, schedule = program.placement, program.schedule
    is_linear = placement.num_chunks == 1 and not schedule.vocabulary_barriers
    trains = any(action.kind in (Kind.I, Kind.B) for order in schedule.orders for action in order)
    asked = {TRANSFERS} if schedule.offloads else set()
    if message.shape is None and message.shapes is None:
        asked.add(SHAPES)
    # Messages of an evaluation, and those of one stage of a device, may never be answered: their memory would pile up.
    return frozenset(asked if is_linear and trains else asked | {DEPARTURES})


@dataclass(slots=True)
class _Receive:
    tensor: torch.Tensor | None
    work: dist.Work | None
    action: Action


@dataclass(slots=True)
class _Channel:
    """One directed edge of this rank: who carries it, and what is under way on it, in order."""

    group: dist.ProcessGroup
    peer: int
    """the other end's rank within the group"""
    leaving: deque[Action] = field(default_factory=deque)
    receives: deque[_Receive] = field(default_factory=deque)


@dataclass
class Transport:
    """The messages of one step on one rank.

    Args:
        pipeline: from ``connect``.
        message: format of all messages.
        in_sequence: learn shapes that headers tell where receives are posted and not where their tensors are needed, for
            programs whose order is one for everything.
        polls: ask the device after every send which messages have left, and let go of their memory. Otherwise a message is let
            go when ``settle`` or ``finish`` says so, without a question.
    """

    pipeline: Pipeline
    message: MessageFormat
    in_sequence: bool = False
    polls: bool = True
    _sends: dict[Action, list[tuple[dist.Work, torch.Tensor]]] = field(default_factory=dict)
    _arrived: dict[Action, torch.Tensor] = field(default_factory=dict)
    _channels: dict[Edge, _Channel] = field(init=False)
    _channel_of: dict[tuple[Kind, int], _Channel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pipeline = self.pipeline
        self._channels = {
            edge: _Channel(group, dist.get_group_rank(group, pipeline.ranks[edge[edge[0] == pipeline.device]]))
            for edge, group in pipeline.channels.items()
        }

    def post_send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start sending; the tensor's memory is kept until the backend is done with it."""
        channel = self._channel(action)
        group, peer = channel.group, channel.peer
        tensor = tensor.contiguous()
        self.message.check(action, tensor)
        works = []
        if self.message.shape_of(action.microbatch) is None:
            header = torch.zeros(_MAX_DIMS + 1, dtype=torch.int64)
            header[0] = tensor.dim()
            header[1 : 1 + tensor.dim()] = torch.tensor(tensor.shape, dtype=torch.int64)
            header = header.to(tensor.device)
            works.append((group.send([header], peer, 0), header))
        works.append((group.send([tensor], peer, 0), tensor))
        self._sends[action] = works
        channel.leaving.append(action)
        if self.polls:
            self._reap()  # last: the receiver is waiting

    def blank(self, action: Action) -> torch.Tensor:
        """Return what can be sent as that message where nobody will look at it."""
        shape = self.message.shape_of(action.microbatch) or (1,)
        return torch.zeros(shape, dtype=self.message.dtype, device=self.message.device)

    def settle(self, action: Action) -> None:
        """Let go now of the memory of a send whose consequences have come back: it has been received."""
        for work, _ in self._sends.pop(action, ()):
            work.wait()

    def post_receive(self, action: Action) -> torch.Tensor | None:
        """Start receiving. Returns the buffer, or ``None`` when its shape is not known yet."""
        channel = self._channel(action)
        receive = _Receive(None, None, action)
        if self.in_sequence or self.message.shape_of(action.microbatch) is not None:
            self._start(receive, channel)
        channel.receives.append(receive)
        return receive.tensor

    def wait(self, action: Action) -> torch.Tensor:
        """Return the tensor of a receive that was posted. Messages ahead of it on its edge are taken in first."""
        while action not in self._arrived:
            self._take_next(self._channel(action))
        return self._arrived.pop(action)

    def arrived(self, tensors: Mapping[Action, torch.Tensor]) -> None:
        """Take over what ``take_in`` of an earlier step gave: these messages wait here for their consumers."""
        self._arrived.update(tensors)

    def take_in(self) -> dict[Action, torch.Tensor]:
        """Wait for all receives that were posted, and return their tensors. Nothing stays in the channels."""
        for channel in self._channels.values():
            while channel.receives:
                self._take_next(channel)
        taken, self._arrived = self._arrived, {}
        return taken

    def finish(self) -> None:
        """Wait until every send has left. The next step starts with empty channels."""
        for action in list(self._sends):
            self.settle(action)

    def _take_next(self, channel: _Channel) -> None:
        receive = channel.receives.popleft()
        if receive.work is None:
            self._start(receive, channel)
        assert receive.work is not None and receive.tensor is not None
        receive.work.wait()
        self._arrived[receive.action] = receive.tensor

    def _reap(self) -> None:
        # Messages of one edge leave in order, a payload behind its header: what stands behind one that waits need not be asked.
        for channel in self._channels.values():
            actions = channel.leaving
            while actions:
                works = self._sends.get(actions[0])
                if works is not None and not works[-1][0].is_completed():
                    break
                self._sends.pop(actions.popleft(), None)

    def _start(self, receive: _Receive, channel: _Channel) -> None:
        shape = self.message.shape_of(receive.action.microbatch)
        if shape is None:
            header = torch.empty(_MAX_DIMS + 1, dtype=torch.int64, device=self.message.device)
            channel.group.recv([header], channel.peer, 0).wait()
            sizes = header.tolist()
            shape = tuple(sizes[1 : 1 + sizes[0]])
        receive.tensor = torch.empty(shape, dtype=self.message.dtype, device=self.message.device)
        receive.work = channel.group.recv([receive.tensor], channel.peer, 0)

    def _channel(self, action: Action) -> _Channel:
        """Return which way the message goes: outputs go up and come from below, gradients the other way."""
        known = self._channel_of.get(action[:2])
        if known is not None:
            return known
        upward = action.kind in (Kind.SEND_F, Kind.RECV_I)
        device, placement = self.pipeline.device, self.pipeline.placement
        neighbour = placement.next_stage if upward else placement.previous_stage
        stage = neighbour(action.stage)
        assert stage is not None, f"{action} has no neighbour"
        peer = placement.devices[stage]
        sends = action.kind in (Kind.SEND_F, Kind.SEND_I)
        channel = self._channels[(device, peer) if sends else (peer, device)]
        self._channel_of[action[:2]] = channel
        return channel


_ROUND_TRIPS = 5


def measure_links(pipeline: Pipeline, message: MessageFormat) -> dict[Edge, float]:
    """Return the seconds of a message in either direction: half a round trip while nothing else runs in this pipeline.

    Every rank of the pipeline must call this at the same time, between steps.

    Args:
        pipeline: from ``connect``.
        message: format of the messages; of known shapes.

    Returns:
        The links that this rank has timed: those to higher devices.
    """
    assert message.typical is not None, "messages of unknown shapes have no cost"
    payload = torch.zeros(message.typical, dtype=message.dtype, device=message.device)
    seconds: dict[Edge, float] = {}
    device, ranks, groups = pipeline.device, pipeline.ranks, pipeline.channels
    for low, high in edges(pipeline.placement):
        if low > high or device not in (low, high):
            continue
        times = []
        for _ in range(_ROUND_TRIPS + 1):
            _wait_for_device(payload)
            begin = time.perf_counter()
            if device == low:
                dist.send(payload, ranks[high], group=groups[low, high])
                dist.recv(payload, ranks[high], group=groups[high, low])
            else:
                dist.recv(payload, ranks[low], group=groups[low, high])
                dist.send(payload, ranks[low], group=groups[high, low])
            _wait_for_device(payload)
            times.append(time.perf_counter() - begin)
        if device == low:
            seconds[low, high] = seconds[high, low] = median(times[1:]) / 2
    return seconds


def _wait_for_device(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
