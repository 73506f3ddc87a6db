"""Read the training command out of a launch script. No part of the script is executed.

Assignments, arrays, defaults, arithmetic and simple tests are evaluated, as launch scripts use them. If the result of a
test is unknown, a variable keeps its value, or takes the value of the first branch if it has none.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.tools.config.arguments import UNKNOWN

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BRACED = re.compile(r"(\w+|[@*])(\[[@*]\])?(?:(:?[-=+?])(.*))?\Z", re.DOTALL)
_SIMPLE = re.compile(r"[A-Za-z_]\w*|[\d@*#?]")
_BACKTICKS = re.compile(r"`([^`\n]*)`")
_OUTPUT = re.compile(rf"{UNKNOWN}\$\(.*\){UNKNOWN}", re.DOTALL)
_SLURM = re.compile(r"^#SBATCH\s+(-N|--nodes|--gpus-per-node|--ntasks-per-node)[=\s]\s*(\d+)\b", re.MULTILINE)
_KEYWORDS = {"then", "do", "{", "}", "function", "time", "exec"}
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}
_STARTS_NOTHING = {"echo", "printf", "eval", "source", "."}
"""Commands that start no program themselves. Scripts print the training command before they run it."""
_SHELLS = {"sh", "bash", "zsh"}
_MOST_DEPTH = 5
SWIFT_PROGRAMS = "swift/cli/_megatron/"
"""Folder of the programs that ms-swift's command ``megatron`` starts."""
_SWIFT = re.compile(r"(.*/)?megatron")
_SWIFT_VARIABLES = ("NPROC_PER_NODE", "NNODES")


class WordPart(NamedTuple):
    """A part of a word. Variables in literal text are not replaced, and quoted text is not split at spaces."""

    text: str
    quoted: bool = False
    literal: bool = False


Word = list[WordPart]


class Array(NamedTuple):
    """An assignment of an array: ``NAME=(WORDS)``, or ``NAME+=(WORDS)``, which appends words."""

    name: str
    longer: bool  # whether the words are appended
    words: list[Word]


Statement = list[Word | Array]


def training_command(text: str, variables: Mapping[str, str] | None = None, folder: Path | None = None) -> list[str]:
    """Return the words of the command that starts a Python program; with several, of the one with most flags.

    Sizes in ``#SBATCH`` lines come before it, as options of a launcher.

    Args:
        text: the text of a script, or a command line.
        variables: values of shell variables, which override those that the script sets.
        folder: the folder of the script, for files that it reads with ``source``.

    Raises:
        ConfigError: no command starts a Python program (``no-command``), or a quote or bracket has no end
            (``bad-syntax``).
    """
    reader = _Reader(dict(variables or {}), folder)
    reader.read(text)
    commands = [reader.started_by_swift(words) for words in reader.commands]
    started = [words for words in commands if any(word.endswith(".py") for word in words) or "-m" in words[:-1]]
    if not started:
        raise ConfigError(
            "no-command",
            "the script or command starts no Python program; give the script that calls pretrain_gpt.py, or its "
            "command line after --",
        )
    chosen = max(started, key=lambda words: sum(word.startswith("--") or "=" in word for word in words))
    return [*_slurm_sizes(text), *chosen]


def _slurm_sizes(text: str) -> list[str]:
    """Return the nodes, and the GPUs or tasks of a node, that ``#SBATCH`` lines give, as options of a launcher.

    One task per node starts a launcher, which has its own number of processes.
    """
    return [f"{name}={number}" for name, number in _SLURM.findall(text) if (name, number) != ("--ntasks-per-node", "1")]


@dataclass
class _Branch:
    """An ``if`` whose branches are being read.

    ``runs`` is whether the present branch runs, and ``ran`` whether one of its branches so far runs; ``None`` if
    unknown.
    """

    runs: bool | None
    ran: bool | None


@dataclass
class _Reader:
    """The variables of a script, and the commands that it starts, as far as it has been read."""

    user_values: dict[str, str]  # the user's variables, which the script cannot change
    folder: Path | None  # of the script
    values: dict[str, list[str]] = field(default_factory=dict)  # words of each variable that the script sets
    commands: list[list[str]] = field(default_factory=list)
    branches: list[_Branch] = field(default_factory=list)  # that are open, the innermost last
    depth: int = 0  # of scripts that read scripts

    def read(self, text: str) -> None:
        if self.depth == _MOST_DEPTH:
            return
        self.depth += 1
        for statement in _Lexer(_BACKTICKS.sub(r"$(\1)", text)).statements():
            self._statement(statement)
        self.depth -= 1

    def started_by_swift(self, words: list[str]) -> list[str]:
        """Return the command that ms-swift's ``megatron`` starts, with torchrun's variables; other commands unchanged."""
        if len(words) < 2 or not _SWIFT.fullmatch(words[0]):
            return words
        options = ((f"--{name.lower()}", self._lookup(name)) for name in _SWIFT_VARIABLES)
        start = [word for option, value in options if value for word in (option, *value)]
        return ["torchrun", *start, f"{SWIFT_PROGRAMS}{words[1]}.py", *words[2:]]

    def _runs(self) -> bool | None:
        """Return whether the statements at this place run; ``None`` if a test's result is unknown."""
        states = [branch.runs for branch in self.branches]
        return False if False in states else None if None in states else True

    def _statement(self, words: Statement) -> None:
        while words and (keyword := _plain(words[0])) in _KEYWORDS:
            words = words[1:]
        keyword = _plain(words[0]) if words else ""
        if keyword in ("if", "case", "for", "while", "until"):
            runs = self._test(words[1:]) if keyword == "if" else None if keyword == "case" else True
            self.branches.append(_Branch(runs, runs))
        elif keyword in ("elif", "else") and self.branches:
            branch = self.branches[-1]
            here = self._test(words[1:]) if keyword == "elif" else True
            branch.runs = False if branch.ran else None if branch.ran is None and here is not False else here
            branch.ran = True if branch.ran or here else None if None in (branch.ran, here) else False
            if keyword == "else":
                self._statement(words[1:])
        elif keyword in ("fi", "done", "esac"):
            self.branches = self.branches[:-1]
        elif words and self._runs() is not False:
            self._assignments_and_command(words[1:] if keyword in _DECLARES else words)

    def _assignments_and_command(self, words: Statement) -> None:
        command: list[str] = []
        for word in words:
            if isinstance(word, Array):
                self._assign(word.name, word.longer, [text for item in word.words for text in self._expanded(item)])
            elif not command and word and not word[0].quoted and (match := _ASSIGNMENT.match(word[0].text)):
                value = [
                    WordPart(word[0].text[match.end() :], True),
                    *(part._replace(quoted=True) for part in word[1:]),
                ]
                self._assign(match[1], bool(match[2]), [" ".join(self._expanded(value))], joined=True)
            else:
                command += self._expanded(word)
        if not command:
            return
        name = PurePosixPath(command[0]).name
        if name in ("source", ".") and len(command) > 1:
            self._source(command[1])
        elif name == "eval":
            self.read(" ".join(command[1:]))
        if name in _STARTS_NOTHING:
            return
        self._read_scripts(command)
        inner = [
            command[place + 2]
            for place, word in enumerate(command[:-2])
            if PurePosixPath(word).name in _SHELLS and re.fullmatch(r"-[a-z]*c", command[place + 1])
        ]
        for text in inner:
            self.read(text)
        if not inner:
            self.commands.append(command)

    def _read_scripts(self, command: list[str]) -> None:
        """Read the script that a command like ``bash train.sh 8B 4`` runs, with its arguments, if the file exists."""
        for place, word in enumerate(command[:-1]):
            path = (self.folder or Path()) / command[place + 1]
            if PurePosixPath(word).name in _SHELLS and UNKNOWN not in str(path) and path.is_file():
                before, arguments = self.values, command[place + 2 :]
                numbered = {str(number): [text] for number, text in enumerate(arguments, start=1)}
                self.values = before | numbered | {"@": arguments, "*": arguments, "#": [str(len(arguments))]}
                self.read(path.read_text(encoding="utf-8", errors="replace"))
                self.values = before

    def _assign(self, name: str, longer: bool, words: list[str], joined: bool = False) -> None:
        is_set = name in self.values
        if name in self.user_values or (self._runs() is None and (longer or is_set)):
            return
        if longer and joined:
            words = ["".join(self.values.get(name, [])) + words[0]]
        elif longer:
            words = self.values.get(name, []) + words
        # The output of a command is unknown, and a user can give it as the value of the variable.
        self.values[name] = [f"{UNKNOWN}{name}{UNKNOWN}" if _OUTPUT.fullmatch(word) else word for word in words]

    def _source(self, name: str) -> None:
        """Read a sourced file, relative to the script's folder, if it exists.

        If the path begins with unknown values, only the part after them is used.
        """
        _, unknown, path_text = name.rpartition(UNKNOWN)
        path_text = path_text.lstrip("/") if unknown else path_text
        path = (self.folder or Path()) / path_text
        if path_text and path.is_file():
            self.read(path.read_text(encoding="utf-8", errors="replace"))

    def _test(self, words: Statement) -> bool | None:
        """Return the result of a test like ``[ $A = 1 ]``; ``None`` if it is unknown."""
        texts = [
            "".join(self._expanded([part._replace(quoted=True) for part in word]))
            for word in words
            if not isinstance(word, Array)
        ]
        if len(texts) < 3 or texts[0] not in ("[", "[[", "test"):
            return None
        texts = [text for text in texts[1:] if text not in ("]", "]]")]
        if texts[0] == "!":
            inner = _holds(texts[1:])
            return None if inner is None else not inner
        return _holds(texts)

    def _expanded(self, word: Word) -> list[str]:
        """Return the words that the shell makes of a word when it replaces its variables."""
        done: list[str] = []
        current: str | None = None
        for part in word:
            pieces = [[part.text]] if part.literal else [*self._pieces(part)]
            if part.quoted or part.literal:
                current = current or ""
            for piece in pieces:
                for number, text in enumerate(piece):
                    if number:
                        done += [] if current is None else [current]
                        current = text
                    else:
                        current = (current or "") + text if text or current is not None else None
        return done + ([] if current is None else [current])

    def _pieces(self, part: WordPart) -> Iterator[list[str]]:
        """Yield texts and variables' values of a part of a word, each as a list of words.

        An unquoted value with spaces gives several words.
        """
        text, place = part.text, 0
        while place < len(text):
            dollar = text.find("$", place)
            if dollar < 0:
                yield [text[place:]]
                return
            yield [text[place:dollar]]
            end = _expansion_end(text, dollar)
            whole = text[dollar:end]
            value = [whole] if len(whole) == 1 else self._value(whole)
            if part.quoted and not whole.endswith(("[@]}", "$@")):
                yield [" ".join(value)]
            elif part.quoted:
                yield value
            else:
                split = " ".join(value).split()
                joined = " ".join(value)
                yield [
                    *([""] if joined[:1].isspace() else []),
                    *split,
                    *([""] if joined[-1:].isspace() and split else []),
                ]
            place = end

    def _value(self, expansion: str) -> list[str]:
        """Return the words of ``$NAME``, ``${NAME...}`` or ``$((...))``. The words of ``$(...)`` are unknown.

        An unknown value is a name or text between two marks ``UNKNOWN``.
        """
        if expansion.startswith("$(("):
            inner = "".join(self._expanded([WordPart(expansion[3:-2], True)]))
            number = _arithmetic(inner, lambda name: "".join(self._lookup(name) or [UNKNOWN]))
            return [str(number)] if number is not None else [f"{UNKNOWN}{expansion}{UNKNOWN}"]
        if expansion.startswith("$("):
            return [f"{UNKNOWN}{expansion}{UNKNOWN}"]
        match = _BRACED.match(expansion[2:-1] if expansion.startswith("${") else expansion[1:])
        if match is None:
            return [f"{UNKNOWN}{expansion}{UNKNOWN}"]
        name, _, how, other = match.groups()
        value = self._lookup(name)
        if how and how[-1] in "-=":
            return (
                self._expanded([WordPart(other, True)]) if value is None or (how[0] == ":" and value == [""]) else value
            )
        if how and how[-1] == "+":
            return [""] if value in (None, [""]) else self._expanded([WordPart(other, True)])
        return value if value is not None else [f"{UNKNOWN}{name}{UNKNOWN}"]

    def _lookup(self, name: str) -> list[str] | None:
        return [self.user_values[name]] if name in self.user_values else self.values.get(name)


def _plain(word: Word | Array) -> str:
    """Return the text of a word that has no quotes; an empty text for any other word."""
    return "" if isinstance(word, Array) or len(word) != 1 or word[0].quoted else word[0].text


_COMPARED: Mapping[str, Callable] = {
    **dict.fromkeys(("=", "=="), operator.eq),
    "!=": operator.ne,
    **{f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")},
}


def _holds(texts: list[str]) -> bool | None:
    if any(UNKNOWN in text for text in texts):
        return None
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return (texts[1] == "") == (texts[0] == "-z")
    if len(texts) != 3 or texts[1] not in _COMPARED:
        return None
    first, compare, second = texts
    try:
        return _COMPARED[compare](*((int(first), int(second)) if compare.startswith("-") else (first, second)))
    except ValueError:
        return None


_OPERATIONS: Mapping[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _arithmetic(text: str, value_of: Callable[[str], str]) -> int | None:
    """Return the value of a shell's integer expression; ``None`` if a part is unknown, or not one of ``+ - * / %``."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp):
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        return int(value_of(node.id)) if isinstance(node, ast.Name) else int(ast.literal_eval(node))

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError):
        return None


def _closing(text: str, place: int, opening: str, closing: str) -> int:
    """Return the position after the bracket that closes the one at ``place``; raise a ConfigError if none does."""
    depth = 0
    for end in range(place, len(text)):
        depth += (text[end] == opening) - (text[end] == closing)
        if depth == 0:
            return end + 1
    raise ConfigError("bad-syntax", f"the command has no {closing} that closes {text[place : place + 20]!r}; add it")


def _expansion_end(text: str, dollar: int) -> int:
    """Return the position after the expansion that begins at the position ``dollar``."""
    following = text[dollar + 1 : dollar + 2]
    if following in ("{", "("):
        return _closing(text, dollar + 1, following, "}" if following == "{" else ")")
    match = _SIMPLE.match(text, dollar + 1)
    return match.end() if match else dollar + 1


_BREAKS = " \t\r\n;&|<>()"
_SKIPPED = re.compile(r"(?:\\\n|[ \t\r]|#[^\n]*)+")
_BETWEEN_ITEMS = re.compile(r"(?:\\\n|\s|#[^\n]*)+")
_HEREDOC = re.compile(r"\d*<<-?\s*(['\"]?)(\w+)\1")
_REDIRECTION = re.compile(r"(?:\d+(?=[<>]))?(?:[<>]|&>)[<>&]*(?:[ \t]|\\\n)*")
_END = re.compile(r"[\n;&|()]")
_PIECE = re.compile(
    rf"\\(?P<escaped>.?)|'(?P<single>[^']*)'|`(?P<output>[^`]*)`|(?P<plain>[^{_BREAKS}'\"`\\$]+)", re.DOTALL
)
_QUOTED_PIECE = re.compile(r'\\(?P<escaped>.)|(?P<plain>[^"\\$]+)', re.DOTALL)


@dataclass
class _Lexer:
    """Splits the text of a script into statements, without comments, redirections and here-documents."""

    text: str
    place: int = 0  # position in the text
    heredocs: list[str] = field(default_factory=list)  # ends of the here-documents that begin in this line

    def statements(self) -> Iterator[Statement]:
        words: Statement = []
        while self.place < len(self.text):
            if self._take(_SKIPPED):
                continue
            if heredoc := self._take(_HEREDOC):
                self.heredocs.append(heredoc[2])
            elif self._take(_REDIRECTION):
                if self.text[self.place : self.place + 1] not in ("", "\n"):
                    self._word()
            elif end := self._take(_END):
                if end[0] == "\n":
                    self._skip_heredocs()
                yield words
                words = []
            else:
                words.append(self._word())
        yield words

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return the match at this place, and go to its end."""
        match = pattern.match(self.text, self.place)
        self.place = match.end() if match else self.place
        return match

    def _skip_heredocs(self) -> None:
        for end in self.heredocs:
            match = re.compile(rf"^\s*{re.escape(end)}$", re.MULTILINE).search(self.text, self.place)
            self.place = match.end() if match else len(self.text)
        self.heredocs = []

    def _word(self) -> Word | Array:
        parts: Word = []
        start = self.place
        while self.place < len(self.text) and self.text[self.place] not in _BREAKS:
            plain = self._expansion()
            piece = None if plain else self._take(_PIECE)
            if plain := plain or (piece["plain"] if piece else ""):
                before = parts.pop().text if parts and not parts[-1].quoted else ""
                parts.append(WordPart(before + plain))
            elif piece is not None:
                output = None if piece["output"] is None else f"{UNKNOWN}`{piece['output']}`{UNKNOWN}"
                text = next(content for content in (piece["escaped"], piece["single"], output) if content is not None)
                if piece["escaped"] != "\n":
                    parts.append(WordPart(text, True, literal=True))
            elif self.text[self.place] == '"':
                parts += self._double_quoted()
            else:
                raise self._open_quote(self.place)
        if self.text.startswith("(", self.place) and (match := _ASSIGNMENT.fullmatch(self.text, start, self.place)):
            return Array(match[1], bool(match[2]), self._array())
        if self.place == start:  # a lone bracket within an array
            self.place += 1
        return parts

    def _expansion(self) -> str:
        """Return the expansion of a variable at this place, if there is one, and go to its end."""
        start = self.place
        if self.text.startswith("$", start):
            self.place = _expansion_end(self.text, start)
        return self.text[start : self.place]

    def _open_quote(self, place: int) -> ConfigError:
        quote, text = self.text[place], self.text[place : place + 20]
        return ConfigError("bad-syntax", f"the command has no second {quote} after {shortened(text)}; close the quotes")

    def _double_quoted(self) -> list[WordPart]:
        parts, start = [WordPart("", True)], self.place
        self.place += 1
        while not self.text.startswith('"', self.place):
            text = self._expansion()
            if not text:
                piece = self._take(_QUOTED_PIECE)
                if piece is None:
                    raise self._open_quote(start)
                escaped = piece["escaped"]
                if escaped == "$":
                    parts += [WordPart("$", True, literal=True), WordPart("", True)]
                    continue
                text = piece[0] if escaped is None or escaped not in '"\\`\n' else escaped.strip("\n")
            parts[-1] = parts[-1]._replace(text=parts[-1].text + text)
        self.place += 1
        return parts

    def _array(self) -> list[Word]:
        self.place += 1
        words: list[Word] = []
        while self.place < len(self.text) and self.text[self.place] != ")":
            if not self._take(_BETWEEN_ITEMS) and not isinstance(word := self._word(), Array):
                words.append(word)
        self.place += 1
        return words
