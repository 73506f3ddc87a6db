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
    """Say how a model is cut, and what says so.

    Args:
        chunks: model chunks per pipeline rank that it leads to; no whole number where the ranks cannot share its pieces evenly.
        words: what it is, for messages: ``--num-virtual-stages-per-pipeline-rank 4``.
        remedy: ``remedy(chunks)`` tells the user how to get another number of chunks.
    """

    chunks: float
    words: str
    remedy: Callable[[int], str]


def known_chunks(placement: Placement) -> int:
    """Return the model chunks per rank that Megatron knows of: those of one replica of the model."""
    return placement.num_chunks // placement.replicas


def check_cut(cut: Cut, schedule: str, placement: Placement) -> None:
    """Check that the model has as many chunks as the schedule's placement.

    Args:
        cut: how the model is cut, and what says so.
        schedule: its name, for the error's sentence.
        placement: of its stages.

    Raises:
        UnsupportedError: the schedule's placement has another number of chunks than the model.
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
    """Return the placements that a family may have on a model, or those among which ``auto`` chooses.

    Args:
        schedule: a family or ``auto``.
        options: of the schedule, as the user gave them.
        num_devices: pipeline ranks.
        cut: of the model; ``None`` where it is left to the schedule.

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
