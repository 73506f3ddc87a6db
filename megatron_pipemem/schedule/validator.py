"""Prove that a schedule or program is complete, in order, free of deadlock, and within its memory cap.

Every error names the device, the position in its order or program, the action there, the fault, and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import count, repeat
from operator import itemgetter
from typing import Any, cast

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import (
    KIND_AND_STAGE,
    MEMORY,
    ORDERED,
    PLAIN,
    VOCABULARY,
    Action,
    Kind,
    mirrored,
)
from megatron_pipemem.schedule.action_prices import held_after, unit_weights
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies, deadlock, dependencies
from megatron_pipemem.schedule.memory_cap import loosened, per_device
from megatron_pipemem.schedule.messages import (
    Places,
    Router,
    check_adjacent,
    check_compute_actions,
    check_memory_actions,
    check_order,
    check_posts,
    prepared_needs,
)
from megatron_pipemem.schedule.schedule import Program, Schedule, weight_uses
from megatron_pipemem.schedule.vocabulary import check_passes, check_switch
from megatron_pipemem.schedule.waits import check_host_waits, check_queues, run_single_queues

_COMPLETE, _IN_ORDER = "complete", "in microbatch order"
"""Names in ``Schedule.proofs``: of a schedule with any order of microbatches, and with that of ``check_microbatch_order``."""


def validate(
    schedule: Schedule,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    host_budget: float | None = None,
    *,
    microbatch_order: bool = True,
) -> None:
    """Prove that ``schedule`` computes every microbatch correctly on all devices, without a deadlock.

    A schedule without any backward is valid if its forwards are valid, because evaluation runs such schedules. A schedule
    is proved once, however often it is validated. Only its memory is compared with the limits each time.

    Args:
        schedule: the schedule to check.
        costs: the costs with the memory that is compared with the cap, and with the weights of microbatches. By
            default memory is in activation units.
        memory_cap: the most memory of a device after any action, one number or one per device, in activation units,
            or in bytes if ``costs.memory`` is in bytes.
        host_budget: the most host memory for the activations of one device, in the same unit.
        microbatch_order: whether to check the order that runs of this package need (``check_microbatch_order``).

    Raises:
        ScheduleError: the first violation found.
        CostsError: the costs do not fit the placement, or their weights do not fit the microbatches.
        UnsupportedError: the number of caps differs from the number of devices.
    """
    if _IN_ORDER not in schedule.proofs and (microbatch_order or _COMPLETE not in schedule.proofs):
        _prove(schedule, microbatch_order)
        schedule.proofs.add(_IN_ORDER if microbatch_order else _COMPLETE)
    if memory_cap is not None or host_budget is not None:
        _check_memory(schedule, costs or Costs(), memory_cap, host_budget)


def _prove(schedule: Schedule, microbatch_order: bool) -> None:
    check_switch(schedule)
    places = _place_all(schedule)
    _check_pairs(schedule, places)
    replica_of = _check_replicas(schedule, places)
    found = Dependencies.of_schedule(schedule)
    _check_local_order(schedule, places, found)
    _check_completeness(schedule, places, replica_of, found)
    check_memory_actions(schedule, places)
    if microbatch_order:
        check_microbatch_order(schedule)
    if schedule.vocabulary_barriers:
        check_passes(schedule, places)
    if schedule.updates is not None:
        _check_weight_versions(schedule)
    _check_progress(found)


def validate_program(
    program: Program, *, microbatch_order: bool = True, host_waits: bool = True, single_queue: bool = False
) -> None:
    """Prove that ``program`` has the actions of its schedule, and that every message is sent, received and used.

    The rules of messages: posts never block, and a compute action waits for its own message. From one device to
    another, messages move one at a time in posted order, each when both devices have posted it. ``host_waits`` and
    ``single_queue`` add the proofs of ``schedule.waits``, and ``microbatch_order`` is the argument of ``validate``.
    Raise a ScheduleError for the first violation found.
    """
    validate(program.schedule, microbatch_order=microbatch_order)
    check_compute_actions(program)
    check_adjacent(program.actions, program.schedule.pairs)
    places: Places = {}
    for device, actions in enumerate(program.actions):
        for position, action in enumerate(actions):
            _check_unique(places, action, device, position)
    router = Router(program.placement)
    computed = [action for order in program.schedule.orders for action in order]
    messages = {action: message for action in computed if (message := router.emitted(action)) is not None}
    receives = {action: receive for action in computed if (receive := router.awaited(action)) is not None}
    check_posts(program, places, messages, receives)
    check_order(program, places, messages.values())
    # Both ends of an edge post the same sequence, posts never block, and a consumer comes after its own receive. So its
    # message, and all before it on the edge, have moved as soon as the source has posted the send.
    sends = {message.receive: message.send for message in messages.values()}
    barriers, replicas = program.schedule.vocabulary_barriers, program.placement.replicas

    def needs(action: Action) -> list[Action]:
        before = [sends[receives[action]]] if action in receives else []
        if action.kind is Kind.REDUCE_GRAD and replicas > 1:
            before = [Action(Kind.REDUCE_REPLICAS, each) for each in program.placement.counterparts(action.stage)]
        if barriers and action.kind in ORDERED:
            waited = dependencies(action, program.placement, (), program.schedule.slices, barriers)
            # Needs of other stages are covered by messages.
            before += [each for each in waited if action.kind in VOCABULARY or each.kind in VOCABULARY]
        return before

    schedule = program.schedule
    found = Dependencies(program.actions, program.placement, needs, schedule.slices, pairs=schedule.pairs)
    _check_progress(found)
    if barriers:
        check_queues(program, found)
    if host_waits:
        check_host_waits(program, found)
    if single_queue:
        run_single_queues(program)


def _place_all(schedule: Schedule) -> Places:
    """Return device and position of all actions. Check that each is possible, unique and on the device of its stage."""
    placement = schedule.placement
    if len(schedule.orders) != placement.num_devices:
        raise ScheduleError(
            "wrong-count",
            f"the placement has {placement.num_devices} devices but the schedule has {len(schedule.orders)} orders; "
            "give one order per device",
        )
    units = frozenset(range(schedule.num_units))
    places: Places = {}
    for device, order in enumerate(schedule.orders):
        places |= zip(order, zip(repeat(device), count()))  # noqa: B905 - the second one has no end
    if len(places) == sum(map(len, schedule.orders)) and all(
        units.issuperset(map(itemgetter(2), order))
        and not any(
            _problem_of(Action(kind, stage, 0), device, schedule) for kind, stage in set(map(KIND_AND_STAGE, order))
        )
        for device, order in enumerate(schedule.orders)
    ):
        return places
    places = {}
    for device, order in enumerate(schedule.orders):  # to find the first fault
        for position, action in enumerate(order):
            problem = _problem_of(action, device, schedule)
            if problem is not None:
                raise ScheduleError(*problem, at=(device, position, action))
            _check_unique(places, action, device, position)
    return places


def _check_pairs(schedule: Schedule, places: Places) -> None:
    """Check that every pair is a forward with a backward right after it, of another stage or microbatch.

    Pairs are refused in a schedule with slices, vocabulary passes, recomputation, offload or asynchronous updates.
    """
    if not schedule.pairs:
        return
    refused = {
        "sequence slices": schedule.slices > 1,
        "vocabulary passes": schedule.vocabulary_barriers,
        "recomputation": schedule.recomputed,
        "offload": schedule.offloads,
        "asynchronous updates": schedule.updates,
    }
    if reason := next((name for name, found in refused.items() if found), None):
        raise ScheduleError("bad-pair", f"pairs do not run in a schedule with {reason}; drop its pairs or the {reason}")
    for first in schedule.pairs:
        if first not in places:
            raise ScheduleError("bad-pair", f"{first} of a pair is in no order; add it, or drop the pair")
    check_adjacent(schedule.orders, schedule.pairs)


def _problem_of(action: Action, device: int, schedule: Schedule) -> tuple[str, str] | None:
    """Return the code and message of a fault that an action has by itself; ``None`` if it may be on this device."""
    kind, stage, microbatch = action
    devices = schedule.placement.devices
    if kind not in ORDERED:
        return (
            "not-computed",
            "is not a compute action; remove messages and gradient reductions from a schedule: lower() adds them",
        )
    if kind in VOCABULARY and stage != device:
        return (
            "misplaced-action",
            f"belongs to the vocabulary shard on device {stage}; move it there, or write {device} in place of {stage}",
        )
    if kind not in VOCABULARY and not 0 <= stage < len(devices):
        return (
            "unknown-stage",
            f"needs stage {stage}, but the placement holds stages 0 to {len(devices) - 1}; remove or renumber it",
        )
    if microbatch is None or not 0 <= microbatch < schedule.num_units:
        noun, several = ("microbatch", "microbatches") if schedule.slices == 1 else ("slice", "slices")
        return (
            "unknown-microbatch",
            f"needs {noun} {microbatch}, but the step has {several} 0 to {schedule.num_units - 1}; remove or "
            "renumber it, or change the number of microbatches",
        )
    if kind not in VOCABULARY and devices[stage] != device:
        return "misplaced-action", f"needs stage {stage}, which device {devices[stage]} holds; move it there"
    return None


def _check_replicas(schedule: Schedule, places: Places) -> Mapping[int, int]:
    """Check that every microbatch uses stages of one replica only; return the replica of each.

    The result is empty if the placement has one replica.
    """
    placement = schedule.placement
    if placement.replicas == 1:
        return {}
    first: dict[int, Action] = {}
    for action, (device, position) in places.items():
        # Sequence slices of one microbatch stay together.
        microbatch = action.microbatch // schedule.slices
        other = first.setdefault(microbatch, action)
        ours, theirs = placement.replica_of(action.stage), placement.replica_of(other.stage)
        if ours != theirs:
            other_device, other_position = places[other]
            raise ScheduleError(
                "mixed-replicas",
                f"runs microbatch {microbatch} on replica {ours}, but {other} at position {other_position} of device "
                f"{other_device} runs it on replica {theirs}; a microbatch runs through all stages of one replica, so "
                "remove or renumber one of the two",
                at=(device, position, action),
            )
    return {microbatch: placement.replica_of(action.stage) for microbatch, action in first.items()}


def _check_unique(places: Places, action: Action, device: int, position: int) -> None:
    """Record device and position of an action, or raise a ScheduleError if the action has occurred before."""
    if action in places:
        other_device, other_position = places[action]
        raise ScheduleError(
            "duplicate-action",
            f"already stands at position {other_position} of device {other_device}; remove one of the two, or correct "
            "the stage or microbatch of one",
            at=(device, position, action),
        )
    places[action] = (device, position)


def _check_local_order(schedule: Schedule, places: Places, found: Dependencies) -> None:
    """Check that all actions that an action needs exist, and come before it if they are on the same device."""
    suspects: Iterable[int] = found.impossible
    if any(kind.spec.prepares or kind in MEMORY for kind, _ in found.kinds):
        suspects = range(len(places))
    for node in suspects:
        action = found.actions[node]
        if action not in places:  # a collective: the actions that need it are checked
            continue
        device, position = places[action]
        for needed in (*found.needed_by(node), *prepared_needs(schedule, action, places)):
            if needed not in places:
                code, problem = "missing-action", f"needs {_or_fused(needed)}, which no device runs; add it"
            elif places[needed] > (device, position) and places[needed][0] == device:
                code = "wrong-order"
                problem = f"needs {needed}, which comes later, at position {places[needed][1]}; move {needed} before it"
            else:
                continue
            raise ScheduleError(code, problem, at=(device, position, action))


def _or_fused(needed: Action) -> str:
    """Return the text of a missing action for a message: ``2I0 (or 2B0)`` for an input gradient."""
    return f"{needed} (or {needed._replace(kind=Kind.B)})" if needed.kind is Kind.I else str(needed)


def _check_completeness(schedule: Schedule, places: Places, replica_of: Mapping[int, int], found: Dependencies) -> None:
    """Check that every stage runs each microbatch of its replica forward, and backward if there are any backwards."""
    backwards = not schedule.kinds.isdisjoint((Kind.I, Kind.W, Kind.B))
    units: dict[int, set[int]] = {}
    for unit in range(schedule.num_units):
        units.setdefault(replica_of.get(unit // schedule.slices, 0), set()).add(unit)
    for stage in range(schedule.num_stages):
        needed = units.get(schedule.placement.replica_of(stage), set())
        forwards, inputs_of, weights_of, fulls = (found.microbatches(kind, stage) for kind in PLAIN)
        if needed <= forwards and needed <= fulls ^ weights_of and inputs_of.isdisjoint(fulls):
            continue
        for microbatch in sorted(needed):  # to find the first fault
            code = "missing-action"
            forward, inputs, weights, full = (Action(kind, stage, microbatch) for kind in PLAIN)
            if forward not in places:
                device = schedule.placement.devices[stage]
                raise ScheduleError(
                    "missing-action",
                    "is missing; every stage runs every microbatch forward once, add it",
                    at=(device, len(schedule.orders[device]), forward),
                )
            if not backwards:
                continue
            if full in places and (inputs in places or weights in places):
                half = inputs if inputs in places else weights
                device, position = places[half]
                twice = f"repeats work of {full} at position {places[full][1]}"
                code, problem = "duplicate-action", f"{twice}; keep {full}, or {inputs} and {weights}"
            elif full in places or weights in places:
                continue
            elif inputs in places:
                device, position = places[inputs]
                half, problem = inputs, f"has no {weights} after it; add {weights}, or make it {full}"
            else:
                device, position = places[forward]
                half, problem = forward, f"has no backward; add {full}, or {inputs} and {weights}"
            raise ScheduleError(code, problem, at=(device, position, half))


def check_microbatch_order(schedule: Schedule) -> None:
    """Prove that the order of microbatches allows training that is bit-identical to stock 1F1B.

    Forwards of a stage must run in microbatch order, because data come from an iterator, and dropout from one sequence
    of random numbers. Gradients must accumulate in that order too. The slices of one microbatch run backward from the
    last to the first. Runs of this package promise this order. Schedules that other programs run may lack it.
    """
    found = Dependencies.of_schedule(schedule)
    if all(_is_plainly_in_order(found, stage, schedule.slices) for stage in range(schedule.num_stages)):
        return
    names = {Kind.F: "forwards", Kind.I: "input gradients", Kind.W: "weight gradients"}
    slices, rank = schedule.slices, range(schedule.num_units)
    backward_rank = [mirrored(unit, slices) for unit in rank]
    ranks = {Kind.F: rank, Kind.I: backward_rank, Kind.W: backward_rank}
    parts = {Kind.F: (Kind.F,), Kind.I: (Kind.I,), Kind.W: (Kind.W,), Kind.B: (Kind.I, Kind.W)}
    for device, order in enumerate(schedule.orders):
        last: dict[tuple[Kind, int], int] = {}  # ranks
        for position, action in enumerate(order):
            kind, stage, microbatch = action
            for part in parts.get(kind, ()):
                key, now = (part, stage), ranks[part][microbatch]
                if last.get(key, now) <= now:
                    last[key] = now
                else:
                    earlier = max(
                        at
                        for at, each in enumerate(order[:position])
                        if each.stage == stage and part in parts.get(each.kind, ())
                    )
                    before = order[earlier]
                    reversed_slices = "" if kind is Kind.F or slices == 1 else ", slices from the last to the first"
                    raise ScheduleError(
                        "wrong-order",
                        f"comes after {before} at position {earlier}, but the {names[part]} of a stage run in "
                        f"microbatch order{reversed_slices}; move it before {before}",
                        at=(device, position, action),
                    )


def _is_plainly_in_order(found: Dependencies, stage: int, slices: int) -> bool:
    """Return whether each pass of a stage runs in the required order of microbatches, and B is not mixed with I or W."""
    runs = {kind: list(found.microbatches(kind, stage)) for kind in PLAIN}
    if runs[Kind.B] and (runs[Kind.I] or runs[Kind.W]):
        return False
    return all(
        units == sorted(units, key=None if kind is Kind.F or slices == 1 else lambda unit: mirrored(unit, slices))
        for kind, units in runs.items()
    )


def _check_weight_versions(schedule: Schedule) -> None:
    """Check that a stage has the weight version of every microbatch when its forward and when its backward runs."""
    updates = schedule.updates
    assert updates is not None
    if updates.every < 1 or updates.kept < 1 or (updates.delay or 0) < 0:
        raise ScheduleError(
            "bad-number", f"{updates} is impossible; give every and kept of at least 1, and delay of at least 0"
        )
    for action, device, position, version, newest, _ in weight_uses(schedule):
        if version > newest:
            problem = (
                f"uses weight version {version}, but its stage has made version {newest} at most by then; update after "
                f"fewer microbatches than {updates.every}, allow a longer delay than {updates.delay}, or move the "
                "action to a later position"
            )
        elif version <= newest - updates.kept:
            problem = (
                f"uses weight version {version}, as its microbatch did before, but its stage has made version {newest} "
                f"and keeps {updates.kept}; run fewer forwards ahead or keep {newest - version + 1} versions"
            )
        else:
            continue
        raise ScheduleError("weight-version", problem, at=(device, position, action))


def _check_memory(
    schedule: Schedule, costs: Costs, cap: float | Sequence[float] | None, host_budget: float | None
) -> None:
    placement, weights = schedule.placement, unit_weights(schedule, costs)
    slices = schedule.slices
    unit = costs.memory_unit(placement, slices)
    noun = "activation units" if costs.memory is None else "bytes"
    device_mend = "run a W or B before it, choose a schedule with a lower peak, or raise the cap"
    on_device, on_host = (
        of(placement, schedule.recomputed, slices) for of in (costs.memory_changes, costs.host_changes)
    )
    limits = (
        (cap, on_device, "over the memory cap of", device_mend),
        (host_budget, on_host, "in host memory, over the host memory budget of", "offload less, or raise the budget"),
    )
    for wanted, changes, over, mend in limits:
        if wanted is None:
            continue
        for device, limit in enumerate(per_device(wanted, schedule.num_devices)):
            allowed = loosened(limit / unit)
            order = schedule.orders[device]
            for position, held in enumerate(held_after(order, changes, weights, slices)):
                if held > allowed:
                    if weights is not None:
                        _check_alone(schedule, device, changes, weights, allowed, f"{noun}, {over} {limit:.12g}", unit)
                    raise ScheduleError(
                        "over-cap",
                        f"after this action the device holds {held * unit:.12g} {noun}, {over} {limit:.12g}; {mend}",
                        at=(device, position, order[position]),
                    )


def _check_alone(
    schedule: Schedule,
    device: int,
    changes: Mapping[Kind, Sequence[float]],
    weights: Sequence[float],
    allowed: float,
    over: str,
    unit: float,
) -> None:
    """Raise a ScheduleError if a single microbatch exceeds the cap on a device. No order of microbatches helps then.

    ``allowed`` is the cap in the unit of ``changes``, and ``unit`` the size of that unit. ``over`` is the part of the
    message after the number.
    """
    order, slices = schedule.orders[device], schedule.slices
    for microbatch in range(schedule.num_microbatches):
        own = [(at, action) for at, action in enumerate(order) if action.microbatch // slices == microbatch]
        holds = held_after([each for _, each in own], changes, weights, slices)
        for (at, action), held in zip(own, holds, strict=True):
            if held > allowed:
                raise ScheduleError(
                    "over-cap",
                    f"microbatch {microbatch} alone holds {held * unit:.12g} {over}; make this microbatch smaller, "
                    "recompute its stages, or raise the cap",
                    at=(device, at, action),
                )


def _check_progress(found: Dependencies) -> None:
    """Check that all devices reach the ends of their orders."""
    error = found.stuck()
    if error is None:
        return
    if error.cycle:
        first, *_ = error.cycle
        after = next(wait.action for wait in error.cycle if wait.device == first.owner)
        error = deadlock(error.cycle, "", f"move {first.needed} before {after} on device {first.owner}")
    raise error


def explained_by_validation[F: Callable[..., Any]](function: F) -> F:
    """Make a function raise the error of ``validate`` in place of a LookupError, if its schedule is invalid.

    The first argument of the function is the schedule. A schedule is validated only after a lookup has failed, so
    calls with valid schedules cost no extra time.
    """

    @wraps(function)
    def explained(schedule: Schedule, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(schedule, *args, **kwargs)
        except LookupError:
            validate(schedule)
            raise

    return cast(F, explained)
