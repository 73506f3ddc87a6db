"""The rows of experiments H and I: which schedules run, what a row holds, and what is claimed of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import proof

from megatron_pipemem import Costs, build_schedule
from megatron_pipemem.mcore.report.action_bytes import ActionBytes
from megatron_pipemem.mcore.step.extension import Observation
from megatron_pipemem.runtime.trace import Stopwatch
from megatron_pipemem.runtime.transport import edges
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.measured import costs_from
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Program, Schedule
from megatron_pipemem.schedule.simulator import simulate

LAYERS, SEQUENCE, VOCABULARY, DEVIATION = 2, 4096, 2048, 0.02
"""Layers of a rank, tokens of a microbatch, an embedding and a head that are small beside the layers, and the standard
deviation of the weights."""
WARM, STEPS = 3, 5
"""Steps that load kernels and allocate gradients, and measured steps."""
_PASSES = {"F_ms": Kind.F, "I_ms": Kind.I, "W_ms": Kind.W}


@dataclass(frozen=True)
class Workload:
    """What all schedules of a table run. ``layers`` is ``local`` or ``te``, as for ``gpt_chunks.builder``."""

    devices: int = 4
    microbatches: int = 8
    hidden: int = 4096
    layers: str = "local"

    def __str__(self) -> str:
        return f"p = {self.devices}, m = {self.microbatches}, h = {self.hidden}, {self.layers} layers"


FIRST = Workload()


def workloads(devices: Sequence[int]) -> list[Workload]:
    """Return all workloads for these numbers of ranks, without ``FIRST``."""
    every = product(devices, (8, 16), (4096, 2048), proof.kinds_of_layers())
    return [workload for fields in every if (workload := Workload(*fields)) != FIRST]


@dataclass(frozen=True)
class Case:
    """One schedule. ``stock`` runs Megatron's own function, and ``cap`` is the memory cap of ``auto``."""

    schedule: str
    chunks: int = 1
    stock: bool = False
    cap: float | None = None

    def __str__(self) -> str:
        cap = "" if self.cap is None else f" under {self.cap:g}"
        return f"{'stock' if self.stock else 'pipemem'} {self.schedule}{cap}"

    @property
    def plain(self) -> Case:
        """This project's case with the same order."""
        return Case(self.schedule, self.chunks)


STOCK, PRICED = Case("1f1b", stock=True), Case("zb-h1")
"""The case that others are compared with, and the case whose passes are the prices of ``auto``."""
CASES = (
    STOCK.plain,
    STOCK,
    PRICED,
    Case("zbv", 2),
    Case("v-half", 2),
    Case("auto", 2, cap=1.0),
    Case("interleaved", 2),
    Case("interleaved", 2, stock=True),
    Case("auto", 2, cap=0.75),
    Case("v-min", 2),
    Case("gis", 2),
)
"""The most telling first. A case of stock's comes after the same order of ours, whose passes price its simulation."""


@dataclass(frozen=True)
class Measured:
    """What the ranks of a case measured. Lists have one value per rank.

    Args:
        seconds: of every measured step.
        losses: of every microbatch of the last step.
        allocated_bytes: the most that the allocator gave out beside weights and gradients; empty on CPU.
        reserved_bytes: the most that the allocator took for it.
        medians: kind, stage and median seconds of every pass; empty for stock's functions, which are not timed.
        message_seconds: of one message in an idle pipeline.
        predicted_bytes: of the activations.
        orders: of the schedule that ran, as ``Schedule.to_csv`` writes them; empty for stock's functions.
        host_ahead_seconds: between the ends of the measured steps on the host and on the device.
        connection_bytes: of the GPU, which the channels of the pipeline took per directed edge, at both ends together.
    """

    seconds: list[float]
    losses: list[float]
    allocated_bytes: list[int] = field(default_factory=list)
    reserved_bytes: list[int] = field(default_factory=list)
    medians: list[tuple[str, int, float]] = field(default_factory=list)
    message_seconds: float = 0.0
    predicted_bytes: list[int] = field(default_factory=list)
    orders: str = ""
    host_ahead_seconds: list[float] = field(default_factory=list)
    connection_bytes: float = 0.0


@dataclass
class Table:
    """The rows of one workload.

    Args:
        report: holds the rows, also those of earlier calls.
        workload: what the schedules run.
        tolerance: how far a step of ours may be from its simulation, as a share of it; ``None`` claims nothing of time.
    """

    report: proof.Report
    workload: Workload
    tolerance: float | None

    def missing(self, cases: Sequence[Case] = CASES) -> list[Case]:
        """Return the cases that have no row."""
        return [case for case in cases if not self.report.has(self._name(case))]

    def costs(self, case: Case = PRICED) -> Costs | None:
        """Return the prices that the passes of a case have, per device share; ``None`` if the case has no row."""
        values = self._values(case)
        if not values:
            return None
        of_stages = (values[name] for name in _PASSES)
        forward, inputs, weights = (sum(seconds) / 1e3 / self.workload.devices for seconds in of_stages)
        return Costs(forward, inputs, weights, p2p=values["message_ms"] / 1e3)

    def add_failure(self, case: Case, failure: str) -> None:
        """Add the row of a case that did not end."""
        self.report.add(self._name(case), {}, [failure])

    def add(self, case: Case, measured: Measured) -> None:
        """Add the row of a case."""
        if case.stock and not self._values(case.plain):
            return self.add_failure(case, f"{case.plain} has not run, whose passes price the simulation")
        devices, took = self.workload.devices, statistics.median(measured.seconds)
        values: dict[str, object] = {"seconds": took, "spread": (max(measured.seconds) - min(measured.seconds)) / took}
        if case.stock:
            schedule = build_schedule(case.schedule, num_devices=devices, num_microbatches=self.workload.microbatches)
            costs = self._costs_of_stages(case.plain)
        else:
            schedule = Schedule.from_csv(measured.orders)
            costs = _costs(measured, schedule.placement)
        planned = simulate(schedule, costs).makespan
        values |= {"simulated_seconds": planned, "measured_over_simulated": took / planned}
        first: Mapping[str, Any] = values if case == STOCK else self._values(STOCK)
        values |= _ratios(first, values)
        if not case.stock:
            of_stages = costs.seconds(schedule.placement)
            values |= {name: [seconds * 1e3 for seconds in of_stages[kind]] for name, kind in _PASSES.items()}
            values["message_ms"] = measured.message_seconds * 1e3
        for name in ("predicted", "allocated", "reserved"):
            if nbytes := getattr(measured, f"{name}_bytes"):
                values[f"{name}_GiB"] = [size / (1 << 30) for size in nbytes]
        if measured.host_ahead_seconds:
            values["host_ahead_ms"] = [seconds * 1e3 for seconds in measured.host_ahead_seconds]
        if measured.connection_bytes:
            values["connection_MiB_per_edge"] = measured.connection_bytes / (1 << 20)
        values["loss"] = sum(measured.losses) / len(measured.losses)
        if case == STOCK:  # comes after the same order of ours, and is compared with it
            first = self._values(case.plain)
            self.report.amend(self._name(case.plain), _ratios(values, first))
        self.report.add(self._name(case), values, self._missed(case, values, first))

    def add_order(self, cases: Sequence[Case] = CASES) -> None:
        """Add the row that compares the order of the schedules with the simulated one, once all cases are there."""
        name = f"order of schedules, {self.workload}"
        rows = {case: self._values(case) for case in cases}
        if self.report.has(name) or not all(rows.values()):
            return
        by_seconds = sorted(cases, key=lambda case: rows[case]["seconds"])
        missed = []
        for faster, slower in combinations(by_seconds, 2):
            planned = [rows[case]["simulated_seconds"] for case in (faster, slower)]
            # Closer ones may change places within the tolerance of both.
            if self.tolerance is not None and planned[0] > planned[1] * (1 + 2 * self.tolerance):
                missed.append(f"{slower} should be faster than {faster}")
        self.report.add(name, {"fastest_first": ", ".join(map(str, by_seconds))}, missed)

    def _missed(self, case: Case, values: Mapping, first: Mapping) -> list[str]:
        ratio, missed = values["measured_over_simulated"], []
        if self.tolerance is not None and not case.stock and abs(ratio - 1) > self.tolerance:
            missed.append(f"a step takes {ratio:.3f} of its simulation")
        if first and values["loss"] != first["loss"]:
            missed.append(f"the loss is {values['loss']!r}, and not {first['loss']!r} as under 1F1B")
        return missed

    def _costs_of_stages(self, case: Case) -> Costs:
        values = self._values(case)
        forward, inputs, weights = (tuple(ms / 1e3 for ms in values[name]) for name in _PASSES)
        return Costs(forward, inputs, weights, p2p=values["message_ms"] / 1e3)

    def _name(self, case: Case) -> str:
        return f"{case}, {self.workload}"

    def _values(self, case: Case) -> Mapping:
        name = self._name(case)
        return next((row.values for row in self.report.rows if row.case == name), {})


def _ratios(first: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, float]:
    """Return how many times as fast as stock's 1F1B a row is, measured and simulated; nothing without stock's row."""
    if not first:
        return {}
    return {
        "times_as_fast_as_stock_1f1b": first["seconds"] / values["seconds"],
        "as_simulated": first["simulated_seconds"] / values["simulated_seconds"],
    }


def _costs(measured: Measured, placement: Placement) -> Costs:
    """Return the costs per stage. Of a fused B, one half counts as I and one as W."""
    medians = {(Kind(kind), stage): seconds for kind, stage, seconds in measured.medians}
    links = {edge: measured.message_seconds for edge in edges(placement)}
    return costs_from(medians, links, placement, Costs())


def summary(
    program: Program, observations: Mapping[int, Observation]
) -> tuple[list[tuple[str, int, float]], list[int]]:
    """Return the median seconds of every pass of an observed step, and the bytes that each rank's step is predicted."""
    medians, predicted = [], []
    for rank, observation in sorted(observations.items()):
        ledger, watch, learnt = observation.ledger, Stopwatch(), ActionBytes()
        assert ledger is not None, "an observed step counts its bytes"
        watch.add(observation.clock.actions())
        medians += [(str(kind), stage, seconds) for (kind, stage), seconds in watch.medians().items()]
        learnt.learn(program, rank, ledger)
        predicted.append(learnt.predict(program, rank, ledger).most_bytes)
    return medians, predicted
