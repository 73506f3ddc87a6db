"""The folder of a grid, and the result of each point, which is read from its log and report.

FOLDER/grid.json                 the path of the grid's file, and the settings and changes of all points
FOLDER/points/007/run.yaml       the complete configuration of point 7, which does not depend on other files
FOLDER/points/007/log.txt        the output of its training, over all starts
FOLDER/points/007/report.json    predicted and counted bytes, bubbles, losses
FOLDER/points/007/result.json    its result, after it has ended
"""

from __future__ import annotations

import fcntl
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.files import check_writable, read_json, write_whole
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.tools.config.loading import load, settings_of, typed, write_yaml
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.grid.points import GridPoint, Settings, label
from megatron_pipemem.tools.report.run import opened_report
from megatron_pipemem.values import check_magnitudes, refuse_if

Status = Literal["done", "failed", "infeasible"]

_ITERATION = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")
_FAILURE = re.compile(r"rank \d+ failed: .*")


@dataclass(frozen=True)
class Result:
    """The result of one point of a grid. Tuples of bytes and of bubble rates have one entry per pipeline rank."""

    index: int
    settings: dict[str, Any]
    status: Status  # infeasible points were never started
    reason: str | None = None  # why the status is not "done"
    exit_code: int | None = None
    devices: int | None = None
    seconds_per_step: float | None = None  # median without the first step of a start, by the training script's clock
    tokens_per_second: float | None = None  # over all devices
    predicted_peak_bytes: tuple[int | None, ...] = ()  # of activations; None under Megatron's own schedule
    counted_peak_bytes: tuple[int | None, ...] = ()  # of activations, counted in autograd
    bytes_of_1f1b: int | None = None  # peak of 1F1B for the same model; None if unknown
    predicted_bubble_rate: tuple[float | None, ...] = ()
    measured_bubble_rate: tuple[float | None, ...] = ()
    losses: tuple[float | None, ...] = ()  # of the steps since the last start; None for one that is not finite

    def __post_init__(self) -> None:
        uneven = len(self.predicted_peak_bytes) != len(self.counted_peak_bytes)
        refuse_if(uneven, "wrong-file", "counted_peak_bytes", "has another number of ranks than predicted_peak_bytes")

    @property
    def peak_bytes(self) -> int | None:
        """The counted peak bytes of the rank that holds most; ``None`` if bytes were not counted."""
        return _most(self.counted_peak_bytes)

    @property
    def share_of_1f1b(self) -> float | None:
        """``peak_bytes`` divided by those of 1F1B; ``None`` if either is unknown."""
        return self.peak_bytes / self.bytes_of_1f1b if self.peak_bytes and self.bytes_of_1f1b else None

    @property
    def predicted_peak(self) -> int | None:
        """The largest predicted peak bytes of any rank; ``None`` without predictions."""
        return _most(self.predicted_peak_bytes)

    @property
    def peaks_agree(self) -> bool | None:
        """Whether each rank's counted peak equals its predicted peak, if it has one; ``None`` if no rank has one."""
        pairs = list(zip(self.predicted_peak_bytes, self.counted_peak_bytes, strict=True))
        agreements = [predicted == counted for predicted, counted in pairs if predicted is not None]
        return all(agreements) if agreements else None


def _most(peaks: Sequence[int | None]) -> int | None:
    return max((peak for peak in peaks if peak is not None), default=None)


def collect(index: int, settings: dict[str, Any], run: Run, log: Path, exit_code: int) -> Result:
    """Return the result of a point whose training has ended, from its log and the run's report.

    ``index`` is the number of the point, and ``exit_code`` that of its training. No file is written. The status is
    ``failed`` if the exit code is not 0, or if the report is missing or wrong.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    path = run.report
    if exit_code or not path.exists():
        reason = _why(text, exit_code)
        return Result(index, settings, "failed", reason, exit_code, run.parallelism.ranks)
    seconds = step_seconds(text)
    tokens = run.parallelism.global_batch * run.model.sequence
    speed = None if not seconds else tokens / seconds
    ran = Result(index, settings, "done", None, exit_code, run.parallelism.ranks, seconds, speed)
    try:
        return _read(asdict(ran) | _report(path), path)
    except ConfigError as error:
        return replace(ran, status="failed", reason=str(error), seconds_per_step=None, tokens_per_second=None)


def _report(path: Path) -> dict[str, Any]:
    """Read a run's report, and return the fields of ``Result`` that it has."""
    keys = ("predicted_peak_bytes", "counted_peak_bytes", "predicted_bubble_rate", "measured_bubble_rate")
    with opened_report(path) as report:
        of_run = {"losses": tuple(report["losses"]), "bytes_of_1f1b": report.get("bytes_of_1f1b")}
        return {key: tuple(rank[key] for rank in report["ranks"]) for key in keys} | of_run


def step_seconds(log: str) -> float | None:
    """Return the median seconds of the steps in the text of a training log; ``None`` if it has none.

    The first step after every start is left out if there are others, because it opens channels.
    """
    steps = [(int(number), float(milliseconds)) for number, milliseconds in _ITERATION.findall(log)]
    later = [time for (before, _), (number, time) in zip(steps, steps[1:], strict=False) if number == before + 1]
    times = later or [time for _, time in steps]
    return statistics.median(times) / 1e3 if times else None


def read_result(path: Path) -> Result | None:
    """Read a point's result from a JSON file; return ``None`` if the file does not exist.

    Raise a ConfigError if the file is not a result.
    """
    if not path.exists():
        return None
    return _read(read_json(path, "a result"), path)


def _read(raw: Any, path: Path) -> Result:
    """Return the parsed JSON of the file ``path`` as the result of a point, or raise a ConfigError if it is none."""
    try:
        if not isinstance(raw, dict):
            raise ConfigError("wrong-file", "is not the result of a grid's point")
        check_magnitudes(raw)
        return typed(raw, Result)
    except ConfigError as error:
        raise ConfigError(
            error.code,
            f"{error.message}; delete this file, then pipemem grid GRID --resume trains this point only",
            key=error.key,
            file=path,
        ) from error


def _why(log: str, exit_code: int) -> str:
    """Return the reason why a training failed: an error in the log, or the exit code and the log's last line."""
    if failures := _FAILURE.findall(log):
        return failures[-1]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = f"; the log ends: {lines[-1]}" if lines else ""
    return f"exit code {exit_code}{last}" if exit_code else f"it ended without a report{last}"


@dataclass(frozen=True)
class _PointEntry:
    """The entry of a point in ``grid.json``. The fields have the same meaning as in ``GridPoint``."""

    settings: Settings
    changes: Settings


class Store:
    """The folder of a grid, with the configurations, logs and results of its points."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()

    @property
    def _index(self) -> Path:
        return self.folder / "grid.json"

    def exists(self) -> bool:
        """Return whether the folder has a complete grid."""
        return self._index.exists()

    def place(self, index: int) -> Path:
        """Return the folder of a point."""
        return self.folder / "points" / f"{index:03}"

    def log(self, index: int) -> Path:
        return self.place(index) / "log.txt"

    def run_file(self, index: int) -> Path:
        return self.place(index) / "run.yaml"

    def check_place(self) -> None:
        """Raise an OutputError if no file can be written in the folder."""
        check_writable(self.folder / ".lock")

    def create(self, source: Path, points: Sequence[GridPoint]) -> None:
        """Write the configuration of every point, and the results of points that cannot work.

        The file ``grid.json`` is written last. A folder without it is incomplete, and is written again.
        """
        for point in points:
            self._write(point)
        index = {
            "grid": str(source),
            "points": [asdict(_PointEntry(point.settings, point.changes)) for point in points],
        }
        write_whole(self._index, json.dumps(index, indent=2) + "\n")

    def resume(self, points: Sequence[GridPoint]) -> None:
        """Write the points again that could not work before, because they may be able to work now.

        Raise an UnsupportedError if the grid has other points than the folder.
        """
        self._check_same(points)
        for point, result in zip(points, self.results(), strict=True):
            if result is not None and result.status == "infeasible":
                self._write(point)

    def settings(self) -> list[Settings]:
        """Return the settings of all points, in the order of the grid's file.

        Raise a ConfigError if the folder has no grid.
        """
        return [entry.settings for entry in self._entries()]

    def run(self, index: int) -> Run:
        return load(self.run_file(index), Run)

    def results(self) -> list[Result | None]:
        """Return the results of all points; ``None`` in place of those that have not ended."""
        return [read_result(self._result_file(index)) for index in range(len(self.settings()))]

    def open_points(self) -> list[int]:
        """Return the numbers of the points to start: those without a result, and those that failed."""
        return [index for index, result in enumerate(self.results()) if result is None or result.status == "failed"]

    def discard_result(self, index: int) -> None:
        """Delete the result of a point before it starts again, so that an interrupted point has none."""
        self._result_file(index).unlink(missing_ok=True)

    def finish(self, index: int, exit_code: int) -> Result:
        """Write and return the result of a point whose training has ended with ``exit_code``."""
        return self._keep(collect(index, self._settings(index), self.run(index), self.log(index), exit_code))

    def fail(self, index: int, reason: str) -> Result:
        """Write and return the result of a point that could not be trained."""
        return self._keep(Result(index, self._settings(index), "failed", reason))

    def _settings(self, index: int) -> Settings:
        settings = self.settings()
        if index >= len(settings):
            message = f"has {len(settings)} points and no point {index}; give the folder of one of its points"
            raise ConfigError("wrong-file", message, file=self._index)
        return settings[index]

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder within this block, so that no other process starts points of the grid.

        Raise an UnsupportedError if another process has locked it.
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
            self.discard_result(point.index)
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

    def _other(self, difference: str) -> UnsupportedError:
        return UnsupportedError(
            "exists-already",
            f"{self.folder} has a grid with {difference}; choose another --output, or undo the changes of the grid's "
            "file and --set",
        )

    def _entries(self) -> list[_PointEntry]:
        if not self.exists():
            raise ConfigError("wrong-file", "holds no grid; give the output folder of pipemem grid", file=self.folder)
        index = read_json(self._index, "a grid")
        try:
            return [typed(entry, _PointEntry) for entry in index["points"]]
        except (KeyError, TypeError, ConfigError) as error:
            message = "is not the index of a grid; give the output folder of pipemem grid"
            raise ConfigError("wrong-file", message, file=self._index) from error

    def _keep(self, result: Result) -> Result:
        """Write a point's result to its JSON file, and return the result."""
        write_whole(self._result_file(result.index), json.dumps(asdict(result), indent=2, allow_nan=False) + "\n")
        return result

    def _result_file(self, index: int) -> Path:
        return self.place(index) / "result.json"


def store_of_point(place: Path) -> tuple[Store, int]:
    """Return the grid's store and the point's number, given the folder of a point.

    Raise a ConfigError if the path is not one like ``FOLDER/points/007``.
    """
    place = place.absolute()
    if place.parent.name != "points" or not place.name.isdigit():
        raise ConfigError("wrong-file", "is not the folder of a point; give one like FOLDER/points/007", file=place)
    return Store(place.parents[1]), int(place.name)


def try_lock(file: IO[str]) -> bool:
    """Lock an open file, and return whether that succeeded.

    The lock lasts until this process and all children that inherit the file have closed it or ended.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _shown(changes: Settings, key: str) -> str:
    return f"is {shortened(changes[key])}" if key in changes else "is the run's own"
