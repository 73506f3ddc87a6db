"""Check that a schedule can run a model that is cut into the user's number of chunks per pipeline rank."""

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
    """The number of model chunks per pipeline rank, and the user's setting that determines it."""

    chunks: float
    """Model chunks per pipeline rank. Not a whole number if the model's stages are no multiple of the ranks."""
    words: str
    """The setting as messages name it, for example ``--num-virtual-stages-per-pipeline-rank 4``."""
    remedy: Callable[[int], str]
    """``remedy(chunks)`` returns the part of a message that says how to get another number of chunks."""


def known_chunks(placement: Placement) -> int:
    """Return the number of model chunks per rank in Megatron: those of one replica of the model."""
    return placement.num_chunks // placement.replicas


def is_folded(placement: Placement) -> bool:
    """Return whether there is one replica whose stages are not placed round robin, as in a V or a wave."""
    return placement.replicas == 1 and not placement.is_round_robin


OTHER_ENDS = (
    "it counts the layers of all chunks of the first or last pipeline rank, and in this placement a rank holds other stages; "
    "give the layers of each stage by --pipeline-model-parallel-layout"
)
"""The reason why Megatron's flags for the layers of the first or last rank are refused for a folded placement."""


def megatron_cut(chunks: int) -> Cut:
    """Return the cut of a model that Megatron builds, with this number of chunks per pipeline rank."""

    def remedy(needed: int) -> str:
        if needed == 1:
            return "drop --num-virtual-stages-per-pipeline-rank and all other flags that ask for virtual stages"
        return (
            f"pass --num-virtual-stages-per-pipeline-rank {needed}, or that many stages per rank by "
            "--pipeline-model-parallel-layout (for a hybrid model, by --hybrid-layer-pattern with |); without "
            f"megatron.training, pass virtual_pipeline_model_parallel_size={needed} to initialize_model_parallel() and in the "
            "model's configuration"
        )

    return Cut(chunks, "Megatron's own cut", remedy)


def check_cut(cut: Cut, schedule: str, placement: Placement) -> None:
    """Raise an UnsupportedError if the cut and the schedule's placement have different numbers of chunks per rank."""
    needed = known_chunks(placement)
    if needed != cut.chunks:
        raise UnsupportedError(
            "needs-chunks",
            f"schedule {schedule} runs {_counted(needed)} per pipeline rank, not {cut.chunks:g}, which follows from "
            f"{cut.words}; {cut.remedy(needed)}",
        )


def placements_of(
    schedule: str, options: Mapping[str, Any], num_devices: int, cut: Cut | None = None
) -> tuple[Placement, ...]:
    """Return the placement of a schedule on a model with this cut; for ``auto`` all placements that it may choose.

    Without a cut, the schedule and its options determine the number of chunks. Raise an UnsupportedError if the
    schedule cannot run a model with this cut.
    """
    requested = dict(options)
    is_open = schedule == AUTO or ("chunks" in family(schedule).options and "waves" not in requested)
    if cut is not None and is_open and requested.get("chunks") is None:
        # The flags that cut the model decide only if the options do not.
        usual = _placements(schedule, requested, num_devices)[0]
        if cut.chunks != int(cut.chunks):
            check_cut(cut, schedule, usual)
        try:
            return _placements(schedule, requested | {"chunks": int(cut.chunks)}, num_devices)
        except UnsupportedError as error:
            raise UnsupportedError(
                "needs-chunks",
                f"schedule {schedule} does not run {_counted(int(cut.chunks))} per pipeline rank, which follows from "
                f"{cut.words} ({error}); {cut.remedy(known_chunks(usual))}",
            ) from error
    placements = _placements(schedule, requested, num_devices)
    if cut is not None:
        check_cut(cut, schedule, placements[0])
    return placements


def _placements(schedule: str, options: Mapping[str, Any], num_devices: int) -> tuple[Placement, ...]:
    if schedule == AUTO:
        return searched_placements(num_devices, options.get("placement"), options.get("chunks"))
    return (family(schedule).placement_on(num_devices, options),)


def _counted(chunks: int) -> str:
    return f"{chunks} model chunk{'s' * (chunks != 1)}"
