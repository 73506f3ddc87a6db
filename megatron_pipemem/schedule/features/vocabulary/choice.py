"""Choose whether vocabulary parallelism is worth it, against doing nothing and against moving layers away from the last
stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.brief import brief
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import Timeline, simulate
from megatron_pipemem.schedule.core.vocabulary import BARRIERS_OF_ALGORITHM
from megatron_pipemem.schedule.core.vocabulary_costs import VocabularyCosts
from megatron_pipemem.schedule.features.vocabulary.baselines import head_on_last_stage, redistribute
from megatron_pipemem.schedule.features.vocabulary.passes import with_vocabulary
from megatron_pipemem.schedule.options import OFF

REDISTRIBUTE = "redistribute"
_NAMES = {OFF: "the head on the last stage", REDISTRIBUTE: "moving layers away from the last stage"}
_LEAST_GAIN = 0.01
"""Part of the makespan: for less nobody changes the model's layout, or keeps another microbatch in flight."""


@dataclass(frozen=True)
class VocabularyOption:
    """One way to deal with a large vocabulary.

    Args:
        name: ``off``, ``redistribute``, or the paper's algorithm, ``1`` or ``2``.
        timeline: of a step.
        layers: per stage, where layers are whole.
    """

    name: str
    timeline: Timeline
    layers: tuple[int, ...] | None

    def __repr__(self) -> str:
        return f"<VocabularyOption {self.name}: {self.timeline!r}>"

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @property
    def makespan(self) -> float:
        return self.timeline.makespan


@dataclass(frozen=True)
class VocabularyChoice:
    """Say which option to take and why, and keep all that were compared.

    Args:
        best: the option to take.
        reason: one sentence.
        options: all that were compared, by name.
    """

    best: VocabularyOption
    reason: str
    options: Mapping[str, VocabularyOption]

    def __repr__(self) -> str:
        return f"<VocabularyChoice {self.best.name} of {', '.join(self.options)}: {brief(self.reason)}>"

    def without(self, name: str) -> VocabularyChoice:
        """Return the choice among the other options."""
        return _choose({other: option for other, option in self.options.items() if other != name})


def choose_vocabulary(
    schedule: Schedule,
    costs: Costs,
    head: float,
    *,
    layers: int | None = None,
    layout: Sequence[int] | None = None,
    with_passes: Mapping[int, Schedule] | None = None,
) -> VocabularyChoice:
    """Return the fastest option; the simplest of those that are about as fast.

    Args:
        schedule: without vocabulary passes.
        costs: of the layers alone. Prices of passes in them hold for both algorithms; by default shards are equal, at the
            head's own speed.
        head: seconds of forward and backward of the whole head on one device.
        layers: how many the model has, to compare with moving them; ``None`` when they cannot be moved.
        layout: layers of every stage as they are, for costs in single numbers; by default evenly cut.
        with_passes: per number of barriers what would run, where it may; by default what ``with_vocabulary`` makes of the
            schedule, both ways.

    Raises:
        CostsError: the costs do not fit the schedule, or its layers take no time.
        UnsupportedError: layers or a layout for costs per stage, or no layers at all.
    """
    placement = schedule.placement
    whole = sum(map(sum, (costs.seconds(placement)[kind] for kind in (Kind.F, Kind.B))))
    if not whole:
        raise CostsError(
            "F, I and W of the layers take no time, so there is nothing to compare the head with; give costs"
        )
    options: dict[str, VocabularyOption] = {}

    def consider(name: str, timeline: Timeline, layout: Sequence[int] | None) -> None:
        options[name] = VocabularyOption(name, timeline, None if layout is None else tuple(layout))

    consider(OFF, simulate(schedule, head_on_last_stage(costs, placement, head, layout)), layout)
    if layers is not None:
        moved = redistribute(layers, placement, head * layers / whole)
        consider(REDISTRIBUTE, simulate(schedule, head_on_last_stage(costs, placement, head, moved)), moved)
    alone = head_on_last_stage(costs, placement, 0.0, layout)
    for algorithm, barriers in BARRIERS_OF_ALGORITHM.items():
        prices = costs.vocabulary or VocabularyCosts.of_head(head, placement.num_devices, barriers)
        priced = replace(alone, vocabulary=prices)
        if with_passes is None:
            consider(str(algorithm), simulate(with_vocabulary(schedule, barriers, priced), priced), layout)
        elif barriers in with_passes:
            consider(str(algorithm), simulate(with_passes[barriers], priced), layout)
    return _choose(options)


def _choose(options: Mapping[str, VocabularyOption]) -> VocabularyChoice:
    fastest = min(option.makespan for option in options.values())
    near = [option for option in options.values() if option.makespan <= fastest * (1 + _LEAST_GAIN)]
    # The layout of the model first; of the two algorithms, the one that holds less.
    rank = {OFF: 0, REDISTRIBUTE: 1, "2": 2, "1": 3}
    best = min(near, key=lambda option: rank[option.name])
    return VocabularyChoice(best, _reason(best, options), options)


def _reason(best: VocabularyOption, options: Mapping[str, VocabularyOption]) -> str:
    others = [option for option in options.values() if (option.name in _NAMES) != (best.name in _NAMES)]
    if not others:
        return f"{_named(best)}: nothing else was allowed"
    other = min(others, key=lambda option: option.makespan)
    gain = other.makespan / best.makespan - 1
    if best.name in _NAMES:
        saved = f"would save {-gain:.1%} of the step" if gain < 0 else f"would take {gain:.1%} longer"
        more = BARRIERS_OF_ALGORITHM[int(other.name)]
        why = f"{_named(other)} {saved}, which is not worth {more} more microbatches in flight"
    else:
        why = f"{_named(other)}, the best without, takes {gain:.1%} longer"
    return f"{_named(best)}: {why}"


def _named(option: VocabularyOption) -> str:
    return _NAMES.get(option.name) or f"vocabulary parallelism by Algorithm {option.name}"
