"""Turn what was typed about prices into costs: of the layers, of the channel to the host, and of the LM head."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_pipemem.cli.checks import check_layers
from megatron_pipemem.cli.common import report_note
from megatron_pipemem.cli.options import Prices, Question, is_file
from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.features.vocabulary.choice import head_on_last_stage
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.display import LARGEST
from megatron_pipemem.schedule.options import AUTO, OFF
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import even_layers
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.schedule.schedule import Schedule


def price_layers(names: Sequence[str], asked: Question) -> Costs:
    """Return the costs that the user typed, with the channel to the host.

    Args:
        names: of the schedules.
        asked: what else was typed.

    Raises:
        CostsError: they are no costs.
        UnsupportedError: the ratio of an offload is given, and none of the schedules named sends anything to the host; or
            there are fewer layers than devices.
    """
    check_layers(asked.layers, asked.devices or 1)
    costs, ratio = with_channel(parse_costs(asked.costs, asked.p2p), asked.offload_ratio), asked.offload_ratio
    sends = asked.offload != OFF or any(is_file(name) or (name != AUTO and family(name).offloads) for name in names)
    if ratio is not None and not sends:
        raise UnsupportedError(
            "needs-option",
            f"--offload-ratio {ratio:g} says how fast activations go to the host, and nothing sends any; give --offload too",
        )
    return costs


def _is_price(number: float) -> bool:
    return 0 <= number < math.inf


def _check_price(option: str, price: float, what: str) -> None:
    if not _is_price(price):
        raise CostsError("bad-number", f"--{option} {price}: give {what} of at least 0")


def with_channel(costs: Costs, ratio: float | None) -> Costs:
    """Return the costs with the channel of an offload ratio; without one with their own, or that of ratio 1.

    Raises:
        CostsError: the ratio is no number of at least 0.
    """
    if ratio is None and costs.channel is not None:
        return costs
    if ratio is not None:
        _check_price("offload-ratio", ratio, "a number")
    known = costs.channel or Channel(0.0)
    try:
        channel = Channel.of_ratio(1.0 if ratio is None else ratio, costs, known.duplex, known.switches)
    except CostsError:
        if ratio is None:  # nobody asked for it
            return costs
        raise
    return replace(costs, channel=channel)


def parse_costs(text: str, p2p: float | None) -> Costs:
    """Return costs from ``F,I,W`` or a JSON file; ``p2p`` overrides the file's.

    Raises:
        CostsError: neither, or a price is not a finite number of at least 0.
    """
    if p2p is not None:
        _check_price("p2p", p2p, "seconds")
    if text.endswith(".json") or Path(text).is_file():
        costs = Costs.from_json(text)
        return costs if p2p is None else replace(costs, p2p=p2p)
    try:
        forward, backward_input, backward_weight = map(float, text.split(","))
    except ValueError:
        raise CostsError(
            "bad-syntax", f"--costs {text!r}: give three numbers F,I,W as in 1,1,1, or a JSON file"
        ) from None
    prices = (forward, backward_input, backward_weight)
    if not all(map(_is_price, prices)) or not any(prices):
        raise CostsError("bad-number", f"--costs {text!r}: give three numbers of at least 0, not all of them 0")
    return Costs(*prices, p2p=p2p or 0.0)


def note_uneven_cuts(costs: Costs, placements: Iterable[Placement]) -> None:
    """Report stages that do not hold as many layers each, although nothing asks for it."""
    parts = costs.part_prices
    if parts is None:
        return
    layers, told = len(parts.layers), []
    for stages in sorted({placement.model_stages for placement in placements}):
        counts = Counter(even_layers(layers, stages))
        if len(counts) > 1 and (parts.cut is None or len(parts.cut) != stages):
            held = " and ".join(f"{number} of {count}" for count, number in counts.items())
            told.append(f"among {stages} stages ({held})")
    if told:
        report_note(f"{layers} layers do not divide {', '.join(told)}; --costs FILE may say layers_per_stage")


def head_seconds(asked: Prices, costs: Costs, schedule: Schedule) -> float | None:
    """Return the seconds of the whole head; ``None`` if they are neither typed nor in the costs.

    Args:
        asked: what the user says of the head.
        costs: of the layers alone.
        schedule: whose placement has the stages.

    Raises:
        UnsupportedError: it is no number, or counts layers and nobody said how many there are.
    """
    if asked.head_cost is None:
        return None if costs.part_prices is None else costs.part_prices.head
    try:
        amount = float(asked.head_cost.removesuffix("layers"))
    except ValueError:
        amount = -1.0
    if not 0 <= amount <= LARGEST:
        raise UnsupportedError(
            "bad-number",
            f"--head-cost {asked.head_cost!r}: give a number from 0 to {LARGEST:g}, as in 2.5 or 2.5layers",
        )
    if not asked.head_cost.endswith("layers"):
        return amount
    layers = asked.layers if costs.part_prices is None else len(costs.part_prices.layers)
    if layers is None:
        raise UnsupportedError(
            "needs-option", f"--head-cost {asked.head_cost} counts layers; say with --layers how many the model has"
        )
    seconds = costs.without_ends().seconds(schedule.placement, schedule.slices)
    return amount * sum(map(sum, (seconds[Kind.F], seconds[Kind.B]))) / layers


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
    if barriers:
        return costs.with_cut_head(seconds, schedule.num_devices, barriers)
    if asked.head_cost is None:  # it is in the costs
        return costs
    return head_on_last_stage(costs.without_ends(), schedule.placement, seconds, slices=schedule.slices)
