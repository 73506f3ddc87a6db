"""A grid: a run and what to vary of it.

    run: tiny-cpu
    set: {training.iterations: 5}
    points:
      - {parallelism: {tp: 1, pp: 4, dp: 1}}
      - {parallelism: {tp: 2, pp: 2, dp: 1}}
    product:
      schedule.name: [stock, v-half, v-min]
      megatron.lr: [1.0e-4, 3.0e-4]
    exclude:
      - {schedule.name: v-min, parallelism.pp: 2}

Every entry of ``points`` is combined with every choice of ``product``; either may be left out. Keys are dotted paths of a
run; a mapping as a value changes the keys it names.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.planner.feasibility import feasible
from megatron_pipemem.planner.loading import load, locate, nearest, override, parse_override, read_raw, typed
from megatron_pipemem.planner.runs import Run

Settings = dict[str, Any]
"""Dotted key of a run -> value."""


@dataclass(frozen=True)
class Grid:
    """A grid's file.

    Args:
        run: name or path of the run that all points start from.
        set: keys that differ from it for all points.
        points: keys that go together, one mapping for each.
        product: key -> values; every combination.
        only: points that match none of these are left out. A pattern matches when every key has the value given, or one of
            the values.
        exclude: points that match one of these are left out.
    """

    config_folder: ClassVar[str] = "grids"

    run: str
    set: dict[str, Any] = field(default_factory=dict)
    points: list[Any] = field(default_factory=list)
    product: dict[str, Any] = field(default_factory=dict)
    only: list[Any] = field(default_factory=list)
    exclude: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for key in ("points", "only", "exclude"):
            for entry in getattr(self, key):
                if not isinstance(entry, Mapping):
                    raise ConfigError(f"has the entry {entry!r}; give mappings of keys to values", key=key)
        for key, values in self.product.items():
            if not isinstance(values, list) or not values:
                raise ConfigError(f"is {values!r}; give a list of values", key=f"product.{key}")


@dataclass(frozen=True)
class Point:
    """One run of a grid.

    Args:
        index: its number, from 0, in the order of the file.
        settings: what it changes and others change otherwise.
        changes: all that it changes of the grid's run, ``set`` included.
        base: file of the grid's run.
        run: all of it, or ``None`` when that is no run at all.
        reason: why it is not worth starting, or ``None``.
    """

    index: int
    settings: Settings
    changes: Settings
    base: Path
    run: Run | None
    reason: str | None

    @property
    def name(self) -> str:
        return label(self.settings)


def label(settings: Settings) -> str:
    """Settings on one line: ``pp=4, name=v-half``."""
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items()) or "the run itself"


def load_points(path: str | Path, overrides: Sequence[str] = ()) -> list[Point]:
    """The points of a grid's file, feasible or not, filters applied.

    Args:
        path: the file, or the name of a grid.
        overrides: ``key=value`` for the runs of all points, as under ``set``.

    Raises:
        ConfigError: the file, or the run it starts from, is wrong; or a filter asks for a key that runs do not have.
    """
    grid = load(path, Grid)
    grid_file = locate(str(path), Grid)
    base = locate(grid.run, Run, user=grid_file, key="run")
    raw = read_raw(base)
    common = flat(grid.set) | dict(map(parse_override, overrides))
    rows = [dict(zip(grid.product, values, strict=True)) for values in itertools.product(*grid.product.values())]
    points: list[Point] = []
    for entry, row in itertools.product(grid.points or [{}], rows):
        settings = flat({**entry, **row})
        point = _point(len(points), settings, common | settings, raw, base)
        if point.run is None or _kept(point.run, grid, grid_file):
            points.append(point)
    if not points:
        raise ConfigError("its filters leave no point", file=grid_file)
    return points


def flat(settings: Mapping[str, Any], prefix: str = "") -> Settings:
    """Mappings within settings as dotted keys."""
    result: Settings = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value
        result |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return result


def placed(point: Point, folder: Path) -> Point:
    """The point with ``folder`` for everything its run writes."""
    return point if point.run is None else replace(point, run=replace(point.run, output=str(folder)))


def _point(index: int, settings: Settings, changes: Settings, raw: Mapping[str, Any], base: Path) -> Point:
    changed = copy.deepcopy(dict(raw))
    for key, value in changes.items():
        override(changed, key, value)
    try:
        run = typed(changed, Run, base)
    except ConfigError as error:
        return Point(index, settings, changes, base, None, str(error))
    return Point(index, settings, changes, base, run, feasible(run))


def _kept(run: Run, grid: Grid, file: Path) -> bool:
    def matches(pattern: Mapping[str, Any], key: str) -> bool:
        wanted = flat(pattern).items()
        return all(_value(run, name, key, file) in (v if isinstance(v, list) else [v]) for name, v in wanted)

    kept = not grid.only or any([matches(pattern, "only") for pattern in grid.only])
    return kept and not any([matches(pattern, "exclude") for pattern in grid.exclude])


def _value(run: Run, name: str, key: str, file: Path) -> Any:
    """A run's value of a dotted key; ``None`` for a flag it does not set."""
    here: Any = run
    for part in name.split("."):
        if is_dataclass(here):
            known = [each.name for each in fields(here)]
            if part not in known:
                raise ConfigError(f"runs have no key {name!r}; {nearest(part, known)}", key=key, file=file)
            here = getattr(here, part)
        else:
            here = here.get(part) if isinstance(here, Mapping) else None
    return here
