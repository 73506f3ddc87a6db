"""The folder of a grid.

FOLDER/grid.json                 the grid's file and the settings of all points
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
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import yaml

from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.planner.grid.config import Point, Settings, placed
from megatron_pipemem.planner.grid.results import Result, collect, read_result, write_result
from megatron_pipemem.planner.loading import load
from megatron_pipemem.planner.runs import Run


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
        """Whether there is a grid in the folder."""
        return self._index.exists()

    def place(self, index: int) -> Path:
        """The folder of a point."""
        return self.folder / "points" / f"{index:03}"

    def log(self, index: int) -> Path:
        return self.place(index) / "log.txt"

    def run_file(self, index: int) -> Path:
        return self.place(index) / "run.yaml"

    def create(self, source: Path, points: Sequence[Point]) -> None:
        """Write every point's run, and the result of those that are not worth starting.

        The index comes last: a folder without one was left half made, and is made again.
        """
        for point in points:
            place = self.place(point.index)
            place.mkdir(parents=True, exist_ok=True)
            if point.run is not None:
                run = asdict(placed(point, place).run)
                self.run_file(point.index).write_text(yaml.safe_dump(_plain(run), sort_keys=False), encoding="utf-8")
            if point.reason is not None:
                write_result(Result(point.index, point.settings, "infeasible", point.reason), place / "result.json")
        index = {"grid": str(source), "points": [point.settings for point in points]}
        beside = self._index.with_suffix(".new")
        beside.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        beside.replace(self._index)

    def check_same(self, points: Sequence[Point]) -> None:
        """Raises UnsupportedError when the folder belongs to a grid with other points."""
        if self.settings() != [json.loads(json.dumps(point.settings)) for point in points]:
            raise UnsupportedError(
                f"{self.folder} holds a grid with other points; choose another --output, or undo the changes of the grid's file"
            )

    def settings(self) -> list[Settings]:
        """Of all points, in their order.

        Raises:
            ConfigError: the folder holds no grid.
        """
        try:
            return json.loads(self._index.read_text(encoding="utf-8"))["points"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"holds no grid ({error}); give the folder that pipemem grid wrote", file=self.folder
            ) from error

    def run(self, index: int) -> Run:
        return load(self.run_file(index), Run)

    def results(self) -> list[Result | None]:
        """Of all points; ``None`` for those that have not ended."""
        return [read_result(self.place(index) / "result.json") for index in range(len(self.settings()))]

    def open_points(self) -> list[int]:
        """Points that are to be started: those without a result, and those that failed."""
        return [index for index, result in enumerate(self.results()) if result is None or result.status == "failed"]

    def finish(self, index: int, exit_code: int) -> Result:
        """Collect and keep the result of a point whose training has ended."""
        result = collect(index, self.settings()[index], self.run(index), self.log(index), exit_code)
        write_result(result, self.place(index) / "result.json")
        return result

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Be the only one that starts points of this grid.

        Raises:
            UnsupportedError: another process does.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            if not try_lock(lock):
                raise UnsupportedError(
                    f"another pipemem grid works in {self.folder}; wait for it, or choose another --output"
                )
            yield


def store_of_point(place: Path) -> tuple[Store, int]:
    """The grid that a point's folder belongs to, and the point's number.

    Raises:
        ConfigError: it is no point's folder.
    """
    place = place.absolute()
    if place.parent.name != "points" or not place.name.isdigit():
        raise ConfigError("is no folder of a grid's point; give one like FOLDER/points/007", file=place)
    return Store(place.parents[1]), int(place.name)


def try_lock(file: IO[str]) -> bool:
    """Lock an open file for as long as this process, or a child that inherited it, lives; False if another holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _plain(value: Any) -> Any:
    """Tuples as lists, which YAML has."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
