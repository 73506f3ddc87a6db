"""The weight gradients of a step: split backwards into I and W, and sum them over data-parallel ranks bucket by bucket.

Backwards are split in Megatron's own layers and in those of Transformer Engine. A step's gradients are checked for NaN with
one wait of the host.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from textwrap import shorten
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from torch.utils.hooks import RemovableHandle

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.logs import tell
from megatron_pipemem.mcore.agreement import is_on_one_host
from megatron_pipemem.mcore.model import transformer_engine
from megatron_pipemem.mcore.model.linear import (
    attach_ddp_hooks,
    countable_linear,
    early_modules,
    hook_like_ddp,
    is_ddps_hook,
    mark,
    mark_early,
    named_unplain,
    sharded_gradients,
    split_embedding,
    split_linear,
)
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import (
    CHECK_GRADIENTS,
    GATHER_GRADIENT,
    GRADIENT_IS_READY,
    LINEAR,
    LOOKUP,
    Replacements,
)
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.executor import Executor, Handlers, Instruction, StepFeature
from megatron_pipemem.runtime.gradient_check import GradientCheck
from megatron_pipemem.runtime.weight_gradients import (
    EARLY,
    GRADIENT_READY,
    HOOKED,
    AccumulatorHooks,
)
from megatron_pipemem.schedule.action import COMPLETING, Action, Kind
from megatron_pipemem.schedule.options import AUTO, GATHERED

logger = logging.getLogger(__name__)


def sharded_replacements(
    wgrad_inputs: str, on_one_host: Callable[[dist.ProcessGroup], bool] = lambda group: False
) -> Replacements:
    """Return the replacements by which linear layers keep this rank's shard of a gathered tensor until W.

    The tensor is an input or an output gradient, and W gathers it again. ``wgrad_inputs`` is one of
    ``options.WGRAD_INPUTS``; for ``gathered`` the layers keep the whole tensor, or a copy if it is in a shared buffer. With
    ``auto``, shards are kept for process groups whose ranks are on one host.
    """
    if wgrad_inputs == GATHERED:
        return transformer_engine.sharded_replacements(lambda group: False)
    keeps = on_one_host if wgrad_inputs == AUTO else lambda group: True
    return [(GATHER_GRADIENT, sharded_gradients(keeps)), *transformer_engine.sharded_replacements(keeps)]


_MODULES_OF_FUNCTIONS = ("megatron.", "megatron_pipemem.", "transformer_engine.")
"""Beginnings of the names of modules whose autograd functions return a gradient for every parameter, or leave it to W."""


class SplitBackward(Extension):
    """Splits the backwards of linear layers for schedules that may split, and replaces them for offload.

    Without a split, weight gradients are computed within the backward. In runs that neither split nor offload, with
    ``counted``, this only makes sure that the ledger can count the bytes that linear layers save.
    ``has_run_delayed`` is true after the first step in which Transformer Engine's modules delayed their weight
    gradients.
    """

    def __init__(self, request: Request, counted: bool):
        self._request = request
        self._counted = counted
        self._prepared: set[torch.nn.Module] = set()
        self._watching: list[RemovableHandle] = []
        self._marked: list[tuple[torch.Tensor, str]] = []  # with the name of the mark
        self._hooks = AccumulatorHooks(is_ddps_hook)
        self._checked: set[torch.nn.Module] = set()
        self._check: GradientCheck | None = None  # of the first training step of a model
        self._on_one_host: dict[tuple[int, ...], bool] = {}  # by the ranks of a group
        self.has_run_delayed = False

    def replacements(self) -> Replacements:
        splits, late = self._request.may_split, self._request.pairs
        replaced = transformer_engine.replacements(self._request)
        # Also for offload, because Megatron's linear layers save tensors past the hooks that offload them (``saved_as_is``).
        if splits or late or self._request.may_offload:
            replaced.append((LINEAR, split_linear))
        elif self._counted:
            replaced.append((LINEAR, countable_linear))
        if splits:
            replaced.append((LOOKUP, split_embedding))
        if splits or late:
            replaced += sharded_replacements(self._request.wgrad_inputs if splits else GATHERED, self._is_on_one_host)
        return replaced

    def prepare(self, step: Step) -> None:
        if self._request.may_split and getattr(step.context.config, transformer_engine.DEFERS_HEAD, False):
            raise UnsupportedError(
                "unsupported-setting",
                f"this model's head was built with {transformer_engine.DEFERS_HEAD}, and nothing runs its weight gradients "
                "after the step; call enable() before the model is built",
            )
        if self._request.may_split and self._request.wgrad_inputs == AUTO:
            self._compare_hosts(step.groups)
        self._note(attach_ddp_hooks(step.chunks), GRADIENT_READY)
        new = [chunk for chunk in step.chunks if chunk not in self._prepared]  # not in every step anew
        self._prepared.update(new)
        for chunk in new:
            transformer_engine.mark_new_biases(chunk, step.context.config)
        self._leave_to_autograd(step.chunks, bool(new))
        for module in (module for chunk in new for module in transformer_engine.delayed_modules(chunk)):
            self._watching.append(module.register_forward_pre_hook(transformer_engine.notice_frozen_input))
        self._note(mark_early(new, early_modules(self._request.early_wgrad, step.context.config)), EARLY)
        self._check = None  # that of a step that failed is of no use
        if self._request.may_split and not step.forward_only:
            unchecked = [chunk for chunk in step.chunks if chunk not in self._checked]
            self._checked.update(unchecked)
            trained = (pair for chunk in unchecked for pair in chunk.named_parameters() if pair[1].requires_grad)
            self._check = GradientCheck(dict(trained), _MODULES_OF_FUNCTIONS) if unchecked else None

    def _note(self, marked: Iterable[torch.Tensor], name: str) -> None:
        self._marked += [(weight, name) for weight in marked]

    def _leave_to_autograd(self, chunks: Sequence[torch.nn.Module], logs: bool) -> None:
        """Leave the gradients of weights that are not plain to autograd, and log their names.

        A program may register hooks at any time, so every step looks for new ones. To list the names takes milliseconds:
        ``logs`` asks for them, and new hooks do.
        """
        hooked = mark(self._hooks.hooked(parameter for chunk in chunks for parameter in chunk.parameters()), HOOKED)
        self._note(hooked, HOOKED)
        if not (self._request.may_split or self._request.pairs):
            return
        for chunk in chunks:
            hook_like_ddp(chunk, transformer_engine.stop_delaying(chunk))
        names = [name for chunk in chunks for name in named_unplain(chunk)] if logs or hooked else []
        if names:
            logger.warning(
                "pass I computes the gradients of these weights, and W does not, because they are computed from other "
                "tensors or have hooks: %s",
                shorten(", ".join(names), 500),
            )

    def around(self, step: Step) -> AbstractContextManager:
        return nullcontext() if self._check is None else self._check.watching()

    def before_finalize(self, step: Step) -> None:
        """Raise an UnsupportedError, before weights change, if a parameter lost its gradient in the first step."""
        lost = [] if self._check is None else self._check.lost()
        if lost:
            raise UnsupportedError(
                "missing-gradient",
                f"in the first step, no pass computed the gradient of {shorten(', '.join(lost), 500)}; take a schedule that "
                "does not split backwards, for example 1f1b, and report this with the class of the layer",
            )

    def _compare_hosts(self, groups: ProcessGroupCollection) -> None:
        """Find out whether the ranks of the tensor-parallel groups are on one host, once for each group."""
        for group in (groups.tp, getattr(groups, "expt_tp", None)):
            if group is None or group.size() == 1:
                continue
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks not in self._on_one_host:
                self._on_one_host[ranks] = is_on_one_host(group)

    def _is_on_one_host(self, group: dist.ProcessGroup) -> bool:
        return self._on_one_host.get(tuple(dist.get_process_group_ranks(group)), False)

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        self.has_run_delayed |= any(stage.delayed for stage in step.stages.values())
        return ()

    def close(self, orderly: bool) -> None:
        for weight, name in self._marked:
            delattr(weight, name)
        self._marked.clear()
        self._hooks.forget_parameters()
        self._prepared.clear()
        self._checked.clear()
        for hook in self._watching:
            hook.remove()
        self._watching.clear()
        if self.has_run_delayed:
            tell(logger, transformer_engine.STAYS_DELAYED, level=logging.WARNING)


# Sums of gradients.

Listener = Callable[[Any, torch.Tensor], None]
"""A function that is called with a bucket group and a parameter when a microbatch has added its gradient."""


class GradientReductions(Extension):
    """Starts each bucket's sum over the data-parallel ranks as soon as no later action adds to its gradients.

    Sums start early only with ``--overlap-grad-reduce``, as in Megatron. In four cases all buckets of a stage start at
    the action ``REDUCE_GRAD``: in a step that runs by the order for one hardware queue, in which the sums have a fixed
    place; in a step that replays CUDA graphs; in a model with replicas, whose gradients must be added first; if a
    vocabulary pass adds gradients last.

    Megatron's check for NaN makes the host wait twice per bucket, right before its sum. Here, unless
    ``--check-for-large-grads`` is set, the norms stay on the device until the gradients are finalized, and the host
    reads all of them at once. Megatron's own check of each norm runs only if a norm is not finite, or if
    ``_judges_all`` says so.
    """

    only_trains = True

    def __init__(self) -> None:
        self._norms: list[tuple[Callable, list[torch.Tensor]]] | None = None
        """Gradient norms of this step, each with the check that Megatron would call; ``None`` between steps."""
        self._listener: Listener | None = None

    def replacements(self) -> Replacements:
        return [(CHECK_GRADIENTS, self._check), (GRADIENT_IS_READY, self._ready)]

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        if step.single_queue or step.replays_passes or step.pipeline.placement.replicas > 1:
            return ()
        actions = step.program.actions[step.pipeline.device]
        last = {action.stage: action for action in actions if action.kind in COMPLETING}
        early = [
            action
            for action in last.values()
            if action.kind in (Kind.W, Kind.B) and _overlaps(step.stages[action.stage].model)
        ]
        return [_SumsDuringLastPass(step, early, self.listening)] if early else ()

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        self._norms = []
        try:
            yield
        except BaseException:
            self._norms = None
            raise

    def after(self, step: Step) -> None:
        kept, self._norms = self._norms, None
        norms = [norm.float() for _, of_group in kept or () for norm in of_group]
        if norms and (_judges_all() or not torch.stack(norms).isfinite().all()):
            for check, of_group in kept or ():
                check(_with_norms(of_group), check_for_nan_or_inf=True, check_for_large=False)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def _check(self, original: Callable, group, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        if self._norms is None or check_for_large:
            original(group, check_for_nan_or_inf=check_for_nan_or_inf, check_for_large=check_for_large)
        else:
            self._norms.append((original, [bucket.grad_data.norm(p=2) for bucket in group.buckets]))

    def _ready(self, original: Callable, group, param: torch.Tensor, *args, **kwargs) -> None:
        original(group, param, *args, **kwargs)
        if self._listener is not None:
            self._listener(group, param)


def _overlaps(model) -> bool:
    return getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False)


def _judges_all() -> bool:
    """Return whether Megatron must check every norm: in reruns, to inject errors, or for its determinism statistics."""
    machine = get_rerun_state_machine()
    if machine.mode is RerunMode.DISABLED:
        return False
    is_first_run = machine.mode is RerunMode.VALIDATE_RESULTS and machine.state is RerunState.INITIAL_RUN
    return not is_first_run or machine.error_injector.should_inject_errors


def _with_norms(norms: Sequence[torch.Tensor]) -> SimpleNamespace:
    """Return a stand-in for Megatron's bucket group, whose buckets have these gradient norms."""
    return SimpleNamespace(
        buckets=[SimpleNamespace(grad_data=SimpleNamespace(norm=lambda p, norm=norm: norm)) for norm in norms]
    )


class _SumsDuringLastPass(StepFeature):
    """Starts the gradient sums of a stage's buckets during the last action that adds to its gradients.

    In a last W, exactly the weights in its queue still get a gradient. In a last B, a parameter is complete when it got
    as many gradients as in any earlier B of the step. A parameter that got none in the earlier ones waits for
    ``REDUCE_GRAD``.

    Args:
        last: the last W or B of each stage whose sums overlap.
        listening: returns a context in which a listener is called with every parameter that gets a gradient.
    """

    def __init__(self, step: Step, last: Sequence[Action], listening: Callable):
        self._step, self._listening = step, listening
        self._last = frozenset(last)
        self._counted = {action.stage for action in last if action.kind is Kind.B}
        self._reports: dict[int, Counter[torch.Tensor]] = defaultdict(Counter)
        self._closing: dict[int, _BucketStarts] = {}

    def extend(self, executor: Executor) -> Handlers:
        weight_gradients, backward, reduce = (executor.handlers[k] for k in (Kind.W, Kind.B, Kind.REDUCE_GRAD))

        def run_weight_gradients(instruction: Instruction) -> None:
            if instruction.action in self._last:
                pending = dict.fromkeys(executor.queues[instruction.key].parameters(), 1.0)
                with self._starting(instruction.action.stage, pending):
                    weight_gradients(instruction)
            else:
                weight_gradients(instruction)

        def run_backward(instruction: Instruction) -> None:
            stage = instruction.action.stage
            if instruction.action in self._last:
                with self._starting(stage, self._expected(stage)):
                    backward(instruction)
            elif stage in self._counted:
                reports: Counter[torch.Tensor] = Counter()
                with self._listening(lambda _, param: reports.update((param,))):
                    backward(instruction)
                self._reports[stage] |= reports
            else:
                backward(instruction)

        def start_rest(instruction: Instruction) -> None:
            starts = self._closing.pop(instruction.action.stage, None)
            reduce(instruction) if starts is None else starts.start_all()

        return {Kind.W: run_weight_gradients, Kind.B: run_backward, Kind.REDUCE_GRAD: start_rest}

    def _expected(self, stage: int) -> dict[torch.Tensor, float]:
        reports = self._reports[stage]
        return {param: reports.get(param, math.inf) for param in self._step.stages[stage].model.parameters()}

    @contextmanager
    def _starting(self, stage: int, pending: Mapping[torch.Tensor, float]) -> Iterator[None]:
        starts = self._closing[stage] = _BucketStarts(
            self._step.stages[stage].model, pending, self._step.context.force_all_reduce
        )
        with self._listening(starts.report):
            starts.start_complete()
            yield


class _BucketStarts:
    """Starts the gradient sums of a chunk's bucket groups, each when all of its parameters are complete.

    They start in Megatron's order, because all ranks of a process group must post its collectives in the same order.
    Parameters may complete in another order on another rank.

    Args:
        model: the chunk, wrapped by Megatron's DDP.
        pending: the number of gradients that a parameter still gets. Parameters that are not listed are complete.
        force_all_reduce: as in Megatron.
    """

    def __init__(self, model: Any, pending: Mapping[torch.Tensor, float], force_all_reduce: bool):
        self._model, self._force_all_reduce = model, force_all_reduce
        self._orders = [deque(model.bucket_groups), deque(model.expert_parallel_bucket_groups)]
        self._pending = {
            group: {param: pending[param] for param in group.params if param in pending}
            for order in self._orders
            for group in order
        }

    def report(self, group: Any, param: torch.Tensor) -> None:
        """Count one gradient of ``param``, and start the sums of the bucket groups that are now complete.

        Raises:
            UnsupportedError: the sum of ``group`` has started already, without this gradient.
        """
        pending = self._pending.get(group)
        if pending is None:
            name = next(name for name, parameter in self._model.named_parameters() if parameter is param)
            raise UnsupportedError(
                "late-gradient",
                f"{name} got a gradient after the reduction of its bucket had started, because "
                "a microbatch reached it more often than the ones before; drop --overlap-grad-reduce",
            )
        pending[param] = pending.get(param, 0) - 1
        if pending[param] <= 0:
            del pending[param]
            self.start_complete()

    def start_complete(self) -> None:
        for order in self._orders:
            while order and not self._pending[order[0]]:
                self._start(order.popleft())

    def start_all(self) -> None:
        for order in self._orders:
            while order:
                self._start(order.popleft())

    def _start(self, group: Any) -> None:
        del self._pending[group]
        group.start_grad_sync(force_all_reduce=self._force_all_reduce)
