"""Let bash evaluate a launch script, and collect the commands that it would start.

Nothing is started, written or sent: the kernel refuses it (``closed``). Bash finds functions in place of programs
(``stand_ins.bash``). Time, memory, processes and output are bounded.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.tools.advise import closed
from megatron_pipemem.tools.config.arguments import UNKNOWN

_SECONDS = 4.0
_MOST_OUTPUT = 8 << 20
_MOST_PROCESSES = 64
_MOST_ROUNDS = 12
_MOST_FILES, _MOST_BYTES = 40, 1 << 20
_POLL_SECONDS = 0.02
_STAND_INS = Path(__file__).with_name("stand_ins.bash")
_MARK = re.compile("[\2\3]")
_ERROR = re.compile(r"^(?:.*?: )?line (\d+): (.*)$", re.DOTALL)
_NOT_STARTED = re.compile(r"(.*/.*): (?:Permission denied|No such file or directory|cannot execute.*)")
_NAME = re.compile("[\\w./+@:%,~=\2\3-]+")
_NOISE = (
    *("cannot redirect standard input", "setpgid", "job control", "kill:", "write error", "wait:", "declare:", "cd:"),
    *("integer expression", "unary operator"),  # of tests that are told anyway
)
"""Messages of bash that say nothing about the commands that a script starts."""
_PLACEHOLDER = re.compile(r"<[A-Z][\w-]*(?: [\w.-]+)*>")
_SOURCE = re.compile(r"\bBASH_SOURCE\b")
_DECLARES = re.compile(r"^(declare|typeset)(?= +(?!-\w*g))", re.MULTILINE)


@dataclass
class Evaluation:
    """The commands that a script would start, as bash evaluates it, and the values that they depend on.

    Args:
        commands: the words of every program that the script starts, in their order.
        variables: for each command, the values of environment variables that programs take sizes from.
        compared: the variables and outputs without a value that each test depends on, with the line of the test; line 0
            is in a file that the script reads.
        exits: lines of the script at which it would have ended; 0 is in a file that the script reads.
        errors: lines that bash could not evaluate, with its message; line 0 is in a text that the script evaluates.
        others: files that were read in place of those that the script names, by the names.
        unfinished: why the evaluation was ended; ``None`` if the script came to its end.
    """

    commands: list[list[str]] = field(default_factory=list)
    variables: list[dict[str, str]] = field(default_factory=list)
    compared: dict[tuple[str, int], None] = field(default_factory=dict)
    exits: list[int] = field(default_factory=list)
    errors: list[tuple[int, str]] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)
    unfinished: str | None = None


@dataclass
class _Given:
    """The texts that bash reads: the user's variables, names of programs with a path, files, and the script."""

    variables: Mapping[str, str]
    environment: Mapping[str, str]
    programs: list[str]
    files: dict[str, str]
    script: str

    def data(self) -> bytes:
        texts = []
        for values in (self.variables, self.environment):
            texts += [str(len(values)), *(text for pair in values.items() for text in pair)]
        texts += [str(len(self.programs)), *self.programs, str(len(self.files))]
        texts += [text for pair in self.files.items() for text in pair]
        texts.append(_SOURCE.sub("__SOURCE", self.script))
        return b"".join(text.replace("\0", "").encode("utf-8", "surrogateescape") + b"\0" for text in texts)


def evaluated(
    script: str,
    name: str = "train.sh",
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Evaluation:
    """Return what bash makes of a script.

    Args:
        script: the text of the script.
        name: its ``$0``.
        arguments: its ``$1``, ``$2``, and so on.
        variables: values of shell variables, which override those that the script sets.
        environment: values that variables have at the start.
        folder: the folder in which files are looked for that are not in the present one.

    Raises:
        UnsupportedError: there is no bash here, or no way to close it in (``no-bash``).
        ConfigError: the script did not end, and started nothing (``no-end``), or has no valid syntax (``bad-syntax``).
    """
    inputs = _Given(variables or {}, environment or {}, [], {}, script)
    deadline = time.monotonic() + _SECONDS
    others: dict[str, str] = {}
    for _ in range(_MOST_ROUNDS):
        evaluation, needs, errors = _evaluated_once(inputs, name, arguments, deadline)
        programs = {match[1] for _, text in errors if (match := _NOT_STARTED.fullmatch(text))}
        programs = {program for program in programs if _NAME.fullmatch(program)} - {*inputs.programs}
        texts = {path: _text_of(path, folder) for path in needs if path not in inputs.files}
        files = {path: text for path, (text, _) in texts.items()}
        others |= {_MARK.sub("", path): other for path, (_, other) in texts.items() if other is not None}
        if len(inputs.files) + len(files) > _MOST_FILES:
            evaluation.unfinished = f"the script reads more than {_MOST_FILES} files"
            break
        if not programs and not files:
            break
        inputs.programs += sorted(programs)
        inputs.files |= files
    evaluation.others = others
    for line, text in errors:
        if not any(noise in text for noise in _NOISE):
            evaluation.errors.append((line, text))
    if not evaluation.commands:
        for line, text in evaluation.errors:
            if "syntax error" in text or "unexpected EOF" in text or "unexpected end of file" in text:
                message = (
                    f"bash cannot read line {line} of the script: {text}; {placeholder_remedy(script) or 'correct it'}"
                )
                raise ConfigError("bad-syntax", message)
        if evaluation.unfinished is not None:
            raise ConfigError("no-end", f"{evaluation.unfinished}; give the training command itself after --")
    return evaluation


def placeholder_remedy(script: str) -> str | None:
    """Return the remedy for the first placeholder of a script, such as ``<Specify path>``; ``None`` if it has none."""
    placeholder = _PLACEHOLDER.search(script)
    return placeholder and f"write a value in place of {placeholder[0]}, which bash takes for the names of files"


def _text_of(path: str, folder: Path | None) -> tuple[str, str | None]:
    """Return the text of a regular file, which is empty if there is none or it is too long, and the file if it is another.

    If the path is not there, the file is looked for in ``other_places``. After an unknown value, a path is its end.
    """
    for file in (Path(path), *other_places(path, folder)):
        try:
            # Looked at first: the mere opening of a device or a named pipe can act or wait.
            if not S_ISREG(file.stat().st_mode):
                continue
            with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as opened:
                if S_ISREG(os.fstat(opened.fileno()).st_mode):
                    content = opened.read(_MOST_BYTES + 1)
                    text = content.decode("utf-8", "surrogateescape") if len(content) <= _MOST_BYTES else ""
                    text = _DECLARES.sub(r"\1 -g", _SOURCE.sub("__SOURCE", text))
                    is_other = file.resolve() != Path(os.path.abspath(path)).resolve()
                    return text, str(file) if is_other else None
        except (OSError, ValueError):
            continue
    return "", None


def other_places(path: str, folder: Path | None) -> list[Path]:
    """Return where a file may be that is not at its path: ends of the path, in a folder and the three above it."""
    folder = (folder or Path()).absolute()
    parts = Path(_MARK.split(path)[-1]).parts
    parts = tuple(part for part in parts if part not in ("/", ".."))
    ends = [Path(*parts[place:]) for place in range(len(parts))]
    return [
        above / end for end in ends for above in (folder, *folder.parents[:3]) if len(end.parts) > 1 or above == folder
    ]


def _evaluated_once(
    inputs: _Given, name: str, arguments: Sequence[str], deadline: float
) -> tuple[Evaluation, list[str], list[tuple[int, str]]]:
    """Return the evaluation, the paths of files that the script wants to read, and the errors with their lines.

    ``deadline`` is a time of ``time.monotonic``.
    """
    bash = shutil.which("bash")
    no_bash = (
        "a script is read by bash 4.4 or newer on Linux (x86-64 or arm64), closed in by seccomp, and {}; give the "
    )
    no_bash += "training command itself after --"
    if bash is None:
        raise UnsupportedError("no-bash", no_bash.format("there is no bash here"))
    null = os.open(os.devnull, os.O_RDWR)
    files = os.memfd_create("script")
    channel, into_channel = os.pipe()
    try:
        with open(files, "wb", closefd=False) as file:
            file.write(inputs.data())
        os.lseek(files, 0, os.SEEK_SET)
        words = [
            sys.executable,
            "-I",
            "-S",
            closed.__file__,
            str(into_channel),
            str(files),
            bash,
            str(_STAND_INS),
            name,
        ]
        process = subprocess.Popen(
            [*words, *arguments],
            stdin=null,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(into_channel, files),
            start_new_session=True,
        )
    finally:
        for descriptor in (null, files, into_channel):
            os.close(descriptor)
    assert process.stderr is not None
    try:
        outputs, unfinished = _outputs(process.pid, (channel, process.stderr.fileno()), deadline)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
        os.close(channel)
    if process.returncode == closed.CANNOT:
        raise UnsupportedError("no-bash", no_bash.format("the kernel of this machine refuses"))
    evaluation = Evaluation(unfinished=unfinished)
    needs, first, has_ended = _read_records(outputs[0], evaluation)
    if not has_ended and unfinished is None:
        evaluation.unfinished = "the script stops before its end, for want of memory or by an error of bash"
    lines = outputs[1].decode("utf-8", "replace").splitlines()
    errors = [(max(0, int(match[1]) - first + 1), match[2]) for line in lines if (match := _ERROR.match(line))]
    return evaluation, needs, errors


def _outputs(session: int, descriptors: Sequence[int], deadline: float) -> tuple[list[bytes], str | None]:
    """Return the bytes of each descriptor up to its end, and why that end was not waited for.

    ``deadline`` is a time of ``time.monotonic``.
    """
    outputs = [bytearray() for _ in descriptors]
    with selectors.DefaultSelector() as selector:
        for place, descriptor in enumerate(descriptors):
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ, place)
        checked = time.monotonic()
        while selector.get_map():
            for key, _ in selector.select(_POLL_SECONDS):
                content = os.read(key.fd, 1 << 16)
                outputs[key.data] += content
                if not content:
                    selector.unregister(key.fd)
            now = time.monotonic()
            if now > deadline:
                return [bytes(output) for output in outputs], f"the script did not end within {_SECONDS:g} s"
            if sum(map(len, outputs)) > _MOST_OUTPUT:
                return [bytes(output) for output in outputs], "the script starts too many commands"
            if now > checked + _POLL_SECONDS:
                checked = now
                if _processes(session) > _MOST_PROCESSES:
                    why = f"the script starts more than {_MOST_PROCESSES} processes at once"
                    return [bytes(output) for output in outputs], why
    return [bytes(output) for output in outputs], None


def _processes(session: int) -> int:
    """Return the number of processes of a session."""
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                with open(f"/proc/{entry.name}/stat", "rb") as file:
                    count += file.read().rpartition(b")")[2].split()[3] == str(session).encode()
            except (OSError, IndexError):  # it has ended
                continue
    return count


def _read_records(content: bytes, evaluation: Evaluation) -> tuple[list[str], int, bool]:
    """Add the records of the stand-ins to an evaluation; return the files that it needs, the line that bash
    takes for its first, and whether it came to its end.
    """
    needs: list[str] = []
    started = ended = has_ended = False
    first = 1
    open_records: dict[str, list[str]] = {}
    for chunk in content.decode("utf-8", "surrogateescape").split("\0"):
        head, colon, word = chunk.partition(":")
        if colon and head.replace(".", "").isdecimal():
            open_records.setdefault(head, []).append(word)
            continue
        kind, *words = open_records.pop(chunk.rstrip(";"), [""])
        line = int(words[-1]) - first + 1 if words and words[-1].isdecimal() else 0
        if kind == "need" and words:
            needs.append(words[0])
        elif kind == "line":
            first = line
        elif kind == "end":
            has_ended = True
        elif kind == "exit":
            ended = ended or started  # a script that has trained and ends is at its end
            evaluation.exits += [] if started else [line]
        elif kind == "compared" and len(words) == 2:
            evaluation.compared[words[0], line] = None
        elif kind == "run" and words and words[0].isdecimal() and not ended:
            place = int(words[0]) + 1
            evaluation.variables.append(dict(text.partition("=")[::2] for text in words[1:place]))
            evaluation.commands.append([_MARK.sub(UNKNOWN, text) for text in words[place:]])
            started = started or any(text.endswith(".py") for text in words)
    return needs, first, has_ended
