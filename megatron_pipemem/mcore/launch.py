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
from difflib import get_close_matches
from itertools import chain, takewhile

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.choose.model_cut import known_chunks
from megatron_pipemem.conflicts import make_request
from megatron_pipemem.errors import UnsupportedError, readable
from megatron_pipemem.flags import CHECK_FLAG, flag_parser, plan_parser, values_by_flag, words_by_flag
from megatron_pipemem.gates import GateQuestion, check_gates
from megatron_pipemem.logs import logger, show_log, tell
from megatron_pipemem.model import cut_flags, layout
from megatron_pipemem.part_costs import prices_of
from megatron_pipemem.refusals import flag_values
from megatron_pipemem.request import FORMER_NAMES, Request, flags_of
from megatron_pipemem.runtime.first_failure import watch_job
from megatron_pipemem.schedule.options import AUTO, OFF, STOCK, parse_options
from megatron_pipemem.schedule.schedule_file import check_devices_of_file
from megatron_pipemem.schedule.size import estimated, is_fitted
from megatron_pipemem.tools_by_flag import load_tool
from megatron_pipemem.values import MOST_LAYERS, Limit, whole_number

_PIPELINE_SIZE = "pipeline-model-parallel-size"
_OVERLAP, _DELAY = "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"
_GRAPHS = "cuda-graph-impl"
_PARTS_OF_GRAPHS = ("cuda-graph-modules", "cuda-graph-scope")
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
    watch_job()
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


@readable("the command line", UnsupportedError)
def take_flags(arguments: list[str]) -> tuple[Request | None, list[str]]:
    """Split a Megatron command line into the request of the ``--pipemem-*`` flags and the other arguments.

    The request is checked. It is ``None`` if there is no such flag. The other arguments keep their order. Raise a
    PipememError for wrong, missing or contradicting flags, for a plan or schedule file that cannot be read, and for an
    unknown schedule.
    """
    for flag, occurrences in words_by_flag(arguments).items():
        for value in chain.from_iterable(occurrences):
            layout.check_length(flag.removeprefix("--"), value)
    plan, arguments = plan_parser().parse_known_args(arguments)
    if plan.pipemem_plan is not None:
        arguments = load_tool("--pipemem-plan").add_planned_flags(plan.pipemem_plan, arguments)
    parser = flag_parser()
    namespace, others = parser.parse_known_args(arguments)
    for argument in filter(_resembles_ours, takewhile(lambda argument: argument != "--", others)):
        _check_known(argument.partition("=")[0], [*parser._option_string_actions, CHECK_FLAG])
    if len(others) == len(arguments):
        return None, others
    flags = flags_of(Request)
    settings = {name: value for name, value in vars(namespace).items() if name in flags}
    if "schedule" not in settings:
        raise UnsupportedError("unknown-flag", "--pipemem-schedule is missing; name a schedule")
    for name, value in settings.items():
        if flags[name].repeated:
            settings[name] = parse_options(flags[name].name, value)
    if settings["schedule"] != STOCK and _OVERLAP in others:
        # Megatron takes the flag for placements of its own schedule only, so the model gets it when it is built.
        settings["pairs"], others = True, [argument for argument in others if argument not in (_OVERLAP, _DELAY)]
    request = make_request(**settings).with_graphs(values_by_flag(others).get(_GRAPHS))
    return request, cut_flags.without_flags(others, (_GRAPHS,)) if request.graphs else others


def _resembles_ours(argument: str) -> bool:
    """Return whether an argument begins with most letters of our prefix, so that a comparison with all our flags pays."""
    return (Counter(argument[2:12]) & Counter(_PREFIX)).total() > len(_PREFIX) // 2


def _check_known(flag: str, flags: list[str]) -> None:
    """Raise an UnsupportedError if ``flag``, which no parser took, begins like or resembles a ``--pipemem-*`` flag."""
    ours = flag.startswith("--pipemem")
    new_name = FORMER_NAMES.get(flag.removeprefix("--pipemem-").replace("-", "_"))
    if ours and new_name is not None:
        new_flag = flags_of(Request)[new_name].name
        raise UnsupportedError("old-key", f"{flag} is a flag of an earlier version; write {new_flag}")
    if flag.startswith("-") and (near := get_close_matches(flag, flags, n=1, cutoff=0.6 if ours else _NEAR)):
        raise UnsupportedError("unknown-flag", f"unknown flag {flag}; did you mean {near[0]}?")
    if ours:
        raise UnsupportedError("unknown-flag", f"unknown flag {flag}; pipemem run --help lists those of this package")


# With these flags, the sizes of the model are not on the command line. Only Megatron and the built model are checked then.
_ELSEWHERE = ("yaml-cfg", "use-checkpoint-args")


@readable("the command line", UnsupportedError)
def add_virtual_stages(request: Request, arguments: list[str]) -> list[str]:
    """Return the command line with the flag for the schedule's model chunks per rank, unless its flags cut the model.

    A hybrid model gets its layer pattern cut into stages instead, and a model that Megatron cannot cut evenly gets a
    layout. With layout ``auto``, the planner cuts the model. Raise an UnsupportedError without a pipeline, or if
    the schedule does not run a model with these arguments. With Megatron's own schedule, or if the sizes are not on the
    command line, no flag is added.
    """
    if request.layout == AUTO:
        arguments = load_tool("--pipemem-layout").with_best_layout(request, arguments)
    flags = values_by_flag(arguments)
    if request.outputs and cut_flags.is_given(flags, "skip-train"):
        files = ", ".join(map(str, request.outputs))
        tell(logger, "--skip-train runs no training step, so %s will not be written", files, level=logging.WARNING)
    if request.is_stock or any(cut_flags.is_given(flags, name) for name in _ELSEWHERE):
        return arguments
    p, layers = (_whole(flags, name) for name in (_PIPELINE_SIZE, "num-layers"))
    p = p or 1
    Limit(1, MOST_LAYERS).read(f"--{_PIPELINE_SIZE}", p)
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
    words = words_by_flag(arguments)
    parts = {name: " ".join(words[f"--{name}"][-1]) for name in _PARTS_OF_GRAPHS if f"--{name}" in words}
    check_gates(GateQuestion(request, flag_values({**flags, **parts})))
    placements = cut_flags.possible_placements(flags, request.schedule, request.options, p, layers, file)
    pattern = cut_flags.cut_pattern(flags, placements[0], with_head=request.vocab_cut == OFF)
    written = (pattern or "").partition("=")[2] or cut_flags.given_pattern(flags)[1]
    if layout.is_cut(written):
        cut_flags.check_experts(flags, written, placements[0])
    for remark in cut_flags.remarks(flags, request.schedule):
        tell(logger, "%s", remark, level=logging.WARNING)
    if pattern is not None:
        tell(logger, "the pattern is cut into the stages of %s: %s", placements[0].name, pattern)
        return [*cut_flags.without_flags(arguments, layout.FIRST_OR_LAST), pattern]
    chunks = known_chunks(placements[0])
    needed = None if layers is None else cut_flags.needed_layout(flags, layers, p, placements[0])
    if needed is not None:
        tell(logger, "%s, so the layers get --%s '%s'", needed.why, layout.FLAG, needed.text)
        arguments = [
            *cut_flags.without_flags(arguments, cut_flags.REPLACED_BY_LAYOUT),
            f"--{layout.FLAG}={needed.text}",
        ]
        flags = values_by_flag(arguments)
    _check_cap(
        request,
        Shape(p, chunks, _microbatches(flags, p), _whole(flags, cut_flags.GROUP_SIZE)),
    )
    if chunks == 1 or any(cut_flags.is_given(flags, name) for name in cut_flags.CUTS):
        return arguments
    return [*arguments, f"--{cut_flags.VIRTUAL_STAGES}", str(chunks)]


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
    if any(cut_flags.is_given(flags, name) for name in ("rampup-batch-size", "step-batch-size-schedule")):
        return 0
    ranks = (
        num_devices * (_whole(flags, "tensor-model-parallel-size") or 1) * (_whole(flags, "context-parallel-size") or 1)
    )
    replicas = int(os.environ.get("WORLD_SIZE", 0)) // ranks
    batch = replicas * (_whole(flags, "micro-batch-size") or 0)
    return (_whole(flags, "global-batch-size") or 0) // batch if batch else 0


def _whole(flags: dict[str, str | bool], name: str) -> int | None:
    return whole_number(flags.get(name), name)
