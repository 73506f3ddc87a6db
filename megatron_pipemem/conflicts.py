"""Check a request: the features that exclude each other, and the values that a schedule does not take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.request import FILE_SUFFIX, PROFILE, Request, algorithm_of, prices_of
from megatron_pipemem.schedule.costs_file import read_microbatch_costs
from megatron_pipemem.schedule.options import AUTO, TOKENS, check_effort, searched_placements, slice_counts
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import check_options, family, register_module
from megatron_pipemem.schedule.schedule_file import schedule_of_file
from megatron_pipemem.schedule.stream import UPDATE_EVERY, updates_per_batch

SEARCH_OPTIONS = ("chunks", "placement", "seconds", "effort", "seed", "period", "slices")

FEATURES: Mapping[str, Callable[[Request], bool]] = {
    "stock": lambda request: request.is_stock,
    "asynchronous": lambda request: request.is_asynchronous,
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
    "searched slices": lambda request: max(request.slice_counts) > 1,
    "slices": lambda request: request.slices > 1,
}
"""By the name of a feature, whether a request wants it."""

_IN_FLIGHT = (
    "schedule {schedule!r} leaves microbatches in flight between steps, which offload, recomputation, vocabulary parallelism "
    "and profiles do not know; pass "
)
_BARRIER = "steps of {schedule} do not go without a barrier between them: "
_PERIOD = "a period is searched for alone, without offload, recomputation and vocabulary passes; drop the option period"
_SLICES = (
    "slices are searched for without a period, offload, recomputation and vocabulary passes; drop these or the option"
)

CONFLICTS: Mapping[str, Mapping[str, str]] = {
    "stock": {
        "offload": "Megatron's own schedule has no place for offload or recomputation of ours; name another one, for example "
        "--pipemem-schedule 1f1b, or use Megatron's own flags",
        "vocabulary": "Megatron's own schedules have no passes for a cut vocabulary; take a schedule of this package, or pass "
        "--pipemem-vocab-parallel off",
        "single queue": "--pipemem-single-queue orders schedules of this package, and stock is Megatron's own; leave one of "
        "them out",
        "weights": "--pipemem-microbatch-costs orders microbatches for schedules of this package, and stock is Megatron's own; "
        "leave one of them out",
        "overlap": "--pipemem-overlap-steps is for schedules of this package, and stock is Megatron's own; leave one of them "
        "out",
    },
    "pieces": {
        "whole vocabulary": "--pipemem-vocab-piece-tokens is about a head cut over the pipeline; pass "
        "--pipemem-vocab-parallel 1, 2 or auto, or leave it out",
    },
    "vocabulary": {
        "offload": "offload and recomputation are not planned together with vocabulary passes; pass "
        "--pipemem-vocab-parallel off, or --pipemem-offload off and --pipemem-recompute none with Megatron's --recompute-*",
    },
    "asynchronous": {
        "offload": _IN_FLIGHT + "--pipemem-offload off and --pipemem-recompute none",
        "vocabulary": _IN_FLIGHT + "--pipemem-vocab-parallel off",
        "profile": _IN_FLIGHT + "--pipemem-costs unit or a file",
        "weights": "schedule {schedule!r} runs forwards of the next step, whose microbatches are not weighed yet; drop "
        "--pipemem-microbatch-costs, or take a synchronous schedule",
    },
    "overlap": {
        "vocabulary": _BARRIER
        + "all ranks compute every microbatch's logits together; pass --pipemem-vocab-parallel off",
        "host": _BARRIER + "activations on the host are accounted for by whole steps; pass --pipemem-offload off",
        "replicas": _BARRIER
        + "the two replicas of the model add up their gradients when all ranks have ended the step; take "
        "a schedule with one, like zbv",
        "weights": _BARRIER + "all ranks agree on an order of the microbatches before every step; drop "
        "--pipemem-microbatch-costs",
    },
    "period": {"vocabulary": _PERIOD, "offload": _PERIOD},
    "searched slices": {"period": _SLICES, "vocabulary": _SLICES, "offload": _SLICES},
    "slices": {
        "overlap": "sequence slices need a barrier between steps; drop --pipemem-overlap-steps, or take a schedule without "
        "slices",
        "weights": "microbatches that are weighed run whole; drop --pipemem-microbatch-costs, or take a schedule without "
        "sequence slices",
    },
}
"""By feature, the features that it excludes, with the reason and the remedy."""
_CODES = {"stock": "not-for-stock", "overlap": "no-overlap", "pieces": "needs-option", "slices": "conflicting-options"}
"""Codes of the errors of features that exclude others, if it is not ``conflicting-features``."""


def check_conflicts(request: Request) -> None:
    """Raise an UnsupportedError if a request wants two features that exclude each other."""
    for feature, excluded in CONFLICTS.items():
        if FEATURES[feature](request):
            code = _CODES.get(feature, "conflicting-features")
            for other, sentence in excluded.items():
                if FEATURES[other](request):
                    raise UnsupportedError(code, sentence.format(schedule=request.schedule))
    if request.overlap_steps and request.is_asynchronous:
        check_delays(request.schedule)


def requested(schedule: str, **settings: Any) -> Request:
    """Return the checked request for a schedule and settings as users name them; see ``check``."""
    return check(Request(schedule, **settings))


def check(request: Request) -> Request:
    """Return the request with its schedule file read and proved. No schedule is built.

    A PipememError says that its parts exclude each other, or that the file is not valid.
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
            f"or --pipemem-offload; {name!r} is what it is, so give the cap in activation units (1.0 is what 1F1B's "
            "first rank holds)",
        )
    if name.endswith(FILE_SUFFIX):
        if options:
            raise UnsupportedError(
                "options-of-file",
                f"a schedule file has no options; drop --pipemem-option {next(iter(options))}={next(iter(options.values()))}",
            )
        file = schedule_of_file(name, None if cap is None or request.plans_offload else cap.amount)
        check_barriers(name, file.vocabulary_barriers, request.vocab_parallel)
        request = replace(request, file=file)
        if file.vocabulary_barriers:
            request = request.decided(file.vocabulary_barriers)
    elif request.searches:
        check_search_options(options)
    elif not request.is_stock:
        check_options(name, options)
    check_conflicts(request)
    if request.is_asynchronous and UPDATE_EVERY in options:
        raise UnsupportedError(
            "has-own-flag",
            f"{UPDATE_EVERY} of schedule {name!r} is the number of microbatches of a step here; drop the option and "
            "choose --global-batch-size",
        )
    if request.file is None and not (request.searches or request.is_stock):
        family(name).chunks_per_device(options)  # refuses unknown options of the family
    _check_slice_cut(request)
    if isinstance(request.microbatch_costs, str):
        read_microbatch_costs(request.microbatch_costs)
    return request


def check_search_options(options: Mapping[str, Any], allowed: Sequence[str] = SEARCH_OPTIONS) -> None:
    """Raise an UnsupportedError if the search has no such option, or not with that value."""
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise UnsupportedError(
            "unknown-option", f"schedule 'auto' has no option {unknown[0]!r}; its options: {', '.join(allowed)}"
        )
    searched_placements(1, options.get("placement"), options.get("chunks"))
    check_effort(options.get("seconds", 0), options.get("effort", 0), options.get("seed", 0))
    slice_counts(options.get("slices", 1))
    if not isinstance(period := options.get("period", False), bool):
        raise UnsupportedError("bad-choice", f"period of a search must be true or false, not {period!r}")


def check_barriers(name: str, barriers: int, vocab_parallel: str) -> None:
    """Raise an UnsupportedError if a schedule's vocabulary passes differ from those of ``--pipemem-vocab-parallel``.

    A schedule with 0 ``barriers`` has no passes, so any can be added.
    """
    if barriers and vocab_parallel not in (AUTO, str(algorithm_of(barriers))):
        raise UnsupportedError(
            "conflicting-options",
            f"{name} is a schedule for a vocabulary cut over the pipeline; pass --pipemem-vocab-parallel "
            f"{algorithm_of(barriers)}, not {vocab_parallel}",
        )


def _check_slice_cut(request: Request) -> None:
    """Refuse another cut of sequences than the default if the schedule has no slices."""
    if request.slice_cut != TOKENS and request.slices == 1:
        raise UnsupportedError(
            "no-slices",
            f"--pipemem-slice-cut {request.slice_cut} says how sequences are cut into slices, and schedule "
            f"{request.schedule!r} leaves them whole; add --pipemem-option slices=4 to one that takes it, or leave it out",
        )


def check_replicas(placement: Placement) -> None:
    """Raise an UnsupportedError if Megatron cannot build the placement's replicas of the model."""
    if placement.replicas == 1:
        return
    if placement.name != "bidirectional":
        raise UnsupportedError(
            "unsupported-placement",
            f"{placement.replicas} replicas of the model run in opposite directions only, stage r and stage p-1-r on device r; "
            "this placement has them elsewhere",
        )
    if placement.num_devices == 1:
        raise UnsupportedError(
            "no-pipeline",
            "two replicas of the model need at least two pipeline ranks; pass --pipeline-model-parallel-size 2 or more, or "
            "another schedule",
        )


def check_delays(name: str) -> None:
    """Raise an UnsupportedError if batches of an asynchronous family cannot follow each other without a barrier."""
    if not updates_per_batch(name):
        raise UnsupportedError(
            "conflicting-features",
            f"schedule {name!r} updates after every microbatch, and not once per step, which ranks could delay; drop "
            "--pipemem-overlap-steps, or take pipedream-2bw",
        )
