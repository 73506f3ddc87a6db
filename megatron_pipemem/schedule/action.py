"""Define one step of one device, and its one-line text form: ``2F0`` is stage 2, forward, microbatch 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from megatron_pipemem.errors import ScheduleFormatError
from megatron_pipemem.schedule.kinds import COLLECTIVES as COLLECTIVES
from megatron_pipemem.schedule.kinds import COMPLETING as COMPLETING
from megatron_pipemem.schedule.kinds import COMPUTE as COMPUTE
from megatron_pipemem.schedule.kinds import FORWARD as FORWARD
from megatron_pipemem.schedule.kinds import MEMORY as MEMORY
from megatron_pipemem.schedule.kinds import MESSAGES as MESSAGES
from megatron_pipemem.schedule.kinds import ORDERED as ORDERED
from megatron_pipemem.schedule.kinds import PLAIN as PLAIN
from megatron_pipemem.schedule.kinds import RECEIVES as RECEIVES
from megatron_pipemem.schedule.kinds import RECOMPUTE as RECOMPUTE
from megatron_pipemem.schedule.kinds import ROUND_TRIP as ROUND_TRIP
from megatron_pipemem.schedule.kinds import SENDS as SENDS
from megatron_pipemem.schedule.kinds import VOCABULARY as VOCABULARY
from megatron_pipemem.schedule.kinds import VOCABULARY_COMPUTE as VOCABULARY_COMPUTE
from megatron_pipemem.schedule.kinds import WHOLE_STAGE as WHOLE_STAGE
from megatron_pipemem.schedule.kinds import Kind as Kind
from megatron_pipemem.schedule.kinds import kind_called


class Action(NamedTuple):
    """Immutable and hashable. ``microbatch`` is ``None`` for actions on a whole stage (``2REDUCE_GRAD``).

    In a schedule that cuts microbatches into ``n`` sequence slices, ``microbatch`` counts the slices of all of them:
    slice ``j`` of microbatch ``k`` is ``k * n + j``.
    """

    kind: Kind
    stage: int
    # An int wherever somebody counts with it: only lowered programs have actions without, and those are told by their kind.
    microbatch: int = None  # type: ignore[assignment]

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{self.kind.value}{microbatch}"

    @classmethod
    def parse(cls, text: str, names: Mapping[str, Kind] = MappingProxyType({})) -> Action:
        """Read the text form.

        Args:
            text: stage, kind, microbatch.
            names: kinds that have another name in this text.

        Raises:
            ScheduleFormatError: when ``text`` is not an action.
        """
        text = text.strip()
        match = _PATTERN.fullmatch(text)
        stage, letters, microbatch = match.groups() if match else ("", "", None)
        kind = names.get(letters) or kind_called(letters)
        if kind is None:
            kinds = ", ".join(kind.value for kind in Kind)
            raise ScheduleFormatError(
                "not-an-action",
                f"{shown(text)} is not an action; write stage, kind, microbatch, as in 2F0 (kinds: {kinds})",
            )
        if max(len(stage), len(microbatch or "")) > MOST_DIGITS:
            raise ScheduleFormatError(
                "not-an-action", f"{shown(text)}: stage and microbatch have {MOST_DIGITS} digits at most; renumber it"
            )
        if (microbatch is None) != (kind in WHOLE_STAGE):
            raise ScheduleFormatError(
                "not-an-action",
                f"{shown(text)}: every kind but {' and '.join(WHOLE_STAGE)} needs a microbatch, and those take none",
            )
        return cls(kind, int(stage)) if microbatch is None else cls(kind, int(stage), int(microbatch))


def place(action: Action, slices: int) -> int:
    """Return where the stage and slice of an action stand in what has one value per stage and slice, stage by stage.

    What is on a whole stage stands where the stage's first slice does; of vocabulary parallelism, devices stand for stages.
    """
    return action.stage * slices + (action.microbatch or 0) % slices


def mirrored(unit: int, slices: int) -> int:
    """Return the place of a slice among the backwards, which run from the last slice of a microbatch to the first; of such a
    place, its slice.
    """
    return unit + slices - 1 - 2 * (unit % slices)


def last_slice(unit: int, slices: int) -> int:
    """Return the last slice of the microbatch that a slice is of."""
    return unit - unit % slices + slices - 1


def shown(text: str) -> str:
    """Return text from a file, in quotes, for a message: no more than its start."""
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


MOST_DIGITS = 9
"""Of a number in a schedule's text."""
_MOST_SHOWN = 40
_PATTERN = re.compile(r"([0-9]+)([A-Z_]+)([0-9]+)?")
