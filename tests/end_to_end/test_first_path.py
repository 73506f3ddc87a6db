"""The documented first path on this machine: measure a model, compare schedules by it, run one with the same file."""

from __future__ import annotations

import json

import pytest
from commands import pipemem, run_as_rank
from ranks import CaseFailed

from megatron_pipemem.tools.cpu.ranks import start_ranks

MODEL = """
num_layers: 4
hidden_size: 64
num_attention_heads: 4
vocab_size: 1000
seq_length: 64
untie_embeddings_and_output_weights: true
attention_dropout: 0.0
hidden_dropout: 0.0
"""


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """The file of a real measurement."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "model.yaml").write_text(MODEL)
    words = ("profile", "--model", folder / "model.yaml", "--cluster", "cpu", "--precision", "fp32", "--repeats", 1)
    words = (*words, "--output", folder / "costs.json")
    (process,) = start_ranks(run_as_rank, [words], [folder / "log"])
    process.join()
    assert process.exitcode == 0, (folder / "log").read_text()
    return folder / "costs.json"


def answer(*arguments: object) -> dict:
    done = pipemem(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_profile_then_pareto_then_run(equals_stock, costs):
    size = ("-p", 2, "-m", 4, "--costs", costs)
    choices = answer("pareto", *size, "--caps", "1", "--seconds", 0.2)["choices"]
    families = [choice for choice in choices if choice["schedule"] != "auto"]
    assert families, "the measured times decide which"
    for choice in families:
        assert choice["makespan"] == pytest.approx(answer("simulate", choice["schedule"], *size)["makespan"])
    # With bytes, a run moves W where a rank would hold more than 1F1B, which simulate does not.
    run, _ = equals_stock("v-half", ours=("--pipemem-costs", str(costs), "--pipemem-early-wgrad", "none"))
    (plan,) = run.plans
    assert plan["planned_makespan"] == pytest.approx(answer("simulate", "v-half", *size)["makespan"])


def test_auto_searches_for_the_stages_that_the_run_has(train_small, costs):
    cut = ("--pipeline-model-parallel-layout", "Et|tttL")
    run = train_small("auto", *cut, "--pipemem-costs", str(costs), "--pipemem-option", "seconds=0.2")
    (plan,) = run.plans
    assert plan["placement"] == "linear"
    parts = json.loads(costs.read_text())["parts"]
    layer = sum(parts["layers"]["*-"]["seconds"].values())
    # The rank with three layers and the head is the busiest.
    assert plan["planned_makespan"] >= 4 * (3 * layer + sum(parts["last"]["seconds"].values()))


def test_the_head_of_the_file_is_cut_with_the_vocabulary(train_small, costs):
    run = train_small("v-half", "--pipemem-vocab-cut", "1", "--pipemem-costs", str(costs))
    (plan,) = run.plans
    layer = sum(json.loads(costs.read_text())["parts"]["layers"]["*-"]["seconds"].values())
    head = sum(json.loads(costs.read_text())["parts"]["last"]["seconds"].values())
    assert plan["planned_makespan"] >= 4 * (2 * layer + head / 2)


def test_a_file_of_another_model_is_refused_on_every_rank(train_small, costs):
    with pytest.raises(CaseFailed) as error:
        train_small("1f1b", "--num-layers", "2", "--pipemem-costs", str(costs))
    assert str(error.value).count("[costs-mismatch]") == 2
