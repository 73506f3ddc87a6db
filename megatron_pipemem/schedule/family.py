"""Descriptions of schedule families: how to build their schedules, and the properties that users compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.display import brief, shortened
from megatron_pipemem.schedule.options import check_whole
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks, simulate
from megatron_pipemem.schedule.units import Units

_PLACEMENTS = {"linear": Placement.linear, "v": Placement.v_shape, "bidirectional": Placement.bidirectional}
"""The placements that follow from their name and the number of devices."""

_SIZES = ((4, 8), (4, 4), (2, 4), (8, 16), (3, 6), (1, 2))
"""Devices and microbatches of a family's example: the first size that the family accepts."""


class Formula(str):
    """A formula for a family's peak or bubble: the text that users read, and a function that tests compare with it."""

    compute: Callable[..., float | None]
    at_most: bool

    def __new__(cls, text: str, compute: Callable[..., float | None], at_most: bool = False) -> Formula:
        """Return a formula.

        Args:
            text: the text in the table of schedules.
            compute: a function of ``p`` devices, ``m`` microbatches, ``v`` chunks per device, ``n`` sequence slices,
                and the seconds ``f``, ``i``, ``w`` and ``b`` (``i + w``) of one device's share of the model, all by
                keyword. It returns ``None`` for sizes that the formula does not cover. A peak must be exact from
                ``m = 2p`` on, and an upper bound for fewer microbatches. A bubble must be exact from ``m = 2p`` on if
                F, I and W are equal.
            at_most: whether the formula is only an upper bound.
        """
        formula = super().__new__(cls, text)
        formula.compute, formula.at_most = compute, at_most
        return formula

    def __getnewargs__(self) -> tuple[Any, ...]:  # the arguments of __new__ when a pickle is read
        return str(self), self.compute, self.at_most


PEAK_OF_1F1B = Formula("1", lambda p, m, **_: min(p, m) / p)
"""The peak of 1F1B's first device, which defines the activation unit."""

PEAK_OF_PARTS = Formula("(p+n-1)/(pn)", lambda p, m, n, **_: min(p + n - 1, m * n) / (p * n))
"""The peak of 1F1B's first device if microbatches run in ``n`` parts."""


class _Fact:
    """A field of ``Family`` whose value is derived from the family's example schedule unless the user declares it."""

    def __init__(self, derive: Callable[[Family], object], checked: bool = True) -> None:
        self.derive, self.checked = derive, checked

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, family: Family | None, owner: type) -> object:
        if family is None:
            return None  # the default of the field: not declared
        declared = family.__dict__[self._name]
        return self.derive(family) if declared is None else declared

    def __set__(self, family: Family, declared: object) -> None:
        family.__dict__[self._name] = declared


def _fact[T](derive: Callable[[Family], T], checked: bool = True) -> T:
    """Return a ``_Fact``. To type checkers it has the type of the field's value, as with ``dataclasses.field``.

    ``Family.check`` compares a declared value with the derived one only if ``checked``.
    """
    fact: Any = _Fact(derive, checked)
    return fact


def _size_of_example(family: Family) -> str:
    return f"p={family.example.num_devices}, m={family.example.num_microbatches}"


def _name_of(placement: Placement) -> str:
    """Return the name of a placement; ``custom`` if it has the name of one that differs."""
    usual = _PLACEMENTS.get(placement.name)
    return placement.name if usual is None or usual(placement.num_devices) == placement else "custom"


def _idle_seconds(family: Family) -> float:
    timeline = simulate(family.example)
    return timeline.makespan - timeline.ideal


@dataclass(frozen=True)
class Family:
    """A named schedule that users can choose.

    Example: all forwards, then all backwards.

        def build(num_devices, num_microbatches):
            orders = tuple(
                tuple(Action(kind, device, m) for kind in (Kind.F, Kind.B) for m in range(num_microbatches))
                for device in range(num_devices)
            )
            return Schedule("all-then-all", Placement.linear(num_devices), num_microbatches, orders)

        register_schedule(Family("all-then-all", build, "all forwards, then all backwards"))

    ``peak``, ``bubble`` and the fields from ``placement`` on may be left out: they are derived from a small schedule
    that is built on demand. ``check`` compares declared fields with that schedule.

    Args:
        name: the name that users type.
        build: ``build(num_devices, num_microbatches, **options) -> Schedule``. The counts are at least 1, and the
            options are among those below. With ``in_parts`` it takes ``Units`` in place of ``num_microbatches``.
        summary: one sentence that helps a user to choose.
        peak: highest activation memory of any device, in activation units, for many microbatches. A ``Formula``, or a
            text that no test can check.
        bubble: idle time of the busiest device in a step of many microbatches; a ``Formula`` or a text, as ``peak``.
        source: arXiv number and section of the paper.
        min_devices: smallest number of devices.
        options: name -> one-line description. A family that lists ``memory_cap`` or ``costs`` gets those of
            ``build_schedule`` and fits its order to them.
        needs: a few words on the numbers of devices and microbatches that the family requires; it refuses others.
        fewest_microbatches: smallest number of microbatches of a step, as a function of the number of devices.
        placement: name of the placement.
        splits_backward: whether backwards run as I and W.
        chunks: stages per device; ``None`` if an option decides.
        asynchronous: whether weights change in the middle of a step, so that training differs from synchronous
            training.
        slices: number of slices of every sequence, unless an option changes it.
        offloads: whether activations are copied to host memory and back.
        replicas: number of replicas of the model that the devices hold.
        outclassed_by: what does better than the family, and why, as a clause; empty if nothing does. Planner and advice
            consider such a family only if a user names it.
        has_room_for_pairs: whether an outclassed family is considered for runs whose forwards and backwards are in
            pairs.
        in_parts: whether ``build`` takes ``Units``, and so runs parts of microbatches. The family then has the option
            ``slices``, the number of parts into which every sequence is cut, with the field of that name (or 1) as
            its default.
    """

    name: str
    build: Callable[..., Schedule]
    summary: str
    peak: str = _fact(lambda f: f"{max(peaks(f.example)):.4g} ({_size_of_example(f)})", checked=False)
    bubble: str = _fact(lambda f: f"{_idle_seconds(f):.4g} ({_size_of_example(f)}, F=I=W=1)", checked=False)
    source: str = ""
    min_devices: int = 1
    options: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    fewest_microbatches: Callable[[int], int] = lambda num_devices: 1
    placement: str = _fact(lambda family: _name_of(family.example.placement))
    splits_backward: bool = _fact(lambda family: family.example.splits_backward)
    chunks: int | None = _fact(lambda f: None if "chunks" in f.options else f._example_placement().num_chunks)
    asynchronous: bool = _fact(lambda family: family.example.updates is not None)
    slices: int = _fact(lambda family: family.example.units.parts)
    offloads: bool = _fact(lambda family: family.example.offloads)
    replicas: int = _fact(lambda family: family._example_placement().replicas)
    outclassed_by: str = ""
    has_room_for_pairs: bool = False
    in_parts: bool = False

    def __post_init__(self) -> None:
        if self.in_parts:
            object.__setattr__(self, "slices", self.__dict__["slices"] or 1)
            option = {"slices": f"sequence slices of a microbatch, n (default {self.slices})"}
            object.__setattr__(self, "options", {**self.options, **option})

    def __repr__(self) -> str:
        return f"<Family {brief(self.name)}: peak {brief(self.peak)}, bubble {brief(self.bubble)}>"

    @cached_property
    def example(self) -> Schedule:
        """A small schedule of the family.

        Raises:
            UnsupportedError: ``build`` fails for every size that is tried.
        """
        refusal: Exception | None = None
        sizes = [size for size in (*_SIZES, (self.min_devices, 2 * self.min_devices)) if size[0] >= self.min_devices]
        for devices, microbatches in sizes:
            try:
                microbatches = max(microbatches, self.fewest_microbatches(devices))
                built = self._build(devices, microbatches)
                if isinstance(built, Schedule):
                    return built
                refusal = TypeError(f"it returns {shortened(built)}, not a Schedule")
            except Exception as error:  # users write build functions, which may raise anything
                refusal = refusal or error
        raise UnsupportedError(
            "family-build-failed",
            f"schedule {shortened(self.name)} cannot be built for any of {', '.join(f'p={p} m={m}' for p, m in sizes)}: "
            f"{type(refusal).__name__}: {refusal}; correct its build function or min_devices",
        ) from refusal

    def _build(self, num_devices: int, num_microbatches: int, **options: Any) -> Schedule:
        if not self.in_parts:
            return self.build(num_devices, num_microbatches, **options)
        parts = options.pop("slices", self.slices)
        check_whole(f"{self.name}: slices", parts, least=1)
        return self.build(num_devices, Units.equal(num_microbatches, parts), **options)

    def runs(self, units: Units) -> bool:
        """Return whether the family orders whole microbatches by default, or takes a number of parts, as these units need."""
        return self.slices == 1 if units.are_whole else "slices" in self.options

    def schedule(self, num_devices: int, num_microbatches: int, options: Mapping[str, Any]) -> Schedule:
        """Return the schedule of a step, built unless the last one had equal arguments.

        Args:
            num_devices: pipeline ranks.
            num_microbatches: microbatches of one step.
            options: options of the family. ``chunks`` is always accepted, and must agree with the family.

        Raises:
            UnsupportedError: the family lacks one of the options, or builds nothing with these arguments.
        """
        options = self._accepted(num_devices, options)
        if not all(isinstance(value, str | int | float) for value in options.values()):
            return self._build(num_devices, num_microbatches, **options)
        # With the types, because True and 1.0 are equal to 1, which a builder accepts where it refuses them.
        typed = frozenset((name, type(value), value) for name, value in options.items())
        key = num_devices, num_microbatches, typed
        if key not in self._last:
            built = self._build(num_devices, num_microbatches, **options)
            self._last.clear()
            self._last[key] = built
        return self._last[key]

    def _accepted(self, num_devices: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options for ``build``. Raise an UnsupportedError if the family lacks one, or needs more devices."""
        if num_devices < self.min_devices:
            raise UnsupportedError(
                "needs-devices",
                f"schedule {shortened(self.name)} needs at least {self.min_devices} devices, not {num_devices}; "
                "use more pipeline ranks or another schedule",
            )
        options = dict(options)
        if "chunks" in options and "chunks" not in self.options:
            chunks = options.pop("chunks")
            if chunks != self.chunks:
                own = "1 chunk" if self.chunks == 1 else f"{self.chunks} chunks"
                raise UnsupportedError(
                    "needs-chunks",
                    f"schedule {shortened(self.name)} has {own} per device, not {chunks}; leave chunks out, "
                    "or use 'interleaved', which takes any number",
                )
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            allowed = ", ".join(sorted(self.options)) or "none"
            raise UnsupportedError(
                "unknown-option",
                f"schedule {shortened(self.name)} has no option {shortened(unknown[0])}; its options: {allowed}",
            )
        return options

    def placement_on(self, num_devices: int, options: Mapping[str, Any]) -> Placement:
        """Return the placement of the family's schedules on this number of devices.

        It follows from the declared fields if there are no options. Otherwise it is that of a step with
        ``fewest_microbatches``, which also shows whether ``build`` accepts the options. The step is built once for the
        same arguments.

        Args:
            num_devices: pipeline ranks.
            options: options of the family, as for ``schedule``.

        Raises:
            UnsupportedError: as for ``schedule``.
        """
        key = num_devices, repr(sorted(options.items()))
        if key not in self._placements:
            accepted = self._accepted(num_devices, options)
            placement = None if accepted or self.needs else self._declared_on(num_devices)
            if placement is None:
                placement = self._build(num_devices, self.fewest_microbatches(num_devices), **accepted).placement
            self._placements[key] = placement
        return self._placements[key]

    def chunks_per_device(self, options: Mapping[str, Any]) -> int:
        """Return the number of stages per device of the family's schedules.

        Args:
            options: options of the family, as for ``schedule``.

        Raises:
            UnsupportedError: as for ``schedule``.
        """
        return self.placement_on(self.min_devices, options).num_chunks

    def _declared_on(self, num_devices: int) -> Placement | None:
        """Return the declared placement; ``None`` if its name does not determine the device of every stage."""
        shape = _PLACEMENTS.get(self.__dict__["placement"])
        return None if shape is None or "chunks" in self.options else shape(num_devices)

    def _example_placement(self) -> Placement:
        return self._declared_on(self.min_devices) or self.example.placement

    @cached_property
    def _placements(self) -> dict[tuple[int, str], Placement]:
        return {}

    @cached_property
    def _last(self) -> dict[tuple[Any, ...], Schedule]:
        """The schedule that was built last, by its arguments. Training, evaluation and checks of a run ask for the same."""
        return {}

    def check(self) -> None:
        """Compare the declared fields with a schedule that ``build`` returns.

        Raises:
            UnsupportedError: the family builds nothing, or a schedule that differs from its declaration.
        """
        for name, fact in vars(Family).items():
            if not isinstance(fact, _Fact) or not fact.checked:
                continue
            declared, derived = self.__dict__[name], fact.derive(self)
            if declared is None or declared == derived or (name, derived) == ("chunks", None):
                continue
            size = f"{self.example.num_devices} devices and {self.example.num_microbatches} microbatches"
            raise UnsupportedError(
                "family-declaration",
                f"schedule {self.name!r} declares {name}={declared!r}, but its schedule for {size} has {name}={derived!r}; "
                f"leave {name} out, or correct one of them",
            )


built_in = partial(Family, splits_backward=False, asynchronous=False, slices=1, offloads=False)
"""``Family`` for the modules of ``families``. Their properties are declared, so that no example is built to learn them."""
