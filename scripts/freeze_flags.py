"""Write the properties of Megatron's flags to the file that this package reads where Megatron is not installed.

python scripts/freeze_flags.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from megatron_pipemem.files import write_whole
from megatron_pipemem.tools.config.arguments import FROZEN, PLAIN, attribute_of
from megatron_pipemem.tools.megatron.known_flags import described


def frozen(flags: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of the file for flags as ``known_flags.described`` gives them, with a line for each flag."""

    def entry(flag: str, properties: Mapping[str, Any]) -> str:
        plain = {"dest": attribute_of(flag), **PLAIN}
        others = {key: value for key, value in properties.items() if value != plain[key]}
        return f"{json.dumps(flag)}: {json.dumps(others)}"

    return "{\n" + ",\n".join(entry(*item) for item in sorted(flags.items())) + "\n}\n"


def main() -> None:
    """Write the file."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    write_whole(FROZEN, frozen(described(parser)))


if __name__ == "__main__":
    main()
