"""Run an unchanged Megatron script with the plugin, on CPU ranks if asked: the part of ``pipemem run`` that ranks need."""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import nullcontext
from difflib import get_close_matches
from pathlib import Path

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.flags import CHECK_FLAG
from megatron_pipemem.logs import show_log
from megatron_pipemem.mcore import INSTALL, is_installed
from megatron_pipemem.mcore.launch import add_virtual_stages, enable_in_script, take_flags
from megatron_pipemem.ranks import rank_guard, refused_together
from megatron_pipemem.request import Request
from megatron_pipemem.tools_by_flag import check_outputs, load_tool

_OPTIONS = ("--cpu", "--verbose", "--help")


def run(cpu: bool, script: Path, arguments: list[str], verbose: bool = False) -> None:
    """Run ``script`` as ``python script arguments`` would, on a rank that torchrun or srun started.

    The plugin is enabled only if an argument starts with ``--pipemem-``. Without one, the script runs on stock
    Megatron. Imports resolve from the script's folder. A failure ends the process (see ``rank_guard``).
    With ``--pipemem-check``, the script does not run, and advice is printed.
    """
    job = os.environ
    checks = [word for word in arguments if word.partition("=")[0] == CHECK_FLAG]
    if checks:
        load_tool(CHECK_FLAG).check(
            script, [word for word in arguments if word not in checks], checks[-1].partition("=")[2]
        )
        return
    show_log()
    launched, alike = "RANK" in job, job.get("LOCAL_WORLD_SIZE") == job.get("WORLD_SIZE")
    with rank_guard() if not alike else refused_together() if launched else nullcontext():
        request, others = checked(cpu, script, arguments)
        if request is not None and (alike or job["RANK"] == "0"):  # rank 0 writes the outputs
            check_outputs(request)
        if cpu:
            others += load_tool("--cpu").cpu_flags(others)
    with rank_guard() if launched else nullcontext():
        _prepare(cpu, request, verbose)
    with rank_guard():
        sys.argv = [str(script), *others]
        sys.path[0] = str(script.resolve().parent)
        runpy.run_path(str(script), run_name="__main__")


def checked(cpu: bool, script: Path, arguments: list[str]) -> tuple[Request | None, list[str]]:
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
        load_tool("--cpu").activate(verbose=verbose)
    if request is not None:
        enable_in_script(request)
    if cpu and not verbose:
        load_tool("--cpu").shorten_log()
