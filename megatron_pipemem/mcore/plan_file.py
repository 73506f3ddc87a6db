"""Read what ``pipemem plan --output FILE`` chose, as flags of a training script."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_pipemem.config.loading import load
from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.launch.command import planned_flags

_REPEATED = ("--pipemem-option", "--pipemem-offload-option")  # each occurrence says something else


def add_planned_flags(file: str, arguments: Sequence[str]) -> list[str]:
    """Add to a command line the flags of a plan that it lacks: model, parallelism, layout, schedule, precision.

    What both say must be the same, because a plan holds for nothing else.

    Args:
        file: a run's configuration.
        arguments: of a Megatron training script, and of the plugin.

    Raises:
        UnsupportedError: a flag contradicts the plan.
        ConfigError: there is no such file, or it is no run's configuration.
    """
    given, added = _by_flag(arguments), []
    for flag, values in _by_flag(planned_flags(load(file, Run))).items():
        missing = [each for each in values if each not in given.get(flag, [])]
        if missing and flag in given and flag not in _REPEATED:
            raise UnsupportedError(
                "plan-differs",
                f"{flag} is {_text(given[flag])} here and {_text(values)} in {file}; leave it out, or plan with it",
            )
        added += [word for each in missing for word in (flag, *each)]
    return [*arguments, *added]


def _by_flag(words: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return the values of every occurrence of every flag."""
    found: dict[str, list[list[str]]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            flag, separator, value = word.partition("=")
            values = [value] if separator else []
            found.setdefault(flag, []).append(values)
        else:
            values.append(word)
    return found


def _text(values: Sequence[Sequence[str]]) -> str:
    return ", ".join(" ".join(each) or "set" for each in values)
