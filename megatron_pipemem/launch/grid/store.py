"""Keep a grid in its folder.

FOLDER/grid.json                 the grid's file, and the settings and all changes of all points
FOLDER/points/007/run.yaml       a point's run, complete: later changes of other files do not reach it
FOLDER/points/007/log.txt        what its training printed, over all starts
FOLDER/points/007/report.json    predicted and counted bytes, bubbles, losses
FOLDER/points/007/result.json    its result, written once it has ended
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from megatron_pipemem.config.loading import load, settings_of, typed
from megatron_pipemem.config.runs import Run
from megatron_pipemem.config.yaml_text import write_yaml
from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.files import check_writable, write_whole
from megatron_pipemem.launch.grid.config import GridPoint, Settings, label
from megatron_pipemem.launch.grid.results import Result, collect, read_result, write_result
from megatron_pipemem.reading import read_json


@dataclass(frozen=True)
class _PointEntry:
    """Hold what the index says of a point; see ``GridPoint``."""

    settings: Settings
    changes: Settings


class Store:
    """A grid's folder.

    Args:
        folder: of the grid.
    """

    def __init__(self, folder: Path):
        self.folder = folder.absolute()

    @property
    def _index(self) -> Path:
        return self.folder / "grid.json"

    def exists(self) -> bool:
        """Return whether there is a grid in the folder."""
        return self._index.exists()

    def place(self, index: int) -> Path:
        """Return the folder of a point."""
        return self.folder / "points" / f"{index:03}"

    def log(self, index: int) -> Path:
        return self.place(index) / "log.txt"

    def run_file(self, index: int) -> Path:
        return self.place(index) / "run.yaml"

    def check_place(self) -> None:
        """Raises:
        OutputError: there can be no such folder.
        """
        check_writable(self.folder / ".lock")

    def create(self, source: Path, points: Sequence[GridPoint]) -> None:
        """Write every point's run, and the result of those that are not worth starting.

        The index comes last: a folder without one was left half made, and is made again.
        """
        for point in points:
            self._write(point)
        index = {
            "grid": str(source),
            "points": [asdict(_PointEntry(point.settings, point.changes)) for point in points],
        }
        write_whole(self._index, json.dumps(index, indent=2) + "\n")

    def resume(self, points: Sequence[GridPoint]) -> None:
        """Take over what has become of points that were not worth starting: they are judged, and written, anew.

        Raises:
            UnsupportedError: the folder belongs to a grid with other points.
        """
        self._check_same(points)
        for point, result in zip(points, self.results(), strict=True):
            if result is not None and result.status == "infeasible":
                self._write(point)

    def settings(self) -> list[Settings]:
        """Return the settings of all points, in their order.

        Raises:
            ConfigError: the folder holds no grid.
        """
        return [entry.settings for entry in self._entries()]

    def run(self, index: int) -> Run:
        return load(self.run_file(index), Run)

    def results(self) -> list[Result | None]:
        """Return the results of all points; ``None`` for those that have not ended."""
        return [read_result(self._result_file(index)) for index in range(len(self.settings()))]

    def open_points(self) -> list[int]:
        """Return the points that are to be started: those without a result, and those that failed."""
        return [index for index, result in enumerate(self.results()) if result is None or result.status == "failed"]

    def begin(self, index: int) -> None:
        """Forget the result of a point that is started again: should that come to no end, it has none."""
        self._result_file(index).unlink(missing_ok=True)

    def finish(self, index: int, exit_code: int) -> Result:
        """Collect and keep the result of a point whose training has ended."""
        return self._keep(collect(index, self.settings()[index], self.run(index), self.log(index), exit_code))

    def fail(self, index: int, reason: str) -> Result:
        """Keep the result of a point that could not be trained."""
        return self._keep(Result(index, self.settings()[index], "failed", reason))

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Claim to be the only one that starts points of this grid.

        Raises:
            UnsupportedError: another process does.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            if not try_lock(lock):
                raise UnsupportedError(
                    "busy", f"another pipemem grid works in {self.folder}; wait for it, or choose another --output"
                )
            yield

    def _write(self, point: GridPoint) -> None:
        if point.run is not None:
            run = replace(point.run, output=str(self.place(point.index)))
            write_whole(self.run_file(point.index), write_yaml(settings_of(run)))
        if point.reason is None:
            self.begin(point.index)
        else:
            self._keep(Result(point.index, point.settings, "infeasible", point.reason))

    def _check_same(self, points: Sequence[GridPoint]) -> None:
        there = self._entries()
        if len(there) != len(points):
            raise self._other(f"{len(there)} points, not {len(points)}")
        for point, entry in zip(points, there, strict=True):
            now = json.loads(json.dumps(point.changes))
            for key in [*entry.changes, *now]:
                before, after = (_shown(changes, key) for changes in (entry.changes, now))
                if before != after:
                    raise self._other(f"other points: of {label(entry.settings)}, {key} {before}, and now {after}")

    def _other(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            "exists-already",
            f"{self.folder} holds a grid with {what}; choose another --output, or undo what has changed in the grid's file "
            "and --set",
        )

    def _entries(self) -> list[_PointEntry]:
        if not self.exists():
            raise ConfigError("wrong-file", "holds no grid; give the folder that pipemem grid wrote", file=self.folder)
        index = read_json(self._index, "a grid")
        try:
            return [typed(entry, _PointEntry) for entry in index["points"]]
        except (KeyError, TypeError, ConfigError) as error:
            raise ConfigError(
                "wrong-file", "is no index of a grid; give the folder that pipemem grid wrote", file=self._index
            ) from error

    def _keep(self, result: Result) -> Result:
        write_result(result, self._result_file(result.index))
        return result

    def _result_file(self, index: int) -> Path:
        return self.place(index) / "result.json"


def store_of_point(place: Path) -> tuple[Store, int]:
    """Return the grid that a point's folder belongs to, and the point's number.

    Raises:
        ConfigError: it is no point's folder.
    """
    place = place.absolute()
    if place.parent.name != "points" or not place.name.isdigit():
        raise ConfigError("wrong-file", "is no folder of a grid's point; give one like FOLDER/points/007", file=place)
    return Store(place.parents[1]), int(place.name)


def try_lock(file: IO[str]) -> bool:
    """Lock an open file for as long as this process, or a child that inherited it, lives; False if another holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _shown(changes: Settings, key: str) -> str:
    return f"is {changes[key]!r}" if key in changes else "is the run's own"
