"""Describe a grid: a run and what to vary of it.

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
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from megatron_pipemem.config.loading import check_key, load, locate, override, parse_override, read_raw, typed
from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import ConfigError
from megatron_pipemem.launch.feasibility import feasible

_MOST_POINTS = 10_000

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
    points: list[dict[str, Any]] = field(default_factory=list)
    product: dict[str, list[Any]] = field(default_factory=dict)
    only: list[dict[str, Any]] = field(default_factory=list)
    exclude: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for key, values in self.product.items():
            if not values:
                raise ConfigError("bad-type", "is empty; give a list of values", key=f"product.{key}")


@dataclass(frozen=True)
class GridPoint:
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


def label(settings: Settings) -> str:
    """Return the settings on one line: ``parallelism.pp=4, schedule.name=v-half``."""
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "the run itself"


def load_points(path: str | Path, overrides: Sequence[str] = (), any_size: bool = False) -> list[GridPoint]:
    """Return the points of a grid's file, feasible or not, filters applied.

    Args:
        path: the file, or the name of a grid.
        overrides: ``key=value`` for the runs of all points, as under ``set``.
        any_size: see ``feasible``.

    Raises:
        ConfigError: the file, or the run it starts from, is wrong; it names a key that runs do not have; no point is a run;
            or a filter asks for what no point has.
    """
    grid = load(path, Grid)
    grid_file = locate(str(path), Grid)
    base = locate(grid.run, Run, user=grid_file, key="run", siblings=True)
    changed_run = partial(_run_of, base, read_raw(base))
    given = dict(map(parse_override, overrides))
    _check_keys(grid, given, grid_file)
    common = flat(grid.set) | given
    count = max(1, len(grid.points)) * math.prod(map(len, grid.product.values()))
    if count > _MOST_POINTS:
        raise ConfigError(
            "too-large", f"makes {count:,} points; give at most {_MOST_POINTS:,}", key="product", file=grid_file
        )
    rows = [dict(zip(grid.product, values, strict=True)) for values in itertools.product(*grid.product.values())]
    settings = [flat({**entry, **row}) for entry, row in itertools.product(grid.points or [{}], rows)]
    changes = [common | each for each in settings]
    runs = [changed_run(each) for each in changes]
    able = [run for run in runs if isinstance(run, Run)]
    if not able:
        raise ConfigError("no-points", f"no point is a run: {runs[0]}", file=grid_file)
    _check_different(settings, runs, grid_file)
    kept = _filter(grid, grid_file, changed_run, changes, able)
    points: list[GridPoint] = []
    for own, everything, run in zip(settings, changes, runs, strict=True):
        if isinstance(run, ConfigError):
            points.append(GridPoint(len(points), own, everything, base, None, str(run)))
        elif kept(run):
            points.append(GridPoint(len(points), own, everything, base, run, feasible(run, any_size)))
    if not points:
        raise ConfigError("no-points", "its filters leave no point", file=grid_file)
    return points


def _check_different(settings: Sequence[Settings], runs: Sequence[Run | ConfigError], file: Path) -> None:
    """Refuse points that are the same run: training a run twice tells nothing new."""
    first: dict[str, int] = {}
    for index, run in enumerate(runs):
        twin = first.setdefault(repr(run), index) if isinstance(run, Run) else index
        if twin != index:
            raise ConfigError(
                "given-twice",
                f"points {twin} ({label(settings[twin])}) and {index} ({label(settings[index])}) are the same run; leave one "
                "out",
                file=file,
            )


def flat(settings: Mapping[str, Any], prefix: str = "") -> Settings:
    """Return the mappings within settings as dotted keys."""
    result: Settings = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value
        result |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return result


def _run_of(file: Path, raw: Mapping[str, Any], changes: Mapping[str, Any]) -> Run | ConfigError:
    """Return the run of a file with these changes, or why it is none."""
    changed = copy.deepcopy(dict(raw))
    for key, value in changes.items():
        override(changed, key, value)
    try:
        return typed(changed, Run, file)
    except ConfigError as error:
        return error


def _check_keys(grid: Grid, overrides: Mapping[str, Any], file: Path) -> None:
    """Refuse a key that runs do not have: it is a mistake in the grid, not in its points."""
    for key in overrides:
        check_key(Run, key)
    products = [{key: value} for key, values in grid.product.items() for value in values]
    said = {"set": [grid.set], "product": products, "points": grid.points, "only": grid.only, "exclude": grid.exclude}
    for user, mappings in said.items():
        for key in (key for mapping in mappings for key in flat(mapping)):
            check_key(Run, key, f"{user}.", file)


def _filter(
    grid: Grid,
    file: Path,
    changed_run: Callable[[Settings], Run | ConfigError],
    changes: Sequence[Settings],
    runs: Sequence[Run],
) -> Callable[[Run], bool]:
    """Return whether a run passes the grid's filters. Their values are read as a point's would be: ``2`` may be text in
    a run.
    """

    def normal(name: str, value: Any, key: str) -> Any:
        reason = None
        for each in changes:  # a value need not go with every point
            run = changed_run(each | {name: value})
            if isinstance(run, Run):
                return _value(run, name)
            reason = reason or run
        raise ConfigError("bad-filter", f"no point can have {value!r}: {reason}", key=f"{key}.{name}", file=file)

    def read(pattern: Mapping[str, Any], key: str) -> dict[str, list[Any]]:
        wanted = flat(pattern)
        for name in wanted:
            if all(_value(run, name, _ABSENT) is _ABSENT for run in runs):
                raise ConfigError(
                    "bad-filter", "is set by no point, so that it can tell none apart", key=f"{key}.{name}", file=file
                )
        return {
            name: [normal(name, value, key) for value in (values if isinstance(values, list) else [values])]
            for name, values in wanted.items()
        }

    def matches(run: Run, patterns: Sequence[Mapping[str, list[Any]]]) -> bool:
        return any(all(_value(run, name) in values for name, values in each.items()) for each in patterns)

    only, exclude = ([read(each, key) for each in getattr(grid, key)] for key in ("only", "exclude"))
    return lambda run: (not only or matches(run, only)) and not matches(run, exclude)


def _value(run: Run, name: str, absent: Any = None) -> Any:
    """Return a run's value of a dotted key; ``absent`` for a flag it does not set."""
    here: Any = run
    for part in name.split("."):
        here = here.get(part, absent) if isinstance(here, Mapping) else getattr(here, part, absent)
    return here


_ABSENT = object()
