"""Run a Megatron script in one process by the update rule of an asynchronous schedule, without a pipeline, on the CPU.

    pipemem run --cpu scripts/emulate.py RULE STAGES SCRIPT [flags of the script and --pipemem-* flags]

See ``megatron_pipemem.cpu.emulation``.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from megatron_pipemem.cpu.emulation import RULES, emulated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rule", choices=RULES)
    parser.add_argument("stages", type=int, help="of the pipeline that is imitated")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    sys.argv = [str(asked.script), *asked.arguments]
    sys.path[0] = str(asked.script.resolve().parent)
    with emulated(asked.rule, asked.stages):
        runpy.run_path(str(asked.script), run_name="__main__")


if __name__ == "__main__":
    main()
