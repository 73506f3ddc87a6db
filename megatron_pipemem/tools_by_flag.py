"""The tools that a training rank needs only because a flag asks for them, by name.

The core imports no module of ``tools``. What stands here is imported when the flag is given.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_pipemem.errors import UnsupportedError

_TOOLS = "megatron_pipemem.tools"
_HOME = {
    "--cpu": "cpu",
    "--pipemem-check": "cli.run",
    "--pipemem-layout": "advise.start",
    "--pipemem-plan": "advise.start",
    "--pipemem-trace": "report",
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
        raise UnsupportedError(
            "not-installed",
            f"{flag} needs the package {error.name}, which is not installed; pip install megatron-pipemem brings it",
        ) from error
