"""Prove that a schedule or program is complete, in order, free of deadlock, and within its memory cap.

``_expected`` says which actions every device must have. ``_check_strays`` and ``_check_missing`` compare them with the
orders, and ``_check_needs`` and ``_check_progress`` prove that every action can run. ``schedule.messages`` has the same
for the actions that ``lower`` adds. Every error names the device, the position in its order or program, the action
there, the fault, and the remedy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any, cast

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import (
    COLLECTIVES,
    ORDERED,
    PLAIN,
    PREPARING,
    RECOMPUTE,
    ROUND_TRIP,
    VOCABULARY,
    VOCABULARY_COMPUTE,
    Action,
    Kind,
)
from megatron_pipemem.schedule.action_prices import held_after, unit_factors
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Dependencies, deadlock, needs_of
from megatron_pipemem.schedule.memory_cap import loosened, per_device
from megatron_pipemem.schedule.messages import (
    Places,
    Posting,
    Router,
    check_channel,
    check_compute_actions,
    check_messages,
    check_pairs,
    is_regular,
    places_of,
)
from megatron_pipemem.schedule.schedule import ActionNodes, Order, Program, Schedule, weight_uses
from megatron_pipemem.schedule.units import WHOLE, Units
from megatron_pipemem.schedule.vocabulary import check_switch, vocabulary_passes
from megatron_pipemem.schedule.waits import check_host_waits, check_queues, check_starts, run_single_queues

_COMPLETE, _IN_ORDER = "complete", "in microbatch order"
"""Names in ``Schedule.proofs``: of a schedule with any order of microbatches, and with that of ``check_microbatch_order``."""

UnitsOf = dict[tuple[Kind, int], set[int]]
"""The units of every kind and stage on one device."""


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
        costs: the costs with the memory that is compared with the cap, and with the factors of microbatches. By
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
    if len(schedule.orders) != schedule.num_devices:
        raise ScheduleError(
            "wrong-count",
            f"the placement has {schedule.num_devices} devices but the schedule has {len(schedule.orders)} orders; "
            "give one order per device",
        )
    present = [_units_of(order) for order in schedule.orders]
    expected = _expected(schedule, present)
    _check_strays(schedule, present, expected)
    check_pairs(schedule, schedule.orders)
    dependencies = Dependencies.of_schedule(schedule)
    _check_needs(schedule, dependencies)
    _check_missing(schedule, present, expected)
    if microbatch_order:
        check_microbatch_order(schedule)
    if schedule.vocabulary_barriers:
        _check_passes(schedule, dependencies)
    if schedule.updates is not None:
        _check_weight_versions(schedule)
    _check_progress(dependencies)


def validate_program(
    program: Program,
    *,
    microbatch_order: bool = True,
    host_waits: bool = True,
    single_queue: bool = False,
    ordered_starts: bool = False,
) -> None:
    """Prove that ``program`` has the actions of its schedule, and that every message is sent, received and used.

    The rules of messages: posts never block, and a compute action waits for its own message. From one device to
    another, messages move one at a time in posted order, each when both devices have posted it. ``host_waits``,
    ``single_queue`` and ``ordered_starts`` add the proofs of ``schedule.waits``: of hosts that wait, of a single queue in
    the strict model, and of one in the weaker model. ``microbatch_order`` is the argument of ``validate``.
    Raise a ScheduleError for the first violation found.
    """
    schedule, placement = program.schedule, program.placement
    validate(schedule, microbatch_order=microbatch_order)
    check_compute_actions(program)
    nodes = ActionNodes(program.actions)
    if is_regular(program, nodes):
        check_pairs(schedule, program.actions)
    else:
        places = places_of(program.actions)
        check_pairs(schedule, program.actions)
        check_messages(program, places)
    # Both ends of an edge post the same sequence, posts never block, and a consumer comes after its own receive. So its
    # message, and all before it on the edge, have moved as soon as the source has posted the send.
    router, barriers = Router(placement), schedule.vocabulary_barriers

    def needs(action: Action) -> list[Action]:
        before = [send for send in (router.needed_send(action),) if send is not None]
        if action.kind is Kind.REDUCE_GRAD and placement.replicas > 1:
            before = [Action(Kind.REDUCE_REPLICAS, stage) for stage in placement.counterparts(action.stage)]
        if barriers and action.kind in ORDERED:
            needed_actions = needs_of(action, placement, (), schedule.units, barriers)
            # Needs of other stages are covered by messages.
            before += [needed for needed in needed_actions if not VOCABULARY.isdisjoint((action.kind, needed.kind))]
        return before

    dependencies = Dependencies(program.actions, placement, needs, schedule.units, pairs=schedule.pairs, nodes=nodes)
    _check_progress(dependencies)
    if barriers:
        check_queues(program, dependencies)
    if host_waits:
        check_host_waits(program, dependencies)
    if single_queue:
        run_single_queues(program)
    if ordered_starts:
        check_starts(program, dependencies)


def _units_of(order: Order) -> UnitsOf:
    units: UnitsOf = defaultdict(set)
    for kind, stage, unit in order:
        units[kind, stage].add(unit)
    return units


def _expected(schedule: Schedule, present: Sequence[UnitsOf]) -> list[UnitsOf]:
    """Return the actions that every device must have.

    Every stage runs all microbatches of its replica forward. If there are any backwards, each microbatch runs backward
    as the orders have it: B, or I and W. A stage with recomputation has it for every backward. Other actions, such as
    copies to the host, must be there if they are there and have a use.
    """
    placement, kinds = schedule.placement, schedule.kinds
    backwards = not kinds.isdisjoint((Kind.I, Kind.W, Kind.B))
    further_kinds = [kind for kind in ORDERED - VOCABULARY if kind in kinds and kind not in PLAIN]
    replica_of = _replica_of(schedule)
    of_replica: list[set[int]] = [set() for _ in range(placement.replicas)]
    for microbatch in range(schedule.num_microbatches):
        of_replica[replica_of.get(microbatch, 0)].update(schedule.units.of(microbatch))
    expected: list[UnitsOf] = [{} for _ in schedule.orders]
    for stage, device in enumerate(placement.devices):
        units = of_replica[placement.replica_of(stage)]
        by_kind = {Kind.F: units}
        if backwards:
            full = units & present[device].get((Kind.B, stage), set())
            by_kind |= {Kind.B: full, Kind.I: units - full, Kind.W: units - full}
        recompute_kind = schedule.recomputed.get(stage)
        for kind in further_kinds:
            if kind in RECOMPUTE and kind is not recompute_kind or kind in ROUND_TRIP and recompute_kind is Kind.R:
                continue  # two recomputations of one stage, or copies of activations that it does not keep
            users = _users_of(kind)
            useful = set[int]().union(*(by_kind.get(user, ()) for user in users)) if users else units
            if kind not in PREPARING:
                by_kind[kind] = useful & present[device].get((kind, stage), set())
            elif kind in schedule.prepared.get(stage, ()):
                by_kind[kind] = useful
        expected[device] |= {(kind, stage): units for kind, units in by_kind.items()}
    if schedule.vocabulary_barriers:
        for kind, device, units in vocabulary_passes(schedule, backwards):
            expected[device][kind, device] = units
    return expected


def _users_of(kind: Kind) -> list[Kind]:
    """Return the kinds that use the result of a kind, or that of the last kind which must follow it."""
    if kind.spec.followed_by:
        return _users_of(Kind(kind.spec.followed_by))
    return [Kind(user) for user in kind.spec.prepares]


def _replica_of(schedule: Schedule) -> Mapping[int, int]:
    """Return the replica that runs the first action of every microbatch; an empty mapping if there is one replica."""
    placement, replica_of = schedule.placement, dict[int, int]()
    for _, stage, unit in chain.from_iterable(schedule.orders) if placement.replicas > 1 else ():
        if unit is not None and 0 <= stage < placement.num_stages:
            # The parts of one microbatch stay together.
            replica_of.setdefault(schedule.units.microbatch(unit), placement.replica_of(stage))
    return replica_of


def _check_strays(schedule: Schedule, present: Sequence[UnitsOf], expected: Sequence[UnitsOf]) -> None:
    """Check that every action is among the expected actions of its device, and that none occurs twice."""
    for device, order in enumerate(schedule.orders):
        if all(units <= expected[device].get(key, set()) for key, units in present[device].items()):
            continue
        for position, action in enumerate(order):
            if action.microbatch not in expected[device].get(action[:2], ()):
                raise ScheduleError(*_stray(schedule, action, device), at=(device, position, action))
    if any(sum(map(len, units.values())) < len(order) for units, order in zip(present, schedule.orders, strict=True)):
        places_of(schedule.orders)  # raises for the first action that occurs twice


def _stray(schedule: Schedule, action: Action, device: int) -> tuple[str, str]:
    """Return the code and the message for an action that must not be on this device."""
    kind, stage, unit = action
    placement, units = schedule.placement, schedule.units
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
    if kind not in VOCABULARY and not 0 <= stage < placement.num_stages:
        return (
            "unknown-stage",
            f"needs stage {stage}, but the placement holds stages 0 to {placement.num_stages - 1}; remove or renumber it",
        )
    if unit is None or not 0 <= unit < len(units):
        noun, several = ("microbatch", "microbatches") if units.are_whole else ("unit", "units")
        return (
            "unknown-microbatch",
            f"needs {noun} {unit}, but the step has {several} 0 to {len(units) - 1}; remove or renumber it, or "
            "change the number of microbatches",
        )
    if kind in VOCABULARY:
        use = "forwards alone have none"
        if kind is Kind.LOSS:
            use = "only the last stage's device has one per microbatch, with its last part"
        return "useless-action", f"has no use: {use}; remove it"
    if placement.devices[stage] != device:
        return "misplaced-action", f"needs stage {stage}, which device {placement.devices[stage]} holds; move it there"
    microbatch, replica = units.microbatch(unit), placement.replica_of(stage)
    actions = ((d, other) for d, order in enumerate(schedule.orders) for other in order)
    first_device, first = next(place for place in actions if units.microbatch(place[1].microbatch) == microbatch)
    if placement.replica_of(first.stage) != replica:
        return (
            "mixed-replicas",
            f"runs microbatch {microbatch} on replica {replica}, but {first} of device "
            f"{first_device} runs it on replica {placement.replica_of(first.stage)}; a microbatch runs through all stages "
            "of one replica, so remove or renumber one of the two",
        )
    full = action._replace(kind=Kind.B)
    if kind in PLAIN:
        inputs, weights = action._replace(kind=Kind.I), action._replace(kind=Kind.W)
        return (
            "duplicate-action",
            f"repeats work of {full}; keep {full}, or {inputs} and {weights}",
        )
    recompute_kind = schedule.recomputed.get(stage)
    if kind in RECOMPUTE and kind is not recompute_kind:
        return "duplicate-action", f"stage {stage} has {recompute_kind} as well; remove one of the two"
    if kind in ROUND_TRIP and recompute_kind is Kind.R:
        return (
            "useless-action",
            f"stage {stage} is recomputed and keeps nothing to copy; remove this copy, or the stage's R",
        )
    return "useless-action", f"no {' or '.join(_users_of(kind))} uses its result; remove it, or add one"


def _check_missing(schedule: Schedule, present: Sequence[UnitsOf], expected: Sequence[UnitsOf]) -> None:
    """Check that no expected action is missing.

    ``_check_needs`` has found every missing action that another one needs.
    """
    kinds = list(Kind)
    missing = [
        (stage, unit, kinds.index(kind))
        for needed, actual in zip(expected, present, strict=True)
        for (kind, stage), units in needed.items()
        for unit in units - actual.get((kind, stage), set())
    ]
    if not missing:
        return
    stage, unit, kind_index = min(missing)
    action = Action(kinds[kind_index], stage, unit)
    device = stage if action.kind in VOCABULARY else schedule.placement.devices[stage]
    order = schedule.orders[device]
    at = device, len(order), action
    forward, inputs, weights, full = (action._replace(kind=kind) for kind in PLAIN)
    if action.kind in VOCABULARY:
        problem = "is missing; with_vocabulary() adds all passes and collectives to a schedule without them"
    elif action == inputs:
        at = device, order.index(forward), forward
        problem = f"has no backward; add {full}, or {inputs} and {weights}"
    elif action == weights:
        at = device, order.index(inputs), inputs
        problem = f"has no {weights} after it; add {weights}, or make it {full}"
    else:
        problem = "is missing; every stage runs every microbatch forward once, add it"
    raise ScheduleError("missing-action", problem, at=at)


def _check_needs(schedule: Schedule, dependencies: Dependencies) -> None:
    """Check that all actions that an action needs exist, and come before it if they are on the same device."""
    nodes: Sequence[int] = dependencies.impossible
    if any(kind.spec.prepares or kind.spec.followed_by for kind in schedule.kinds):
        nodes = range(sum(map(len, schedule.orders)))
    if not nodes:
        return
    places = places_of(schedule.orders)
    for node in nodes:
        action = dependencies.actions[node]
        if action not in places:  # a collective: the actions that need it are checked
            continue
        device, position = places[action]
        for needed in (*dependencies.needed_by(node), *_preparations(schedule, action, places)):
            if needed not in places:
                or_full = f" (or {needed._replace(kind=Kind.B)})" if needed.kind is Kind.I else ""
                code, problem = "missing-action", f"needs {needed}{or_full}, which no device runs; add it"
            elif places[needed] > (device, position) and places[needed][0] == device:
                code = "wrong-order"
                problem = f"needs {needed}, which comes later; move {needed} before it"
            else:
                continue
            raise ScheduleError(code, problem, at=(device, position, action))
    for action, place in places.items():
        follower = action.kind.spec.followed_by
        if follower and action._replace(kind=Kind(follower)) not in places:
            problem = f"has no {action._replace(kind=Kind(follower))} after it to complete it; add one"
            raise ScheduleError("missing-action", problem, at=(*place, action))


def _preparations(schedule: Schedule, action: Action, places: Places) -> Iterator[Action]:
    """Yield the actions that prepare ``action`` on its device.

    For a backward these are ``2R0`` or ``2RS0`` if the schedule recomputes the stage, and ``2WAIT_RELOAD0`` if there
    is any copy, or wait for a copy, of this stage and microbatch.
    """
    for kind in schedule.prepared.get(action.stage, ()):
        if action.kind in kind.spec.prepares:
            yield action._replace(kind=kind)
    last = ROUND_TRIP[-1]
    if action.kind in last.spec.prepares and any(action._replace(kind=kind) in places for kind in ROUND_TRIP):
        yield action._replace(kind=last)


_PASSES_OF = {
    "forwards": (Kind.F,),
    "input gradients": (Kind.I, Kind.B),
    "weight gradients": (Kind.W, Kind.B),
}


def check_microbatch_order(schedule: Schedule) -> None:
    """Prove that the order of microbatches allows training that is bit-identical to stock 1F1B.

    Forwards of a stage must run in microbatch order, because data come from an iterator, and dropout from one sequence
    of random numbers. Gradients must accumulate in that order too. The parts of one microbatch run backward from the
    last to the first. Runs of this package promise this order. Schedules that other programs run may lack it.
    """
    dependencies = Dependencies.of_schedule(schedule)
    for stage in range(schedule.num_stages):
        for noun, kinds in _PASSES_OF.items():
            units = WHOLE if noun == "forwards" else schedule.units
            _check_rising(dependencies, kinds, stage, f"the {noun} of a stage", units)


def _check_rising(
    dependencies: Dependencies, kinds: Sequence[Kind], stage: int, noun: str, reversed_units: Units
) -> None:
    """Check that the passes of these kinds run in microbatch order on a stage.

    ``reversed_units`` has microbatches whose parts run from the last to the first, and ``WHOLE`` none.
    """
    by_kind = [nodes for kind in kinds if (nodes := dependencies.nodes_of(kind, stage))]
    if len(by_kind) == 1:
        nodes = by_kind[0]
    else:
        nodes = dict(sorted(chain.from_iterable(n.items() for n in by_kind), key=itemgetter(1)))
    units = list(nodes)
    ranks = units if reversed_units.are_whole else list(map(reversed_units.backward, units))
    if ranks == sorted(ranks):
        return
    at = next(at for at, (rank, following) in enumerate(pairwise(ranks)) if following < rank)
    earlier, later = nodes[units[at]], nodes[units[at + 1]]
    device = dependencies.graph.lane_of[later]
    first, before = dependencies.lanes[device].start, dependencies.actions[earlier]
    reversal = "" if reversed_units.are_whole else ", parts from the last to the first"
    raise ScheduleError(
        "wrong-order",
        f"comes after {before}, but {noun} run in microbatch order{reversal}; move it before {before}",
        at=(device, later - first, dependencies.actions[later]),
    )


def _check_passes(schedule: Schedule, dependencies: Dependencies) -> None:
    """Check the order of the vocabulary passes, and that all devices post the collectives in the same order."""
    for device in range(schedule.num_devices):
        for kind in VOCABULARY_COMPUTE:
            units = schedule.units if kind in (Kind.T, Kind.EMBED_B) else WHOLE
            _check_rising(dependencies, (kind,), device, f"the passes {kind}", units)
    posted: dict[int, list[Posting]] = {}
    for device, order in enumerate(schedule.orders):
        collectives = [(position, action) for position, action in enumerate(order) if action.kind in COLLECTIVES]
        posted[device] = [
            Posting(position, action, (action.kind, action.microbatch)) for position, action in collectives
        ]
    check_channel("collective-order", posted)


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
    placement, weights = schedule.placement, unit_factors(schedule, costs)
    units = schedule.units
    unit = costs.memory_unit(placement, units)
    noun = "activation units" if costs.memory is None else "bytes"
    device_mend = "run a W or B before it, choose a schedule with a lower peak, or raise the cap"
    on_device, on_host = (
        of(placement, schedule.recomputed, units) for of in (costs.memory_changes, costs.host_changes)
    )
    limits = (
        (cap, on_device, "over the memory cap of", device_mend),
        (host_budget, on_host, "in host memory, over the host memory budget of", "offload less, or raise the budget"),
    )
    for limit_of_devices, changes, over, mend in limits:
        if limit_of_devices is None:
            continue
        for device, limit in enumerate(per_device(limit_of_devices, schedule.num_devices)):
            order = schedule.orders[device]
            first_over = partial(_first_over, loosened(limit / unit), changes, weights, units)
            if (fault := first_over(order)) is None:
                continue
            at, memory = fault
            for microbatch in range(schedule.num_microbatches if weights is not None else 0):
                own = [action for action in order if units.microbatch(action.microbatch) == microbatch]
                if (alone := first_over(own)) is not None:  # then no order of microbatches helps
                    raise ScheduleError(
                        "over-cap",
                        f"microbatch {microbatch} alone holds {alone[1] * unit:.12g} {noun}, {over} {limit:.12g}; make this "
                        "microbatch smaller, recompute its stages, or raise the cap",
                        at=(device, order.index(own[alone[0]]), own[alone[0]]),
                    )
            raise ScheduleError(
                "over-cap",
                f"after this action the device holds {memory * unit:.12g} {noun}, {over} {limit:.12g}; {mend}",
                at=(device, at, order[at]),
            )


def _first_over(
    allowed: float,
    changes: Mapping[Kind, Sequence[float]],
    weights: Sequence[float] | None,
    units: Units,
    actions: Sequence[Action],
) -> tuple[int, float] | None:
    """Return the position of the first action after which a device holds more than is allowed, and its memory then.

    ``allowed`` and the result have the unit of ``changes``.
    """
    memory = enumerate(held_after(actions, changes, weights, units))
    return next(((at, amount) for at, amount in memory if amount > allowed), None)


def _check_progress(dependencies: Dependencies) -> None:
    """Check that all devices reach the ends of their orders."""
    error = dependencies.stuck()
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
