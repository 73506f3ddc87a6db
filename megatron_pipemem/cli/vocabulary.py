"""Place the LM head for the commands: on the last stage, or cut over all devices."""

from __future__ import annotations

from dataclasses import replace

from megatron_pipemem.cli.checks import check_layers
from megatron_pipemem.cli.loading import Loaded, load_schedule
from megatron_pipemem.cli.options import Prices, Question
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.brief import LARGEST
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import Timeline, simulate
from megatron_pipemem.schedule.core.vocabulary import BARRIERS_OF_ALGORITHM
from megatron_pipemem.schedule.core.vocabulary_costs import VocabularyCosts
from megatron_pipemem.schedule.features.vocabulary.choice import REDISTRIBUTE, choose_vocabulary, head_on_last_stage
from megatron_pipemem.schedule.options import OFF
from megatron_pipemem.schedule.request import Request
from megatron_pipemem.schedule.resolve import ChosenSchedule, vocabulary_ways


def head_seconds(asked: Prices, costs: Costs, schedule: Schedule) -> float | None:
    """Return the seconds of the whole head; ``None`` where nobody says.

    Args:
        asked: what the user says of the head.
        costs: of the layers alone.
        schedule: whose placement has the stages.

    Raises:
        UnsupportedError: it is no number, or counts layers and nobody said how many there are.
    """
    if asked.head_cost is None:
        return None
    try:
        amount = float(asked.head_cost.removesuffix("layers"))
    except ValueError:
        amount = -1.0
    if not 0 <= amount <= LARGEST:
        raise UnsupportedError(
            f"--head-cost {asked.head_cost!r}: give a number from 0 to {LARGEST:g}, as in 2.5 or 2.5layers"
        )
    if not asked.head_cost.endswith("layers"):
        return amount
    if asked.layers is None:
        raise UnsupportedError(f"--head-cost {asked.head_cost} counts layers; say with --layers how many the model has")
    seconds = costs.seconds(schedule.placement)
    return amount * sum(map(sum, (seconds[Kind.F], seconds[Kind.B]))) / asked.layers


def priced_head(asked: Prices, costs: Costs, schedule: Schedule, barriers: int) -> Costs:
    """Return the costs with the LM head on the last stage, or cut over all devices.

    Args:
        asked: what the user says of the head.
        costs: of the layers alone.
        schedule: whose placement has the stages.
        barriers: of the cut head, 1 or 2; 0 leaves it on the last stage.
    """
    seconds = head_seconds(asked, costs, schedule)
    if seconds is None:
        return costs
    if not barriers:
        return head_on_last_stage(costs, schedule.placement, seconds)
    devices = schedule.num_devices
    return replace(costs, vocabulary=VocabularyCosts.of_head(seconds, devices, barriers))


def load_and_simulate(name: str, asked: Question, prices: Costs) -> tuple[Loaded, Timeline, str]:
    """Return the schedule that a user named, with its head where the user wants it, its run, and the reason for a choice.

    Args:
        name: family, ``auto``, or path of a schedule file.
        asked: what else was typed.
        prices: of the layers alone.

    Raises:
        PipememError: it cannot be had; the message says why.
    """
    loaded = load_schedule(name, asked, costs=prices, offload=asked.offload, host_memory=asked.host_memory)
    loaded, prices, reason = _with_head(loaded, prices, asked)
    return loaded, simulate(loaded.schedule, prices), reason


def _with_head(loaded: Loaded, prices: Costs, asked: Question) -> tuple[Loaded, Costs, str]:
    schedule, reason = loaded.schedule, ""
    check_layers(asked.layers, schedule.placement.model_stages)
    algorithm = asked.vocab_parallel
    if algorithm == "auto":
        seconds = head_seconds(asked, prices, schedule)
        if seconds is None:
            raise UnsupportedError("--vocab-parallel auto weighs the head against the layers; give --head-cost")
        # As in a run, whose model has its placement before anybody can weigh the head.
        loaded = replace(loaded, knowledge=replace(loaded.knowledge, placement=schedule.placement))

        def resolved(request: Request) -> ChosenSchedule:
            if not request.barriers:
                return loaded.chosen
            return loaded.again(request, priced_head(asked, prices, schedule, request.barriers)).chosen

        ways = vocabulary_ways(loaded.request, resolved, lambda barriers, error: None)
        passes = {barriers: found.schedule for barriers, found in ways.items() if barriers}
        alone = replace(prices, vocabulary=None)
        choice = choose_vocabulary(schedule, alone, seconds, layers=asked.layers, with_passes=passes)
        algorithm, reason = choice.best.name, choice.reason
        if algorithm == REDISTRIBUTE:
            layout = choice.best.layers
            moved = head_on_last_stage(prices, schedule.placement, seconds, layout)
            return loaded, moved, f"{reason}; layers per stage: {', '.join(map(str, layout))}"
    if algorithm == OFF:
        return loaded, priced_head(asked, prices, schedule, 0), reason
    barriers = BARRIERS_OF_ALGORITHM[int(algorithm)]
    priced = priced_head(asked, prices, schedule, barriers)
    return loaded.again(replace(loaded.request, barriers=barriers), priced), priced, reason
