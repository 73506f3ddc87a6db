"""Run a program of these tests in a process of its own, on CPU in place of CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_TESTS = Path(__file__).parents[1]


def printed_by(module: str, *folders: str, first: str = "sys", arguments: Sequence[str] = ()) -> dict:
    """Return the JSON object in the last line that ``main`` of a module of this folder prints.

    ``folders`` are other folders of the tests from which it imports. ``first`` is a module that is imported before Megatron.
    """
    program = (
        f"import {first}; from megatron_pipemem.tools.cpu import activate; activate(); import {module}; {module}.main()"
    )
    path = os.pathsep.join(str(_TESTS / folder) for folder in ("mcore", *folders))
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])
