"""Switching the plugin on and off in one process, without any process group."""

from __future__ import annotations

import pytest
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import multi_token_prediction, transformer_block
from refusals import refused

import megatron_pipemem
from megatron_pipemem.errors import UnsupportedError, UpstreamError
from megatron_pipemem.mcore import plugin, symbols
from megatron_pipemem.mcore.model.linear import split_linear
from megatron_pipemem.mcore.step.gradients import SplitBackward

WATCHED = (
    (schedules, "forward_backward_pipelining_with_interleaving"),
    (schedules, "forward_backward_pipelining_without_interleaving"),
    (schedules, "forward_step"),
    (schedules, "backward_step"),
    (layers, "linear_with_grad_accumulation_and_async_allreduce"),
    (parallel_state, "get_pipeline_model_parallel_rank"),
    (parallel_state, "is_pipeline_first_stage"),
    (parallel_state, "is_pipeline_last_stage"),
    (GPTModel, "__init__"),
    (HybridModel, "__init__"),
    (LanguageModelEmbedding, "__init__"),
    *((module, "build_module") for module in (transformer_block, hybrid_block, multi_token_prediction)),
)
LAYERWISE = slice(8, None)


def bindings():
    return [getattr(module, name) for module, name in WATCHED]


@pytest.fixture(autouse=True)
def stock():
    before = bindings()
    yield before
    megatron_pipemem.disable()
    assert bindings() == before


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "v-half", "auto"])
def test_whoever_imported_the_dispatcher_earlier_gets_ours(name, stock):
    megatron_pipemem.enable(name)
    for vp_size in (None, 2):
        function = get_forward_backward_func(4, vp_size)
        assert function not in stock
        # A consumer that imports only now asks the same module.
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func as imported_later

        assert imported_later(4, vp_size) is function
    assert get_forward_backward_func(1, None) is schedules.forward_backward_no_pipelining


def test_touches_no_more_than_the_schedule_needs(stock):
    megatron_pipemem.enable("1f1b")
    assert bindings()[2:] == stock[2:]
    megatron_pipemem.disable()
    megatron_pipemem.enable("zb-h1")
    assert bindings()[5:] == stock[5:], "ranks are Megatron's own in a linear placement"
    megatron_pipemem.disable()
    megatron_pipemem.enable("1f1b-v")
    assert bindings()[4] is stock[4], "a fused backward needs no split linear layers"
    assert all(now is not before for now, before in zip(bindings()[5:8], stock[5:8], strict=True))
    assert bindings()[LAYERWISE] == stock[LAYERWISE]


@pytest.mark.parametrize("name", ["stock", "v-half"])
def test_layers_draw_for_themselves_where_that_is_asked(name, stock):
    megatron_pipemem.enable(name, rng="layerwise")
    assert all(now is not before for now, before in zip(bindings()[LAYERWISE], stock[LAYERWISE], strict=True))
    assert schedules.forward_step is not stock[2]


def test_is_idempotent_and_refuses_to_mix_settings():
    megatron_pipemem.enable("v-half", memory_cap=0.75)
    first = bindings()
    megatron_pipemem.enable("v-half", memory_cap=0.75)
    assert bindings() == first
    with refused("enabled-already", kind=UnsupportedError):
        megatron_pipemem.enable("v-min")
    megatron_pipemem.disable()
    megatron_pipemem.disable()
    megatron_pipemem.enable("v-min")


@pytest.mark.parametrize("delayed", [False, True])
def test_says_that_modules_of_transformer_engine_stay_delayed(delayed, caplog):
    megatron_pipemem.enable("zb-h1")
    (splitting,) = (feature for feature in plugin._enabled.features if isinstance(feature, SplitBackward))
    splitting.has_run_delayed = delayed
    megatron_pipemem.disable()
    assert ("delay_wgrad_compute" in caplog.text) == delayed


@pytest.mark.parametrize("name", ["backward_step", "forward_backward_pipelining_with_interleaving"])
def test_a_megatron_without_a_symbol_is_refused_by_name(monkeypatch, name):
    monkeypatch.delattr(schedules, name)
    before = vars(schedules).copy()
    with pytest.raises(UpstreamError) as error:
        megatron_pipemem.enable("v-half")
    assert name in str(error.value) and "0.19.2" in str(error.value)
    assert vars(schedules) == before
    assert plugin._enabled is None


def test_says_in_one_line_what_it_has_replaced_in_which_version(monkeypatch, caplog):
    caplog.set_level("INFO")
    megatron_pipemem.enable("v-half")
    (told,) = (record.getMessage() for record in caplog.records if "replaced in" in record.getMessage())
    assert told.startswith("replaced in megatron-core 0.") and "DistributedDataParallel.__init__" in told
    assert told.count("forward_backward_pipelining_with_interleaving") == 1 and "tested are" not in told
    megatron_pipemem.disable()
    monkeypatch.setattr("megatron.core.__version__", "0.99.0")
    megatron_pipemem.enable("v-half")
    assert "replaced in megatron-core 0.99.0 (tested are 0.19" in caplog.text


def test_a_replacement_that_fails_leaves_the_plugin_off_and_can_be_enabled_later(monkeypatch, stock):
    def fail(original, act):
        if act is split_linear:
            raise ArithmeticError
        return act

    with monkeypatch.context() as broken:
        broken.setattr(symbols, "_in_place_of", fail)
        with pytest.raises(ArithmeticError):
            megatron_pipemem.enable("v-half")
    assert bindings() == stock
    assert plugin._enabled is None
    megatron_pipemem.enable("v-half")
