"""Replace Megatron's pipelined forward-backward functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.gates import StepGates
from megatron_pipemem.mcore.agreement import agree, groups_of_model, run_on_all_ranks
from megatron_pipemem.mcore.compat import message_channels, message_shapes
from megatron_pipemem.mcore.model.placement import ChunkPlacement
from megatron_pipemem.mcore.model.stages import (
    ChunkStage,
    StepContext,
    no_gradient_sync,
    routing_noted,
    shared_left_out,
    watch_batches,
)
from megatron_pipemem.mcore.model.transformer_engine import delayed_modules
from megatron_pipemem.mcore.model.whole_model import check_whole_model
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.mcore.refusals import check_chunks
from megatron_pipemem.mcore.step.extension import (
    Extension,
    FullMicrobatch,
    LaunchOrders,
    Step,
    TentativeStart,
    device_of,
    observe,
)
from megatron_pipemem.mcore.symbols import WITH_INTERLEAVING, WITHOUT_INTERLEAVING, Feature, Replacements
from megatron_pipemem.runtime.executor import PROGRESS, Executor
from megatron_pipemem.runtime.transport import (
    MessageFormat,
    Pipeline,
    Transport,
    connect,
    destroy_groups,
    polls_departures,
    timeout_of,
)
from megatron_pipemem.schedule.placement import Placement

SHARE_OF_TIMEOUT = 0.8
"""The part of the process group's time-out after which ranks log their positions. At its end NCCL ends them."""


@dataclass(eq=False)
class ForwardBackward(Feature):
    """Runs every step of a run: chooses the program, calls the extensions in order, and runs the actions.

    Communicators are kept between steps.
    """

    programs: ProgramStore
    chunk_placement: ChunkPlacement
    extensions: Sequence[Extension] = ()
    launches: LaunchOrders = field(default_factory=LaunchOrders)
    # called before a step communicates, with the model's process groups and its pipeline
    joins: Callable[[ProcessGroupCollection, dist.ProcessGroup], None] = lambda groups, pipeline: None
    _pipelines: dict[tuple[dist.ProcessGroup, Placement], Pipeline] = field(default_factory=dict)
    _gates: WeakKeyDictionary[torch.nn.Module, StepGates] = field(default_factory=WeakKeyDictionary)
    """The gates of each model that has taken a step, by its first chunk on this rank."""
    _is_in_step: bool = False

    def replacements(self) -> Replacements:
        return [(symbol, lambda original, **call: self(**call)) for symbol in (WITH_INTERLEAVING, WITHOUT_INTERLEAVING)]

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
        """Run one step. Arguments and result are those of Megatron's function.

        Return the loss function's reduced data of every microbatch on the last pipeline rank, ``[]`` elsewhere. Raise
        an UnsupportedError if our schedules do not run the model or its configuration.
        """
        chunks = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(chunks[0])
        groups = _process_groups(p2p_communicator, pg_collection)
        pp_group = groups.pp if p2p_communicator is None else p2p_communicator.pp_group
        self.joins(groups, pp_group)
        placement = self._checked(chunks, iterators, config, pp_group)
        lengths = seq_length, micro_batch_size, decoder_seq_length
        message = MessageFormat(
            _message_shape(*lengths, config, groups, adjust_tensor_shapes_fn),
            config.pipeline_dtype or config.params_dtype,
            torch.cuda.current_device(),
        )
        self._is_in_step = True
        step = Step(
            StepContext(
                config,
                forward_step_func,
                num_microbatches,
                groups.cp.size(),
                forward_only,
                collect_non_loss_data,
                first_val_step,
                bool(force_all_reduce),
                num_tokens=torch.zeros([], dtype=torch.int, device=torch.cuda.current_device()),
            ),
            chunks,
            groups,
            self._connect(pp_group, placement, message.device, device_of(chunks).type == "cuda"),
            Shape(
                pp_group.size(),
                len(chunks),
                num_microbatches,
                config.microbatch_group_size_per_vp_stage if len(iterators) > 1 else None,
                forward_only,
            ),
            message,
            _shape_of_tokens(config, groups) if adjust_tensor_shapes_fn is None else None,
            _same_tokens(*lengths, config, groups, num_microbatches),
            self.programs,
            _finalizer(config, chunks, groups, force_all_reduce),
            iterators,
            finalizes=not forward_only,
            full_microbatch=FullMicrobatch(micro_batch_size, decoder_seq_length or seq_length),
            launches=self.launches,
        )
        self._perform(step)
        self._is_in_step = False
        return step.context.loss_data

    def _checked(self, chunks: list[torch.nn.Module], iterators: list, config, group: dist.ProcessGroup) -> Placement:
        """Return the placement of the stages, or raise an UnsupportedError if our schedules do not run the model.

        In a model's first step, all ranks of the pipeline raise it.
        """
        known_gates = self._gates.get(chunks[0])
        gates = known_gates or StepGates()

        def check() -> Placement:
            placement = self.chunk_placement.placement(group.size(), len(chunks))
            self._check(chunks, iterators, config, placement, gates)
            if known_gates is None:
                self.chunk_placement.check_built(chunks, placement, group.rank())
            return placement

        if known_gates is not None:
            return check()
        placement = run_on_all_ranks(check, [group])
        check_whole_model(chunks, placement, group)
        self._gates[chunks[0]] = gates
        return placement

    def _check(
        self, chunks: list[torch.nn.Module], iterators: list, config, placement: Placement, gates: StepGates
    ) -> None:
        """Raise an UnsupportedError for faults of this rank's model or settings."""
        of_ddp = {id(ddp): ddp for chunk in chunks if (ddp := getattr(chunk, "ddp_config", None)) is not None}
        if gates.check(self.programs.request, [config, *of_ddp.values()], placement=placement):
            check_chunks(chunks, placement.num_chunks, self.programs.name, placement.replicas)
        known_chunks = len(chunks) // placement.replicas
        if len(iterators) != known_chunks:
            raise UnsupportedError(
                "wrong-count",
                f"{known_chunks} model chunks need {known_chunks} data iterators, not {len(iterators)}; pass a list with one "
                "iterator per chunk",
            )

    def _perform(self, step: Step) -> None:
        """Choose the program of the step, run it, and finish the step."""
        config, extensions = step.context.config, self.extensions
        if step.forward_only:
            extensions = tuple(extension for extension in extensions if not extension.only_trains)
        self._choose(step, extensions)
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        for extension in extensions:
            extension.prepare(step)
        self._equip(step, extensions)
        with ExitStack() as stack:
            stack.callback(lambda: step.executor.close())  # a start may replace it
            stack.enter_context(no_gradient_sync(config))
            stack.enter_context(torch.no_grad() if step.forward_only else nullcontext())
            if not step.forward_only:
                _start_parameter_gather(config, step.chunks)
            if step.observation.ledger is not None:
                stack.enter_context(routing_noted(step.chunks, step.observation.ledger.route))
            if step.all_excludes or step.tentative_start is not None:  # to go through all modules takes milliseconds
                stack.enter_context(shared_left_out(step.chunks, lambda: step.all_excludes))
            for extension in extensions:
                stack.enter_context(extension.around(step))
            stack.enter_context(self.launches.watched(step.pipeline.group, device_of(step.chunks)))
            if step.tentative_start is not None:
                self._try(step, step.tentative_start, extensions)
            step.executor.run()
            if device_of(step.chunks).type == "cuda" and not torch.cuda.is_current_stream_capturing():
                PROGRESS.launched = torch.cuda.current_stream().record_event()
        if step.observation.ledger is not None:
            # Units are numbered like microbatches.
            step.observation.ledger.end_step(step.shape.num_microbatches * step.program.schedule.units.parts)
        for extension in extensions:
            extension.before_finalize(step)
        if step.finalizes:
            step.finalize(step.context.num_tokens if config.calculate_per_token_loss else None)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        for extension in extensions:
            extension.after(step)
        self.launches.ended(step.launch_kind)

    def _try(self, step: Step, start: TentativeStart, extensions: Sequence[Extension]) -> None:
        """Run the first actions of the step, and undo them if ``start`` does not stand.

        The caller then runs the remaining actions; after an undo, these are all actions of the step.
        """
        step.executor.run(start.length)
        if start.is_confirmed():
            return
        step.executor.drop(start.drain)
        step.executor.close()
        start.start_over()
        self._equip(step, extensions)
        _start_parameter_gather(step.context.config, step.chunks)

    def _choose(self, step: Step, extensions: Sequence[Extension]) -> None:
        """Set the program and the schedule choice of the step.

        They are those of the last extension that returns some, else those of the run.
        """
        self.programs.queues = self.launches.queues(device_of(step.chunks), step.context.config)
        if len(self.programs.queues) > 1 and self._may_meet_before_step():
            pipeline = step.pipeline.group
            self.launches.agree_on_returns(pipeline, groups_of_model(step.groups, pipeline))
        chosen = None
        for extension in extensions:
            chosen = extension.choose(step) or chosen
        if chosen is None:
            chosen = self.programs.get(step.shape, partial(agree, group=step.pipeline.group), step.pipeline.group)
        step.program, step.plan = chosen.order(step.single_queue), chosen.plan

    def _may_meet_before_step(self) -> bool:
        """Return whether all ranks may wait for each other before a step. A captured step may not, and it allocates once."""
        return not (self.programs.request.overlap_steps or torch.cuda.is_current_stream_capturing())

    def _equip(self, step: Step, extensions: Sequence[Extension]) -> None:
        """Create the observation, the stages of this rank and the executor with its transport; set them in ``step``."""
        step.observation = observe(
            step.chunks,
            step.permanent if step.counts_bytes else (),
            count=step.counts_bytes,
            time=step.times_actions,
            earlier=step.earlier_ledger,
            # With parts, bytes depend on the part's position, and all microbatches have the same size.
            tokens=step.tokens if step.message.shapes is not None and step.program.schedule.units.are_whole else None,
        )
        iterators = watch_batches(step.iterators, *step.all_excludes)
        pipeline, placement = step.pipeline, step.pipeline.placement
        step.stages = {
            stage: ChunkStage(
                step.context,
                step.chunks[chunk],
                iterators[chunk],
                chunk,
                len(step.chunks) // placement.replicas,
                placement.next_stage(stage) is None,
                self.chunk_placement,
                delayed_modules(step.chunks[chunk]),
                step.all_excludes,
            )
            for chunk, stage in enumerate(pipeline.stages)
        }
        features = [feature for extension in extensions for feature in extension.extend_executor(step)]
        step.executor = Executor(
            step.program,
            pipeline.device,
            step.stages,
            Transport(
                pipeline,
                step.message,
                step.single_queue,
                # While a step is captured, the host may ask its device nothing.
                polls=polls_departures(step.program) and not torch.cuda.is_current_stream_capturing(),
            ),
            features,
            ledger=step.observation.ledger,
            trace=step.observation.trace,
        )

    def _connect(
        self, group: dist.ProcessGroup, placement: Placement, device: torch.device | int, is_gpu: bool
    ) -> Pipeline:
        key = group, placement
        if key not in self._pipelines:
            free = _free_bytes(device) if is_gpu else 0
            pipeline = connect(placement, group, device)
            timeout = timeout_of(group)
            PROGRESS.patience = None if timeout is None else SHARE_OF_TIMEOUT * timeout.total_seconds()
            self._pipelines[key] = replace(pipeline, opened_bytes=free - _free_bytes(device)) if is_gpu else pipeline
        return self._pipelines[key]

    def close(self) -> None:
        """Release the extensions' state, programs and communicators; the latter stay open if the last step failed."""
        orderly = (
            not self._is_in_step
        )  # after a step that failed, others may be gone, and a backend would wait for them
        for extension in self.extensions:
            extension.close(orderly)
        if orderly:
            destroy_groups([group for pipeline in self._pipelines.values() for group in pipeline.channels.values()])
        self._pipelines.clear()
        self.programs.clear()


def _free_bytes(device: torch.device | int) -> int:
    """Return the bytes of a GPU that nothing but PyTorch's allocator has taken."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def _process_groups(p2p_communicator, pg_collection) -> ProcessGroupCollection:
    if (p2p_communicator is None) != (pg_collection is None):
        raise ValueError("provide both p2p_communicator and pg_collection, or neither")
    if pg_collection is None:
        return ProcessGroupCollection.use_mpu_process_groups()
    if not isinstance(pg_collection, ProcessGroupCollection):
        raise UnsupportedError(
            "unsupported-model",
            f"{type(pg_collection).__name__} describes several models in one pipeline, which the plugin does not support; "
            "disable() the plugin for such models",
        )
    return pg_collection


def _message_shape(seq_length, micro_batch_size, decoder_seq_length, config, groups, adjust) -> tuple[int, ...] | None:
    """Return the shape of every message, ``[s / (cp * tp), b, channels]``; ``None`` if messages may differ.

    Without sequence parallelism, tp counts as 1. Raise an UnsupportedError if stages exchange several tensors per
    microbatch.
    """
    if config.variable_seq_lengths or getattr(config, "mtp_standalone", False):
        # After a stage of multi-token prediction that is not the last, messages have the outputs of all predicted tokens.
        return None
    shapes = message_shapes(seq_length, micro_batch_size, decoder_seq_length, config, groups)
    if adjust is not None:
        received, sent = adjust(shapes, shapes)
        if list(received) != list(sent):
            # The shapes of two stages differ, and only the sender knows the shape of a message.
            return None
        shapes = received
    if len(shapes) != 1:
        raise UnsupportedError(
            "unsupported-model",
            f"stages that exchange {len(shapes)} tensors per microbatch are not supported; disable() the plugin for "
            "encoder-decoder models",
        )
    return tuple(shapes[0])


def _shape_of_tokens(config, groups) -> Callable[[int, int], tuple[int, ...]] | None:
    """Return a function from the tokens' shape ``(b, s)`` to the shape of messages, ``[s / tp, b, channels]``.

    Return ``None`` if messages do not follow from the tokens. Without sequence parallelism, tp counts as 1.
    """
    if getattr(config, "mtp_standalone", False):
        return None
    ranks = groups.tp.size() if config.sequence_parallel else 1
    return lambda b, s: (s // ranks, b, message_channels(config))


def _same_tokens(
    seq_length, micro_batch_size, decoder_seq_length, config, groups, num_microbatches
) -> list[tuple[int, int]] | None:
    """Return ``(b, s / cp)`` of every microbatch; ``None`` if microbatches may differ."""
    if config.variable_seq_lengths:
        return None
    return [(micro_batch_size, (decoder_seq_length or seq_length) // groups.cp.size())] * num_microbatches


def _start_parameter_gather(config, chunks: list[torch.nn.Module]) -> None:
    """Call Megatron's ``param_sync_func`` for every chunk before its first forward, if it is set."""
    functions = config.param_sync_func
    if functions is None:
        return
    for index, chunk in enumerate(chunks):
        (functions[index] if isinstance(functions, list) else functions)(chunk.parameters())


def _finalizer(
    config, chunks: list[torch.nn.Module], groups: ProcessGroupCollection, force_all_reduce: bool | None
) -> Callable[[torch.Tensor | None], None]:
    """Return a function that calls the configuration's ``finalize_model_grads_func``, if there is one."""

    def finalize(num_tokens: torch.Tensor | None = None) -> None:
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                chunks, num_tokens, pg_collection=groups, force_all_reduce=force_all_reduce
            )

    return finalize
