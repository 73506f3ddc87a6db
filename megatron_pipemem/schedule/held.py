"""Count what a device holds after each of its actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from megatron_pipemem.schedule.action import Action, Kind, place
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.schedule import Schedule


def held_after(
    actions: Sequence[Action],
    changes: Mapping[Kind, Sequence[float]],
    weights: Sequence[float] | None = None,
    slices: int = 1,
) -> list[float]:
    """Return what a device holds after each of its actions, starting from nothing.

    Args:
        actions: in the order in which it runs them.
        changes: per kind, by how much an action on every stage, and of every slice there, changes what is held; kinds left
            out change nothing.
        weights: per microbatch (or slice of one), how many times as much it is (``unit_weights``); ``None``: once.
        slices: sequence slices of a microbatch.
    """
    if slices == 1:
        found = [changes[a.kind][a.stage] if a.kind in changes else 0 for a in actions]
    else:
        found = [changes[a.kind][place(a, slices)] if a.kind in changes else 0 for a in actions]
    if weights is not None:
        # What is on a whole stage is of no microbatch.
        of_actions = (1.0 if a.microbatch is None else weights[a.microbatch] for a in actions)
        found = [change * weight for change, weight in zip(found, of_actions, strict=True)]
    return list(accumulate(found))


def unit_weights(schedule: Schedule, costs: Costs) -> tuple[float, ...] | None:
    """Return how many times what ``Costs.memory_changes`` says every microbatch (or slice of one) holds; ``None`` where
    all hold it once.

    Raises:
        CostsError: there are not as many weights as microbatches.
    """
    weights = costs.microbatch
    if weights is None:
        return None
    weights.check(schedule.num_microbatches)
    return tuple(weight for weight in weights.tokens for _ in range(schedule.slices))
