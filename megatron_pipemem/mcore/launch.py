"""Enable the plugin with the flags of a command line, for ``pipemem run`` and for scripts that call this module.

The ``--pipemem-*`` flags are taken off the command line and checked, and the flags of Megatron that they need are added.
Neither torch nor Megatron is imported before the plugin is enabled.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from itertools import chain, takewhile
from typing import Any

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.choose.model_cut import known_chunks
from megatron_pipemem.conflicts import requested
from megatron_pipemem.errors import UnsupportedError, printable, readable
from megatron_pipemem.model import cut_flags, layout
from megatron_pipemem.refusals import CPU, flag_values, refuse, refuse_overlapped, refuse_schedule
from megatron_pipemem.request import Request, ScheduleOptions, flags_of, prices_of
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.options import AUTO, OFF, STOCK, parse_options
from megatron_pipemem.schedule.schedule_file import check_devices_of_file
from megatron_pipemem.schedule.size import estimated, is_fitted
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.command import CHECK, CPU_FLAGS, flag_parser, plan_parser, planned_flags, words
from megatron_pipemem.tools.planner.balance import PRICED_FOR, at_start
from megatron_pipemem.values import MOST_LAYERS, Limit, whole_number

PACKAGE = __name__.partition(".")[0]
logger = logging.getLogger(__name__)

_REPEATED = ("--pipemem-option", "--pipemem-offload-option")  # each occurrence says something else
_LAYERS = "transformer-impl"
_PIPELINE_SIZE = "pipeline-model-parallel-size"
_OVERLAP, _DELAY = "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"
_PROMPT_SECONDS = 0.5
_PREFIX = "pipemem"
_NEAR = 0.85
"""Similarity above which a flag without our prefix counts as a misspelt one of ours. Flags of Megatron are below 0.7."""


def enable_from_command_line(arguments: list[str] | None = None) -> list[str]:
    """Take the ``--pipemem-*`` flags off a command line, and enable the plugin with these settings.

    Args:
        arguments: the script's arguments without its name. By default those of ``sys.argv``, which is changed in place,
            so that two lines at the top of a training script are enough. Without a ``--pipemem-*`` flag nothing is
            enabled.

    Returns:
        The arguments for Megatron: without our flags, and with flags that cut the model as the schedule needs it,
            unless the user's flags already do (``add_virtual_stages``).

    Raises:
        PipememError: a wrong flag, an unknown schedule, or an unsupported version of Megatron-Core.
    """
    request, others = take_flags(sys.argv[1:] if arguments is None else arguments)
    if request is not None:
        show_log()
        others = add_virtual_stages(request, others)
        enable_in_script(request)
    if arguments is None:
        sys.argv[1:] = others
    return others


def enable_in_script(request: Request) -> None:
    """Import Megatron's training loop if it is installed, and enable the plugin.

    Raises:
        PipememError: as ``enable``.
    """
    # Imported first, so that the functions of Megatron's training loop are replaced too.
    if importlib.util.find_spec("megatron.training") is not None:
        importlib.import_module("megatron.training.training")
    from megatron_pipemem.mcore.plugin import enable_with

    enable_with(request)


class _Lines(logging.Formatter):
    """Starts every log line with ``pipemem:``, then the rank unless it is 0, and the level from warnings up."""

    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK", "0")
        place = "" if rank == "0" else f"rank {rank}: "
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return f"pipemem: {place}{level}{printable(super().format(record))}"


def show_log() -> None:
    """Write this package's log to standard output: all messages on rank 0, and only warnings on other ranks.

    Only the logger of this package changes, and only if it has no handler yet. A program that calls ``enable()`` sets
    up its own logging and does not call this.
    """
    ours = logging.getLogger(PACKAGE)
    if ours.handlers:
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Lines())
    handler.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


@readable("the command line", UnsupportedError)
def take_flags(arguments: list[str]) -> tuple[Request | None, list[str]]:
    """Split a Megatron command line into the request of the ``--pipemem-*`` flags and the other arguments.

    The request is checked. It is ``None`` if there is no such flag. The other arguments keep their order. Raise a
    PipememError for wrong, missing or contradicting flags, for a plan or schedule file that cannot be read, and for an
    unknown schedule.
    """
    for flag, occurrences in _by_flag(arguments).items():
        for value in chain.from_iterable(occurrences):
            layout.check_length(flag.removeprefix("--"), value)
    plan, arguments = plan_parser().parse_known_args(arguments)
    if plan.pipemem_plan is not None:
        arguments = add_planned_flags(plan.pipemem_plan, arguments)
    parser = flag_parser()
    found, others = parser.parse_known_args(arguments)
    for argument in filter(_resembles_ours, takewhile(lambda each: each != "--", others)):
        _check_known(argument.partition("=")[0], [*parser._option_string_actions, CHECK])
    if len(others) == len(arguments):
        return None, others
    flags = flags_of(Request)
    given = {name: value for name, value in vars(found).items() if name in flags}
    if "schedule" not in given:
        raise UnsupportedError("unknown-flag", "--pipemem-schedule is missing; name a schedule")
    for name, value in given.items():
        if flags[name].repeated:
            given[name] = parse_options(flags[name].name, value)
    if given["schedule"] != STOCK and _OVERLAP in others:
        # Megatron takes the flag for placements of its own schedule only, so the model gets it when it is built.
        given["pairs"], others = True, [each for each in others if each not in (_OVERLAP, _DELAY)]
    return requested(**given), others


def _resembles_ours(argument: str) -> bool:
    """Return whether an argument begins with most letters of our prefix, so that a comparison with all our flags pays."""
    return (Counter(argument[2:12]) & Counter(_PREFIX)).total() > len(_PREFIX) // 2


def _check_known(flag: str, known: list[str]) -> None:
    """Raise an UnsupportedError if ``flag``, which no parser took, begins like or resembles a ``--pipemem-*`` flag."""
    ours = flag.startswith("--pipemem")
    if flag.startswith("-") and (near := get_close_matches(flag, known, n=1, cutoff=0.6 if ours else _NEAR)):
        raise UnsupportedError("unknown-flag", f"unknown flag {flag}; did you mean {near[0]}?")
    if ours:
        raise UnsupportedError("unknown-flag", f"unknown flag {flag}; pipemem run --help lists those of this package")


def add_planned_flags(file: str, arguments: Sequence[str]) -> list[str]:
    """Return a command line with the plan file's flags that it lacks: model, parallelism, layout, schedule, precision.

    Raise an UnsupportedError if a flag has another value than in the plan, because the plan is valid for its own values
    only.
    """
    given, added = _by_flag(arguments), []
    for flag, values in _by_flag(planned_flags(load(file, Run))).items():
        missing = [each for each in values if each not in given.get(flag, [])]
        if missing and flag in given and flag not in _REPEATED:
            raise UnsupportedError(
                "plan-differs",
                f"{flag} is {_text(given[flag])} here and {_text(values)} in {file}; leave the flag out, or plan with "
                "it",
            )
        added += [word for each in missing for word in (flag, *each)]
    return [*arguments, *added]


def _by_flag(words: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return the words after each flag, by the flag with its ``--``, one list per occurrence.

    For example, ``--a 1 2 --a 3`` gives ``{"--a": [["1", "2"], ["3"]]}``. Words before the first flag are left out.
    """
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


# With these flags, the sizes of the model are not on the command line. Only Megatron and the built model are checked then.
_ELSEWHERE = ("yaml-cfg", "use-checkpoint-args")


@readable("the command line", UnsupportedError)
def add_virtual_stages(request: Request, arguments: list[str]) -> list[str]:
    """Return the command line with the flag for the schedule's model chunks per rank, unless its flags cut the model.

    A hybrid model gets its layer pattern cut into stages instead, and a model that Megatron cannot cut evenly gets a
    layout. With layout ``auto``, ``_with_best_layout`` cuts the model. Raise an UnsupportedError without a pipeline, or if
    the schedule does not run a model with these arguments. With Megatron's own schedule, or if the sizes are not on the
    command line, no flag is added.
    """
    if request.layout == AUTO:
        arguments = _with_best_layout(request, arguments)
    flags = _values(arguments)
    if request.outputs and cut_flags.given(flags, "skip-train"):
        files = ", ".join(map(str, request.outputs))
        _tell("--skip-train runs no training step, so %s will not be written", files, level=logging.WARNING)
    if request.is_stock or any(cut_flags.given(flags, name) for name in _ELSEWHERE):
        return arguments
    p, layers = (whole_number(flags.get(name), name) for name in (_PIPELINE_SIZE, "num-layers"))
    p = p or 1
    Limit(1, MOST_LAYERS).check(p, f"--{_PIPELINE_SIZE}")
    if p == 1:
        raise UnsupportedError(
            "no-pipeline",
            f"there is no pipeline for schedule {request.schedule}: pass --pipeline-model-parallel-size 2 or more, or "
            f"--pipemem-schedule {STOCK} to measure Megatron's own step",
        )
    request.caps(p)  # refuses another number of them
    file = request.file
    if file is not None:
        check_devices_of_file(file, p)
    refuse_schedule(flag_values(flags), request)
    if request.overlap_steps:
        refuse_overlapped(flag_values(flags), request.is_asynchronous)
    placements = cut_flags.checked_placements(flags, request.schedule, request.options, p, layers, file)
    pattern = cut_flags.cut_pattern(flags, placements[0], with_head=request.vocab_parallel == OFF)
    written = (pattern or "").partition("=")[2] or cut_flags.given_pattern(flags)[1]
    if layout.is_cut(written):
        cut_flags.check_experts(flags, written, placements[0])
    for remark in cut_flags.remarks(flags, request.schedule):
        _tell("%s", remark, level=logging.WARNING)
    if pattern is not None:
        _tell("the pattern is cut into the stages of %s: %s", placements[0].name, pattern)
        return [*arguments, pattern]
    chunks = known_chunks(placements[0])
    needed = None if layers is None else cut_flags.needed_layout(flags, layers, p, placements[0])
    if needed is not None:
        _tell("%s, so the layers get --%s '%s'", needed.why, layout.FLAG, needed.text)
        arguments = [*cut_flags.without_cut(arguments), f"--{layout.FLAG}={needed.text}"]
        flags = _values(arguments)
    _check_cap(request, Shape(p, chunks, _microbatches(flags, p), _whole(flags, cut_flags.GROUP_SIZE)))
    if chunks == 1 or any(cut_flags.given(flags, name) for name in cut_flags.CUTS):
        return arguments
    return [*arguments, f"--{cut_flags.VIRTUAL_STAGES}", str(chunks)]


def _tell(line: str, *values: object, level: int = logging.INFO) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.log(level, line, *values)


def _with_best_layout(request: Request, arguments: Sequence[str]) -> list[str]:
    """Return a command line with the layout whose step is the fastest that ``balance`` finds, and log the layout.

    ``arguments`` are Megatron's, without our flags. In the result, the layout replaces all flags that cut the model.
    Raise a PipememError without a pipeline, or without the model's sizes.
    """
    # The planner takes long to load.
    from megatron_pipemem.mcore.known_flags import known_flags
    from megatron_pipemem.tools.advise.reading import named

    known = known_flags()
    given = named(arguments, known)
    run = _run_of(request, given, known)
    found = at_start(run)
    pattern, counts = layout.pattern_of(run.model), found.best.layers
    flag = cut_flags.given_pattern(given)[0] or layout.FLAG
    text = layout.written(counts, run.model.mtp_layers) if pattern is None else layout.cut(pattern, counts)
    longer = found.even.seconds / found.best.seconds - 1
    _tell(
        f"layout auto: --{flag} '{text}', {found.best.seconds:.3g} s a step by the prices of {PRICED_FOR}; "
        f"layers divided evenly take {longer:.1%} longer"
    )
    return [*cut_flags.without_cut(arguments), f"--{flag}={text}"]


def _run_of(request: Request, given: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> Run:
    """Return the run of these flags under the requested schedule.

    Its number of chunks per rank is that of the flags if the schedule can have several, else the schedule's own.
    ``given`` has the values by flag, and ``known`` the properties of Megatron's flags (``known_flags``).
    """
    from megatron_pipemem.tools.advise.reading import Context, read_flags
    from megatron_pipemem.tools.config.cluster import Cluster

    ranks = 1
    for kind in ("tensor-model", "pipeline-model", "context"):
        ranks *= whole_number(given.get(name := f"{kind}-parallel-size"), name) or 1
    devices = int(os.environ.get("WORLD_SIZE", ranks))
    run = read_flags(given, {}, "", Context(known, load(PRICED_FOR, Cluster), devices)).run
    asked = {each.name: getattr(request, each.name) for each in fields(ScheduleOptions)}
    choice = replace(
        run.schedule,
        **asked,
        name=request.schedule,
        memory_cap=_text_of_cap(request.memory_cap) if not request.plans_offload else None,
        module=request.schedule_module,
    )
    takes_chunks = request.is_stock or request.searches or "chunks" in getattr(request.family, "options", ())
    cut = replace(run.parallelism, chunks=run.parallelism.chunks if takes_chunks else None)
    return replace(run, schedule=choice, parallelism=cut)


def _text_of_cap(cap: MemoryCap | None) -> str | None:
    """Return a memory cap as a flag's text, to the byte; ``None`` without a cap."""
    return None if cap is None else ",".join(f"{each!r}{'B' if cap.in_bytes else ''}" for each in cap.amounts)


def cpu_flags(arguments: list[str]) -> list[str]:
    """Return the flags that a Megatron command line lacks for a run on CPU ranks, and log them.

    The caller appends them. The last occurrence of a flag counts, so they override any ``--transformer-impl`` but
    ``local``. Without ``--micro-batch-size``, which Megatron's training requires, the command line is another program's
    and gets no flags.

    Raises:
        UnsupportedError: a flag asks for a kernel that only a GPU has.
    """
    flags = _values(arguments)
    if "micro-batch-size" not in flags:
        return []
    refuse(flag_values(flags), CPU)
    lacking = {name: value for name, value in CPU_FLAGS.items() if name not in flags}
    if flags.get(_LAYERS) != CPU_FLAGS[_LAYERS]:
        lacking[_LAYERS] = CPU_FLAGS[_LAYERS]  # the last one counts
    added = words(lacking)
    if added:
        _tell("CPU ranks: added %s", " ".join(added))
    return added


def _check_cap(request: Request, shape: Shape) -> None:
    """Raise an UnsupportedError if the schedule cannot keep the memory cap; skip schedules that take long to build.

    Long is an estimated 0.5 s. Caps in bytes are not checked here, and neither are schedules that are searched, read
    from a file, asynchronous, or have offload or a cut vocabulary. The first step checks every cap. ``shape`` has 0
    microbatches if the flags do not give their number.
    """
    others = (request.searches, request.file, request.plans_offload, request.cuts_vocabulary, request.is_asynchronous)
    size = estimated(shape.num_devices, shape.num_microbatches, shape.chunks or 1, is_fitted(request.schedule))
    prompt = size.actions > 0 and size.seconds < _PROMPT_SECONDS
    if prompt and request.cap_in_units is not None and not any(others):
        choose(request, shape, Knowledge(prices_of(request.costs)[0]))


def _microbatches(flags: dict[str, str | bool], num_devices: int) -> int:
    """Return the number of microbatches of one pipeline per step, by the batch sizes of the flags; 0 if it is unknown.

    ``num_devices`` is the number of pipeline ranks.
    """
    if any(cut_flags.given(flags, name) for name in ("rampup-batch-size", "step-batch-size-schedule")):
        return 0
    ranks = (
        num_devices * (_whole(flags, "tensor-model-parallel-size") or 1) * (_whole(flags, "context-parallel-size") or 1)
    )
    replicas = int(os.environ.get("WORLD_SIZE", 0)) // ranks
    batch = replicas * (_whole(flags, "micro-batch-size") or 0)
    return (_whole(flags, "global-batch-size") or 0) // batch if batch else 0


def _whole(flags: dict[str, str | bool], name: str) -> int | None:
    value = flags.get(name)
    return int(value) if isinstance(value, str) and value.isdecimal() else None


def _values(arguments: Sequence[str]) -> dict[str, str | bool]:
    """Return each flag without ``--`` and the word after it; ``True`` if there is none. The last occurrence counts."""
    return {flag[2:]: each[-1][0] if each[-1] else True for flag, each in _by_flag(arguments).items()}
