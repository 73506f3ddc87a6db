"""Write the line of an answer into the launch script that it is for, as a patch.

Only words that stand in the script as they are can be changed: a flag that a variable or a loop makes cannot. The
patched script is evaluated again, and must start the command that the line makes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from difflib import unified_diff
from pathlib import PurePosixPath

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.flags import words_by_flag

RUN = ("-m", "megatron_pipemem", "run")
"""The words before a training script that start it with this package."""
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)


def patch(
    name: str,
    text: str,
    command: Sequence[str],
    line: tuple[Sequence[str], Sequence[str]],
    starts_ours: bool,
    words_of: Callable[[str], Sequence[str]],
) -> str:
    """Return a unified diff that makes a script start the command of a line.

    Args:
        name: the script's path, for the diff.
        text: the script.
        command: the words that it starts, with a training script among them.
        line: the words to add, and the flags to remove.
        starts_ours: whether the training script has to be started by this package, and is not yet.
        words_of: evaluates a script; returns the words that it starts.

    Raises:
        ConfigError: the script makes a word that has to change (``no-patch``).
    """
    added, gone = line
    place = next(place for place, word in enumerate(command) if word.endswith(".py"))
    program = PurePosixPath(command[place]).name
    present, changed = words_by_flag(command[place + 1 :]), words_by_flag(added)
    new = text
    for flag in words_by_flag(gone):
        new = _replaced(new, flag, present[flag], [])
    more: list[str] = []
    for flag, values in changed.items():
        if flag in present:
            new = _replaced(new, flag, present[flag], [flag, *values[-1]])
        else:
            more += [word for own in values for word in (flag, *own)]
    ours = RUN if starts_ours else ()
    new = _with_program(new, program, ours, more)
    expected = {**{flag: value for flag, value in present.items() if flag not in words_by_flag(gone)}, **changed}
    words = words_of(new)
    start = [*command[:place], *ours, command[place]]
    if [*words[: len(start)]] != start or words_by_flag(words[len(start) :]) != expected:
        raise _cannot(f"{program} would be started with other words")
    before, after = (part.splitlines(keepends=True) for part in (text, new))
    return "".join(unified_diff(before, after, fromfile=name, tofile=name))


def _replaced(text: str, flag: str, lists: Sequence[Sequence[str]], words: Sequence[str]) -> str:
    """Return a script with other words in place of a flag and its values. A line without any word left is left out."""
    count = len(lists[-1])
    matches = _places(text, rf"(?<![\w-]){re.escape(flag)}(?![\w-])" + r"(?:[ \t]*=[ \t]*|[ \t]+)[^\s)]+" * count)
    if len(lists) != 1 or len(matches) != 1:
        raise _cannot(f"{flag} stands {len(matches)} times in the script with a value on its line")
    begin, end = matches[0].span()
    first, last = text.rfind("\n", 0, begin) + 1, text.find("\n", end)
    last = len(text) if last < 0 else last
    new = text[:begin] + shlex.join(words) + text[end:]
    if not words and not (text[first:begin] + text[end:last]).strip(" \t\\"):
        return text[:first] + text[last + 1 :]
    return new if words else text[:begin] + text[end:].removeprefix(" ")


def _with_program(text: str, program: str, before: Sequence[str], after: Sequence[str]) -> str:
    """Return a script with words before and after the name of the training script."""
    if not before and not after:
        return text
    matches = _places(text, rf"[^\s\"'=]*(?<![\w-]){re.escape(program)}(?![\w.-])")
    if len(matches) != 1:
        raise _cannot(f"{program} stands {len(matches)} times in the script")
    begin, end = matches[0].span()
    return text[:begin] + " ".join([*before, matches[0][0], *map(shlex.quote, after)]) + text[end:]


def _places(text: str, pattern: str) -> list[re.Match[str]]:
    """Return the matches of a pattern outside of comments."""
    comments = [match.span() for match in _COMMENT.finditer(text)]
    return [match for match in re.finditer(pattern, text) if not any(a <= match.start() < b for a, b in comments)]


def _cannot(why: str) -> ConfigError:
    return ConfigError(
        "no-patch", f"no patch can be made, because {why}; change the script by hand, as advise prints it"
    )
