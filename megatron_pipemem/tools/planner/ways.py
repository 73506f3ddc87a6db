"""A way to run a model: the answer of ``plan``, ``layout``, ``advise`` and ``explain``.

All of them list ways of one run and rank them by time and memory. They differ in what they vary: ``plan`` the
parallelism, the order and its variants, ``advise`` the order and the layout, ``layout`` the layers of each stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import floor, log10
from pathlib import Path
from typing import Any

from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.baseline import bytes_of_1f1b
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.options import STOCK
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import families, family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.tools.config.cluster import GIB
from megatron_pipemem.tools.config.loading import settings_of, write_yaml
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner.early_wgrad import moves_weights
from megatron_pipemem.tools.planner.replay import Order, OrderPrice, family_schedule, measured, shortest
from megatron_pipemem.tools.planner.slices import part_tokens
from megatron_pipemem.tools.planner.space import hides_messages
from megatron_pipemem.tools.planner.step import PlannedStep, mfu, price
from megatron_pipemem.tools.planner.variants import IN_PAIRS, PLAIN, Variant


@dataclass(frozen=True)
class Way:
    """A run under one schedule, with its predicted times and bytes."""

    run: Run = field(repr=False)
    """The run for ``pipemem launch``. If there are ``passes``, ``run_files`` names their file as the schedule."""
    order: Order  # the family of the schedule and its chunks per rank; ``search`` for an order that was searched
    step: PlannedStep = field(repr=False)  # the predicted costs of its stages
    makespan: float  # seconds of the schedule alone; the period if no barrier stands between steps
    peak_bytes: tuple[float, ...] = field(repr=False)  # bytes per pipeline rank, everything included
    hidden_seconds: tuple[float, ...] = field(default=(), repr=False)
    """Per pipeline rank, the seconds of a step by which pairs shorten its work; empty without pairs."""
    host_bytes: tuple[float, ...] = field(default=(), repr=False)
    """Per pipeline rank, the bytes of activations on its host; empty without offload."""
    variant: str = PLAIN  # such as ``offload`` or ``vocabulary-2``
    passes: Schedule | None = field(default=None, repr=False)  # if a family's name is not enough
    memory_seconds: float = 0.0  # part of the seconds that is due to the memory limit, by a lower bound

    @classmethod
    def of(cls, run: Run, order: Order, step: PlannedStep, price: OrderPrice, **more: Any) -> Way:
        """Return the way of an order with this time and these peaks of activations. ``more`` has further fields."""
        return cls(
            run, order, step, price.seconds, step.held(price.peak_bytes), price.hidden_seconds, price.host_bytes, **more
        )

    @property
    def schedule(self) -> str:
        """The name of the order of passes: a family, or ``search`` for an order that was searched."""
        return self.order.name

    @property
    def units(self) -> Units:
        return self.run.units

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of each part of a sequence; one number if sequences are whole."""
        return (self.run.model.sequence,) if self.units.are_whole else part_tokens(self.run, self.units.parts)

    @property
    def is_stock(self) -> bool:
        """Whether the schedule is Megatron's own."""
        return self.run.schedule.name == STOCK

    @property
    def name(self) -> str:
        """The schedule in words: whether it is stock's, its family, chunks and slices, and whether it runs in pairs."""
        return (
            ("stock " if self.is_stock else "")
            + self.order.name
            + (f" v={self.order.chunks}" if self.order.chunks else "")
            + ("" if self.units.are_whole else f" slices={self.units.parts}")
            + " in pairs" * self.run.pairs
        )

    @property
    def variant_text(self) -> str:
        """The variant in words, after a name; empty for a plain one."""
        algorithm = self.variant.removeprefix("vocabulary-")
        if algorithm != self.variant:
            return f", vocabulary cut by Algorithm {algorithm}"
        return "" if self.variant == PLAIN else f" + {self.variant}"

    @property
    def layers(self) -> tuple[int, ...]:
        """The pieces of every stage, see ``model.layout``."""
        return self.step.layers

    @property
    def hides_messages(self) -> bool:
        """Whether the run hides messages within layers."""
        return hides_messages(self.run)

    @property
    def seconds(self) -> float:
        """Seconds of a whole training step."""
        return self.makespan + self.step.outside_seconds

    @cached_property
    def gain_without_barrier(self) -> float | None:
        """The ratio of the makespan with a barrier between steps to the period without it.

        Above 1, steps are faster without the barrier. ``None`` for a run with the barrier, and for one whose order is
        neither a family's nor among its ``passes``.
        """
        if not self.run.schedule.overlap_steps or (self.passes is None and not self._is_family):
            return None
        cut, costs = self.run.parallelism, self.step.costs
        if self.passes is not None:
            return simulate(self.passes, costs).makespan / self.makespan
        moves = moves_weights(self.run)
        with_barrier = measured(self.schedule, cut.pp, cut.microbatches, cut.chunks, costs, moves_weights=moves)
        return with_barrier.seconds / self.makespan

    @property
    def _is_family(self) -> bool:
        return any(self.order.name == candidate.name for candidate in families())

    @cached_property
    def has_earlier_weights(self) -> bool:
        """Whether W run earlier than the family's schedule says (``schedule.earlier_weights``)."""
        if not (self._is_family and moves_weights(self.run) and self.variant in (PLAIN, IN_PAIRS.name)):
            return False
        cut = self.run.parallelism
        published = self.published_schedule(shortest(cut.pp, cut.microbatches))
        return with_earlier_weights(published, self.step.costs) is not published

    def published_schedule(self, num_microbatches: int) -> Schedule:
        """Return the family's schedule of this order as it is published, for a step of ``num_microbatches``."""
        order, costs = self.order, self.step.costs
        priced = costs if self.units.are_whole and "costs" in family(order.name).options else None
        pp, parts = self.run.parallelism.pp, self.units.parts
        return family_schedule(order.name, pp, num_microbatches, order.chunks, priced, parts)

    @property
    def peak(self) -> float:
        return max(self.peak_bytes)

    @cached_property
    def share_of_1f1b(self) -> float | None:
        """The peak bytes of activations as a fraction of 1F1B's with the same parallelism; ``None`` if that is 0."""
        cut = self.run.parallelism
        linear = Placement.linear(cut.pp)
        whole = bytes_of_1f1b(price(self.run, linear).costs, linear, cut.microbatches)
        besides = self.step.held((0.0,) * cut.pp)
        rows = zip(self.peak_bytes, besides, self.step.sent_share, strict=True)
        return max((peak - static) / (1 + sent) for peak, static, sent in rows) / whole if whole else None

    @property
    def mfu(self) -> float:
        return mfu(self.run, self.seconds)

    @property
    def work_seconds(self) -> float:
        """Seconds of a step in which the busiest rank computes."""
        return self.run.parallelism.microbatches * max(self.step.work_seconds) - self.saved_by_pairs

    @property
    def saved_by_pairs(self) -> float:
        """Seconds of a step by which pairs shorten the work of the busiest rank."""
        return self.hidden_seconds[self.step.busiest] if self.hidden_seconds else 0.0

    @property
    def bubble_rate(self) -> float:
        """Fraction of the makespan in which the busiest rank idles."""
        return max(0.0, 1 - self.work_seconds / self.makespan)

    @property
    def idle_rate(self) -> float:
        """Fraction of the makespan in which ranks idle on average, including idle time of ranks with less work."""
        work = self.run.parallelism.microbatches * sum(self.step.work_seconds) - sum(self.hidden_seconds)
        return max(0.0, 1 - work / len(self.step.work_seconds) / self.makespan)

    @property
    def messages(self) -> int:
        """Number of messages of a step between pipeline ranks, forward and back."""
        hops = sum(here != there for here, there in pairwise(self.step.placement.devices))
        return 2 * len(self.run.units) * hops

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """Seconds of forward and backward of one microbatch on every stage."""
        seconds = self.step.costs.seconds(self.step.placement)
        return tuple(map(sum, zip(seconds[Kind.F], seconds[Kind.B], strict=True)))

    @property
    def slowest(self) -> float:
        """Seconds that the busiest rank computes per microbatch."""
        return max(self.step.work_seconds)

    @property
    def imbalance(self) -> float:
        """Fraction by which the busiest rank computes longer than the mean of all ranks."""
        return self.slowest * len(self.step.work_seconds) / sum(self.step.work_seconds) - 1

    def gain(self, today: Way) -> float:
        """Return the fraction by which a step is shorter than that of ``today``; negative if it is longer."""
        return 1 - self.seconds / today.seconds

    @property
    def losses(self) -> dict[str, float]:
        """Seconds of a step beyond the model's evenly divided computation, by cause, the largest first."""
        m, step = self.run.parallelism.microbatches, self.step
        busiest = step.busiest
        seconds_by_cause = {
            "bubble": self.makespan - self.work_seconds,
            "uneven stages": m * (step.work_seconds[busiest] - sum(step.work_seconds) / len(step.work_seconds)),
            "messages within layers": m * step.communication_seconds[busiest] - self.saved_by_pairs,
            "recompute": m * step.recompute_seconds[busiest],
            "gradient reduction": step.reduction_seconds,
            "optimizer": step.optimizer_seconds,
        }
        return dict(sorted(seconds_by_cause.items(), key=lambda item: -item[1]))

    @property
    def binds(self) -> str:
        """The cause that costs most, and its fraction of the step, as text.

        If more memory would save 1 % or more of the step, the text says so.
        """
        cause, seconds = next(iter(self.losses.items()))
        text = f"{cause} {seconds / self.seconds:.1%}"
        gained = self.memory_seconds / self.seconds
        return f"{text}; more memory saves {gained:.1%}" if gained >= 0.01 else text


AS_FAST = 0.01
"""Fraction of a step within which another step counts as equally long."""


def first_as_fast(ways: Sequence[Way], base: Way) -> Way:
    """Return the first of ``ways`` that is as fast as the fastest of them, within ``AS_FAST`` of a step of ``base``."""
    slowest = min(way.seconds for way in ways) + AS_FAST * base.seconds
    return next(way for way in ways if way.seconds <= slowest)


def run_files(way: Way, path: Path) -> dict[Path, str]:
    """Return the texts of the files that a way's run needs, by path. No file is written.

    ``path`` is that of the run file. An order that is more than a family's name becomes a schedule file next to it.
    """
    run, files = way.run, {}
    if way.passes is not None and run.schedule.name != STOCK:
        order = path.with_suffix(".csv")
        files[order] = way.passes.to_csv()
        choice = replace(run.schedule, name=str(order))
        if way.passes.offloads:  # the file has the offload already, and a flag would plan it again
            choice = replace(choice, offload="off")
        run = replace(run, schedule=choice)
    return files | {path: f"{_heading(way)}{write_yaml(settings_of(run))}"}


def facts(way: Way) -> dict[str, Any]:
    """Return a way's seconds, bytes and settings as a JSON object. ``peak_bytes`` has a value per pipeline rank."""
    cut = way.run.parallelism
    return {
        "schedule": way.schedule,
        "hides_messages": way.hides_messages,
        "variant": way.variant,
        "recompute": way.run.schedule.recompute,
        "slices": way.units.parts,
        "slice_cut": way.run.schedule.slice_cut,
        **{key: getattr(cut, key) for key in ("tp", "pp", "dp", "cp", "ep", "chunks", "micro_batch", "microbatches")},
        "layers": list(way.step.layers),
        "seconds": way.seconds,
        "mfu": way.mfu,
        "bubble_rate": way.bubble_rate,
        "idle_rate": way.idle_rate,
        "gain_without_barrier": way.gain_without_barrier,
        "peak_bytes": list(way.peak_bytes),
        "share_of_1f1b": way.share_of_1f1b,
        "rollback_bytes": list(way.step.rollback_bytes),
        "losses_seconds": way.losses,
        "binds": way.binds,
        "run": settings_of(way.run),
    }


def gibibytes(nbytes: float) -> str:
    """Return a number of bytes in GiB as text, rounded up so that it is safe as a limit.

    From 1 GiB it has one decimal, below that two significant digits.
    """
    amount = nbytes / GIB
    digits = 1 if amount >= 1 or amount <= 0 else 1 - floor(log10(amount))
    tenths = floor(amount * 10**digits)
    while float(text := f"{tenths / 10**digits:.{digits}f}") * GIB < nbytes:
        tenths += 1
    return text


def gibibytes_more(nbytes: float, base: float) -> str:
    """Return the difference of two numbers of bytes in GiB, as the texts of ``gibibytes`` show them."""
    texts = gibibytes(nbytes), gibibytes(base)
    digits = max(len(text.partition(".")[2]) for text in texts)
    return f"{float(texts[0]) - float(texts[1]):.{digits}f}"


def _heading(way: Way) -> str:
    return (
        f"# Planned: {way.seconds:.4g} s a step, {way.mfu:.1%} MFU, ranks idle {way.idle_rate:.1%}, at most "
        f"{gibibytes(way.peak)} GiB a rank; largest loss: {way.binds}.\n"
    )


@dataclass(frozen=True)
class Answer:
    """The plans that the planner has found, and why it rejected all other cuts, schedules and variants."""

    plans: tuple[Way, ...] = field(repr=False)  # the fastest first
    rejected: Counter[str] = field(repr=False)  # number of rejected choices, by reason
    considered: int  # number of all choices, plans included
    seconds: float  # that planning took


@dataclass(frozen=True)
class CandidateGroup:
    """A run's parallelism with one placement and variant, and the families of schedules to try."""

    run: Run  # with its parallelism
    step: PlannedStep
    orders: tuple[Order, ...]  # schedules with this placement
    variant: Variant | None  # the variant to apply to them
    bound: float  # seconds that no step of the group can beat
    memory_seconds: float  # part of the bound that is due to the memory limit


@dataclass(frozen=True)
class FamilyCandidate:
    """A family of schedules for a run's parallelism, before the variant is applied."""

    group: CandidateGroup = field(repr=False)  # cut, placement and variant
    order: Order
    simulates_all: bool = False  # whether the variant is simulated next with all microbatches, and not with a few


Entry = tuple[float, int, Run | CandidateGroup | FamilyCandidate | Way]
"""Seconds of a step or their lower bound, a serial number for equal seconds, and the entry."""
