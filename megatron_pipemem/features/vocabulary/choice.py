"""Compare by simulation: the LM head on the last stage, with layers moved away from it, or cut over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import brief
from megatron_pipemem.schedule.options import OFF
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import shared
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.units import WHOLE, Units
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM, VocabularyCosts


def head_on_last_stage(
    costs: Costs, placement: Placement, head: float, layers: Sequence[int] | None = None, *, units: Units = WHOLE
) -> Costs:
    """Return costs in which the seconds of the whole LM head are added to the last stage.

    ``costs`` are those of the layers alone. ``head`` is the seconds of a forward and a backward of the whole head for
    one microbatch. A third each is added to F, I and W, in equal shares to all parts.

    ``layers`` has the number of layers of every stage, if it differs between stages. ``costs`` must then be single
    numbers, and every layer takes the same time. If memory is in activation units, all stages still count as equally
    large.
    """
    seconds = costs.seconds(placement, units)
    if layers is not None:
        if len(layers) != placement.num_stages or not costs.are_single:
            raise UnsupportedError(
                "costs-mismatch",
                f"layers per stage need one number for each of {placement.num_stages} stages, not {len(layers)}, and "
                "costs as single numbers, each the price of a device's whole share; correct the numbers or the costs",
            )
        if min(layers) < 0 or not sum(layers):
            raise UnsupportedError(
                "bad-layout",
                f"layers of the stages {', '.join(map(str, layers))}: give 0 or more for each stage, and at least 1 in all",
            )
        model = {kind: sum(prices) for kind, prices in seconds.items()}
        seconds = {kind: shared([model[kind] * n / sum(layers) for n in layers], units) for kind in seconds}
    n = units.parts
    forward, inputs, weights = (
        (*seconds[kind][:-n], *(stage_seconds + head / 3 / n for stage_seconds in seconds[kind][-n:]))
        for kind in (Kind.F, Kind.I, Kind.W)
    )
    own = costs.of(placement)
    return replace(own, forward=forward, backward_input=inputs, backward_weight=weights, head_forward=head / 3)


def redistribute(layers: int, placement: Placement, head: float) -> tuple[int, ...]:
    """Return the number of layers of each stage that minimises the work of the busiest device.

    ``head`` is the cost of the LM head as a number of layers. The head stays on the last stage. Raise an
    UnsupportedError for negative numbers, or if the placement has replicas of the model.
    """
    if layers < 0 or head < 0:
        raise UnsupportedError(
            "bad-number", "layers and head must not be negative; give the cost of the head in layers"
        )
    if placement.replicas > 1:
        raise UnsupportedError(
            "unsupported-placement",
            "layers are redistributed over the stages of one replica of the model, and this placement has more "
            "replicas; use a placement with one",
        )
    load = [0.0] * placement.num_devices
    load[placement.devices[-1]] += head
    device_layers = [0] * placement.num_devices
    for _ in range(layers):
        device = min(range(len(load)), key=lambda d: (load[d], device_layers[d], d))
        load[device] += 1
        device_layers[device] += 1
    stage_layers = [0] * placement.num_stages
    for device, stages in enumerate(placement.stages):
        # Earlier stages of a device take the rest of the division, because the last stage has the head.
        for index, stage in enumerate(stages):
            stage_layers[stage] = device_layers[device] // len(stages) + (index < device_layers[device] % len(stages))
    return tuple(stage_layers)


REDISTRIBUTE = "redistribute"
_UNCUT_OPTIONS = {OFF: "the head on the last stage", REDISTRIBUTE: "moving layers away from the last stage"}
_LEAST_GAIN = 0.01
"""Least gain, as a share of the makespan, that is worth another layout of the model or one more microbatch in flight.
"""


@dataclass(frozen=True)
class VocabularyChoice:
    """The chosen way to place the LM head, the reason as one sentence, and the simulated steps of all ways by name.

    The names are ``off``, ``redistribute``, and the numbers of the paper's algorithms, ``1`` and ``2``.
    """

    best: str  # one of these names; Algorithm 1 has two barriers, and Algorithm 2 one
    reason: str
    steps: Mapping[str, Timeline]
    moved: tuple[int, ...] | None  # layers of each stage for ``redistribute``; ``None`` if layers cannot be moved

    def __repr__(self) -> str:
        return f"<VocabularyChoice {self.best} of {', '.join(self.steps)}: {brief(self.reason)}>"

    def without(self, name: str) -> VocabularyChoice:
        """Return the choice that results if the way ``name`` is not allowed."""
        return _choose({other: step for other, step in self.steps.items() if other != name}, self.moved)


def choose_vocabulary(
    schedule: Schedule,
    costs: Costs,
    head: float,
    *,
    layers: int | None = None,
    layout: Sequence[int] | None = None,
    with_passes: Mapping[int, Schedule] | None = None,
) -> VocabularyChoice:
    """Return the fastest way to place the LM head, or the simplest of those that are at most 1 % slower.

    ``costs`` are those of the layers alone, and ``head`` is the seconds of a forward and a backward of the whole head
    for one microbatch. If ``costs`` have prices of vocabulary passes, both algorithms use these for the cut head.
    Otherwise ``head`` is divided equally among the devices.

    ``layers`` is the number of layers of the model, or ``None`` if layers cannot be moved. ``layout`` has the present
    number of layers of each stage, if ``costs`` are single numbers. By default all stages are equal. ``with_passes``
    maps each allowed number of barriers to a schedule with vocabulary passes. By default ``with_vocabulary`` makes one
    for 1 and one for 2.
    """
    placement, units = schedule.placement, schedule.units
    seconds = costs.seconds(placement, units)
    model_seconds = sum(map(sum, (seconds[kind] for kind in (Kind.F, Kind.B))))
    if not model_seconds:
        raise CostsError(
            "no-time",
            "F, I and W of the layers take no time, so the head has no cost relative to them; give costs above 0",
        )

    def with_head(head: float, layout: Sequence[int] | None) -> Costs:
        return head_on_last_stage(costs, placement, head, layout, units=units)

    steps, moved = {OFF: simulate(schedule, with_head(head, layout))}, None
    if layers is not None:
        moved = redistribute(layers, placement, head * layers / model_seconds)
        steps[REDISTRIBUTE] = simulate(schedule, with_head(head, moved))
    alone = with_head(0.0, layout)
    for algorithm, barriers in BARRIERS_OF_ALGORITHM.items():
        prices = costs.vocabulary or VocabularyCosts.of_head(head, placement.num_devices, barriers)
        priced = replace(alone, vocabulary=prices)
        if with_passes is None:
            steps[str(algorithm)] = simulate(with_vocabulary(schedule, barriers, priced), priced)
        elif barriers in with_passes:
            steps[str(algorithm)] = simulate(with_passes[barriers], priced)
    return _choose(steps, moved)


def _choose(steps: Mapping[str, Timeline], moved: tuple[int, ...] | None) -> VocabularyChoice:
    fastest = min(step.makespan for step in steps.values())
    near = [name for name, step in steps.items() if step.makespan <= fastest * (1 + _LEAST_GAIN)]
    # Ways that keep the model whole come first. Of the two algorithms, the one that holds less comes first.
    best = min(near, key=(OFF, REDISTRIBUTE, "2", "1").index)
    return VocabularyChoice(best, _reason(best, steps), steps, moved)


def _reason(best: str, steps: Mapping[str, Timeline]) -> str:
    others = [name for name in steps if (name in _UNCUT_OPTIONS) != (best in _UNCUT_OPTIONS)]
    if not others:
        return f"{_named(best)}: no other way was allowed"
    other = min(others, key=lambda name: steps[name].makespan)
    gain = steps[other].makespan / steps[best].makespan - 1
    if best in _UNCUT_OPTIONS:
        saved = f"would save {-gain:.1%} of the step" if gain < 0 else f"would take {gain:.1%} longer"
        more = BARRIERS_OF_ALGORITHM[int(other)]
        why = f"{_named(other)} {saved}, which is not worth {more} more microbatches in flight"
    else:
        why = f"{_named(other)}, the best way without it, takes {gain:.1%} longer"
    return f"{_named(best)}: {why}"


def _named(way: str) -> str:
    return _UNCUT_OPTIONS.get(way) or f"cut vocabulary by Algorithm {way}"
