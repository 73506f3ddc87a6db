"""Recipes of 8-bit products: faster linear layers, smaller tensors that wait for W, and copies of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from commands import pipemem
from refusals import refused

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.model.activations import layer_bytes, layer_tensors
from megatron_pipemem.model.counts import layer_parameters, matrices
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Parallelism, Run
from megatron_pipemem.tools.planner.prices import layer
from megatron_pipemem.tools.planner.step import least_static

LLAMA = load("llama3-8b", Model)
H100 = load("h100-80g", Cluster)
PLAIN = Execution(implementation="transformer_engine", tp=2, sequence_parallel=True)


def fp8(recipe: str) -> Execution:
    return replace(PLAIN, fp8=recipe)


@pytest.mark.parametrize(
    ("recipe", "element"), [("delayed", 1), ("tensorwise", 1), ("mxfp8", 33 / 32), ("blockwise", 33 / 32)]
)
def test_what_waits_for_w_is_quantised(recipe, element):
    wide, narrow = layer_bytes(LLAMA, PLAIN), layer_bytes(LLAMA, fp8(recipe))
    # Output gradients are quantised while they are gathered, and stay so.
    scattered = sum(
        matrix.outputs for matrix in matrices(LLAMA, PLAIN, "*") + matrices(LLAMA, PLAIN, "-") if matrix.cut == "rows"
    )
    gathered = 2 * LLAMA.sequence * scattered * (1 - 1 / PLAIN.tp)
    assert narrow.after_input == pytest.approx((wide.after_input + gathered) * element / 2)
    waiting = sum(tensor.nbytes for tensor in layer_tensors(LLAMA, PLAIN) if tensor.needed == "W")
    # Attention needs its output in 16 bits too.
    output = LLAMA.sequence * LLAMA.query_width / 2 * 2
    assert narrow.saved == pytest.approx(wide.saved - waiting * (1 - element / 2) + output)


def test_linear_layers_are_faster_and_attention_is_not():
    plain, quick = layer(LLAMA, PLAIN, H100), layer(LLAMA, fp8("delayed"), H100)
    assert quick.communication_seconds == plain.communication_seconds
    assert quick.seconds.weight == pytest.approx(plain.seconds.weight * 989 / 1979)
    for name in ("forward", "input"):
        assert 0.5 < getattr(quick.seconds, name) / getattr(plain.seconds, name) < 0.95
    longer = replace(LLAMA, sequence=8 * LLAMA.sequence)
    gains = [
        layer(model, PLAIN, H100).seconds.total / layer(model, fp8("delayed"), H100).seconds.total
        for model in (LLAMA, longer)
    ]
    assert gains[0] > gains[1] > 1


def test_weights_have_copies_by_rows_and_by_columns():
    run = Run(LLAMA, H100, Parallelism(tp=2, pp=4, global_batch=16))
    narrow = replace(run, flags={"fp8-format": "hybrid"})
    assert narrow.execution.fp8 == "delayed"
    weights = sum(matrix.parameters(2) for block in LLAMA.kinds[0] for matrix in matrices(LLAMA, PLAIN, block))
    assert layer(LLAMA, fp8("delayed"), H100).quantised_bytes == 2 * weights <= 2 * layer_parameters(LLAMA, PLAIN)
    assert least_static(narrow) > least_static(run)


def test_flags_of_a_run_say_the_recipe(tmp_path):
    run = Run(LLAMA, H100, flags={"fp8-format": "e4m3", "fp8-recipe": "blockwise"})
    assert run.execution.fp8 == "blockwise"
    assert replace(run, flags={"fp8-recipe": "blockwise"}).execution.fp8 == "none"
    with refused("bad-choice", kind=ConfigError):
        replace(run, flags={"fp8-format": "e4m3", "fp8-recipe": "custom"}).execution.check(LLAMA)
    with refused("needs-option", kind=ConfigError):
        Execution(fp8="delayed").check(LLAMA)


def test_a_device_without_8_bit_products_is_refused(tmp_path):
    source = tmp_path / "run.yaml"
    source.write_text("model: llama3-8b\ncluster: a100-80g\nglobal_batch: 64\nfp8_format: hybrid\n")
    done = pipemem("plan", source, "--search-seconds", "0")
    assert done.exit_code == 2 and "cluster.fp8_tflops" in done.output
