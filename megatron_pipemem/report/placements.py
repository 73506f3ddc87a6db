"""Write what a search found as a table: the best schedule of every placement."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_pipemem.report.tables import FittingTable
from megatron_pipemem.search.result import Candidate

HEADINGS = ("placement", "chunks", "makespan", "bound", "peak", "found by")


def placements_table(candidates: Iterable[Candidate], seconds: str = HEADINGS[2]) -> FittingTable:
    """Return the best of every placement, for a terminal; ``seconds`` says what their makespan is of."""
    table = FittingTable((*HEADINGS[:2], seconds, *HEADINGS[3:]), text=("placement", "found by"))
    for each in candidates:
        table.add_row(*cells(each))
    return table


def cells(found: Candidate) -> tuple[str, ...]:
    """Return the row of one placement."""
    placement = found.schedule.placement
    makespan, bound, peak = f"{found.makespan:.6g}", f"{found.lower_bound:.6g}", f"{max(found.peaks):.4g}"
    slices = found.schedule.slices
    name = placement.name if slices == 1 else f"{placement.name}, {slices} slices"
    return name, str(placement.num_chunks), makespan, bound, peak, found.found_by
