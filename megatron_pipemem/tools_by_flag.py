"""The tools that a training rank needs only because a flag asks for them, by name.

The core imports no module of ``tools``. What stands here is imported when the flag is given.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import check_writable

if TYPE_CHECKING:
    from megatron_pipemem.request import Request

_TOOLS = "megatron_pipemem.tools"
_DRAWS = "--pipemem-trace"
_HOME = {
    "--cpu": "cpu",
    "--pipemem-check": "cli.run",
    "--pipemem-layout": "advise.start",
    "--pipemem-plan": "advise.start",
    _DRAWS: "report",
    "pipemem": "cli.app",
}
"""The module within ``tools`` by the flag that asks for it; for ``pipemem``, that of all commands."""
BROWSER = f"{_TOOLS}.report.browser"
"""The module that shows schedules and timelines in notebooks."""


def load_tool(flag: str) -> Any:
    """Import the module that a flag asks for, and return it.

    Raise an UnsupportedError if a package that only the tools need is not installed.
    """
    try:
        return import_module(f"{_TOOLS}.{_HOME[flag]}")
    except ModuleNotFoundError as error:
        raise _not_installed(flag, error.name) from error


def check_outputs(request: Request) -> None:
    """Raise an error if this process could not write the report of a run, or not draw and write its timelines.

    A run calls it on rank 0 before the model is built.
    """
    if request.trace is not None and find_spec("matplotlib") is None:
        raise _not_installed(_DRAWS, "matplotlib")
    for path in request.outputs:
        check_writable(path)


def _not_installed(flag: str, package: str | None) -> UnsupportedError:
    return UnsupportedError(
        "not-installed",
        f"{flag} needs the package {package}, which is not installed; pip install megatron-pipemem brings it",
    )
