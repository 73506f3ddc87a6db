"""The replacement of Megatron's pipelined forward-backward functions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from weakref import WeakSet

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.agreement import agree, tell
from megatron_pipemem.mcore.asynchronous.training import AsynchronousTraining
from megatron_pipemem.mcore.model import replicas
from megatron_pipemem.mcore.model.linear import attach_ddp_hooks
from megatron_pipemem.mcore.model.placement import ChunkPlacement
from megatron_pipemem.mcore.model.regions import MLP_FORWARD, RANDOM_STATE
from megatron_pipemem.mcore.model.stages import (
    ChunkStage,
    StepContext,
    no_gradient_sync,
    watch_batches,
)
from megatron_pipemem.mcore.model.transformer_engine import delayed_modules, uncountable
from megatron_pipemem.mcore.model.weight_memory import count_weights
from megatron_pipemem.mcore.model.whole_model import check_whole_model
from megatron_pipemem.mcore.patching import Symbol
from megatron_pipemem.mcore.replanning import Replanner
from megatron_pipemem.mcore.report.run_record import STEPS, RunRecord, StepRecord
from megatron_pipemem.mcore.sources import Shape
from megatron_pipemem.mcore.step.batch_distribution import deal
from megatron_pipemem.mcore.step.losses import LossCarrier, gather_losses
from megatron_pipemem.mcore.step.offloading import Offloading
from megatron_pipemem.mcore.step.programs import ProgramCache
from megatron_pipemem.mcore.step.refusals import check_chunks, check_config
from megatron_pipemem.mcore.step.single_queue import has_single_queue
from megatron_pipemem.mcore.vocabulary.step import VocabularySteps
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.runtime.groups import destroy_groups
from megatron_pipemem.runtime.links import measure_links
from megatron_pipemem.runtime.replicas import Channels, ReplicaReducer, connect_replicas
from megatron_pipemem.runtime.trace import CudaTrace, HostTrace
from megatron_pipemem.runtime.transport import Edge, MessageFormat, Transport, connect
from megatron_pipemem.schedule.core.placement import Placement

logger = logging.getLogger(__name__)

_STOCK_PARAMETERS = (
    "forward_step_func",
    "data_iterator",
    "model",
    "num_microbatches",
    "seq_length",
    "micro_batch_size",
    "decoder_seq_length",
    "forward_only",
    "collect_non_loss_data",
    "first_val_step",
    "adjust_tensor_shapes_fn",
    "p2p_communicator",
    "pg_collection",
    "force_all_reduce",
)
# The dispatcher looks both up in its module at every call, so whoever imported the dispatcher earlier gets ours too.
WITH_INTERLEAVING = Symbol(
    "megatron.core.pipeline_parallel.schedules", "forward_backward_pipelining_with_interleaving", _STOCK_PARAMETERS
)
WITHOUT_INTERLEAVING = Symbol(
    "megatron.core.pipeline_parallel.schedules", "forward_backward_pipelining_without_interleaving", _STOCK_PARAMETERS
)
FORWARD_STEP = Symbol(
    "megatron.core.pipeline_parallel.schedules",
    "forward_step",
    ("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store", "config"),
)
BACKWARD_STEP = Symbol(
    "megatron.core.pipeline_parallel.schedules",
    "backward_step",
    ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
)
# Used by us, not replaced: a change of these would break steps in the middle.
USED = (
    *RANDOM_STATE,
    MLP_FORWARD,
    FORWARD_STEP,
    BACKWARD_STEP,
    Symbol("megatron.core.pipeline_parallel.schedules", "deallocate_output_tensor", ("out",)),
    Symbol("megatron.core.pipeline_parallel.schedules", "check_first_val_step", ("first_val_step", "forward_only")),
    Symbol(
        "megatron.core.pipeline_parallel.schedules", "get_tensor_shapes", ("seq_length", "micro_batch_size", "config")
    ),
    Symbol(
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel._make_backward_post_hook",
        ("param",),
    ),
)


@dataclass(frozen=True)
class _Pipeline:
    """The pipeline this rank belongs to, opened once per process group and placement."""

    device: int
    ranks: Sequence[int]
    channels: dict[Edge, dist.ProcessGroup]
    replica_channels: Channels
    losses: LossCarrier


class ForwardBackward:
    """Runs steps of one source's schedules. Keeps compiled programs and communicators between steps, and what was measured.

    Args:
        programs: compiles the schedule for the number of microbatches at hand.
        chunk_placement: answers Megatron's questions about ranks.
        offloading: the host side, for schedules that move activations there.
        record: where counted bytes and times go; ``None`` records nothing.
        replanner: measures steps and has them planned anew; ``None`` keeps the first plan.
        asynchronous: runs training steps that leave the pipeline full; ``None`` for all others.
        single_queue: lower programs for one hardware queue per rank, whatever the device.
    """

    def __init__(
        self,
        programs: ProgramCache,
        chunk_placement: ChunkPlacement,
        offloading: Offloading,
        record: RunRecord | None,
        replanner: Replanner | None = None,
        asynchronous: AsynchronousTraining | None = None,
        single_queue: bool = False,
    ):
        self._single_queue = single_queue
        self._asynchronous = asynchronous
        self._programs = programs
        self._chunk_placement = chunk_placement
        self._offloading = offloading
        self._record = record
        self._replanner = replanner
        self._vocabulary = VocabularySteps()
        self._pipelines: dict[tuple[dist.ProcessGroup, Placement], _Pipeline] = {}
        self._known_models: WeakSet[torch.nn.Module] = WeakSet()
        self._in_step = False
        self.hooked: list[torch.nn.Parameter] = []
        self.has_run_delayed = False
        """Whether modules of Transformer Engine have left their weight gradients to this."""

    def __call__(
        self,
        *,
        forward_step_func,
        data_iterator,
        model,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable | None = None,
        p2p_communicator=None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
    ) -> list:
        """Run one step. Arguments and result are those of the stock function.

        Returns:
            The loss function's reduced data of every microbatch on the last pipeline rank, ``[]`` elsewhere.

        Raises:
            UnsupportedError: the model or its configuration asks for what our schedules do not run.
        """
        chunks = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(chunks[0])
        groups = _process_groups(p2p_communicator, pg_collection)
        pp_group = groups.pp if p2p_communicator is None else p2p_communicator.pp_group
        check_config(config)
        placement = self._chunk_placement.placement(pp_group.size(), len(chunks))
        check_chunks(chunks, placement.num_chunks, self._programs.name, placement.replicas)
        known_chunks = len(chunks) // placement.replicas
        if len(iterators) != known_chunks:
            raise UnsupportedError(
                f"{known_chunks} model chunks need {known_chunks} data iterators, not {len(iterators)}; pass a list with one "
                "iterator per chunk"
            )
        if chunks[0] not in self._known_models:
            device = pp_group.rank()
            check_whole_model(
                chunks, placement, pp_group, lambda: self._chunk_placement.check_built(chunks, placement, device)
            )
            self._known_models.add(chunks[0])
        message = MessageFormat(
            _message_shape(seq_length, micro_batch_size, decoder_seq_length, config, groups, adjust_tensor_shapes_fn),
            config.pipeline_dtype or config.params_dtype,
            torch.cuda.current_device(),
        )
        self._in_step = True
        pipeline = self._connect(pp_group, placement, message.device)
        self.hooked += attach_ddp_hooks(chunks)
        shape = Shape(
            pp_group.size(),
            len(chunks),
            num_microbatches,
            config.microbatch_group_size_per_vp_stage if known_chunks > 1 else None,
        )
        self._offloading.device = device_of(chunks)
        self._programs.single_queue = has_single_queue(self._offloading.device, self._single_queue)
        if not forward_only:
            self._plan_anew(shape, pipeline, placement, message)

        def finalize(num_tokens: torch.Tensor | None = None) -> None:
            if config.finalize_model_grads_func is not None:
                config.finalize_model_grads_func(
                    chunks, num_tokens, pg_collection=groups, force_all_reduce=force_all_reduce
                )

        def compare(digest: str) -> None:
            agree(digest, pp_group)

        call = None
        if self._asynchronous is None or forward_only:
            program, plan = self._programs.compile(shape, forward_only=forward_only, agree=compare)
        else:
            call = self._asynchronous.begin(config, chunks, shape, pipeline.device, compare, finalize)
            program, plan = call.plan.window.program, call.plan

        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        step = StepContext(
            config,
            forward_step_func,
            num_microbatches if call is None else call.loss_divisor,
            groups.cp.size(),
            forward_only,
            collect_non_loss_data,
            first_val_step,
            bool(force_all_reduce),
            num_tokens=torch.zeros([], dtype=torch.int, device=torch.cuda.current_device()),
        )
        engine = self._offloading.engine() if program.schedule.offloads else None
        observed, buffers = StepRecord(None, None), () if call is None else call.buffers
        if not forward_only:
            # A window of an asynchronous schedule begins with what the one before has left, and that must be known.
            counts = self._record is not None and (call is not None or self._record.counts(program))
            counts |= self._replanner is not None and self._replanner.wants_bytes
            observed = self._observe(chunks, pp_group, counts, buffers)
        if call is not None:
            observed.ledger = call.ledger(observed.ledger, [*permanent_tensors(chunks), *buffers])
        counters = [counter for counter in (observed.ledger, engine) if counter is not None]
        iterators = watch_batches(iterators, *counters)
        dealer = None
        if placement.replicas > 1:
            dealer, iterators = deal(iterators[0], program.schedule, pipeline.device)
        stages = {
            stage: ChunkStage(
                step,
                chunks[chunk],
                iterators[chunk],
                chunk,
                known_chunks,
                placement.next_stage(stage) is None,
                self._chunk_placement,
                delayed_modules(chunks[chunk]),
            )
            for chunk, stage in enumerate(placement.stages[pipeline.device])
        }
        self.has_run_delayed |= any(stage.delayed for stage in stages.values())
        transport = Transport(
            pipeline.device, placement, pipeline.ranks, pipeline.channels, message, self._programs.single_queue
        )
        passes = None
        if program.schedule.vocabulary_barriers:
            tokens = (micro_batch_size, (decoder_seq_length or seq_length) // groups.cp.size())
            passes = self._vocabulary.begin(step, stages, placement, groups, pp_group, tokens, observed.ledger)
        reducer = None
        if placement.replicas > 1:
            reducer = ReplicaReducer(
                placement,
                pipeline.device,
                pipeline.replica_channels,
                lambda stage: replicas.gradients(stages[stage].model),
            )
        executor = Executor(
            program,
            pipeline.device,
            stages,
            transport,
            ledger=observed.ledger,
            trace=observed.trace,
            offload=engine,
            vocabulary=passes,
            replicas=reducer,
            weights=None if call is None else call.weights,
            carried=None if call is None else call.take_in_flight(),
        )
        with ExitStack() as stack:
            stack.enter_context(no_gradient_sync(config))
            stack.enter_context(torch.no_grad() if forward_only else nullcontext())
            if engine is not None:
                permanent = [*permanent_tensors(chunks), *buffers]
                stack.enter_context(engine.step(permanent, observed.on_device))
            if not forward_only:
                _start_parameter_gather(config, chunks)
            if call is not None:
                stack.enter_context(call.running(executor))
            executor.run()
        if dealer is not None:
            dealer.finish()
        gather_losses(step, program.schedule, pipeline.losses, pp_group)
        if not forward_only and (call is None or self._asynchronous.loop_updates):
            finalize(step.num_tokens if config.calculate_per_token_loss else None)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        if not forward_only and self._replanner is not None:
            self._replanner.after_step(placement.num_stages, observed.ledger, observed.trace)
        if not forward_only and self._record is not None:
            with self._record.guarded(STEPS):
                observed.offload = None if engine is None else engine.statistics()
                if call is None and observed.ledger is not None:
                    observed.weights = count_weights(chunks, placement.stages[pipeline.device])
                elif call is not None:
                    program, observed.weights = call.plan.window.up_to_its_end, call.weight_bytes()
                self._record.add_step(plan, program, pipeline.device, observed)
        self._in_step = False
        return step.loss_data

    def _plan_anew(self, shape: Shape, pipeline: _Pipeline, placement: Placement, message: MessageFormat) -> None:
        """If earlier steps have shown something new, on all ranks alike."""
        if self._replanner is None:
            return

        def links() -> dict[Edge, float]:
            if message.shape is None:
                tell(logger, "messages have no fixed shape, so their time is not measured and counts as 0")
                return {}
            return measure_links(placement, pipeline.device, pipeline.ranks, pipeline.channels, message)

        news = self._replanner.before_step(shape, pipeline.device, links)
        if news is not None:
            self._programs.renew(news)

    def _observe(
        self, chunks: list[torch.nn.Module], group: dist.ProcessGroup, count: bool, buffers: Iterable[torch.Tensor]
    ) -> StepRecord:
        """What must be watched in a training step."""
        replanner = self._replanner
        if self._record is not None:
            self._record.group = group
            dist.barrier(group=group)  # one origin of time for all ranks of the pipeline
        return observe(
            chunks,
            count,
            time=self._record is not None or (replanner is not None and replanner.wants_seconds),
            buffers=buffers,
        )

    def _connect(self, group: dist.ProcessGroup, placement: Placement, device: torch.device | int) -> _Pipeline:
        key = group, placement
        if key not in self._pipelines:
            self._pipelines[key] = _Pipeline(
                group.rank(),
                dist.get_process_group_ranks(group),
                connect(placement, group, device),
                connect_replicas(placement, group, device),
                LossCarrier(group),
            )
        return self._pipelines[key]

    def close(self) -> None:
        """Forget everything that steps left for the next one."""
        opened = self._vocabulary.close()
        for pipeline in self._pipelines.values():
            opened += [*pipeline.channels.values(), *pipeline.replica_channels.values()]
        carriers = [pipeline.losses for pipeline in self._pipelines.values()]
        self._pipelines.clear()
        if not self._in_step:  # after a step that failed, others may be gone, and a backend would wait for them
            for carrier in carriers:
                carrier.finish()
            destroy_groups(opened)
        self._programs.clear()
        self._offloading.close()
        if self._asynchronous is not None:
            self._asynchronous.close()


def _process_groups(p2p_communicator, pg_collection) -> ProcessGroupCollection:
    if (p2p_communicator is None) != (pg_collection is None):
        raise ValueError("provide both p2p_communicator and pg_collection, or neither")
    if pg_collection is None:
        return schedules._build_default_pg_collection()
    if not isinstance(pg_collection, ProcessGroupCollection):
        raise UnsupportedError(
            f"{type(pg_collection).__name__} describes several models in one pipeline, which no schedule here knows; "
            "disable() the plugin for such models"
        )
    return pg_collection


def _message_shape(seq_length, micro_batch_size, decoder_seq_length, config, groups, adjust) -> tuple[int, ...] | None:
    """Shape of every message, ``[s / (cp * tp with SP), b, h]``, or ``None`` if it may differ between microbatches."""
    if config.variable_seq_lengths:
        return None
    shapes = schedules.get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    if adjust is not None:
        received, sent = adjust(shapes, shapes)
        if list(received) != list(sent):
            # Neighbours disagree on shapes in a way that only the sender knows.
            return None
        shapes = received
    if len(shapes) != 1:
        raise UnsupportedError(
            f"stages that exchange {len(shapes)} tensors per microbatch are not supported; disable() the plugin for "
            "encoder-decoder models"
        )
    return tuple(shapes[0])


def _start_parameter_gather(config, chunks: list[torch.nn.Module]) -> None:
    """With overlapped parameter gathering, begin every chunk's before its first forward asks for it."""
    functions = config.param_sync_func
    if functions is None:
        return
    for index, chunk in enumerate(chunks):
        (functions[index] if isinstance(functions, list) else functions)(chunk.parameters())


def permanent_tensors(chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    """What these chunks hold that is no activation: parameters, gradient buffers, module buffers."""
    permanent: list[torch.Tensor] = []
    for chunk in chunks:
        for parameter in chunk.parameters():
            permanent += [parameter, *(g for g in (getattr(parameter, "main_grad", None),) if g is not None)]
        # DDP shadows nn.Module.buffers() by an attribute of its own.
        permanent += torch.nn.Module.buffers(chunk)
    return permanent


def device_of(chunks: list[torch.nn.Module]) -> torch.device:
    """Where the model is; a rank without parameters has the host alone."""
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def observe(
    chunks: list[torch.nn.Module], count: bool = True, time: bool = True, buffers: Iterable[torch.Tensor] = ()
) -> StepRecord:
    """A ledger, if bytes are to be counted, and a clock, if actions are to be timed, for one step of these chunks.

    Args:
        chunks: of this rank.
        count: whether bytes are to be counted. Where that would break the training, the ledger has failed from the start.
        time: whether actions are to be timed.
        buffers: what is no activation either, beside what the chunks hold.
    """
    ledger = None
    if count:
        ledger = ActivationLedger([*permanent_tensors(chunks), *buffers])
        ledger.failure = ledger.failure or uncountable(chunks)
    trace = (CudaTrace() if device_of(chunks).type == "cuda" else HostTrace()) if time else None
    return StepRecord(ledger, trace)
