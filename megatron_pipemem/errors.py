"""The classes of all errors that a user can cause, and the table of their codes.

Each message says what is wrong, where, and what to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CODES = {
    # What is given
    "bad-choice": "A value is not allowed. Give one that the message lists.",
    "bad-filter": "A filter of a grid names a value or a key that no point has. Give one that the points have.",
    "bad-layout": "A layout does not describe the model's layers on the stages. Write one part per stage.",
    "bad-number": "A number is out of its range, or a text is not a number. The message names the range.",
    "bad-switches": "Switches are not groups of devices, or name a device twice or one that does not exist.",
    "bad-syntax": "A text is not written in the form that its option takes. The message has an example.",
    "bad-type": "A value of a file or setting has another type than its key takes. The message names the type.",
    "conflicting-features": "Two features exclude each other. Leave one of the two out.",
    "conflicting-options": "Two options or keys contradict each other or say the same. Leave one of the two out.",
    "does-not-divide": "A number does not divide another number that it must divide. Change one of them.",
    "given-twice": "The same key or point is given twice. Leave one out.",
    "has-own-flag": "An option of a schedule has a flag or argument of its own. Give it there.",
    "no-bash": "A launch script cannot be evaluated on this machine. Give the training command itself after `--`.",
    "no-end": "The evaluation of a launch script takes too long or too much. Give the training command itself after `--`.",
    "no-patch": "The answer cannot be written into the script as a patch. Change the script by hand.",
    "no-command": "A launch script starts no Python program. Give the script that does, or its command line.",
    "unknown-recipe": "Megatron-Bridge has no recipe of that name. The message names the nearest one.",
    "cannot-evaluate": "A recipe of Megatron-Bridge raises an error, for example without a network. The message has it.",
    "unknown-size": "A script or model lacks a size that prices depend on. The message names the option for it.",
    "missing-option": "An option, argument or key that has no default is missing. Give it.",
    "needs-option": "An option has no meaning without another one. Give both or neither.",
    "not-for-stock": "Megatron's own schedule cannot do this. Name a schedule of this package, or leave the option out.",
    "options-of-file": "A schedule file takes no options. Leave them out.",
    "unit-mismatch": "Some memory is in bytes and some in activation units. Give all of it in one unit.",
    "unknown-flag": "A flag is unknown or missing. The message names the flag.",
    "unknown-key": "There is no such key. The message names the existing keys.",
    "unknown-optimizer": "The bytes of an optimizer's state are unknown. Compare the run with an optimizer that the message "
    "names.",
    "unknown-option": "The schedule or feature has no such option. `pipemem schedules NAME` lists those of a schedule.",
    "unknown-schedule": "There is no such schedule. `pipemem schedules --all` lists all; `--schedule-module` adds yours.",
    "wrong-count": "A list has another number of entries than there are devices, microbatches or chunks. Give one each.",
    # Files, packages and machines
    "based-on-itself": "A configuration is based on itself, perhaps through others. Take one `base` out.",
    "busy": "Another process works in the folder, trains the point or has the port. Wait for it, or end it.",
    "cannot-import": "A module or function of yours cannot be imported, or defines nothing. Its own error is in the message.",
    "cannot-read": "A file cannot be read: no permission, not text, or damaged. Give another one.",
    "cannot-write": "A file cannot be written: no permission, no folder, a full disk. Give another path.",
    "exists-already": "A file, grid or name exists already. Choose another, or continue with it as the message says.",
    "no-answer": "A process that imports Megatron takes too long or does not start. Ask for less, or mend what it waits for.",
    "no-file": "There is no such file, script or folder. Check the path.",
    "no-gpu": "The cluster of the run has GPUs and this machine has none. Start it there, or use `--print`.",
    "no-launcher": "A run over several ranks was started as one process. Start it by torchrun, as the message says.",
    "not-installed": "A package or program is not installed here. The message names it.",
    "not-json": "A file is not JSON. The message names line and column.",
    "not-on-cpu": "A layer or kernel exists on GPUs only. Pass the flag that the message names.",
    "not-yaml": "A file or an override is not YAML. The message names the place.",
    "old-key": "A key or flag of an earlier version. The message has the one to write.",
    "other-model": "A profile is of another model than the run's. Profile the run's.",
    "other-version": "A function of Megatron-Core or Transformer Engine is missing or has changed. Install a tested version.",
    "plan-differs": "A flag contradicts the file of `--pipemem-plan`. Leave the flag out, or plan with it.",
    "slurm-failed": "A command of Slurm failed. Its own error is in the message.",
    "wrong-file": "A file or folder has the wrong kind, or is incomplete. The message says which one is needed.",
    # Sizes
    "does-not-fit": "The run needs more devices or memory than the cluster has. Cut the model further, or hold less.",
    "needs-chunks": "The schedule runs another number of model chunks per pipeline rank. Cut the model accordingly.",
    "needs-devices": "The schedule exists for other numbers of devices. Use another number, or another schedule.",
    "needs-microbatches": "The schedule exists for other numbers of microbatches. Change the global batch size.",
    "no-overlap": "Steps of this schedule need a barrier between them. Drop `--pipemem-overlap-steps`.",
    "no-period": "The times of the schedule's steps never repeat without a barrier. Use another schedule.",
    "no-pipeline": "There is one pipeline rank. Pass a pipeline size of at least 2, or the schedule `stock`.",
    "no-points": "A grid has no point that can run. Change its product or filters.",
    "no-slices": "The schedule cannot cut microbatches into slices. Use a schedule with the option `slices`.",
    "no-steps": "The schedule has no steps of its own to draw or run, or its costs are per microbatch. The message says which.",
    "nothing-fits": "No plan is possible on the cluster. The message names the most frequent reason.",
    "nothing-to-draw": "There is no run or schedule to draw. Relax the conditions, or start failed runs again.",
    "other-size": "A schedule file is for other numbers of devices or microbatches. Change either.",
    "slices-do-not-fit": "The sequence cannot be cut into so many slices. Use another number.",
    "too-few-layers": "There are fewer layers than stages. Use fewer ranks or chunks.",
    "too-large": "The command would take very long, or a file or number is too large. Use less, or pass `--yes`.",
    # Memory
    "cap-unreachable": "No tried schedule keeps the memory cap. Raise the cap, or pass `auto` for offload and recompute.",
    "host-memory": "The host has too little memory for the offloaded activations. Offload less.",
    "over-cap": "The schedule holds more than the memory cap. Raise the cap, or use a schedule with a lower peak.",
    # Costs
    "costs-mismatch": "Costs are for other stages, devices or slices than the schedule has. Give one value each.",
    "no-time": "All passes cost 0 seconds. Give at least one of them a price.",
    # Schedule files
    "bad-header": "The line that starts with `#` is wrong or does not fit the lines below. The message has an example.",
    "bad-pair": "A pair of a schedule is not a forward with another forward's backward right after it, or its schedule has "
    "a feature that excludes pairs. Drop the pair.",
    "no-actions": "The file holds no actions. Write a line per device, one action per cell.",
    "not-an-action": "A cell is not an action. Write stage, kind, microbatch, as in `2F0`.",
    "not-computed": "A schedule has a message or gradient reduction, which lowering adds by itself. Remove it.",
    "not-in-dialect": "torch's files cannot express this schedule. Write it with `--to pipemem`.",
    "shifted-microbatches": "The microbatches of a kind are not numbered from 0. Subtract the first number from all.",
    "unknown-dialect": "There is no such dialect. The message lists the dialects.",
    # Schedules that must not run
    "bad-placement": "Stages are not placed once each on all devices from 0 up. Correct the placement.",
    "collective-order": "Devices post collectives or sums in different orders. Post them in the same order everywhere.",
    "deadlock": "Devices wait for each other in a circle, which the message shows. Change the order of one of them.",
    "duplicate-action": "An action is listed twice, or two actions do the same. Remove one.",
    "host-wait": "A host that waits for its whole device would wait without end. Move the action as the message says.",
    "message-order": "Messages are received in another order, or a later step, than they are sent. Move the receive.",
    "misplaced-action": "An action is on another device than its stage. Move it.",
    "missing-action": "An action that another one needs is missing. Add it.",
    "mixed-replicas": "A microbatch runs through stages of two replicas. Renumber one of the actions.",
    "queue-order": "A device with one queue would wait without end. Post in the same order on all devices.",
    "slot-conflict": "Two actions of a block take the same slot, or one starts before its input is there. Shift one.",
    "stale-program": "A program's actions are not those of its schedule. Lower the schedule again.",
    "unknown-stage": "A stage does not exist. Remove or renumber it.",
    "unknown-microbatch": "A microbatch or slice does not exist. Remove or renumber it.",
    "unmet-need": "An action waits for another one that is missing. `validate()` names it.",
    "useless-action": "No action uses the result of this one. Remove it.",
    "weight-version": "A pass needs weights of a version that its stage does not have then. Keep more versions.",
    "wrong-cut": "The cut between two steps separates actions that must be undone together. Move the cut.",
    "wrong-order": "An action is before or after another one, and must be on its other side. Move it.",
    # Families of yours
    "family-build-failed": "The `build` function of a family fails for every size. Its own error is in the message.",
    "family-declaration": "A family declares something else than its `build` function makes. Correct one of them.",
    "kind-name": "The name of a kind of action is taken, or not made of capital letters and underscores. Change it.",
    "no-handler": "A schedule has actions of a kind without a handler. Add a feature whose `extend` returns one.",
    "nothing-draws": "A schedule of an inner module was shown. Import `Schedule` from `megatron_pipemem` itself.",
    # Megatron and the model
    "chunks-by-program": "A program builds model chunks in another way than the schedule needs. The message says how.",
    "enabled-already": "The plugin is enabled with other settings. Call `disable()` first.",
    "enabled-too-late": "Something was built or imported before `enable()` or `activate()`. Call it earlier.",
    "fp8-delayed-scaling": "Delayed scaling of fp8 needs steps in Megatron's order. Use another recipe.",
    "model-differs": "The chunks of all ranks together are not the whole model. The message names the layers.",
    "needs-megatron-loop": "The feature needs Megatron's own training loop. Leave it out elsewhere.",
    "no-rollback": "The optimizer cannot be rolled back. Take another one, or drop `--pipemem-overlap-steps`.",
    "not-enabled": "A model chunk was asked for before `enable()`. Call it first.",
    "slices-attention": "The attention cannot work on sequence slices. Change it as the message says, or use no slices.",
    "slices-forward-step": "The forward step or loss returns a value that cannot be cut. The message names the value.",
    "slices-model": "The model cannot work on slices of a sequence. Use a schedule without slices.",
    "tied-embedding": "Embedding and head must not share one matrix here. Pass `--untie-embeddings-and-output-weights`.",
    "unsupported-model": "The model has parts that are not supported, as encoder-decoder models do. The message names them.",
    "unsupported-placement": "A feature needs stages on other devices. Use another schedule, or leave the feature out.",
    "unsupported-setting": "A setting of Megatron excludes the schedule. Change it as the message says.",
    "vocabulary-forward-step": "The forward step hides tokens or losses from the vocabulary passes. The message says which.",
    "vocabulary-model": "Head or embedding cannot be cut over the pipeline. Pass `--pipemem-vocab-cut off`.",
    # During a run
    "batch-changes": "The number of microbatches changes while some are in flight. Drop `--rampup-batch-size`.",
    "cannot-profile": "The layers cannot be measured here. Give `--formulas`, or profile as the message says.",
    "cannot-weigh": "Microbatches cannot be weighed, or your function fails. The message names the microbatch.",
    "changed-while-away": "Offloaded activations returned changed, because some code wrote into their memory.",
    "data-iterator": "The data iterator ended early, is missing, or cannot be read as the schedule needs it.",
    "missing-gradient": "A split backward lost the gradient of a weight. Use a schedule with whole backwards, and report it.",
    "late-gradient": "A gradient came after its bucket was reduced. Drop `--overlap-grad-reduce`.",
    "graph-inputs": "A captured forward gets other inputs than in its capture. Keep microbatches alike, or capture nothing.",
    "graph-model": "A replay would do less than the model's own passes. The message names the missing part.",
    "graph-operator": "An operator within a captured pass cannot be replayed. Pass `--cuda-graph-impl none`.",
    "message-shape": "A tensor has another shape than its receiver expects. The message has the remedy.",
    "offload-device": "Activations can be offloaded from CUDA and CPU devices only.",
    "offload-order": "An offload or reload was asked for out of order. It is a bug if the schedule was validated.",
    "offload-thread": "The thread that copies activations failed. Restart from the last checkpoint.",
    "other-rank-failed": "Another rank failed. Its own error is in the message.",
    "ranks-differ": "Ranks have different settings, versions, schedules or data, or the plugin is not enabled on all "
    "of them. Start all of them with the same flags and packages.",
    "step-runs-again": "A step is repeated whose microbatches have left the pipeline. Pass `--rerun-mode disabled`.",
    "steps-exhausted": "The run takes more steps than were announced. Give `enable()` the number of all steps.",
    "taken-twice": "A gradient of the vocabulary passes was taken twice. Take it once.",
    "token-range": "A token is outside the vocabulary. Check the tokenizer.",
    "used-while-away": "Activations are used while they are on the host. Reload them first.",
    "wrong-shape": "A tensor given to a cut vocabulary has the wrong shape or type. The message names the right one.",
}
"""All codes of errors, each with its meaning and remedy. The documents show those that need more than their messages."""


_MOST_REPEATED = 200
"""The most characters of a word of a user, such as a path, that a message repeats."""
_LONG_WORD = re.compile(rf"\S{{{_MOST_REPEATED + 1},}}")


def printable(text: str) -> str:
    """Return a text with escape sequences in place of characters that a terminal would obey, except ends of lines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def repeated(text: str) -> str:
    """Return a user's text for a message: without its middle if it has more than 200 characters."""
    half = _MOST_REPEATED // 2 - 2
    return text if len(text) <= _MOST_REPEATED else f"{text[:half]}...{text[-half:]}"


class PipememError(Exception):
    """Base class of all errors raised on purpose by this package.

    Args:
        code: the kind of mistake, one of ``CODES``. It stays the same when the message is reworded.
        message: what is wrong and what to change. Subclasses put the place before it. Control characters are escaped,
            and words of more than 200 characters are cut.
    """

    def __init__(self, code: str, message: str | None = None):
        # Megatron raises an error of a layer's builder again, as the same class with only its message.
        self.code, message = ("", code) if message is None else (code, message)
        super().__init__(_LONG_WORD.sub(lambda word: repeated(word[0]), printable(message)))

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args), self.__dict__


def _restored(error: type[PipememError], args: tuple[Any, ...]) -> PipememError:
    """Return an error of this class with these arguments. pickle calls this function, and then sets the attributes."""
    copy = error.__new__(error)
    copy.args = args
    return copy


def with_code(error: BaseException) -> str:
    """Return the message of an error, with the code at its end if the error is of this package: ``... [deadlock]``."""
    return f"{error} [{error.code}]" if isinstance(error, PipememError) and error.code else str(error)


class ScheduleError(PipememError, ValueError):
    """A schedule is invalid: it is incomplete, in a wrong order, has a deadlock, or exceeds its memory cap.

    Args:
        code: see ``PipememError``.
        message: what is wrong and what to change. The attribute ``problem`` has it without the place.
        at: the device whose order is wrong, the position in that order (or program), and the action there, if known.
        cycle: in a deadlock, the waits of its devices (``schedule.dependencies.Wait``): each device waits for the next
            one, and the last one for the first.
    """

    def __init__(self, code: str, message: str, *, at: tuple[Any, ...] = (), cycle: tuple[Any, ...] = ()):
        self.cycle = cycle
        self.problem = message
        self.device, self.position, action = (*at, None, None, None)[:3]
        self.action = None if action is None else str(action)
        known = {"device": self.device, "position": self.position, "action": self.action}
        place = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
        super().__init__(code, f"{place}: {message}" if place else message)


class ScheduleFormatError(PipememError, ValueError):
    """A text cannot be read as a schedule, in this line and cell, both counted from 1."""

    def __init__(self, code: str, message: str, *, line: int | None = None, column: int | None = None):
        self.line = line
        self.column = column
        place = f"line {line}" if line is not None else ""
        if column is not None:
            place += f", column {column}"
        super().__init__(code, f"{place}: {message}" if place else message)


class UnknownScheduleError(PipememError, KeyError):
    """No schedule of that name is registered."""


class CostsError(PipememError, ValueError):
    """Costs cannot be read, or do not fit the schedule."""


class UnsupportedError(PipememError, ValueError):
    """A value, or a combination of settings, is refused. The message has the reason and a remedy."""


class MemoryCapError(UnsupportedError):
    """No tried plan of offload and recomputation, or no tried order of microbatches, keeps the memory cap.

    ``obstacles`` has the reasons why activations that would have to leave the device cannot.
    """

    def __init__(self, code: str, message: str, obstacles: tuple[str, ...] = ()):
        self.obstacles = obstacles
        super().__init__(code, message)


class UpstreamError(PipememError, ImportError):
    """Megatron is missing or does not answer, or a function or class of it differs from the tested versions."""


class VocabularyError(PipememError, ValueError):
    """A layer with a cut vocabulary got a tensor that does not fit its shard."""


class OffloadError(PipememError, RuntimeError):
    """Activations could not be copied to or from the host, or were used while they were on the host."""


class OutputError(PipememError, OSError):
    """A file cannot be written."""


class ConfigError(PipememError, ValueError):
    """A configuration cannot be read, or has a wrong value, at the dotted path ``key``, in this file."""

    def __init__(self, code: str, message: str, *, key: str | None = None, file: object | None = None):
        self.message = message
        self.key = key
        self.file = None if file is None else str(file)
        place = ", ".join(part for part in (self.file, None if key is None else f"key {key}") if part)
        super().__init__(code, f"{place}: {message}" if place else message)


UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""The errors that Python raises for values that a program cannot read."""


@contextmanager
def readable(subject: str, refusal: type[PipememError] = ConfigError) -> Iterator[None]:
    """Raise ``refusal`` in place of an error that Python raises in this block, which reads what a user gave.

    The message begins with ``subject``, such as ``the file run.yaml``. Errors of this package are left as they are.
    """
    try:
        yield
    except PipememError:
        raise
    except UNREADABLE as error:
        why = f"{type(error).__name__}: {repeated(str(error))}" if str(error) else type(error).__name__
        raise refusal(
            "cannot-read", f"{repeated(subject)} cannot be read ({why}); correct it, or shorten it"
        ) from error
