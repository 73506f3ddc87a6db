"""Search for the fastest order over several numbers of slices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from megatron_pipemem.errors import PipememError
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.search.result import SearchResult, fastest_first
from megatron_pipemem.schedule.search.search import search_schedule


def search_slice_counts(counts: Sequence[int], *, seconds: float, costs: Costs, **question: Any) -> SearchResult:
    """Return the best of searches with each number of slices, all placements of which stand in one result.

    Args:
        counts: numbers of slices.
        seconds: of all searches together.
        costs: for as many of the counts as they fit: prices of every slice fit one.
        question: what else ``search_schedule`` takes.

    Raises:
        PipememError: no search finds anything; the reason is that of the first.
    """
    started, found, refusal = time.perf_counter(), [], None
    for number, slices in enumerate(counts):
        left = max(0.0, seconds - (time.perf_counter() - started))
        try:
            found.append(search_schedule(slices=slices, seconds=left / (len(counts) - number), costs=costs, **question))
        except PipememError as error:
            refusal = refusal or error
    if not found:
        assert refusal is not None, "there is at least one number of slices"
        raise refusal
    candidates = fastest_first(each for result in found for each in result.candidates)
    bound, spent = min(each.lower_bound for each in found), sum(each.seconds for each in found)
    return SearchResult(candidates, bound, spent, costs)
