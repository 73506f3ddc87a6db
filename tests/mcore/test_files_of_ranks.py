"""Checkpoints with a file per rank: which placements they fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.checkpoints import _MARK, FilesOfRanks, check_devices

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
        check_devices(checkpoint, devices, "remedy")
    else:
        with refused("wrong-file", ", ".join(map(str, devices)), kind=UnsupportedError):
            check_devices(checkpoint, devices, "remedy")


RESHARDABLE, BY_RANK = (
    {"content_metadata": {"distrib_optim_sharding_type": form}} for form in ("fully_reshardable", "dp_reshardable")
)


@pytest.mark.parametrize(
    ("of_run", "of_checkpoint", "metadata", "fits"),
    [
        ({"use_distributed_optimizer": True}, {}, BY_RANK, False),
        ({"use_distributed_optimizer": True}, {}, RESHARDABLE, True),
        ({"use_distributed_optimizer": False}, {}, BY_RANK, True),
        ({"use_distributed_optimizer": True, "finetune": True}, {}, BY_RANK, True),
        ({"use_distributed_optimizer": True, "no_load_optim": True}, {}, BY_RANK, True),
        ({"use_distributed_optimizer": True}, {"no_save_optim": True}, BY_RANK, True),
        ({"use_distributed_optimizer": True}, {}, {}, True),
        (None, {}, BY_RANK, True),  # Megatron reads the checkpoint's arguments before it has its own
    ],
)
def test_an_optimizer_by_rank_fits_the_placement_that_saved_it(of_run, of_checkpoint, metadata, fits, monkeypatch):
    arguments = None if of_run is None else SimpleNamespace(**of_run)
    monkeypatch.setattr("megatron_pipemem.mcore.loop_arguments._arguments", lambda: arguments)
    files = FilesOfRanks()
    monkeypatch.setattr(files, "_device_of_stages", lambda: V)
    state = {"args": SimpleNamespace(**vars(saved(None, 2)), **of_checkpoint), **metadata}

    def load(load_dir, args, rank0=False):
        return state, "name", False, SimpleNamespace(name="GLOBAL")

    if fits:
        assert files._load(load, "folder", None, rank0=True)[0] is state
    else:
        with refused("wrong-file", "0, 1, 0, 1", "--dist-ckpt-optim-fully-reshardable", kind=UnsupportedError):
            files._load(load, "folder", None, rank0=True)
    assert files._load(load, "folder", None)[0] is state, "the weights have been checked by then"
