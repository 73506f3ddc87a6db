"""Read the measured step of a report, and compute the facts of ``pipemem explain``: the time of the step by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_pipemem.choose.knowledge import UNIT, action_memory
from megatron_pipemem.errors import ConfigError
from megatron_pipemem.files import read_json
from megatron_pipemem.part_costs import Passes
from megatron_pipemem.results import measured_bubble
from megatron_pipemem.schedule.action import COMPUTE, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Measured, Timeline, simulate
from megatron_pipemem.tools.config import run_layout
from megatron_pipemem.tools.config.runs import REPORT, Run
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown
from megatron_pipemem.tools.planner.profile import slowdown_of
from megatron_pipemem.tools.planner.step import price
from megatron_pipemem.tools.report.measured_step import CAUSES, NANOSECONDS, MeasuredStep, idle_causes
from megatron_pipemem.tools.report.run import opened_report
from megatron_pipemem.values import MOST_LAYERS, check_magnitudes

_LACKS_STEP = (
    "has no times of actions: an earlier version wrote it, an asynchronous schedule or steps without a barrier ran, or some "
    "actions could not be timed; train a few steps again with --pipemem-report"
)
"""Why a report without a recorded step cannot be explained."""


@dataclass(frozen=True)
class Case:
    """The measured step of a run, and what else its report says of it."""

    step: MeasuredStep
    layers: tuple[int, ...] | None = None  # of every stage; ``None`` if unknown
    memory: Mapping[Kind, tuple[float, ...]] | None = None
    """By kind of action, the change of the device's bytes, one value per stage and slice. ``None``: activation units."""
    outside_seconds: float = 0.0  # seconds of a training step outside the pipeline: optimizer, reductions, logging
    bubble_rate: float | None = None  # of the run; ``None`` to take the rate of the step
    bytes_of_1f1b: float | None = None  # the peak of 1F1B for the model; ``None`` if it is unknown
    held_bytes: tuple[tuple[int, ...], ...] | None = None  # counted bytes per device after every pass of the step
    peaks: tuple[int, ...] = ()  # the most bytes counted per device, messages included; empty without ``held``

    @property
    def schedule(self) -> Schedule:
        return self.step.schedule

    @cached_property
    def own_timeline(self) -> Timeline:
        """The timeline of the run's own schedule, simulated with its measured times."""
        memory = None if self.memory is None else action_memory(self.memory, self.schedule.units.parts)
        return simulate(self.schedule, self.step.costs(memory))

    @property
    def measured_timeline(self) -> Timeline:
        """The timeline of the measured step, with the run's bubble rate and counted bytes."""
        measured = Measured(self.bubble_rate, self.held_bytes, self.bytes_of_1f1b, bool(self.peaks))
        timeline = replace(self.step.timeline(self.own_timeline.costs), measured=measured)
        return replace(timeline, peaks=self.peaks) if self.peaks else timeline

    @property
    def planned_timeline(self) -> Timeline:
        """``own_timeline`` with the counted peaks of the run, for pictures beside ``as_ran``."""
        if self.memory is None or not self.peaks:
            return self.own_timeline
        measured = Measured(bytes_of_1f1b=self.bytes_of_1f1b, has_counted_peaks=True)
        return replace(self.own_timeline, peaks=self.peaks, measured=measured)


def read_case(path: Path) -> Case:
    """Return the measured step in a report, with its schedule and costs. ``path`` is the report file or its folder.

    Raise a ConfigError if the report has no recorded step.
    """
    if (path / "points").is_dir():
        raise ConfigError(
            "wrong-file", f"it is a grid's folder; give that of a point, as in {path / 'points' / '000'}", file=path
        )
    path = path / REPORT if path.is_dir() else path
    with opened_report(path) as report:
        case = case_of_report(report)
    if case is None:
        raise ConfigError("wrong-file", _LACKS_STEP, file=path)
    return case


def case_of_report(report: Mapping[str, Any]) -> Case | None:
    """Return the last step of a run from its parsed ``--pipemem-report`` file; ``None`` if the file has no step.

    Raise a KeyError, TypeError or ValueError if the file is not a report.
    """
    recorded, plans = report.get("last_step"), report["plans"]
    if recorded is None:
        return None
    check_magnitudes(recorded)
    schedule = Schedule.from_csv(recorded["orders"], name=str(recorded["schedule"]))
    spans = tuple(
        tuple((int(start), int(end)) for start, _, end in (span.partition("-") for span in spans.split()))
        for spans in recorded["spans"]
    )
    step = MeasuredStep(schedule, spans, _split(plans[-1], schedule))
    memory, layers = recorded["memory"], recorded["layers"]
    if memory is not None:
        memory = {Kind(kind): tuple(map(float, changes)) for kind, changes in memory.items()}
    if layers is not None:
        layers = tuple(map(int, layers))
    if not all(0 <= count <= MOST_LAYERS for count in layers or ()):
        raise ValueError(f"layers of last_step are not numbers from 0 to {MOST_LAYERS}")
    stages, parts = schedule.num_stages, schedule.units.parts
    if len(layers or (0,) * stages) != stages or any(
        len(changes) != stages * parts for changes in (memory or {}).values()
    ):
        cut = f" of {parts} slices" * (parts > 1)
        raise ValueError(f"layers or memory of last_step do not have one value for each of {stages} stages{cut}")
    iteration, of_1f1b = recorded["iteration_seconds"], report.get("bytes_of_1f1b")
    return Case(
        step,
        layers,
        memory or None,
        max(0.0, float(iteration) - step.length_ns / NANOSECONDS) if iteration else 0.0,
        measured_bubble(report),
        None if of_1f1b is None else int(of_1f1b),
        *_counted(recorded, schedule),
    )


def _counted(
    recorded: Mapping[str, Any], schedule: Schedule
) -> tuple[tuple[tuple[int, ...], ...] | None, tuple[int, ...]]:
    """Return the bytes that every device held after its passes, and its peaks; nothing if the report lacks them."""
    device_bytes = recorded.get("held")
    if device_bytes is None:
        return None, ()
    levels = tuple(tuple(map(int, row)) for row in device_bytes)
    passes = [sum(action.kind in COMPUTE for action in order) for order in schedule.orders]
    peaks = tuple(map(int, recorded["peaks"]))
    if [*map(len, levels)] != passes or len(peaks) != len(passes):
        raise ValueError(f"held or peaks of last_step do not fit the passes of {len(passes)} devices")
    return levels, peaks


def _split(plan: Mapping[str, Any], schedule: Schedule) -> Costs:
    """Return the run's costs, which divide a fused B into I and W; unit costs if the plan has no price per stage.

    ``plan`` is the entry of the plan in the report.
    """
    prices = plan["costs"]
    if plan["priced_by"] == UNIT or len(prices["forward"]) not in (
        schedule.num_stages,
        schedule.num_stages * schedule.units.parts,
    ):
        return Costs()
    forward, inputs, weights = (tuple(prices[name]) for name in ("forward", "backward_input", "backward_weight"))
    return Costs(forward, inputs, weights)


def measured_slowdown_of(path: Path, run: Run) -> MeasuredSlowdown:
    """Return the ratios of measured to predicted seconds, from a profile of a run's model or from a report of the run.

    Raises:
        ConfigError: the profile is of another model, or the report of a run with another number of pipeline ranks or
            layers, or with slices (``other-model``); or the file has no measured passes (``wrong-file``).
    """
    report = read_json(path, "a profile or a report")
    if not isinstance(report, dict) or "last_step" not in report:
        return slowdown_of(path, run)
    case = read_case(path)
    placement = case.step.schedule.placement
    if placement.num_devices != run.parallelism.pp or not case.step.schedule.units.are_whole:
        raise ConfigError(
            "other-model",
            "is of a run with another number of pipeline ranks, or with slices; give the report of a run that has as "
            "many pipeline ranks as the run to plan, and no slices",
            file=path,
        )
    layers = case.layers if placement.replicas == 1 and run.model.pattern is None else None
    if layers is not None and sum(layers) != run.model.layers:
        raise ConfigError(
            "other-model",
            f"is of a run with {sum(layers)} layers, and the run to plan has {run.model.layers}; give its own report",
            file=path,
        )
    step = price(run, placement, run_layout.pieces_of(run, placement.model_stages))
    predicted, measured = step.costs.seconds(placement), case.step.of_stages()
    # Messages within layers are in the measured passes, and their predictions have no ratio.
    messages = sum(step.communication_seconds) / sum(step.work_seconds)
    slowdown = Passes(
        *(_ratio(sum(measured[kind]), sum(predicted[kind]), messages) for kind in (Kind.F, Kind.I, Kind.W))
    )
    links = case.step.link_seconds
    expected = sum(step.costs.link_seconds(*link) for link in links)
    return MeasuredSlowdown(slowdown, slowdown, sum(links.values()) / expected if expected else 1.0)


def _ratio(measured: float, predicted: float, messages: float) -> float:
    """Return measured over predicted seconds of computing alone, at least 0.1; 1 if none are predicted.

    ``messages`` is the share of messages in the predicted seconds.
    """
    return max(0.1, (measured / predicted - messages) / (1 - messages)) if predicted else 1.0


def explain(case: Case) -> dict[str, Any]:
    """Return the JSON object of ``pipemem explain``: the time of a step by cause."""
    step, schedule = case.step, case.schedule
    usual, n, idle = case.step.of_stages(), schedule.units.parts, _idle(step)
    return {
        "schedule": schedule.name,
        "devices": schedule.num_devices,
        "chunks": schedule.placement.num_chunks,
        "microbatches": schedule.num_microbatches,
        "bubble_rate": min(row["idle_ns"] for row in idle) / step.length_ns,
        "seconds": step.length_ns / NANOSECONDS,
        "outside_seconds": case.outside_seconds,
        "simulated_seconds": case.own_timeline.makespan,
        "stages": [
            sum(sum(seconds[stage * n : (stage + 1) * n]) for seconds in usual.values())
            for stage in range(schedule.num_stages)
        ],
        "layers": case.layers,
        "slowest_microbatch": max(step.microbatch_factors),
        "links": {f"{a}-{b}": seconds for (a, b), seconds in step.link_seconds.items()},
        "idle": idle,
        "in_bytes": case.memory is not None,
        "peak": case.own_timeline.peak,
        "bytes_of_1f1b": case.bytes_of_1f1b,
    }


def _idle(step: MeasuredStep) -> list[dict[str, Any]]:
    """Return for every device the nanoseconds of work in a step, and of idle time by cause.

    Together these are the length of the step.
    """
    work: Sequence[int] = step.work_of(step.nanoseconds)
    return [
        {
            "device": device_idle.device,
            "work_ns": work[device_idle.device],
            "idle_ns": device_idle.idle_ns,
            "causes_ns": {cause: device_idle.causes[cause] for cause in CAUSES},
            "late_ns": {str(device): nanoseconds for device, nanoseconds in device_idle.late_ns.items()},
        }
        for device_idle in idle_causes(step)
    ]
