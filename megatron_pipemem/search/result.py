"""Hold what a search found, and say how good it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import Shown, brief
from megatron_pipemem.schedule.schedule import Schedule


@dataclass(frozen=True)
class Candidate:
    """The best schedule of one placement."""

    schedule: Schedule  # within the cap
    makespan: float  # seconds; where the period was searched for, from step to step without a barrier
    peaks: tuple[float, ...]  # per device, the most it holds, in activation units, or in the unit of the costs' memory
    lower_bound: float  # no schedule of this placement within the cap is faster, in seconds
    found_by: str  # how the order came about

    def __repr__(self) -> str:
        return (
            f"<Candidate {self.schedule.placement.name} of {self.schedule.num_stages} stages: makespan {self.makespan:.6g}, "
            f"bound {self.lower_bound:.6g}, peak {max(self.peaks):.4g}, found by {brief(self.found_by)}>"
        )


@dataclass(frozen=True)
class SearchResult(Shown):
    """The fastest schedule found, the best of every other placement, and how far from optimal it can be at most.

    Args:
        candidates: best first, one per placement for which the time sufficed.
        lower_bound: no schedule within the cap is faster, of any placement tried, in seconds.
        seconds: how long the search took; 0 when it came from the cache.
        costs: what it searched for.
    """

    candidates: tuple[Candidate, ...]
    lower_bound: float
    seconds: float
    costs: Costs

    def __repr__(self) -> str:
        return (
            f"<SearchResult: makespan {self.makespan:.6g}, bound {self.lower_bound:.6g}, peak {max(self.peaks):.4g}, "
            f"{self.schedule.placement.name} of {self.schedule.num_stages} stages, best of {len(self.candidates)} "
            f"placements in {self.seconds:.3g} s>"
        )

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def schedule(self) -> Schedule:
        return self.best.schedule

    @property
    def makespan(self) -> float:
        """Seconds."""
        return self.best.makespan

    @property
    def peaks(self) -> tuple[float, ...]:
        return self.best.peaks

    @property
    def gap(self) -> float:
        """By how much of itself the makespan exceeds ``lower_bound`` at most; 0 proves it optimal among the placements
        tried.
        """
        excess = 1 - self.lower_bound / self.makespan
        return excess if excess > 1e-6 else 0.0

    @property
    def is_optimal(self) -> bool:
        return self.gap == 0


def fastest_first(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Sort candidates, of which there is at least one; of those that are equally fast, the one with fewest stages, and
    then fewest slices, which sends fewest messages, comes first.
    """
    found = list(candidates)
    least = min(candidate.makespan for candidate in found) * (1 + 1e-12)
    return tuple(
        sorted(found, key=lambda c: (max(c.makespan, least), c.schedule.num_stages, c.schedule.slices, -c.lower_bound))
    )
