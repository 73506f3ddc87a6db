"""``pipemem run``: run an unchanged Megatron script with the plugin, on CPU ranks if asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.flags import CHECK_FLAG
from megatron_pipemem.run import checked, run
from megatron_pipemem.tools.cli.advise import advise_words


def run_script(
    script: Annotated[Path, typer.Argument(help="A Megatron training script, for example pretrain_gpt.py.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Flags of the script and the --pipemem-* flags below.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run CUDA-only Megatron on CPU ranks over gloo.")] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="With --cpu, show Megatron's warnings, messages and arguments of all ranks."),
    ] = False,
) -> None:
    """Run a Megatron script with the plugin on, usually under torchrun.

    Examples:
        # choose a schedule by name
        torchrun --nproc-per-node 8 -m megatron_pipemem run pretrain_gpt.py FLAGS --pipemem-schedule v-half
        # check flags and schedule of a launch, compare other schedules, and leave; also without torchrun, with =GPUS
        torchrun ... run pretrain_gpt.py FLAGS --pipemem-schedule v-half --pipemem-check
        # search the fastest schedule within a memory cap
        torchrun ... run pretrain_gpt.py FLAGS --pipemem-schedule auto --pipemem-memory-cap 6GiB
    """
    run(cpu, script, arguments or [], verbose)


def check(script: Path, arguments: list[str], devices: str) -> None:
    """Compare the launch's schedule with others and print the advice, on rank 0. ``devices`` is a number or empty.

    Without it, the number comes from torchrun's environment or from the command.
    """
    if devices and not devices.isdecimal():
        raise UnsupportedError("bad-number", f"{CHECK_FLAG}={devices}: give the number of devices of the run")
    checked(False, script, arguments)
    if os.environ.get("RANK", "0") == "0":
        advise_words([str(script), *arguments], int(devices or os.environ.get("WORLD_SIZE", "0")) or None)
