"""Functions that enable and disable the plugin in this process, and those that training loops call while it is on.

The way from ``enable()`` to the functions of Megatron that are replaced:

    enable
      conflicts.requested       the checked settings
      _Enabled.of               creates features and extensions, and replaces nothing yet
        features_at             the requested features, by their position in a step
          FeatureSpec.load      imports ``features/NAME/megatron.py``
        _ORDER                  the order in which a step calls all extensions, with reasons
      SharedSettings            compares the settings of all ranks
      _Enabled.install          replaces the functions that the features name
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pipemem.conflicts import make_request
from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.features import Position, features_at
from megatron_pipemem.logs import is_first_rank, tell
from megatron_pipemem.mcore.checkpoints import FilesOfRanks
from megatron_pipemem.mcore.compat import ReshardableState
from megatron_pipemem.mcore.model.placement import ChunkPlacement, ProgramChunks
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.mcore.shared_settings import SharedSettings
from megatron_pipemem.mcore.step.batches import StepShapes
from megatron_pipemem.mcore.step.extension import Extension, LaunchOrders
from megatron_pipemem.mcore.step.forward_backward import ForwardBackward
from megatron_pipemem.mcore.step.gradients import GradientReductions, SplitBackward
from megatron_pipemem.mcore.step.losses import Losses
from megatron_pipemem.mcore.step.notices import GraphOrder, Markers, TrainingLog
from megatron_pipemem.mcore.symbols import USED, Feature, PatchSet, is_imported, version_text
from megatron_pipemem.part_costs import PartCosts, prices_of
from megatron_pipemem.request import PROFILE, Request
from megatron_pipemem.runtime.first_failure import leave_job, watch_job
from megatron_pipemem.schedule.options import AUTO

if TYPE_CHECKING:  # loaded for runs that ask for a report
    from megatron_pipemem.mcore.report.run_record import RunRecord

logger = logging.getLogger(__name__)


def programs_for(request: Request) -> ProgramStore:
    """Return an empty store of the step programs of a run. It will plan with the costs that the request names."""
    return ProgramStore(request, *prices_of(request.costs))


@dataclass
class _Enabled:
    request: Request
    features: list[Feature]
    settings: SharedSettings
    patches: PatchSet = field(default_factory=PatchSet)
    forward_backward: ForwardBackward | None = None
    program_chunks: ProgramChunks | None = None
    record: RunRecord | None = None

    @classmethod
    def of(cls, request: Request) -> _Enabled:
        """Create the features and extensions that a checked request needs. No function of Megatron is replaced yet.

        Raise an error if the report or the timelines cannot be written, and there is no process group yet.
        """
        record: RunRecord | None = None
        recording: list[Extension] = []
        if request.trace is not None or request.report is not None:
            from megatron_pipemem.mcore.report.recording import Recording
            from megatron_pipemem.mcore.report.run_record import RunRecord

            report, trace = (None if path is None else Path(path) for path in (request.report, request.trace))
            record = RunRecord(report, trace)
            recording.append(Recording(record))
        settings = SharedSettings(request, None if record is None else _failure_of_outputs(request))
        if request.is_stock:
            measured: list[Feature] = []
            prices = prices_of(request.costs)
            if record is not None:
                from megatron_pipemem.mcore.report.recording import StockObserver

                measured.append(StockObserver(record, *prices))
            last = _extensions(Position.LAST, request)
            features = [settings, *measured, ReshardableState(), FilesOfRanks(), *recording, *last]
            return cls(request, features, settings, record=record)
        programs = programs_for(request)
        settings.joins = programs.join
        chunk_placement = ChunkPlacement(
            programs.placement, request.is_round_robin, schedule_name=request.schedule, joins=settings.join
        )
        by_position = {position: _extensions(position, request, programs, chunk_placement) for position in Position}
        run = _ExtensionParts(request, programs, chunk_placement, recording, by_position)
        extensions = [extension for make, _ in _ORDER for extension in make(run)]
        # Windows of steps that overlap are not proved for launches that start in order.
        proves_starts = not (request.is_asynchronous or request.overlap_steps)
        launches = LaunchOrders(request.single_queue, proves_starts)
        forward_backward = ForwardBackward(programs, chunk_placement, extensions, launches, settings.join)
        saved = [ReshardableState(), FilesOfRanks(chunk_placement)]
        features = [settings, forward_backward, chunk_placement, *saved, *extensions]
        return cls(request, features, settings, PatchSet(), forward_backward, ProgramChunks(chunk_placement), record)

    def install(self) -> None:
        """Replace the functions of Megatron that all features need; after an UpstreamError none is replaced.

        Functions of programs that are not imported are not replaced.
        """
        for symbol in USED:
            symbol.resolve()
        replacements = [replacement for feature in self.features for replacement in feature.replacements()]
        self.patches.install(
            [(symbol, act) for symbol, act in replacements if not symbol.is_of_program or is_imported(symbol.module)]
        )


class _ExtensionParts(NamedTuple):
    """The parts from which the extensions of a run are made."""

    request: Request
    programs: ProgramStore
    chunk_placement: ChunkPlacement
    recording: list[Extension]  # empty without a report or trace
    by_position: Mapping[Position, list[Extension]]  # of the requested features


def _pricing(run: _ExtensionParts) -> list[Extension]:
    """Return the extensions that replace the initial costs by costs of the built model and of measured steps.

    One of them predicts the bytes of the model, if W of the requested schedule may run earlier for them.
    """
    pricing: list[Extension] = []
    request, programs = run.request, run.programs
    splits = request.family is not None and request.family.splits_backward
    if splits and request.early_wgrad == AUTO and not request.plans_offload:
        from megatron_pipemem.mcore.step.predicted_bytes import PredictedBytes

        pricing.append(PredictedBytes(request))
    if isinstance(programs.costs, PartCosts):
        from megatron_pipemem.mcore.replanning import LayersOfStages

        pricing.append(LayersOfStages(programs))
    profiles = request.costs == PROFILE or programs.needs_seconds
    if profiles or programs.needs_bytes:
        from megatron_pipemem.mcore.replanning import Replanner

        pricing.append(Replanner(programs, profiles))
    return pricing


def _message_shapes(run: _ExtensionParts) -> list[Extension]:
    # An asynchronous step runs forwards of the next step, whose message shapes are unknown.
    is_needed = run.request.message_shapes == "step" and not run.request.is_asynchronous
    return [StepShapes(run.chunk_placement)] if is_needed else []


def _reductions(run: _ExtensionParts) -> list[Extension]:
    # A step of an asynchronous schedule updates weights between its actions, and a check must come before that.
    return [] if run.request.is_asynchronous else [GradientReductions()]


_ORDER: tuple[tuple[Callable[[_ExtensionParts], list[Extension]], str], ...] = (
    (_pricing, "new costs replace the plan before a feature reads it"),
    (lambda run: run.by_position[Position.PLANNING], "may choose the program, and their handlers are the innermost"),
    (
        lambda run: [SplitBackward(run.request, counted=bool(run.recording))],
        "a lost gradient raises before losses are gathered",
    ),
    (_message_shapes, "features that replace stages need the shapes of messages"),
    (lambda run: run.by_position[Position.STAGES], "replace stages, and add or wrap handlers"),
    (_reductions, "wraps the W, B and REDUCE_GRAD of the features"),
    (lambda run: [Losses()], "wraps the F of the features, and gathers losses when they have finished the step"),
    (lambda run: [GraphOrder()], "reads the program, which is chosen by now"),
    (lambda run: run.recording, "reads what the features have set in the step"),
    (lambda run: run.by_position[Position.LAST], "wraps the handlers of all other features"),
    (lambda run: [Markers()], "ranges and spans hold all that features add to an action"),
    (lambda run: [TrainingLog()], "reads the plan of a step that has ended"),
)
"""The order in which a step calls its extensions, and the reason for each one's place. Later handlers wrap earlier ones."""


def _failure_of_outputs(request: Request) -> PipememError | None:
    """Return why rank 0 cannot write the report or the timelines, for all ranks; raise it without a process group."""
    from megatron_pipemem.tools_by_flag import check_outputs

    try:
        if is_first_rank():
            check_outputs(request)
    except PipememError as error:
        if not dist.is_initialized():
            raise
        return error
    return None


def _extensions(position: Position, request: Request, *run: object) -> list[Extension]:
    """Return the extensions of the requested features for this position in the list of extensions.

    ``run`` are the programs and the chunk placement of the run, which a stock run does not have.
    """
    return [extension for feature in features_at(position, request) for extension in feature.load()(request, *run)]


_enabled: _Enabled | None = None


def enable(schedule: str, **settings: Any) -> None:
    """Make stock Megatron-Core run pipeline steps by a schedule of this package.

    Call it once on every rank, with the same arguments, before the model is built. A second call with the same settings
    changes nothing. Programs may import ``get_forward_backward_func`` before or after it.

    Args:
        schedule: name of a schedule family (``pipemem schedules`` lists them), a schedule file, or ``auto``.
        settings: fields of ``Request``.

    Raises:
        UnknownScheduleError: there is no such family.
        UnsupportedError: the plugin is enabled with other settings, or the settings do not go together, or they differ
            between ranks (raised by ``initialize_model_parallel()`` if that comes later).
        OutputError: rank 0 cannot write the report or trace, or lacks a package that draws timelines (UnsupportedError).
            In a process group, all ranks raise an error for that, here or in ``initialize_model_parallel()``.
        ScheduleError: the schedule of the file is invalid.
        UpstreamError: this Megatron-Core lacks a symbol of the plugin. Nothing has been changed then.
    """
    watch_job()
    request = make_request(schedule, **settings)
    if request.layout == AUTO:
        raise UnsupportedError(
            "unsupported-setting",
            "layout auto reads the model's sizes on a command line, which enable() does not see; give the layout that pipemem "
            "layout prints, or call enable_from_command_line()",
        )
    enable_with(request)


def enable_with(request: Request) -> None:
    """Enable the plugin with a checked request, as ``enable`` does.

    A second call with the same request changes nothing, and one with another request raises an UnsupportedError.
    """
    global _enabled
    if _enabled is not None:
        if _enabled.request != request:
            raise UnsupportedError(
                "enabled-already",
                f"the plugin is enabled already with {_enabled.request}; call disable() before enabling other settings",
            )
        return
    enabled = _Enabled.of(request)
    watch_job(starts=True)
    enabled.settings.compare_model_parallel()
    enabled.install()
    _enabled = enabled
    tell(logger, "enabled: %s", _brief(request))
    tell(logger, "replaced in megatron-core %s: %s", version_text(), ", ".join(enabled.patches.names))


def disable() -> None:
    """Restore every replaced function of Megatron, and close the plugin's process groups.

    Every rank must call it, between steps. It does nothing if the plugin is not enabled. After a failed step the
    process groups stay open. Models stay as they were built: a model for a V placement can only be trained with the
    plugin. The same holds for a model whose Transformer Engine modules delay their weight gradients, and a warning says
    so.
    """
    global _enabled
    if _enabled is None:
        return
    enabled, _enabled = _enabled, None
    enabled.patches.remove()
    leave_job()
    if enabled.forward_backward is not None:
        enabled.forward_backward.close()


def settle() -> None:
    """Wait until the weights are those after the last training step, if steps overlap.

    Training loops other than Megatron's call it on every rank before they read weights or the optimizer's state, for
    example to save them. Evaluations through the forward-backward function call it.
    """
    if _enabled is not None and _enabled.forward_backward is not None:
        for extension in _enabled.forward_backward.extensions:
            extension.wait_for_overlapped_steps()


def write_report() -> None:
    """Write the report and the timelines that the settings ask for. Programs without ``megatron.training`` call this.

    Every rank must call it, after its last step and before ``disable()``. It does nothing if the settings ask for
    neither.
    """
    if _enabled is not None and _enabled.record is not None:
        _enabled.record.write()


def build_model_chunks(build: Callable, pg_collection: ProcessGroupCollection | None = None) -> list:
    """Build this rank's model chunks for the schedule, in training loops without ``megatron.training``.

    Their number is ``virtual_pipeline_model_parallel_size`` of ``initialize_model_parallel()``. The model's
    configuration must have the same number.

    Args:
        build: ``build(pre_process=, post_process=, vp_stage=, pg_collection=) -> module``. It must make the layer
            specification too, because specifications depend on the chunk's layers.
        pg_collection: Megatron's process groups; the global ones by default.

    Raises:
        UnsupportedError: the plugin is not enabled, or only measures Megatron's own schedule, or the schedule needs
            another number of chunks.
    """
    placement = _program_chunks().placement
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return placement.build_chunks(build, groups, vp_size)


def place_model_chunks() -> AbstractContextManager[None]:
    """Return a context in which a program builds its own chunks for the schedule.

    It is for programs whose code calls ``GPTModel`` or ``HybridModel`` once per chunk, with ``vp_stage``, like mbridge.
    Such a program must read the numbers of layers from the layers, or ask Megatron's functions for them. A program that
    computes them from ranks gets wrong numbers without an error if the schedule does not deal chunks round robin.

    Raises:
        UnsupportedError: the plugin is not enabled; within the block, a chunk cannot be placed, or chunks are missing.
    """
    return _program_chunks().placing()


def _program_chunks() -> ProgramChunks:
    if _enabled is None or _enabled.program_chunks is None:
        raise UnsupportedError("not-enabled", "call enable() with a schedule before building model chunks")
    return _enabled.program_chunks


def _brief(request: Request) -> str:
    """Return the settings of a request that differ from the defaults, as text for the log."""
    settings = (setting for setting in fields(request) if setting.name not in ("schedule", "file"))
    chosen = [
        f"{setting.name} {getattr(request, setting.name)}"
        for setting in settings
        if getattr(request, setting.name) not in (setting.default, {}, None)
    ]
    return ", ".join([f"schedule {request.schedule}", *chosen])
