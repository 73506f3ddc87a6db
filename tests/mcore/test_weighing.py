"""Factors of microbatches: those of batches, files and functions, and the values that are refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from refusals import refused

from megatron_pipemem.errors import CostsError
from megatron_pipemem.features.unequal.megatron import weigher_of
from megatron_pipemem.mcore.step.extension import FullMicrobatch
from megatron_pipemem.schedule.action import Kind

FULL = FullMicrobatch(1, 8)
WHOLE = torch.zeros(1, 8)
LENGTHS = torch.tensor([[0, 2, 8, 8]])


def model(**more) -> SimpleNamespace:
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32)
    return SimpleNamespace(config=config, **more)


def weigh(asked, *batches, full: FullMicrobatch = FULL, iteration: int = 0, **more):
    return weigher_of(asked)(batches, full, model(**more), iteration)


def test_tokens_are_of_a_full_microbatch_and_padding_that_a_mask_tells_does_not_count():
    padded = {"input_ids": torch.zeros(2, 8), "attention_mask": torch.tensor([[1] * 6 + [0] * 2, [1] * 2 + [0] * 6])}
    weights = weigh(
        "tokens", {"tokens": torch.zeros(2, 8)}, {"tokens": torch.zeros(1, 4)}, padded, full=FullMicrobatch(2, 8)
    )
    assert weights.time == weights.memory == (1.0, 0.25, 0.5)


@pytest.mark.parametrize(
    "documents",
    [
        {"cu_seqlens": LENGTHS},
        {"cu_seqlens": torch.tensor([[0, 3, 8]]), "cu_seqlens_padded": LENGTHS},
        {"packed_seq_params": SimpleNamespace(cu_seqlens_q=LENGTHS[0])},
        {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5]])},
    ],
    ids=" ".join,
)
def test_flops_of_attention_go_by_the_square_of_every_document(documents):
    """Per token: linear layers 24 h^2 of two layers each, with an FFN of 2h 16 h^2; attention 4 h s."""
    linear, attention = 16 * 16**2, 4 * 16 * 8
    share = (2**2 + 6**2) / 8**2
    weights = weigh("FLOPs", {"tokens": WHOLE}, {"tokens": WHOLE, **documents})
    expected = {Kind.F: (1, 1), Kind.I: (1, 2), Kind.W: (1, 0)}
    for kind, (linears, attentions) in expected.items():
        parts = linears * linear, attentions * attention
        assert weights.kinds[kind] == pytest.approx((1.0, (parts[0] + parts[1] * share) / sum(parts)))
    assert weights.memory == (1.0, 1.0) and weights.time[1] == pytest.approx(weights.kinds[Kind.F][1])


def test_a_function_is_called_with_what_the_iterator_yields():
    assert weigh(lambda batch: batch, 1, 2.5).time == (1.0, 2.5)
    weights = weigh(lambda batch: (torch.tensor(batch), 0.5), 1, 3)
    assert (weights.time, weights.memory) == ((1.0, 3.0), (0.5, 0.5))


def test_a_function_is_named_in_a_module_or_a_file(tmp_path):
    path = tmp_path / "costs_of_mine.py"
    path.write_text("def weight(batch):\n    return 2 * batch\n")
    assert weigh(f"{path}:weight", 1, 2).time == (2.0, 4.0)
    assert weigh("math:sqrt", 4, 9).time == (2.0, 3.0)


@pytest.mark.parametrize(
    ("content", "times"),
    [
        ([1, 2], [(1, 2), (1, 2)]),
        ({"time": [1, 2], "memory": [0, 1], "kinds": {"W": [1, 1]}}, [(1, 2), (1, 2)]),
        ([[1, 2], {"time": [3, 4]}], [(1, 2), (3, 4)]),
    ],
)
def test_a_file_has_weights_for_all_steps_or_of_each(tmp_path, content, times):
    path = tmp_path / "weights.json"
    path.write_text(json.dumps(content))
    assert [weigh(str(path), None, None, iteration=sample).time for sample in range(2)] == times


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([[1, 2]], ("wrong-count", 1, 2)),
        ([1, 2, 3], ("wrong-count", 3, 2)),
        ({"times": [1, 2]}, ("wrong-file",)),
        ([1, -2], ("wrong-file",)),
        ([[1, 2], ["a", 2]], ("wrong-file",)),
        ([1, None], ("wrong-file",)),
        ({"time": [1, 2], "kinds": {"SEND_F": [1, 1]}}, ("wrong-file", "Kind.SEND_F")),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, content, words):
    path = tmp_path / "weights.json"
    path.write_text(json.dumps(content))
    with refused(*words, kind=CostsError):
        weigh(str(path), None, None, iteration=1)


@pytest.mark.parametrize(
    ("asked", "batch", "words"),
    [
        ("tokens", [1, 2], ("cannot-weigh", "tokens", "input_ids")),
        ("FLOPs", {"text": 1}, ("cannot-weigh",)),
        (lambda batch: float("nan"), None, ("bad-type",)),
        (lambda batch: -1, None, ("bad-number",)),
        (lambda batch: "much", None, ("bad-type",)),
        ("math:sqrt", -1, ("cannot-weigh", "--pipemem-microbatch-costs", "math:sqrt")),
        ("math:cos", "much", ("cannot-weigh", "math:cos")),
        ("builtins:str", 1, ("bad-type", 1, "microbatch.time")),
        ({}.__getitem__, "lengths", ("cannot-weigh", "microbatch_costs", "lengths")),
    ],
)
def test_batches_that_cannot_be_weighed_are_refused(asked, batch, words):
    with refused(*words):
        weigh(asked, batch)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("bytes", ("bad-choice",)),
        ("math:cube", ("cannot-import",)),
        ("no_such_module:f", ("cannot-import",)),
        ("missing.json", ("no-file", "missing.json")),
    ],
)
def test_what_nobody_can_weigh_by_is_refused(asked, words):
    with refused(*words):
        weigher_of(asked)


def test_layers_of_a_hybrid_model_are_those_of_its_pattern():
    batches = {"tokens": WHOLE}, {"tokens": WHOLE, "cu_seqlens": LENGTHS}

    def weights(pattern: str) -> tuple[float, ...]:
        return weigh("FLOPs", *batches, hybrid_layer_pattern=pattern).time

    # Two layers of a GPT are four of the pattern. What predicts further tokens is left out of both.
    assert weights("*-|*-") == weights("*-*-/*-/*-") == weigh("FLOPs", *batches, mtp_num_layers=2).time
    share = (2**2 + 6**2) / 8**2
    attention, ffn = (3 * 8 * 16**2, 3 * 4 * 16 * 8), 3 * 8 * 16**2
    linear = 2 * attention[0] + ffn
    scores = 2 * attention[1]
    assert weights("**-")[1] == pytest.approx((linear + scores * share) / (linear + scores))
