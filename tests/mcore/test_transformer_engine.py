"""How a model comes to delay its weight gradients, and what is refused. That they are right: ``tests/transformer_engine``."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant import absorbed_mla
from packaging.version import Version
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore import refusals
from megatron_pipemem.mcore.model import transformer_engine
from megatron_pipemem.mcore.model.transformer_engine import DelayedWeightGradient, delayed_modules
from megatron_pipemem.mcore.step.gradients import SplitBackward
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.weight_gradients import (
    ImmediateWeightGradients,
    LateWeightGradients,
    WeightGradientQueue,
    collecting,
)


def waiting(requires_grad: bool = True) -> torch.nn.Linear:
    """As a Transformer Engine module that delays shows itself."""
    linear = torch.nn.Linear(2, 2)
    linear.weight.skip_backward_post_hook = True
    linear.weight.requires_grad = requires_grad
    linear.backward_dw = lambda: None
    return linear


def test_only_the_modules_that_really_wait_are_found():
    forwarding = torch.nn.Sequential(waiting(), torch.nn.Tanh(), waiting(requires_grad=False))
    forwarding.backward_dw = lambda: None
    assert delayed_modules(forwarding) == (forwarding[0],)
    assert delayed_modules(torch.nn.Linear(2, 2)) == ()


class Quantized:
    """As a quantised tensor of Transformer Engine shows itself."""

    def __init__(self, rows: torch.Tensor):
        self.rows, self.columnwise = rows, False

    def get_data_tensors(self):
        return (self.rows,)

    def update_usage(self, columnwise_usage):
        self.columnwise = columnwise_usage

    def prepare_for_saving(self):
        rows, self.rows = self.rows, None
        return [rows, None], self

    def restore_from_saved(self, tensors):
        self.rows, _ = tensors


class Quantizer:
    """One whose usages are changed between I and W."""

    rowwise_usage = columnwise_usage = None

    def set_usage(self, rowwise, columnwise):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


@pytest.fixture
def kept(monkeypatch):
    """``kept(tensors, queue)``: the objects kept for W of tensors gathered like this, given as ``(shard, quantizer)``.

    With ``comm``, they are gathered into its buffer. Without ``shards``, the gathered tensors are kept.
    """
    monkeypatch.setattr(transformer_engine, "is_te_min_version", lambda oldest: True)
    usages = []

    def twice(shard, group, async_op=False, quantizer=None):
        """Gather over two ranks whose shards are alike."""
        if quantizer is not None:
            usages.append((quantizer.rowwise_usage, quantizer.columnwise_usage))
        if isinstance(shard, Quantized):
            return Quantized(torch.cat([shard.rows] * 2)), None
        whole = torch.cat([shard] * 2)
        return (whole if quantizer is None else Quantized(whole)), None

    monkeypatch.setitem(
        sys.modules, "transformer_engine.pytorch.distributed", SimpleNamespace(gather_along_first_dim=twice)
    )

    def into_buffer(comm, shard, quantizer, group):
        comm[:] = torch.cat([shard.rows if isinstance(shard, Quantized) else shard] * 2)
        if quantizer is not None:
            return Quantized(comm), shard if isinstance(shard, Quantized) else Quantized(shard)
        return comm, shard

    def of_module(gathers, queue, comm=None, shards=True):
        stored = []
        (_, gather), (_, fill), (_, keep) = transformer_engine.sharded_replacements(lambda group: shards)
        with collecting(queue):
            tensors = [
                gather(twice, shard, "group", quantizer=quantizer)[0]
                if comm is None
                else fill(into_buffer, comm, shard, quantizer, "group")[0]
                for shard, quantizer in gathers
            ]
            keep(lambda store, tensors, func: stored.append(tensors), None, [*tensors, ("experts",)], None)
        return stored[0], tensors, usages

    return of_module


def delayed_work(kept: list) -> DelayedWeightGradient:
    module = torch.nn.Identity()
    module.backward_dw = lambda: None
    return DelayedWeightGradient(module, [], {}, kept)


def test_shards_wait_and_are_gathered_again(kept):
    plain, quantized, quantizer = torch.arange(4.0), Quantized(torch.arange(2.0)), Quantizer()
    quantizer.set_usage(True, False)
    tensors, _, usages = kept([(plain, None), (quantized, quantizer)], WeightGradientQueue())
    work = delayed_work(tensors)
    assert [tensor.data_ptr() for tensor in work.tensors] == [plain.data_ptr(), quantized.rows.data_ptr()]
    quantizer.set_usage(False, True)
    work.begin()
    work.run()
    assert usages == [(True, False)] * 2
    assert torch.equal(tensors[0], torch.cat([plain] * 2)) and tensors[2] == ("experts",)
    assert torch.equal(tensors[1].rows, torch.cat([quantized.rows] * 2)) and tensors[1].columnwise


@pytest.mark.parametrize("queue", [WeightGradientQueue(), ImmediateWeightGradients(), None], ids=type)
def test_other_tensors_stay_gathered(kept, queue):
    """Of a gather that quantises, and where W does not wait."""
    quantizer = Quantizer()
    gathers = [(torch.arange(4.0), quantizer)]
    if type(queue) is not WeightGradientQueue:
        gathers.append((torch.arange(4.0), None))
    tensors, gathered, _ = kept(gathers, queue)
    assert tensors[:-1] == gathered


@pytest.mark.parametrize("queue", [WeightGradientQueue(), LateWeightGradients()], ids=type)
@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize("quantised", [None, "before", "within"])
def test_what_was_gathered_into_a_user_buffer_outlives_it(kept, queue, shards, quantised):
    """The next layer gathers into the same buffer before W."""
    buffer, part, quantizer = torch.zeros(4), torch.tensor([1.0, 2.0]), Quantizer() if quantised else None
    part = Quantized(part) if quantised == "before" else part
    tensors, _, _ = kept([(part, quantizer)], queue, buffer, shards)
    buffer.fill_(torch.nan)
    work = delayed_work(tensors)
    is_shard = shards and type(queue) is WeightGradientQueue and quantised != "within"
    assert [tensor.numel() for tensor in work.tensors] == [2 if is_shard else 4]
    work.begin()
    work.run()
    (values,) = transformer_engine.data_of(tensors[0])
    assert values.tolist() == [1, 2, 1, 2]


class Stored(torch.nn.Linear):
    """As a module of Transformer Engine that has kept ``tensors`` for its W, or nothing."""

    fuse_wgrad_accumulation = apply_bias = False

    def __init__(self, *tensors: torch.Tensor):
        super().__init__(2, 2, bias=False)
        self.weight.skip_backward_post_hook = True
        queue = [[list(tensors), None]] if tensors else []
        self.wgrad_store = SimpleNamespace(context=SimpleNamespace(queue=queue))


def test_tensors_in_megatrons_buffers_are_copied_when_they_are_kept(monkeypatch):
    shared, own, stored = torch.zeros(4), torch.ones(4), []
    buffers = SimpleNamespace(buffer={("mpu", torch.float32): shared})
    monkeypatch.setattr(transformer_engine.parallel_state, "_GLOBAL_MEMORY_BUFFER", buffers)
    monkeypatch.setattr(transformer_engine, "is_te_min_version", lambda oldest: True)
    *_, (_, keep) = transformer_engine.sharded_replacements(lambda group: True)
    with collecting(WeightGradientQueue()):
        keep(lambda store, tensors, func: stored.extend(tensors), None, [own, shared[1:3]], None)
    shared.fill_(7)
    assert stored[0] is own and stored[1].tolist() == [0, 0]


def test_modules_without_a_backward_leave_nothing_to_w():
    queue = WeightGradientQueue()
    transformer_engine.defer((Stored(torch.ones(2)), Stored()), queue)
    assert len([*queue.tensors()]) == 1


def test_what_a_backward_has_left_is_queued_once():
    module, queue = Stored(torch.ones(2)), WeightGradientQueue()
    for _ in range(2):
        transformer_engine.defer((module,), queue)
    assert len([*queue.tensors()]) == 1


@pytest.mark.parametrize(("at_once", "backwards"), [(True, 1), (False, 1), (False, 2)])
def test_a_module_that_ran_twice_reports_the_sum_of_its_gradients_once(at_once, backwards):
    """One backward leaves both gradients, or each of two parts of a backward leaves one."""
    module, queue = Stored(), ImmediateWeightGradients() if at_once else WeightGradientQueue()
    kept, reported = module.wgrad_store.context.queue, []
    module.wgrad_accumulation_and_reduce_hooks = [lambda: reported.append(module.weight.grad.sum().item())]

    def backward_dw():
        (value,), _ = kept.pop(0)
        module.weight.grad = value.expand(2, 2).clone()
        for hook in module.wgrad_accumulation_and_reduce_hooks:
            hook()

    module.backward_dw = backward_dw
    for left in torch.arange(1.0, 3.0).view(backwards, -1):
        kept += [[[value], None] for value in left]
        transformer_engine.defer((module,), queue)
    queue.run()
    assert reported == [12.0]


def test_weights_without_a_forward_of_their_own_are_hooked_by_ddp():
    absorbed = absorbed_mla.AbsorbedMLASelfAttention.__new__(absorbed_mla.AbsorbedMLASelfAttention)
    torch.nn.Module.__init__(absorbed)
    absorbed.linear_kv_up_proj, absorbed.linear_proj = waiting(), waiting()
    model, config = torch.nn.Sequential(absorbed), SimpleNamespace()
    *_, (_, build_ddp) = transformer_engine.replacements(Request("v-half"))
    build_ddp(lambda *_: None, None, SimpleNamespace(use_cpu_initialization=False), config, model)
    assert delayed_modules(model) == (absorbed.linear_proj,) and config.delay_wgrad_compute


def config_of(**settings) -> SimpleNamespace:
    return SimpleNamespace(**{"transformer_impl": "transformer_engine", **settings})


def refusal(config: SimpleNamespace, splits: bool = True, recomputes: bool = False) -> str | None:
    """Return the code of what the building of a model refuses. It begins only if nothing is refused."""
    built = []
    request = Request("v-half" if splits else "1f1b", recompute="full" if recomputes else "none")
    ((_, build_model), *_) = transformer_engine.replacements(request)
    try:
        build_model(lambda self, config: built.append(config), None, config)
    except UnsupportedError as error:
        assert not built
        return error.code
    assert built
    return None


def test_the_schedule_defers_the_heads_weight_gradients_itself():
    config = config_of(defer_embedding_wgrad_compute=True)
    assert refusal(config, splits=False) == "unsupported-setting" and config.defer_embedding_wgrad_compute
    assert refusal(config) is None and not config.defer_embedding_wgrad_compute
    built_before = SimpleNamespace(context=SimpleNamespace(config=SimpleNamespace(defer_embedding_wgrad_compute=True)))
    with refused("unsupported-setting", "enable()"):
        SplitBackward(Request("zb-h1"), counted=False).prepare(built_before)


def test_weight_gradients_run_late_in_pairs_and_no_graph_holds_a_backward_of_a_pair():
    ((_, build_model), *_) = transformer_engine.replacements(Request("1f1b", pairs=True))
    config = config_of(cuda_graph_impl="none", delay_wgrad_compute=False)
    build_model(lambda self, config: None, None, config)
    assert config.delay_wgrad_compute
    with refused("unsupported-setting", "cuda_graph_impl"):
        build_model(lambda self, config: None, None, config_of(cuda_graph_impl="transformer_engine"))


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """``installed(version)``: Transformer Engine, which is not here."""

    def install(version: str) -> None:
        monkeypatch.setattr(refusals, "get_te_version", lambda: Version(version))
        for module in (refusals, transformer_engine):
            monkeypatch.setattr(module, "is_te_min_version", lambda oldest: Version(version) >= Version(oldest))

    install("2.20.2")
    return install


def test_a_transformer_engine_that_hides_what_it_keeps_is_refused(installed):
    installed("2.7")
    assert refusal(config_of()) == "other-version"
    assert refusal(config_of(), splits=False) is None
    assert refusal(config_of(transformer_impl="local")) is None
    installed("2.8")
    assert refusal(config_of()) is None
    installed("0.0.0")  # as Megatron says where it is not installed; all layers are local ones then
    assert refusal(config_of()) is None


def test_no_reduction_overlaps_a_weight_gradient_that_is_delayed(caplog):
    """Transformer Engine refuses both together."""
    overlapped = {"tp_comm_overlap": True, "tp_comm_bulk_wgrad": True, "tp_comm_bulk_dgrad": True}
    for splits, logged in ((True, [transformer_engine.NO_BULK_WGRAD]), (False, [])):
        caplog.clear()
        config = config_of(**overlapped)
        with caplog.at_level("INFO", transformer_engine.logger.name):
            assert [refusal(config, splits), refusal(config, splits)] == [None, None]
        assert config.tp_comm_bulk_wgrad != splits and config.tp_comm_bulk_dgrad
        assert caplog.messages == logged, "told once for all chunks"
    for recipe, code in (("tensorwise", None), ("mxfp8", None), ("blockwise", "unsupported-setting")):
        fp8 = config_of(fp8="e4m3", fp8_recipe=recipe, tensor_model_parallel_size=2, **overlapped)
        assert refusal(fp8) == code and refusal(fp8, splits=False) is None


def test_delayed_scaling_is_not_recomputed():
    delayed = config_of(fp8="hybrid", fp8_recipe="delayed")
    for splits in (False, True):
        assert refusal(delayed, splits, recomputes=True) == "fp8-delayed-scaling"
        assert refusal(delayed, splits) is None
        assert refusal(config_of(fp8="hybrid", fp8_recipe="tensorwise"), splits, recomputes=True) is None
        assert refusal(config_of(fp8=None, fp8_recipe="delayed"), splits, recomputes=True) is None


@pytest.mark.parametrize("transformer_impl", ["local", "transformer_engine"])
def test_fusion_without_apex_is_refused_on_every_rank(monkeypatch, transformer_impl):
    fused = config_of(transformer_impl=transformer_impl, gradient_accumulation_fusion=True)
    monkeypatch.setattr(refusals.layers, "_grad_accum_fusion_available", False)
    assert refusal(fused) == "not-installed"
    assert refusal(config_of(gradient_accumulation_fusion=False)) is None
    monkeypatch.setattr(refusals.layers, "_grad_accum_fusion_available", True)
    assert refusal(fused) is None


def test_a_weight_gradient_with_fused_accumulation_never_dequantises_its_weight():
    """DDP wants a ``grad``, and does not read it: a zero of the weight's type and shape, made without the weight."""

    class Weight(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            assert "new_zeros" not in str(function), "an 8-bit weight would be dequantised"
            return super().__torch_function__(function, types, args, kwargs)

    module = torch.nn.Module()
    module.fuse_wgrad_accumulation, module.apply_bias = True, False
    module.backward_dw = lambda: None
    module.weight = torch.nn.Parameter(torch.zeros(3, 4).as_subclass(Weight))
    module.weight.skip_backward_post_hook = True
    DelayedWeightGradient(module, [("weight", module.weight)], {}, ()).run()
    gradient = module.weight.grad
    assert gradient.shape == (3, 4) and not gradient.any() and gradient.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("override", [None, "high_precision"])
def test_a_bias_keeps_the_gradient_that_a_backward_in_8_bits_computes(override):
    """DDP wants it in ``grad`` when W ends, and versions before 2.20 fail without. Other backwards leave it to W."""
    bias = torch.nn.Parameter(torch.zeros(2))
    bias.main_grad = torch.zeros(2)
    in_backward, in_w = torch.ones(2), torch.full((2,), 3.0)
    seen = []

    def backward_dw():
        if bias.grad is None:
            bias.grad = in_w
        seen.append(bias.grad)

    recipe = SimpleNamespace(backward_override=override)
    module = SimpleNamespace(fp8=True, fp8_meta={"recipe": recipe}, apply_bias=True, backward_dw=backward_dw)
    DelayedWeightGradient(module, [("bias", bias)], {bias: in_backward}, []).run()
    if override is None:
        assert seen[0] is in_backward and not bias.main_grad.any()
    else:  # of another use
        assert seen[0] is in_w and torch.equal(bias.main_grad, in_backward)
