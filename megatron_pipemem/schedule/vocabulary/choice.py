"""Is vocabulary parallelism worth it? Against doing nothing and against moving layers away from the last stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.options import OFF
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.vocabulary.baselines import head_on_last_stage, redistribute
from megatron_pipemem.schedule.vocabulary.needs import BARRIERS, BARRIERS_OF_ALGORITHM
from megatron_pipemem.schedule.vocabulary.passes import with_vocabulary
from megatron_pipemem.schedule.vocabulary.prices import VocabularyCosts

REDISTRIBUTE = "redistribute"
_NAMES = {OFF: "the head on the last stage", REDISTRIBUTE: "moving layers away from the last stage"}
_LEAST_GAIN = 0.01
"""Part of the makespan: for less nobody changes the model's layout, or keeps another microbatch in flight."""


@dataclass(frozen=True)
class ModelBytes:
    """Of the whole model, in the bytes of one device's tensor-parallel share.

    Args:
        activations: of one microbatch in all layers: what an activation unit is.
        layers: of all layers, with gradients and optimizer state.
        head: likewise of the head.
        embedding: likewise of the embedding; 0 when it is tied and nothing keeps a copy.
        logits: fp32, of one microbatch over the whole vocabulary.
        hidden: one ``[tokens, h]`` tensor, of which a shard holds one, and two more with one barrier.
    """

    activations: float
    layers: float = 0.0
    head: float = 0.0
    embedding: float = 0.0
    logits: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True)
class VocabularyOption:
    """One way to deal with a large vocabulary.

    Args:
        name: ``off``, ``redistribute``, or the paper's algorithm, ``1`` or ``2``.
        timeline: of a step.
        layers: per stage, where layers are whole.
        peak_bytes: the most a device holds, parameters included; ``None`` when no bytes are known.
    """

    name: str
    timeline: Timeline
    layers: tuple[int, ...] | None
    peak_bytes: float | None

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @property
    def makespan(self) -> float:
        return self.timeline.makespan


@dataclass(frozen=True)
class VocabularyChoice:
    """The option to take, why, and all that were compared, by name."""

    best: VocabularyOption
    reason: str
    options: Mapping[str, VocabularyOption]


def choose_vocabulary(
    schedule: Schedule,
    costs: Costs,
    head: float,
    *,
    layers: int | None = None,
    vocabulary: Mapping[int, VocabularyCosts] | None = None,
    model_bytes: ModelBytes | None = None,
    budget: float | None = None,
) -> VocabularyChoice:
    """The fastest option within the budget; the simplest of those that are about as fast.

    Args:
        schedule: without vocabulary passes.
        costs: of the layers alone.
        head: seconds of forward and backward of the whole head on one device.
        layers: how many the model has, to compare with moving them; ``None`` when they cannot be moved.
        vocabulary: prices of the passes per number of barriers; default equal shards at the head's own speed.
        model_bytes: to compare memory.
        budget: bytes of a device; needs ``model_bytes``.

    Raises:
        UnsupportedError: no option keeps the budget, or a budget without bytes.
        CostsError: the costs do not fit the schedule.
    """
    if budget is not None and model_bytes is None:
        raise UnsupportedError("a budget in bytes needs the bytes of the model; give model_bytes, or no budget")
    placement = schedule.placement
    options: dict[str, VocabularyOption] = {}

    def consider(name: str, timeline: Timeline, layout: tuple[int, ...] | None, barriers: int) -> None:
        held = None if model_bytes is None else _peak_bytes(timeline, layout, model_bytes, barriers)
        options[name] = VocabularyOption(name, timeline, layout, held)

    consider(OFF, simulate(schedule, head_on_last_stage(costs, placement, head)), None, 0)
    if layers is not None:
        whole = sum(map(sum, (costs.seconds(placement)[kind] for kind in (Kind.F, Kind.B))))
        layout = redistribute(layers, placement, head * layers / whole)
        consider(REDISTRIBUTE, simulate(schedule, head_on_last_stage(costs, placement, head, layout)), layout, 0)
    for algorithm, barriers in BARRIERS_OF_ALGORITHM.items():
        prices = (vocabulary or {}).get(barriers) or VocabularyCosts.of_head(head, placement.num_devices, barriers)
        priced = replace(costs, vocabulary=prices)
        consider(str(algorithm), simulate(with_vocabulary(schedule, barriers, priced), priced), None, barriers)
    return _choose(options, budget)


def _choose(options: Mapping[str, VocabularyOption], budget: float | None) -> VocabularyChoice:
    fitting = [o for o in options.values() if budget is None or o.peak_bytes <= budget]
    if not fitting:
        least = min(options.values(), key=lambda option: option.peak_bytes)
        raise UnsupportedError(
            f"no way to hold the vocabulary keeps {budget:.6g} bytes per device; {_named(least)} needs least, "
            f"{least.peak_bytes:.6g}; allow that, or take more devices or smaller microbatches"
        )
    fastest = min(option.makespan for option in fitting)
    near = [option for option in fitting if option.makespan <= fastest * (1 + _LEAST_GAIN)]
    # The layout of the model first; of the two algorithms, the one that holds less.
    rank = {OFF: 0, REDISTRIBUTE: 1, "2": 2, "1": 3}
    best = min(near, key=lambda option: rank[option.name])
    return VocabularyChoice(best, _reason(best, options, fitting), options)


def _reason(
    best: VocabularyOption, options: Mapping[str, VocabularyOption], fitting: Sequence[VocabularyOption]
) -> str:
    words = []
    others = [option for option in fitting if (option.name in _NAMES) != (best.name in _NAMES)]
    if others:
        other = min(others, key=lambda option: option.makespan)
        gain = other.makespan / best.makespan - 1
        if best.name in _NAMES:
            saved = f"would save {-gain:.1%} of the step" if gain < 0 else f"would take {gain:.1%} longer"
            words.append(
                f"{_named(other)} {saved}, which is not worth {BARRIERS_OF_ALGORITHM[int(other.name)]} more microbatches "
                "in flight"
            )
        else:
            words.append(f"{_named(other)}, the best without, takes {gain:.1%} longer")
    for option in options.values():
        if option not in fitting:
            words.append(f"{_named(option)} needs {option.peak_bytes:.4g} bytes, over the budget")
    if best.peak_bytes is not None and best.name != OFF:
        words.append(
            f"a device holds {best.peak_bytes:.4g} bytes, and {options[OFF].peak_bytes:.4g} with the head on the last"
        )
    return f"{_named(best)}: {'; '.join(words)}" if words else f"{_named(best)}: nothing else was allowed"


def _named(option: VocabularyOption) -> str:
    return _NAMES.get(option.name) or f"vocabulary parallelism by Algorithm {option.name}"


def _peak_bytes(timeline: Timeline, layout: Sequence[int] | None, held: ModelBytes, barriers: int) -> float:
    schedule = timeline.schedule
    placement = schedule.placement
    share = [1 / placement.num_stages] * placement.num_stages
    if layout is not None:
        share = [layers / max(1, sum(layout)) for layers in layout]
    takes = tuple(part * held.activations for part in share)
    gives = tuple(-part for part in takes)
    in_bytes = replace(Costs(), memory={Kind.F: takes, Kind.W: gives, Kind.B: gives})
    most = []
    for device, (stages, peak) in enumerate(zip(placement.stages, simulate(schedule, in_bytes).peaks, strict=True)):
        total = peak + held.layers * sum(share[stage] for stage in stages)
        if barriers in BARRIERS:
            total += (held.head + held.embedding + held.logits) / placement.num_devices
            total += held.hidden * (3 if barriers == 1 else 1)
        else:
            total += (device == placement.devices[-1]) * (held.head + held.logits)
            total += (device == placement.devices[0]) * held.embedding
        most.append(total)
    return max(most)
