"""Results of searches, and a cache of results in files, so that no identical search runs twice."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_pipemem.files import read_cached, write_cached
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import Shown, brief
from megatron_pipemem.schedule.schedule import Schedule


@dataclass(frozen=True)
class Candidate:
    """The best schedule that a search found for one placement and number of parts."""

    schedule: Schedule
    makespan: float  # seconds; the period without a barrier if the search was for a period
    peaks: tuple[float, ...]  # per device, its peak memory, in activation units or in the unit of the costs' memory
    lower_bound: float  # seconds that no schedule with this placement within the cap can beat
    found_by: str  # name of the start and of its improvement

    def __repr__(self) -> str:
        return (
            f"<Candidate {self.schedule.placement.name} of {self.schedule.num_stages} stages: makespan {self.makespan:.6g}, "
            f"bound {self.lower_bound:.6g}, peak {max(self.peaks):.4g}, found by {brief(self.found_by)}>"
        )


@dataclass(frozen=True)
class SearchResult(Shown):
    """The result of ``search_schedule``: the best schedule of every placement and number of parts, and a bound.

    Args:
        candidates: the best schedule of every placement and number of parts for which there was time, the fastest
            first.
        lower_bound: seconds that no schedule within the cap can beat, with any of the tried placements.
        seconds: duration of the search; 0 if the result comes from the cache.
        costs: the costs of the search.
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
        """The makespan of the fastest schedule in seconds; its period if the search was for a period."""
        return self.best.makespan

    @property
    def peaks(self) -> tuple[float, ...]:
        return self.best.peaks

    @property
    def gap(self) -> float:
        """The share of the makespan that a better schedule could save at most: 0.02 means 2 %.

        0 proves that no schedule with any of the tried placements is faster.
        """
        excess = 1 - self.lower_bound / self.makespan
        return excess if excess > 1e-6 else 0.0

    @property
    def is_optimal(self) -> bool:
        return self.gap == 0


def fastest_first(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Sort candidates by makespan, and equally fast ones by stages and parts, because fewer send fewer messages."""
    ordered = list(candidates)
    least = min(candidate.makespan for candidate in ordered) * (1 + 1e-12)
    return tuple(
        sorted(
            ordered,
            key=lambda c: (max(c.makespan, least), c.schedule.num_stages, c.schedule.units.parts, -c.lower_bound),
        )
    )


logger = logging.getLogger(__name__)


def default_folder() -> Path:
    """Return the folder of the cache: ``$XDG_CACHE_HOME/megatron_pipemem/search``, by default in ``~/.cache``."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise OSError("this user has no home folder; set XDG_CACHE_HOME to a folder for caches") from error
    return cache / "megatron_pipemem" / "search"


class ResultCache:
    """A cache of search results, with one JSON file per search in ``folder``, by default ``default_folder()``."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def get(self, question: object, read: Callable[[Any], SearchResult]) -> SearchResult | None:
        """Return the cached result of the search with the arguments in ``question``; ``None`` if there is none.

        ``read`` makes the result from the values that ``put`` got. If it raises an error, the file is wrong: a warning
        is logged, and the result is ``None``.
        """
        path: Path | str = "of this user"
        try:
            path = self._path(question)
            return read(read_cached(path))
        except FileNotFoundError:
            return None
        except Exception as error:  # other programs may have written anything there
            logger.warning("cannot use the cached search %s: %s; searching again", path, error)
            return None

    def put(self, question: object, values: object) -> None:
        """Store the JSON values of the result of a search with these arguments. If that fails, only log a warning."""
        try:
            write_cached(self._path(question), values)
        except (OSError, ValueError) as error:
            logger.warning("cannot keep the search: %s", error)

    def _path(self, question: object) -> Path:
        text = f"{_code_version()} {_in_full(question)!r}"
        return (self._folder or default_folder()) / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _in_full(value: object) -> object:
    """Return a value with dataclasses as tuples of all fields. The ``repr`` of a dataclass may leave fields out."""
    if is_dataclass(value):
        return (type(value).__name__, *(_in_full(getattr(value, field.name)) for field in fields(value)))
    if isinstance(value, Mapping):
        return tuple((key, _in_full(entry)) for key, entry in value.items())
    return tuple(map(_in_full, value)) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=1)
def _code_version() -> str:
    """Return a hash of the package's code, because other code may give other results."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def to_json(result: SearchResult) -> dict[str, Any]:
    """Return the values of a result that are stored: orders and bounds. All others follow from the orders."""
    return {
        "lower_bound": result.lower_bound,
        "candidates": [
            {
                "placement": candidate.schedule.placement.name,
                "orders": candidate.schedule.to_csv(),
                "makespan": candidate.makespan,
                "lower_bound": candidate.lower_bound,
                "found_by": candidate.found_by,
            }
            for candidate in result.candidates
        ],
    }
