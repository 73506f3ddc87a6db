"""Collect all values that a run's sizes need and its script or settings lack, and ask for them in one list."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.tools.config.arguments import MissingSetting, MissingValue, UnknownValue

_EXAMPLE = re.compile(r"^#[ \t]*(?:ba)?sh[ \t]+\S+\.sh[ \t]+(\S+[ \t]+\S.*)$", re.MULTILINE)
"""A comment with a command that starts the script, and its arguments."""
_MOST_VALUES = 8
"""Values of a variable that a message lists."""


class MissingValues(ConfigError):
    """Several sizes have no value (``unknown-size``)."""

    def __init__(self, missing: Sequence[MissingValue], remedies: Sequence[str], rest: str = "") -> None:
        message = f"no value is given; give {', '.join(remedies)}{rest}"
        super().__init__("unknown-size", message, key=", ".join(dict.fromkeys(str(error.key) for error in missing)))
        self.missing, self.remedies = tuple(missing), tuple(remedies)


def collected[T](read: Callable[[list[str]], T], words: Iterable[str]) -> T:
    """Return the run that ``read`` makes of the words of a command, or raise one error about all values that are missing.

    After each missing value, the words are read again with one in its place, so that the next one is found.
    """
    missing: list[MissingValue] = []
    words = [*words]
    while True:
        try:
            run = read(words)
        except MissingValue as error:
            if any(str(other) == str(error) for other in missing):
                break
            missing.append(error)
            words = error.supplied(words)
            continue
        except ConfigError:
            if not missing:
                raise
            break
        if not missing:
            return run
        break
    if len(missing) == 1:
        raise missing[0]
    raise MissingValues(missing, [error.remedy for error in missing])


@dataclass(frozen=True)
class ScriptFacts:
    """What a script says about its variables.

    Args:
        text: the script.
        compared: variables, and arguments by number, without a value that a test depends on, with the line of the test.
            Line 0 is in a file that the script reads.
    """

    text: str
    compared: Sequence[tuple[str, int]]

    def with_remedies(self, error: ConfigError) -> ConfigError:
        """Return one error about all missing values, with the arguments and variables that the script's user can give.

        For a variable that branches of the script set, these are the values that decide the branch. If one argument is
        needed, all of them are, because they are counted.
        """
        missing: Sequence[MissingValue] = error.missing if isinstance(error, MissingValues) else ()
        missing = (error,) if isinstance(error, MissingValue) else missing
        if not missing:
            return error
        names: dict[str, None] = {}
        for value in missing:
            if isinstance(value, UnknownValue):
                names |= dict.fromkeys(self._deciding(value.variable))
        settings = [value for value in missing if isinstance(value, MissingSetting)]
        tested = [name for name, _ in self.compared]
        if settings and any(name.isdecimal() for name in (*tested, *self._sourced)):
            settings, names["1"] = [], None
        arguments = [name for name in names if name.isdecimal()]
        remedies = self._arguments() if arguments else []
        remedies += [f"--env {name}=VALUE{self._values(name)}" for name in names if not name.isdecimal()]
        remedies += [value.remedy for value in settings]
        if remedies == [error.remedy for error in missing] and len(missing) == 1:
            return missing[0]
        rest = ", or write the values into the script" if names else ""
        if arguments and (example := _EXAMPLE.search(self.text)):
            rest += f"; a comment of the script starts it with {example[1].strip()}"
        return MissingValues(missing, remedies, rest)

    def _deciding(self, variable: str) -> list[str]:
        """Return the names of the unset values that decide a variable: those of the test before each assignment to it."""
        if variable.isdecimal():
            return [variable]
        numbers = sorted({line for _, line in self.compared})
        deciding: dict[str, None] = {}
        for match in re.finditer(rf"(?<![\w$-]){re.escape(variable)}=", self.text):
            line = self.text.count("\n", 0, match.start()) + 1
            place = bisect_right(numbers, line)
            test = numbers[place - 1] if place else 0
            deciding |= dict.fromkeys(name for name, number in self.compared if number == test > 0)
        deciding.pop(variable, None)
        return [*deciding] or [variable]

    @property
    def _sourced(self) -> list[str]:
        """Return the arguments that are part of the name of a file which the script reads."""
        read = "\n".join(re.findall(r"^\s*(?:source|\.)\s+(.*)$", self.text, re.MULTILINE))
        names = {name for number, name in self._names.items() if re.search(rf"\$\{{?{name}\b", read)}
        return [*re.findall(r"\$\{?(\d)", read), *(number for number, name in self._names.items() if name in names)]

    @property
    def _names(self) -> Mapping[str, str]:
        """Return the variable that takes each argument, by the argument's number."""
        pattern = r"^[ \t]*(?:export |local |readonly )?(\w+)=[\"']?\$\{?([1-9]\d*)\b"
        return {number: name for name, number in reversed(re.findall(pattern, self.text, re.MULTILINE))}

    def _arguments(self) -> list[str]:
        """Return the script's arguments, each with its variable and the values that tests know."""
        pairs = re.findall(r"\$([1-9])|\$\{([1-9]\d*)", self.text)
        numbers = [int(short or long) for short, long in pairs]
        texts = []
        for number in range(1, max(numbers, default=1) + 1):
            name = self._names.get(str(number), "")
            texts.append(f"argument {number} {name}".rstrip() + (self._values(name) if name else ""))
        return texts

    def _values(self, name: str) -> str:
        """Return the values that the script compares a variable with, in brackets; empty if it compares with none."""
        test = rf"\$\{{?{re.escape(name)}\b[^\s\]]*\s*==?\s*[\"']?([\w.][\w.+-]*)"
        values = [*dict.fromkeys(re.findall(test, self.text))]
        for arms in re.findall(rf"\bcase\s+[\"']?\$\{{?{re.escape(name)}\b(.*?)\besac\b", self.text, re.DOTALL):
            values += re.findall(r"^\s*\(?[\"']?([\w.][\w.+-]*)[\"']?(?:\s*\|[^)\n]*)?\)", arms, re.MULTILINE)
        shown = [*dict.fromkeys(values)][:_MOST_VALUES]
        return f" ({', '.join(shown)}{', ...' * (len(values) > len(shown))})" if shown else ""
