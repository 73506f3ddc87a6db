"""Keep the time of a search: a step of it begins only if it can be expected to end in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from megatron_pipemem.schedule.display import tell


class SearchStep(Enum):
    """Name what takes time in proportion to the passes of a placement, with the seconds per pass until one was timed."""

    FIRST = 4e-6  # run an order that is known; as every search does it once, it tells how fast the machine is
    FAMILY = 10e-6  # build what one family has to offer
    JUSTIFY = 20e-6  # justify a timetable
    TRY = 25e-6  # propose a periodic order and justify it
    DESCRIBE = 15e-6  # make a schedule of the best order and simulate it


class Clock:
    """Started when it is made.

    Args:
        seconds: of the search.
    """

    def __init__(self, seconds: float) -> None:
        self._started, self.seconds = time.perf_counter(), seconds
        self.state: Callable[[], str] = lambda: "searching"
        """What is told after every step."""
        self._paces: dict[SearchStep, float] = {}
        self.refused_any = False
        """Whether a step did not begin because it would have ended too late."""

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    def allows(self, step: SearchStep, passes: int, result: int, share: float = 1.0) -> bool:
        """Return whether the step can be expected to end in time, and its result to be described then. ``passes`` are those
        that the step works on, ``result`` those of the schedule that it leads to; ``share``: of the time that it may end
        in.
        """
        expected = self._pace(step) * passes + self._pace(SearchStep.DESCRIBE) * result
        if self.elapsed + expected > self.seconds * share:
            self.refused_any = True
            return False
        return True

    @contextmanager
    def step(self, step: SearchStep, passes: int) -> Iterator[None]:
        """Time a step: the next one of its kind is expected to go on at its pace."""
        before = self.elapsed
        yield
        self._paces[step] = (self.elapsed - before) / passes
        tell(lambda: f"{self.state()}; {max(0.0, self.seconds - self.elapsed):.0f} s left at most")

    def _pace(self, step: SearchStep) -> float:
        """Return the pace of the last such step; of the first one the usual, or slower where the first start was."""
        usual = SearchStep.FIRST.value
        slowness = max(1.0, self._paces.get(SearchStep.FIRST, usual) / usual)
        return self._paces.get(step, step.value * slowness)
