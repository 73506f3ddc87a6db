"""Send messages between pipeline ranks, with one first-in-first-out channel per directed edge.

NCCL has no tags. It matches the messages of two ranks in one process group in the order in which they were posted.
Groups that are bound to a device even serialize all messages of a rank, to any peer. Therefore two edges that share a
device never share a group here. The validator has proved that both ends of an edge post its messages in the same order,
which replaces the tags.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from math import prod
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack, to_dlpack

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.message_memory import MESSAGE_CTAS
from megatron_pipemem.schedule.messages import Edge, Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Program

COLLECTIVE_CTAS = 8
"""Thread blocks that NCCL may use for a group whose collectives wait for other ranks while this one computes, as
``MESSAGE_CTAS`` for messages."""


def new_groups(
    members: Iterable[Sequence[int]],
    parent: dist.ProcessGroup,
    description: str,
    *,
    max_ctas: int | None = None,
    backend: str | None = None,
    callers: dist.ProcessGroup | None = None,
) -> list[dist.ProcessGroup]:
    """Open process groups with the timeout of ``parent``. Every rank of ``callers`` must call this at the same time.

    By default, the callers are the ranks of ``parent``. Other ranks of the job take no part. ``members`` has the global
    ranks of every group, and must be the same on all callers. A rank gets its groups, in order. Groups
    without this rank are ``GroupMember.NON_GROUP_MEMBER``. NCCL groups run on streams of high priority and keep the
    parent's limits on thread blocks (``--nccl-communicator-config-path``). ``max_ctas`` is the most that NCCL may use
    if the parent sets no limit. ``description`` is the name that torch's logs give to each group. ``backend`` replaces
    the backend of the default group.
    """
    parent_backend, timeout = _backend_of(parent), timeout_of(parent)
    is_nccl = backend is None and parent_backend.name() == dist.Backend.NCCL
    callers = callers or parent
    tokens: list[Any] = [None] * callers.size()
    dist.all_gather_object(tokens, secrets.token_hex(8), group=callers)
    own = dist.get_rank()
    opened: list[Any] = []
    for number, ranks in enumerate(members):
        if own not in ranks:
            opened.append(dist.GroupMember.NON_GROUP_MEMBER)
            continue
        with _new_groups_of_members(f"{description}/{tokens[0]}/{number}"):
            opened.append(
                dist.new_group(
                    list(ranks),
                    timeout=timeout,
                    backend=backend,
                    pg_options=nccl_options(parent_backend.options, max_ctas) if is_nccl else None,
                    use_local_synchronization=True,
                    group_desc=description,
                )
            )
    return opened


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the time after which an operation of a group fails; ``None`` if the backend has no such option."""
    options = _backend_of(group).options
    return None if options is None else options._timeout


def _backend_of(group: dist.ProcessGroup) -> Any:  # its options have the backend's own class
    return group._get_backend(group._device_types[0])


@contextmanager
def _new_groups_of_members(name: str) -> Iterator[None]:
    """Make ``dist.new_group`` call its group ``name`` in this block, and need nothing from ranks outside of it.

    torch makes a name of the number of groups that a rank has, which differs between ranks. If the default group is
    bound to a device, NCCL splits its communicator, for which torch needs every rank of the job.
    """
    torchs, world = cast(Any, dist.distributed_c10d), cast(Any, dist.group.WORLD)
    name_of, bound = torchs._process_group_name, world.bound_device_id
    torchs._process_group_name = lambda *_, **__: name
    world.bound_device_id = None
    try:
        yield
    finally:
        torchs._process_group_name = name_of
        world.bound_device_id = bound


def nccl_options(parent: dist.ProcessGroupNCCL.Options, max_ctas: int | None) -> dist.ProcessGroupNCCL.Options:
    """Return new NCCL options for one group, as ``new_groups`` describes. Groups cannot share an options object."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = parent._timeout
    unset = options.config.max_ctas
    for name in ("min_ctas", "max_ctas", "cga_cluster_size"):
        setattr(options.config, name, getattr(parent.config, name))
    if max_ctas is not None and options.config.max_ctas == unset:
        options.config.max_ctas = max(max_ctas, options.config.min_ctas)
    return options


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close process groups that are still open. Call it after their operations have ended."""
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


_MAX_DIMS = 8


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A pipeline with open channels, as one of its ranks sees it."""

    group: dist.ProcessGroup
    placement: Placement
    device: int  # this rank's number in the pipeline
    ranks: Sequence[int]  # the global rank of every device
    channels: Mapping[Edge, dist.ProcessGroup]  # the process group of each directed edge of this rank
    # Transports with messages under way. If a step fails, they keep the memory that a backend may still use.
    unfinished: set[Transport] = field(default_factory=set)
    opened_bytes: int | None = None  # memory of the GPU that opening the channels took; ``None`` on a CPU

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank, in the order of its chunks."""
        return self.placement.stages[self.device]


def edges(placement: Placement) -> list[Edge]:
    """Return the pairs (source, destination) of devices that a placement sends messages between.

    The order is the same on every rank.
    """
    return sorted(Router(placement).edges, key=lambda edge: (min(edge), max(edge), edge))


def colour(directed: Iterable[Edge]) -> dict[Edge, int]:
    """Return a number for each edge, from 0. Two edges with the same number have no device in common.

    Each edge gets the smallest number that is unused at both of its devices. A line, or a circle of an even number of
    devices, takes 4 numbers, and a circle of an odd number takes 6.
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
    """Open the channels of one pipeline. Every rank of ``group``, the pipeline, must call this at the same time.

    A backend opens a connection at its first message, and blocks until the other end does the same. So all connections
    are opened here, in the same order on every rank. That order is by colour: edges of one colour open at the same
    time, and the start takes as many rounds as there are colours. In the order of the pipeline, each device would wait
    for the one before it. The ranks of ``group`` are the devices, in order. ``device`` is the torch device that holds
    this rank's first messages, and decides the backend.
    """
    ranks = dist.get_process_group_ranks(group)
    colours = colour(edges(placement))
    members: dict[int, set[int]] = defaultdict(set)
    for edge, number in colours.items():
        members[number] |= {ranks[end] for end in edge}
    opened = new_groups(
        [sorted(members[number]) for number in sorted(members)], group, "PIPEMEM_MESSAGES", max_ctas=MESSAGE_CTAS
    )
    own = group.rank()
    hello = torch.zeros(1, device=device)
    channels = {}
    for number, (source, destination) in sorted((number, edge) for edge, number in colours.items()):
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
    """The shape, element type and device of the tensors that stages send to each other."""

    shape: tuple[int, ...] | None  # shape of every message; ``None`` if messages may differ
    dtype: torch.dtype
    device: torch.device | int
    # The shape of every microbatch's messages, the same on all ranks. If unknown, a header with the shape goes before every
    # message, and receives are not posted ahead.
    shapes: Sequence[tuple[int, ...]] | None = None

    def shape_of(self, microbatch: int) -> tuple[int, ...] | None:
        """Return the shape of a microbatch's messages, or ``None`` if the receiver cannot know it."""
        return self.shape if self.shapes is None else self.shapes[microbatch]

    @property
    def bytes_of(self) -> Callable[[Action], int] | None:
        """A function that returns the bytes of a send's or receive's message; ``None`` if shapes are unknown."""
        if self.typical is None:
            return None
        return lambda action: prod(cast(Any, self.shape_of(action.microbatch))) * self.dtype.itemsize

    @property
    def typical(self) -> tuple[int, ...] | None:
        """The shape whose message time is measured: the median of all microbatches by size; ``None`` if unknown."""
        return self.shape if self.shapes is None else sorted(self.shapes, key=prod)[len(self.shapes) // 2]

    def check(self, action: Action, tensor: torch.Tensor) -> None:
        """Raise an UnsupportedError if the tensor to send has another shape than its receiver expects."""
        expected = self.shape_of(action.microbatch)
        if expected is not None and tensor.shape != expected:
            way_out = (
                "set variable_seq_lengths=True in the model's configuration if microbatches differ"
                if self.shapes is None
                else "pass --pipemem-message-shapes message if shapes do not follow from the tokens that the model gets"
            )
            raise UnsupportedError(
                "message-shape",
                f"{action} has a tensor of shape {tuple(tensor.shape)}, but its receiver expects {tuple(expected)}; {way_out}",
            )


def polls_departures(program: Program) -> bool:
    """Return whether the host must ask the backend which messages have been sent, to free their memory.

    It need not if each device has one stage and trains without vocabulary passes. Otherwise, or in an evaluation, no
    later message may show that a send can be freed.
    """
    schedule = program.schedule
    trains = any(action.kind in (Kind.I, Kind.B) for order in schedule.orders for action in order)
    return not trains or program.placement.num_chunks > 1 or bool(schedule.vocabulary_barriers)


@dataclass(slots=True)
class _Receive:
    tensor: torch.Tensor | None
    work: dist.Work | None
    action: Action


@dataclass(slots=True)
class _Channel:
    """One directed edge of this rank: its process group, and its unfinished messages in order."""

    group: dist.ProcessGroup
    peer: int
    """The other end's rank within the group."""
    leaving: deque[Action] = field(default_factory=deque)
    receives: deque[_Receive] = field(default_factory=deque)


def unrecorded(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of a tensor, on which a backend's ``record_stream`` has no effect.

    NCCL calls ``record_stream`` on the tensors of messages. When such a tensor is freed, PyTorch's allocator waits until
    the host sees that the channel has reached this point. This is late if the host runs ahead, or if the channel waits
    for a later message. The allocator ignores the call for memory that another owner frees, and the alias is such an
    owner. So the caller must keep the tensor until the current stream has waited for the message.
    """
    return from_dlpack(to_dlpack(tensor))


@dataclass(eq=False)
class Transport:
    """Sends and receives the messages of one step on one rank.

    Memory of messages is reused in the order of the current stream, as if the messages were computed on it. The stream
    waits for a message before the transport frees or returns its tensor.

    If shapes are unknown, a header with the shape comes before each message. With ``in_sequence``, the header is read
    when the receive is posted, and not when the tensor is needed. The order for one hardware queue needs this. With
    ``polls``, the host asks the backend after every send which messages have been sent, to free their memory. Without
    ``polls``, only ``free_sent`` and ``finish`` free it.
    """

    pipeline: Pipeline
    message: MessageFormat
    in_sequence: bool = False
    polls: bool = True
    awaited: Action | None = None
    """The message that the host waits for at this moment. With NCCL, only the stream waits for most messages."""
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
        pipeline.unfinished.add(self)

    def post_send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send a tensor, and keep its memory until the backend has sent it.

        Raise an UnsupportedError if its shape is not the one that the receiver expects.
        """
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
            works.append((group.send([unrecorded(header)], peer, 0), header))
        works.append((group.send([unrecorded(tensor)], peer, 0), tensor))
        self._sends[action] = works
        channel.leaving.append(action)
        if self.polls:
            self._reap()  # last: the receiver is waiting

    def blank(self, action: Action) -> torch.Tensor:
        """Return a tensor to send as a message whose content the receiver does not use.

        It has the shape of the microbatch's messages, or one element if their shape is unknown.
        """
        shape = self.message.shape_of(action.microbatch) or (1,)
        return torch.zeros(shape, dtype=self.message.dtype, device=self.message.device)

    def free_sent(self, action: Action) -> None:
        """Free the memory of the message that ``action`` sent, unless it is free.

        Call it when the message has been sent. Otherwise the current stream waits.
        """
        for work, tensor in self._sends.pop(action, ()):
            self._wait(work, action)
            if tensor.is_cuda:  # has an effect only if another stream allocated the tensor
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def post_receive(self, action: Action) -> torch.Tensor | None:
        """Start to receive a message, and return its buffer. If its shape is unknown, ``wait`` starts the receive."""
        channel = self._channel(action)
        receive = _Receive(None, None, action)
        if self.in_sequence or self.message.shape_of(action.microbatch) is not None:
            self._start(receive, channel)
        channel.receives.append(receive)
        return receive.tensor

    def wait(self, action: Action) -> torch.Tensor:
        """Wait for a posted receive and all earlier ones of its edge, and return its tensor."""
        while action not in self._arrived:
            self._take_next(self._channel(action))
        return self._arrived.pop(action)

    def arrived(self, tensors: Mapping[Action, torch.Tensor]) -> None:
        """Keep received tensors that an earlier step returned from ``take_in``, for the actions that use them."""
        self._arrived.update(tensors)

    def take_in(self) -> dict[Action, torch.Tensor]:
        """Wait for all posted receives, and return the tensors that no action has used."""
        for channel in self._channels.values():
            while channel.receives:
                self._take_next(channel)
        taken, self._arrived = self._arrived, {}
        self.note_finished()
        return taken

    def finish(self) -> None:
        """Wait for the sends whose memory is not free yet, and free it. With NCCL the stream waits, not the host."""
        for action in list(self._sends):
            self.free_sent(action)
        self.note_finished()

    def note_finished(self) -> None:
        """Let the pipeline forget this transport, unless messages are under way."""
        if not self._sends and not any(channel.receives for channel in self._channels.values()):
            self.pipeline.unfinished.discard(self)

    def _take_next(self, channel: _Channel) -> None:
        receive = channel.receives.popleft()
        if receive.work is None:
            self._start(receive, channel)
        assert receive.work is not None and receive.tensor is not None
        self._wait(receive.work, receive.action)
        self._arrived[receive.action] = receive.tensor

    def _wait(self, work: dist.Work, action: Action) -> None:
        self.awaited = action
        work.wait()
        self.awaited = None

    def _reap(self) -> None:
        # Messages of one edge are sent in order, each after its header, so the search ends at the first unsent one.
        for channel in self._channels.values():
            actions = channel.leaving
            while actions:
                works = self._sends.get(actions[0])
                if works is not None and not works[-1][0].is_completed():
                    break
                self.free_sent(actions.popleft())

    def _start(self, receive: _Receive, channel: _Channel) -> None:
        shape = self.message.shape_of(receive.action.microbatch)
        if shape is None:
            header = torch.empty(_MAX_DIMS + 1, dtype=torch.int64, device=self.message.device)
            self._wait(channel.group.recv([unrecorded(header)], channel.peer, 0), receive.action)
            sizes = header.tolist()
            shape = tuple(sizes[1 : 1 + sizes[0]])
        receive.tensor = torch.empty(shape, dtype=self.message.dtype, device=self.message.device)
        receive.work = channel.group.recv([unrecorded(receive.tensor)], channel.peer, 0)

    def _channel(self, action: Action) -> _Channel:
        """Return the channel of a message: outputs go to the next stage, and gradients to the previous stage."""
        cached = self._channel_of.get(action[:2])
        if cached is not None:
            return cached
        device, peer = self.pipeline.device, self._peer(action)
        sends = action.kind in (Kind.SEND_F, Kind.SEND_I)
        channel = self._channels[(device, peer) if sends else (peer, device)]
        self._channel_of[action[:2]] = channel
        return channel

    def rank_of(self, action: Action) -> int:
        """Return the global rank at the other end of a message."""
        return self.pipeline.ranks[self._peer(action)]

    def _peer(self, action: Action) -> int:
        upward, placement = action.kind in (Kind.SEND_F, Kind.RECV_I), self.pipeline.placement
        stage = placement.next_stage(action.stage) if upward else placement.previous_stage(action.stage)
        assert stage is not None, f"{action} has no neighbour"
        return placement.devices[stage]


_ROUND_TRIPS = 5


def measure_links(pipeline: Pipeline, message: MessageFormat) -> dict[Edge, float]:
    """Measure the seconds of a message between this rank and its neighbours, by (source, destination).

    A rank returns only edges to and from neighbours with higher device numbers, so the ranks' results do not overlap.
    Both directions have the same value, half a round trip in an idle pipeline. Every rank of the pipeline must call
    this at the same time, between steps. The shapes of messages must be known.
    """
    assert message.typical is not None, "the cost of messages of unknown shape is unknown"
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
