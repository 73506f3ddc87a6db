"""Program of a process that has Transformer Engine on its path: delayed weight gradients beside immediate ones.

Prints, as JSON, the version, the result of every case, and graphs in the orders of the schedules in its arguments.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from itertools import product
from unittest import mock

import te_stand_in  # noqa: F401 - before the CPU lane

from megatron_pipemem.tools.cpu import activate

activate()

import graph_orders  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformer_engine  # noqa: E402
import transformer_engine_torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.extensions.transformer_engine import (  # noqa: E402
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from megatron.core.models.gpt import gpt_layer_specs  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.utils import is_te_min_version  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402
from transformer_engine.pytorch.module import base  # noqa: E402
from transformer_engine.pytorch.module._common import WeightGradStore  # noqa: E402
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Tensor  # noqa: E402
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer, MXFP8Tensor  # noqa: E402

from megatron_pipemem.mcore.model.linear import attach_ddp_hooks, hook_like_ddp, is_ddps_hook, mark  # noqa: E402
from megatron_pipemem.mcore.model.transformer_engine import (  # noqa: E402
    MARKS_THE_PARAMETER,
    defer,
    delayed_modules,
    notice_frozen_input,
    stop_delaying,
)
from megatron_pipemem.mcore.step.extension import observe  # noqa: E402
from megatron_pipemem.model.activations import layer_bytes  # noqa: E402
from megatron_pipemem.model.model import Execution, Model  # noqa: E402
from megatron_pipemem.runtime.activation_ledger import ActivationLedger, data_of  # noqa: E402
from megatron_pipemem.runtime.weight_gradients import (  # noqa: E402
    EARLY,
    HOOKED,
    AccumulatorHooks,
    WeightGradientQueue,
    accumulator_of,
    collecting,
)
from megatron_pipemem.schedule.action import Action, Kind  # noqa: E402
from megatron_pipemem.tools.megatron import profiling  # noqa: E402

MICROBATCHES, SEQUENCE, HIDDEN, INNER = 3, 4, 8, 16
# Each W right after its I, and a W that has no I of its own right before it.
ORDERS = {"IWIWIW": "I0 W0 I1 W1 I2 W2", "IIWIWW": "I0 I1 W0 I2 W1 W2"}


GPT = Model(layers=1, hidden=64, heads=4, sequence=32, vocabulary=512, dropout=0.0)
GROUP = replace(GPT, kv_heads=2, ffn=96, activation="swiglu", norm="rmsnorm", bias="none")
GROUPS = replace(GROUP, heads=8, kv_heads=4)
# Of one tensor-parallel rank of two.
FLASH = {
    "a group": GROUP,
    "two groups": GROUPS,
    "rotary positions": replace(GPT, position="rope"),
    "a group, rotary positions": replace(GROUP, position="rope"),
    "two groups, rotary positions": replace(GROUPS, position="rope"),
    "two groups, rotary positions, norms": replace(GROUPS, position="rope", qk_norm=True),
}


class Block(torch.nn.Module):
    """Norm, linear, activation, linear, as in Megatron's MLP: Transformer Engine adds the first bias, Megatron the second."""

    def __init__(self, config, bias: bool):
        super().__init__()
        self.config = config
        common = {
            "config": config,
            "init_method": lambda weight: torch.nn.init.normal_(weight, std=0.1),
            "bias": bias,
            "is_expert": False,
        }
        self.fc1 = TELayerNormColumnParallelLinear(
            HIDDEN, INNER, skip_bias_add=False, gather_output=False, tp_comm_buffer_name="fc1", **common
        )
        self.fc2 = TERowParallelLinear(
            INNER, HIDDEN, skip_bias_add=True, input_is_parallel=True, tp_comm_buffer_name="fc2", **common
        )

    def forward(self, x):
        inner, _ = self.fc1(x)
        output, bias = self.fc2(torch.tanh(inner))
        return output if bias is None else output + bias


class Penalised(Block):
    """Uses a weight a second time, so that autograd computes a part of its gradient, which is not delayed."""

    def forward(self, x):
        return super().forward(x) + self.fc1.weight.square().sum()


def build(
    bias: bool,
    delayed: bool,
    fusion: bool = False,
    overlap: bool | None = None,
    frozen: tuple[str, ...] = (),
    kind: type[Block] = Block,
    change: Callable[[torch.nn.Module], object] = lambda block: None,
    **settings: object,
):
    """The block with the same values every time, and Megatron's DDP around it unless ``overlap`` is ``None``.

    ``change`` is made by a user before DDP is. ``settings`` are of Megatron.
    """
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, gradient_accumulation_fusion=fusion,
        params_dtype=torch.float32, normalization="LayerNorm", **settings,
    )  # fmt: skip
    config.delay_wgrad_compute = delayed
    block = kind(config, bias)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            parameter.requires_grad = name not in frozen
    change(block)
    stop_delaying(block)
    if overlap is None:
        return block
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, grad_reduce_in_fp32=True)
    ddp_config.delay_wgrad_compute = delayed
    net = DistributedDataParallel(config, ddp_config, block)
    net.zero_grad_buffer()
    return net


def gradients(
    net: torch.nn.Module,
    order: str | None,
    seen: Callable[[str, WeightGradientQueue], None] = lambda action, queue: None,
    frozen: bool = False,
) -> dict[str, torch.Tensor]:
    """Of three microbatches, run in this order; ``None`` runs ordinary backwards. ``seen`` is called after every action.
    ``frozen`` says that inputs need no gradients.
    """
    delayed, queues = delayed_modules(net), {}
    generator = torch.Generator().manual_seed(3)
    inputs = [
        torch.randn(SEQUENCE, 2, HIDDEN, generator=generator).requires_grad_(not frozen) for _ in range(MICROBATCHES)
    ]
    with net.no_sync() if hasattr(net, "no_sync") else nullcontext():
        losses = [net(tensor).square().sum() for tensor in inputs]
        if order is None:
            for loss in losses:
                loss.backward()
        for action in (order or "").split():
            kind, microbatch = action[0], int(action[1])
            if kind == "I":
                queues[microbatch] = WeightGradientQueue()
                with collecting(queues[microbatch]):
                    losses[microbatch].backward()
                defer(delayed, queues[microbatch])
            else:
                queues[microbatch].run()
            seen(action, queues[microbatch])
    return {
        name: (parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad).clone()
        for name, parameter in net.named_parameters()
        if parameter.requires_grad
    }


def same(result: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert result.keys() == wanted.keys()
    wrong = [name for name in result if not torch.equal(result[name], wanted[name])]
    assert not wrong, f"other gradients of {wrong}"
    assert all(gradient.abs().sum() > 0 for gradient in result.values())


def cases() -> Iterator[tuple[str, Callable[..., None], tuple]]:
    """Of every case its name, its check, and the arguments of that."""
    for bias, overlap, order in product((False, True), (None, False, True), ORDERS):
        for fusion in (False,) if overlap is None else (False, True):
            name = f"{'bias' if bias else 'no bias'}, {_ddp(overlap)}, {'fusion, ' if fusion else ''}{order}"
            yield name, _exact, (bias, fusion, overlap, ORDERS[order])
    yield "a weight that is used twice", _penalised, ()
    yield "frozen weights", _frozen, ()
    for overlap in (None, True):
        yield f"frozen input, {_ddp(overlap)}", _frozen_input, (overlap,)
    yield "early weight", _early_weight, ()
    for (name, change), overlap in product(CHANGES.items(), (None, True)):
        yield f"{name}, {_ddp(overlap)}", _changed, (change, overlap, False)
        if change is not _scaled:  # the parameter would be no part of the layer any more
            yield f"{name} of a built model, {_ddp(overlap)}", _changed, (change, overlap, True)
    yield "bytes of what waits for W", _bytes, ()
    yield "the stage's input does not wait for W", _input_goes, ()
    for delayed in (False, True):
        yield f"counting what is saved, {'delayed' if delayed else 'not delayed'}", _counted, (delayed,)
    for sequence_parallel, kept in ((False, "sharded"), (True, "sharded"), (True, "gathered")):
        name = f"bytes that the planner predicts, sequence parallel {sequence_parallel}, {kept}"
        yield name, _planned, (sequence_parallel, kept)
    for kept in ("sharded", "gathered"):
        yield f"user buffers, {kept}", _user_buffers, (kept,)
    yield "8 bits in user buffers", _quantised_buffers, ()
    # Version 2.8 refuses the version of flash-attn that the stand-in has.
    models = FLASH if is_te_min_version("2.14.0") else {}
    for (name, model), recompute in product(models.items(), ("none", "selective")):
        title = f"bytes that the planner predicts with flash attention, {name}, recompute {recompute}"
        yield title, _planned_with_flash, (model, recompute)


def _ddp(overlap: bool | None) -> str:
    return "no DDP" if overlap is None else "DDP with overlap" if overlap else "DDP"


def _exact(bias: bool, fusion: bool, overlap: bool | None, order: str) -> None:
    wanted = gradients(build(bias, False, fusion, None if overlap is None else False), None)
    net = build(bias, True, fusion, overlap)
    assert len(delayed_modules(net)) == 2
    same(gradients(net, order), wanted)


def _penalised() -> None:
    """Both parts are added to the sum one after the other, and not together."""
    wanted = gradients(build(True, False, False, False, kind=Penalised), None)
    computed = gradients(build(True, True, False, True, kind=Penalised), ORDERS["IIWIWW"])
    torch.testing.assert_close(computed, wanted)


def _frozen() -> None:
    frozen = ("fc1.weight", "fc1.bias")
    net = build(True, True, True, True, frozen)
    assert [type(module).__name__ for module in delayed_modules(net)] == ["TERowParallelLinear"]
    same(gradients(net, ORDERS["IIWIWW"]), gradients(build(True, False, True, False, frozen), None))


def _frozen_input(overlap: bool | None) -> None:
    """What trains behind something frozen has nothing that waits for W."""
    net, waiting = build(True, True, False, overlap), []
    for module in delayed_modules(net):
        module.register_forward_pre_hook(notice_frozen_input)

    def count(action: str, queue: WeightGradientQueue) -> None:
        waiting.append([type(work.module).__name__ for work in queue._pending])

    computed = gradients(net, ORDERS["IIWIWW"], count, frozen=True)
    same(computed, gradients(build(True, False, False, None if overlap is None else False), None, frozen=True))
    one = ["TERowParallelLinear"]
    assert waiting == [one, one, [], one, [], []], waiting


def _early_weight() -> None:
    net, waiting = build(True, True, True, True), []
    setattr(net.module.fc2.weight, EARLY, True)
    computed = gradients(
        net, ORDERS["IIWIWW"], lambda action, queue: waiting.append([type(work.module) for work in queue._pending])
    )
    same(computed, gradients(build(True, False, True, False), None))
    one = [TELayerNormColumnParallelLinear]
    assert waiting == [one, one, [], one, [], []], waiting


def _scaled(net: torch.nn.Module) -> None:
    for part in (part for part in net.modules() if isinstance(part, TELayerNormColumnParallelLinear)):
        parametrize.register_parametrization(part, "weight", Scaled(), unsafe=True)


class Scaled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1.5


def _hooked(name: str) -> Callable[[torch.nn.Module], None]:
    def change(net: torch.nn.Module) -> None:
        for parameter in (parameter for key, parameter in net.named_parameters() if key.endswith(name)):
            parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))

    return change


def _hooked_node(net: torch.nn.Module) -> None:
    for key, parameter in net.named_parameters():
        if key.endswith("fc1.weight"):
            net.kept = accumulator_of(parameter)
            net.kept.register_prehook(lambda gradients: (gradients[0] * 0.5,))


CHANGES = {
    "computed weight": _scaled,
    "hooked weight": _hooked("fc1.weight"),
    "hooked bias": _hooked("fc1.bias"),
    "hooked bias that Megatron adds": _hooked("fc2.bias"),
    "hooked node": _hooked_node,
}


def _changed(change: Callable[[torch.nn.Module], None], overlap: bool | None, built: bool) -> None:
    """Weights that are computed, and hooks, on the built model or before."""
    before = {} if built else {"change": change}
    stock, net = (build(True, delayed, False, overlap, **before) for delayed in (False, True))
    if built:
        change(stock), change(net)
    hooks = AccumulatorHooks(is_ddps_hook)
    attach_ddp_hooks([net])
    mark(hooks.hooked(net.parameters()), HOOKED)
    hook_like_ddp(net, stop_delaying(net))
    same(gradients(net, ORDERS["IIWIWW"]), gradients(stock, None))


def _bytes() -> None:
    """Between I and W wait the inputs of both layers and the gradients of their outputs."""
    net = build(False, True)
    ledger, counted = ActivationLedger(net.parameters()), []

    def count(action: str, queue: WeightGradientQueue) -> None:
        for tensor in queue.tensors():
            ledger.hold(tensor)
        ledger.record(Action(Kind(action[0]), 0, int(action[1])))
        counted.append(ledger.entries[-1].bytes)

    gradients(net, ORDERS["IIWIWW"], count)
    one = 4 * SEQUENCE * 2 * (HIDDEN + INNER + INNER + HIDDEN)
    assert counted == [one, 2 * one, one, 2 * one, one, 0], counted


def _input_goes() -> None:
    """After I, nothing keeps the input of a stage: neither its first layer nor the graph of what a later one keeps."""
    net = build(False, True)
    input = torch.randn(SEQUENCE, 2, HIDDEN, requires_grad=True)
    net(2 * input).sum().backward()
    queue, storage = WeightGradientQueue(), StorageWeakRef(input.untyped_storage())
    defer(delayed_modules(net), queue)
    assert list(queue.tensors())
    del input
    assert storage.expired()


def _counted(delayed: bool) -> None:
    """A ledger that watches what modules save takes no gradient away; where it would, it leaves them alone and says why."""
    net, order = build(True, delayed, True, True), ORDERS["IIWIWW"] if delayed else None
    ledger = observe([net]).ledger
    assert (ledger.failure is None) == (delayed or is_te_min_version(MARKS_THE_PARAMETER)), ledger.failure
    with ledger.watch_saved():
        computed = gradients(net, order)
    same(computed, gradients(build(True, False, True, False), None))


def _planned(sequence_parallel: bool, kept: str) -> None:
    """What one layer keeps for W, on one of two tensor-parallel ranks."""
    execution = Execution(
        tp=2,
        sequence_parallel=sequence_parallel,
        attention="unfused",
        implementation="transformer_engine",
        wgrad_inputs=kept,
    )
    freed = -_changes_by_a_layer(GPT, execution, AttnBackend.unfused)[Kind.W]
    assert freed == layer_bytes(GPT, execution).after_input, (freed, layer_bytes(GPT, execution))


def _planned_with_flash(model: Model, recompute: str) -> None:
    """Formulas give the bytes that a layer keeps after F and for W with the kernels of rotations and of flash attention."""
    execution = Execution(tp=2, sequence_parallel=True, implementation="transformer_engine", recompute=recompute)
    with mock.patch.object(profiling, "FlashAttention", TEDotProductAttention):
        changes = _changes_by_a_layer(model, execution, AttnBackend.flash)
    wanted, kind_of_mask = layer_bytes(model, execution), 4 if recompute == "selective" else 0
    assert (changes[Kind.F] - kind_of_mask, -changes[Kind.W]) == (wanted.saved, wanted.after_input), (changes, wanted)


@contextmanager
def _buffers(kept: str, rows: int, mode: str, dtype: torch.dtype) -> Iterator[None]:
    """Give two tensor-parallel ranks user buffers of that many rows. Only one of them runs; the other's data are the same."""
    with profiling.lone_rank(Execution(tp=2, sequence_parallel=True, wgrad_inputs=kept)):
        group = parallel_state.get_tensor_model_parallel_group()
        modes = [base.UserBufferQuantizationMode[mode]]
        with mock.patch.object(dist, "new_group", lambda *_, **__: group), redirect_stdout(io.StringIO()):
            base.initialize_ub([rows, HIDDEN], 2, quantization_modes=modes, dtype=dtype, bootstrap_backend="gloo")
        try:
            yield
        finally:
            base.destroy_ub()


def _user_buffers(kept: str) -> None:
    """The next layer overwrites the operands of W: the input of ``fc1``, and the gradient of the output of ``fc2``."""
    settings = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "tp_comm_overlap": True,
        "tp_comm_bulk_wgrad": False,
    }
    with _buffers(kept, 4 * SEQUENCE, "NONE", torch.float32):
        wanted = gradients(build(False, False, **settings), None)
        net = build(False, True, **settings)
        assert net.fc1.ub_bulk_dgrad and net.fc2.ub_overlap_ag_dgrad
        same(gradients(net, ORDERS["IIWIWW"]), wanted)


def _quantised_buffers() -> None:
    """Transformer Engine's own tensors of 8 bits keep their bytes, and their scales, until W."""
    rows, form = 128, transformer_engine_torch.DType.kFloat8E4M3
    numbers = torch.arange(rows * HIDDEN).remainder(120).to(torch.uint8).view(rows, HIDDEN)
    one_scale, scales = torch.ones(1), torch.full((4, 128), 7, dtype=torch.uint8)
    current = Float8CurrentScalingQuantizer(form, device=torch.device("cpu"), rowwise=True, columnwise=False)
    blocks = MXFP8Quantizer(form, rowwise=False, columnwise=True)
    swizzled = {"with_gemm_swizzled_scales": False, "fake_dtype": torch.bfloat16} if is_te_min_version("2.14.0") else {}
    # The classes without the size and the format that they stand for, which these two add.
    per_tensor, per_block = Float8Tensor.__mro__[1], MXFP8Tensor.__mro__[1]
    shards = [
        (current, per_tensor(data=numbers, fp8_scale_inv=one_scale, fp8_dtype=form, quantizer=current)),
        (blocks, per_block(None, None, numbers, scales, form, blocks, **swizzled)),
    ]
    with _buffers("gathered", 2 * rows, "FP8", torch.bfloat16):
        group, buffer = parallel_state.get_tensor_model_parallel_group(), base.get_ub("fc1_dgrad", True)
        for quantizer, shard in shards:
            store = WeightGradStore(delay_wgrad_compute=True)
            with collecting(WeightGradientQueue()):
                gathered, _ = base.fill_userbuffers_buffer_for_all_gather(buffer, shard, quantizer, group)
                buffer.all_gather()  # as the product does that overlaps with it
                store.put([gathered], None)
            buffer.copy_into_buffer(torch.zeros(2 * rows, HIDDEN, dtype=torch.uint8))
            ((tensor,), _) = store.context.queue[-1]
            (data,) = data_of(tensor)
            assert tensor is gathered, "with its scales"
            assert torch.equal(data, torch.cat([numbers] * 2))


def _changes_by_a_layer(model: Model, execution: Execution, backend: AttnBackend) -> dict[Kind, int]:
    """Return, by kind of action, the bytes that one more layer adds to the action's change of memory."""
    spec_of, config_of = gpt_layer_specs.get_gpt_decoder_block_spec, profiling._config

    def delaying(*args):
        config = config_of(*args)
        config.delay_wgrad_compute, config.attention_backend = True, backend
        config.apply_rope_fusion = backend is AttnBackend.flash
        return config

    with (
        mock.patch.dict(os.environ),  # where Megatron names the kind of attention
        profiling.lone_rank(execution),
        mock.patch.object(profiling, "_config", delaying),
        mock.patch.object(
            gpt_layer_specs,
            "get_gpt_decoder_block_spec",
            lambda config, **_: spec_of(config, use_transformer_engine=True),
        ),
    ):
        faults = []
        for layers in (1, 2):
            stage = profiling.build_stage(model, execution, profiling.MIDDLE, [model.main_kind] * layers)
            assert len(delayed_modules(stage)) == 4 * layers
            entries = profiling.run_stage(stage, model, execution, profiling.MIDDLE, 3).counter.entries
            faults.append(profiling.changes(entries))
    return {kind: more - less for (kind, less), more in zip(faults[0].items(), faults[1].values(), strict=True)}


def _alone(check: Callable[..., None], how: tuple) -> None:
    """Run a check as the one rank of a job."""
    if check in (_planned, _planned_with_flash, _user_buffers, _quantised_buffers):  # make their own
        check(*how)
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    try:
        check(*how)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def main() -> None:
    orders = graph_orders.train_all(*sys.argv[1:])  # before Megatron has random states, which graphs would take
    results = {}
    for name, check, how in cases():
        try:
            _alone(check, how)
            results[name] = "exact"
        except Exception:
            results[name] = traceback.format_exc()
    json.dump({"version": transformer_engine.__version__, "cases": results, "orders": orders}, sys.stdout)


main()
