"""Define one step of one device, and its one-line text form.

The letters are those of ``torch.distributed.pipelining``: ``F`` forward, ``I`` input gradient, ``W`` weight
gradient, ``B`` full backward (``I`` then ``W``, fused). The zero-bubble papers write ``B`` for our ``I`` and ``BW``
for our ``B``. ``2F0`` is stage 2, forward, microbatch 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from megatron_pipemem.errors import ScheduleFormatError


class Kind(StrEnum):
    """Name what an action does.

    Messages carry the stage at their own end, as torch's do: ``2SEND_F0`` sends the output of stage 2, ``3RECV_F0``
    receives it as the input of stage 3, ``3SEND_I0`` (torch: ``3SEND_B0``) sends the gradient of stage 3's input,
    ``2RECV_I0`` receives it as the gradient of stage 2's output.

    ``R`` runs a forward again that kept nothing but its input, ``RS`` the cheap parts of one that dropped only what those
    make: normalisation, activation functions, attention between its matrices. The actions on memory start and await transfers:
    ``OFFLOAD`` starts to move a forward's activations to the host, after ``WAIT_OFFLOAD`` they are there and the device
    memory is free; ``RELOAD`` takes device memory and starts to move them back, after ``WAIT_RELOAD`` that has ended and the
    activations may be used.
    """

    F = "F"
    I = "I"  # noqa: E741 - the field's letter
    W = "W"
    B = "B"
    R = "R"
    RS = "RS"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_I = "SEND_I"
    RECV_I = "RECV_I"
    REDUCE_REPLICAS = "REDUCE_REPLICAS"  # of a stage's gradients, over the model's replicas; posting waits for nobody
    REDUCE_GRAD = "REDUCE_GRAD"
    OFFLOAD = "OFFLOAD"
    WAIT_OFFLOAD = "WAIT_OFFLOAD"
    RELOAD = "RELOAD"
    WAIT_RELOAD = "WAIT_RELOAD"

    # Vocabulary parallelism: shard k of head and embedding stands on device k, and so in the place of the stage stands
    # the number of the shard, which is the device's own.
    EMBED_F = "EMBED_F"  # look up this shard's rows of the tokens
    S = "S"  # logits of this shard, and their statistics
    LOSS = "LOSS"  # losses, training loss and its gradient g, on the device of the last stage only
    T = "T"  # gradients of the head's shard
    EMBED_B = "EMBED_B"  # gradient of the embedding's shard
    REDUCE_E = "REDUCE_E"  # embedding output, to the device of the first stage
    BCAST_X = "BCAST_X"  # input of the head, from the device of the last stage
    STATS = "STATS"  # maxima, sums and label logits, from all to all
    BCAST_G = "BCAST_G"  # gradient g of the loss per token, from the device of the last stage
    REDUCE_X = "REDUCE_X"  # gradient of the head's input, to the device of the last stage
    BCAST_E = "BCAST_E"  # gradient of the embedding output, from the device of the first stage

    # Enum hashes in Python code; schedules hash kinds by the hundred thousand.
    __hash__ = str.__hash__


ROUND_TRIP: tuple[Kind, ...] = (Kind.OFFLOAD, Kind.WAIT_OFFLOAD, Kind.RELOAD, Kind.WAIT_RELOAD)
"""What becomes of activations that leave their device, in this order."""
MEMORY = frozenset(ROUND_TRIP)
"""They take no time of the device but what they wait."""
VOCABULARY_COMPUTE = frozenset((Kind.EMBED_F, Kind.S, Kind.LOSS, Kind.T, Kind.EMBED_B))
COLLECTIVES = frozenset((Kind.REDUCE_E, Kind.BCAST_X, Kind.STATS, Kind.BCAST_G, Kind.REDUCE_X, Kind.BCAST_E))
"""Posted by every device, all in one order, on a channel of their own; posting takes no time, and waits for nobody but
``REDUCE_X`` for the statistics where it is formed of them (one barrier)."""
VOCABULARY = VOCABULARY_COMPUTE | COLLECTIVES
PLAIN = (Kind.F, Kind.I, Kind.W, Kind.B)
"""What every schedule is made of: forwards, and backwards whole or in two."""
RECOMPUTE = frozenset((Kind.R, Kind.RS))
COMPUTE = frozenset(PLAIN) | RECOMPUTE | VOCABULARY_COMPUTE
COMPLETING = frozenset((Kind.W, Kind.B, Kind.T, Kind.EMBED_B))
"""What adds to the gradients of parameters."""
ORDERED = COMPUTE | MEMORY | COLLECTIVES
"""What stands in the orders of a schedule; ``lower`` adds the rest."""
FORWARD = frozenset((Kind.F, Kind.EMBED_F, Kind.REDUCE_E, Kind.BCAST_X, Kind.S, Kind.STATS, Kind.LOSS))
"""What evaluation runs of a schedule."""
SENDS = frozenset((Kind.SEND_F, Kind.SEND_I))
RECEIVES = frozenset((Kind.RECV_F, Kind.RECV_I))
MESSAGES = SENDS | RECEIVES
WHOLE_STAGE = frozenset((Kind.REDUCE_REPLICAS, Kind.REDUCE_GRAD))
"""Not on any microbatch."""


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
        meant = names.get(letters) or _FORMER_NAMES.get(letters, letters)
        if meant not in _KINDS:
            kinds = ", ".join(kind.value for kind in Kind)
            raise ScheduleFormatError(
                f"{shown(text)} is not an action; write stage, kind, microbatch, as in 2F0 (kinds: {kinds})"
            )
        if max(len(stage), len(microbatch or "")) > MOST_DIGITS:
            raise ScheduleFormatError(
                f"{shown(text)}: stage and microbatch have {MOST_DIGITS} digits at most; renumber it"
            )
        kind = Kind(meant)
        if (microbatch is None) != (kind in WHOLE_STAGE):
            raise ScheduleFormatError(
                f"{shown(text)}: every kind but {Kind.REDUCE_REPLICAS} and {Kind.REDUCE_GRAD} needs a microbatch, and those "
                "take none"
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
_KINDS = frozenset(kind.value for kind in Kind)
_FORMER_NAMES: dict[str, str] = {"IF": Kind.EMBED_F, "IB": Kind.EMBED_B, "SUM_COPIES": Kind.REDUCE_REPLICAS}
"""Of files that earlier versions wrote."""
_PATTERN = re.compile(r"([0-9]+)([A-Z_]+)([0-9]+)?")
