"""``pipemem run``: run an unchanged Megatron script with the plugin, on CPU ranks if asked."""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import check_writable
from megatron_pipemem.mcore import INSTALL, is_installed
from megatron_pipemem.mcore.launch import add_virtual_stages, cpu_flags, enable_in_script, show_log, take_flags
from megatron_pipemem.request import Request
from megatron_pipemem.tools.cli.ranks import rank_guard, refused_together
from megatron_pipemem.tools.launch.command import CHECK

_OPTIONS = ("--cpu", "--verbose", "--help")


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


def run(cpu: bool, script: Path, arguments: list[str], verbose: bool = False) -> None:
    """Run ``script`` as ``python script arguments`` would, on a rank that torchrun or srun started.

    The plugin is enabled only if an argument starts with ``--pipemem-``. Without one, the script runs on stock
    Megatron. Imports resolve from the script's folder. A failure ends the process (see ``rank_guard``).
    With ``--pipemem-check``, the script does not run, and advice is printed.
    """
    job = os.environ
    checks = [each for each in arguments if each.partition("=")[0] == CHECK]
    if checks:
        _check(script, [each for each in arguments if each not in checks], checks[-1].partition("=")[2])
        return
    show_log()
    launched, alike = "RANK" in job, job.get("LOCAL_WORLD_SIZE") == job.get("WORLD_SIZE")
    with rank_guard() if not alike else refused_together() if launched else nullcontext():
        request, others = _checked(cpu, script, arguments)
        if request is not None and (alike or job["RANK"] == "0"):  # rank 0 writes the outputs
            for path in request.outputs:
                check_writable(path)
        if cpu:
            others += cpu_flags(others)
    with rank_guard() if launched else nullcontext():
        _prepare(cpu, request, verbose)
    with rank_guard():
        sys.argv = [str(script), *others]
        sys.path[0] = str(script.resolve().parent)
        runpy.run_path(str(script), run_name="__main__")


def _check(script: Path, arguments: list[str], devices: str) -> None:
    """Compare the launch's schedule with others and print the advice, on rank 0. ``devices`` is a number or empty.

    Without it, the number comes from torchrun's environment or from the command.
    """
    from megatron_pipemem.tools.cli.advise import advise_words

    if devices and not devices.isdecimal():
        raise UnsupportedError("bad-number", f"{CHECK}={devices}: give the number of devices of the run")
    _checked(False, script, arguments)
    if os.environ.get("RANK", "0") == "0":
        advise_words([str(script), *arguments], int(devices or os.environ.get("WORLD_SIZE", "0")) or None)


def _checked(cpu: bool, script: Path, arguments: list[str]) -> tuple[Request | None, list[str]]:
    """Return the request of the plugin's flags, or None without such flags, and the script's own arguments.

    Nothing that is slow to import is needed.
    """
    if str(script).startswith("-"):
        near = get_close_matches(str(script), _OPTIONS, n=1)
        hint = f"did you mean {near[0]}?" if near else "give the script first, and its flags after it"
        raise UnsupportedError("unknown-flag", f"pipemem run has no option {script}; {hint}")
    if not script.is_file():
        raise UnsupportedError("no-file", f"there is no script {script}; give the path of a Megatron training script")
    plugin = any(argument.startswith("--pipemem-") for argument in arguments)
    if (cpu or plugin) and not is_installed():
        raise UnsupportedError("not-installed", INSTALL)
    request, others = take_flags(arguments)
    if request is not None:
        others = add_virtual_stages(request, others)
    return request, list(others)


def _prepare(cpu: bool, request: Request | None, verbose: bool) -> None:
    """Make Megatron run on the CPU if ``cpu``, and enable the plugin if there is a request."""
    if cpu:
        from megatron_pipemem.tools.cpu import activate

        activate(verbose=verbose)
    if request is not None:
        enable_in_script(request)
    if cpu and not verbose:
        from megatron_pipemem.tools.cpu import shorten_log

        shorten_log()
