"""Brings what the loss functions return to the last pipeline rank, where Megatron's training loops read it.

In a V the loss is computed on the first device, and every replica of a model has losses of its own. What a loss function
returns is the user's: nested dictionaries and lists of tensors and numbers. How it looks is told once, as a pickled object.
From then on the tensors alone travel, in one message on the device, for as long as it looks the same. The sender's host
never waits for it; the receiver's waits for the message, not for the computation that it has queued.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.utils._pytree import tree_leaves, tree_map

from megatron_pipemem.mcore.model.stages import StepContext
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.schedule import Schedule

_ALIGNMENT = 16
"""Bytes. Tensors of every type begin at a multiple of their element's size."""


@dataclass(frozen=True)
class _Leaf:
    """Say where a tensor stood."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, value: object) -> object:
        """Return what stands for a value in the form: a leaf for a tensor of one block, anything else as it is."""
        if _is_block(value):
            return cls(value.dtype, tuple(value.shape))
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def padded(self) -> int:
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


class LossCarrier:
    """Carries data from one rank of a group to another, step after step.

    Args:
        group: the pipeline's process group. Between two steps nothing else may be sent point to point on it.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._known: dict[tuple[int, int, Hashable], bytes] = {}
        """The form of the last data of every route and kind, pickled; alike at both ends."""
        self._sent: tuple[dist.Work, torch.Tensor] | None = None

    def send(self, data: object, destination: int, kind: Hashable) -> None:
        """Send to a rank of the group; returns at once unless ``data`` looks otherwise than the last of this kind.

        Args:
            data: nested dictionaries, lists and tuples of tensors and of whatever can be pickled.
            destination: rank within the group.
            kind: both ends must name the same; data of one kind should look alike.
        """
        self.finish()
        key = (self._group.rank(), destination, kind)
        tensors = [value.detach() for value in tree_leaves(data) if _is_block(value)]
        form = pickle.dumps(tree_map(_Leaf.of, data))
        known = self._known.get(key)
        if known is not None:
            same, leaves = known == form, _leaves(pickle.loads(known))
            buffer = _buffer(leaves)
            buffer[0] = same
            if same:
                for place, tensor in zip(_places(leaves, buffer), tensors, strict=True):
                    place.copy_(tensor)
            self._sent = (self._group.send([buffer], destination, 0), buffer)
            if same:
                return
        self._known[key] = form
        everything = [(form, [tensor.cpu() for tensor in tensors])]
        dist.send_object_list(everything, dist.get_global_rank(self._group, destination), self._group)

    def receive(self, source: int, kind: Hashable) -> object:
        """Receive what that rank of the group sends, with all tensors on this rank's device."""
        key = (source, self._group.rank(), kind)
        known = self._known.get(key)
        if known is not None:
            form = pickle.loads(known)
            leaves = _leaves(form)
            # Beside what is queued already: whether the message holds the data is for the host to see.
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                buffer = _buffer(leaves)
                self._group.recv([buffer], source, 0).wait()
                same = bool(buffer[0].item())
            queued = torch.cuda.current_stream()
            queued.wait_stream(stream)
            if buffer.device.type == "cuda":
                buffer.record_stream(queued)
            if same:
                return _restore(form, _places(leaves, buffer))
        payload: list[object] = [None]
        dist.recv_object_list(payload, dist.get_global_rank(self._group, source), self._group)
        form, tensors = payload[0]
        self._known[key] = form
        device = torch.cuda.current_device()
        return _restore(pickle.loads(form), (tensor.to(device) for tensor in tensors))

    def finish(self) -> None:
        """Let go of what was sent last; it has left long ago."""
        if self._sent is not None:
            work, _ = self._sent
            work.wait()
            self._sent = None


class Losses(Extension):
    """Brings the losses of every step to the last rank of its pipeline, and has those of further depths summed over it."""

    def __init__(self) -> None:
        self._carriers: dict[dist.ProcessGroup, LossCarrier] = {}

    def settle(self, step: Step) -> None:
        group = step.pipeline.group
        if group not in self._carriers:
            self._carriers[group] = LossCarrier(group)
        gather_losses(step.context, step.program.schedule, self._carriers[group], group)
        if not step.forward_only:
            sum_depths(step)

    def close(self, orderly: bool) -> None:
        carriers, self._carriers = self._carriers, {}
        for carrier in carriers.values() if orderly else ():
            carrier.finish()


_LOGGED = ("loss_values", "correct_values", "total_values")
"""What Megatron keeps for every depth of multi-token prediction."""


def sum_depths(step: Step) -> None:
    """Let Megatron sum the losses of every depth of multi-token prediction over the pipeline too, before it logs them, where
    the last stages are on other devices than its last one.
    """
    depths = getattr(step.context.config, "mtp_num_layers", None)
    if not depths or step.pipeline.placement.is_round_robin:
        return
    tracker = MTPLossLoggingHelper.tracker
    for name in _LOGGED:
        tracker.setdefault(name, torch.zeros(depths, device=torch.cuda.current_device()))
    tracker["reduce_group"], tracker["avg_group"] = step.pipeline.group, step.groups.dp_cp


def gather_losses(step: StepContext, schedule: Schedule, carrier: LossCarrier, pp_group: dist.ProcessGroup) -> None:
    """Bring all losses to the last pipeline rank, where training loops read them and the tokens that scale gradients.

    Every replica of the model has its losses on a device of its own; there they come in the order of their forwards. On the
    last rank they come in the order of the data iterator. Every rank of the pipeline calls this after its last action;
    ``step.loss_data`` is empty afterwards but on the last.

    Args:
        step: has the losses and the token count of this rank, and gets those of all.
        schedule: says which microbatches each rank's losses are of.
        carrier: between the ranks of the pipeline.
        pp_group: of the pipeline.
    """
    last, rank, placement = pp_group.size() - 1, pp_group.rank(), schedule.placement
    ends = {stage for stage in range(placement.num_stages) if placement.next_stage(stage) is None}
    sources = sorted({placement.devices[stage] for stage in ends})
    if sources == [last] and step.order is None:
        return
    kind = (step.forward_only, step.collect_non_loss_data, schedule.num_microbatches)
    own = {"losses": step.loss_data, "tokens": step.num_tokens}
    step.loss_data = []
    if rank != last:
        if rank in sources:
            carrier.send(own, last, kind)
        return
    found: list[tuple[int, object]] = []
    num_tokens = torch.zeros_like(step.num_tokens)
    for source in sources:
        data = own if source == last else carrier.receive(source, kind)
        order = [a.microbatch for a in schedule.orders[source] if a.kind is Kind.F and a.stage in ends]
        found += zip(order, data["losses"], strict=True)
        num_tokens += data["tokens"]
    if step.order is not None:
        found = [(step.order[position], data) for position, data in found]
    step.loss_data = [data for _, data in sorted(found, key=lambda each: each[0])]
    step.num_tokens.copy_(num_tokens)


def _is_block(value: object) -> bool:
    """Return whether a value is a tensor that a shape and bytes describe. Jagged ones, for example, have more to them."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested


def _leaves(form: object) -> list[_Leaf]:
    return [value for value in tree_leaves(form) if isinstance(value, _Leaf)]


def _restore(form: object, tensors: Iterator[torch.Tensor]) -> object:
    """Return data of this form, with these tensors in the places of its leaves, and other tensors on this rank's device."""

    def restored(value: object) -> object:
        if isinstance(value, _Leaf):
            return next(tensors)
        return value.to(torch.cuda.current_device()) if isinstance(value, torch.Tensor) else value

    return tree_map(restored, form)


def _buffer(leaves: list[_Leaf]) -> torch.Tensor:
    """Return bytes for all tensors, after a first one that says whether they are there."""
    size = _ALIGNMENT + sum(leaf.padded for leaf in leaves)
    return torch.empty(size, dtype=torch.uint8, device=torch.cuda.current_device())


def _places(leaves: list[_Leaf], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the part of the buffer that is each tensor's, as a tensor of its type and shape."""
    start = _ALIGNMENT
    for leaf in leaves:
        yield buffer[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
        start += leaf.padded
