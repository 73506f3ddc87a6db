"""Play several pipeline ranks in one process: threads that run one at a time, and messages from hand to hand.

Every rank is a thread with a stream of its own. One thread runs at a time, so no two ranks use at once what Megatron or
this project keeps for the whole process. A thread gives its turn away after every message, and while it waits for one
that has not been posted. Turns are of the host only: streams run at the same time, and wait for each other by events.

A message is a copy on a stream of its edge. As with NCCL, it begins when both streams have reached their posts and the
earlier message of the edge has ended.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest import mock

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_pipemem.runtime.trace import TracedAction
from megatron_pipemem.runtime.transport import Pipeline, edges
from megatron_pipemem.schedule.action import Action
from megatron_pipemem.schedule.placement import Placement

Edge = tuple
"""Source and destination of a message, and a name where two edges have the same ranks."""
PATIENCE_SECONDS = 60.0
"""Time without a rank that can go on, after which the step counts as stuck."""


class Machine(Protocol):
    """Streams and events, of a GPU or of virtual time."""

    def on(self, rank: int) -> AbstractContextManager:
        """Return a context in which the thread works on a rank's stream."""

    def now(self) -> Any:
        """Return an event of the current stream."""

    def wait(self, event: Any) -> None:
        """Let the current stream wait for an event."""

    def has_ended(self, rank: int, event: Any) -> bool:
        """Return whether the host knows that an event has happened. On virtual streams it has if ``rank`` is as far."""

    def mark(self) -> Any:
        """Return an event, for the host's thread, after all that has joined it."""

    def join(self, event: Any) -> None:
        """Let the host's thread wait for an event of a rank, on its stream."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two marks that have happened."""

    def copy(self, edge: Edge, to: torch.Tensor, source: torch.Tensor, after: tuple, is_left: bool) -> Any:
        """Copy on the stream of an edge after some events, and return the event of its end.

        With ``is_left``, the sender does not wait for the copy, and may free the source.
        """


class Gpu:
    """A GPU whose ranks have the given streams."""

    def __init__(self, streams: list):
        self.streams = streams
        self._links: dict[Edge, Any] = defaultdict(torch.cuda.Stream)
        self._left: list[tuple[torch.cuda.Event, torch.Tensor]] = []

    def on(self, rank: int) -> AbstractContextManager:
        return torch.cuda.stream(self.streams[rank])

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(event)

    def has_ended(self, rank: int, event: torch.cuda.Event) -> bool:
        return event.query()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    join = wait

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3

    def copy(self, edge: Edge, to: torch.Tensor, source: torch.Tensor, after: tuple, is_left: bool) -> torch.cuda.Event:
        link = self._links[edge]
        for event in after:
            link.wait_event(event)
        with torch.cuda.stream(link):
            to.copy_(source, non_blocking=True)
            end = self.now()
        # ``record_stream`` has no effect on the transport's aliases.
        self._left = [(event, tensor) for event, tensor in self._left if not event.query()]
        if is_left:
            self._left.append((end, source))
        return end


class Virtual:
    """Streams whose passes and messages take the time that they are said to take. Events are times."""

    def __init__(self, ranks: int, message_seconds: float):
        self.free = [0.0] * ranks
        self.message_seconds = message_seconds
        self._links: dict[Edge, float] = defaultdict(float)
        self._rank = threading.local()

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        self._rank.number = rank
        yield

    def run(self, seconds: float) -> None:
        """Keep the current stream busy."""
        self.free[self._rank.number] += seconds

    def now(self) -> float:
        return self.free[self._rank.number]

    def wait(self, event: float) -> None:
        self.free[self._rank.number] = max(self.now(), event)

    def has_ended(self, rank: int, event: float) -> bool:
        return event <= self.free[rank]

    def mark(self) -> float:
        return max(self.free)

    def join(self, event: float) -> None:
        """All ranks start the next step at the mark that follows."""

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def copy(self, edge: Edge, to: torch.Tensor, source: torch.Tensor, after: tuple, is_left: bool) -> float:
        to.copy_(source)
        self._links[edge] = max(self._links[edge], *after) + self.message_seconds
        return self._links[edge]


class VirtualTrace:
    """Takes the place of ``runtime.trace.Trace``: every action takes its price on the current virtual stream."""

    def __init__(self, virtual: Virtual, price: Callable[[Action], float]):
        self._virtual, self._price = virtual, price
        self._times: list[TracedAction] = []

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        yield
        begin = self._virtual.now()
        self._virtual.run(self._price(action))
        self._times.append(TracedAction(action, begin, self._virtual.now()))

    def actions(self) -> list[TracedAction]:
        return self._times


class Stuck(RuntimeError):
    """No rank can go on."""


class Crew:
    """A thread for each rank. They live as long as the process, because libraries keep memory for every thread."""

    def __init__(self, ranks: int):
        self.threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(ranks)]


class Turns:
    """Runs one function per rank in the threads of a crew, of which one runs at a time. It serves for one step."""

    def __init__(self, crew: Crew):
        self._threads, ranks = crew.threads, len(crew.threads)
        self._condition = threading.Condition()
        self._ready: list[Callable[[], bool] | None] = [lambda: True] * ranks  # ``None``: the rank has ended
        self._awaited = [""] * ranks
        self._turn = 0
        self._failure: BaseException | None = None

    def run[T](self, work: Callable[[int], T]) -> list[T]:
        """Return ``work(rank)`` of all ranks. The first exception of a rank ends all of them, and is raised here."""
        results: dict[int, T] = {}

        def body(rank: int) -> None:
            try:
                self._await_turn(rank)
                results[rank] = work(rank)
            except BaseException as error:
                with self._condition:
                    self._failure = self._failure or error
            finally:
                with self._condition:
                    self._ready[rank] = None
                    if self._turn == rank:
                        self._pass_on(rank)
                    self._condition.notify_all()

        for ended in [thread.submit(body, rank) for rank, thread in enumerate(self._threads)]:
            ended.result()
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(len(self._threads))]

    def give(self, rank: int, is_ready: Callable[[], bool] = lambda: True, awaited: str = "") -> None:
        """Let the other ranks run, and return when ``is_ready()`` and this rank's turn has come."""
        with self._condition:
            self._ready[rank], self._awaited[rank] = is_ready, awaited
            self._pass_on(rank)
        self._await_turn(rank)

    def _await_turn(self, rank: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._failure is not None or self._turn == rank)
            if self._failure is not None:
                raise Stuck("another rank has failed") from self._failure

    def _pass_on(self, rank: int) -> None:
        count, deadline = len(self._ready), time.monotonic() + PATIENCE_SECONDS
        while any(self._ready) and self._failure is None:
            for step in range(1, count + 1):
                other = (rank + step) % count
                is_ready = self._ready[other]
                if is_ready is not None and is_ready():
                    self._turn = other
                    self._condition.notify_all()
                    return
            if time.monotonic() > deadline:
                waiting = [f"rank {r} waits for {what}" for r, what in enumerate(self._awaited) if self._ready[r]]
                self._failure = Stuck("; ".join(waiting))
                self._condition.notify_all()
                return
            time.sleep(2e-5)  # a rank waits for its stream


@dataclass(eq=False)
class Ticket:
    """One end of a message. It has the methods of ``torch.distributed.Work`` that are used here.

    Args:
        office: matches the two ends.
        rank: whose end it is.
        tensor: to send, or the buffer.
        posted: the event at which the stream has reached the post.
        is_send: whether it is the sender's end.
        ended: the event of the message's end; ``None`` until both ends are posted.
        is_left: whether the sender goes on although the receiver has not posted the message.
    """

    office: Office
    rank: int
    tensor: torch.Tensor
    posted: Any
    is_send: bool
    ended: Any = None
    is_left: bool = False

    def wait(self) -> bool:
        """Let the current stream wait for the end of the message. The host waits until a received message is sent.

        A host with NCCL would not wait. Here a stream can only wait for work that another thread has launched. A sender
        whose message has no receiver yet goes on, so its stream never waits for a late receiver.
        """
        if self.ended is None and self.is_send:
            self.is_left = True
            return True
        if self.ended is None:
            self.office.turns.give(self.rank, lambda: self.ended is not None, "a message")
        self.office.machine.wait(self.ended)
        return True

    def is_completed(self) -> bool:
        return self.ended is not None and self.office.machine.has_ended(self.rank, self.ended)


@dataclass(eq=False)
class Office:
    """All messages of one step. Both ends of an edge post its messages in the same order."""

    machine: Machine
    turns: Turns
    _sends: dict[Edge, deque[Ticket]] = field(default_factory=lambda: defaultdict(deque))
    _receives: dict[Edge, deque[Ticket]] = field(default_factory=lambda: defaultdict(deque))

    def send(self, edge: Edge, tensor: torch.Tensor) -> Ticket:
        # Detached now, because Megatron drops the data of an output when it has been posted.
        return self._post(edge, Ticket(self, edge[0], tensor.detach(), self.machine.now(), True), self._sends)

    def receive(self, edge: Edge, tensor: torch.Tensor) -> Ticket:
        return self._post(edge, Ticket(self, edge[1], tensor, self.machine.now(), False), self._receives)

    def _post(self, edge: Edge, ticket: Ticket, queue: dict[Edge, deque[Ticket]]) -> Ticket:
        queue[edge].append(ticket)
        while self._sends[edge] and self._receives[edge]:
            send, receive = self._sends[edge].popleft(), self._receives[edge].popleft()
            send.ended = receive.ended = self.machine.copy(
                edge, receive.tensor.detach(), send.tensor, (send.posted, receive.posted), send.is_left
            )
        return ticket


class Channel:
    """Takes the place of the process group of one edge in ``runtime.transport.Transport``."""

    def __init__(self, office: Office, edge: Edge):
        self._office, self._edge = office, edge

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Ticket:
        ticket = self._office.send(self._edge, tensors[0])
        self._office.turns.give(self._edge[0])
        return ticket

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Ticket:
        return self._office.receive(self._edge, tensors[0])


class Rank:
    """A process group that has a rank and a size, and cannot communicate."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def pipeline(placement: Placement, rank: int, office: Office) -> Pipeline:
    """Return a pipeline whose messages go through ``office``, as one rank sees it."""
    channels = {edge: Channel(office, edge) for edge in edges(placement) if rank in edge}
    group, ranks = Rank(rank, placement.num_devices), range(placement.num_devices)
    return Pipeline(group, placement, rank, ranks, channels)  # type: ignore[arg-type]


@contextmanager
def without_groups() -> Iterator[None]:
    """Let ``Transport`` take the ranks of a pipeline for those of its channels, which are no groups of torch."""
    with mock.patch("torch.distributed.get_group_rank", lambda group, rank: rank):
        yield


class Communicator(P2PCommunicator):
    """Megatron's communicator for its own schedules, with messages through an ``Office``.

    Without overlap, Megatron waits for each message and then for the whole device. Here the rank waits for its own
    stream, as it would for a device of its own.
    """

    def __init__(self, rank: Rank, config: Any, office: Office):
        self.pp_group, self.config, self._office = rank, config, office
        own, size = rank.rank(), rank.size()
        self.next_rank, self.prev_rank = (own + 1) % size, (own - 1) % size
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, Ticket] | None]:
        office, own, before, after = self._office, self.pp_group.rank(), self.prev_rank, self.next_rank
        posted: dict[str, Ticket] = {}
        # With two ranks, both neighbours are the same, and outputs and gradients need edges of their own.
        if tensor_send_prev is not None:
            posted["send_prev"] = office.send((own, before, "gradients"), tensor_send_prev)
        if recv_prev:
            posted["recv_prev"] = office.receive((before, own, "outputs"), self._buffer(tensor_shape))
        if tensor_send_next is not None:
            posted["send_next"] = office.send((own, after, "outputs"), tensor_send_next)
        if recv_next:
            posted["recv_next"] = office.receive((after, own, "gradients"), self._buffer(tensor_shape))
        before_buffer, after_buffer = (
            posted[name].tensor if name in posted else None for name in ("recv_prev", "recv_next")
        )
        office.turns.give(own)
        if wait_on_reqs:
            for ticket in posted.values():
                ticket.wait()
            if self.config.batch_p2p_comm and self.config.batch_p2p_sync and posted:
                machine, reached = office.machine, office.machine.now()
                office.turns.give(own, lambda: machine.has_ended(own, reached), "its own stream")
        return before_buffer, after_buffer, None if wait_on_reqs else posted

    def _buffer(self, shape: Any) -> torch.Tensor:
        device = torch.cuda.current_device()
        return torch.empty(tuple(shape), requires_grad=True, device=device, dtype=self.config.pipeline_dtype)
