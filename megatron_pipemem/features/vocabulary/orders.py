"""Add vocabulary passes and their collectives to a schedule with one pipeline.

A barrier is an exchange between all devices that lies between the last stage's forward and backward of a microbatch. So
all backwards start one interval later for each barrier. An interval is the time of the busiest device's work for one
microbatch. It gives every device time for its part of the exchange.

A simulation of all devices then adds the passes to these orders. A device runs S (logits and their statistics) as soon
as the head's input X has arrived. It runs T (gradients of the head) before the next S at the latest, so that only one
softmax is in memory at a time. The passes of the embedding run when a device would be idle, or when they are due.

All devices post a collective when its data are complete. A busy device posts it before the action that it is running,
because posting does not wait. With one barrier, a device's part of the input gradient needs the statistics of all
shards. So the device computes that part before its next action. All orders come from one simulation, so they cannot
deadlock.

If X or a collective ends just after a device has begun a pass, then S, T or LOSS waits for that whole pass. In a steady
state that can repeat for every microbatch. So a second simulation gives another order, and the faster of both at the
true prices is taken:

- With two barriers, every LOSS runs one forward late, as in the paper's code. So T of a microbatch and S of the next one
  run together on all devices, and the collectives between them have the time of a whole pass.
- With one barrier there is no time for that, and parts of a microbatch share a LOSS. Then collectives take no time, and a
  device waits for an X that arrives soon.

Example: the last of two devices up to its first backward, without the passes of the embedding. Brackets hold
collectives: X broadcasts the head's input, and G the gradient of the loss.

    no barrier:    F0 B0
    one barrier:   F0 [X0] S0 [STATS0 REDUCE_X0] LOSS0 [G0]    F1 [X1] T0 S1 [STATS1 REDUCE_X1] LOSS1 [G1]    B0
    two barriers:  F0 [X0] S0 [STATS0] LOSS0 [G0] T0 [REDUCE_X0]    F1 ... T1 [REDUCE_X1]    F2 ... T2 [REDUCE_X2]    B0

If sequences are cut into parts, every part has its own passes and collectives. But a microbatch has only one LOSS,
after the statistics of its last part. So as many softmaxes are in memory at a time as a microbatch has parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from heapq import heappop, heappush

from megatron_pipemem.errors import CostsError, ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import (
    COLLECTIVES,
    VOCABULARY_COMPUTE,
    Action,
    Kind,
)
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import needs_of
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import synchronous_schedules
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.schedule.vocabulary import BARRIERS, check_placement

BACKWARD = frozenset((Kind.I, Kind.W, Kind.B))
_EMBEDDINGS_AHEAD = 2
"""How many embedding outputs, or gradients of them, may wait on a device."""
_PATIENCE = 0.2
"""How long a device waits for the head's input before its next pass in the second simulation, as a share of that pass."""
_TICKS = 12 * 10**6
"""Ticks of the longest action. Times are whole ticks, so that equal times compare as equal."""

Collective = tuple[Kind, int]


class PassRun:
    """Simulates all devices to insert vocabulary passes into their orders.

    An idle device runs the most urgent action that is ready: the next of its order, or a pass whose collectives have
    ended. Times, such as ``now``, are in ticks (``_TICKS``). ``patience`` is how long it waits for the next head's input,
    as a share of the action that it would run. ``has_late_losses`` delays every LOSS by one forward of the last stage.
    """

    def __init__(
        self,
        schedule: Schedule,
        orders: tuple[Order, ...],
        barriers: int,
        costs: Costs,
        needs: Callable[[Action], tuple[Action, ...]],
        patience: float = 0.0,
        has_late_losses: bool = False,
    ) -> None:
        placement = schedule.placement
        self._placement, self._orders, self._barriers = placement, orders, barriers
        self._units, self._p, self._parts = schedule.units, placement.num_devices, schedule.units.parts
        self._needs, self._num_units, self._last = needs, len(schedule.units), placement.devices[-1]
        self._trains = any(action.kind in BACKWARD for order in orders for action in order)
        vocabulary = costs.vocabulary_costs(placement, barriers, self._units)
        seconds = {**costs.seconds(placement, self._units), **vocabulary.seconds(self._p, self._units)}
        scale = _TICKS / (max(max(prices) for prices in seconds.values()) or 1.0)
        self._ticks = {kind: [round(price * scale) for price in prices] for kind, prices in seconds.items()}
        collectives = vocabulary.collective_seconds(self._units)
        self._collective_ticks = {kind: round(price * scale) for kind, price in collectives.items()}
        self._link = lambda source, destination: round(costs.link_seconds(source, destination) * scale / self._parts)
        self._lists: list[list[Action]] = [[] for _ in orders]
        self._at = [0] * self._p
        self._count = [Counter[Kind]() for _ in orders]
        self._running: list[Action | None] = [None] * self._p
        self._last_is_free, self._patience = 0, patience
        self._begun = 0
        self._returned = 0
        self._ends: dict[Action, int] = {}
        self._num_ready_parts: Counter[Collective] = Counter()
        self._done: set[Collective] = set()
        # Per device, the units whose input gradient a device computes when its running action ends (one barrier).
        self._input_gradients: list[list[int]] = [[] for _ in orders]
        self._losses_due = self._late_losses() if has_late_losses else None
        self._channel_free = 0
        self._events: list[tuple[int, int, int, Collective | None]] = []
        self._serial = 0

    def lists(self) -> tuple[Order, ...]:
        """Return all devices' orders with vocabulary passes and collectives. Raise a ScheduleError if an order
        deadlocks.
        """
        self._start_idle(0)
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                _, _, device, collective = heappop(self._events)
                if collective is not None:
                    self._arrive(collective, now)
                elif device >= 0:
                    self._end(device, now)
            self._start_idle(now)
        for device, order in enumerate(self._orders):
            if self._at[device] < len(order):
                action = order[self._at[device]]
                raise ScheduleError(
                    "unmet-need",
                    "never runs, because the schedule has a deadlock; validate() shows it",
                    at=(device, self._at[device], action),
                )
        return tuple(map(tuple, self._lists))

    def _late_losses(self) -> list[int]:
        """Return, for every action of the last stage's device, how many losses run before it, no fewer and no more.

        The loss of the newest forward is left for later. After the last forward, every backward lets one more loss run.

            two barriers:    F0  F1  LOSS0 F2  LOSS1 B0  F3  LOSS2 B1  LOSS3 B2  B3
        """
        units, last_stage = self._units, self._placement.num_stages - 1
        forwards = losses = 0
        due = []
        for kind, stage, unit in self._orders[self._last]:
            completes = stage == last_stage and unit == units.last(unit)
            is_backward = completes and kind in (Kind.I, Kind.B)
            if forwards < units.num_microbatches:
                losses = max(losses, forwards - 1)
            else:
                losses = min(losses + is_backward, units.num_microbatches)
            if is_backward:
                losses = max(losses, units.microbatch(unit) + 1)
            due.append(losses)
            forwards += completes and kind is Kind.F
        return [*due, units.num_microbatches]

    def _push(self, time: int, device: int = -1, collective: Collective | None = None) -> None:
        self._serial += 1
        heappush(self._events, (time, self._serial, device, collective))

    def _start_idle(self, now: int) -> None:
        """Start an action on each idle device. If some of these actions have no duration, start only those.

        Their results may change the choice of the other devices.
        """
        chosen = {d: action for d in range(self._p) if self._running[d] is None and (action := self._choose(d, now))}
        at_once = {device: action for device, action in chosen.items() if not self._ticks_of(action)}
        for device, action in (at_once or chosen).items():
            self._running[device] = action
            if action.kind in VOCABULARY_COMPUTE:
                self._count[device][action.kind] += 1
            else:
                self._at[device] += 1
                self._begun += action.kind is Kind.F and action.stage == 0
                self._returned += action.kind in (Kind.I, Kind.B) and action.stage == self._placement.num_stages - 1
            end = now + self._ticks_of(action)
            if device == self._last:
                self._last_is_free = end
            self._push(end, device)

    def _ticks_of(self, action: Action) -> int:
        return self._ticks[action.kind][self._units.place(action.stage, action.microbatch)]

    def _end(self, device: int, now: int) -> None:
        action = self._running[device]
        assert action is not None
        kind, stage, microbatch = action
        self._running[device] = None
        self._lists[device].append(action)
        self._ends[action] = now
        if kind is Kind.F and stage == self._placement.num_stages - 1:
            self._post((Kind.BCAST_X, microbatch), now)
        elif kind in BACKWARD and kind is not Kind.W and stage == 0:
            self._post((Kind.BCAST_E, microbatch), now)
        elif kind is Kind.LOSS and self._trains:
            for unit in range(microbatch, self._units.first(microbatch) - 1, -1):
                self._post((Kind.BCAST_G, unit), now)
        elif kind in _COLLECTIVE_AFTER and (kind is not Kind.T or self._barriers == 2):
            self._bring((_COLLECTIVE_AFTER[kind], microbatch), now)
        for unit in self._input_gradients[device]:
            self._bring((Kind.REDUCE_X, unit), now)
        self._input_gradients[device].clear()

    def _bring(self, collective: Collective, now: int) -> None:
        """Record that one device's part of a collective is ready. Post the collective when all parts are."""
        self._num_ready_parts[collective] += 1
        if self._num_ready_parts[collective] == self._p:
            self._post(collective, now)

    def _post(self, collective: Collective, now: int) -> None:
        """Add a collective to the orders of all devices. On a busy device it comes before the running action."""
        kind, microbatch = collective
        for device, actions in enumerate(self._lists):
            actions.append(Action(kind, device, microbatch))
        self._channel_free = max(now, self._channel_free) + self._collective_ticks[kind]
        self._push(self._channel_free, collective=collective)

    def _arrive(self, collective: Collective, now: int) -> None:
        self._done.add(collective)
        kind, microbatch = collective
        if kind is Kind.STATS and self._barriers == 1 and self._trains:
            # A device computes its part between two actions. It must not wait for the statistics before an action that has
            # already begun without them.
            for device, running in enumerate(self._running):
                if running is None:
                    self._bring((Kind.REDUCE_X, microbatch), now)
                else:
                    self._input_gradients[device].append(microbatch)

    def _choose(self, device: int, now: int) -> Action | None:
        """Return the action that an idle device should start at ``now``, or None. It is not started here."""
        ready = {kind: Action(kind, device, self._next(device, kind)) for kind in self._ready(device)}
        for kind in _FIRST_WITH_T if self._is_t_urgent(device) else _FIRST_WITHOUT_T:
            if kind in ready and (kind in _ALWAYS_DUE or self._is_due(ready[kind])):
                return ready[kind]
        following = self._following(device, now)
        if following is not None and self._awaits_input(device, now + self._patience * self._ticks_of(following)):
            return None
        return following or next((ready[kind] for kind in _IN_IDLE_TIME if kind in ready), None)

    def _awaits_input(self, device: int, latest: float) -> bool:
        """Return whether the last stage is computing the input of a device's next S, and ends by ``latest``."""
        running = self._running[self._last]
        if running is None or self._last_is_free > latest or not self._patience:
            return False
        next_input = Action(Kind.F, self._placement.num_stages - 1, self._count[device][Kind.S])
        return running == next_input

    def _is_t_urgent(self, device: int) -> bool:
        """Return whether a device must run its next T before other work, because another action waits for it.

        That action is the next S or, with two barriers, the last stage's next backward. With parts, a LOSS makes all
        parts of a microbatch ready for T at once. Most of these T are not urgent.
        """
        count = self._count[device]
        awaited = self._barriers == 2 and (self._units.are_whole or count[Kind.T] <= self._returned)
        return awaited or (Kind.BCAST_X, count[Kind.S]) in self._done

    def _next(self, device: int, kind: Kind) -> int:
        """Return the unit for which a device will run this kind of pass next."""
        count = self._count[device][kind]
        if kind is Kind.LOSS:
            return self._units.of(count)[-1]
        return self._units.backward(count) if kind in (Kind.T, Kind.EMBED_B) else count

    def _ready(self, device: int) -> Iterator[Kind]:
        """Yield each kind of pass whose next unit can run on a device now."""
        count, done = self._count[device], self._done
        if count[Kind.EMBED_F] < min(self._num_units, self._begun + _EMBEDDINGS_AHEAD):
            yield Kind.EMBED_F
        losses = count[Kind.LOSS]
        due = self._losses_due[self._at[device]] if self._losses_due else self._units.num_microbatches
        is_loss_left = device == self._last and losses < due
        if is_loss_left and all((Kind.STATS, unit) in done for unit in self._units.of(losses)):
            yield Kind.LOSS
        # Only the softmax of one microbatch is alive at a time.
        if (Kind.BCAST_X, count[Kind.S]) in done and (not self._trains or count[Kind.S] < count[Kind.T] + self._parts):
            yield Kind.S
        for kind, collective in ((Kind.T, Kind.BCAST_G), (Kind.EMBED_B, Kind.BCAST_E)):
            if count[kind] < self._num_units and (collective, self._next(device, kind)) in done:
                yield kind

    def _is_due(self, action: Action) -> bool:
        """Return whether an EMBED_F or EMBED_B must run before the next action of the device's own order."""
        if action.kind is Kind.EMBED_F:
            return action.microbatch <= self._begun
        after = self._units.backward(action.microbatch) + _EMBEDDINGS_AHEAD - 1
        return after < self._num_units and (Kind.BCAST_E, self._units.backward(after)) in self._done

    def _following(self, device: int, now: int) -> Action | None:
        """Return the next action of the device's order if it can start at ``now``, else None.

        If only a message has to arrive, the simulation continues at the time of its arrival.
        """
        order = self._orders[device]
        if self._at[device] == len(order):
            return None
        action = order[self._at[device]]
        due = self._losses_due[self._at[device]] if self._losses_due and device == self._last else 0
        if self._count[device][Kind.LOSS] < due:
            return None
        earliest = now
        for needed in self._needs(action):
            if needed.kind in COLLECTIVES:
                if (needed.kind, needed.microbatch) not in self._done:
                    return None
                continue
            if needed not in self._ends:
                return None
            source = device if needed.kind in VOCABULARY_COMPUTE else self._placement.devices[needed.stage]
            earliest = max(earliest, self._ends[needed] + (self._link(source, device) if source != device else 0))
        if earliest == now:
            return action
        self._push(earliest)
        return None


# The collective that needs the result of a pass of every device.
_COLLECTIVE_AFTER = {Kind.EMBED_F: Kind.REDUCE_E, Kind.S: Kind.STATS, Kind.T: Kind.REDUCE_X}
# The passes that run before a device's own order, first to last, if T is urgent and if it is not.
_FIRST_WITH_T = (Kind.LOSS, Kind.S, Kind.T, Kind.EMBED_F, Kind.EMBED_B)
_FIRST_WITHOUT_T = (Kind.LOSS, Kind.S, Kind.EMBED_F, Kind.EMBED_B)
_ALWAYS_DUE = frozenset((Kind.LOSS, Kind.S, Kind.T))
# The passes that run in idle time, first to last.
_IN_IDLE_TIME = (Kind.T, Kind.EMBED_B, Kind.EMBED_F)


def with_barriers(schedule: Schedule, barriers: int, costs: Costs | None = None) -> Schedule:
    """Add the vocabulary passes of Algorithm 1 (2 barriers) or 2 (1); a schedule that has them, or 0 barriers, stays."""
    if not barriers or schedule.vocabulary_barriers == barriers:
        return schedule
    return with_vocabulary(schedule, barriers, costs)


def with_vocabulary(schedule: Schedule, barriers: int, costs: Costs | None = None) -> Schedule:
    """Return the schedule with passes and collectives for an embedding and an LM head that are cut over all devices.

    It has ``barriers`` more microbatches (or parts) in flight. On 1F1B, device r of p then holds ``p - r + barriers``.

    One barrier is Algorithm 2 of arXiv 2411.05288, two barriers are its Algorithm 1 (``Schedule.vocabulary_barriers``).
    The schedule must be valid and synchronous, have one pipeline and one copy of the model, and have no vocabulary
    passes, offload or recompute. Its orders may consist of forwards only.
    """
    if barriers not in BARRIERS:
        raise UnsupportedError(
            "bad-choice", f"vocabulary parallelism has 1 or 2 barriers, not {shortened(barriers)}; give 1 or 2"
        )
    if schedule.vocabulary_barriers:
        raise UnsupportedError(
            "conflicting-features",
            f"schedule {shortened(schedule.name)} already has vocabulary passes; give the schedule without them",
        )
    if schedule.updates is not None:
        raise UnsupportedError(
            "conflicting-features",
            f"schedule {shortened(schedule.name)} changes weights within the step, which vocabulary passes do "
            "not allow; take a "
            "synchronous schedule, or leave the vocabulary whole",
        )
    if schedule.offloads or schedule.recomputed:
        raise UnsupportedError(
            "conflicting-features",
            f"schedule {shortened(schedule.name)} offloads or recomputes activations, which vocabulary passes "
            "do not allow; take a "
            "schedule that does neither",
        )
    check_placement(schedule.placement)
    costs = costs or Costs()
    orders = _put_off(schedule, barriers, costs)
    fused = {action for order in orders for action in order if action.kind is Kind.B}

    @cache  # both simulations ask for them, at every time at which a device is idle
    def needs(action: Action) -> tuple[Action, ...]:
        return needs_of(action, schedule.placement, fused, schedule.units, barriers)

    def with_passes(assumed: Costs, patience: float = 0.0, has_late_losses: bool = False) -> Schedule:
        lists = PassRun(schedule, orders, barriers, assumed, needs, patience, has_late_losses).lists()
        return replace(schedule, orders=lists, vocabulary_barriers=barriers)

    prices = costs.vocabulary_costs(schedule.placement, barriers, schedule.units)
    if not any(prices.collective_seconds().values()):
        return with_passes(costs)
    trains = any(action.kind in BACKWARD for action in orders[0])
    if barriers == 2 and trains and schedule.units.are_whole:
        second = with_passes(costs, has_late_losses=True)
    else:
        second = with_passes(replace(costs, vocabulary=replace(prices, collectives=0.0)), _PATIENCE)
    return min(with_passes(costs), second, key=lambda order: simulate(order, costs).makespan)


def _put_off(schedule: Schedule, barriers: int, costs: Costs) -> tuple[Order, ...]:
    """Return orders in which every backward starts ``barriers`` intervals later. Every action stays after those that it
    needs.
    """
    timeline = simulate(schedule, _without_zeros(costs, schedule.placement, schedule.units))
    later = barriers * timeline.ideal / len(schedule.units)
    # Rounded, so that nearly equal times are ties. Then backwards go first, because they free memory.
    unit = timeline.makespan * 1e-9
    orders = []
    for order, spans in zip(schedule.orders, timeline.spans, strict=True):
        keyed = [
            (round((start + later * (action.kind in BACKWARD)) / unit), action.kind not in BACKWARD, position)
            for position, (action, (start, _)) in enumerate(zip(order, spans, strict=True))
        ]
        orders.append(tuple(order[position] for _, _, position in sorted(keyed)))
    return tuple(orders)


def _without_zeros(costs: Costs, placement: Placement, units: Units) -> Costs:
    """Return costs in which actions without duration get a short one, so that start times determine the order."""
    seconds = costs.seconds(placement, units)
    longest = max(max(prices) for prices in seconds.values()) or 1.0
    forward, inputs, weights = (
        tuple(max(price, 1e-4 * longest) for price in seconds[kind]) for kind in (Kind.F, Kind.I, Kind.W)
    )
    return replace(costs.of(placement), forward=forward, backward_input=inputs, backward_weight=weights)


def families_with_passes(
    num_devices: int, num_microbatches: int, costs: Costs, barriers: int, max_chunks: int | None = None
) -> list[Schedule]:
    """Return the ``synchronous_schedules`` of this size with vocabulary passes, where ``costs`` can give prices."""
    schedules = []
    for schedule in synchronous_schedules(num_devices, num_microbatches, costs, max_chunks):
        with suppress(CostsError):
            schedules.append(with_vocabulary(schedule, barriers, costs))
    return schedules
