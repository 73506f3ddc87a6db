"""Read the file of a grid: a run's configuration, and the keys in which its points differ.

    run: tiny-cpu
    set: {train_iters: 5}
    points:
      - {tp: 1, pp: 4, dp: 1}
      - {tp: 2, pp: 2, dp: 1}
    product:
      schedule: [stock, v-half, v-min]
      lr: [1.0e-4, 3.0e-4]
    exclude:
      - {schedule: v-min, pp: 2}

Every entry of ``points`` is combined with every combination of values in ``product``. Either may be left out. Keys are
those of a run's file; a dotted key changes a part of a mapping (``cluster.nodes``), and so does a mapping as a value.
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

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.model.arguments import NAMES, arguments_of
from megatron_pipemem.model.model import Model
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.tools.config.keys import place_of
from megatron_pipemem.tools.config.loading import check_key, load, locate, override, parse_override, read_raw, typed
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.feasibility import feasible
from megatron_pipemem.values import refuse_if

_MOST_POINTS = 10_000

Settings = dict[str, Any]
"""Values by dotted keys of a run's file."""


@dataclass(frozen=True)
class Grid:
    """The content of a grid's file."""

    config_folder: ClassVar[str] = "grids"

    run: str  # name or path of the run that all points change
    set: dict[str, Any] = field(default_factory=dict)  # changes of all points
    points: list[dict[str, Any]] = field(default_factory=list)  # keys that change together
    product: dict[str, list[Any]] = field(default_factory=dict)  # key -> values; every combination is a point
    only: list[dict[str, Any]] = field(default_factory=list)
    """Patterns of the points to keep; all if empty. A point matches a pattern if every key of the pattern has the same
    value in the point, or one of the values in a list."""
    exclude: list[dict[str, Any]] = field(default_factory=list)  # patterns of points to leave out

    def __post_init__(self) -> None:
        for key, values in self.product.items():
            refuse_if(not values, "bad-type", f"product.{key}", "is empty; give a list of values")


@dataclass(frozen=True)
class GridPoint:
    """One run of a grid."""

    index: int  # from 0, in the order of the file
    settings: Settings  # the values of the keys in which points differ
    changes: Settings  # ``settings``, and the changes that all points have
    base: Path  # file of the grid's run
    run: Run | None  # None if the changed run is not valid
    reason: str | None  # why the run cannot work, if so


def label(settings: Settings) -> str:
    """Return the settings of a point on one line: ``pp=4, schedule=v-half``."""
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "the run itself"


def load_points(path: str | Path, overrides: Sequence[str] = (), any_size: bool = False) -> list[GridPoint]:
    """Read a grid, by the path of its file or its name, and return the points that its filters keep.

    Points that cannot work are included, with the reason. Filters are not applied to points whose run is not valid.
    ``overrides`` change all points, like the key ``set``. With ``any_size``, points are not refused because their
    schedules take long to check. Raise a ConfigError if there are over 10,000 points, if two are equal, or if none is
    valid or kept.
    """
    grid_file = locate(str(path), Grid)
    raw = read_raw(grid_file)
    if "model" in raw and not {"run", "points", "product"} & set(raw):
        raise ConfigError(
            "wrong-file", "looks like a run, not a grid of runs; pipemem launch starts it", file=grid_file
        )
    grid = load(path, Grid)
    base = locate(grid.run, Run, user=grid_file, key="run", siblings=True)
    changed_run = partial(_run_of, base, read_raw(base))
    override_values = dict(map(parse_override, overrides))
    base_run = changed_run({})
    _check_keys(grid, override_values, grid_file, isinstance(base_run, Run) and base_run.script is not None)
    common = flat(grid.set) | override_values
    count = max(1, len(grid.points)) * math.prod(map(len, grid.product.values()))
    if count > _MOST_POINTS:
        raise ConfigError(
            "too-large", f"makes {count:,} points; give at most {_MOST_POINTS:,}", key="product", file=grid_file
        )
    rows = [dict(zip(grid.product, values, strict=True)) for values in itertools.product(*grid.product.values())]
    settings = [flat({**entry, **row}) for entry, row in itertools.product(grid.points or [{}], rows)]
    changes = [common | own_settings for own_settings in settings]
    runs = [changed_run(point_changes) for point_changes in changes]
    able = [run for run in runs if isinstance(run, Run)]
    if not able:
        raise ConfigError("no-points", f"no point is a valid run: {runs[0]}", file=grid_file)
    _check_different(settings, runs, grid_file)
    kept = _filter(grid, grid_file, changed_run, changes, able)
    points: list[GridPoint] = []
    for own, everything, run in zip(settings, changes, runs, strict=True):
        if isinstance(run, ConfigError):
            points.append(GridPoint(len(points), own, everything, base, None, str(run)))
        elif kept(run):
            points.append(GridPoint(len(points), own, everything, base, run, feasible(run, any_size)))
    if not points:
        raise ConfigError("no-points", "the keys only and exclude leave no point; relax them", file=grid_file)
    return points


def _check_different(settings: Sequence[Settings], runs: Sequence[Run | ConfigError], file: Path) -> None:
    """Raise a ConfigError if two points have the same configuration."""
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
    """Replace nested mappings by dotted keys: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``. Empty ones stay."""
    result: Settings = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value
        result |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return result


def _run_of(file: Path, raw: Mapping[str, Any], changes: Mapping[str, Any]) -> Run | ConfigError:
    """Return a file's run with changes, or the ConfigError if the changed run is not valid."""
    changed = copy.deepcopy(dict(raw))
    for key, value in changes.items():
        override(changed, key, value)
    try:
        return typed(changed, Run, file)
    except ConfigError as error:
        return error


def _check_keys(grid: Grid, overrides: Mapping[str, Any], file: Path, has_script: bool) -> None:
    """Raise a ConfigError if the grid or ``overrides`` have a key that runs do not have.

    With a training script of the user's own (``has_script``, or a key ``script``), every flag may be one.
    """
    products = [{key: value} for key, values in grid.product.items() for value in values]
    users = {"set": [grid.set], "product": products, "points": grid.points, "only": grid.only, "exclude": grid.exclude}
    keys = [(user, key) for user, mappings in users.items() for mapping in mappings for key in flat(mapping)]
    any_flag = has_script or "script" in overrides or any(key == "script" for _, key in keys)
    for key in overrides:
        check_key(Run, key, any_flag=any_flag)
    for user, key in keys:
        check_key(Run, key, f"{user}.", file, any_flag)


def _filter(
    grid: Grid,
    file: Path,
    changed_run: Callable[[Settings], Run | ConfigError],
    changes: Sequence[Settings],
    runs: Sequence[Run],
) -> Callable[[Run], bool]:
    """Return a function that returns whether the grid's keys ``only`` and ``exclude`` keep a run.

    Values in patterns are converted like those of a run, so that ``1e-4`` equals ``0.0001``. ``changed_run`` makes the
    run with given changes, ``changes`` has those of every point, and ``runs`` the valid runs. Raise a ConfigError if a
    pattern has a key that no point sets, or a value that no point can have.
    """

    def normal(name: str, value: Any, key: str) -> Any:
        reason = None
        for point_changes in changes:  # the value may be invalid for some points
            run = changed_run(point_changes | {name: value})
            if isinstance(run, Run):
                return _value(run, name)
            reason = reason or run
        raise ConfigError(
            "bad-filter", f"no point can have {shortened(value)}: {reason}", key=f"{key}.{name}", file=file
        )

    def read(pattern: Mapping[str, Any], key: str) -> dict[str, list[Any]]:
        values_by_key = flat(pattern)
        for name in values_by_key:
            if all(_value(run, name, _ABSENT) is _ABSENT for run in runs):
                raise ConfigError("bad-filter", "is set by no point; leave it out", key=f"{key}.{name}", file=file)
        return {
            name: [normal(name, value, key) for value in (values if isinstance(values, list) else [values])]
            for name, values in values_by_key.items()
        }

    def matches(run: Run, patterns: Sequence[Mapping[str, list[Any]]]) -> bool:
        return any(all(_value(run, name) in values for name, values in pattern.items()) for pattern in patterns)

    only, exclude = ([read(pattern, key) for pattern in getattr(grid, key)] for key in ("only", "exclude"))
    return lambda run: (not only or matches(run, only)) and not matches(run, exclude)


def _value(run: Run, name: str, absent: Any = None) -> Any:
    """Return the value of a dotted key in a run; ``absent`` for a flag that the run does not set."""
    here: Any = run
    for part in place_of(name):
        if isinstance(here, Model) and part in NAMES:
            return arguments_of(here).get(part, absent)
        here = here.get(part, absent) if isinstance(here, Mapping) else getattr(here, part, absent)
    return here


_ABSENT = object()
