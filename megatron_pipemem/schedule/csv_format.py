"""Text tables of schedules: one line per device, one action per comma-separated cell. Empty cells are idle steps.

Three notations are read. This package and torch.distributed.pipelining since 2.6 write ``F``, ``I`` (input gradient),
``W`` (weight gradient) and ``B`` (full backward). Before 2.6 torch wrote ``B`` for the input gradient and ``BW`` for
the full backward. Both versions of torch write gradient messages as ``SEND_B`` and ``RECV_B``. This package writes
``SEND_I`` and ``RECV_I``.

The header, a first line that starts with ``#``, has properties that a table of actions cannot show: ``# replicas=2
devices=0-1-1-0`` (the device of every stage, if there are replicas or some stages run nothing), ``idle=2`` (devices
without actions, which have no line), ``# slices=4`` (parts of every microbatch; ``slices=1-4-2`` if they differ),
``# vocabulary=1`` (barriers), or ``# update_every=4 versions_kept=2 update_delay=1``.
Schedules without such properties have no header, so that other readers of the format accept their files.

A forward and a backward that run together share a cell, as torch writes them: ``(3F2;1B0)OVERLAP_F_B``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from megatron_pipemem.errors import ScheduleFormatError
from megatron_pipemem.files import read_text
from megatron_pipemem.schedule.action import MESSAGES, MOST_DIGITS, ORDERED, VOCABULARY, Action, Kind
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.units import Units

MOST_CELLS = 1_000_000
"""The most cells of a table, empty ones included. A cell takes 400 bytes, and a schedule of as many actions a minute."""
_FROM_ZERO = ("devices", "idle", "update_delay")
_SEVERAL = ("devices", "idle", "slices")
_FORMER_NAMES = {"pieces": "slices"}
"""Names in files that earlier versions wrote."""


class Header(NamedTuple):
    """The values of a header. A field is named like its word in the header, and defaults hold for missing words."""

    replicas: int = 1
    devices: tuple[int, ...] = ()  # the device of every stage; empty if the table shows it
    idle: tuple[int, ...] = ()  # devices without a line of their own
    slices: tuple[int, ...] = (1,)  # parts of every microbatch, or one number per microbatch
    vocabulary: int = 0  # barriers of vocabulary parallelism
    update_every: int | None = None  # fields of ``WeightUpdates``
    versions_kept: int | None = None
    update_delay: int | None = None


def split_lines(text: str) -> list[str]:
    """Split a text at line ends. ``str.splitlines`` would also split at other characters, such as form feeds."""
    return _LINE_END.split(text)


def write_header(header: Header) -> str:
    """Return the header as one line with a line end; an empty text if all fields have their defaults."""
    said = ((name, value) for name, value in header._asdict().items() if value != Header._field_defaults[name])
    words = [f"{name}={'-'.join(map(str, value)) if name in _SEVERAL else value}" for name, value in said]
    return f"# {' '.join(words)}\n" if words else ""


def read_header(text: str) -> tuple[Header, str]:
    """Return the header of a text, and the text with an empty line in place of the header line.

    A text without a header line is returned unchanged, with a ``Header`` of defaults. Raise a ScheduleFormatError if
    there are two header lines, or if one has a wrong value.
    """
    lines = split_lines(text)
    marked = [number for number, line in enumerate(lines) if line.lstrip(_BLANK).startswith("#")]
    if not marked:
        return Header(), text
    first = marked[0]
    bad_header = partial(ScheduleFormatError, "bad-header", line=first + 1)
    if len(marked) > 1:
        raise ScheduleFormatError(
            "bad-header", "the file has a second line that starts with #; join the two", line=marked[1] + 1
        )
    header = Header(**_parse(lines[first].strip(_BLANK + "\r,").removeprefix("#"), first + 1))
    lines[first] = ""
    replicas, devices, idle, *_ = header
    if devices and (len(devices) % replicas or len(set(devices)) <= max(devices)):
        raise bad_header(
            "devices must name the device of every stage, as in devices=0-1-1-0: all devices from 0 up, and equally many "
            f"stages for each of {replicas} replicas"
        )
    if list(idle) != sorted(set(idle)) or (idle and (not devices or idle[-1] > max(devices))):
        raise bad_header(
            "idle must name those of the devices in devices=... that have no line, each once and in rising order, as in "
            "devices=0-1-2 idle=0-2; devices must be given too"
        )
    if (parts := sum(header.slices)) > MOST_CELLS:
        raise bad_header(f"{parts} slices are more than the {MOST_CELLS:,} cells of a schedule")
    missing = [name for name in ("update_every", "versions_kept") if getattr(header, name) is None]
    if missing and header[-3:] != (None, None, None):
        raise bad_header(f"weight updates need {missing[0]} too; add {missing[0]}=1, for example")
    return header, "\n".join(lines)


def _parse(line: str, number: int) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for word in line.split():
        name, _, value = word.partition("=")
        name = _FORMER_NAMES.get(name, name)
        numbers = value.split("-")
        if (
            name not in Header._fields
            or (len(numbers) > 1 and name not in _SEVERAL)
            or not all(_NUMBER.fullmatch(digits) and int(digits) >= (name not in _FROM_ZERO) for digits in numbers)
        ):
            raise ScheduleFormatError(
                "bad-header",
                f"{shortened(word)} has an unknown name or a wrong value; write name=number, as in replicas=2, with "
                f"{MOST_DIGITS} digits at most (names: {', '.join(Header._fields)})",
                line=number,
            )
        settings[name] = tuple(map(int, numbers)) if name in _SEVERAL else int(value)
    return settings


_LINE_END = re.compile(r"\r\n|\r|\n")
_NUMBER = re.compile(rf"[0-9]{{1,{MOST_DIGITS}}}")
# Spreadsheets put the first character at the start of a file.
_BLANK = "\ufeff \t"


DIALECTS = ("auto", "pipemem", "torch", "torch-new", "torch-old")
"""Names of dialects for readers. ``torch`` leaves the version of torch open, and ``auto`` everything."""

LETTERS = {
    "pipemem": "F, I, W, B (gradient messages SEND_I, RECV_I)",
    "torch-new": "torch since 2.6: F, I, W, B (gradient messages SEND_B, RECV_B)",
    "torch-old": "torch before 2.6: F, B as input gradient, W, BW as full backward",
}


_MOST_BYTES_OF_CELL = 32
_SEPARATORS = ",;\r\n"


class Cell(NamedTuple):
    """An action with its line and column in the file, from 1. ``(3F2;1B0)OVERLAP_F_B`` gives two cells."""

    action: Action
    line: int
    column: int

    def fault(self, code: str, message: str) -> ScheduleFormatError:
        """Return an error that names this cell's line and column."""
        return ScheduleFormatError(code, message, line=self.line, column=self.column)


@dataclass(frozen=True)
class Table:
    """The contents of a schedule file in this package's notation, messages included."""

    rows: tuple[tuple[Cell, ...], ...]  # the cells of every device, in order
    letters: str  # a key of ``LETTERS``
    reason: str  # ``stated``, or the sign by which the letters were detected
    ignored: dict[str, int]  # number of occurrences of actions without meaning here, for example ``{"UNSHARD": 4}``
    pairs: frozenset[Action]  # the forwards that run together with the backward after them
    in_turn: int  # number of torch's pairs of two backwards, which are read as two actions in turn
    header: Header = Header()

    @property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """Return the orders of the schedule: the actions without messages and gradient reductions."""
        return tuple(tuple(cell.action for cell in row if cell.action.kind in ORDERED) for row in self.rows)

    @property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Return all actions of every device."""
        return tuple(tuple(cell.action for cell in row) for row in self.rows)

    def cell_of(self, device: int, action: Action) -> Cell | None:
        """Return the first cell of a device that has this action; ``None`` if there is none."""
        return next((cell for cell in self.rows[device] if cell.action == action), None)

    @property
    def has_messages(self) -> bool:
        return any(cell.action.kind in MESSAGES for _, cell in self.placed)

    @property
    def placed(self) -> Iterator[tuple[int, Cell]]:
        """Return all cells, each with its device, device by device."""
        return ((device, cell) for device, row in enumerate(self.rows) for cell in row)

    def require_orders_only(self) -> None:
        """Raise a ScheduleFormatError for the first message or gradient reduction in the table, if there is one."""
        for _, cell in self.placed:
            if cell.action.kind not in ORDERED:
                raise cell.fault(
                    "not-computed",
                    f"{cell.action} is not a compute action; remove all messages and gradient reductions, because this "
                    "package adds them by itself",
                )

    def placement(self) -> Placement:
        """Return the placement in the header, or else the one that follows from the stages on every device's line."""
        if not any(self.orders):
            raise ScheduleFormatError(
                "no-actions", "the file holds no actions; write a line per device, one action per cell, as in 0F0,0B0"
            )
        if self.header.devices:
            placement = Placement.from_devices(self.header.devices, self.header.replicas)
            if len(self.rows) != placement.num_devices:
                raise ScheduleFormatError(
                    "bad-header",
                    f"the file has actions for {len(self.rows)} devices, but the line that starts with # names "
                    f"{placement.num_devices}; write a line for each, or name those without actions, as in idle=1",
                )
            return placement
        devices: dict[int, int] = {}
        # Vocabulary actions have a device in place of a stage.
        of_stages = [(device, cell) for device, cell in self.placed if cell.action.kind not in VOCABULARY]
        for device, cell in of_stages:
            stage = cell.action.stage
            if devices.setdefault(stage, device) != device:
                raise cell.fault(
                    "bad-placement",
                    f"stage {stage} is on device {device} here and on device {devices[stage]} above; a stage belongs to "
                    "one device",
                )
        missing = sorted(set(range(len(devices))) - set(devices))
        if missing:
            stray = next(cell for _, cell in of_stages if cell.action.stage > missing[0])
            raise stray.fault(
                "bad-placement",
                f"{stray.action} belongs to stage {stray.action.stage}, but no device runs stage {missing[0]}; number stages "
                "from 0 without a gap",
            )
        empty = sorted(set(range(len(self.rows))) - set(devices.values()))
        if empty:
            raise ScheduleFormatError(
                "bad-placement",
                f"device {empty[0]} runs no stage; give it one, remove its line, or name the device of every stage in a "
                "line that starts with #, as in # devices=0-1-1-0",
            )
        if len(devices) % self.header.replicas:
            raise ScheduleFormatError(
                "bad-header",
                f"{len(devices)} stages cannot be divided into {self.header.replicas} replicas; correct the line that "
                "starts with #",
            )
        return Placement.from_devices(tuple(devices[stage] for stage in range(len(devices))), self.header.replicas)

    def units(self, num_microbatches: int | None = None) -> Units:
        """Return the units of a step with this number of microbatches; ``None`` for the number that the table shows.

        The table shows as many units ``n`` as most stages have exactly the forwards 0 to ``n - 1``. A wrong number on a
        few stages is then reported as out of range, and not as a unit that all other stages lack. If no stage has such
        forwards, ``n`` follows from the highest number of any action, and is at most the number of actions.
        """
        first, *others = self.header.slices
        if others:
            return Units(tuple(accumulate(self.header.slices)))
        if num_microbatches is None:
            num_microbatches = -(-self._num_units() // first)
        return Units.equal(num_microbatches, first)

    def _num_units(self) -> int:
        forwards: dict[int, set[int]] = {}
        stages = len(self.header.devices) or max((cell.action.stage for _, cell in self.placed), default=0) + 1
        model_stages = max(1, stages // self.header.replicas)  # replicas share the microbatches
        for order in self.orders:
            for kind, stage, microbatch in order:
                if kind is Kind.F:
                    forwards.setdefault(stage % model_stages, set()).add(microbatch)
        votes = Counter(len(units) for units in forwards.values() if max(units) + 1 == len(units))
        if votes:
            return max(votes, key=lambda count: (votes[count], count))
        numbers = [action.microbatch for order in self.orders for action in order]
        return min(max(numbers, default=-1) + 1, len(numbers))


def read_schedule_file(path: str | Path) -> str:
    """Return the text of a schedule file, or raise a ScheduleFormatError if it cannot be read."""
    return read_text(path, "a schedule", ScheduleFormatError, MOST_CELLS * _MOST_BYTES_OF_CELL)


def read_table(text: str, dialect: str = "auto") -> Table:
    """Return the contents of a schedule file, given its text. ``dialect`` is one of ``DIALECTS``.

    Raise a ScheduleFormatError for a wrong header, for a cell that is not an action, and for more than ``MOST_CELLS``
    cells. Orders are not checked.
    """
    if sum(map(text.count, _SEPARATORS)) >= MOST_CELLS:
        raise ScheduleFormatError(
            "too-large",
            f"a schedule has at most {MOST_CELLS:,} cells, and this text has more; give one with fewer microbatches",
        )
    if dialect not in DIALECTS:
        raise ScheduleFormatError("unknown-dialect", f"unknown dialect {shortened(dialect)}; use {', '.join(DIALECTS)}")
    header, text = read_header(text)
    lines = [
        [(number, column, cell) for column, cell in enumerate(_cells(line), start=1) if cell]
        for number, line in enumerate(split_lines(text.removeprefix(_BYTE_ORDER_MARK)), start=1)
    ]
    lines = [cells for cells in lines if cells]
    letters, reason = _letters(lines, dialect)
    ignored: Counter[str] = Counter()
    pairs: set[Action] = set()
    in_turn = 0
    rows = []
    for cells in lines:
        row = []
        for line, column, cell in cells:
            overlap = _OVERLAP.fullmatch(cell)
            read = []
            for part in overlap[1].split(";") if overlap else [cell]:
                if letters != "pipemem" and (sharding := _SHARDING.fullmatch(part)):
                    ignored[sharding[1]] += 1
                    continue
                read.append(_action(part, letters, line, column))
            row += [Cell(action, line, column) for action in read]
            if [action.kind for action in read] in _PAIRED:
                pairs.add(read[0])
            elif overlap:
                in_turn += 1
        rows.append(tuple(row))
    for device in header.idle:
        rows.insert(device, ())
    return Table(tuple(rows), letters, reason, dict(ignored), frozenset(pairs), in_turn, header)


def write_table(
    actions: Iterable[Sequence[Action]], letters: str = "pipemem", pairs: Collection[Action] = frozenset()
) -> str:
    """Return one line per device that has actions, with a pair in one cell, as in ``(3F2;1B0)OVERLAP_F_B``.

    ``letters`` is a key of ``LETTERS``; ``torch`` is ``torch-new``. ``pairs`` has the forwards that share a cell with
    the backward after them (``Schedule.pairs``).
    """
    names = _WRITTEN.get(letters, {})

    def renamed(action: Action) -> str:
        return f"{action.stage}{names[action.kind]}{action.microbatch}" if action.kind in names else str(action)

    text = renamed if names else str

    def cells(row: Sequence[Action]) -> Iterator[str]:
        if not pairs:
            yield from map(text, row)
            return
        coming = iter(row)
        for action in coming:
            second = next(coming, None) if action in pairs else None
            yield text(action) if second is None else f"({text(action)};{text(second)})OVERLAP_F_B"

    return "".join(",".join(cells(row)) + "\n" for row in actions if row)


def in_letters(message: str, letters: str) -> str:
    """Return an error message with the actions in it written in other letters, a key of ``LETTERS``."""
    names = _WRITTEN.get(letters, {})
    return _NAMED.sub(lambda match: match[1] + names.get(Kind(match[2]), match[2]) + match[3], message)


_BYTE_ORDER_MARK = "\ufeff"  # spreadsheets put it at the start of the file
_COMPUTE = re.compile(r"(?<![0-9A-Z_])(\d+)(BW|[FIWB])(?=-?\d)")
_SHARDING = re.compile(r"\s*\d+(UNSHARD|RESHARD)\s*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_PAIRED = ([Kind.F, Kind.I], [Kind.F, Kind.B])
_TORCH_ONLY = re.compile(r"\d+(?:SEND_B|RECV_B|UNSHARD|RESHARD)|OVERLAP_F_B")
_NAMED = re.compile(r"\b(\d+)(SEND_I|RECV_I|I|B)(\d+)\b")
_NEGATIVE = re.compile(r"\d+[A-Z_]+-\d+")

_GRADIENT_MESSAGES = {Kind.SEND_I: "SEND_B", Kind.RECV_I: "RECV_B"}
_WRITTEN = {
    "torch": _GRADIENT_MESSAGES,
    "torch-new": _GRADIENT_MESSAGES,
    "torch-old": {**_GRADIENT_MESSAGES, Kind.I: "B", Kind.B: "BW"},
}
_READ = {letters: {name: kind for kind, name in names.items()} for letters, names in _WRITTEN.items()}


def _cells(line: str) -> list[str]:
    return [cell.strip().strip('"').strip() for cell in line.split(",")]


def _letters(lines: list[list[tuple[int, int, str]]], dialect: str) -> tuple[str, str]:
    """Return the key of ``LETTERS`` in which a file is written, and the reason as text."""
    if dialect not in ("auto", "torch"):
        return dialect, "stated"
    cells = [cell for row in lines for _, _, cell in row]
    kinds = {kind for cell in cells for _, kind in _COMPUTE.findall(cell)}
    if "BW" in kinds:
        return "torch-old", "detected: BW occurs"
    if "W" in kinds and "I" not in kinds:
        return "torch-old", "detected: W occurs and I does not"
    if match := next(filter(None, map(_TORCH_ONLY.search, cells)), None):
        return "torch-new", f"detected: {match[0].lstrip('0123456789')} occurs, BW does not"
    if dialect == "torch":
        return "torch-new", "detected: BW does not occur"
    return "pipemem", "detected: neither BW nor messages of torch occur"


def _action(text: str, letters: str, line: int, column: int) -> Action:
    text = text.strip()
    try:
        if _NEGATIVE.fullmatch(text):
            raise ScheduleFormatError(
                "not-an-action",
                f"{shortened(text)} is not an action, because microbatches count from 0; leave the cell empty if -1 means that "
                "nothing runs there, or add 1 to every number if the whole table is off by one",
            )
        return Action.parse(text, _READ.get(letters, {}))
    except ScheduleFormatError as error:
        old = "; BW is the full backward of torch before 2.6, which the dialect torch-old reads"
        hint = old if "BW" in text and letters != "torch-old" else ""
        raise ScheduleFormatError(error.code, f"{error}{hint}", line=line, column=column) from None
