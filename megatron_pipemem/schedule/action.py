"""Define one step of one device, its text form ``2F0`` (stage 2, forward, microbatch 0), and the table of action kinds.

One row per kind gives its needs, resource, memory and looks.

The letters are those of ``torch.distributed.pipelining``: ``F`` forward, ``I`` input gradient, ``W`` weight gradient, ``B``
full backward (``I`` then ``W``, fused). The zero-bubble papers write ``B`` for our ``I`` and ``BW`` for our ``B``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Literal, NamedTuple

from megatron_pipemem.errors import ScheduleFormatError, UnsupportedError

SELECTIVE_SECONDS = 0.05
"""Of F that RS takes where nothing better is known: norms and GELU move about 24 bytes per element of the hidden state
(16-bit), F computes 24 times its width: about 150 / h at 300 TFLOP/s and 2 TB/s."""


class Resource(Enum):
    """The part of a device that an action occupies while it runs."""

    COMPUTE = auto()
    COPY = auto()
    """the channel to the host; the device goes on at once"""
    AWAIT_COPY = auto()
    """nothing, but the device waits for the copy that the action needs"""
    COLLECTIVE = auto()
    """the channel of the collectives, which every device posts in one order; posting takes no time"""
    SEND = auto()
    RECEIVE = auto()
    REDUCTION = auto()
    """the channel of gradient reductions, once per stage and step"""


class Need(NamedTuple):
    """Name an action that another one waits for, of the same stage and microbatch unless other fields move it.

    Attributes:
        kind: of the action that it waits for. A gradient of another stage or slice comes from its I or from its B.
        stage: -1 for the stage before, 1 for the stage after; nothing is needed beyond the ends of the model.
        slice: -1 for the slice before, 1 for the slice after; nothing is needed of other microbatches.
        place: where it is in place of the own stage: ``first`` or ``last`` stage of the model (or its device, if the kind
            stands for a device), or ``everywhere``: a collective that all devices have posted.
        only: the stage (or its device) whose actions have this need, ``first`` or ``last``; by default those of all.
        slices: of several sequence slices, ``last`` for the last one, ``until`` for all up to the own.
        barriers: it holds in schedules with so many barriers of vocabulary parallelism; by default in all.
    """

    kind: str
    stage: int = 0
    slice: int = 0
    place: Literal["", "first", "last", "everywhere"] = ""
    only: Literal["", "first", "last"] = ""
    slices: Literal["", "last", "until"] = ""
    barriers: tuple[int, ...] = ()


@dataclass(frozen=True)
class KindSpec:
    """Describe a kind of action.

    Example: a pass that adds noise to the activations that a forward kept, before its backward.

        NOISE = register_kind(KindSpec("NOISE", needs=(Need("F"),), prepares=("I", "B"), shares={"F": 0.1}))

    Its actions stand in the orders of a schedule (``2NOISE0``). The validator, the simulator, pictures and files treat them
    like all others. ``Costs(further={NOISE: 0.2}, memory={NOISE: 64, ...})`` prices them where the row does not. The executor
    takes the handler from a ``StepFeature``. A row may name kinds that are registered later.

    Args:
        name: capital letters and underscores.
        says: a few words for legends; by default the name.
        colour: in pictures: red, green and blue, from 0 to 255.
        resource: the part of the device that the action occupies.
        needs: the actions that it waits for.
        prepares: the kinds that wait for it on the same stage and microbatch. On a stage that has it, each of their actions
            must have one.
        followed_by: the kind that must come after it on the same stage and microbatch.
        shares: seconds where ``Costs`` has none, as shares of those of other kinds. With neither, its actions take no time.
        units: change of the device's memory, in activation units of its stage, where ``Costs`` has no memory.
        in_evaluation: whether evaluation runs it.
        completes: whether it adds to the gradients of parameters.
        runs_layers: whether it runs the layers of a stage: its seconds then go by the time of a microbatch, not by its tokens.
        of_device: whether it stands for its device: in place of the stage stands the number of the device.
        former_name: in files that earlier versions wrote.
    """

    name: str
    says: str = ""
    colour: tuple[int, int, int] = (128, 128, 128)
    resource: Resource = Resource.COMPUTE
    needs: tuple[Need, ...] = ()
    prepares: tuple[str, ...] = ()
    followed_by: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)
    units: int = 0
    in_evaluation: bool = False
    completes: bool = False
    runs_layers: bool = False
    of_device: bool = False
    former_name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "says", self.says or self.name)


class _Kinds(type):
    """Lets the class of all kinds be iterated over, in the order of their rows, and has every kind by its name."""

    def __iter__(cls) -> Iterator[Kind]:
        return iter(_KINDS.values())

    def __getattr__(cls, name: str) -> Kind:
        raise AttributeError(f"no kind of action is called {name}")  # those that are there are found before


class Kind(str, metaclass=_Kinds):
    """Name what an action does. ``Kind.F`` is the only object of its name, so ``is`` compares kinds.

    Messages carry the stage at their own end, as torch's do: ``2SEND_F0`` sends the output of stage 2, ``3RECV_F0``
    receives it as the input of stage 3, ``3SEND_I0`` (torch: ``3SEND_B0``) sends the gradient of stage 3's input,
    ``2RECV_I0`` receives it as the gradient of stage 2's output.

    ``R`` runs a forward again that kept nothing but its input, ``RS`` the cheap parts of one that dropped only what those
    make: normalisation, activation functions, attention between its matrices. The actions on memory start and await transfers:
    ``OFFLOAD`` starts to move a forward's activations to the host, after ``WAIT_OFFLOAD`` they are there and the device
    memory is free; ``RELOAD`` takes device memory and starts to move them back, after ``WAIT_RELOAD`` that has ended and the
    activations may be used.

    Attributes:
        spec: its row in the table.
        value: its name, as a plain string.
    """

    __slots__ = ("spec", "value")
    spec: KindSpec
    value: str

    def __new__(cls, name: str) -> Kind:
        try:
            return _KINDS[name]
        except (KeyError, TypeError):
            raise ValueError(f"{name!r} is no kind of action") from None

    def __repr__(self) -> str:
        return f"Kind.{self.value}"

    def __reduce__(self) -> tuple[type[Kind], tuple[str]]:
        return Kind, (self.value,)


_KINDS: dict[str, Kind] = {}
_QUERIES: list[tuple[Callable[[KindSpec], bool], dict[Kind, None]]] = []
_NAME = re.compile(r"[A-Z]+(_[A-Z]+)*")


def register_kind(spec: KindSpec) -> Kind:
    """Add a row to the table.

    Returns:
        The kind; the same one if this very row is in the table already.

    Raises:
        UnsupportedError: the name has other signs than capital letters and underscores, or belongs to another row.
    """
    known = _KINDS.get(spec.name)
    if known is not None and known.spec == spec:
        return known
    if known is not None or not _NAME.fullmatch(spec.name):
        fault = "is taken by another kind" if known else "is no name of a kind: capital letters, joined by underscores"
        raise UnsupportedError("kind-name", f"{spec.name!r} {fault}; pick another name")
    kind = str.__new__(Kind, spec.name)
    kind.spec, kind.value = spec, spec.name
    _KINDS[spec.name] = kind
    setattr(Kind, spec.name, kind)
    for wanted, found in _QUERIES:
        if wanted(spec):
            found[kind] = None
    return kind


def kinds_where(wanted: Callable[[KindSpec], bool]) -> AbstractSet[Kind]:
    """Return the kinds whose rows are wanted, in the order of the table. Kinds that are registered later join the set."""
    found = {kind: None for kind in Kind if wanted(kind.spec)}
    _QUERIES.append((wanted, found))
    return found.keys()


def kind_called(name: str) -> Kind | None:
    """Return the kind of a name, or of a name that earlier versions wrote; ``None`` if there is none."""
    return _KINDS.get(name) or next((kind for kind in Kind if kind.spec.former_name == name != ""), None)


# Colours are far apart in hue and in lightness, also under the three kinds of colour blindness (tests/report/test_timeline.py).
# The order of the rows is that of legends.
_FORWARD = (
    Need("F", stage=-1),
    Need("F", slice=-1),
    Need("REDUCE_E", place="everywhere", only="first", barriers=(1, 2)),
)
# With two barriers T has waited for the loss already.
_BACKWARD = (
    Need("F"),
    Need("I", stage=1),
    Need("I", slice=1),
    Need("REDUCE_X", place="everywhere", only="last", barriers=(1, 2)),
    Need("LOSS", place="last", only="last", slices="last", barriers=(1,)),
)
_ROWS = (
    KindSpec("F", "forward", (38, 98, 168), needs=_FORWARD, units=1, runs_layers=True, in_evaluation=True),
    KindSpec("I", "input gradient", (244, 162, 52), needs=_BACKWARD, runs_layers=True),
    KindSpec("W", "weight gradient", (58, 163, 143), needs=(Need("I"),), units=-1, runs_layers=True, completes=True),
    KindSpec("B", "full backward", (196, 60, 78), needs=_BACKWARD, shares={"I": 1, "W": 1}, units=-1, runs_layers=True,
             completes=True),
    KindSpec("R", "recomputed forward", (16, 20, 24), needs=(Need("F"),), prepares=("I", "B"), shares={"F": 1},
             runs_layers=True),
    KindSpec("RS", "selective recomputation", (180, 150, 255), needs=(Need("F"),), prepares=("I", "B"),
             shares={"F": SELECTIVE_SECONDS}, runs_layers=True),
    KindSpec("SEND_F", resource=Resource.SEND),
    KindSpec("RECV_F", resource=Resource.RECEIVE),
    KindSpec("SEND_I", resource=Resource.SEND),
    KindSpec("RECV_I", resource=Resource.RECEIVE),
    # Over the replicas of a stage. Posting waits for no other device.
    KindSpec("REDUCE_REPLICAS", resource=Resource.REDUCTION, former_name="SUM_COPIES"),
    KindSpec("REDUCE_GRAD", resource=Resource.REDUCTION),
    KindSpec("OFFLOAD", "copy to the host", (106, 76, 147), Resource.COPY, (Need("F"),), followed_by="WAIT_OFFLOAD"),
    KindSpec("WAIT_OFFLOAD", resource=Resource.AWAIT_COPY, needs=(Need("OFFLOAD"),), followed_by="RELOAD"),
    KindSpec("RELOAD", "copy back", (138, 201, 38), Resource.COPY, (Need("WAIT_OFFLOAD"),), followed_by="WAIT_RELOAD"),
    KindSpec("WAIT_RELOAD", resource=Resource.AWAIT_COPY, needs=(Need("RELOAD"),), prepares=("RS", "I", "B")),
    # Vocabulary parallelism: shard k of head and embedding stands on device k.
    KindSpec("EMBED_F", "embedding forward", (184, 225, 173), in_evaluation=True, of_device=True, former_name="IF"),
    KindSpec("S", "head scores", (166, 41, 245), needs=(Need("BCAST_X", place="everywhere"),), in_evaluation=True,
             of_device=True),
    # On the device of the last stage only. Sequence slices of one microbatch have one loss, which stands with the last of them.
    KindSpec("LOSS", "loss", (100, 48, 77), needs=(Need("STATS", place="everywhere", slices="until"),), in_evaluation=True,
             of_device=True),
    KindSpec("T", "head gradients", (244, 191, 230), needs=(Need("BCAST_G", place="everywhere"),), completes=True,
             of_device=True),
    KindSpec("EMBED_B", "embedding gradient", (37, 15, 146), needs=(Need("BCAST_E", place="everywhere"),), completes=True,
             of_device=True, former_name="IB"),
    # The output of the embedding, to the device of the first stage.
    KindSpec("REDUCE_E", resource=Resource.COLLECTIVE, needs=(Need("EMBED_F"),), in_evaluation=True, of_device=True),
    # The input of the head, from the device of the last stage.
    KindSpec("BCAST_X", resource=Resource.COLLECTIVE, needs=(Need("F", place="last", only="last"),), in_evaluation=True,
             of_device=True),
    # Maxima, sums and label logits, from all to all.
    KindSpec("STATS", resource=Resource.COLLECTIVE, needs=(Need("S"),), in_evaluation=True, of_device=True),
    # The gradient of the loss per token, from the device of the last stage.
    KindSpec("BCAST_G", resource=Resource.COLLECTIVE, needs=(Need("LOSS", place="last", only="last", slices="last"),),
             of_device=True),
    # The gradient of the head's input, to the device of the last stage. With one barrier, what it sums is formed from the
    # statistics where it is posted, so there the device waits for them.
    KindSpec("REDUCE_X", resource=Resource.COLLECTIVE,
             needs=(Need("T", barriers=(2,)), Need("STATS", place="everywhere", barriers=(1,))), of_device=True),
    # The gradient of the embedding's output, from the device of the first stage.
    KindSpec("BCAST_E", resource=Resource.COLLECTIVE, needs=(Need("I", place="first", only="first"),), of_device=True),
)  # fmt: skip
for _row in _ROWS:
    register_kind(_row)

PLAIN: tuple[Kind, ...] = (Kind.F, Kind.I, Kind.W, Kind.B)
"""Forwards, and backwards whole or in two: the kinds that every schedule has."""
ROUND_TRIP: tuple[Kind, ...] = (Kind.OFFLOAD, Kind.WAIT_OFFLOAD, Kind.RELOAD, Kind.WAIT_RELOAD)
"""The transfers of activations that leave their device, in this order."""
RECOMPUTE = kinds_where(lambda spec: spec.name in ("R", "RS"))
COMPUTE = kinds_where(lambda spec: spec.resource is Resource.COMPUTE)
COPIES = kinds_where(lambda spec: spec.resource is Resource.COPY)
MEMORY = kinds_where(lambda spec: spec.resource in (Resource.COPY, Resource.AWAIT_COPY))
"""The device spends no time on them except waiting."""
COLLECTIVES = kinds_where(lambda spec: spec.resource is Resource.COLLECTIVE)
"""Posting waits for no other device, but ``REDUCE_X`` for the statistics where it is formed of them (one barrier)."""
VOCABULARY = kinds_where(lambda spec: spec.of_device)
VOCABULARY_COMPUTE = kinds_where(lambda spec: spec.of_device and spec.resource is Resource.COMPUTE)
COMPLETING = kinds_where(lambda spec: spec.completes)
FORWARD = kinds_where(lambda spec: spec.in_evaluation)
"""Kinds that evaluation runs."""
SENDS = kinds_where(lambda spec: spec.resource is Resource.SEND)
RECEIVES = kinds_where(lambda spec: spec.resource is Resource.RECEIVE)
MESSAGES = kinds_where(lambda spec: spec.resource in (Resource.SEND, Resource.RECEIVE))
WHOLE_STAGE = kinds_where(lambda spec: spec.resource is Resource.REDUCTION)
"""Not on any microbatch."""
ORDERED = kinds_where(
    lambda spec: spec.resource in (Resource.COMPUTE, Resource.COPY, Resource.AWAIT_COPY, Resource.COLLECTIVE)
)
"""Kinds that stand in the orders of a schedule; ``lower`` adds the others."""
FURTHER = kinds_where(lambda spec: spec.resource is Resource.COMPUTE and not spec.of_device and spec not in _ROWS)
"""Kinds that ``Costs.further`` prices."""
PREPARING = kinds_where(lambda spec: bool(spec.prepares) and spec.resource is Resource.COMPUTE)
"""Kinds for which other actions of the stage and microbatch wait, on every stage that has them."""


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


EVERYWHERE = -1
"""In place of a device: a collective that all devices have posted."""
MOST_DIGITS = 9
"""Of a number in a schedule's text."""
_MOST_SHOWN = 40
_PATTERN = re.compile(r"([0-9]+)([A-Z_]+)([0-9]+)?")
