"""A measured training step: its times, its simulation with other times, and the causes of its idle time.

Times are whole nanoseconds, so that the parts of idle time add up exactly.

To find the causes, the step is simulated several times. Each simulation uses more of the measured times:

- even stages and instant messages; the idle time is then that of the schedule itself;
- the usual (median) time of every stage;
- the times of microbatches that differ from the others;
- the delays of messages;
- the delays of the host;
- all measured times.

The idle time that a simulation adds on a device is due to the times that it adds. An addition can also reduce idle
time (on a stage with more work than others). Then the parts of earlier causes shrink, and no part is negative. The
part of the barrier at the step's end is the time that would be saved if every device began the next step as soon as
it has ended this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.schedule.action import COMPUTE, RECOMPUTE, Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Step
from megatron_pipemem.schedule.measured import Pair, costs_from
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, count_messages, peaks

NANOSECONDS = 10**9
_ALIKE = 0.1
"""The relative difference up to which two times count as equal. Clocks and caches cause about as much."""

Span = tuple[int, int]


class Rerun(NamedTuple):
    """The times of a simulated step, in nanoseconds."""

    starts: list[int]  # per node of the step's graph
    ends: list[int]  # per node
    free: list[int]  # per device, the end of its last action


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """The measured times of all computing actions of one training step, and the values that are derived from them."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    """Per device, begin and end of every computing action, in order, in nanoseconds since the step began."""
    split: Costs = Costs()  # the schedule's prices, which divide a fused backward into I and W

    def __post_init__(self) -> None:
        counts = [sum(action.kind in COMPUTE for action in order) for order in self.schedule.orders]
        if [*map(len, self.spans)] != counts:
            span_counts = [*map(len, self.spans)]
            raise ConfigError(
                "wrong-count",
                f"the times are of {span_counts} actions on the devices, and the schedule has {counts}; give one span per "
                "action",
            )
        for device, spans in enumerate(self.spans):
            moments = [0, *(moment for span in spans for moment in span)]
            if any(after < before for before, after in zip(moments, moments[1:], strict=False)):
                raise ConfigError(
                    "wrong-order", f"the actions of device {device} overlap in time; give their times in order"
                )

    @cached_property
    def _graph(self) -> tuple[Dependencies, list[Step]]:
        dependencies = Dependencies.of_schedule(self.schedule)
        if error := dependencies.stuck():
            raise error
        return dependencies, list(dependencies.graph.steps(dependencies.walk.nodes))

    @property
    def actions(self) -> list[Action]:
        """Return the action of every node of the step's graph."""
        return self._graph[0].actions

    @property
    def lanes(self) -> Sequence[int]:
        """Return the device of every node. The channel of the collectives is numbered after the devices."""
        return self._graph[0].graph.lane_of

    @cached_property
    def _by_node(self) -> dict[int, Span]:
        """Return the span of every node that computes."""
        dependencies = self._graph[0]
        computing = [
            node
            for nodes in dependencies.graph.lanes[: self.schedule.num_devices]
            for node in nodes
            if dependencies.actions[node].kind in COMPUTE
        ]
        return dict(zip(computing, (span for spans in self.spans for span in spans), strict=True))

    @cached_property
    def nanoseconds(self) -> list[int]:
        """Return the nanoseconds of every node; 0 if they were not measured."""
        nanoseconds = [0] * len(self.actions)
        for node, (start, end) in self._by_node.items():
            nanoseconds[node] = end - start
        return nanoseconds

    @cached_property
    def _waits(self) -> tuple[list[int], list[bool]]:
        dependencies, ordered_nodes = self._graph
        ends, free = [0] * len(self.actions), [0] * len(dependencies.graph.lanes)
        delays, awaits_message = [0] * len(self.actions), [False] * len(self.actions)
        for node, lane, waits, _ in ordered_nodes:
            arrived = max((ends[needed] for needed, _ in waits), default=0)
            ready = max(free[lane], arrived)
            start, end = self._by_node.get(node, (ready, ready))
            delays[node], awaits_message[node] = start - ready, arrived >= free[lane] and bool(waits)
            ends[node] = free[lane] = end
        return delays, awaits_message

    @property
    def delays(self) -> list[int]:
        """Return the delay of every node in nanoseconds: its start, minus the time when nothing was left to wait for.

        That is when its device was free and the actions that it needs had ended. A delay is negative if the clocks of
        two devices disagree.
        """
        return self._waits[0]

    @property
    def awaits_message(self) -> list[bool]:
        """Return for every node whether a need on another lane ended no earlier than the node before it on its lane."""
        return self._waits[1]

    def rerun(self, seconds: Sequence[int], delays: Sequence[int], begins: Sequence[int] = ()) -> Rerun:
        """Simulate the step with other durations and delays, in nanoseconds and one per node.

        ``begins`` has the nanoseconds at which every device begins; 0 if it is empty. With the step's own ``seconds``
        and ``delays`` the result is the measured step.
        """
        dependencies, ordered_nodes = self._graph
        starts, ends = [0] * len(seconds), [0] * len(seconds)
        free = [*begins, *[0] * (len(dependencies.graph.lanes) - len(begins))]
        for node, lane, waits, _ in ordered_nodes:
            start = free[lane]
            for needed, _ in waits:
                if ends[needed] > start:
                    start = ends[needed]
            starts[node] = start + delays[node]
            ends[node] = free[lane] = starts[node] + seconds[node]
        return Rerun(starts, ends, free[: self.schedule.num_devices])

    def work_of(self, seconds: Sequence[int]) -> list[int]:
        """Return the sum of ``seconds`` (nanoseconds per node of the graph) over the nodes of every device."""
        lanes = self._graph[0].graph.lanes[: self.schedule.num_devices]
        return [sum(seconds[node] for node in nodes) for nodes in lanes]

    @property
    def length_ns(self) -> int:
        """Nanoseconds from the beginning of the step to the end of its last action."""
        return max((spans[-1][1] for spans in self.spans if spans), default=0)

    def key_of(self, action: Action) -> tuple[Kind, int]:
        """Return the key of an action in ``median_ns``: its kind, and the index of its stage and part."""
        return action.kind, self.schedule.units.place(action.stage, action.microbatch)

    @cached_property
    def pairs(self) -> dict[int, int]:
        """Return the node of the backward of every pair, by the node of its forward."""
        return {first: first + 1 for first in self._graph[0].pairs}

    @cached_property
    def unpaired_nodes(self) -> list[int]:
        """Return the nodes of measured actions that are in no pair."""
        paired = {*self.pairs, *self.pairs.values()}
        return [node for node in self._by_node if node not in paired]

    @cached_property
    def median_ns(self) -> dict[tuple[Kind, int], int]:
        """Return the median nanoseconds per kind, stage and part; for vocabulary passes per kind, device and part.

        They are those of actions in no pair.
        """
        durations: dict[tuple[Kind, int], list[int]] = {}
        for node in self.unpaired_nodes:
            durations.setdefault(self.key_of(self.actions[node]), []).append(self.nanoseconds[node])
        return {key: round(median(times)) for key, times in durations.items()}

    @cached_property
    def median_ns_of_pairs(self) -> dict[Pair, int]:
        """Return the median nanoseconds of pairs, by the keys of forward and backward."""
        durations: dict[Pair, list[int]] = {}
        for first, second in self.pairs.items():
            key = self.key_of(self.actions[first]), self.key_of(self.actions[second])
            durations.setdefault(key, []).append(self._by_node[second][1] - self._by_node[first][0])
        return {key: round(median(times)) for key, times in durations.items()}

    @cached_property
    def microbatch_factors(self) -> tuple[float, ...]:
        """Return the factor by which every microbatch takes longer than the median one.

        The factor is 1 unless all F, I and B of the microbatch differ in the same direction by more than 10 %. W is
        left out: it depends on the number of tokens only, and not on the lengths of documents.
        """
        ratios: list[list[float]] = [[] for _ in range(self.schedule.num_microbatches)]
        for node in self.unpaired_nodes:
            kind, _, unit = self.actions[node]
            usual = self.median_ns[self.key_of(self.actions[node])]
            if usual and kind in (Kind.F, Kind.I, Kind.B):
                ratios[self.schedule.units.microbatch(unit)].append(self.nanoseconds[node] / usual)
        return tuple(
            median(of_microbatch)
            if of_microbatch and (min(of_microbatch) > 1 + _ALIKE or max(of_microbatch) < 1 - _ALIKE)
            else 1.0
            for of_microbatch in ratios
        )

    @cached_property
    def link_seconds(self) -> dict[tuple[int, int], float]:
        """Return the seconds of a message per (source, destination): the median delay of actions that waited for it.

        A negative median counts as 0. Links for whose messages no action waited are left out.
        """
        waits: dict[tuple[int, int], list[int]] = {}
        graph = self._graph[0]
        for node in self._by_node:
            if self.awaits_message[node]:
                link = max((graph.links[link] for _, link in graph.graph.waits[node]), default=(0, 0))
                waits.setdefault(link, []).append(self.delays[node])
        return {
            link: max(0.0, median(of_link)) / NANOSECONDS
            for link, of_link in sorted(waits.items())
            if link[0] != link[1]
        }

    def of_stages(self) -> dict[Kind, tuple[float, ...]]:
        """Return the median seconds of F, I and W of every stage and part.

        The seconds of a B are divided in the ratio of I and W in ``split``. Seconds of recomputation are added to I. A
        pass that the stage does not run has 0 seconds.
        """
        seconds = self.costs().seconds(self.schedule.placement, self.schedule.units)
        again = (sum(self.median_ns.get((kind, at), 0) for kind in RECOMPUTE) / NANOSECONDS for at in self._places)
        inputs = tuple(map(sum, zip(seconds[Kind.I], again, strict=True)))
        return {Kind.F: seconds[Kind.F], Kind.I: inputs, Kind.W: seconds[Kind.W]}

    @property
    def _places(self) -> range:
        return range(self.schedule.num_stages * self.schedule.units.parts)

    def p2p(self) -> dict[tuple[int, int], float]:
        """Return the seconds of a message between any two devices: measured, or else the mean of the measured ones."""
        measured = self.link_seconds
        mean = sum(measured.values()) / len(measured) if measured else 0.0
        devices = range(self.schedule.num_devices)
        return {(a, b): measured.get((a, b), mean) for a in devices for b in devices if a != b}

    def costs(self, memory: Mapping[Kind, tuple[float, ...]] | None = None) -> Costs:
        """Return costs with the median seconds of every stage, with which the step's own schedule can be simulated.

        ``memory`` becomes ``Costs.memory``: per kind, the change of memory of every stage and part.
        """
        usual = {key: nanoseconds / NANOSECONDS for key, nanoseconds in self.median_ns.items()}
        together = {pair: nanoseconds / NANOSECONDS for pair, nanoseconds in self.median_ns_of_pairs.items()}
        # A stage that ran no pass of a kind has no time of it.
        for at in self._places:
            for kind in (Kind.F,) if (Kind.B, at) in usual else (Kind.F, Kind.I, Kind.W):
                usual.setdefault((kind, at), 0.0)
        costs = costs_from(usual, self.p2p(), self.schedule.placement, self.split, self.schedule.units, together)
        weights = (
            None
            if max(self.microbatch_factors) == min(self.microbatch_factors)
            else MicrobatchFactors(self.microbatch_factors)
        )
        return replace(costs, memory=memory, microbatch=weights)

    def timeline(self, costs: Costs) -> Timeline:
        """Return the measured step as a timeline, with peaks from ``costs``. Copies to the host were not timed."""
        orders = tuple(tuple(a for a in order if a.kind in COMPUTE) for order in self.schedule.orders)
        spans = tuple(tuple((s / NANOSECONDS, e / NANOSECONDS) for s, e in spans) for spans in self.spans)
        messages = count_messages(self.schedule)
        return Timeline(replace(self.schedule, orders=orders), costs, spans, peaks(self.schedule, costs), messages)


_STEPS = 8
"""Number of simulated steps without a barrier. The period is measured over the second half."""

SCHEDULE, IMBALANCE, MICROBATCHES, MESSAGES, HOST, LATE, BARRIER = (
    "warm-up and drain",
    "uneven stages",
    "unequal microbatches",
    "messages",
    "host",
    "late actions",
    "barrier",
)
CAUSES = (SCHEDULE, IMBALANCE, MICROBATCHES, MESSAGES, HOST, LATE, BARRIER)
"""Causes of idle time, in the order in which the simulations add them."""


class DeviceIdle(NamedTuple):
    """The idle time of a device in a step, divided by cause."""

    device: int
    idle_ns: int  # nanoseconds without computing, from the beginning of the step to its end
    causes: Mapping[str, int]  # nanoseconds by cause; their sum is ``idle``
    late_ns: Mapping[int, int]  # nanoseconds of the cause "late actions" by the device that ran them


def idle_causes(step: MeasuredStep) -> list[DeviceIdle]:
    """Return the idle time of every device in a step, divided by cause.

    The step is simulated with even stages and no delays. Then the measured stage times, the unequal microbatches, the
    messages, the host delays and all other measured times are added one after another. A cause has the idle time that
    its addition brings. The cause "barrier" has the time that a step would save without a barrier at its end.
    """
    actions, delays = step.actions, step.delays
    even = _of_actions(step, *_even(step), weighed=False)
    stages = _of_actions(step, step.median_ns, step.median_ns_of_pairs, weighed=False)
    weighed = _of_actions(step, step.median_ns, step.median_ns_of_pairs, weighed=True)
    none = [0] * len(actions)
    of_messages = [delay * awaits for delay, awaits in zip(delays, step.awaits_message, strict=True)]
    levels = [(even, none), (stages, none), (weighed, none), (weighed, of_messages), (weighed, delays)]
    idle = [_idle(step, *level) for level in levels]
    measured = _idle(step, step.nanoseconds, delays)
    saved = step.length_ns - _period(step)
    by_device = [_late_alone(step, weighed, device) for device in range(step.schedule.num_devices)]
    causes_of_devices = []
    for device, total in enumerate(measured):
        reached = total - saved
        kept = [reached]
        for level in reversed(idle):
            kept.append(max(0, min(kept[-1], level[device])))
        kept.append(0)
        parts = [after - before for before, after in pairwise(reversed(kept))]
        causes = dict(zip(CAUSES, [*parts, saved], strict=True))
        alone_more = [max(0, alone[device] - idle[-1][device]) for alone in by_device]
        causes_of_devices.append(DeviceIdle(device, total, causes, _shared(causes[LATE], alone_more)))
    return causes_of_devices


def _even(step: MeasuredStep) -> tuple[dict[tuple[Kind, int], int], dict[Pair, int]]:
    """Return usual times with the mean over all stages in place of each stage's time, part by part, also of pairs."""
    by_kind: dict[tuple[Kind, int], list[int]] = {}
    parts = step.schedule.units.parts
    for (kind, at), seconds in step.median_ns.items():
        by_kind.setdefault((kind, at % parts), []).append(seconds)
    means = {key: round(sum(times) / len(times)) for key, times in by_kind.items()}
    together = step.median_ns_of_pairs.values()
    mean = round(sum(together) / len(together)) if together else 0
    alone = {(kind, at): means[kind, at % parts] for kind, at in step.median_ns}
    return alone, dict.fromkeys(step.median_ns_of_pairs, mean)


def _of_actions(
    step: MeasuredStep, seconds: Mapping[tuple[Kind, int], int], pairs: Mapping[Pair, int], weighed: bool
) -> list[int]:
    weights, units = step.microbatch_factors, step.schedule.units
    durations = []
    for action in step.actions:
        duration = seconds.get(step.key_of(action), 0)
        durations.append(round(duration * weights[units.microbatch(action.microbatch)]) if weighed else duration)
    for first, second in step.pairs.items():
        together = pairs[step.key_of(step.actions[first]), step.key_of(step.actions[second])]
        durations[first], durations[second] = 0, together
    return durations


def _idle(step: MeasuredStep, seconds: list[int], delays: list[int]) -> list[int]:
    length = max(step.rerun(seconds, delays).free)
    return [length - work for work in step.work_of(seconds)]


def _late_alone(step: MeasuredStep, usual: list[int], late: int) -> list[int]:
    """Return the idle nanoseconds of every device if only the actions of device ``late`` take their measured times.

    All other actions take their times in ``median_ns``, which has nanoseconds per node. All delays are the measured ones.
    """
    nodes = zip(step.lanes, step.nanoseconds, usual, strict=True)
    seconds = [real if device == late else one for device, real, one in nodes]
    return _idle(step, seconds, step.delays)


def _shared(amount: int, weights: list[int]) -> dict[int, int]:
    """Return the part of ``amount`` for every device in the ratio of ``weights``. Devices without a part are left out.

    The device with the largest weight takes the rounding error. If all weights are 0, the parts are equal.
    """
    total = sum(weights)
    if not amount:
        return {}
    if not total:
        weights, total = [1] * len(weights), len(weights)
    shares = [amount * weight // total for weight in weights]
    shares[weights.index(max(weights))] += amount - sum(shares)
    return {device: share for device, share in enumerate(shares) if share}


def _period(step: MeasuredStep) -> int:
    """Return the nanoseconds from step to step without a barrier, at most the length of the step.

    With replicas of the model, whose gradients are summed at the end of a step, and for asynchronous schedules the
    result is the length of the step.
    """
    if step.schedule.placement.replicas > 1 or step.schedule.updates is not None:
        return step.length_ns
    begins: list[int] = [0] * step.schedule.num_devices
    ends = [0]
    for _ in range(_STEPS):
        begins = step.rerun(step.nanoseconds, step.delays, begins).free
        ends.append(max(begins))
    half = _STEPS // 2
    period = -((ends[half] - ends[_STEPS]) // half)
    return min(step.length_ns, max(period, *step.work_of(step.nanoseconds)))
