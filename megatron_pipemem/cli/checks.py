"""Refuse, before a command computes anything, what could not be finished: unwritable files, and what takes too long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import check_suffix, check_writable
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.size import check_affordable
from megatron_pipemem.search import MAX_CHUNKS


def check_size(devices: int, microbatches: int, chunks: int, yes: bool, fitted: bool = True) -> None:
    """Ask before what takes long.

    Args:
        devices: ``p``.
        microbatches: ``m``.
        chunks: stages per device.
        yes: whether the user wants it all the same.
        fitted: see ``schedule.size.is_fitted``.

    Raises:
        UnsupportedError: it is too large; it says what it would take.
    """
    if not yes:
        counts = f"--devices {devices} and --microbatches {microbatches}"
        if chunks > MAX_CHUNKS:
            counts = f"--devices {devices}, --microbatches {microbatches} and {chunks} chunks or slices"
        check_affordable(devices, microbatches, chunks, f"{counts} make", fitted)


def check_steps(schedule: Schedule, steps: int, yes: bool) -> None:
    """Ask before so many steps are simulated that it takes long.

    Args:
        schedule: of every step.
        steps: how many.
        yes: whether the user wants it all the same.

    Raises:
        UnsupportedError: they are too many; it says what they would take.
    """
    if not yes:
        placement, counts = schedule.placement, f"--steps {steps} of {schedule.num_microbatches} microbatches"
        check_affordable(
            placement.num_devices, schedule.num_units * steps, placement.num_chunks, f"{counts} make", fitted=False
        )


def check_output(path: Path | None, suffixes: Sequence[str], what: str) -> None:
    """Check that a file can be written, before anything is computed for it.

    Args:
        path: where the file is to be; ``None`` where the user asked for no file.
        suffixes: file name endings that are understood, with their dot.
        what: what is to be written, for the error's sentence.

    Raises:
        UnsupportedError: its name does not say which format.
        OutputError: it cannot be written.
    """
    if path is not None:
        check_suffix(path, suffixes, what)
        check_writable(path)


def check_seconds(flag: str, seconds: float) -> None:
    """Raises UnsupportedError: no search can take so long."""
    if not 0 <= seconds < math.inf:
        raise UnsupportedError("bad-number", f"{flag} {seconds:g}: give a number of seconds, 0 or more")


def check_layers(layers: int | None, stages: int) -> None:
    """Raises UnsupportedError: a model of so many layers has not that many stages."""
    if layers is not None and layers < stages:
        raise UnsupportedError(
            "too-few-layers",
            f"--layers {layers}: the schedule cuts the model into {stages} stages, which hold at least a layer each; give "
            "more layers, or fewer --devices or --chunks",
        )


def check_port(flag: str, port: int) -> None:
    """Raises UnsupportedError: it is no port."""
    if not 0 < port < 1 << 16:
        raise UnsupportedError("bad-number", f"{flag} {port}: give a port, from 1 to {(1 << 16) - 1}")
