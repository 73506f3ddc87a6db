"""Ask, without torch, whether this machine has what a run trains on."""

from __future__ import annotations

from pathlib import Path

from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import UnsupportedError

DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
"""Files in ``/dev`` by which the drivers of NVIDIA and AMD, and of WSL, give programs their GPUs."""


def check_devices(run: Run, folder: Path = Path("/dev")) -> None:
    """Refuse to start ranks of a run for GPUs where there are none.

    Args:
        run: to be started.
        folder: of the device files.

    Raises:
        UnsupportedError: there are none.
    """
    if run.on_cpu or any(any(folder.glob(pattern)) for pattern in DEVICES):
        return
    raise UnsupportedError(
        "no-gpu",
        "the cluster of the run has GPUs, and this machine has none; start the run on its cluster, print its command by "
        "--print, or train a small model on CPU ranks with --set cluster=cpu",
    )
