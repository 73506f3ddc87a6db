"""Units: what the passes of a step are numbered by."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron_pipemem.errors import UnsupportedError


@dataclass(frozen=True)
class Units:
    """The units of a step: its microbatches, each whole or in parts, numbered microbatch by microbatch.

    A pass runs one unit. The parts of a microbatch run forward from the first to the last, because a part attends to
    the keys and values of the parts before it. They run backward from the last to the first.

        Units.equal(2, 3)     units 0 1 2 | 3 4 5        forwards 0 1 2 3 4 5        backwards 2 1 0 5 4 3
        Units((1, 4))         units 0 | 1 2 3            forwards 0 1 2 3            backwards 0 3 2 1

    Args:
        ends: per microbatch, the number of units of all microbatches up to and with this one. A ``range``, as in
            ``equal``, stands for microbatches with equally many parts.

    Raises:
        UnsupportedError: a microbatch has no units.
    """

    ends: Sequence[int]

    def __post_init__(self) -> None:
        if isinstance(self.ends, range):
            return
        ends = tuple(self.ends)
        if any(after <= before for before, after in pairwise((0, *ends))):
            raise UnsupportedError(
                "bad-number", f"units {ends} leave a microbatch empty; give numbers that rise from 1"
            )
        equal = range(ends[0], ends[0] * len(ends) + 1, ends[0]) if ends else range(1, 1)
        object.__setattr__(self, "ends", equal if tuple(equal) == ends else ends)

    @classmethod
    def equal(cls, num_microbatches: int, parts: int = 1) -> Units:
        """Return the units of microbatches that all have the same number of parts."""
        return cls(range(parts, num_microbatches * parts + 1, parts))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def num_microbatches(self) -> int:
        return len(self.ends)

    @cached_property
    def parts(self) -> int:
        """Return the number of parts of the microbatch that has most."""
        return self._size or max(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of parts of every microbatch."""
        if self._size:
            return (self._size,) * len(self.ends)
        return tuple(after - before for before, after in pairwise((0, *self.ends)))

    @property
    def counts(self) -> Mapping[int, int]:
        """Return, per number of parts, the number of microbatches with so many."""
        return {self._size: len(self.ends)} if self._size else Counter(self.sizes)

    @property
    def are_equal(self) -> bool:
        """Return whether all microbatches have equally many parts."""
        return self._size > 0

    @property
    def are_whole(self) -> bool:
        """Return whether every unit is a whole microbatch."""
        return self.parts == 1

    @property
    def lead(self) -> int:
        """Return the number of units whose forwards must precede that of the unit with the first backward."""
        return self.parts - 1

    @cached_property
    def _size(self) -> int:
        """The number of parts of every microbatch; 0 if microbatches differ."""
        return self.ends.step if isinstance(self.ends, range) else 0

    def times(self, count: int) -> Units:
        """Return the units of ``count`` consecutive steps with these units."""
        if self._size:
            return Units.equal(count * self.num_microbatches, self._size)
        return Units(tuple(step * len(self) + end for step in range(count) for end in self.ends))

    def microbatch(self, unit: int) -> int:
        """Return the microbatch of a unit."""
        return unit // self._size if self._size else bisect_right(self.ends, unit)

    def first(self, unit: int) -> int:
        """Return the first unit of the microbatch that has this unit."""
        if self._size:
            return unit - unit % self._size
        microbatch = self.microbatch(unit)
        return self.ends[microbatch - 1] if microbatch else 0

    def last(self, unit: int) -> int:
        """Return the last unit of the microbatch that has this unit. The loss comes with it."""
        return self.first(unit) + self._size - 1 if self._size else self.ends[self.microbatch(unit)] - 1

    def part(self, unit: int) -> int:
        """Return the place of a unit within its microbatch, from 0."""
        return unit % self._size if self._size else unit - self.first(unit)

    def of(self, microbatch: int) -> range:
        """Return the units of a microbatch."""
        return range(self.ends[microbatch - 1] if microbatch else 0, self.ends[microbatch])

    def place(self, stage: int, unit: int | None) -> int:
        """Return the index of an action's value in a list with ``parts`` values per stage.

        An action on a whole stage has no unit, and the index of the stage's first part.
        """
        return stage * self.parts + (0 if unit is None else self.part(unit))

    def before(self, unit: int) -> int | None:
        """Return the unit whose forward precedes that of this unit in its microbatch; ``None`` for a first part."""
        return unit - 1 if unit != self.first(unit) else None

    def after(self, unit: int) -> int | None:
        """Return the unit whose backward precedes that of this unit in its microbatch; ``None`` for a last part."""
        return unit + 1 if unit != self.last(unit) else None

    def backward(self, place: int) -> int:
        """Return the unit of a stage's backward at ``place``. The function is its own inverse."""
        if size := self._size:
            return place + size - 1 - 2 * (place % size)
        return self.first(place) + self.last(place) - place


def as_units(units: Units | int) -> Units:
    """Return units as they are, and a number of microbatches as that many whole ones."""
    return units if isinstance(units, Units) else Units.equal(units)


WHOLE = Units.equal(0)
"""The units of whole microbatches, for questions to which their number does not matter."""
