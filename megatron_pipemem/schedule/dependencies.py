"""Dependencies of actions: the graph of all waits, the order and times of its nodes, and the circle of a deadlock.

The nodes of a graph are actions. A lane is a list of nodes that run one after another. Every device is a lane, and the
collectives of all devices have a lane of their own. A node waits for the node before it in its lane, and for nodes of
other lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import COLLECTIVES, EVERYWHERE, MEMORY, VOCABULARY, Action, Kind, Need
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import ActionNodes, Order, Schedule, come_before
from megatron_pipemem.schedule.units import WHOLE, Units

Waits = Sequence[tuple[int, int]]
"""``(node, link)`` pairs: the needed nodes, each with the link that carries its result."""

NEVER = -1
"""Stands for a needed node that does not exist."""


Step = tuple[int, int, Waits, int]
"""A node, its lane, its waits, and its price."""


class Walk(NamedTuple):
    """The nodes of a graph that can run. A node cannot if it waits for a missing node, or for itself in a circle."""

    nodes: list[int]  # every node comes after the nodes that it waits for
    reached: list[int]  # per lane, the number of its nodes that run
    depths: list[int]
    """Per node, the number of nodes on the longest path of waits that ends with it; 0 if it cannot run."""


@dataclass(eq=False)
class Graph:
    """A graph of actions, its nodes: the lanes that run the nodes in order, and the nodes that each node waits for."""

    lanes: Sequence[Sequence[int]]
    """The nodes of every lane in running order. Every node is in one lane."""
    waits: Sequence[Waits]  # per node
    prices: Sequence[int] = ()  # per node, the index of its price (see ``Times``)
    lane_of: Sequence[int] = ()  # per node, its lane; derived from ``lanes`` if left out

    def __post_init__(self) -> None:
        if not self.lane_of:
            lane_of = [0] * len(self.waits)
            for lane, nodes in enumerate(self.lanes):
                for node in nodes:
                    lane_of[node] = lane
            self.lane_of = lane_of

    def steps(self, nodes: Iterable[int]) -> Iterator[Step]:
        """Return each of these nodes with its lane, waits and price, as ``Times.run`` takes them."""
        lane_of, waits, prices = self.lane_of, self.waits, self.prices
        return ((node, lane_of[node], waits[node], prices[node]) for node in nodes)

    def walk(self) -> Walk:
        """Return the nodes that can run: those of every lane, up to the first that waits for a node that never runs."""
        waits, depths = self.waits, [0] * (len(self.waits) + 1)  # the last is NEVER
        nodes: list[int] = []
        waiting: dict[int, list[Iterator[int]]] = {}

        def run(lane: Sequence[int]) -> Iterator[int]:
            """Run the nodes of a lane, and yield each node that it has to wait for."""
            depth = 0
            for node in lane:
                for needed, _ in waits[node]:
                    while not (depth_of_needed := depths[needed]):
                        yield needed
                    if depth_of_needed > depth:
                        depth = depth_of_needed
                depth += 1
                depths[node] = depth
                nodes.append(node)
                if node in waiting:
                    runnable.extend(waiting.pop(node))

        runnable = list(map(run, self.lanes))
        while runnable:
            lane = runnable.pop()
            if (awaited := next(lane, None)) is not None:
                waiting.setdefault(awaited, []).append(lane)
        depths.pop()  # of NEVER
        return Walk(nodes, [sum(map(bool, map(depths.__getitem__, lane))) for lane in self.lanes], depths)

    def by_urgency(self, urgency: Callable[[int], Any]) -> Iterator[int]:
        """Yield all nodes that can run: each time, of all nodes whose needed nodes have been yielded, the most urgent.

        A smaller number is more urgent. Among equal urgencies the first lane wins. ``urgency`` is called once per node,
        when all nodes that this node waits for have been yielded.
        """
        done = bytearray(len(self.waits) + 1)
        reached = [0] * len(self.lanes)
        waiting: dict[int, list[int]] = {}
        runnable: list[tuple[Any, int, int]] = []
        arriving: Iterable[int] = range(len(self.lanes))
        while True:
            for lane in arriving:
                for node in self.lanes[lane][reached[lane] : reached[lane] + 1]:
                    missing = next((needed for needed, _ in self.waits[node] if not done[needed]), None)
                    if missing is None:
                        heappush(runnable, (urgency(node), lane, node))
                    else:
                        waiting.setdefault(missing, []).append(lane)
            if not runnable:
                return
            _, lane, node = heappop(runnable)
            yield node
            done[node] = True
            reached[lane] += 1
            arriving = (lane, *waiting.pop(node, ()))


class Times[Number: (int, float)]:
    """Compute start and end of every node of a graph if each starts as soon as it can.

    ``graph.prices`` has the index of a node's seconds in ``seconds``. A lag is the time that a result needs over a
    link, and ``lags`` has one per link. ``zero`` is the time at which the lanes begin, an integer if times are whole
    ticks. ``serve(node, ready)`` returns the time at which a node with a negative price both starts and ends. ``ready``
    is its earliest start.
    """

    def __init__(
        self,
        graph: Graph,
        seconds: Sequence[Number],
        lags: Sequence[Number],
        zero: Number,
        serve: Callable[[int, Number], Number] | None = None,
    ) -> None:
        self._graph = graph
        self._seconds: Sequence[Number] = seconds
        self._lags: Sequence[Number] = lags
        self._serve: Callable[[int, Number], Number] | None = serve
        self.starts: list[Number] = [zero] * len(graph.waits)
        self.ends: list[Number] = [zero] * len(graph.waits)
        self.free: list[Number] = [zero] * len(graph.lanes)

    def start_of(self, node: int) -> Number:
        """Return the earliest start of a node. Call it after ``run`` of its waits and of the nodes before it."""
        graph = self._graph
        arrivals: list[Number] = [self.ends[needed] + self._lags[link] for needed, link in graph.waits[node]]
        return max([self.free[graph.lane_of[node]]] + arrivals)

    def run(self, steps: Iterable[Step]) -> None:
        """Compute start and end of nodes, each of which must come after the nodes that it waits for.

        Searches spend most of their time here.
        """
        starts, ends, free, seconds, lags = self.starts, self.ends, self.free, self._seconds, self._lags
        for node, lane, waits, price in steps:
            start = free[lane]
            for needed, link in waits:
                arrival = ends[needed] + lags[link]
                if arrival > start:
                    start = arrival
            if price < 0:
                start = end = self._serve(node, start)  # type: ignore[misc]  # given if there are negative prices
            else:
                end = start + seconds[price]
            starts[node] = start
            free[lane] = ends[node] = end


class Wait(NamedTuple):
    """A blocked device, with the action that it waits for."""

    device: int
    position: int  # number of actions of its order that have run
    action: Action  # the action that cannot run
    owner: int  # the device that it waits for
    needed: Action  # the action that it waits for, which its owner has not reached
    needed_position: int  # position of ``needed`` in the owner's order


def find_cycle(
    orders: Sequence[Sequence[Action]], reached: Sequence[int], awaited: Callable[[int], tuple[int, int] | None]
) -> tuple[Wait, ...]:
    """Return the waits of a deadlock, each for the next device and the last for the first; empty if there is none.

    ``reached`` has the number of actions that every device has run. ``awaited`` returns device and position of the
    action that a blocked device waits for; ``None`` if that action does not exist, and then there is no circle.
    """
    path: dict[int, Wait] = {}
    device = next((d for d, order in enumerate(orders) if reached[d] < len(order)), None)
    while device is not None and device not in path:
        place = awaited(device)
        if place is None:
            return ()
        owner, position = place
        path[device] = Wait(
            device, reached[device], orders[device][reached[device]], owner, orders[owner][position], position
        )
        device = owner
    members = list(path)
    return tuple(path[member] for member in members[members.index(device) :]) if device is not None else ()


def deadlock(cycle: Sequence[Wait], place: str, remedy: str) -> ScheduleError:
    """Return the error for devices that wait for one another in a circle.

    ``place`` follows the word "deadlock" in its message, and ``remedy`` is the last part.
    """
    standing = {wait.device: wait.action for wait in cycle}
    steps = "; ".join(
        f"{wait.action} (device {wait.device}, position {wait.position}) waits for {wait.needed} (device {wait.owner}, "
        f"position {wait.needed_position}), which comes after {standing[wait.owner]}"
        for wait in cycle
    )
    first = cycle[0]
    return ScheduleError(
        "deadlock",
        f"deadlock{place}: {steps}; {remedy}",
        at=(first.device, first.position, first.action),
        cycle=tuple(cycle),
    )


def needs_of(
    action: Action, placement: Placement, fused: Container[Action], units: Units = WHOLE, vocabulary_barriers: int = 0
) -> tuple[Action, ...]:
    """Return the actions that must end before ``action`` starts, whether or not a schedule has them.

    Messages are left out, because orders have none. The recomputations and reloads that a backward needs are left
    out too (``validate`` proves them): they are on the same device.

    The parts of a microbatch share the keys and values of attention. So a part runs forward after the part before it.
    It runs backward after the part that follows it, which adds to the gradients of its keys and values. All parts of a
    microbatch share one loss.

    ``fused`` has the schedule's B. If it has the B of a needed stage and microbatch, B is returned in place of I.
    """
    kind, stage, unit = action
    needed = []
    for need in kind.spec.needs:
        if need.barriers and vocabulary_barriers not in need.barriers:
            continue
        if need.only and stage != _end_of(placement, need.only, kind):
            continue
        needed_kind = Kind(need.kind)
        if need.place:
            place: int | None = (
                EVERYWHERE if need.place == "everywhere" else _end_of(placement, need.place, needed_kind)
            )
        elif need.stage:
            place = placement.next_stage(stage) if need.stage > 0 else placement.previous_stage(stage)
        else:
            place = stage
        if place is None:
            continue
        of_others = needed_kind is Kind.I and (need.stage, need.unit, need.place) != (0, "", "")
        for needed_unit in _units(need, unit, units):
            full = Action(Kind.B, place, needed_unit)
            needed.append(full if of_others and full in fused else Action(needed_kind, place, needed_unit))
    return tuple(needed)


def _end_of(placement: Placement, end: str, kind: Kind) -> int:
    """Return the first or last stage of the model, or its device if ``kind`` is a kind ``of_device``."""
    stage = {"first": 0, "last": placement.num_stages - 1}[end]
    return placement.devices[stage] if kind.spec.of_device else stage


def _units(need: Need, unit: int, units: Units) -> Iterable[int]:
    """Return the units of its own microbatch that an action of ``unit`` needs."""
    if need.unit == "last":
        return (units.last(unit),)
    if need.unit == "until":
        return range(units.first(unit), unit + 1)
    if not need.unit:
        return (unit,)
    neighbour = units.before(unit) if need.unit == "before" else units.after(unit)
    return () if neighbour is None else (neighbour,)


class _Need(NamedTuple):
    """A need that all microbatches of a kind on a stage share: ``2F0`` needs ``1F0``, ``2F1`` needs ``1F1``, ..."""

    action: Action  # the action that one of the waiting actions needs
    nodes: dict[int, int]  # the nodes of the needed actions, by microbatch
    shift: int  # microbatch of the needed action minus that of the waiting action
    link: int  # number of the link that carries the result
    is_local: bool  # whether needed and waiting action are on the same device


class Dependencies:
    """The graph of the actions of all devices. Actions are nodes, device by device, and collectives follow them.

    A device is a lane, and so is the channel that serves the collectives in posting order. An action that needs a
    collective waits for the collective's node, which waits for the posts of all devices. A needed action that comes
    earlier on the same device is left out of the graph.

    ``orders`` may be wrong: an action whose need is missing then never runs. ``needs`` returns the actions that an
    action needs. It is called once per kind, stage and place within the microbatch, since all microbatches have the
    same needs. ``already`` has actions that ran before. ``pairs`` is that of the schedule. The first node of a pair has the
    waits of both, and every node that waits for the first waits for the second.

    Attributes:
        actions: the action of every node. A collective has the stage ``EVERYWHERE``.
        kinds: kind and stage for every price in the graph; actions on memory have the price -1.
        links: source and destination of every link. The first one stands for results on the same device.
        lanes: the nodes of every device, and of the channel of the collectives if there are any.
        impossible: the nodes that need a missing action, or one that comes later on their own device.
        nodes: the numbers of the actions, without the collectives' nodes.
        pairs: the first node of every pair. The second node follows it.
        graph: the waits.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        placement: Placement,
        needs: Callable[[Action], Iterable[Action]],
        units: Units = WHOLE,
        already: Container[Action] = (),
        pairs: Iterable[Action] = (),
        nodes: ActionNodes | None = None,
    ) -> None:
        self._orders, self._placement, self._needs = orders, placement, needs
        self._units, self._already = units, already
        self.num_devices = len(orders)
        self.nodes = nodes or ActionNodes(orders)
        self.actions, self._nodes = list(self.nodes.actions), dict(self.nodes.groups)
        self._num_ordered = len(self.actions)
        self.lanes = self._numbered()
        self.kinds, self.links = list(self._nodes), [(0, 0)]
        self.impossible: list[int] = []
        self._rules: dict[tuple[Kind, int, Hashable], tuple[int, list[_Need]]] = {}
        self.pairs = sorted(self._nodes[kind, stage][microbatch] for kind, stage, microbatch in pairs)
        self._lane_of = [lane for lane, nodes in enumerate(self.lanes) for _ in nodes]
        waits, prices = self._edges()
        self.graph = Graph(self.lanes, self._joined(waits), prices, self._lane_of)

    @classmethod
    def of_schedule(cls, schedule: Schedule, already: Container[Action] = ()) -> Dependencies:
        """Return the dependencies of a schedule's orders. ``already`` has the actions that ran before them.

        Those of the last two schedules are kept, because a schedule is usually proved, simulated and drawn in turn.
        """
        if not already and (kept := _kept(schedule)) is not None:
            return kept
        needs = _needs_in(schedule)
        dependencies = cls(schedule.orders, schedule.placement, needs, schedule.units, already, schedule.pairs)
        if not already:
            _latest[:] = [*_latest[-1:], (ref(schedule, _forget), dependencies)]
        return dependencies

    @classmethod
    def between(cls, schedule: Schedule, devices: Container[int]) -> Dependencies:
        """Return the dependencies of some devices' orders on one another, or all of them if they are kept.

        The lanes of other devices are empty. The schedule must have no vocabulary passes.
        """
        if (kept := _kept(schedule)) is not None:
            return kept
        device_of, needs = schedule.placement.devices, _needs_in(schedule)

        def needs_between(action: Action) -> Iterator[Action]:
            return (needed for needed in needs(action) if device_of[needed.stage] in devices)

        orders = [order if device in devices else () for device, order in enumerate(schedule.orders)]
        pairs = [first for first in schedule.pairs if device_of[first.stage] in devices]
        return cls(orders, schedule.placement, needs_between, schedule.units, pairs=pairs)

    def _numbered(self) -> list[range]:
        """Return the nodes of every lane, and add a node for every collective to ``actions``."""
        lanes, first = self.nodes.lanes, len(self.actions)
        if all(kind not in COLLECTIVES for kind, _ in self._nodes):
            return lanes
        for kind, _, microbatch in [action for action in self.actions if action.kind in COLLECTIVES]:
            nodes = self._nodes.setdefault((kind, EVERYWHERE), {})
            if microbatch not in nodes:
                nodes[microbatch] = len(self.actions)
                self.actions.append(Action(kind, EVERYWHERE, microbatch))
        return [*lanes, range(first, len(self.actions))]

    def _edges(self) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Return for every node its waits, and the index of its price in ``kinds`` (-1 for actions on memory)."""
        lane_of = self._lane_of
        waits: list[list[tuple[int, int]]] = [[]] * len(lane_of)  # most nodes wait for nothing, and share one list
        prices = [-1] * len(lane_of)
        for (kind, stage), nodes in list(self._nodes.items()):
            alike: dict[Hashable, dict[int, int]] = {None: nodes}  # units and nodes that share a rule
            if not self._units.are_whole:
                alike = {}
                for unit, node in nodes.items():
                    alike.setdefault(self._place(unit), {})[unit] = node
            for place, sharing in alike.items():
                first = next(iter(sharing.values()))
                price, needs = self._rules[kind, stage, place] = self._rule(self.actions[first], lane_of[first])
                for node in sharing.values():
                    prices[node] = price
                for sample, numbers, shift, link, is_local in needs:
                    if is_local and not shift and come_before(numbers, sharing):
                        continue
                    for microbatch, node in sharing.items():
                        needed = numbers.get(microbatch + shift, NEVER)
                        if is_local or needed == NEVER:
                            if NEVER < needed < node or _moved(sample, microbatch + shift) in self._already:
                                continue
                            self.impossible.append(node)
                        if waits[node]:
                            waits[node].append((needed, link))
                        else:
                            waits[node] = [(needed, link)]
        if sum(map(len, self._nodes.values())) < len(lane_of):  # an action that occurs twice waits as its last one does
            for node, (kind, stage, microbatch) in enumerate(self.actions):
                last = self._nodes[kind, stage][microbatch or 0]
                waits[node], prices[node] = waits[last], prices[last]
        self.impossible.sort()
        return waits, prices

    def _place(self, unit: int) -> Hashable:
        """Return a key that units share if their microbatches have as many parts before them, and after them."""
        if self._units.are_whole:
            return None
        return unit - self._units.first(unit), self._units.last(unit) - unit

    def _joined(self, waits: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
        """Return the waits of all nodes, where the first node of a pair waits for the needs of both.

        The second node of a pair waits for nothing. Nodes that need the first one wait for the second one.
        """
        if not self.pairs:
            return waits
        for first in self.pairs:
            waits[first], waits[first + 1] = waits[first] + waits[first + 1], []
        firsts = set(self.pairs)
        return [[(needed + (needed in firsts), link) for needed, link in of_node] for of_node in waits]

    def _rule(self, action: Action, lane: int) -> tuple[int, list[_Need]]:
        """Return the index of the price, and the needs, that all actions with this kind, stage and ``_place`` share.

        New links are added to ``links``.
        """
        microbatch = action.microbatch or 0
        if action.stage == EVERYWHERE:
            needed_actions = [action._replace(stage=device) for device in range(len(self._orders))]
        else:
            needed_actions = list(self._needs(action))
            # A device posts a collective before it waits for it.
            needed_actions += [needed._replace(stage=lane) for needed in needed_actions if needed.stage == EVERYWHERE]
        needs = []
        for needed in needed_actions:
            nodes = self._nodes.get(needed[:2], {})
            if needed.kind is Kind.I and action.kind is not Kind.W:  # the gradient comes from an I or from a B
                nodes = nodes | self._nodes.get((Kind.B, needed.stage), {})
            source = needed.stage if needed.kind in VOCABULARY else self._placement.devices[needed.stage]
            link = (0, 0) if EVERYWHERE in (source, action.stage) or source == lane else (source, lane)
            if link not in self.links:
                self.links.append(link)
            shift = (needed.microbatch or 0) - microbatch
            needs.append(_Need(needed, nodes, shift, self.links.index(link), source == lane))
        return -1 if action.kind in MEMORY else self.kinds.index(action[:2]), needs

    def nodes_of(self, kind: Kind, stage: int) -> Mapping[int, int]:
        """Return the nodes of a kind on a stage in the order of their device, by unit."""
        return self._nodes.get((kind, stage), {})

    @cached_property
    def num_messages(self) -> int:
        """The number of actions whose result is sent to another device."""
        return sum(len(self.nodes_of(kind, stage)) for kind, stage in Router(self._placement).emitting)

    @cached_property
    def walk(self) -> Walk:
        """Return the nodes that can run."""
        return self.graph.walk()

    @cached_property
    def steps(self) -> list[Step]:
        """Return the steps of the graph, in the order of ``walk``."""
        return list(self.graph.steps(self.walk.nodes))

    def needed_by(self, node: int) -> Iterator[Action]:
        """Yield all actions that a node needs, including those on its own device and those that the orders lack."""
        microbatch = self.actions[node].microbatch or 0
        for need in self._rules[(*self.actions[node][:2], self._place(microbatch))][1]:
            needed = need.nodes.get(microbatch + need.shift)
            action = _moved(need.action, microbatch + need.shift) if needed is None else self.actions[needed]
            if action.stage == EVERYWHERE:
                yield from (action._replace(stage=device) for device in range(len(self._orders)))
            else:
                yield action

    def cycle(self) -> tuple[Wait, ...]:
        """Return the waits of a deadlock; empty if all devices reach their ends or an action is missing."""

        def awaited(device: int) -> tuple[int, int] | None:
            needed = self._awaited(self.lanes[device][self.walk.reached[device]])
            if needed is None:
                return None
            lane = self.graph.lane_of[needed]
            return lane, needed - self.lanes[lane].start

        return find_cycle(self._orders, self.walk.reached, awaited)

    def _awaited(self, node: int) -> int | None:
        """Return a device's node for which ``node`` waits without end; ``None`` if the needed action is missing."""
        needed = next(needed for needed, _ in self.graph.waits[node] if needed == NEVER or not self._runs(needed))
        if needed < self._num_ordered:
            return None if needed == NEVER else needed
        # The channel may be stuck at an earlier collective.
        return self._awaited(self.lanes[-1][self.walk.reached[-1]])

    def stuck(self) -> ScheduleError | None:
        """Return the error for the action at which the first stuck device stops; ``None`` if all devices end."""
        for device, (order, reached) in enumerate(zip(self._orders, self.walk.reached, strict=False)):
            if reached < len(order):
                node = self.lanes[device][reached]
                needs = chain.from_iterable(map(self.needed_by, range(node, node + 1 + (node in self.pairs))))
                unmet = [str(needed) for needed in needs if not self._has_run(needed)]
                return ScheduleError(
                    "unmet-need",
                    f"waits for {', '.join(unmet)}, which never runs; validate() shows why",
                    at=(device, reached, order[reached]),
                    cycle=self.cycle(),
                )
        return None

    def _has_run(self, action: Action) -> bool:
        node = self._nodes.get(action[:2], {}).get(action.microbatch or 0)
        return action in self._already if node is None else self._runs(node)

    def _runs(self, node: int) -> bool:
        lane = self.graph.lane_of[node]
        return node - self.lanes[lane].start < self.walk.reached[lane]


_latest: list[tuple[ref[Schedule], Dependencies]] = []


def _kept(schedule: Schedule) -> Dependencies | None:
    """Return the kept dependencies of a schedule; ``None`` if there are none."""
    return next((dependencies for latest, dependencies in _latest if latest() is schedule), None)


def _needs_in(schedule: Schedule) -> Callable[[Action], tuple[Action, ...]]:
    """Return the function that returns the needs of a schedule's action."""
    placement, units, barriers = schedule.placement, schedule.units, schedule.vocabulary_barriers
    return lambda action: needs_of(action, placement, (), units, barriers)


def _forget(gone: ref[Schedule]) -> None:
    _latest[:] = [(schedule, dependencies) for schedule, dependencies in _latest if schedule is not gone]


def _moved(action: Action, microbatch: int) -> Action:
    return action if action.microbatch is None else action._replace(microbatch=microbatch)
