"""Send the results of loss functions to the last pipeline rank, where Megatron's training loops read them.

In a V, the loss is computed on the first device, and every replica of a model has its own losses. A loss function may
return nested dictionaries and lists of tensors and numbers. Their structure is pickled and sent once. As long as it
stays the same, only the tensors are sent, in one message between the devices. The sender's host never waits for this
message. The receiver's host waits for the message, but not for the computation that it has queued.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.utils._pytree import tree_leaves, tree_map

from megatron_pipemem.mcore.compat import logged_depths
from megatron_pipemem.mcore.model.stages import StepContext
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.runtime.executor import Executor, Handlers, Instruction, StepFeature
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.schedule import Schedule

_ALIGNMENT = 16
"""In bytes, so that every tensor in the buffer begins at a multiple of its element's size."""


@dataclass(frozen=True)
class _Leaf:
    """The element type and shape of a tensor, which replace it in the structure that is sent."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, value: object) -> object:
        """Return a leaf for a dense tensor; return other values as they are, and other tensors on the host."""
        if isinstance(value, torch.Tensor) and _is_strided(value):
            return cls(value.dtype, tuple(value.shape))
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def padded(self) -> int:
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


class LossCarrier:
    """Sends nested data between two ranks of a pipeline, step after step.

    Between two steps, nothing else may be sent point to point on the process group.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._last_forms: dict[tuple[int, int, Hashable], bytes] = {}
        """The pickled structure of the last data, by sender, receiver and kind. Both ends have the same."""
        self._sent: tuple[dist.Work, torch.Tensor] | None = None
        self._begun = False
        # One stream for the whole run, because every stream has its own memory pool.
        self._receiving_stream: torch.cuda.Stream | None = None

    def begin(self, data: object, destination: int, kind: Hashable) -> None:
        """Send data early if the receiver knows their structure, else do nothing.

        If they were sent, the next ``send`` does nothing.
        """
        if self._last_forms.get((self._group.rank(), destination, kind)) == _structure(data):
            self.send(data, destination, kind)
            self._begun = True

    def send(self, data: object, destination: int, kind: Hashable) -> None:
        """Send nested dictionaries, lists and tuples of tensors and picklable values to a rank of the group.

        It does nothing if ``begin`` has sent the data. Otherwise it waits until the previous message has been sent. Then
        it returns at once if the structure of ``data`` equals that of the last data of this ``kind`` to this rank. If
        the structure is new, the host waits for the receiver. The receiver must give the same ``kind``.
        """
        if self._begun:
            self._begun = False
            return
        self.finish()
        key = (self._group.rank(), destination, kind)
        tensors = [value.detach() for value in tree_leaves(data) if _is_strided(value)]
        form = _structure(data)
        last_form = self._last_forms.get(key)
        if last_form is not None:
            is_same_form, leaves = last_form == form, _leaves(pickle.loads(last_form))
            buffer = _buffer(leaves)
            buffer[0] = is_same_form
            if is_same_form:
                for place, tensor in zip(_views(leaves, buffer), tensors, strict=True):
                    place.copy_(tensor)
            self._sent = (self._group.send([buffer], destination, 0), buffer)
            if is_same_form:
                return
        self._last_forms[key] = form
        everything = [(form, [tensor.cpu() for tensor in tensors])]
        dist.send_object_list(everything, dist.get_global_rank(self._group, destination), self._group)

    def receive(self, source: int, kind: Hashable) -> Any:
        """Return the data that the rank ``source`` sends, with all tensors on this rank's device."""
        key = (source, self._group.rank(), kind)
        last_form = self._last_forms.get(key)
        if last_form is not None:
            form = pickle.loads(last_form)
            leaves = _leaves(form)
            # On a second stream, because the host waits for the message to see whether it holds the data.
            if self._receiving_stream is None:
                self._receiving_stream = torch.cuda.Stream()
            with torch.cuda.stream(self._receiving_stream):
                buffer = _buffer(leaves)
                self._group.recv([buffer], source, 0).wait()
                is_same_form = bool(buffer[0].item())
            queued = torch.cuda.current_stream()
            queued.wait_stream(self._receiving_stream)
            if buffer.is_cuda:
                buffer.record_stream(queued)
            if is_same_form:
                return _restore(form, _views(leaves, buffer))
        payload: list[Any] = [None]
        dist.recv_object_list(payload, dist.get_global_rank(self._group, source), self._group)
        form, tensors = payload[0]
        self._last_forms[key] = form
        device = torch.cuda.current_device()
        return _restore(pickle.loads(form), (tensor.to(device) for tensor in tensors))

    def finish(self) -> None:
        """Wait until the last message has been sent, and free its buffer."""
        if self._sent is not None:
            work, _ = self._sent
            work.wait()
            self._sent = None


class Losses(Extension):
    """Sends the losses of every step to the last pipeline rank, and sums those of multi-token prediction."""

    def __init__(self) -> None:
        self._carriers: dict[dist.ProcessGroup, LossCarrier] = {}

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        """Return a handler that sends the losses early, if steps overlap and all losses are computed on this rank.

        The last rank then does not wait for the losses at the end of its step. In the order for one hardware queue, no
        losses are sent early.
        """
        if not step.overlaps or step.single_queue or _ends(step.program.schedule).devices != [step.pipeline.device]:
            return ()
        return [_EarlyLosses(step, self._carrier(step))]

    def before_finalize(self, step: Step) -> None:
        gather_losses(step.context, step.program.schedule, self._carrier(step), step.pipeline.group)
        if not step.forward_only:
            sum_depths(step)

    def _carrier(self, step: Step) -> LossCarrier:
        group = step.pipeline.group
        if group not in self._carriers:
            self._carriers[group] = LossCarrier(group)
        return self._carriers[group]

    def close(self, orderly: bool) -> None:
        carriers, self._carriers = self._carriers, {}
        for carrier in carriers.values() if orderly else ():
            carrier.finish()


class _EarlyLosses:
    """Sends this rank's losses of a step to the last rank right after the last forward that computes one.

    The last rank then still has backwards to run, which need that forward. So the losses arrive before its step ends.
    """

    def __init__(self, step: Step, carrier: LossCarrier):
        self._step, self._carrier = step, carrier

    def extend(self, executor: Executor) -> Handlers:
        step, forward = self._step.context, executor.handlers[Kind.F]
        schedule, last = self._step.program.schedule, self._step.pipeline.group.size() - 1
        if self._step.pipeline.device == last:
            return {}
        ends = _ends(schedule)
        final = ends.forwards(self._step.pipeline.device)[-1]

        def run(instruction: Instruction) -> None:
            forward(instruction)
            if instruction.action == final:
                self._carrier.begin(_losses_and_tokens(step), last, _kind(step, schedule))

        return {Kind.F: run}


class _LossStages(NamedTuple):
    """The stages of a schedule that compute losses, and their devices in ascending order."""

    schedule: Schedule
    stages: set[int]
    devices: list[int]

    def forwards(self, device: int) -> list[Action]:
        """Return the forwards of a device that compute losses, in the order of the schedule.

        Only the forward of a microbatch's last part computes a loss.
        """
        units, order = self.schedule.units, self.schedule.orders[device]
        forwards = (a for a in order if a.kind is Kind.F and a.stage in self.stages)
        return [a for a in forwards if units.after(a.microbatch) is None]


def _ends(schedule: Schedule) -> _LossStages:
    placement = schedule.placement
    stages = {stage for stage in range(placement.num_stages) if placement.next_stage(stage) is None}
    return _LossStages(schedule, stages, sorted({placement.devices[stage] for stage in stages}))


def _losses_and_tokens(step: StepContext) -> dict[str, Any]:
    return {"losses": step.loss_data, "tokens": step.num_tokens}


def _kind(step: StepContext, schedule: Schedule) -> Hashable:
    """Return a key for steps whose losses have one structure."""
    return step.forward_only, step.collect_non_loss_data, schedule.num_microbatches


def sum_depths(step: Step) -> None:
    """Make Megatron sum the losses of multi-token prediction over the pipeline before it logs them.

    This is needed if a last stage is not on the last device, as in a V. Nothing is done under round robin.
    """
    config = step.context.config
    if not getattr(config, "mtp_num_layers", None) or step.pipeline.placement.is_round_robin:
        return
    tracker, (shapes, further) = MTPLossLoggingHelper.tracker, logged_depths(config)
    for name, shape in shapes.items():
        tracker.setdefault(name, torch.zeros(shape, device=torch.cuda.current_device()))
    tracker.update(further)
    for prefix in ("", "acceptance_"):
        tracker[f"{prefix}reduce_group"], tracker[f"{prefix}avg_group"] = step.pipeline.group, step.groups.dp_cp


def gather_losses(step: StepContext, schedule: Schedule, carrier: LossCarrier, pp_group: dist.ProcessGroup) -> None:
    """Send all losses and token counts to the last pipeline rank. Every rank calls this after its last action.

    Training loops read the losses there. Every replica of the model has its losses on one device, in the order of their
    forwards. On the last rank, the losses get the order of the data iterator. On all other ranks, ``step.loss_data`` is
    then empty. The last rank's ``step.num_tokens`` becomes the sum over all ranks. Nothing is sent or changed if all
    losses are on the last rank already and ``step.order`` is ``None``.
    """
    last, rank, ends = pp_group.size() - 1, pp_group.rank(), _ends(schedule)
    sources = ends.devices
    if sources == [last] and step.order is None:
        return
    kind, own = _kind(step, schedule), _losses_and_tokens(step)
    step.loss_data = []
    if rank != last:
        if rank in sources:
            carrier.send(own, last, kind)
        return
    losses: list[tuple[int, object]] = []
    num_tokens = torch.zeros_like(step.num_tokens)
    for source in sources:
        data = own if source == last else carrier.receive(source, kind)
        order = [schedule.units.microbatch(action.microbatch) for action in ends.forwards(source)]
        losses += zip(order, data["losses"], strict=True)
        num_tokens += data["tokens"]
    if step.order is not None:
        losses = [(step.order[position], data) for position, data in losses]
    step.loss_data = [data for _, data in sorted(losses, key=itemgetter(0))]
    step.num_tokens.copy_(num_tokens)


def _structure(data: object) -> bytes:
    """Return the pickled structure of data, with a leaf in place of every dense tensor."""
    return pickle.dumps(tree_map(_Leaf.of, data))


def _is_strided(value: object) -> bool:
    """Return whether a value is a dense tensor, which is fully described by its element type, shape and bytes."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested


def _leaves(form: object) -> list[_Leaf]:
    return [value for value in tree_leaves(form) if isinstance(value, _Leaf)]


def _restore(form: object, tensors: Iterator[torch.Tensor]) -> Any:
    """Return data of the structure ``form`` on this rank's device, with ``tensors`` in place of its leaves."""

    def restored(value: object) -> object:
        if isinstance(value, _Leaf):
            return next(tensors)
        return value.to(torch.cuda.current_device()) if isinstance(value, torch.Tensor) else value

    return tree_map(restored, form)


def _buffer(leaves: list[_Leaf]) -> torch.Tensor:
    """Return a byte buffer for the tensors of all leaves.

    Its first byte is 0 if the structure has changed. The data then follow pickled, and not in the buffer.
    """
    size = _ALIGNMENT + sum(leaf.padded for leaf in leaves)
    return torch.empty(size, dtype=torch.uint8, device=torch.cuda.current_device())


def _views(leaves: list[_Leaf], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a view of the buffer for each leaf, with the leaf's element type and shape."""
    start = _ALIGNMENT
    for leaf in leaves:
        yield buffer[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
        start += leaf.padded
