"""Actions of a schedule: their kinds, one table row per kind, and their text form.

``2F0`` is stage 2, forward, microbatch 0. The letters are those of ``torch.distributed.pipelining``: ``F`` forward,
``I`` input gradient, ``W`` weight gradient, ``B`` full backward (``I`` then ``W``, fused). The zero-bubble papers
write ``B`` for our ``I`` and ``BW`` for our ``B``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_pipemem.errors import ScheduleFormatError, UnsupportedError
from megatron_pipemem.schedule.display import shortened

SELECTIVE_SECONDS = 0.05
"""Seconds of RS as a share of F, if nothing better is known. Norms and GELU move about 24 bytes per element of the
hidden state (16-bit). F computes 24 times its width, so the share is about 150 / h at 300 TFLOP/s and 2 TB/s."""


class Resource(Enum):
    """The part of a device that an action occupies while it runs."""

    COMPUTE = auto()
    COPY = auto()
    """the channel between device and host; the device goes on at once"""
    AWAIT_COPY = auto()
    """nothing: the device waits until the copy has ended"""
    COLLECTIVE = auto()
    """the channel of the collectives; all devices post collectives in the same order, and posting takes no time"""
    SEND = auto()
    RECEIVE = auto()
    REDUCTION = auto()
    """the channel of gradient reductions, once per stage and step"""


class Need(NamedTuple):
    """An action that another action waits for.

    The needed action has the stage and microbatch of the waiting action, unless a field below changes them.

    Attributes:
        kind: the kind of the needed action. If I of another stage or unit is needed, a B there serves too.
        stage: -1 for the previous stage, 1 for the next one. A first or last stage without such a neighbour needs
            nothing.
        unit: a unit of the same microbatch: the one ``before`` or ``after`` the action's own, of which a first or last
            part needs none, the ``last`` one, or all ``until`` the action's own.
        place: ``first`` or ``last`` if the needed action is on that stage of the model (or on its device, for kinds
            with ``KindSpec.of_device``), ``everywhere`` for a collective that all devices must have posted.
        only: ``first`` or ``last`` if only actions of that stage (or its device) have this need.
        barriers: the need exists only in schedules with these numbers of vocabulary barriers; by default in all.
    """

    kind: str
    stage: int = 0
    unit: Literal["", "before", "after", "last", "until"] = ""
    place: Literal["", "first", "last", "everywhere"] = ""
    only: Literal["", "first", "last"] = ""
    barriers: tuple[int, ...] = ()


@dataclass(frozen=True)
class KindSpec:
    """A row of the table of action kinds.

    Example: a pass that adds noise to the activations that a forward kept, before its backward.

        NOISE = register_kind(KindSpec("NOISE", needs=(Need("F"),), prepares=("I", "B"), shares={"F": 0.1}))

    Orders of a schedule then contain ``2NOISE0``. The validator, the simulator, pictures and files treat these
    actions like all others. ``Costs(further={NOISE: 0.2}, memory={NOISE: 64, ...})`` overrides the price in the row.
    The executor takes the handler from a ``StepFeature``. A row may name kinds that are registered later.

    Args:
        name: capital letters, joined by underscores.
        says: a few words for legends; the name by default.
        colour: the colour in pictures: red, green and blue, from 0 to 255.
        resource: the part of the device that the action occupies.
        needs: the actions that an action of this kind waits for.
        prepares: the kinds whose actions wait for the action of this kind on the same stage and microbatch. If this
            kind computes and a stage has any action of it, it must have one for each action of those kinds.
        followed_by: the kind that must come later on the same stage and microbatch.
        shares: seconds as shares of the seconds of other kinds, used if ``Costs`` has no price for this kind. With
            neither shares nor price the action takes no time.
        units: the change of the device's memory if ``Costs`` has no bytes: 1 takes the activations of one microbatch
            of the stage, and -1 gives them back.
        in_evaluation: whether evaluation runs this kind.
        completes: whether this kind adds to the gradients of parameters.
        runs_layers: whether this kind runs the layers of a stage. Its seconds are then multiplied by the time weight
            of a microbatch (``MicrobatchFactors``), otherwise by the memory weight, which counts tokens.
        of_device: whether the number in the action is a device and not a stage.
        former_name: the name in files that earlier versions wrote.
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
    """Make the class of all kinds iterable in table order, with every kind as an attribute."""

    def __iter__(cls) -> Iterator[Kind]:
        return iter(_KINDS.values())

    if TYPE_CHECKING:  # at run time it would slow every look-up of a kind down sixfold

        def __getattr__(cls, name: str) -> Kind: ...


class Kind(str, metaclass=_Kinds):
    """The kind of an action. ``Kind.F`` is the only object of its name, so ``is`` compares kinds.

    The stage of a message is that of the device that posts it, as in torch. ``2SEND_F0`` sends the output of stage 2,
    and ``3RECV_F0`` receives it as the input of stage 3. ``3SEND_I0`` (torch: ``3SEND_B0``) sends the gradient of
    stage 3's input, and ``2RECV_I0`` receives it as the gradient of stage 2's output.

    ``R`` repeats a forward that kept only its input. ``RS`` repeats the cheap parts of a forward: normalisation,
    activation functions, and core attention without its linear layers. Four kinds move activations:

    - ``OFFLOAD`` starts to copy a forward's activations to the host.
    - After ``WAIT_OFFLOAD`` the activations are on the host, and their device memory is free.
    - ``RELOAD`` allocates device memory and starts to copy the activations back.
    - After ``WAIT_RELOAD`` the activations may be used.

    Attributes:
        spec: the row of the kind.
        value: the name of the kind, as a plain string.
    """

    __slots__ = ("spec", "value")
    spec: KindSpec
    value: str

    def __new__(cls, name: str) -> Kind:
        try:
            return _KINDS[name]
        except (KeyError, TypeError):
            raise ValueError(f"{shortened(name)} is not a kind of action") from None

    def __repr__(self) -> str:
        return f"Kind.{self.value}"

    def __reduce__(self) -> tuple[type[Kind], tuple[str]]:
        return Kind, (self.value,)


_KINDS: dict[str, Kind] = {}
_QUERIES: list[tuple[Callable[[KindSpec], bool], dict[Kind, None]]] = []
_NAME = re.compile(r"[A-Z]+(_[A-Z]+)*")


def register_kind(spec: KindSpec) -> Kind:
    """Add a row to the table of kinds.

    Returns:
        The new kind; the known kind if the table already has an equal row.

    Raises:
        UnsupportedError: another row has this name, or the name has characters other than capital letters and
            underscores.
    """
    registered = _KINDS.get(spec.name)
    if registered is not None and registered.spec == spec:
        return registered
    if registered is not None or not _NAME.fullmatch(spec.name):
        fault = (
            "is taken by another kind"
            if registered
            else "is not a name for a kind: use capital letters and underscores"
        )
        raise UnsupportedError("kind-name", f"{shortened(spec.name)} {fault}; pick another name")
    kind = str.__new__(Kind, spec.name)
    kind.spec, kind.value = spec, spec.name
    _KINDS[spec.name] = kind
    setattr(Kind, spec.name, kind)
    for condition, kinds in _QUERIES:
        if condition(spec):
            kinds[kind] = None
    return kind


def kinds_where(condition: Callable[[KindSpec], bool]) -> AbstractSet[Kind]:
    """Return the kinds whose rows satisfy a condition, in table order. Kinds that are registered later join the set."""
    kinds = {kind: None for kind in Kind if condition(kind.spec)}
    _QUERIES.append((condition, kinds))
    return kinds.keys()


def kind_called(name: str) -> Kind | None:
    """Return the kind with this name or former name; ``None`` if there is none."""
    return _KINDS.get(name) or next((kind for kind in Kind if kind.spec.former_name == name != ""), None)


# Colours are far apart in hue and in lightness, also under the three kinds of colour blindness (tests/report/test_timeline.py).
# The order of the rows is that of legends.
_FORWARD = (
    Need("F", stage=-1),
    Need("F", unit="before"),
    Need("REDUCE_E", place="everywhere", only="first", barriers=(1, 2)),
)
# With two barriers T has waited for the loss already.
_BACKWARD = (
    Need("F"),
    Need("I", stage=1),
    Need("I", unit="after"),
    Need("REDUCE_X", place="everywhere", only="last", barriers=(1, 2)),
    Need("LOSS", place="last", only="last", unit="last", barriers=(1,)),
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
    # Sums over the replicas of a stage. Posting waits for no other device.
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
    # On the device of the last stage only. The parts of a microbatch share one loss, which comes with the last part.
    KindSpec("LOSS", "loss", (100, 48, 77), needs=(Need("STATS", place="everywhere", unit="until"),), in_evaluation=True,
             of_device=True),
    KindSpec("T", "head gradients", (244, 191, 230), needs=(Need("BCAST_G", place="everywhere"),), completes=True,
             of_device=True),
    KindSpec("EMBED_B", "embedding gradient", (37, 15, 146), needs=(Need("BCAST_E", place="everywhere"),), completes=True,
             of_device=True, former_name="IB"),
    # Sums the output of the embedding, to the device of the first stage.
    KindSpec("REDUCE_E", resource=Resource.COLLECTIVE, needs=(Need("EMBED_F"),), in_evaluation=True, of_device=True),
    # Sends the input of the head from the device of the last stage.
    KindSpec("BCAST_X", resource=Resource.COLLECTIVE, needs=(Need("F", place="last", only="last"),), in_evaluation=True,
             of_device=True),
    # Exchanges maxima, sums and label logits between all devices.
    KindSpec("STATS", resource=Resource.COLLECTIVE, needs=(Need("S"),), in_evaluation=True, of_device=True),
    # Sends the gradient of the loss per token from the device of the last stage.
    KindSpec("BCAST_G", resource=Resource.COLLECTIVE, needs=(Need("LOSS", place="last", only="last", unit="last"),),
             of_device=True),
    # Sums the gradient of the head's input, to the device of the last stage. With one barrier its summands are formed from
    # the statistics when it is posted, so the device waits for the statistics there.
    KindSpec("REDUCE_X", resource=Resource.COLLECTIVE,
             needs=(Need("T", barriers=(2,)), Need("STATS", place="everywhere", barriers=(1,))), of_device=True),
    # Sends the gradient of the embedding's output from the device of the first stage.
    KindSpec("BCAST_E", resource=Resource.COLLECTIVE, needs=(Need("I", place="first", only="first"),), of_device=True),
)  # fmt: skip
for _row in _ROWS:
    register_kind(_row)

PLAIN: tuple[Kind, ...] = (Kind.F, Kind.I, Kind.W, Kind.B)
"""The kinds that every schedule may have: forwards, and backwards in two passes (I, W) or in one (B)."""
ROUND_TRIP: tuple[Kind, ...] = (Kind.OFFLOAD, Kind.WAIT_OFFLOAD, Kind.RELOAD, Kind.WAIT_RELOAD)
"""The actions that move activations to the host and back, in this order."""
RECOMPUTE = kinds_where(lambda spec: spec.name in ("R", "RS"))
COMPUTE = kinds_where(lambda spec: spec.resource is Resource.COMPUTE)
COPIES = kinds_where(lambda spec: spec.resource is Resource.COPY)
MEMORY = kinds_where(lambda spec: spec.resource in (Resource.COPY, Resource.AWAIT_COPY))
"""Copies to and from the host, and the waits for them. A device spends time on them only while it waits."""
COLLECTIVES = kinds_where(lambda spec: spec.resource is Resource.COLLECTIVE)
"""A device posts a collective without waiting for other devices, except ``REDUCE_X`` with one barrier: it needs
``STATS``."""
VOCABULARY = kinds_where(lambda spec: spec.of_device)
VOCABULARY_COMPUTE = kinds_where(lambda spec: spec.of_device and spec.resource is Resource.COMPUTE)
COMPLETING = kinds_where(lambda spec: spec.completes)
FORWARD = kinds_where(lambda spec: spec.in_evaluation)
"""Kinds that evaluation runs."""
SENDS = kinds_where(lambda spec: spec.resource is Resource.SEND)
RECEIVES = kinds_where(lambda spec: spec.resource is Resource.RECEIVE)
MESSAGES = kinds_where(lambda spec: spec.resource in (Resource.SEND, Resource.RECEIVE))
WHOLE_STAGE = kinds_where(lambda spec: spec.resource is Resource.REDUCTION)
"""Kinds that have no microbatch."""
ORDERED = kinds_where(
    lambda spec: spec.resource in (Resource.COMPUTE, Resource.COPY, Resource.AWAIT_COPY, Resource.COLLECTIVE)
)
"""Kinds that stand in the orders of a schedule. ``lower`` adds the others."""
FURTHER = kinds_where(lambda spec: spec.resource is Resource.COMPUTE and not spec.of_device and spec not in _ROWS)
"""Kinds that ``Costs.further`` prices."""
PREPARING = kinds_where(lambda spec: bool(spec.prepares) and spec.resource is Resource.COMPUTE)
"""Computing kinds that other actions of the same stage and microbatch wait for."""


class Action(NamedTuple):
    """One action of one device. ``microbatch`` is ``None`` for actions on a whole stage (``2REDUCE_GRAD``).

    In a schedule that runs microbatches in parts, ``microbatch`` is the number of a unit (``Units``).
    """

    kind: Kind
    stage: int
    # Typed as int because only whole-stage actions of lowered programs have none, and their kind says so.
    microbatch: int = None  # type: ignore[assignment]

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{self.kind.value}{microbatch}"

    @classmethod
    def parse(cls, text: str, names: Mapping[str, Kind] = MappingProxyType({})) -> Action:
        """Read the text form of an action.

        Args:
            text: stage, kind and microbatch, as in ``2F0``.
            names: kinds by their names in this text, if it does not use the names of this package.

        Raises:
            ScheduleFormatError: the text is not an action.
        """
        text = text.strip()
        match = _PATTERN.fullmatch(text)
        stage, letters, microbatch = match.groups() if match else ("", "", None)
        kind = names.get(letters) or kind_called(letters)
        if kind is None:
            kinds = ", ".join(kind.value for kind in Kind)
            raise ScheduleFormatError(
                "not-an-action",
                f"{shortened(text)} is not an action; write stage, kind, microbatch, as in 2F0 (kinds: {kinds})",
            )
        if max(len(stage), len(microbatch or "")) > MOST_DIGITS:
            raise ScheduleFormatError(
                "not-an-action",
                f"{shortened(text)}: stage and microbatch have {MOST_DIGITS} digits at most; write smaller numbers",
            )
        if (microbatch is None) != (kind in WHOLE_STAGE):
            raise ScheduleFormatError(
                "not-an-action",
                f"{shortened(text)}: {' and '.join(WHOLE_STAGE)} take no microbatch, and every other kind needs one; add "
                "or remove the number",
            )
        return cls(kind, int(stage)) if microbatch is None else cls(kind, int(stage), int(microbatch))


KIND_AND_STAGE = itemgetter(0, 1)
"""Return kind and stage of an action, for ``map``: that takes half the time of a loop."""


EVERYWHERE = -1
"""The stage of a collective that all devices have posted."""
MOST_DIGITS = 9
"""The most digits that a number in the text of a schedule may have."""
_PATTERN = re.compile(r"([0-9]+)([A-Z_]+)([0-9]+)?")
