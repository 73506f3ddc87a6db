"""The command ``pipemem``, also as ``python -m megatron_pipemem``, by which torchrun starts ranks."""

from __future__ import annotations

import sys
from itertools import takewhile
from pathlib import Path

from megatron_pipemem.exits import exits_for_errors
from megatron_pipemem.tools_by_flag import load_tool

_SWITCHES = ("--cpu", "--verbose")


def main() -> None:
    """Run a command. ``run`` imports no tools, unless its words have a fault or ask for help."""
    command, *words = sys.argv[1:] or [""]
    switches = [*takewhile(lambda word: word in _SWITCHES, words)]
    script, *arguments = words[len(switches) :] or [""]
    if command != "run" or not script or script.startswith("-"):
        load_tool("pipemem").main()
        return
    from megatron_pipemem.run import run

    with exits_for_errors(lambda: "pipemem run"):
        run("--cpu" in switches, Path(script), arguments, "--verbose" in switches)


if __name__ == "__main__":
    main()
