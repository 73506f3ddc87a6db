"""Checkpoints with a file per rank: which placements they fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.checkpoints import _MARK, check_devices

V, ROUND_ROBIN, LINEAR = (0, 1, 1, 0), (0, 1, 0, 1), (0, 1)


def saved(devices: tuple[int, ...] | None, chunks: int | None, ranks: int = 2) -> SimpleNamespace:
    """The arguments in a checkpoint: of this package, or of Megatron alone without ``devices``."""
    arguments = SimpleNamespace(pipeline_model_parallel_size=ranks, virtual_pipeline_model_parallel_size=chunks)
    return arguments if devices is None else SimpleNamespace(**vars(arguments), **{_MARK: devices})


@pytest.mark.parametrize(
    ("checkpoint", "devices", "fits"),
    [
        (saved(V, 2), V, True),
        (saved(V, 2), ROUND_ROBIN, False),
        (saved(V, 2), LINEAR, False),
        (saved(LINEAR, None), LINEAR, True),
        (saved(None, None), LINEAR, True),
        (saved(None, None), V, False),
        (saved(None, 2), ROUND_ROBIN, True),
        (saved(None, 2), V, False),
        (saved(None, 2), LINEAR, False),
        (saved(None, None, ranks=4), V, True),  # Megatron refuses another number of ranks itself
        (None, V, True),  # a file without arguments, as other programs write
    ],
)
def test_files_fit_the_placement_that_saved_them(checkpoint, devices, fits):
    if fits:
        check_devices(checkpoint, devices)
    else:
        with refused("wrong-file", ", ".join(map(str, devices)), kind=UnsupportedError):
            check_devices(checkpoint, devices)
