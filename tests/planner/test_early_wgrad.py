"""Weight gradients that are computed in I: which, and what that changes of bytes and seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.model.activations import head_bytes, layer_bytes
from megatron_pipemem.model.counts import early_modules
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.schedule.options import early_wgrad
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import ScheduleChoice
from megatron_pipemem.tools.planner import prices
from megatron_pipemem.tools.planner.profile import from_formulas

CLUSTER = load("h100-80g", Cluster)
QWEN, DEEPSEEK, MIXTRAL, LLAMA = (
    replace(load(name, Model), sequence=4096)
    for name in ("qwen3-235b-a22b", "deepseek-v3", "mixtral-8x7b", "llama3-70b")
)
ONE = Execution(implementation="transformer_engine")
FOUR = replace(ONE, tp=4, sequence_parallel=True)


@pytest.mark.parametrize(
    ("text", "width", "modules"),
    [
        ("auto", 8, {"experts_fc2"}),
        ("auto", 16, set()),
        ("auto", 0, set()),
        ("none", 8, set()),
        ("head,experts_fc1", 16, {"head", "experts_fc1"}),
    ],
)
def test_narrow_experts_are_early_by_default(text, width, modules):
    assert early_wgrad(text, 16, width) == modules


@pytest.mark.parametrize("text", ["", "embedding", "auto,head", "head, experts_fc1"])
def test_other_modules_are_refused(text):
    with pytest.raises(UnsupportedError):
        early_wgrad(text, 16, 8)
    with pytest.raises(ConfigError) as refused:
        ScheduleChoice(name="zb-h1", early_wgrad=text)
    assert (refused.value.code, refused.value.key) == ("bad-choice", "early_wgrad")


@pytest.mark.parametrize(
    ("model", "execution", "early"),
    [(QWEN, ONE, 1), (QWEN, FOUR, 1), (DEEPSEEK, ONE, 1), (MIXTRAL, ONE, 0), (MIXTRAL, FOUR, 1), (LLAMA, FOUR, 0)],
)
def test_a_layer_holds_no_more_for_w_than_after_f(model, execution, early):
    assert len(early_modules(model, execution)) == early
    kept, waiting = (
        layer_bytes(model, replace(execution, early_wgrad=text), model.main_kind) for text in ("auto", "none")
    )
    assert kept.saved == waiting.saved
    assert kept.after_input <= kept.saved
    assert (waiting.after_input > waiting.saved) is bool(early)


def test_bytes_of_both_matrices():
    """Inputs and output gradients of the tokens that experts get."""
    visits = 4096 * 8
    of = {
        text: layer_bytes(QWEN, replace(FOUR, early_wgrad=text), QWEN.main_kind).after_input
        for text in ("none", "experts_fc1", "experts_fc2")
    }
    assert of["none"] - of["experts_fc1"] == visits * (4096 + 2 * 1536 / 4) * 2
    assert of["none"] - of["experts_fc2"] == visits * (1536 / 4 + 4096) * 2


def test_seconds_go_from_w_to_i():
    waiting, early = (
        prices.layer(QWEN, replace(FOUR, early_wgrad=text), CLUSTER, QWEN.main_kind).seconds
        for text in ("none", "experts_fc2")
    )
    assert early.forward == waiting.forward
    assert early.total == pytest.approx(waiting.total)
    # A third of what a token visits, and attention and the router besides.
    attention, expert = 4096 * (9216 + 8192) + 4096 * 128, 8 * 1536 * 4096
    share = expert / (attention / 1 + 3 * expert)
    assert early.weight / waiting.weight == pytest.approx(1 - share, rel=0.02)


def test_an_early_head_leaves_nothing_to_w():
    waiting, early = (replace(FOUR, early_wgrad=text) for text in ("auto", "head"))
    assert head_bytes(LLAMA, waiting).after_input > head_bytes(LLAMA, early).after_input == 0
    assert head_bytes(LLAMA, waiting).saved == head_bytes(LLAMA, early).saved
    seconds = [prices.head(LLAMA, run, CLUSTER).seconds for run in (waiting, early)]
    assert seconds[1].weight == 0 and seconds[0].total == pytest.approx(seconds[1].total)


def test_schedules_hold_their_share_again():
    """Of 1F1B's bytes, on eight pipeline ranks."""
    of = {}
    for text in ("none", "auto"):
        costs = from_formulas(QWEN, replace(FOUR, ep=8, early_wgrad=text), CLUSTER).costs()
        ours, first = (
            max(peaks(build_schedule(name, num_devices=8, num_microbatches=16), costs)) for name in ("zb-h1", "1f1b")
        )
        of[text] = ours / first
    assert of["none"] > 1.4
    assert of["auto"] <= 1.01
