"""The table of schedule families, which users and installed packages can extend.

The table has every ``Family`` that is a global of a module of ``families``. Other families are added by
``register_schedule``, by ``register_module``, or by an entry point of the group ``megatron_pipemem.schedules``. An
entry point has the family's name and leads to a ``Family``. It is imported when that name or the whole table is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any
from zlib import crc32

from megatron_pipemem import families as built_in
from megatron_pipemem.errors import PipememError, UnknownScheduleError, UnsupportedError, repeated
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.family import Family
from megatron_pipemem.schedule.memory_cap import loosened, per_device
from megatron_pipemem.schedule.options import AUTO, STOCK, check_whole
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks, simulate
from megatron_pipemem.schedule.units import WHOLE, Units

ENTRY_POINT_GROUP = "megatron_pipemem.schedules"


_FAMILIES: dict[str, Family] = {}
_OF_MODULES: dict[str, tuple[Family, ...]] = {}
"""The families that ``register_module`` has added, by the module's name."""


def register_schedule(family: Family, *, replace: bool = False) -> Family:
    """Add a family to the table, after a check that a built schedule has the properties that the family declares.

    Raises:
        UnsupportedError: another family has that name and ``replace`` is not set, or ``build`` fails, or its schedule
            differs from a declared field.
    """
    there = _table().get(family.name)
    if there is not None and there is not family and not replace:
        raise UnsupportedError(
            "exists-already",
            f"schedule {shortened(family.name)} is registered already; pick another name or pass replace=True",
        )
    family.check()
    _FAMILIES[family.name] = family
    return family


def family(name: str) -> Family:
    """Return the family of that name.

    Raises:
        UnknownScheduleError: there is no such family. The message suggests the most similar name.
        UnsupportedError: the entry point of an installed package has that name, but does not lead to the family.
    """
    table = _table()
    if name in table:
        return table[name]
    offered = {entry.name: entry for entry in _offered(tuple(sys.path))}
    if name in offered:
        return register_schedule(_load(offered[name]))
    names = sorted({*table, *offered})
    near = get_close_matches(name.lower().replace("_", "-"), [*names, AUTO, STOCK], n=1)
    hint = f"did you mean {near[0]!r}? " if near and near[0] != name else ""
    raise UnknownScheduleError(
        "unknown-schedule",
        f"unknown schedule {shortened(name)}; {hint}`pipemem schedules --all` lists all {len(names)}",
    )


def families() -> tuple[Family, ...]:
    """Return all families, built-in families first.

    Raises:
        UnsupportedError: the entry point of an installed package fails or does not lead to a family.
    """
    for entry in _offered(tuple(sys.path)):
        if entry.name not in _table():
            register_schedule(_load(entry))
    return tuple(_table().values())


def register_module(target: str) -> tuple[Family, ...]:
    """Import a module, add its families to the table, and return them.

    These are the families that the module registers itself, and those among its globals. ``target`` is the path of a
    Python file (``mine.py``) or the full name of a module (``package.module``). A module that was added before gives
    the same families.

    Raises:
        UnsupportedError: the module does not exist, cannot be imported, or has no family that ``register_schedule`` accepts.
    """
    before = set(_table())
    module = import_target(f"schedule module {repeated(target)}", target)
    registered = (family for name, family in _table().items() if name not in before)
    named = {family.name: family for family in (*registered, *families_of(module))}
    registered_families = _OF_MODULES[module.__name__] = _OF_MODULES.get(module.__name__) or tuple(named.values())
    if not registered_families:
        raise UnsupportedError(
            "cannot-import",
            f"schedule module {repeated(target)} has no schedule family; let it call register_schedule(Family(...))",
        )
    for family in registered_families:
        register_schedule(family)
    return registered_families


def families_of(module: ModuleType) -> tuple[Family, ...]:
    """Return the families among the globals of a module, in the order of their definition."""
    return tuple(value for value in vars(module).values() if isinstance(value, Family))


def build_schedule(
    name: str,
    num_devices: int,
    num_microbatches: int,
    *,
    memory_cap: float | Sequence[float] | None = None,
    costs: Costs | None = None,
    **options: object,
) -> Schedule:
    """Build a schedule of a family. Equal arguments give equal schedules.

    Args:
        name: family name.
        num_devices: pipeline ranks.
        num_microbatches: microbatches of one step.
        memory_cap: the most memory of any device, one number or one per device, in activation units (1.0 is the peak
            of 1F1B's device 0). Families that fit their order to a cap use the lowest of several caps.
        costs: prices for families that fit their order to them. Other families use only factors of microbatches, for
            the comparison with the cap.
        options: options of the family. ``chunks`` is always accepted, and must agree with the family.

    Raises:
        UnknownScheduleError: no family has that name.
        UnsupportedError: the family cannot be built with these arguments or within the cap. The message names the
            families that fit the cap.
    """
    chosen = family(name)
    check_whole("num_devices", num_devices)
    check_whole("num_microbatches", num_microbatches)
    caps = None if memory_cap is None else per_device(memory_cap, num_devices)
    schedule = chosen.schedule(num_devices, num_microbatches, {**options, **_fitted_to(chosen, caps, costs)})
    if caps is not None:
        _check_cap(chosen, schedule, caps, Costs(microbatch=None if costs is None else costs.microbatch))
    return schedule


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise an UnsupportedError if options of a schedule contain a cap, costs or sizes, which have their own flags."""
    for argument in ("memory_cap", "costs", "num_devices", "num_microbatches"):
        if argument in options:
            raise UnsupportedError(
                "has-own-flag",
                f"{argument} is a setting of every schedule, and no option of {shortened(name)}; give it by its own flag or "
                "argument",
            )


def _fitted_to(chosen: Family, caps: Sequence[float] | None, costs: Costs | None = None) -> dict[str, Any]:
    """Return ``memory_cap`` (the lowest cap) and ``costs`` as arguments of ``build``, if the family uses them."""
    arguments = {"memory_cap": None if caps is None else min(caps), "costs": costs}
    return {name: value for name, value in arguments.items() if name in chosen.options and value is not None}


def megatrons_own(chunks: int | None) -> str:
    """Return the name of Megatron's own schedule: ``1f1b`` for 1 chunk per rank or ``None``, else ``interleaved``."""
    return "1f1b" if (chunks or 1) == 1 else "interleaved"


def synchronous_families(units: Units = WHOLE) -> Iterator[Family]:
    """Yield the synchronous families with one replica that do not offload and run such units."""
    for family in families():
        if family.runs(units) and not (family.offloads or family.asynchronous or family.replicas > 1):
            yield family


def synchronous_schedules(
    num_devices: int, num_microbatches: int, costs: Costs | None = None, max_chunks: int | None = None
) -> Iterator[Schedule]:
    """Yield the schedules of those ``synchronous_families`` that accept these arguments.

    With ``max_chunks``, families with the option ``chunks`` are built with every number from 2 up to it, and schedules
    with more chunks are left out. Without it, every family is built once with its defaults.
    """
    for family in synchronous_families():
        variants: Sequence[dict[str, Any]] = ({},)
        if max_chunks is not None and "chunks" in family.options:
            variants = [{"chunks": chunks} for chunks in range(2, max_chunks + 1)]
        for options in variants:
            try:
                schedule = build_schedule(
                    family.name, num_devices=num_devices, num_microbatches=num_microbatches, costs=costs, **options
                )
            except PipememError:
                continue
            if max_chunks is None or schedule.placement.num_chunks <= max_chunks:
                yield schedule


def _check_cap(chosen: Family, schedule: Schedule, caps: Sequence[float], units: Costs) -> None:
    own_peaks = peaks(schedule, units)
    over = [device for device, peak in enumerate(own_peaks) if peak > loosened(caps[device])]
    if not over:
        return
    worst, own_makespan = max(over, key=lambda device: own_peaks[device]), simulate(schedule).makespan
    fitting: dict[bool, list[str]] = {False: [], True: []}  # by whether a family offloads and the chosen one does not
    for other in families():
        # Replicas save activations but hold more weights.
        if any(getattr(other, name) > getattr(chosen, name) for name in ("asynchronous", "slices", "replicas")):
            continue
        try:
            fitted = _fitted_to(other, caps)
            built = other.schedule(schedule.num_devices, schedule.num_microbatches, fitted)
            others, slower = peaks(built, units), simulate(built).makespan / own_makespan
        except PipememError:
            continue
        if all(peak <= loosened(cap) for peak, cap in zip(others, caps, strict=True)):
            fitting[other.offloads > chosen.offloads].append(f"{other.name} ({max(others):.4g}; {slower:.2f})")
    ways_out = [
        f"schedule {AUTO} searches for an order within it",
        f"these named schedules fit (peak in these units; makespan / this one's, if F = I = W): {', '.join(fitting[False])}"
        if fitting[False]
        else "no named schedule that trains alike fits on the device",
    ]
    if fitting[True]:
        ways_out.append(f"with activations on the host these fit, too: {', '.join(fitting[True])}")
    on_device = "" if len(set(caps)) == 1 else f" on device {worst}"
    raise UnsupportedError(
        "over-cap",
        f"schedule {shortened(chosen.name)} needs {own_peaks[worst]:.4g} activation units{on_device} with "
        f"{schedule.num_devices} devices and {schedule.num_microbatches} microbatches, above the memory cap of "
        f"{caps[worst]:.4g}; {'; '.join(ways_out)}",
    )


@lru_cache(maxsize=1)
def _offered(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of families in all packages on ``sys.path``. Pass ``sys.path``, which is the cache's key.

    The result for the last path is cached, because finding them takes 20 ms or more.
    """
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _load(entry: EntryPoint) -> Family:
    package = f" of package {entry.dist.name}" if entry.dist is not None else ""
    subject = f"entry point {shortened(entry.name)}{package} in the group {ENTRY_POINT_GROUP}"
    loaded = _import(subject, entry.load, "repair or uninstall that package")
    if not isinstance(loaded, Family) or loaded.name != entry.name:
        raise UnsupportedError(
            "family-declaration",
            f"{subject} must lead to a Family named {shortened(entry.name)}, not to {shortened(loaded)}; repair or uninstall "
            "that package",
        )
    return loaded


def _table() -> dict[str, Family]:
    """Return the families by name. The first call imports every module of ``families``."""
    if not _FAMILIES:
        modules = [import_module(f"{built_in.__name__}.{module.name}") for module in iter_modules(built_in.__path__)]
        by_name = {family.name: family for module in modules for family in families_of(module)}
        names = (*filter(by_name.__contains__, built_in.ORDER), *by_name)
        _FAMILIES.update({name: by_name[name] for name in names})
    return _FAMILIES


def import_target(subject: str, target: str) -> ModuleType:
    """Import a module by the path of its Python file (``mine.py``) or by its full name (``package.module``)."""
    return _import(subject, partial(_module, target), "give a Python file, or the name of a module on the Python path")


def _import[T](subject: str, load: Callable[[], T], remedy: str) -> T:
    """Call ``load``, which imports a user's or a package's code, and raise an UnsupportedError if it fails."""
    try:
        return load()
    except PipememError as error:
        raise UnsupportedError(error.code, f"{subject} cannot be loaded: {error}") from error
    except Exception as error:  # foreign code may raise anything
        raise UnsupportedError(
            "cannot-import", f"{subject} cannot be loaded: {type(error).__name__}: {repeated(str(error))}; {remedy}"
        ) from error


def _module(target: str) -> ModuleType:
    """Import the module of that name or in that file. A file is imported only once."""
    if not target.endswith(".py"):
        return import_module(target)
    path = Path(target).resolve()
    name = f"pipemem_schedule_{path.stem}_{crc32(str(path).encode()):08x}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, f"{path} ends with .py"
        sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
