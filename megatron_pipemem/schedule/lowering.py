"""Lowering adds messages, sums over replicas and gradient reductions to the orders of a schedule, in one of three ways.

**One channel per edge** (``_Messages``). An edge is a pair (source device, destination device). NCCL has no tags,
so both devices must post the messages of an edge in the same order: that in which the source produces them. A send is
posted right after the action that produces its data. A receive is posted as late as the order allows, but one compute
action ahead of the action that consumes its data. So that action hides the transfer.

This adds no deadlock. Posts never block. A send is posted before its source waits for anything else. A receive is
posted before its destination waits for it or for a later message of the edge. So a message waits only for its
producer, and the schedule has that wait already.

A host may also wait for its whole device at any place (``schedule.waits``). This limits the position of a receive on
the destination. The receive comes after the last action there on which the message depends. (An earlier receive would
hide nothing.) It comes before the first action there that depends on an action launched by the source after the send.
Such a position exists, because the first limit comes before the second in every schedule without a deadlock.

A pair of a forward and a backward counts as one action here: its receives come before both, and its sends after both.

**With collectives between the actions** (``add_messages_in_sequence``). Messages and collectives may share a queue
that each device serves strictly in posting order. Then a message delays all later posts of its device until the other
device has posted it too. So the lists of all devices are parts of one sequence. It has every message once, for both
devices, right after its producer, and every collective once, for all devices. Each wait is then for an earlier entry
of the sequence, so there is no circle.

**Everything in one queue** (``add_messages_to_single_queues``). With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` a device
launches everything into one hardware queue. A message that waits for the other device may delay all later launches,
also those that compute. The strict model here assumes that it does: an action starts when the one before it has
ended, and a message moves when it is the next action on both devices.

The lists of all devices are parts of one simulated run, which has one entry per message and per collective. Each wait
is for an earlier entry of the run, so there is no circle, whatever the times are. A message moves when both devices
are between two actions. If the destination is busy, the source has a choice: it waits if computing first would delay
the destination by more than that. Where messages take time, a run in which they take none may place them better, for
``zbv`` and ``dualpipe`` for example. So both runs are made, and the faster lists are taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import (
    COLLECTIVES,
    COMPLETING,
    EVERYWHERE,
    KIND_AND_STAGE,
    MEMORY,
    ORDERED,
    SENDS,
    Action,
    Kind,
)
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Graph
from megatron_pipemem.schedule.messages import Edge, Message, RoutedUnit, Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Order, Program, Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import explained_by_validation
from megatron_pipemem.schedule.waits import LatestNeeds, run_single_queues


class Horizons:
    """Look up how many actions other devices must run before a device can reach a position of its order.

    With ``devices``, look-ups are for these devices only, and a deadlock is only found if it is between them.
    """

    def __init__(self, schedule: Schedule, devices: Container[int] | None = None) -> None:
        dependencies = (
            Dependencies.of_schedule(schedule) if devices is None else Dependencies.between(schedule, devices)
        )
        if error := dependencies.stuck():
            raise Dependencies.of_schedule(schedule).stuck() or error
        self._starts, depths = [lane.start for lane in dependencies.lanes], dependencies.walk.depths
        self._depths = [[*depths[lane.start : lane.stop], math.inf] for lane in dependencies.lanes]
        self._latest_needs = LatestNeeds(dependencies.graph, depths)

    def place(self, device: int, position: int, other: int, least: int = 0) -> int:
        """Return how many actions ``other`` must run before ``device`` has run all actions before ``position``.

        The result is at least ``least``. Lookups for two devices are fast if their positions do not fall.
        """
        # Most lookups end here: an action needs only actions that are less deep.
        if position == 0 or self._depths[device][position - 1] <= self._depths[other][least]:
            return least
        start, last = self._starts[other], self._starts[device] + position - 1
        return self._latest_needs.after(last, other, start + least - 1) - start + 1


class _Messages:
    """Adds sends and receives to the orders of single devices, for one channel per edge.

    Two compute actions are separated by the send of the first one, and then by receives, sorted by source device and
    sending order. A receive is nearest to one action ahead of its consumer, among the positions with which hosts may
    wait for their devices anywhere. Both limits grow from message to message of an edge, so receives stay in order.
    """

    def __init__(self, schedule: Schedule, horizons: Horizons) -> None:
        self._orders, self._pairs, self._horizons = schedule.orders, schedule.pairs, horizons
        self._router = Router(schedule.placement)
        self._emitted: dict[int, list[RoutedUnit]] = {}

    def added_to(self, device: int) -> Order:
        """Return the order of a device with its messages."""
        order, pairs = self._orders[device], self._pairs
        # The position of the first action of a pair, for its second action; else the position itself.
        starts = [max(at - (order[at - 1] in pairs), 0) for at in range(len(order))] if pairs else range(len(order))
        consumers: dict[tuple[Kind, int, int], int] = {}
        for position, route, unit in self._router.awaited_by(order):
            consumers[route.receive, route.destination, unit] = starts[position]
        receives: list[tuple[Action, ...]] = [()] * len(order)  # posted before every action
        for source in sorted(source for source, destination in self._router.edges if destination == device):
            for position, receive in self._receives(source, device, consumers):
                receives[starts[position]] += (receive,)
        # Posted after every action. The last is for a forward that is wrongly paired with nothing.
        sends: list[tuple[Action, ...]] = [()] * (len(order) + 1)
        for position, route, unit in self._emitted_by(device):
            sends[position + (order[position] in pairs)] += (Action(route.send, route.source, unit),)
        rows = ((*before, action, *after) for before, action, after in zip(receives, order, sends, strict=False))
        return tuple(chain.from_iterable(rows))

    def _receives(
        self, source: int, device: int, consumers: Mapping[tuple[Kind, int, int], int]
    ) -> Iterator[tuple[int, Action]]:
        """Yield the receives of an edge, each with its position. ``consumers`` has the positions of their consumers."""
        order, pairs, place = self._orders[source], self._pairs, self._horizons.place
        messages = [message for message in self._emitted_by(source) if message[1].edge[1] == device]
        receives = [Action(route.receive, route.destination, unit) for _, route, unit in messages]
        for (made, _, _), receive in zip(messages, receives, strict=True):
            if receive not in consumers:
                raise ScheduleError(
                    "unmet-need",
                    "no device runs the action that needs the result of this one; validate() shows the action to add",
                    at=(source, made, order[made]),
                )
        ahead = _ahead_of([consumers[receive] for receive in receives], self._orders[device])
        for (made, _, _), receive, position in zip(messages, receives, ahead, strict=True):
            sent = made + (order[made] in pairs)
            position = place(source, sent + 1, device, position)
            # The backward of a pair sends after its forward, whose receive may not depend on the backward.
            while place(device, position, source, made + 1) > made + 1:
                position -= 1
            yield position, receive

    def _emitted_by(self, device: int) -> list[RoutedUnit]:
        """Return the messages that a device sends."""
        if device not in self._emitted:
            self._emitted[device] = list(self._router.emitted_by(self._orders[device]))
        return self._emitted[device]


def _ahead_of(consumers: list[int], order: Order) -> list[int]:
    """Return the position for every receive of an edge: one compute action ahead of its consumer, in sending order.

    ``consumers`` has the positions of the consumers in ``order``, the order of the destination. No receive is behind
    that of a later message. Copies to the host and back do not count as compute actions.
    """
    positions = []
    first = len(order)
    for consumer in reversed(consumers):
        first = min(first, consumer)
        position = max(first - 1, 0)
        while position and order[position].kind in MEMORY:
            position -= 1
        positions.append(position)
    return positions[::-1]


def add_gradient_reductions(actions: Order) -> Order:
    """Return a device's actions with ``REDUCE_GRAD`` after every stage's last weight gradient (W, B, T or EMBED_B).

    The shards of embedding and head are reduced with the device's first stage: device and stage have the same number.
    If the send of a message follows the last gradient, the reduction comes after the send, because the next device
    waits for the message. Stages without backwards get no reduction.
    """
    last_of_kind = dict(zip(map(KIND_AND_STAGE, actions), range(1, 1 + len(actions)), strict=True))
    ends: dict[int, int] = {}  # by stage, the position after its last weight gradient
    for (kind, stage), end in last_of_kind.items():
        if kind in COMPLETING:
            ends[stage] = max(end, ends.get(stage, 0))
    lowered = list(actions)
    for stage, end in sorted(ends.items(), key=itemgetter(1), reverse=True):
        while end < len(actions) and actions[end].kind in SENDS:
            end += 1
        lowered.insert(end, Action(Kind.REDUCE_GRAD, stage))
    return tuple(lowered)


def add_replica_reductions(
    actions: tuple[Order, ...], placement: Placement, horizons: Horizons | None = None
) -> tuple[Order, ...]:
    """Return every device's actions with sums of gradients over replicas, if devices hold the model more than once.

    Every replica of a trained stage gets a ``REDUCE_REPLICAS``, even if it runs no microbatch of this step. A device
    posts the sum when the replica's gradients are complete and the sums of its deeper stages are posted. Deeper
    stages end their backwards earlier. Two devices post their sums in the same order, so they need only one channel.
    If another replica of the stage depends on later actions of a device, the device posts its sum after these.
    ``REDUCE_GRAD`` waits for the sums and comes at the end of the program. Without ``horizons`` the sums come there
    too.
    """
    if placement.replicas == 1:
        return actions
    size = placement.model_stages
    trained = {action.stage % size for order in actions for action in order if action.kind is Kind.REDUCE_GRAD}
    deepest_first = sorted(range(placement.num_stages), key=lambda stage: (-(stage % size), stage))
    sums: list[list[int]] = [[] for _ in placement.stages]
    for stage in deepest_first:
        if stage % size in trained:
            sums[placement.devices[stage]].append(stage)
    ends = [sum(action.kind in ORDERED for action in order) for order in actions]
    places = [dict.fromkeys(stages, end if horizons is None else 0) for stages, end in zip(sums, ends, strict=True)]
    if horizons is not None:
        for order, own in zip(actions, places, strict=True):
            _place_after_gradients(order, own)
        while _postpone(places, placement, horizons):
            pass
    return tuple(map(_with_sums, actions, places))


def _place_after_gradients(actions: Order, places: dict[int, int]) -> None:
    """Change ``places`` so that every sum over replicas comes right after the stage's last gradient.

    It comes later if a deeper stage's sum does. ``places`` has, per stage of the device, the number of actions of its
    order before the sum.
    """
    passed = 0
    for action in actions:
        passed += action.kind in ORDERED
        if action.kind is Kind.REDUCE_GRAD:
            places[action.stage] = passed
    _keep_order(places)


def _keep_order(places: dict[int, int]) -> None:
    """Change ``places`` so that no sum over replicas comes before that of a deeper stage. Sums only move later.

    Deeper stages come first in ``places``.
    """
    places |= zip(places, accumulate(places.values(), max), strict=True)


def _postpone(places: list[dict[int, int]], placement: Placement, horizons: Horizons) -> bool:
    """Move sums over replicas after the actions that another replica's sum depends on; return whether any has moved.

    ``places`` has, per device and stage, the number of actions of the order before the sum. It is changed.
    """
    moved = False
    for device, own in enumerate(places):
        for stage, place in own.items():
            for other in placement.counterparts(stage):
                there = placement.devices[other]
                if there == device:
                    continue
                needed = horizons.place(device, place, there, places[there][other])
                if places[there][other] < needed:
                    places[there][other] = needed
                    _keep_order(places[there])
                    moved = True
    return moved


def _with_sums(actions: Order, places: dict[int, int]) -> Order:
    waiting = deque(places.items())
    lowered: list[Action] = []
    passed = 0
    for action in actions:
        if action.kind not in SENDS:
            while waiting and waiting[0][1] <= passed:
                lowered.append(Action(Kind.REDUCE_REPLICAS, waiting.popleft()[0]))
        passed += action.kind in ORDERED
        if action.kind is not Kind.REDUCE_GRAD:
            lowered.append(action)
    sums = (Action(Kind.REDUCE_REPLICAS, stage) for stage, _ in waiting)
    return (*lowered, *sums, *(Action(Kind.REDUCE_GRAD, stage) for stage in places))


def add_messages_in_sequence(
    schedule: Schedule, actions: Iterable[tuple[int, Action]] | None = None
) -> tuple[Order, ...]:
    """Return every device's actions with each send and its receive at the same place of one sequence of all actions.

    ``actions`` is that sequence, by default the result of ``sequence``, which raises a ScheduleError if there is none.
    """
    router = Router(schedule.placement)
    lowered: list[list[Action]] = [[] for _ in schedule.orders]
    for device, action in sequence(schedule) if actions is None else actions:
        lowered[device].append(action)
        if message := router.emitted(action):
            lowered[device].append(message.send)
            lowered[message.edge[1]].append(message.receive)
    return tuple(map(tuple, lowered))


def sequence(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield ``(device, action)`` for all actions of all devices, each after the actions that it needs.

    The posts of a collective follow one another directly. Apart from that, actions come in the order of their ends
    with unit costs, so that messages are not received long before they are needed. Raise a ScheduleError if devices
    would have to post collectives in contradicting orders.
    """
    dependencies = Dependencies.of_schedule(schedule)
    ends = [(end, device) for device, spans in enumerate(simulate(schedule).spans) for _, end in spans]
    *devices, channel = dependencies.lanes
    waits = list(dependencies.graph.waits)
    firsts = {nodes.start for nodes in devices}
    for collective in channel:
        posts = [post for post, _ in waits[collective]]
        # All posts stand at the place of the last one.
        waits[collective] = [
            *((post - 1, 0) for post in posts if post not in firsts),
            *(w for p in posts for w in waits[p]),
        ]
        ends.append(max(ends[post] for post in posts))
        for post in posts:
            waits[post], ends[post] = [(collective, 0)], (-math.inf, 0)
    passed = set()
    for node in Graph(dependencies.graph.lanes, waits).by_urgency(ends.__getitem__):
        passed.add(node)
        kind, stage, microbatch = action = dependencies.actions[node]
        if stage == EVERYWHERE:
            yield from ((device, Action(kind, device, microbatch)) for device in range(len(devices)))
        elif kind not in COLLECTIVES:
            yield dependencies.graph.lane_of[node], action
    for device, nodes in enumerate(devices):
        for position, node in enumerate(nodes):
            if node not in passed:
                raise ScheduleError(
                    "collective-order",
                    "can never run: the devices wait for one another's collectives in a circle; use the passes and "
                    "collectives that with_vocabulary() places",
                    at=(device, position, dependencies.actions[node]),
                )


def lower_paired(schedule: Schedule) -> Program:
    """Add messages and gradient reductions so that there is no deadlock even if a send blocks until its receive.

    Each send and its receive are inserted at the same place of one sequence of all devices' actions. The actions of
    pairs run one after the other.
    """
    schedule = replace(schedule, pairs=frozenset())
    dependencies = Dependencies.of_schedule(schedule)
    if error := dependencies.stuck():
        raise error
    waits, device_of = dependencies.graph.waits, dependencies.graph.lane_of
    turns, following = [0] * len(dependencies.actions), [0] * len(schedule.orders)

    def turn_of(node: int) -> int:
        """Return the turn of a node: devices take turns, and one that waits for a message lets the others go on."""
        device = device_of[node]
        turns[node] = max([following[device], *(turns[n] + (device_of[n] > device) for n, _ in waits[node])])
        following[device] = turns[node] + 1
        return turns[node]

    nodes = dependencies.graph.by_urgency(turn_of)
    rows = add_messages_in_sequence(schedule, ((device_of[node], dependencies.actions[node]) for node in nodes))
    return Program(schedule, tuple(map(add_gradient_reductions, rows)))


def add_messages_to_single_queues(
    schedule: Schedule, costs: Costs, orders: tuple[Order, ...] | None = None, arrived: Iterable[Action] = ()
) -> tuple[Order, ...]:
    """Return every device's order with sends and receives so that devices with a single queue never deadlock.

    ``costs`` are the times of the simulated run that decides on the positions; every result is free of deadlock.
    ``orders`` may be a part of the schedule's orders. ``arrived`` has the receives that earlier parts have posted.
    """
    return _SingleQueueRun(schedule, costs, schedule.orders if orders is None else orders, arrived).lists()


class _SingleQueueRun:
    """A simulated run of all devices in single queues. A device is busy until a known time, or between two actions."""

    def __init__(self, schedule: Schedule, costs: Costs, orders: tuple[Order, ...], arrived: Iterable[Action]) -> None:
        self._orders, self._router, self._pairs = orders, Router(schedule.placement), schedule.pairs
        self._prices = ActionPrices(schedule, costs)
        self._lists: list[list[Action]] = [[] for _ in self._orders]
        self._at = [0] * len(self._orders)
        self._busy_until = [0.0] * len(self._orders)
        self._idle: set[int] = set()
        self._outgoing: list[dict[Edge, deque[Message]]] = [{} for _ in self._orders]
        self._arrived: set[Action] = set(arrived)
        self._consumers = {
            receive: position
            for order in self._orders
            for position, action in enumerate(order)
            if (receive := self._router.awaited(action)) is not None
        }
        self._events: list[tuple[float, int]] = [(0.0, device) for device in range(len(self._orders))]

    def lists(self) -> tuple[Order, ...]:
        """Run all devices to their ends, and return their orders with messages."""
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                self._idle.add(heappop(self._events)[1])
            while self._exchange(now) or self._post_collective(now) or self._compute(now):
                pass
        for device, order in enumerate(self._orders):
            if self._at[device] < len(order):
                raise ScheduleError(
                    "unmet-need",
                    "waits for a message or collective that never comes; validate() shows why",
                    at=(device, self._at[device], order[self._at[device]]),
                )
        return tuple(map(tuple, self._lists))

    def _occupy(self, device: int, until: float) -> None:
        self._idle.discard(device)
        self._busy_until[device] = until
        heappush(self._events, (until, device))

    def _exchange(self, now: float) -> bool:
        """Move one message whose two devices are both between two actions, and return whether there was one."""
        for device in sorted(self._idle):
            for message in self._heads(device):
                other = message.edge[1]
                if other in self._idle:
                    self._outgoing[device][message.edge].popleft()
                    self._lists[device].append(message.send)
                    self._lists[other].append(message.receive)
                    self._arrived.add(message.receive)
                    for end in message.edge:
                        self._occupy(end, now + self._prices.of_message(message.edge, message.send.microbatch))
                    return True
        return False

    def _heads(self, device: int) -> Iterator[Message]:
        """Return the next unsent message of every edge that starts at a device."""
        return (messages[0] for messages in self._outgoing[device].values() if messages)

    def _post_collective(self, now: float) -> bool:
        """Post a collective if it is the next action of all devices, and return whether it was."""
        if len(self._idle) < len(self._orders):
            return False
        following = [order[at] for order, at in zip(self._orders, self._at, strict=True) if at < len(order)]
        posts = {action._replace(stage=0) for action in following if action.kind in COLLECTIVES}
        if len(following) < len(self._orders) or len(posts) != 1 or any(a.kind not in COLLECTIVES for a in following):
            return False
        for device, action in enumerate(following):
            self._lists[device].append(action)
            self._at[device] += 1
            self._occupy(device, now + self._prices.of(*action))
        return True

    def _compute(self, now: float) -> bool:
        """Start the next action of every idle device that should not wait for a message; return whether any started."""
        ran = False
        for device in sorted(self._idle):
            order = self._orders[device]
            if self._at[device] == len(order):
                continue
            at = self._at[device]
            action, *second = together = order[at : at + 1 + (order[at] in self._pairs)]
            if action.kind in COLLECTIVES or not self._arrived.issuperset(
                filter(None, map(self._router.awaited, together))
            ):
                continue
            seconds_of_pair = sum(self._prices.second_of_pair(action, backward) for backward in second)
            end = now + self._prices.of(*action) + seconds_of_pair
            if action.kind not in MEMORY and self._should_wait(device, now, end):
                continue
            self._lists[device] += together
            self._at[device] += len(together)
            for message in filter(None, map(self._router.emitted, together)):
                self._outgoing[device].setdefault(message.edge, deque()).append(message)
            self._occupy(device, end)
            ran = True
        return ran

    def _should_wait(self, device: int, now: float, end: float) -> bool:
        """Return whether a device should first wait for the destination of a message, and not compute until ``end``.

        It should if computing delays the destination by more than the wait takes.
        """
        for message in self._heads(device):
            other = message.edge[1]
            wait = self._busy_until[other] - now
            if wait < end - self._needed_at(other, message.receive, end):
                return True
        return False

    def _needed_at(self, device: int, receive: Action, latest: float) -> float:
        """Return the earliest time at which a busy device can reach the consumer of a message.

        The search stops at the time ``latest``, so the result may be too early if it is ``latest`` or later.
        """
        time, order = self._busy_until[device], self._orders[device]
        # The consumer may belong to a later part.
        for position in range(self._at[device], self._consumers.get(receive, len(order))):
            if time >= latest:
                break
            time += self._prices.of(*order[position])
        return time


def _fastest_in_single_queues(schedule: Schedule, costs: Costs) -> tuple[Order, ...]:
    """Return the orders of ``add_messages_to_single_queues``, with positions for messages that take their time or none."""
    decisions = [costs, replace(costs, p2p=0.0)] if costs.p2p else [costs]
    lists = [add_messages_to_single_queues(schedule, times) for times in decisions]
    if len(lists) == 1:
        return lists[0]
    return min(lists, key=lambda orders: run_single_queues(Program(schedule, orders), costs).makespan)


class _Rows(Sequence[Order]):
    """The actions of all devices with one channel per edge, which are lowered when they are read.

    The first read lowers the actions of the device and of those that send to it, which are what its rank reads. The
    second read of other actions lowers all of them.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._lowered = schedule, dict[int, Order]()

    def __len__(self) -> int:
        return self._schedule.num_devices

    def __getitem__(self, device: Any) -> Any:
        if not isinstance(device, int):
            return tuple(self)[device]
        device = range(len(self))[device]
        if device not in self._lowered:
            self._lower(range(len(self)) if self._lowered else rows_of_rank(self._schedule.placement, device))
        return self._lowered[device]

    def __iter__(self) -> Iterator[Order]:
        self._lower(range(len(self)))
        return (self._lowered[device] for device in range(len(self)))

    def _lower(self, devices: Iterable[int]) -> None:
        if missing := [device for device in devices if device not in self._lowered]:
            horizons = Horizons(self._schedule, _deciding_devices(self._schedule.placement, missing))
            messages = _Messages(self._schedule, horizons)
            self._lowered |= {device: add_gradient_reductions(messages.added_to(device)) for device in missing}


def _deciding_devices(placement: Placement, rows: Collection[int]) -> set[int] | None:
    """Return the devices whose orders decide on the rows of these devices; ``None`` for all devices.

    The position of a receive depends on the waits of the two devices of its edge for one another. Where edges form no
    ring, waits through a third device end on the device where they began, and add nothing to the order of that device.
    So the two devices decide alone.
    """
    edges = Router(placement).edges  # every edge in both directions
    if len(edges) > 2 * (placement.num_devices - 1):
        return None
    deciding = {*rows, *chain.from_iterable(edge for edge in edges if edge[1] in rows)}
    return deciding if len(deciding) < placement.num_devices else None


def rows_of_rank(placement: Placement, device: int) -> list[int]:
    """Return the devices whose actions the rank of a device reads: first its own, then those that send to it."""
    return [device, *sorted(source for source, destination in Router(placement).edges if destination == device)]


__all__ = ["lower"]


@explained_by_validation
def lower(
    schedule: Schedule, *, single_queue: bool = False, costs: Costs | None = None, on_demand: bool = False
) -> Program:
    """Add messages, sums over replicas and gradient reductions to a valid schedule.

    ``single_queue`` is for devices that serve all their streams in one queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``). Only
    then ``costs`` have an effect: they decide on the positions of messages. With ``on_demand``, the actions of a device
    are lowered when they are read, if they do not depend on the lists of all devices. A deadlock of other devices is
    then found when all actions are read. ``validate_program`` proves the result. Raise a ScheduleError for a stage that
    the placement lacks.
    """
    if not set(map(itemgetter(1), chain.from_iterable(schedule.orders))) <= set(range(schedule.num_stages)):
        raise LookupError("a stage that the placement lacks, and for which no message would be added")
    horizons = None
    if single_queue:
        with_messages = _fastest_in_single_queues(schedule, costs or Costs())
    elif schedule.vocabulary_barriers:
        with_messages = add_messages_in_sequence(schedule)
    elif on_demand and schedule.placement.replicas == 1:
        return Program(schedule, _Rows(schedule))
    else:
        horizons = Horizons(schedule)
        with_messages = tuple(map(_Messages(schedule, horizons).added_to, range(schedule.num_devices)))
    reducing = tuple(map(add_gradient_reductions, with_messages))
    return Program(schedule, add_replica_reductions(reducing, schedule.placement, horizons))
