"""Add vocabulary parallelism to a step: share the batch, replace the first and last stage, and add the passes.

Every shard needs every token and every label. But Megatron's scripts read data on the first and the last stage only,
and only a script knows the layout of its batches. So at the start of a step, the ranks of these two stages intercept
the calls of the model (``mcore.step.batches``). They send tokens and labels to the other ranks, in one message each. No
script has to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.vocabulary.megatron.build import (
    ArrivingEmbedding,
    DepartingHead,
    shards_group_of,
    shards_of,
)
from megatron_pipemem.features.vocabulary.runtime.head import Normalised
from megatron_pipemem.features.vocabulary.runtime.passes import Batch, Channels, VocabularyPasses
from megatron_pipemem.mcore.model.stages import ChunkStage, StepContext
from megatron_pipemem.mcore.step.batches import Call, calls_of, output_to_send, zeros_as_output
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import PROCESS_MTP_LOSS, Replacements
from megatron_pipemem.runtime.executor import StepFeature
from megatron_pipemem.runtime.transport import COLLECTIVE_CTAS, destroy_groups, new_groups


def keep_depths(
    original: Callable, *, hidden_states: torch.Tensor, output_layer: torch.nn.Module, **others
) -> torch.Tensor:
    """Replace Megatron's ``process_mtp_loss``: if the head is cut, postpone the losses of multi-token prediction.

    The head then gets the outputs of all prediction depths, and ``weigh`` computes their losses later.
    """
    if not isinstance(output_layer, DepartingHead):
        return original(hidden_states=hidden_states, output_layer=output_layer, **others)
    if not output_layer.depths:  # evaluation asks for the next token only
        return hidden_states.chunk(1 + others["config"].mtp_num_layers)[0]
    output_layer.further = partial(weigh, original, others)
    return hidden_states


def weigh(process_mtp_loss: Callable, others: dict, losses: torch.Tensor, hits: torch.Tensor) -> torch.Tensor:
    """Return the losses of the next token, ``[s, b]``; their backward adds the gradients of all other depths.

    ``losses`` are the token losses of all depths, ``[(1 + depths) * s, b]``. ``hits`` has, in the same shape, whether
    each label is the token with the highest logit. ``others`` are the remaining arguments of ``process_mtp_loss``.
    """
    # "Hidden states" of two numbers, which are their own logits: token 0 is the likeliest where the label is, and is every
    # label, so that Megatron counts as it does.
    other = torch.where(hits, -1.0, torch.inf)
    weighed = process_mtp_loss(
        **others
        | {
            "hidden_states": torch.stack((losses, other), dim=-1),
            "labels": torch.zeros_like(others["labels"]),
            "output_layer": lambda rows, **_: (rows, None),
            "output_weight": None,
            "runtime_gather_output": True,
            "compute_language_model_loss": lambda labels, logits: logits[..., 0].t(),
            "tp_group": None,
            "scale_logits_fn": None,
        }
    )
    return weighed[..., 0]


_NO_LABELS = torch.iinfo(torch.int64).min


def share_batch(
    shapes: Sequence[tuple[int, int]] | None,
    first: Sequence[Call | None] | None,
    last: Sequence[Call | None] | None,
    sources: tuple[int, int],
    group: dist.ProcessGroup,
    may_want_logits: bool,
    depths: int = 0,
) -> Batch:
    """Send the tokens of the first stage's model calls and the labels of the last stage's to all pipeline ranks.

    Every rank of the pipeline ``group`` calls this. ``shapes`` has ``(b, s)`` of every microbatch, or is ``None`` if
    the ranks have not agreed on them. ``first`` and ``last`` are the calls of these stages on the pipeline ranks
    ``sources``. With ``may_want_logits``, multi-token prediction is off, and if the calls have no labels, the batch
    asks for logits.
    """
    if shapes is None:
        raise UnsupportedError(
            "vocabulary-forward-step",
            "microbatches may differ in shape, and vocabulary parallelism needs their tokens before the step runs; pass "
            "--pipemem-message-shapes step and let the forward step give the model input_ids of shape [b, s], or pass "
            "--pipemem-vocab-cut off",
        )
    if None in [*(first or ()), *(last or ())]:
        raise UnsupportedError(
            "vocabulary-forward-step",
            "the forward step does not call the model it is given, or its data come from no iterator, so its "
            "tokens and labels are unknown; call it with the items of next(), or pass --pipemem-vocab-cut off",
        )
    if any(call.has_processor for call in (*(first or ()), *(last or ())) if call is not None):
        raise UnsupportedError(
            "vocabulary-forward-step",
            "the forward step passes output_processor to the model, and the cut head computes cross entropy alone, later than "
            "the model's call; leave it out, or pass --pipemem-vocab-cut off",
        )
    first_tokens = None if first is None else [call.tokens for call in first if call is not None]
    own_labels = None if last is None else [call.labels for call in last if call is not None]
    sizes = [b * s for b, s in shapes]

    def share(name: str, values: Sequence[torch.Tensor | None] | None, source: int) -> Sequence[torch.Tensor]:
        """Send one tensor per microbatch, ``[b, s]``, from pipeline rank ``source`` to all ranks of the pipeline, as
        int64.
        """
        if values is None:
            shared = torch.empty(sum(sizes), dtype=torch.int64, device=torch.cuda.current_device())
        else:
            flat = []
            for value, shape in zip(values, shapes, strict=True):
                actual_shape = None if value is None else tuple(value.shape)
                if value is None or actual_shape != shape:
                    raise UnsupportedError(
                        "vocabulary-forward-step",
                        f"the forward step passes {name} of shape {actual_shape} to the model where {shape} was expected: "
                        "vocabulary parallelism needs them for every microbatch, of its sequence length and micro-batch size; "
                        "pass --pipemem-vocab-cut off",
                    )
                flat.append(value.flatten())
            shared = torch.cat(flat).to(torch.int64)
        dist.broadcast(shared, src=dist.get_global_rank(group, source), group=group)
        return [part.view(shape) for part, shape in zip(shared.split(sizes), shapes, strict=True)]

    tokens = share("tokens", first_tokens, sources[0])
    if may_want_logits and own_labels is not None and all(own is None for own in own_labels):
        own_labels = [torch.full_like(sequences, _NO_LABELS) for sequences in tokens]
    labels = share("labels", own_labels, sources[1])
    wants_logits = may_want_logits and all(bool(torch.eq(shared, _NO_LABELS).all()) for shared in labels)
    return Batch(
        tokens, None if wants_logits else labels, looks_ahead=bool(depths), depths=0 if may_want_logits else depths
    )


@dataclass
class FirstStage(ChunkStage):
    """The first stage of a model with a cut vocabulary. Its input is the sum of the embeddings that the shards looked
    up.
    """

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        model = get_attr_wrapped_model(self.model, "pre_process", return_model_obj=True)
        embedding: ArrivingEmbedding = model.embedding.word_embeddings
        assert input is not None, "the embedding's output comes from all shards"
        embedding.arrived = [input]
        return super().forward(microbatch, None, will_recompute)


@dataclass
class LastStage(ChunkStage):
    """The last stage of a model with a cut vocabulary. Its output is the input of the LM head.

    The losses are known only after the user's forward step has ended. So the model's call in it returns a tensor of
    NaN, which the forward step must return unchanged, as Megatron's scripts do. Later, the loss function that the
    forward step returned gets the real token losses.
    """

    depths: int = 0
    """How many tokens after the next one the head predicts too (multi-token prediction)."""
    _awaiting: dict[int, tuple[Callable | None, torch.dtype, Callable | None]] = field(default_factory=dict)
    _ahead: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def _head(self) -> DepartingHead:
        return _head_of(self.model)

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        head = self._head
        head.depths = self.depths
        super().forward(microbatch, input, will_recompute)
        output, head.input, head.losses = head.input, None, None
        assert output is not None, "the forward step calls the model, as calls_of has seen"
        return output

    def _forward_step(self, microbatch: int) -> Callable:
        head = self._head

        def noting(*arguments):
            output, loss_function = self.step.forward_step_func(*arguments)
            if head.losses is not None and output is not head.losses:
                raise UnsupportedError(
                    "vocabulary-forward-step",
                    "the forward step changes the model's token losses before it returns them, but with vocabulary "
                    "parallelism the losses are not known yet; change them in the loss function, or pass "
                    "--pipemem-vocab-cut off",
                )
            # The parts of a microbatch have one loss, by the function of the last one.
            self._awaiting[self._number(microbatch)] = loss_function, output.dtype, head.further
            head.further = None
            return output, loss_function

        return noting

    def look_ahead(self, microbatch: int, embeddings: torch.Tensor) -> None:
        ahead = embeddings.detach()
        if not self.step.forward_only:
            self._ahead[microbatch] = ahead.requires_grad_()
        model = get_attr_wrapped_model(self.model, "pre_process", return_model_obj=True)
        s = ahead.size(1) - 1
        model.embedding.word_embeddings.arrived = [
            torch.cat((ahead[:, depth:s], ahead[:, s:].expand(-1, depth, -1)), dim=1)
            for depth in range(1, 1 + self.step.config.mtp_num_layers)
        ]

    def ahead_gradient(self, microbatch: int) -> torch.Tensor:
        gradient = self._ahead.pop(microbatch).grad
        assert gradient is not None, "the stage that looked ahead has run backward"
        return gradient

    def gather_head_input(self, output: torch.Tensor) -> torch.Tensor:
        head = self._head
        if not head.sequence_parallel:
            return output
        ranks = head.tp_group.size()
        gathered = output.new_empty(output.size(0) * ranks, *output.shape[1:])
        dist.all_gather_into_tensor(gathered, output.contiguous(), group=head.tp_group)
        return _swapped(gathered, ranks, 1 + self.depths)

    def scatter_head_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        head = self._head
        if head.sequence_parallel:
            ranks = head.tp_group.size()
            gradient = _swapped(gradient, 1 + self.depths, ranks)
            shard = gradient.new_empty(gradient.size(0) // ranks, *gradient.shape[1:])
            dist.reduce_scatter_tensor(shard, gradient.contiguous(), group=head.tp_group)
            return shard
        if head.tp_group.size() > 1:
            dist.all_reduce(gradient, group=head.tp_group)
        return gradient

    def loss(self, microbatch: int, scored: Sequence[Normalised]) -> torch.Tensor | None:
        leaf = torch.cat([normalised.losses for normalised in scored]).requires_grad_(not self.step.forward_only)
        _, _, further = self._awaiting[self._number(microbatch)]
        losses = leaf if further is None else further(leaf, torch.cat([normalised.hits for normalised in scored]))
        loss = self._finish_forward(microbatch, losses.t().contiguous())
        if self.step.forward_only:
            return None
        if self.step.config.grad_scale_func is not None:
            loss = self.step.config.grad_scale_func(loss)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return gradient

    def take_logits(self, microbatch: int, logits: Sequence[torch.Tensor]) -> None:
        head = self._head
        if not head.gathers_output:
            logits = [part.chunk(head.tp_group.size(), dim=-1)[head.tp_group.rank()] for part in logits]
        # [s, b, vocabulary] of each slice -> [b, s, vocabulary] of the sequence
        joined = torch.cat([part.transpose(0, 1) for part in logits], dim=1)
        self._finish_forward(microbatch, joined.contiguous())

    def _finish_forward(self, microbatch: int, output: torch.Tensor) -> torch.Tensor:
        """Run the loss function of the forward step on ``output``, and average and report the loss as Megatron does.

        ``output`` has the token losses, ``[b, s]``, or logits, ``[b, s, vocabulary]``. Return the averaged loss.
        """
        step: StepContext = self.step
        loss_function, dtype, _ = self._awaiting.pop(self._number(microbatch))
        if step.config.timers is not None:
            step.config.timers("forward-compute", log_level=2).start()
        with self.as_chunk(), torch.set_grad_enabled(not step.forward_only):
            output, num_tokens = schedules.forward_step_calc_loss(
                self.model,
                output.to(dtype),
                loss_function,
                step.config,
                self.chunk if self.num_chunks > 1 else None,
                step.collect_non_loss_data,
                step.num_microbatches,
                step.loss_data,
                step.cp_group_size,
                True,
            )
        step.num_tokens += num_tokens
        return output


def _swapped(rows: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Reorder rows that are grouped by ``outer`` index and then by ``inner`` index, so that ``inner`` comes first."""
    return rows.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def _head_of(model: torch.nn.Module) -> DepartingHead:
    return get_attr_wrapped_model(model, "pre_process", return_model_obj=True).output_layer


def _last_output(step: Step, model: torch.nn.Module, call: Call) -> torch.Tensor:
    """Return zeros of the shape of the last stage's output: losses, ``[b, s]``, or without labels its logits."""
    if isinstance(call.labels, torch.Tensor):
        return zeros_as_output(call.labels.shape, torch.float32, step.message.device)
    head = _head_of(model)
    return zeros_as_output((*call.shape, head.num_logits(head.gathers_output)), step.message.dtype, step.message.device)


class VocabularySteps(Extension):
    """The extension that runs the passes of a cut vocabulary. It does nothing in steps whose program has no such
    passes.

    Its process groups are kept between steps. It must come after the extension of sequence slices, because it adds to
    the first and last of their stages.
    """

    def __init__(self) -> None:
        self._channels: dict[dist.ProcessGroup, Channels] = {}

    def replacements(self) -> Replacements:
        return [(symbol, keep_depths) for symbol in PROCESS_MTP_LOSS]

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        """Share the batch with all ranks, replace the first and last stage, and return the handlers of the passes."""
        if not step.program.schedule.vocabulary_barriers:
            return ()
        context, placement, group = step.context, step.pipeline.placement, step.pipeline.group
        if group not in self._channels:
            self._channels[group] = _connect(group, shards_group_of(step.groups))
        channels = self._channels[group]
        ends = (0, placement.num_stages - 1)
        calls: list[list[Call | None] | None] = []
        for stage, kind in zip(ends, (FirstStage, LastStage), strict=True):
            runner = step.stages.get(stage)
            calls.append(None)
            if runner is None:
                continue
            with runner.as_chunk():
                output_of = partial(output_to_send, step) if stage == 0 else partial(_last_output, step, runner.model)
                calls[-1], iterator = calls_of(context, runner.data_iterator, runner.model, output_of)
            step.stages[stage] = runner.recast(kind, data_iterator=iterator, is_last=False)
        first_calls, last_calls = calls
        batch = share_batch(
            step.tokens,
            first_calls,
            last_calls,
            (placement.devices[0], placement.devices[-1]),
            channels.pipeline,
            may_want_logits=step.forward_only,
            depths=getattr(context.config, "mtp_num_layers", None) or 0,
        )
        if step.bounds is not None:
            batch = batch.cut(step.bounds)
        last = step.stages.get(ends[1])
        assert last is None or isinstance(last, LastStage)
        if last is not None:
            last.depths = batch.depths
        passes = VocabularyPasses(
            placement,
            step.pipeline.device,
            shards_of(step.chunks),
            channels,
            batch,
            last,
            not step.forward_only,
            step.observation.ledger,
            step.program.schedule.units,
        )
        return [passes]

    def close(self, orderly: bool) -> None:
        channels, self._channels = self._channels, {}
        if orderly:
            destroy_groups([group for opened in channels.values() for group in (opened.pipeline, opened.shards)])


def _connect(pipeline: dist.ProcessGroup, shards: dist.ProcessGroup) -> Channels:
    """Make new process groups of the pipeline's and the shards' ranks, and use each once, so that it is connected.

    Every rank of both groups calls this at the same time. Without tensor parallelism, one new group serves as both.
    Their collectives may wait for other ranks in most of a step, so NCCL may use few thread blocks.
    """

    def open_group(parent: dist.ProcessGroup, description: str) -> dist.ProcessGroup:
        (group,) = new_groups([dist.get_process_group_ranks(parent)], parent, description, max_ctas=COLLECTIVE_CTAS)
        return group

    opened = gathering = open_group(pipeline, "PIPEMEM_VOCABULARY")
    if shards.size() != pipeline.size():  # without tensor parallelism they are the same ranks
        gathering = open_group(shards, "PIPEMEM_VOCABULARY_SHARDS")
    hello = torch.zeros(1, device=torch.cuda.current_device())
    for group in dict.fromkeys((opened, gathering)):
        dist.all_reduce(hello, group=group)
    return Channels(opened, gathering)
