"""A schedule: a placement, and for every device the order of its compute actions."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property

from megatron_pipemem.errors import ScheduleFormatError
from megatron_pipemem.schedule.action import COMPUTE, Action, Kind
from megatron_pipemem.schedule.placement import Placement

Order = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """Immutable. Says what runs where and in which order, not when and not how messages travel.

    Args:
        name: the name it was built under, or ``csv`` for an imported one.
        placement: which device holds which stage.
        num_microbatches: microbatches of one step.
        orders: one tuple of compute actions (F, I, W, B) per device.
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: tuple[Order, ...]

    @property
    def num_devices(self) -> int:
        return self.placement.num_devices

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(action.kind is Kind.I for order in self.orders for action in order)

    @cached_property
    def digest(self) -> str:
        """Hash of everything that affects execution. All ranks of a run compare it before the first step."""
        text = repr((self.placement.devices, self.num_microbatches)) + self.to_csv()
        return hashlib.sha256(text.encode()).hexdigest()

    def forward_only(self) -> Schedule:
        """The same schedule with nothing but its forwards, for evaluation."""
        return Schedule(
            f"{self.name} (forward only)",
            self.placement,
            self.num_microbatches,
            tuple(tuple(a for a in order if a.kind is Kind.F) for order in self.orders),
        )

    def to_csv(self) -> str:
        """One line per device, one action per cell, as torch's ``_dump_csv`` writes compute-only schedules."""
        return "".join(",".join(map(str, order)) + "\n" for order in self.orders)

    @classmethod
    def from_csv(cls, text: str, dialect: str = "pipemem", name: str = "csv") -> Schedule:
        """Read what ``to_csv`` writes. The placement is recovered from which device runs which stage.

        Nothing is validated beyond the form: pass the result to ``validate``.

        Args:
            text: one line per device; empty cells are idle steps and are dropped.
            dialect: ``pipemem`` reads F, I, W, B (full backward). ``torch`` reads both generations of
                torch.distributed.pipelining: the current letters are ours, the older files write ``B`` for the input
                gradient and ``BW`` for the full backward (``is_older_torch`` tells which). Messages and sharding
                actions of its lowered files are dropped, ``lower`` derives our own; an ``OVERLAP_F_B`` pair is read as
                its two actions in turn.
            name: name of the resulting schedule.

        Raises:
            ScheduleFormatError: with the line and the cell, when a cell is not a compute action, or when a stage stands
                on two devices or on none.
        """
        orders = _parse_cells(text, dialect)
        devices: dict[int, int] = {}
        highest = -1
        for device, (line, cells) in enumerate(orders):
            for column, action in cells:
                if devices.setdefault(action.stage, device) != device:
                    raise ScheduleFormatError(
                        f"stage {action.stage} is on device {device} here and on device {devices[action.stage]} above; "
                        "a stage belongs to one device",
                        line=line,
                        column=column,
                    )
                highest = max(highest, action.microbatch or 0)
        missing = sorted(set(range(len(devices))) - set(devices))
        if not devices or missing:
            raise ScheduleFormatError(f"no device runs stage {missing[0]}" if missing else "the file holds no actions")
        placement = Placement.from_devices(tuple(devices[stage] for stage in range(len(devices))))
        return cls(name, placement, highest + 1, tuple(tuple(a for _, a in cells) for _, cells in orders))


@dataclass(frozen=True)
class Program:
    """A lowered schedule: what the executor interprets.

    Args:
        schedule: the schedule it was lowered from.
        actions: one tuple per device: the compute actions in the schedule's order, with messages and whole-stage
            actions between them.
    """

    schedule: Schedule
    actions: tuple[Order, ...]

    @property
    def placement(self) -> Placement:
        return self.schedule.placement


def _parse_cells(text: str, dialect: str) -> list[tuple[int, list[tuple[int, Action]]]]:
    """``[(line, [(column, action)])]`` for every non-empty line."""
    if dialect not in ("pipemem", "torch"):
        raise ScheduleFormatError(f"unknown dialect {dialect!r}; use pipemem or torch")
    rows = [
        (number, [(column, cell.strip()) for column, cell in enumerate(line.split(","), start=1) if cell.strip()])
        for number, line in enumerate(text.removeprefix(_BYTE_ORDER_MARK).splitlines(), start=1)
        if line.strip(", \t")
    ]
    older_torch = dialect == "torch" and is_older_torch(text)
    parsed = []
    for line, cells in rows:
        actions = []
        for column, cell in cells:
            for part in _from_torch(cell, older_torch) if dialect == "torch" else (cell,):
                try:
                    action = Action.parse(part)
                except ScheduleFormatError as error:
                    raise ScheduleFormatError(str(error), line=line, column=column) from None
                if action.kind not in COMPUTE:
                    raise ScheduleFormatError(
                        f"{cell} is not a compute action; keep F, I, W and B only, messages are derived from them",
                        line=line,
                        column=column,
                    )
                actions.append((column, action))
        parsed.append((line, actions))
    return parsed


def is_older_torch(text: str) -> bool:
    """Whether a torch file uses the letters from before 2.6: ``BW``, or ``W`` without any ``I``."""
    letters = {cell.strip().strip("0123456789") for line in text.splitlines() for cell in line.split(",")}
    return "BW" in letters or ("W" in letters and "I" not in letters)


# Spreadsheets put it at the start of the file.
_BYTE_ORDER_MARK = "\ufeff"

_TORCH_COMMUNICATION = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)")
_TORCH_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def _from_torch(cell: str, older: bool) -> list[str]:
    """The compute actions of one torch cell in our letters: none in a message, two in an overlapped pair."""
    if _TORCH_COMMUNICATION.fullmatch(cell):
        return []
    overlap = _TORCH_OVERLAP.fullmatch(cell)
    parts = overlap[1].split(";") if overlap else [cell]
    if not older:
        return parts
    return [part.replace("BW", "B") if "BW" in part else part.replace("B", "I") for part in parts]
