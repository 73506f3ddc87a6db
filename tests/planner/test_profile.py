"""Profiles: stages made of parts, the file that --pipemem-costs reads, and Megatron's own modules against the formulas."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from itertools import count, product
from pathlib import Path
from unittest import mock

import pytest
from commands import pipemem
from lanes import rest_nightly
from refusals import refused

from megatron_pipemem.errors import ConfigError, CostsError
from megatron_pipemem.model.activations import moved_bytes, stage_bytes
from megatron_pipemem.model.counts import embedding_parameters, head_parameters, layer_flops, layer_parameters
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.part_costs import PartCosts, even_layers, read_costs
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import listening
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.tools.config.cluster import DEFAULT_CLUSTER, Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.cpu import activate
from megatron_pipemem.tools.planner.prices import cheap_recompute
from megatron_pipemem.tools.planner.profile import Profile, from_formulas
from megatron_pipemem.tools.report.timeline import DrawnRun

GPT = Model(layers=6, hidden=256, heads=4, vocabulary=1500, sequence=128)
LLAMA = replace(GPT, kv_heads=2, ffn=704, activation="swiglu", norm="rmsnorm", position="rope", bias="none")
# As real passes take them: bf16 products of larger models take seconds on a CPU.
SMALL_GPT, SMALL_LLAMA = (
    replace(model, hidden=64, ffn=ffn, vocabulary=200, sequence=32) for model, ffn in ((GPT, None), (LLAMA, 176))
)
A100 = load("a100-80g", Cluster)
LETTERS = {"F": "forward", "I": "input gradient", "W": "weight gradient"}


def _stages_of(costs: PartCosts, *layers: int) -> Costs:
    return replace(costs, cut=layers).of(Placement.linear(len(layers)))


def _passes_of(costs: PartCosts, *layers: int) -> tuple:
    stages = _stages_of(costs, *layers)
    return stages.forward, stages.backward_input, stages.backward_weight


def test_stages_add_up_to_the_model():
    profile = from_formulas(GPT, Execution(), A100)
    costs = profile.costs()
    whole = sum(map(sum, _passes_of(costs, 6)))
    assert whole == pytest.approx((profile.layer * 6 + profile.first + profile.last).seconds.total)
    for layers in ((6,), (3, 3), (1, 2, 3), (0, 6, 0, 0)):
        assert sum(map(sum, _passes_of(costs, *layers))) == pytest.approx(whole)
        memory = _stages_of(costs, *layers).memory
        for kinds in (memory, (Kind.F, Kind.I, Kind.W)):  # searches know no messages
            left = [sum(changes) for changes in zip(*(memory[kind] for kind in kinds), strict=True)]
            assert left == [0] * len(layers), "when W has ended"
    ends = embedding_parameters(GPT, Execution()) + head_parameters(GPT, Execution())
    parameters = profile.first.parameters + profile.last.parameters
    assert profile.layer.parameters * 6 + parameters == GPT.layers * layer_parameters(GPT, Execution()) + ends
    assert even_layers(7, 3) == (3, 2, 2)
    with refused("costs-mismatch", 6, kind=CostsError):
        replace(costs, cut=(3, 2))


def test_the_file_is_costs_and_profile(tmp_path: Path):
    path = tmp_path / "costs.json"
    done = pipemem("profile", "--model", "llama3-8b", "--tp", 4, "--formulas", "--output", path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(path.read_text()) == json.loads(done.stdout)
    profile, cluster = Profile.from_json(path), load(DEFAULT_CLUSTER, Cluster)
    assert profile == from_formulas(load("llama3-8b", Model), Execution(tp=4), cluster)
    costs = read_costs(path)
    assert costs == profile.costs(cluster.inter_node if cluster.nodes > 1 else cluster.intra_node)
    timeline = simulate(build_schedule("v-half", num_devices=4, num_microbatches=8), costs)
    assert DrawnRun(timeline).time_unit == "seconds"
    flops = 32 * layer_flops(profile.model, profile.execution).total
    assert timeline.makespan > 8 * flops / 4 / cluster.flops
    execution = cheap_recompute(profile.execution)
    copying = cluster.host.round_trip_seconds(
        moved_bytes(profile.model, execution, profile.model.main_kind), cluster.sharing(0)
    )
    ratios = json.loads(done.stdout)["profile"]["offload_ratio"]
    assert ratios["cheap_recomputed"] == pytest.approx(copying / profile.layer.seconds.total), "of the printed seconds"


@pytest.mark.parametrize(("options", "named"), [((), DEFAULT_CLUSTER), (("--cluster", "b200"), "b200")])
def test_the_cluster_of_formulas_is_named_and_letters_are_explained(options, named):
    said = " ".join(pipemem("profile", "--model", "llama3-8b", "--tp", 4, "--formulas", *options).stdout.split())
    assert f"cluster {named} (--cluster NAME" in said
    assert all(f"{letter}: {word}" in said for letter, word in LETTERS.items())


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("parts.first", 3, ("bad-type", "parts.first", 3)),
        ("parts.layers", 3, ("bad-type", "parts.layers", 3)),
        ("parts.layers", {}, ("missing-option", "parts.layers", "*-")),
        ("parts.layers.*-.memory", {"X": 1}, ("bad-type", "parts.layers.*-.memory", "X")),
        ("parts.first.memory.F", "x", ("bad-type", "parts.first.memory", "F", "x")),
        ("parts.layers.*-.seconds.forward", "x", ("bad-type", "parts.layers.*-.seconds.forward")),
        ("profile.model.num_layers", "x", ("bad-number", "profile.model.num_layers")),
        ("profile.execution", [], ("bad-type", "profile.execution", "[]")),
        ("profile.message_bytes", 1e300, ("bad-number", "profile.message_bytes", "1e+300", "1e+30")),
        ("profile.device", [], ("bad-type", "profile.device", "[]")),
        ("profile.source", "guessed", ("bad-type", "profile.source", "guessed")),
        ("profile.speed", 3, ("unknown-key", "profile.speed")),
        ("parts", 3, ("wrong-file", "parts")),
    ],
)
def test_a_file_that_holds_no_profile_is_told_by_its_key(tmp_path: Path, key, value, says):
    path = tmp_path / "costs.json"
    whole = here = from_formulas(GPT, Execution(), A100).to_json()
    *parents, last = key.split(".")
    for parent in parents:
        here = here[parent]
    here[last] = value
    path.write_text(json.dumps(whole))
    with refused(*says, kind=ConfigError):
        Profile.from_json(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"forward": 1}', ("wrong-file", "profile")),
        ("3", ("wrong-file",)),
        ("[", ("not-json", 1, 2)),
        (None, ("no-file",)),
    ],
)
def test_a_file_without_a_profile(tmp_path: Path, text, says):
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    with refused(*says, kind=ConfigError):
        Profile.from_json(path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give a run file, or --model"),
        (("--model", "lama3-8b"), "did you mean 'llama3-8b'"),
        (("llama3-8b",), "only among the models"),
        (("--model", "llama3-8b", "--tp", 5, "--formulas"), "does not divide"),
        (("--model", "llama3-8b", "--recompute", "some", "--formulas"), "recompute"),
        (("--model", "llama3-8b", "--cluster", "a100", "--formulas"), "did you mean 'a100-80g'"),
    ],
)
def test_errors_are_one_sentence(arguments, says):
    done = pipemem("profile", *arguments)
    assert done.exit_code == 2 and says in " ".join(done.output.split()), done.output
    assert "Traceback" not in done.output


@pytest.fixture(scope="module")
def lane() -> Iterator[Callable]:
    """Calls a function where Megatron runs on the CPU."""
    if find_spec("megatron") is None:  # importing it takes seconds, which only the other process needs to spend
        pytest.skip("needs Megatron-Core")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=without_compiler) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result()


def without_compiler() -> None:
    """Fake tensors need no extension of Megatron."""
    activate()
    from megatron.core.tensor_parallel import random

    random.load_inline = None


def measured(model: Model, execution: Execution) -> Profile:
    from megatron_pipemem.tools.megatron.profiling import profile

    return profile(model, execution, 1)


def faked(model: Model, execution: Execution, gpu_norms: bool = False) -> Profile:
    from fake_profiles import fake_profile

    return fake_profile(model, execution, gpu_norms)


def messages_of_profiling(model: Model, execution: Execution) -> list[str]:
    """The messages of a profile while it is made."""
    lines: list[str] = []
    with listening(lines.append):
        faked(model, execution)
    return lines


def ledger_of(model: Model, execution: Execution, position: int, layers: int) -> dict[str, int]:
    """Bytes by which real passes of a real stage changed what the activation ledger counts."""
    from megatron_pipemem.tools.megatron import profiling

    with profiling.lone_rank(execution):
        stage = profiling.build_stage(model, execution, position, model.kinds[:layers])
        entries = profiling.run_stage(stage, model, execution, position, 2).counter.entries
    return {str(kind): change for kind, change in profiling.changes(entries).items()}


def test_it_tells_which_stage_runs(lane):
    lines = lane(messages_of_profiling, load("tiny-gpt", Model), Execution())
    stages = ("a middle stage with 1 layer", "a middle stage with 2 layers", "the first stage", "the last stage")
    for stage in stages:
        assert any(f"running {stage}" in line and "2 microbatches" in line for line in lines)


def launches_of(model: Model, execution: Execution, microbatches: int) -> tuple[float, int]:
    """Seconds of launches by a clock that ticks when it is read, and the waits for an idle device before them."""
    import torch

    from megatron_pipemem.tools.megatron import profiling

    with (
        profiling.lone_rank(execution),
        mock.patch.object(torch.cuda, "synchronize") as waits,
        mock.patch.object(profiling.time, "perf_counter", side_effect=count()),
    ):
        seconds = profiling.launch_seconds(model, execution, model.kinds[:2], microbatches)
    return seconds, waits.call_count


def test_the_host_launches_every_pass_to_an_idle_device(lane):
    assert lane(launches_of, SMALL_GPT, Execution(), 3) == (3.0, 3 * 3)


SMALL = {"gpt": SMALL_GPT, "llama": SMALL_LLAMA}
SMALL_EXECUTIONS = {
    "fp32": Execution(precision="fp32", attention="unfused", fused=False),
    "tp2-sp": Execution(micro_batch=2, tp=2, sequence_parallel=True),
    "recompute": Execution(recompute="full"),
}


@pytest.mark.parametrize(
    ("name", "how"),
    rest_nightly(
        product(SMALL, SMALL_EXECUTIONS),
        [("gpt", "fp32"), ("llama", "tp2-sp"), ("gpt", "recompute")],
        "the same execution with the other model, and the formulas of both models below",
    ),
)
def test_fake_bytes_are_what_the_ledger_of_real_stages_counts(lane, name, how):
    """To the byte, for stages of other sizes than were profiled."""
    model, execution = SMALL[name], SMALL_EXECUTIONS[how]
    profile = lane(faked, model, execution)
    for position, layers in ((0, 2), (1, 3), (2, 2)):
        cut = [0, 0, 0]
        cut[position], cut[position - 1] = layers, model.layers - layers
        memory = _stages_of(profile.costs(), *cut).memory
        foretold = {kind: changes[position] for kind, changes in memory.items()}
        counted = lane(ledger_of, model, execution, position, layers)
        assert {kind: foretold.get(Kind(kind), 0) for kind in counted} | {"REDUCE_GRAD": 0} == counted | {
            "REDUCE_GRAD": 0
        }


@pytest.mark.parametrize(
    ("method", "count"), [("uniform", 1), ("uniform", 2), ("uniform", 3), ("block", 1), ("block", 3), ("block", 9)]
)
def test_bytes_of_recomputed_stages_are_what_the_ledger_counts(lane, method, count):
    """Megatron recomputes the first layers of a stage, or all in units that keep one input each."""
    how = replace(SMALL_EXECUTIONS["fp32"], recompute="full", recompute_method=method, recompute_num_layers=count)
    model = replace(SMALL_GPT, layers=12, dropout=0.0)
    counted = lane(ledger_of, model, how, 1, 4)
    predicted = {kind: changes[1] for kind, changes in stage_bytes(model, how, (4, 4, 4)).items()}
    assert {kind: counted[str(kind)] for kind in predicted} == predicted


def test_measured_profile_has_the_same_bytes_and_real_seconds(lane):
    execution = Execution(precision="fp32")
    fake, real = lane(faked, SMALL_GPT, execution), lane(measured, SMALL_GPT, execution)
    for name in ("layer", "first", "middle", "last"):
        assert getattr(fake, name).memory == getattr(real, name).memory
        assert getattr(fake, name).parameters == getattr(real, name).parameters
    assert real.source == "measured" and real.optimizer_seconds > 0
    assert min(real.layer.seconds.forward, real.layer.seconds.input, real.layer.seconds.weight) > 0


def again(*modules: str) -> Execution:
    return Execution(recompute="selective", recompute_modules=modules)


EXECUTIONS = {
    "plain": Execution(),
    "tp2": Execution(micro_batch=3, tp=2),
    "tp2-sp": Execution(tp=2, sequence_parallel=True),
    "tp4": Execution(tp=4),
    "tp4-scores": Execution(tp=4, attention="unfused"),
    "cp2": Execution(cp=2),
    "unfused": Execution(fused=False),
    "scores": Execution(attention="unfused"),
    "core": Execution(attention="unfused", recompute="selective"),
    "full": Execution(recompute="full"),
}
LATENT = replace(
    LLAMA,
    kv_heads=None,
    qk_norm=True,
    kv_lora_rank=64,
    q_lora_rank=96,
    qk_head_dim=32,
    qk_pos_emb_head_dim=16,
    v_head_dim=32,
)
EXPERTS = replace(LLAMA, qk_norm=True, experts=8, experts_per_token=2, expert_ffn=320)
# As DeepSeek-V3: dense layers first, then experts that are chosen in groups, one that all tokens visit, and a layer ahead.
FINE = replace(
    LATENT, experts=4, experts_per_token=2, expert_ffn=320, shared_expert_ffn=320, moe_layer_freq=(0, 1, 1, 1, 1, 1),
    router_score="sigmoid", router_bias=True, router_groups=2, router_groups_per_token=1, mtp_layers=1,
)  # fmt: skip
# As GPT-OSS; and of 6 experts, 128 tokens for 5 each do not get equally many.
ODD = replace(EXPERTS, qk_norm=False, bias="all", experts=6, experts_per_token=5)
HYBRID = replace(
    LLAMA, layers=3, pattern="*-E", experts=4, experts_per_token=2, expert_ffn=320, mtp_layers=2, mtp_pattern="*-"
)
MIXED = replace(GPT, kv_heads=2, position="rope", activation="geglu")
CROSSED = {
    **{f"gpt {name}": (GPT, execution) for name, execution in EXECUTIONS.items() if "tp4" not in name},
    **{f"llama {name}": (LLAMA, EXECUTIONS[name]) for name in ("tp2-sp", "unfused")},
    "a quarter rotated": (LLAMA, Execution(tp=2, rotary_percent=0.25)),
    "latent, half rotated": (LATENT, Execution(tp=2, rotary_percent=0.5)),
    # Fewer key heads than tensor-parallel ranks, and one key head per rank.
    **{
        f"{position} {name}": (replace(MIXED, position=position, kv_heads=heads), EXECUTIONS[name])
        for position, name, heads in (("rope", "tp4", 2), ("learned", "tp4-scores", 2), ("rope", "scores", 1))
    },
    "latent tp2": (LATENT, EXECUTIONS["tp2"]),
    "gated tp2-sp": (replace(LLAMA, qk_norm=True, attention_gate=True), EXECUTIONS["tp2-sp"]),
    **{
        f"{name} cp2-scores": (model, Execution(cp=2, attention="unfused"))
        for name, model in {"gpt": GPT, "llama": LLAMA, "latent": LATENT, "normed": replace(GPT, qk_norm=True)}.items()
    },
    "experts ep2": (EXPERTS, Execution(ep=2)),
    "odd experts with biases": (ODD, Execution(ep=2)),
    "whole experts": (EXPERTS, Execution(tp=2, sequence_parallel=True, ep=4, etp=1)),
    "whole and shared experts": (FINE, Execution(tp=2, sequence_parallel=True, ep=2, etp=1)),
    "hybrid plain": (HYBRID, EXECUTIONS["plain"]),
    "hybrid tp2-sp, transformer engine": (
        HYBRID,
        replace(EXECUTIONS["tp2-sp"], implementation="transformer_engine", wgrad_inputs="gathered"),
    ),
    **{f"fine {name}": (FINE, EXECUTIONS[name]) for name in ("plain", "tp2-sp")},
    **{
        f"fine {'+'.join(modules)}": (FINE, again(*modules))
        for modules in (("moe",), ("mla_up_proj", "mlp", "shared_experts"))
    },
    "fine tp2-sp moe": (FINE, replace(again("moe"), tp=2, sequence_parallel=True)),
    "gated tp2-sp cp2-scores unfused": (
        replace(LLAMA, qk_norm=True, attention_gate=True),
        Execution(micro_batch=2, tp=2, cp=2, sequence_parallel=True, attention="unfused", fused=False),
    ),
}


# Chosen by mutants: these cases notice nearly every wrong number, operator or condition in the formulas that any case notices,
# and recompute every kind of module.
FULL_LANE = {
    *("gpt tp2", "gpt core", "gpt full", "gpt cp2-scores", "learned tp4-scores", "gated tp2-sp cp2-scores unfused"),
    *("a quarter rotated", "odd experts with biases", "whole experts", "hybrid tp2-sp, transformer engine"),
    "fine tp2-sp moe",
    "fine mla_up_proj+mlp+shared_experts",
}


@pytest.mark.parametrize(
    "name", rest_nightly(CROSSED, FULL_LANE, "the same parts of a layer in a model with more of them")
)
def test_formulas_agree_with_megatrons_modules(lane, name):
    """Within what statistics of norms differ between devices, a few bytes per token."""
    model, execution = CROSSED[name]
    seen, formulas = lane(faked, model, execution, True), from_formulas(model, execution, A100)
    assert formulas.first.parameters == seen.first.parameters and formulas.last.parameters == seen.last.parameters
    assert formulas.message_bytes == seen.message_bytes
    pairs = [(seen.layers[kind], formulas.layers[kind]) for kind in seen.layers]
    for expected, measured in (*pairs, (seen.last, formulas.last)):
        assert measured.parameters == expected.parameters
        assert measured.memory[Kind.F] == pytest.approx(expected.memory[Kind.F], rel=0.004)
        assert measured.memory[Kind.W] == pytest.approx(expected.memory[Kind.W])


def test_what_cannot_be_profiled_is_refused(lane):
    for model, execution, says in (
        (GPT, Execution(recompute="selective", recompute_modules=("mlp",)), ("cannot-profile", "mlp")),
        (GPT, Execution(recompute="selective", recompute_modules=("activation",)), ("cannot-profile",)),
        (FINE, again("moe_act"), ("cannot-profile",)),
        (GPT, again("mla_up_proj"), ("needs-option",)),
        (GPT, Execution(tp=8), ("does-not-divide",)),
        (replace(GPT, pattern="M-*-M-"), Execution(), ("cannot-profile", "mamba_ssm")),
        (replace(GPT, linear_attention_freq=2), Execution(), ("cannot-profile",)),
        (GPT, Execution(adapters=8, frozen=("language",)), ("cannot-profile",)),
    ):
        with refused(*says):
            lane(measured, model, execution)
