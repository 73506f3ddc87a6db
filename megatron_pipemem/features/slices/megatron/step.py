"""Run the slices of a sequence one after the other through Megatron's models.

While a step runs, forward pre-hooks make a chunk compute one slice instead of a whole sequence. The model gets the
slice's tokens and labels, rotary embeddings begin at the slice's first position, and attention gets the keys and values
of the earlier slices too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from math import lcm
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import unwrap_model

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.slices.megatron.context_parallel import ContextRanks
from megatron_pipemem.features.slices.megatron.depths import SlicedDepths
from megatron_pipemem.features.slices.megatron.documents import SlicedDocuments
from megatron_pipemem.features.slices.megatron.routers import SlicedRouters
from megatron_pipemem.features.slices.prices import slice_tokens
from megatron_pipemem.features.slices.runtime import SequenceState, SlicePart
from megatron_pipemem.gates import StepGates
from megatron_pipemem.mcore.model.language_model import is_language_model, layers_with_states, model_of_chunk
from megatron_pipemem.mcore.model.stages import ChunkStage, Tape, counted_before, shadowed
from megatron_pipemem.mcore.step.batches import zeros_as_output
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import ROLL, SAVE_DEPTH_LOSS, SHARE_OF_BATCH, Replacements
from megatron_pipemem.model.counts import attention_share
from megatron_pipemem.refusals import FUSED_ROTARY
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.executor import StepFeature
from megatron_pipemem.runtime.weight_gradients import is_plain

_PER_TOKEN = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")
"""Arguments of the model that have the shape ``[b, s]`` and are cut into slices."""
_WHOLE = ("decoder_input", "inference_context", "output_processor")
"""Arguments of the model that need whole sequences, and are refused."""
_OF_DOCUMENTS = SimpleNamespace(name="padding_causal_bottom_right")
"""A mask of Transformer Engine that is not in Megatron's list. Megatron reads its name alone."""
_POSITIONS = ("learned_absolute", "rope", "yarn", "none")


class _SliceEnds(BaseException):
    """Leave the forward step after the model has returned logits: only the step of the last slice goes on, with all of them.

    A step that computes losses runs to its end. Megatron's own step measures stragglers, and would log an exception.
    """


class SlicedModel:
    """A model chunk that can run slice by slice. Raise an UnsupportedError if a part of the chunk cannot."""

    def __init__(self, chunk: torch.nn.Module):
        model = unwrap_model(chunk)
        _check_model(model)
        self._model = model
        self._parameters = inspect.signature(model.forward)
        self._attention = [module for module in model.modules() if isinstance(module, Attention)]
        for attention in self._attention:
            _check_attention(attention)
        self._depths = SlicedDepths(model)
        self._routers = SlicedRouters(model, lambda: self._part)
        self._part: SlicePart | None = None
        self.ranks: ContextRanks | None = None
        """the context-parallel ranks that share slices; ``None`` if the model has a rank alone"""
        self.on_output: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Called with the model's output for a slice; its result takes the output's place."""

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Register the hooks on the model, and turn off options that need whole sequences, while the block runs.

        The hooks have an effect only inside ``running``.
        """
        with ExitStack() as stack:

            def change(owner: object, name: str, value: object) -> None:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

            def hook(module: torch.nn.Module, before: Callable) -> None:
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)

            hook(self._model, self._cut_arguments)
            stack.callback(self._model.register_forward_hook(self._pass_on).remove)
            stack.enter_context(self._routers.hooked())
            for layer in self._depths.layers:
                stack.callback(layer.register_forward_pre_hook(self._depths.begin_layer).remove)
            for module in self._model.modules():
                if isinstance(module, RotaryEmbedding):
                    hook(module, self._move_positions)
                    stack.callback(module.register_forward_hook(self._positions_of_documents).remove)
                elif getattr(module, "fuse_wgrad_accumulation", False):
                    # With this cache, Transformer Engine overwrites gradients in the backward of the step's first forward,
                    # and other slices run backward before it.
                    change(module, "disable_parameter_transpose_cache", True)
            for attention in self._attention:
                core = attention.core_attention
                hook(core, self._show_earlier)
                if self.ranks is not None:
                    is_local = isinstance(core, DotProductAttention)
                    alone = {"config": _of_one_rank(core.config)} if is_local else {"cp_group": None}
                    stack.enter_context(shadowed(core, alone | {"forward": partial(self._attend, core.forward)}))
                if isinstance(core, DotProductAttention):
                    # The fused kernels know causal masks of as many queries as keys only.
                    change(core.scale_mask_softmax, "scaled_masked_softmax_fusion", False)
            yield

    @contextmanager
    def running(self, part: SlicePart) -> Iterator[None]:
        """Make the model compute one slice while the block runs."""
        before, self._part = self._part, part
        if self.ranks is not None:
            self.ranks.have_split = False
        try:
            yield
        finally:
            self._part = before

    def _cut_arguments(self, module: torch.nn.Module, arguments: tuple, named: dict):
        if self._part is None:
            return None
        number, begin, end, sequence = self._part
        bound = self._parameters.bind(*arguments, **named)
        passed = bound.arguments
        for name in _WHOLE:
            if passed.get(name) is not None:
                raise UnsupportedError(
                    "slices-forward-step",
                    f"the forward step passes {name} to the model, and {name} cannot be cut into sequence slices; "
                    "leave it out, or take a schedule without slices",
                )
        self._check_shared(passed)
        mask = self._depths.start(passed, self._part) if self._model.config.mtp_num_layers else None
        for name in _PER_TOKEN:
            tensor = passed.get(name)
            if tensor is None:
                continue
            if tensor.dim() != 2 or tensor.size(1) != sequence.tokens:
                raise UnsupportedError(
                    "slices-forward-step",
                    f"the forward step passes {name} of shape {tuple(tensor.shape)} to the model, and sequence slices need "
                    f"[microbatch, {sequence.tokens}]; pass whole sequences of --seq-length tokens",
                )
            passed[name] = tensor[:, begin:end].contiguous()
        if mask is not None:
            passed["loss_mask"] = mask
        packed = passed.get("packed_seq_params")
        if packed is not None:
            if self._model.config.apply_rope_fusion:
                raise UnsupportedError("slices-attention", FUSED_ROTARY.sentence)
            if number not in sequence.documents:
                ends = [(begin * self._num_ranks, end * self._num_ranks), *self._ranges]
                tokens = sequence.tokens * self._num_ranks
                sequence.documents[number] = [SlicedDocuments(packed, *place, tokens) for place in ends]
            of_slice = sequence.documents[number][0]
            passed["packed_seq_params"] = of_slice.own if self.ranks is None else of_slice.as_one
        return bound.args, bound.kwargs

    def _check_shared(self, passed: Mapping[str, Any]) -> None:
        """Raise an UnsupportedError if the forward step has shared its batch among ranks by code of its own."""
        if self.ranks is None or self.ranks.have_split or all(passed.get(name) is None for name in _PER_TOKEN):
            return
        raise UnsupportedError(
            "slices-forward-step",
            "context-parallel ranks share every sequence slice, and the forward step gives them parts of whole sequences; take "
            "the parts from get_batch_on_this_cp_rank of megatron.core.utils, or pass --context-parallel-size 1",
        )

    def roll(self, roll_tensor: Callable, tensors: Any, fields: Sequence[str]) -> Any:
        """Return the result of Megatron's ``roll_tensor`` for the slice that runs now; ``None`` if none runs."""
        if self._part is None or tensors is None:
            return None
        if isinstance(tensors, list):
            return self._depths.roll_all(roll_tensor, tensors, fields, self._part)
        return self._depths.roll(roll_tensor, tensors, self._part)

    @property
    def continues_sequence(self) -> bool:
        """Whether a slice runs now that is not the first of its sequence."""
        return self._part is not None and self._part.number > 0

    def _pass_on(self, module: torch.nn.Module, arguments: tuple, output: torch.Tensor):
        return None if self._part is None or self.on_output is None else self.on_output(output)

    @property
    def _num_ranks(self) -> int:
        return 1 if self.ranks is None else self.ranks.size

    def _attend(self, forward: Callable, *arguments: Any, **named: Any):
        if self._part is None or self.ranks is None:
            return forward(*arguments, **named)
        of_ranges = self._part.sequence.documents.get(self._part.number, [None])[1:]
        return self.ranks.attend(forward, self._part, of_ranges, *arguments, **named)

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        """Where this rank's parts of the slice that runs now begin and end in the whole sequence."""
        assert self._part is not None, "a slice runs"
        place = self._part.begin, self._part.end
        return [place] if self.ranks is None else self.ranks.ranges(*place)

    @property
    def _documents(self) -> SlicedDocuments | None:
        """The packed documents of the slice that runs now, which may be a forward or, with recomputation, a backward."""
        return None if self._part is None else self._part.sequence.documents.get(self._part.number, [None])[0]

    def _move_positions(self, module: torch.nn.Module, arguments: tuple, named: dict):
        if self._part is None:
            return None
        if self._documents is not None:
            return (self._documents.longest, *arguments[1:]), named
        return arguments, named | {"offset": named.get("offset", 0) + self._part.begin * self._num_ranks}

    def _positions_of_documents(self, module: torch.nn.Module, arguments: tuple, output: Any):
        if self._documents is None:
            return None
        # Megatron takes a table with as many rows as tokens row by row, and not from its first row for every document.
        if isinstance(output, tuple):  # of latent attention: the table and a scale
            return (output[0][self._documents.positions], *output[1:])
        return output[self._documents.positions]

    def _show_earlier(self, core: torch.nn.Module, arguments: tuple, named: dict):
        if self._part is None:
            return None
        (_, begin, end, sequence), documents = self._part, self._documents
        query, key, value, mask, *remaining = arguments
        since, rows = 0 if documents is None else documents.since, slice(begin, end)
        if self.ranks is not None:
            key, value = self.ranks.gather(key), self.ranks.gather(value)
            begin, end = begin * self._num_ranks, end * self._num_ranks
        key = sequence.cache(core, "key").append(key, begin, since)
        value = sequence.cache(core, "value").append(value, begin, since)
        if documents is not None:
            named = named | {"packed_seq_params": documents.seen}
        if not isinstance(core, DotProductAttention):
            # Transformer Engine ignores the mask, and aligns its own to the last query and the last key.
            kind = AttnMaskType.causal_bottom_right if documents is None else _OF_DOCUMENTS
            return (query, key, value, None, *remaining), named | {"attn_mask_type": kind}
        if documents is not None:
            return (query, key, value, mask, *remaining), named
        if mask is None:
            positions = torch.arange(end, device=query.device)
            queries = torch.cat([positions[first:last] for first, last in self._ranges])
            mask = positions > queries[:, None]  # [queries, keys]; True hides a key
            mask = mask[None, None]
        else:
            mask = mask[..., rows, :end]
        return (query, key, value, mask, *remaining), named


def _of_one_rank(config: Any) -> Any:
    """Return a configuration of attention without context parallelism."""
    alone = copy(config)
    alone.context_parallel_size = 1
    return alone


def _check_model(model: torch.nn.Module) -> None:
    """Raise an UnsupportedError if a chunk's whole model cannot run slice by slice."""
    if not is_language_model(model):
        raise UnsupportedError(
            "slices-model",
            f"sequence slices run through a GPTModel or a HybridModel, and this is a {type(model).__name__}; leave out -o "
            "slices, or take a schedule that has none",
        )
    if model.position_embedding_type not in _POSITIONS:
        raise UnsupportedError(
            "slices-model",
            f"position embeddings of type {model.position_embedding_type} cannot begin in the middle of a sequence; pass "
            "--position-embedding-type rope, or take a schedule without sequence slices",
        )
    for number, kind in layers_with_states(model).items():
        raise UnsupportedError(
            "slices-model",
            f"layer {number} ({kind}) hands a state from token to token, and every slice would begin with an empty one; take "
            "a schedule without sequence slices",
        )


def _check_attention(attention: Attention) -> None:
    """Raise an UnsupportedError if a layer's attention is not causal, or takes no keys and values of earlier slices."""
    core = attention.core_attention
    if type(core) not in (DotProductAttention, TEDotProductAttention):
        raise UnsupportedError(
            "slices-attention",
            f"layer {attention.layer_number} attends by {type(core).__name__}, which does not take keys and values of earlier "
            "sequence slices; use dot-product attention of Megatron or Transformer Engine, or take a schedule without slices",
        )
    if attention.attn_mask_type is not AttnMaskType.causal:
        raise UnsupportedError(
            "slices-attention",
            f"layer {attention.layer_number} attends with a mask of type {attention.attn_mask_type.name}: in sequence slices a "
            "token sees earlier ones only, so attention must be causal; take a schedule without slices",
        )


def _check_gradient_hooks(chunk: torch.nn.Module) -> None:
    """Raise an UnsupportedError for a hook on a parameter's gradient, which would run for every slice.

    Only for a linear hook, the sum over slices would be the result for the microbatch.
    """
    for name, parameter in chunk.named_parameters():
        if not is_plain(parameter):
            raise UnsupportedError(
                "slices-model",
                f"{name} has a hook on its gradient, which would get the gradient of a slice and not of a microbatch; remove "
                "the hook, or take a schedule without sequence slices",
            )


@dataclass(eq=False)
class _OpenSequence:
    """The data that the slices of one microbatch share until the last backward."""

    state: SequenceState
    data: Tape | None  # the data that its first slice read; ``None`` if the stage reads no data
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """the outputs of the last stage by slice, without their graph"""
    running: torch.Tensor | None = None
    """the output of the last stage for the slice that runs now, with its graph"""
    joined: torch.Tensor | None = None
    """the outputs of all slices in one tensor, as the loss function gets them"""
    gradients: Sequence[torch.Tensor] = ()
    """the gradient of the loss with respect to the output of each slice"""


@dataclass
class SlicedStage(ChunkStage):
    """A stage that runs slices in place of microbatches. With n slices, slice i of microbatch k has the number ``k * n
    + i``.

    Each slice calls the user's forward step, which reads the same batch each time. With the last slice, the model of the
    last stage returns its outputs for all slices. So the loss, its report and all other results of the step
    are those of whole sequences. The steps of other slices end at the model's logits, or get zeros for losses.
    """

    sliced: SlicedModel = field(kw_only=True)
    bounds: Sequence[tuple[int, int]] = field(kw_only=True)  # ``(first token, end)`` of each slice
    # Called with each tensor that is kept in addition to those that autograd saves.
    hold: Callable[[torch.Tensor], object] = field(kw_only=True)
    _open: dict[int, _OpenSequence] = field(default_factory=dict)

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        number, part = divmod(microbatch, len(self.bounds))
        if part == 0:
            data = None if self.data_iterator is None else Tape(self.data_iterator)
            ranks = self.step.cp_group_size
            state = SequenceState(self.bounds[-1][1], self.hold, ranks, has_backward=not self.step.forward_only)
            self._open[number] = _OpenSequence(state, data)
        output = super().forward(microbatch, input, will_recompute)
        if self.step.forward_only and part == len(self.bounds) - 1:
            del self._open[number]
        return output

    def backward(
        self,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        number, part = divmod(microbatch, len(self.bounds))
        sequence = self._open[number]
        if self.is_last:
            # A scalar, as of a whole microbatch: Megatron scales its gradient.
            output = (output * sequence.gradients[part]).sum()
        with self.sliced.running(SlicePart(part, *self.bounds[part], sequence.state)):
            gradient = super().backward(microbatch, input, output, output_gradient)
        if part == 0:
            del self._open[number]
        return gradient

    def _run(
        self, microbatch: int, input: torch.Tensor | None, data: Iterator | None, loss_data: list
    ) -> tuple[torch.Tensor, torch.Tensor]:
        number, part = divmod(microbatch, len(self.bounds))
        sequence = self._open[number]
        # Megatron counts the tokens of packed documents in every forward step.
        counted = counted_before() if part else nullcontext()
        with self.sliced.running(SlicePart(part, *self.bounds[part], sequence.state)), counted:
            output, num_tokens = super()._run(microbatch, input, data, loss_data)
        if not self.is_last:
            return output, num_tokens
        running, joined = sequence.running, sequence.joined
        sequence.running = sequence.joined = None
        if joined is not None and joined.requires_grad:
            self._begin_backward(sequence, output, joined)
        assert running is not None, "the forward step has run"
        return running, num_tokens

    def _begin_backward(self, sequence: _OpenSequence, loss: torch.Tensor, joined: torch.Tensor) -> None:
        """Compute the gradient of the loss with respect to the output of each slice, for their later backwards."""
        (gradient,) = torch.autograd.grad(loss, joined, allow_unused=True)
        if gradient is None:
            raise UnsupportedError(
                "slices-forward-step",
                "the loss does not depend on the model's outputs for all sequence slices; compute the loss from the model's "
                "output, or take a schedule without slices",
            )
        self.hold(gradient)
        sequence.gradients = gradient.split([end - begin for begin, end in self.bounds], dim=1)

    def _data(self, microbatch: int) -> Iterator | None:
        number, part = divmod(microbatch, len(self.bounds))
        data = self._open[number].data
        return data if data is None or part == 0 else data.second_tape()

    def _number(self, microbatch: int) -> int:
        return microbatch // len(self.bounds)

    def _computes_loss(self, microbatch: int) -> bool:
        return self.is_last and (microbatch + 1) % len(self.bounds) == 0

    def _forward_step(self, microbatch: int) -> Callable:
        if not self.is_last:
            return self.step.forward_step_func
        number, part = divmod(microbatch, len(self.bounds))
        sequence, (begin, end) = self._open[number], self.bounds[part]

        def on_output(output: torch.Tensor) -> torch.Tensor:
            if not isinstance(output, torch.Tensor) or output.dim() < 2 or output.size(1) != end - begin:
                shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
                raise UnsupportedError(
                    "slices-forward-step",
                    f"the model returns {shape} for {end - begin} tokens, and sequence slices are joined along dimension 1; "
                    "take a schedule without slices",
                )
            if sequence.running is not None:
                raise UnsupportedError(
                    "slices-forward-step",
                    "the forward step calls the model twice, and the outputs of sequence slices are joined for one call; call "
                    "it once, or take a schedule without slices",
                )
            sequence.running, sequence.outputs[part] = output, output.detach()
            if not self._computes_loss(microbatch):
                if output.dim() > 2:
                    raise _SliceEnds
                return zeros_as_output((output.size(0), self.bounds[-1][1]), output.dtype, output.device)
            sequence.joined = torch.cat([sequence.outputs[s] for s in range(len(self.bounds))], dim=1)
            if not self.step.forward_only:
                sequence.joined.requires_grad_(torch.is_grad_enabled())
            return sequence.joined

        def stepping(*arguments):
            self.sliced.on_output = on_output
            try:
                stepped = self.step.forward_step_func(*arguments)
            except _SliceEnds:
                return sequence.running, None
            finally:
                self.sliced.on_output = None
            if sequence.running is None:
                raise UnsupportedError(
                    "slices-forward-step",
                    "the forward step does not call the model as a whole, whose outputs sequence slices join; call the model "
                    "that the step gets, or take a schedule without slices",
                )
            return stepped if self._computes_loss(microbatch) else (sequence.running, None)

        return stepping


class SequenceSlices(Extension):
    """The extension that cuts sequences into slices in steps whose schedule has slices. It does nothing in other
    steps.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._gates = StepGates()
        self._models: WeakKeyDictionary[torch.nn.Module, SlicedModel] = WeakKeyDictionary()
        self._ranks: ContextRanks | None = None

    def prepare(self, step: Step) -> None:
        """Choose the tokens of each slice of this step, and set the shapes of the slices' messages."""
        self._ranks = None
        if step.program.schedule.units.are_whole:
            return

        self._gates.check(self._request, [step.context.config], step.program.schedule)
        if step.message_shape is None or step.tokens is None or step.message.shape is None:
            raise UnsupportedError(
                "slices-forward-step",
                "sequence slices need messages of [tokens, microbatch, hidden size]; drop the function that changes them "
                "(adjust_tensor_shapes_fn), or take a schedule without slices",
            )
        for chunk in step.chunks:
            _check_gradient_hooks(chunk)
            if chunk not in self._models:
                self._models[chunk] = SlicedModel(chunk)
        (b, s), config, size = step.tokens[0], step.context.config, step.context.cp_group_size
        # Context-parallel ranks have two parts of a slice.
        multiple = lcm(step.groups.tp.size() if config.sequence_parallel else 1, 2 if size > 1 else 1)
        share = attention_share(model_of_chunk(unwrap_model(step.chunks[0]), s * size, mtp_num_layers=0))
        tokens = slice_tokens(s, step.program.schedule.units.parts, self._request.slice_cut, share, multiple=multiple)
        step.bounds = list(pairwise(accumulate(tokens, initial=0)))  # [2, 3] -> [(0, 2), (2, 5)]
        self._ranks = ContextRanks(step.groups.cp, step.bounds) if size > 1 else None
        for chunk in step.chunks:
            self._models[chunk].ranks = self._ranks
        shapes = [step.message_shape(b, num_tokens) for num_tokens in tokens]
        if len(set(shapes)) == 1:
            step.message = replace(step.message, shape=shapes[0])
        else:
            step.message = replace(step.message, shape=None, shapes=shapes * len(step.tokens))

    def replacements(self) -> Replacements:
        return [(ROLL, self._roll), (SAVE_DEPTH_LOSS, self._save_depth_loss), (SHARE_OF_BATCH, self._share)]

    def _share(self, share_of_batch: Callable, batch: dict[str, Any], *place: Any, **more: Any):
        return share_of_batch(batch, *place, **more) if self._ranks is None else self._ranks.split(batch)

    def _roll(self, roll_tensor: Callable, tensors: Any, *place: Any, **more: Any):
        for model in self._models.values():
            if (rolled := model.roll(roll_tensor, tensors, more.get("sequence_fields", ()))) is not None:
                return rolled
        return roll_tensor(tensors, *place, **more)

    def _save_depth_loss(self, save: Callable, loss: torch.Tensor, tokens: torch.Tensor, *place: Any, **more: Any):
        # Every slice has the tokens of its whole sequence, which a sum over slices counts once.
        if more.get("calculate_per_token_loss") and any(model.continues_sequence for model in self._models.values()):
            tokens = torch.zeros_like(tokens)
        return save(loss, tokens, *place, **more)

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        """Replace the stages of the step by stages that run slices."""
        if step.bounds is not None:
            ledger = step.observation.ledger

            def hold(tensor: torch.Tensor) -> None:
                """Count a tensor of several slices in the ledger, and exclude it from offload."""
                if ledger is not None:
                    ledger.hold(tensor)
                for exclude in step.excludes:
                    exclude([tensor])

            for stage, runner in step.stages.items():
                sliced = self._models[runner.model]
                step.stages[stage] = runner.recast(SlicedStage, sliced=sliced, bounds=step.bounds, hold=hold)
        return ()

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in () if step.bounds is None else step.chunks:
                stack.enter_context(self._models[chunk].hooked())
            stack.callback(setattr, self, "_ranks", None)
            yield
