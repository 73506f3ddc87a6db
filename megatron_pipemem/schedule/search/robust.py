"""Say how an order fares when its costs were wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from megatron_pipemem.schedule.search.improve import Timetable, as_soon_as_possible
from megatron_pipemem.schedule.search.problem import Problem

_SAMPLES = 4


def with_errors(problem: Problem, error: float, rng: Random) -> Problem:
    """Return the problem with every cost of every stage changed by up to ``error``, independently.

    Args:
        problem: in ticks.
        error: largest relative change.
        rng: source of the random changes.
    """
    return replace(
        problem, ticks=tuple(max(1, round(ticks * (1 + rng.uniform(-error, error)))) for ticks in problem.ticks)
    )


def most_robust(problem: Problem, tables: Sequence[Timetable], seed: int, error: float = 0.2) -> int:
    """Return the index of the timetable whose orders are fastest on average over costs that are off by up to ``error``.

    Args:
        problem: in ticks.
        tables: to choose from.
        seed: of the random costs.
        error: largest relative error of a cost.
    """
    if len(tables) == 1:
        return 0
    rng = Random(seed)
    problems = [with_errors(problem, error, rng) for _ in range(_SAMPLES)]
    return min(
        range(len(tables)),
        key=lambda index: sum(as_soon_as_possible(other, tables[index].orders).makespan for other in problems),
    )
