"""The choices of the planner: every parallelism of a model on a cluster, and every schedule for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, get_args

from megatron_pipemem.errors import ConfigError, PipememError, UnsupportedError
from megatron_pipemem.families.interleaved import why_megatron_refuses
from megatron_pipemem.gates import GateQuestion, gates
from megatron_pipemem.model.activations import layer_bytes
from megatron_pipemem.model.cut_flags import GROUP_SIZE
from megatron_pipemem.model.layout import needed_layers
from megatron_pipemem.model.model import Execution, Recompute
from megatron_pipemem.refusals import flag_values
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.options import AUTO, SLICE_CUTS, STOCK, TOKENS, SliceCut
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import families, synchronous_families
from megatron_pipemem.tools.config.loading import nearest
from megatron_pipemem.tools.config.runs import EP_OVERLAP, OVERLAPS, Run, ScheduleChoice
from megatron_pipemem.tools.planner.parameter_bytes import DISTRIBUTED
from megatron_pipemem.tools.planner.replay import Order, family_options
from megatron_pipemem.tools.planner.slices import proposed_slices, why_not_sliced, with_slices
from megatron_pipemem.tools.planner.variants import IN_PAIRS, PLAIN, variants

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
OF_REPLICAS = {DISTRIBUTED: True, "overlap-grad-reduce": True, "overlap-param-gather": True}
"""Flags that the prices of several data-parallel ranks assume, unless the run sets them otherwise."""
STOCKS_ALONE = (*OVERLAPS, "defer-embedding-wgrad-compute", "wgrad-deferral-limit")
"""Flags that hide messages or move the head's W. Only Megatron's own schedules support these, except for ``EP_OVERLAP``."""
_KEPT_OF_SCHEDULE = ("recompute_modules", "overlap_steps", "wgrad_inputs", "early_wgrad")
_MOST_CHUNKS = 8
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_SLICES: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
_DISPATCHER = "moe-token-dispatcher-type"
_LEAST_SAVED = 0.02  # of a layer's bytes


@dataclass(frozen=True)
class Limits:
    """The values that a user allows for some keys of ``KEYS``, such as ``tp``.

    For all other keys, the functions ``cuts`` and ``orders`` choose the values.
    """

    allowed: Mapping[str, Collection[object]] = field(default_factory=dict)  # of ``KEYS``

    def __post_init__(self) -> None:
        for key in self.allowed:
            if key not in KEYS:
                raise ConfigError("unknown-key", f"is not a key of --only; {nearest(key, KEYS)}", key=key)

    def check(self, run: Run) -> None:
        """Raise a ConfigError for an allowed value that this run cannot have."""
        for key, values in self.allowed.items():
            possible = KEYS[key](run)
            for value in values:
                if value in possible:
                    continue
                if isinstance(possible[0], str):
                    hint = nearest(str(value), possible)
                else:
                    hint = f"possible on {run.cluster.num_devices} devices are {', '.join(map(str, possible))}"
                raise ConfigError("bad-choice", f"cannot be {shortened(value)}; {hint}", key=key)

    def admits(self, **values: object) -> bool:
        return all(value in self.allowed[key] for key, value in values.items() if key in self.allowed)


def cuts(run: Run, limits: Limits, rejected: Counter[str]) -> Iterator[Run]:
    """Yield the run with every possible parallelism over all devices of its cluster, without a schedule.

    The size of microbatches and the recomputation vary too. Expert parallelism, the global batch and the modules
    of selective recomputation stay as in the run. So do context parallelism, slices and their cut, unless the limits
    name them. If neither the run nor the limits name slices, those that may shorten steps are tried too. A run with
    flags that hide messages in layers is yielded with them for Megatron's schedules, and without them for ours. If it
    may run in pairs, it is yielded for that too, with the schedule ``auto``. If its steps overlap, only the run without
    these flags is yielded. ``rejected`` counts impossible runs by reason.
    """
    parallelism, devices = run.parallelism, run.cluster.num_devices
    if devices % parallelism.cp and "cp" not in limits.allowed:
        rejected[f"cp {parallelism.cp} does not divide {devices} devices"] += 1
        return
    contexts = KEYS["cp"](run) if "cp" in limits.allowed else (parallelism.cp,)
    for tp, pp, cp in product(KEYS["tp"](run), KEYS["pp"](run), contexts):
        dp = devices // (cp * tp * pp)
        if dp * cp * tp * pp != devices or not limits.admits(tp=tp, pp=pp, dp=dp, cp=cp):
            continue
        if pp > run.model.layers + 2:
            rejected["more pipeline ranks than layers, embedding and head"] += 1
            continue
        for micro_batch, recompute in product(KEYS["micro_batch"](run), RECOMPUTE):
            if not limits.admits(micro_batch=micro_batch, recompute=recompute):
                continue
            cut = replace(
                parallelism, tp=tp, pp=pp, dp=dp, cp=cp, micro_batch=micro_batch, chunks=None, sequence_parallel=tp > 1
            )
            choice = replace(
                ScheduleChoice(recompute=recompute),
                **{key: getattr(run.schedule, key) for key in _KEPT_OF_SCHEDULE},
            )
            flags = {**OF_REPLICAS, **run.flags} if dp * cp > 1 else run.flags
            whole = replace(run, parallelism=cut, schedule=choice, flags=flags)
            for slices, way in _slicings(whole, run.schedule, limits, rejected):
                candidate = whole if slices == 1 else with_slices(without_overlap(whole), slices, way)
                if (reason := _impossible(candidate)) is not None:
                    rejected[reason] += 1
                    continue
                if hides_messages(candidate) and not choice.overlap_steps:
                    yield candidate
                    if candidate.pairs and pp > 1 and may_pair(candidate):
                        paired = in_pairs(candidate)
                        yield replace(paired, schedule=replace(choice, name=AUTO))
                yield without_overlap(candidate)


def _slicings(
    whole: Run, choice: ScheduleChoice, limits: Limits, rejected: Counter[str]
) -> Iterator[tuple[int, SliceCut]]:
    """Yield the numbers of slices to try for a run without slices, and the ways to cut them.

    ``choice`` is the schedule that the user requests. If neither it nor the limits name a number, those are tried that
    may shorten steps.
    """
    counts = _SLICES
    if "slices" not in limits.allowed:
        proposed, reason = ((), None) if choice.slices else proposed_slices(without_overlap(whole))
        counts = (choice.slices or 1, *proposed)
        rejected.update([reason] if reason else [])
    ways = SLICE_CUTS if "slice_cut" in limits.allowed else (choice.slice_cut,)
    for count, way in product(counts, ways):
        if count == 1 and way == ways[0] and limits.admits(slices=1):
            yield 1, TOKENS
        elif count > 1 and limits.admits(slices=count, slice_cut=way):
            yield count, way


def without_overlap(run: Run) -> Run:
    """Return the run without the flags that hide messages within layers or that only Megatron's schedules support."""
    apart = {flag: value for flag, value in run.flags.items() if flag not in STOCKS_ALONE}
    return replace(run, flags=apart)


def in_pairs(run: Run) -> Run:
    """Return the run with its forwards and backwards in pairs, and without flags that only Megatron's schedules support."""
    bare = without_overlap(run)
    return replace(bare, flags={_DISPATCHER: "alltoall"} | bare.flags | {EP_OVERLAP: True})


def may_pair(run: Run) -> bool:
    """Return whether schedules of this package can run the passes of a run's model in pairs."""
    execution, dispatcher = run.execution, run.flags.get(_DISPATCHER)
    if not run.units.are_whole or run.schedule.overlap_steps or run.model.mtp_layers:
        return False
    if not _exchanges(execution) or execution.precision == "fp32" or dispatcher == "allgather":
        return False
    return not any(gates(GateQuestion(Request("1f1b", pairs=True), flag_values(run.flags))))


def _exchanges(execution: Execution) -> bool:
    """Return whether tokens travel to experts on other ranks, and none of that is recomputed."""
    return execution.ep > 1 and execution.recompute != "full" and not execution.recomputes("moe")


def hides_messages(run: Run) -> bool:
    """Return whether a run hides messages within layers."""
    return run.execution.tp_overlap or run.pairs


def is_stocks(run: Run) -> bool:
    """Return whether a run keeps flags with which it takes Megatron's own schedules."""
    return run.schedule.name == STOCK and hides_messages(run)


def _impossible(run: Run) -> str | None:
    cut = run.parallelism
    if cut.global_batch % (cut.micro_batch * cut.dp):
        return "the global batch is not a multiple of micro_batch x dp"
    if (reason := cut.why_not_experts()) is not None:
        return reason
    if 0 < sum(needed_layers(run.model.pattern or "", run.flags)) < cut.pp:
        return "fewer layers with experts than pipeline ranks, and Megatron's log of their losses needs one on each"
    if not run.units.are_whole and (reason := why_not_sliced(run)) is not None:
        return reason
    execution = run.execution
    try:
        execution.check(run.model)
    except ConfigError as error:
        return f"{error.key} {error.message}"
    if execution.recompute == "selective":
        kinds = Counter(run.model.all_kinds).items()
        everything, kept = (
            sum(layer_bytes(run.model, settings, kind).saved * count for kind, count in kinds)
            for settings in (replace(execution, recompute="none"), execution)
        )
        if kept > everything * (1 - _LEAST_SAVED):
            modules = ", ".join(execution.recompute_modules)
            return f"recomputing {modules} saves less than {_LEAST_SAVED:.0%} of the layers' activations"
    return None


def orders(run: Run, limits: Limits, rejected: Counter[str]) -> dict[Placement, list[Order]]:
    """Return the families that can run with a parallelism and that the limits allow, by their placement.

    Families with ``outclassed_by`` are left out unless the limits name them. So are all but 1f1b if there is one pipeline
    rank. ``rejected`` counts those left out, by reason, except those that the limits exclude.
    """
    by_placement: dict[Placement, list[Order]] = {}
    pp, layers = run.parallelism.pp, run.model.layers
    stock = _stock_orders(run) if is_stocks(run) else None
    named = limits.allowed.get("schedule", ())
    whole = (family for family in families() if family.runs(run.units) and not family.asynchronous)
    for family in whole if run.units.are_whole else synchronous_families(run.units):
        if not limits.admits(schedule=family.name):
            continue
        if stock is not None and family.name not in stock:
            continue
        if family.outclassed_by and family.name not in named and not (run.pairs and family.has_room_for_pairs):
            rejected[f"{family.name}: {family.outclassed_by}"] += 1
            continue
        if pp < family.min_devices or (pp == 1 and family.name != "1f1b" and family.name not in named):
            rejected["the schedule is for more pipeline ranks"] += 1
            continue
        if run.pairs and stock is None and family.name in _stock_orders(run) and family.name not in named:
            rejected[f"{family.name}: Megatron's own schedule runs the same order in pairs"] += 1
            continue
        for chunks in range(2, _MOST_CHUNKS + 1) if "chunks" in family.options else (None,):
            if not limits.admits(chunks=chunks or family.chunks):
                continue
            try:
                placement = family.placement_on(pp, family_options(chunks, run.units.parts))
            except PipememError:
                rejected[f"{family.name} has no schedule for the number of pipeline ranks or chunks"] += 1
                continue
            if placement.model_stages > max(layers + 2, pp):
                rejected["more stages than layers, embedding and head"] += 1
            else:
                by_placement.setdefault(placement, []).append(Order(family.name, chunks))
    return by_placement


def _stock_orders(run: Run) -> tuple[str, ...]:
    """Return the families whose orders Megatron's own schedules have, if they can run.

    To overlap expert-parallel messages, Megatron needs experts on several ranks that are not recomputed, and in a
    pipeline several chunks.
    """
    cut = run.parallelism
    if run.pairs and not _exchanges(run.execution):
        return ()
    if cut.pp == 1:
        return ("1f1b",)
    interleaved = ("interleaved",) * (why_not_in_chunks(run) is None)
    return interleaved if run.pairs else ("1f1b", *interleaved)


def why_not_in_chunks(run: Run) -> str | None:
    """Return the reason why Megatron's own schedule cannot run the microbatches in several chunks; ``None`` if it can."""
    cut, group = run.parallelism, run.flags.get(GROUP_SIZE)
    return why_megatron_refuses(cut.pp, cut.microbatches, None if group is None else int(group))


def check_stock_groups(run: Run) -> None:
    """Raise an UnsupportedError if Megatron's own schedule cannot run a run's microbatches in its several chunks."""
    cut = run.parallelism
    reason = why_not_in_chunks(run) if run.schedule.name == STOCK and (cut.chunks or 1) > 1 else None
    if reason is not None:
        raise UnsupportedError(
            "needs-microbatches",
            f"{reason}; take a multiple of {cut.pp} microbatches, such as "
            f"{cut.pp * max(1, round(cut.microbatches / cut.pp))}, by another global batch, or take schedule interleaved of "
            "this package, which runs any number",
        )


def _names() -> list[str]:
    return [family.name for family in families()]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _pipelines(run: Run) -> list[int]:
    return _divisors(run.cluster.num_devices)


KEYS: Mapping[str, Callable[[Run], Sequence[Any]]] = {
    "tp": lambda run: _divisors(run.cluster.devices_per_node),
    "pp": _pipelines,
    "cp": _pipelines,
    "dp": _pipelines,
    "micro_batch": lambda run: _MICRO_BATCHES,
    "chunks": lambda run: range(1, _MOST_CHUNKS + 1),
    "recompute": lambda run: RECOMPUTE,
    "slices": lambda run: _SLICES,
    "slice_cut": lambda run: SLICE_CUTS,
    "schedule": lambda run: [AUTO, *_names()],
    "variant": lambda run: [PLAIN, IN_PAIRS.name, *(variant.name for variant in variants())],
}
"""Functions from a run to the possible values of a key, by the keys that may be limited."""
