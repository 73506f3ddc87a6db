"""The flags of Megatron's own parser, and a check of the flags in a run's YAML file against them.

The check comes before any rank starts.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib.util
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_pipemem.errors import ConfigError, UpstreamError
from megatron_pipemem.files import read_cached, write_cached
from megatron_pipemem.flags import flag_parser
from megatron_pipemem.mcore import is_installed
from megatron_pipemem.model import layout
from megatron_pipemem.request import Request, flags_of
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.search.result import default_folder
from megatron_pipemem.tools.config.arguments import flag_value, frozen_flags
from megatron_pipemem.tools.megatron.asking import answers
from megatron_pipemem.values import refuse_if

logger = logging.getLogger(__name__)

_ASK = """
import argparse, json, sys
from megatron.training.arguments import add_megatron_arguments
from megatron_pipemem.tools.megatron.asking import MARK
from megatron_pipemem.tools.megatron.known_flags import described
parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
sys.stdout.write(MARK + json.dumps(described(parser)))
"""
_SECONDS = 120
_PROPERTIES = {"choices", "type", "bare", "dest", "const", "nargs", "default"}
"""The keys of a flag's properties (``described``)."""


def check_flags(flags: Mapping[str, Any]) -> None:
    """Raise a ConfigError if Megatron's parser lacks one of the flags of ``Run.flags``, or does not take its value.

    Nothing is checked if no Megatron is installed: another version may have the flag.
    """
    flag_table = known_flags() if _megatrons_flags() else {}
    readers = {flag.name: flag.read for flag in flags_of(Request).values() if not flag.repeated}
    for name, value in flags.items() if flag_table else ():
        key, option, shown = name.replace("-", "_"), f"--{name}", shortened(value)
        if (flag := flag_table.get(option)) is None:
            near = difflib.get_close_matches(option, flag_table, n=1)
            hint = f"did you mean {near[0][2:]!r}?" if near else "see the training script's --help"
            raise ConfigError("unknown-flag", f"Megatron has no flag {option}; {hint}", key=key)
        needs_value = not flag["bare"] and flag["nargs"] not in ("?", "*")
        refuse_if(value is True and needs_value, "bad-type", key, f"is true, and {option} takes a value; give one")
        if value is None or isinstance(value, bool):
            continue
        refuse_if(flag["bare"], "bad-type", key, f"is {shown}, and {option} takes no value; give true or false")
        for text in map(str, value if isinstance(value, list | tuple) else [value]):
            if (read := readers.get(option)) is not None:
                read(option, text)
            layout.check_length(name, text)
            try:
                flag_value(key, text, flag)
            except ConfigError as error:
                raise ConfigError(error.code, f"{error.message}, for {option}", key=key) from error


def described(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """Return the properties of every flag of a parser as JSON values, by the flag with its ``--``.

    The properties are the choices, type, number of values, default, attribute and constant, and whether it takes no
    value.
    """
    return {
        name: {
            "choices": action.choices
            and [choice.name if isinstance(choice, Enum) else str(choice) for choice in action.choices],
            "type": getattr(action.type, "__name__", None),
            "bare": action.nargs == 0,
            "dest": action.dest,
            "const": _plain(action.const),
            "nargs": action.nargs,
            "default": _plain(action.default),
        }
        for action in parser._actions
        for name in action.option_strings
    }


def _plain(default: Any) -> bool | int | float | str | None:
    """Return ``default`` if it is a number, a string or a boolean, else ``None``."""
    return default if isinstance(default, bool | int | float | str) and default != argparse.SUPPRESS else None


def known_flags() -> dict[str, dict[str, Any]]:
    """Return the properties of every flag of Megatron and of this package (``described``).

    They are those of the installed Megatron, or of ``frozen_flags`` if none is installed or its parser fails.
    """
    return (_megatrons_flags() or frozen_flags()) | described(flag_parser())


@lru_cache(maxsize=1)
def _megatrons_flags() -> dict[str, dict[str, Any]]:
    """Return the properties of Megatron's flags, from its parser if it is imported.

    If it is not imported, they are from a cache file for this Megatron. If there is no file, a subprocess imports
    Megatron, which takes seconds, and its answer is written to the file. The result is empty if Megatron is not
    installed or gives no answer.
    """
    if not is_installed():
        return {}
    if (arguments := sys.modules.get("megatron.training.arguments")) is not None:
        return described(arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in (Path(__file__), *_sources()))).hexdigest()[:16]
    path = None
    with suppress(OSError, ValueError):  # there is no place for it, or it is not there yet, or damaged
        path = default_folder() / f"flags-{digest}.json"
        kept = read_cached(path)
        if isinstance(kept, dict) and all(
            isinstance(flag, dict) and flag.keys() == _PROPERTIES for flag in kept.values()
        ):
            return kept
    try:
        (flags,) = answers(["-c", _ASK], _SECONDS, "Megatron's parser")
    except (UpstreamError, ValueError) as error:  # ValueError: not one answer
        logger.warning(
            "Megatron's flags cannot be read, so the run is not checked against them: %s",
            error,
        )
        return {}
    if path is not None:
        with suppress(OSError):  # it is asked again
            write_cached(path, flags)
    return flags


def _sources() -> list[Path]:
    """Return the existing files of Megatron that define most of its flags.

    Their content identifies a Megatron, because versions do not: ``dev`` calls itself 0.19.0.
    """
    core, training = (importlib.util.find_spec(name.replace("-", "_")) for name in ("core", "training"))
    files = ((core, "transformer/transformer_config.py"), (training, "arguments.py"))
    paths = [Path(spec.origin).parent / file for spec, file in files if spec is not None and spec.origin is not None]
    return [path for path in paths if path.is_file()]
