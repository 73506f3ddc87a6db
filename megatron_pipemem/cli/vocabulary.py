"""Place the LM head for the commands: on the last stage, or cut over all devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

import typer

from megatron_pipemem.cli.checks import check_layers
from megatron_pipemem.cli.loading import Loaded
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.magnitudes import LARGEST
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.vocabulary import BARRIERS_OF_ALGORITHM
from megatron_pipemem.schedule.core.vocabulary_costs import VocabularyCosts
from megatron_pipemem.schedule.features.vocabulary.baselines import head_on_last_stage
from megatron_pipemem.schedule.features.vocabulary.choice import REDISTRIBUTE, choose_vocabulary
from megatron_pipemem.schedule.options import OFF
from megatron_pipemem.schedule.request import Request
from megatron_pipemem.schedule.resolve import ChosenSchedule, vocabulary_ways

Switch = Literal["off", "1", "2", "auto"]
VocabParallel = Annotated[
    Switch,
    typer.Option(
        "--vocab-parallel",
        help="Cut the LM head over all devices: by Algorithm 1 (two barriers) or 2 (one barrier) of arXiv 2411.05288, or "
        "whatever is best for --head-cost.",
    ),
]
HeadCost = Annotated[
    str | None,
    typer.Option(
        "--head-cost",
        metavar="X|Xlayers",
        help="Forward and backward of the whole LM head: seconds as in --costs, or layers (with --layers). "
        "Default: none with `off`, else one device's share of the layers.",
    ),
]
Layers = Annotated[
    int | None, typer.Option("--layers", help="Layers of the model: prices --head-cost, and lets `auto` move them.")
]


class Head(NamedTuple):
    """Args:
    switch: what was asked for.
    cost: as typed.
    layers: of the model.
    """

    switch: Switch = "off"
    cost: str | None = None
    layers: int | None = None

    def seconds(self, costs: Costs, schedule: Schedule) -> float | None:
        """Return the seconds of the whole head.

        Raises:
            UnsupportedError: it is no number, or counts layers and nobody said how many there are.
        """
        if self.cost is None:
            return None
        number, in_layers = self.cost.removesuffix("layers"), self.cost.endswith("layers")
        try:
            amount = float(number)
        except ValueError:
            amount = -1.0
        if not 0 <= amount <= LARGEST:
            raise UnsupportedError(
                f"--head-cost {self.cost!r}: give a number from 0 to {LARGEST:g}, as in 2.5 or 2.5layers"
            )
        if not in_layers:
            return amount
        if self.layers is None:
            raise UnsupportedError(f"--head-cost {self.cost} counts layers; say with --layers how many the model has")
        seconds = costs.seconds(schedule.placement)
        return amount * sum(map(sum, (seconds[Kind.F], seconds[Kind.B]))) / self.layers


def priced_head(head: Head, costs: Costs, schedule: Schedule, barriers: int) -> Costs:
    """Return the costs with the LM head on the last stage, or cut over all devices.

    Args:
        head: what the user says of the head.
        costs: of the layers alone.
        schedule: whose placement has the stages.
        barriers: of the cut head, 1 or 2; 0 leaves it on the last stage.
    """
    seconds = head.seconds(costs, schedule)
    if seconds is None:
        return costs
    if not barriers:
        return head_on_last_stage(costs, schedule.placement, seconds)
    devices = schedule.num_devices
    return replace(costs, vocabulary=VocabularyCosts.of_head(seconds, devices, barriers))


def apply_head(loaded: Loaded, prices: Costs, head: Head) -> tuple[Loaded, Costs, str]:
    """Return the schedule with its head where the user wants it, its costs, and the reason for a choice.

    Args:
        loaded: the schedule, and how it was asked for.
        prices: costs of the layers alone, in seconds.
        head: what the user says of the head.

    Raises:
        PipememError: the schedule takes no passes, or not within the cap.
    """
    schedule, reason = loaded.schedule, ""
    check_layers(head.layers, schedule.placement.model_stages)
    algorithm = head.switch
    if algorithm == "auto":
        seconds = head.seconds(prices, schedule)
        if seconds is None:
            raise UnsupportedError("--vocab-parallel auto weighs the head against the layers; give --head-cost")
        # As in a run, whose model has its placement before anybody can weigh the head.
        loaded = replace(loaded, knowledge=replace(loaded.knowledge, placement=schedule.placement))

        def resolved(request: Request) -> ChosenSchedule:
            if not request.barriers:
                return loaded.chosen
            return loaded.again(request, priced_head(head, prices, schedule, request.barriers)).chosen

        ways = vocabulary_ways(loaded.request, resolved, lambda barriers, error: None)
        passes = {barriers: found.schedule for barriers, found in ways.items() if barriers}
        alone = replace(prices, vocabulary=None)
        choice = choose_vocabulary(schedule, alone, seconds, layers=head.layers, with_passes=passes)
        algorithm, reason = choice.best.name, choice.reason
        if algorithm == REDISTRIBUTE:
            layout = choice.best.layers
            moved = head_on_last_stage(prices, schedule.placement, seconds, layout)
            return loaded, moved, f"{reason}; layers per stage: {', '.join(map(str, layout))}"
    if algorithm == OFF:
        return loaded, priced_head(head, prices, schedule, 0), reason
    barriers = BARRIERS_OF_ALGORITHM[int(algorithm)]
    priced = priced_head(head, prices, schedule, barriers)
    return loaded.again(replace(loaded.request, barriers=barriers), priced), priced, reason
