"""Find the training command in a launch script. Bash evaluates the script and starts nothing (``evaluation``)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.tools.advise.evaluation import Evaluation, evaluated, placeholder_remedy
from megatron_pipemem.tools.advise.missing import ScriptFacts

SWIFT_PROGRAMS = "swift/cli/_megatron/"
"""Folder of the programs that ms-swift's command ``megatron`` starts."""
_SWIFT = re.compile(r"(.*/)?megatron")
_SWIFT_VARIABLES = ("NPROC_PER_NODE", "NNODES")
_SHELLS = {"sh", "bash", "zsh", "dash", "ssh", "pdsh"}
_SBATCH = re.compile(r"^#SBATCH\s+(-\w|--[\w-]+)(?:[=\s]\s*|(?<=-\w))(\S+)", re.MULTILINE)
_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "job-name": ("SLURM_JOB_NAME",),
    "partition": ("SLURM_JOB_PARTITION",),
}
"""Variables that Slurm sets for options of ``#SBATCH`` lines."""
_SHORT = {"-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task", "-J": "job-name", "-p": "partition", "-G": "gpus"}
_NO_TRAINING = re.compile(
    r"(?:^|[_.])(?:eval|evaluate|generate|generation|inference|server|convert|converter|export|preprocess)(?:[_.]|$)"
)
"""Words in the names of programs that run, convert or test a model, and train none."""
_SIZES = ("nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "gpus")


@dataclass(frozen=True)
class TrainingCommand:
    """The words of a command that trains.

    Args:
        words: the command.
        not_read: sentences about lines of its script that were not evaluated.
        script: the script that starts it; ``None`` for a command line.
    """

    words: list[str]
    not_read: tuple[str, ...] = ()
    script: ScriptFacts | None = None


def training_command(
    text: str,
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
    arguments: Sequence[str] = (),
    name: str = "train.sh",
) -> TrainingCommand:
    """Return the command of a script that starts a Python program; with several, the one with most flags.

    Sizes in ``#SBATCH`` lines come before it, as options of a launcher.

    Args:
        text: the text of a script.
        variables: values of shell variables, which override those that the script sets.
        folder: the folder of the script, for files that it reads with ``source``.
        arguments: the script's arguments.
        name: the script's name, its ``$0``.

    Raises:
        ConfigError: no command starts a Python program (``no-command``), or an error of ``evaluated``.
    """
    sizes = _sbatch_sizes(text)
    environment = {variable: value for option, value in sizes.items() for variable in _SLURM.get(option, ())}
    nodes, tasks = sizes.get("nodes", ""), sizes.get("ntasks-per-node", "")
    if "ntasks" not in sizes and nodes.isdecimal() and tasks.isdecimal():
        environment |= dict.fromkeys(_SLURM["ntasks"], str(int(nodes) * int(tasks)))
    evaluation = evaluated(text, name, arguments, variables, environment, folder)
    pairs = zip(evaluation.commands, evaluation.variables, strict=True)
    commands = [_started_by_swift(words, values) for words, values in pairs]
    started = [words for words in commands if any(word.endswith(".py") for word in words) or "-m" in words[:-1]]
    if not started:
        remedy = placeholder_remedy(text)
        hint = "".join(f"; {sentence}" for sentence in (*not_read(evaluation), *([remedy] if remedy else ())))
        raise ConfigError(
            "no-command",
            f"the script or command starts no Python program{hint}; give the script that calls pretrain_gpt.py, or its "
            "command line after --",
        )
    others = {_program(words) for words in started}
    started = [words for words in started if not _NO_TRAINING.search(_program(words))]
    if not started:
        raise ConfigError(
            "no-command",
            f"the script or command starts {', '.join(sorted(others))}, which does not train; give a script that trains",
        )
    chosen = max(started, key=lambda words: sum(word.startswith("--") or "=" in word for word in words))
    # One task per node starts a launcher, which has its own number of processes.
    options = {option: sizes[option] for option in _SIZES if option in sizes}
    if options.get("ntasks-per-node") == "1":
        del options["ntasks-per-node"]
    before = [f"--{option}={value}" for option, value in options.items()]
    return TrainingCommand([*before, *chosen], not_read(evaluation), ScriptFacts(text, [*evaluation.compared]))


def command_of_words(words: Sequence[str], variables: Mapping[str, str] | None = None) -> TrainingCommand:
    """Return the training command of a command line. If a shell is among its words, bash evaluates what it runs."""
    if any(PurePosixPath(word).name in _SHELLS for word in words):
        return training_command(shlex.join(words), variables)
    if not any(word.endswith(".py") or word == "-m" or _SWIFT.fullmatch(word) for word in words):
        raise ConfigError("no-command", "the command starts no Python program; give one that calls pretrain_gpt.py")
    return TrainingCommand(_started_by_swift([*words], variables or {}))


def not_read(evaluation: Evaluation) -> tuple[str, ...]:
    """Return sentences about parts of a script that have no known value."""
    sentences = []
    if evaluation.compared:
        lines: dict[str, int] = {}
        for name, line in evaluation.compared:
            lines.setdefault(name, line)
        names = ", ".join(f"{name} ({_line(line)})" for name, line in lines.items())
        sentences.append(f"tests of {names} are evaluated as if not set; --env NAME=VALUE or an argument sets one")
    if evaluation.exits:
        ends = ", ".join(dict.fromkeys(map(_line, evaluation.exits)))
        sentences.append(f"the script would end on this machine ({ends}), and is read on")
    sentences += [f"{path} is not there; {other} is read" for path, other in evaluation.others.items()]
    flags = dict.fromkeys(words[0] for words in evaluation.commands if words[0].startswith("--"))
    sentences += [f"bash starts {flag} as a program; end the line before it with a backslash" for flag in flags]
    sentences += [f"{_line(line)}: {message}" for line, message in evaluation.errors[:4]]
    if evaluation.unfinished is not None:
        sentences.append(f"{evaluation.unfinished}; what follows is not read")
    return tuple(sentences)


def _program(words: Sequence[str]) -> str:
    """Return the name of the Python program or module that a command starts, without folders."""
    script = next((word for word in words if word.endswith(".py")), None)
    if script is None:
        return words[words.index("-m") + 1].rpartition("examples.")[2]
    return PurePosixPath(script).stem


def _line(number: int) -> str:
    return f"line {number}" if number else "in a text that it reads"


def _started_by_swift(words: list[str], variables: Mapping[str, str]) -> list[str]:
    """Return the command that ms-swift's ``megatron`` starts, with torchrun's variables; other commands unchanged."""
    place = next((place for place, word in enumerate(words[:-1]) if _SWIFT.fullmatch(word)), None)
    if place is None or any(word.endswith(".py") for word in words[:place]):
        return words
    options = ((f"--{name.lower()}", variables.get(name)) for name in _SWIFT_VARIABLES)
    start = [word for option, value in options if value for word in (option, value)]
    return [*words[:place], "torchrun", *start, f"{SWIFT_PROGRAMS}{words[place + 1]}.py", *words[place + 2 :]]


def _sbatch_sizes(text: str) -> dict[str, str]:
    """Return the values of options in ``#SBATCH`` lines, by the long name."""
    options = {_SHORT.get(option, option.lstrip("-")): value for option, value in _SBATCH.findall(text)}
    gpus = re.search(r"gpu(?::\w+)?:(\d+)", options.get("gres", ""))
    if gpus and "gpus-per-node" not in options:
        options["gpus-per-node"] = gpus[1]
    if "gpus-per-node" in options:
        options["gpus-per-node"] = options["gpus-per-node"].rpartition(":")[2]
    return options
