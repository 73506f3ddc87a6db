"""Check whether a schedule runs a model that is cut as the user has it cut: into how many model chunks per pipeline rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.options import AUTO, searched_placements
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import family


@dataclass(frozen=True)
class Cut:
    """Say how a model is cut, and what says so."""

    chunks: float
    """Model chunks per pipeline rank; no whole number where the ranks cannot share the model's pieces evenly."""
    words: str
    """For messages: ``--num-virtual-stages-per-pipeline-rank 4``."""
    remedy: Callable[[int], str]
    """``remedy(chunks)`` tells the user how to get another number of chunks."""


def known_chunks(placement: Placement) -> int:
    """Return the model chunks per rank that Megatron knows of: those of one replica of the model."""
    return placement.num_chunks // placement.replicas


def check_cut(cut: Cut, schedule: str, placement: Placement) -> None:
    """Check that the model has as many chunks as the schedule's placement.

    Raises:
        UnsupportedError: it has another number.
    """
    needed = known_chunks(placement)
    if needed != cut.chunks:
        raise UnsupportedError(
            "needs-chunks",
            f"schedule {schedule} runs {_counted(needed)} per pipeline rank, not {cut.chunks:g} as by {cut.words}; "
            f"{cut.remedy(needed)}",
        )


def placements_of(
    schedule: str, options: Mapping[str, Any], num_devices: int, cut: Cut | None = None
) -> tuple[Placement, ...]:
    """Return the placements that a family may have on a model, or those among which ``auto`` chooses; without a cut, the
    schedule decides.

    Raises:
        UnsupportedError: the schedule runs no model that is cut so, or cannot be built at all.
    """
    asked = dict(options)
    is_open = schedule == AUTO or ("chunks" in family(schedule).options and "waves" not in asked)
    if cut is not None and is_open and asked.get("chunks") is None:
        # Only where the options leave it open do the flags that cut the model decide.
        usual = _placements(schedule, asked, num_devices)[0]
        if cut.chunks != int(cut.chunks):
            check_cut(cut, schedule, usual)
        try:
            return _placements(schedule, asked | {"chunks": int(cut.chunks)}, num_devices)
        except UnsupportedError as error:
            raise UnsupportedError(
                "needs-chunks",
                f"schedule {schedule} does not run {_counted(int(cut.chunks))} per pipeline rank, as by {cut.words} ({error}); "
                f"{cut.remedy(known_chunks(usual))}",
            ) from error
    placements = _placements(schedule, asked, num_devices)
    if cut is not None:
        check_cut(cut, schedule, placements[0])
    return placements


def _placements(schedule: str, options: Mapping[str, Any], num_devices: int) -> tuple[Placement, ...]:
    if schedule == AUTO:
        return searched_placements(num_devices, options.get("placement"), options.get("chunks"))
    return (family(schedule).placement_on(num_devices, options),)


def _counted(chunks: int) -> str:
    return f"{chunks} model chunk{'s' * (chunks != 1)}"
