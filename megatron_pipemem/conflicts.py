"""Check a request: find features that exclude each other, and values that the requested schedule does not accept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.part_costs import prices_of
from megatron_pipemem.request import FILE_SUFFIX, PROFILE, Request, algorithm_of
from megatron_pipemem.schedule.costs_file import read_microbatch_costs
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.options import AUTO, LAYERWISE, TOKENS, check_effort, searched_placements, slice_counts
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import check_options, family, register_module

SEARCH_OPTIONS = ("chunks", "placement", "seconds", "effort", "seed", "period", "slices")

FEATURES: Mapping[str, Callable[[Request], bool]] = {
    "stock": lambda request: request.is_stock,
    "asynchronous": lambda request: request.is_asynchronous,
    "updates per microbatch": lambda request: is_updated_per_microbatch(request),
    "offload": lambda request: request.plans_offload,
    "host": lambda request: request.may_offload,
    "vocabulary": lambda request: request.cuts_vocabulary,
    "pieces": lambda request: request.vocab_piece_tokens is not None,
    "whole vocabulary": lambda request: not request.cuts_vocabulary,
    "profile": lambda request: request.costs == PROFILE,
    "overlap": lambda request: request.overlap_steps,
    "weights": lambda request: request.microbatch_costs is not None,
    "replicas": lambda request: request.replicas > 1,
    "single queue": lambda request: request.single_queue,
    "period": lambda request: request.searches_period,
    "searched slices": lambda request: request.searches and request.may_cut,
    "slices": lambda request: request.may_cut,
    "pairs": lambda request: request.pairs,
    "layerwise": lambda request: request.rng == LAYERWISE,
    "graphs": lambda request: request.graphs,
    "search": lambda request: request.searches,
    "recomputation": lambda request: request.may_recompute,
}
"""Functions that return whether a request wants a feature, by the name of the feature."""

_NOT_IN_FLIGHT = (
    "schedule {schedule!r} leaves microbatches in flight between steps, which offload, recomputation, vocabulary parallelism "
    "and profiles do not support; pass "
)
_NEEDS_BARRIER = "steps of {schedule} need a barrier between them here: "
_NOT_WITH_PERIOD = (
    "a search for the period of steps (option period, by default with --pipemem-overlap-steps) excludes offload, "
    "recomputation and vocabulary passes; drop one of the two"
)
_NOT_WITH_PAIRS = (
    "--overlap-moe-expert-parallel-comm runs forwards and backwards in pairs, which exclude {0}; drop the flag, or {1}"
)
_NOT_WITH_GRAPHS = (
    "--cuda-graph-impl captures every pass as a graph of its own, which excludes {0}; pass --cuda-graph-impl none, "
    "or {1}"
)
_NOT_WITH_SLICES = (
    "a search for slices excludes one for the period of steps (option period, by default with "
    "--pipemem-overlap-steps), offload, recomputation and vocabulary passes; drop the slices, or the other feature"
)

CONFLICTS: Mapping[str, Mapping[str, str]] = {
    "stock": {
        "offload": "this package cannot add offload or recomputation to Megatron's own schedule; name another one, for "
        "example --pipemem-schedule 1f1b, or use Megatron's own flags",
        "vocabulary": "Megatron's own schedules have no passes for a cut vocabulary; use a schedule of this package, "
        "or pass --pipemem-vocab-cut off",
        "single queue": "--pipemem-single-queue orders schedules of this package, and stock is Megatron's own; leave one of "
        "them out",
        "weights": "--pipemem-microbatch-costs orders microbatches for schedules of this package, and stock is Megatron's own; "
        "leave one of them out",
        "overlap": "--pipemem-overlap-steps is for schedules of this package, and stock is Megatron's own; leave one of them "
        "out",
    },
    "pieces": {
        "whole vocabulary": "--pipemem-vocab-piece-tokens needs an LM head that is cut over the pipeline; pass "
        "--pipemem-vocab-cut 1, 2 or auto, or leave --pipemem-vocab-piece-tokens out",
    },
    "vocabulary": {
        "offload": "offload and recomputation are not planned together with vocabulary passes; pass "
        "--pipemem-vocab-cut off, or --pipemem-offload off and --pipemem-recompute none with Megatron's --recompute-*",
    },
    "asynchronous": {
        "offload": _NOT_IN_FLIGHT + "--pipemem-offload off and --pipemem-recompute none",
        "vocabulary": _NOT_IN_FLIGHT + "--pipemem-vocab-cut off",
        "profile": _NOT_IN_FLIGHT + "--pipemem-costs unit or a file",
        "weights": "schedule {schedule!r} runs forwards of the next step, whose microbatches have no costs yet; drop "
        "--pipemem-microbatch-costs, or use a synchronous schedule",
    },
    "overlap": {
        "vocabulary": _NEEDS_BARRIER
        + "all ranks compute every microbatch's logits together; pass --pipemem-vocab-cut off",
        "host": _NEEDS_BARRIER
        + "offloaded activations are counted per whole step; pass --pipemem-offload off, and use a "
        "schedule that does not offload by itself",
        "replicas": _NEEDS_BARRIER
        + "gradients are summed over the two replicas of the model when all ranks have ended the step; use "
        "a schedule with one replica, such as zbv",
        "weights": _NEEDS_BARRIER + "all ranks agree on an order of the microbatches before every step; drop "
        "--pipemem-microbatch-costs",
    },
    "updates per microbatch": {
        "overlap": "schedule {schedule!r} updates weights after every microbatch, and not once per step, so ranks cannot delay "
        "an update; drop --pipemem-overlap-steps, or use pipedream-2bw",
    },
    "period": {"vocabulary": _NOT_WITH_PERIOD, "offload": _NOT_WITH_PERIOD},
    "searched slices": {"period": _NOT_WITH_SLICES, "vocabulary": _NOT_WITH_SLICES, "offload": _NOT_WITH_SLICES},
    "slices": {
        "overlap": "sequence slices need a barrier between steps; drop --pipemem-overlap-steps, or use a schedule "
        "without slices",
        "weights": "microbatches with costs of their own cannot be cut into slices; drop --pipemem-microbatch-costs, "
        "or use a schedule without sequence slices",
    },
    "pairs": {
        "stock": _NOT_WITH_PAIRS.format(
            "a measured run of Megatron's own schedule", "leave --pipemem-schedule stock out"
        ),
        "asynchronous": _NOT_WITH_PAIRS.format("asynchronous schedules", "use a synchronous schedule"),
        "offload": _NOT_WITH_PAIRS.format("offload and recomputation by the schedule", "pass --pipemem-offload off"),
        "host": _NOT_WITH_PAIRS.format("offload", "use a schedule that does not offload by itself"),
        "vocabulary": _NOT_WITH_PAIRS.format("a cut vocabulary", "pass --pipemem-vocab-cut off"),
        "overlap": _NOT_WITH_PAIRS.format("steps without a barrier", "drop --pipemem-overlap-steps"),
        "weights": _NOT_WITH_PAIRS.format("microbatches with costs of their own", "drop --pipemem-microbatch-costs"),
        "slices": _NOT_WITH_PAIRS.format("sequence slices", "use a schedule without slices"),
        "layerwise": _NOT_WITH_PAIRS.format("random numbers per layer", "pass --pipemem-rng stock"),
    },
    "graphs": {
        "asynchronous": _NOT_WITH_GRAPHS.format("asynchronous schedules", "use a synchronous schedule"),
        "offload": _NOT_WITH_GRAPHS.format("offload and recomputation by the schedule", "pass --pipemem-offload off"),
        "host": _NOT_WITH_GRAPHS.format("offload", "use a schedule that does not offload by itself"),
        "recomputation": _NOT_WITH_GRAPHS.format(
            "recomputation by the schedule", "use a schedule that does not recompute"
        ),
        "vocabulary": _NOT_WITH_GRAPHS.format("a cut vocabulary", "pass --pipemem-vocab-cut off"),
        "profile": _NOT_WITH_GRAPHS.format("measured costs of the passes", "pass --pipemem-costs unit or a file"),
        "overlap": _NOT_WITH_GRAPHS.format("steps without a barrier", "drop --pipemem-overlap-steps"),
        "weights": _NOT_WITH_GRAPHS.format("microbatches with costs of their own", "drop --pipemem-microbatch-costs"),
        "replicas": _NOT_WITH_GRAPHS.format(
            "two replicas of the model", "use a schedule with one replica, such as zbv"
        ),
        "slices": _NOT_WITH_GRAPHS.format("sequence slices", "use a schedule without slices"),
        "pairs": _NOT_WITH_GRAPHS.format("forwards and backwards in pairs", "drop --overlap-moe-expert-parallel-comm"),
        "layerwise": _NOT_WITH_GRAPHS.format("random numbers per layer", "pass --pipemem-rng stock"),
        "search": _NOT_WITH_GRAPHS.format("a searched schedule", "name a family or a schedule file"),
    },
}
"""The features that each feature excludes, with a message that has the reason and the remedy."""
_CODES = {"stock": "not-for-stock", "overlap": "no-overlap", "pieces": "needs-option", "slices": "conflicting-options"}
"""The codes of errors about these features; about all others it is ``conflicting-features``."""


def is_updated_per_microbatch(request: Request) -> bool:
    """Return whether an asynchronous schedule updates weights after every microbatch, and not once per step."""
    if not request.is_asynchronous:
        return False
    from megatron_pipemem.schedule.stream import updates_per_batch

    return not updates_per_batch(request.schedule)


def conflicts(request: Request) -> Iterator[UnsupportedError]:
    """Yield an error for every two features of a request that exclude each other."""
    for feature, excluded in CONFLICTS.items():
        if FEATURES[feature](request):
            code = _CODES.get(feature, "conflicting-features")
            for other, sentence in excluded.items():
                if FEATURES[other](request):
                    yield UnsupportedError(code, sentence.format(schedule=request.schedule))


def check_conflicts(request: Request) -> None:
    """Raise the first error of ``conflicts``, if there is one."""
    for error in conflicts(request):
        raise error


def make_request(schedule: str, *, simulated: bool = False, **settings: Any) -> Request:
    """Make a request from a schedule's name and the settings of ``Request``, check it, and return it.

    The request of a run is checked with ``check``. ``simulated`` is for a request that is only simulated: its options
    are checked and nothing else, and a search also accepts the option ``max_chunks``. The caller has read its schedule
    file, and passes costs in bytes if the memory cap is in bytes.
    """
    request = Request(schedule, **settings)
    if not simulated:
        return check(request)
    _check_options(request, (*SEARCH_OPTIONS, "max_chunks"))
    return request


def check(request: Request) -> Request:
    """Check that the settings of a request fit together, and return the request.

    If the request names a schedule file, the result is a copy of the request with that file read and proved. Raise a
    PipememError if settings exclude each other, or if an option or a file of the request is not valid. The run's
    schedule is not built.
    """
    if request.schedule_module is not None:
        register_module(request.schedule_module)
    name, options, cap = request.schedule, request.options, request.memory_cap
    if not request.is_stock:
        prices_of(request.costs)
    if request.in_bytes and not (request.searches or request.is_stock or request.plans_offload):
        raise UnsupportedError(
            "unit-mismatch",
            f"a memory cap in bytes ({cap}) needs --pipemem-schedule auto, which fits a schedule to it, "
            f"or --pipemem-offload; {shortened(name)} has a fixed order, so give the cap in activation units (1.0 is the peak "
            "of 1F1B's first rank)",
        )
    if name.endswith(FILE_SUFFIX):
        if options:
            raise UnsupportedError(
                "options-of-file",
                f"a schedule file has no options; drop --pipemem-option {next(iter(options))}={next(iter(options.values()))}",
            )
        from megatron_pipemem.schedule.schedule_file import schedule_of_file

        file = schedule_of_file(name, None if cap is None or request.plans_offload else cap.amount)
        check_barriers(name, file.vocabulary_barriers, request.vocab_cut)
        request = replace(request, file=file)
        if file.vocabulary_barriers:
            request = request.decided(file.vocabulary_barriers)
    _check_options(request)
    check_conflicts(request)
    if request.is_asynchronous:
        from megatron_pipemem.schedule.stream import UPDATE_EVERY

        if UPDATE_EVERY in options:
            raise UnsupportedError(
                "has-own-flag",
                f"{UPDATE_EVERY} of schedule {shortened(name)} is the number of microbatches of a step in a run; drop the "
                "option and choose --global-batch-size",
            )
    if request.file is None and not (request.searches or request.is_stock):
        family(name).chunks_per_device(options)  # refuses unknown options of the family
    _check_slice_cut(request)
    if isinstance(request.microbatch_costs, str):
        read_microbatch_costs(request.microbatch_costs)
    return request


def _check_options(request: Request, of_search: Sequence[str] = SEARCH_OPTIONS) -> None:
    """Raise an UnsupportedError if the search (``auto``) or the family does not accept one of the request's options."""
    name, options = request.schedule, request.options
    if not request.searches:
        if request.file is None and not request.is_stock:
            check_options(name, options)
        return
    unknown = sorted(set(options) - set(of_search))
    if unknown:
        raise UnsupportedError(
            "unknown-option",
            f"schedule {shortened(name)} has no option {shortened(unknown[0])}; its options: {', '.join(of_search)}",
        )
    searched_placements(1, options.get("placement"), options.get("chunks"))
    check_effort(options.get("seconds", 0), options.get("effort", 0), options.get("seed", 0))
    slice_counts(options.get("slices", 1))
    if not isinstance(period := options.get("period", False), bool):
        raise UnsupportedError("bad-choice", f"period of a search must be true or false, not {shortened(period)}")


def check_barriers(name: str, barriers: int, vocab_cut: str) -> None:
    """Refuse a schedule with vocabulary passes of another algorithm than the flag ``vocab_cut`` asks for.

    A schedule with 0 barriers has no vocabulary passes yet, so those of any algorithm can be added.
    """
    if barriers and vocab_cut not in (AUTO, str(algorithm_of(barriers))):
        raise UnsupportedError(
            "conflicting-options",
            f"{name} is a schedule for a vocabulary cut over the pipeline; pass --pipemem-vocab-cut "
            f"{algorithm_of(barriers)}, not {vocab_cut}",
        )


def _check_slice_cut(request: Request) -> None:
    """Raise an UnsupportedError if ``--pipemem-slice-cut`` is given and the schedule has no sequence slices."""
    if request.slice_cut != TOKENS and not request.may_cut:
        raise UnsupportedError(
            "no-slices",
            f"--pipemem-slice-cut {request.slice_cut} says how sequences are cut into slices, and schedule "
            f"{shortened(request.schedule)} does not cut them; use a schedule with the option slices and add --pipemem-option "
            "slices=4, or leave --pipemem-slice-cut out",
        )


def check_replicas(placement: Placement) -> None:
    """Raise an UnsupportedError if Megatron cannot build the placement's replicas of the model."""
    if placement.replicas == 1:
        return
    if placement.name != "bidirectional":
        raise UnsupportedError(
            "unsupported-placement",
            f"{placement.replicas} replicas of the model must run in opposite directions, with stage r and stage p-1-r "
            "on device r; use a placement of that kind (bidirectional), or one replica",
        )
    if placement.num_devices == 1:
        raise UnsupportedError(
            "no-pipeline",
            "two replicas of the model need at least two pipeline ranks; pass --pipeline-model-parallel-size 2 or more, or "
            "another schedule",
        )
