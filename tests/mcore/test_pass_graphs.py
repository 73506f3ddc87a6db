"""Steps whose passes are CUDA graphs, on four ranks in this process, over the stand-in of CUDA's graphs (``cuda_graphs``)."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import cuda_graphs
import pytest
import torch
import torch.distributed as dist
from in_turn import Mail, play
from megatron.core.tensor_parallel import random
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from refusals import refused
from toy import ROWS, WIDTH, Stage

from megatron_pipemem.features.graphs.megatron import step as room
from megatron_pipemem.features.graphs.megatron.step import GraphedStage, GraphedSteps, check_chunks_for_graphs
from megatron_pipemem.features.graphs.runtime import FixedArguments, GraphedWeights, GraphsOfStep, PassGraphs
from megatron_pipemem.mcore.model.stages import ChunkStage, StepContext
from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Program

RANKS, MICROBATCHES = 4, 8
EMPTY = 2
"""The stage without layers."""
HERE = SimpleNamespace(chunk=lambda chunk: nullcontext())


class Chunk(Stage):
    """A stage of ``toy`` as Megatron calls it. The last one returns a loss for every row, for which ``labels`` are there.

    As with multi-token prediction, it adds the gradient of a further loss to its own.
    """

    def __init__(self, index: int, is_last: bool):
        super().__init__(index)
        self.index, self.is_last, self.input = index, is_last, None
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)
            parameter.main_grad = parameter.grad

    def set_input_tensor(self, tensors: list) -> None:
        self.input = tensors[0]

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, **named):
        if self.index == EMPTY:
            return self.input
        output = super().forward(tokens * self.scale if self.input is None else self.input)
        if not self.is_last:
            return output
        further = 0.1 * (output + labels).square().sum(1)
        return MTPLossAutoScaler.apply((output - labels).square().sum(1), further)


class World:
    """The ranks of a schedule, with the same weights and data in every world."""

    def __init__(self, program: Program):
        self.program, self.placement = program, program.placement
        stages = range(self.placement.num_stages)
        self.chunks = [Chunk(stage, self.placement.next_stage(stage) is None) for stage in stages]
        self.graphs: list[GraphsOfStep] | None = None

    def step(self, number: int, in_graphs: bool) -> list[torch.Tensor]:
        """Run a step, and return its losses and gradients. The first step in graphs captures."""
        if in_graphs and self.graphs is None:
            self.graphs = [GraphsOfStep(()) for _ in range(RANKS)]
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                parameter.grad.zero_()
        letters, executors, losses = {}, [], []
        for rank in range(RANKS):
            context = self._context(number)
            runners = {stage: self._runner(context, rank, stage, in_graphs) for stage in self.placement.stages[rank]}
            features = [GraphedWeights(self.graphs[rank])] if in_graphs else []
            executors.append(Executor(self.program, rank, runners, Mail(self.placement, letters), features))
            losses.append(context.loss_data)
        play(executors, letters)
        if in_graphs:
            for graphs in self.graphs:
                graphs.complete()
        gradients = [parameter.grad + 0 for chunk in self.chunks for parameter in chunk.parameters()]
        return [*(loss for of_rank in losses for loss in of_rank), *gradients]

    def _context(self, number: int) -> StepContext:
        config = SimpleNamespace(
            timers=None,
            enable_autocast=False,
            calculate_per_token_loss=False,
            num_moe_experts=None,
            mtp_num_layers=1,
            grad_scale_func=lambda loss: loss * (1 + number),  # as a loss scaler that changes its scale
            deallocate_pipeline_outputs=True,
            grad_sync_func=None,
        )

        def forward_step(iterator, model):
            tokens, labels = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(next(iterator)))
            return model(tokens, labels=labels, mask=None), lambda output: (output.mean(), output.detach().clone())

        return StepContext(config, forward_step, MICROBATCHES, 1, False, False, None, False, num_tokens=torch.tensor(0))

    def _runner(self, context: StepContext, rank: int, stage: int, in_graphs: bool) -> ChunkStage:
        chunk = self.placement.stages[rank].index(stage)
        number = int(context.config.grad_scale_func(1)) - 1
        data = iter(range(100 * number, 100 * number + MICROBATCHES))
        runner = ChunkStage(
            context,
            self.chunks[stage],
            data,
            chunk,
            len(self.placement.stages[rank]),
            self.chunks[stage].is_last,
            HERE,
            (),
        )
        return runner.recast(GraphedStage, graphs=self.graphs[rank], stage=stage) if in_graphs else runner


NAMES = [
    family.name
    for family in families()
    if not (family.asynchronous or family.offloads or family.replicas > 1 or family.slices > 1)
]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cuda_graphs.CUDAGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)


def differing(name: str) -> int:
    """The results of three replayed steps that differ from those of the same steps without graphs."""
    program = lower(build_schedule(name, num_devices=RANKS, num_microbatches=MICROBATCHES))
    plain, graphed = World(program), World(program)
    count = 0
    for number in range(4):
        pairs = zip(plain.step(number, False), graphed.step(number, True), strict=True)
        count += sum(not torch.equal(*pair) for pair in pairs)
    return count


@pytest.mark.parametrize("name", NAMES)
def test_replayed_steps_equal_plain_steps_to_the_bit(name):
    assert differing(name) == 0


# Forbidden things, each planted once.


def shared_inputs(graphs: GraphsOfStep, like: torch.Tensor) -> torch.Tensor:
    """One fixed tensor of a format for all microbatches."""
    shared = vars(graphs).setdefault("shared", {}).setdefault(like.shape, torch.empty_like(like))
    return shared.data.copy_(like.detach())  # past autograd, which would notice


@pytest.mark.parametrize(
    ("owner", "method", "fault"),
    [
        (GraphsOfStep, "fixed", shared_inputs),
        (PassGraphs, "fill", lambda passes, call, input: None),
        (PassGraphs, "fill_gradient", lambda passes, gradient: None),
        (torch.Tensor, "clone", torch.Tensor.detach),  # messages that lie where the next replay writes
    ],
    ids=["inputs overwritten", "inputs not filled", "gradients not filled", "results not copied"],
)
def test_a_broken_lifetime_changes_results(monkeypatch, owner, method, fault):
    monkeypatch.setitem(globals(), "EMPTY", None)  # its output is a copy, too
    monkeypatch.setattr(owner, method, fault)
    assert differing("v-half") > 0


def test_another_order_of_replays_reads_memory_that_others_have_taken():
    captured, other = (
        lower(build_schedule(name, num_devices=RANKS, num_microbatches=MICROBATCHES)) for name in ("zb-h1", "zb-h2")
    )
    plain, graphed = World(captured), World(captured)
    graphed.step(0, True)
    graphed.program = other
    assert not all(map(torch.equal, plain.step(1, False), graphed.step(1, True)))


def test_replays_repeat_messages_whose_wait_copies_what_arrived():
    """As gloo's ``reduce_scatter_tensor`` does, which sequence parallelism calls."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    graphs, values, result = GraphsOfStep(()), torch.ones(3), torch.empty(3)

    def run() -> None:
        sums = torch.empty(3)
        dist.reduce_scatter_tensor(sums, 2 * values, async_op=True).wait()
        result.copy_(sums)

    try:
        graph = graphs.capture(run)
        assert result.tolist() == [2.0] * 3
        values.fill_(5)
        graph.replay()
        assert result.tolist() == [10.0] * 3
    finally:
        dist.destroy_process_group()


def attend(x: torch.Tensor, dropout: float) -> torch.Tensor:
    query = x.expand(1, 1, 3, 3).contiguous()
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query, dropout)[0]


QUERIES = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: bool(torch.equal(x, x)),
}
DRAWS = {
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "attention dropout": lambda x: attend(x, 0.5),
    "randn": lambda x: torch.randn(3),
}


@pytest.mark.parametrize("name", QUERIES)
def test_values_that_the_host_reads_are_refused_in_a_capture(name):
    graphs = GraphsOfStep(())
    with refused("graph-operator", "--cuda-graph-impl"):
        graphs.capture(lambda: QUERIES[name](torch.ones(3)))
    assert not graphs.is_capturing


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_a_layer_that_runs_again_are_refused_in_a_capture(name):
    graphs = GraphsOfStep(())

    def run(operate) -> None:
        graphs.refuse_draws()
        operate(torch.ones(3))

    graphs.capture(lambda: run(lambda x: attend(x, 0.0)))
    with refused("graph-operator", "--cuda-graph-impl"):
        graphs.capture(lambda: run(DRAWS[name]))


@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        ({"tokens": torch.ones(2)}, {"tokens": torch.ones(3)}, ("(3,)",)),
        ({"tokens": torch.ones(2)}, {"tokens": torch.ones(2).long()}, ("torch.int64",)),
        ({"tokens": torch.ones(2)}, {"tokens": None}, ("None",)),
        ({"mask": None}, {"mask": torch.ones(2)}, ()),
        ({"scale": 1.0}, {"scale": 2.0}, (1.0, 2.0)),
        ({"scale": 1.0}, {"other": 1.0}, ()),
    ],
)
def test_other_arguments_of_the_model_are_refused(first, later, words):
    arguments = FixedArguments.of(GraphsOfStep(()), first)
    arguments.fill(first)
    with refused("graph-inputs", *words):
        arguments.fill(later)


@pytest.mark.parametrize("argument", [torch.ones(2, requires_grad=True), SimpleNamespace()])
def test_arguments_that_cannot_be_fixed_are_refused(argument):
    with refused("graph-inputs"):
        FixedArguments.of(GraphsOfStep(()), (argument,))


def test_models_whose_passes_do_more_than_a_replay_are_refused(monkeypatch):
    chunk = Chunk(0, False)
    with refused("unsupported-model", "Chunk"):
        check_chunks_for_graphs([chunk])
    monkeypatch.setattr(room, "is_language_model", lambda model: True)
    check_chunks_for_graphs([chunk])
    hook = chunk.scale.register_hook(lambda gradient: None)
    with refused("graph-model", "scale"):
        check_chunks_for_graphs([chunk])
    hook.remove()
    chunk.register_forward_hook(lambda *_: None)
    with refused("graph-model", __name__):
        check_chunks_for_graphs([chunk])
    del chunk.scale.main_grad
    with refused("graph-model", "main_grad"):
        check_chunks_for_graphs([chunk])


def test_weights_in_8_bits_that_forwards_transpose_are_refused(monkeypatch):
    chunk = Chunk(0, False)
    monkeypatch.setattr(room, "is_language_model", lambda model: True)
    monkeypatch.setattr(room.fp8_utils, "te_post_all_gather_processing", lambda weights: None, raising=False)
    chunk.scale.get_data_tensors = lambda: (chunk.scale.data, None)
    check_chunks_for_graphs([chunk])
    monkeypatch.setattr(room.fp8_utils, "te_post_all_gather_processing", None)
    with refused("graph-model", "scale"):
        check_chunks_for_graphs([chunk])


# When steps are captured.


def test_a_step_is_captured_after_the_steps_without_graphs_and_anew_if_it_is_another(monkeypatch):
    monkeypatch.setattr(room, "is_language_model", lambda model: True)
    steps, chunk = GraphedSteps(), Chunk(0, False)

    def begin(microbatches: int = 4, ledger: object = None) -> GraphsOfStep | None:
        step = SimpleNamespace(
            observation=SimpleNamespace(ledger=ledger),
            program=lower(build_schedule("zb-h1", num_devices=RANKS, num_microbatches=microbatches)),
            pipeline=SimpleNamespace(device=0),
            message=SimpleNamespace(shape=(1,)),
            context=SimpleNamespace(config=SimpleNamespace(cuda_graph_warmup_steps=2)),
            chunks=[chunk],
            stages={0: SimpleNamespace(model=chunk, recast=mock.Mock())},
            replays_passes=False,
        )
        features = steps.extend_executor(step)
        steps.after(step)
        assert step.replays_passes == bool(features)
        return features[0].graphs if features else None

    assert [begin(), begin(ledger=object()), begin()] == [None] * 3
    with mock.patch.object(torch.cuda, "empty_cache") as empty_cache:
        first = begin()
        assert first.is_complete and begin() is first
    empty_cache.assert_called_once_with()
    assert begin(ledger=object()) is None and begin() is first
    assert [begin(8), begin(8)] == [None, None] and begin(8) not in (None, first)
    chunk.scale.data = chunk.scale.data.clone()
    assert [begin(8), begin(8)] == [None, None] and begin(8) is not None
    chunk.scale.requires_grad_(False)
    assert begin(8) is None, "a replay would train it"
    with pytest.raises(ValueError), steps.around(None):
        raise ValueError
    assert [begin(8), begin(8)] == [None, None] and begin(8) is not None
    copies = [torch.zeros(2) for _ in range(2)]
    metadata = {"data": copies[0], "quantizer": object(), "scale": copies[1]}
    chunk._fp8_workspaces = {"weight": SimpleNamespace(get_metadata=lambda: metadata), "other": None}
    begin(8).weights[0] = room._quantised_weights(chunk)
    assert begin(8) is not None
    metadata["scale"] = copies[1].clone()
    assert [begin(8), begin(8)] == [None, None] and begin(8) is not None, "graphs would read the copy from before"
    chunk.register_forward_hook(lambda *_: None)
    with refused("graph-model", __name__):
        begin(8)


def test_a_captured_pass_draws_at_each_replay_what_it_would_draw_without_graphs():
    graphs, values = GraphsOfStep(()), torch.empty(3)
    torch.manual_seed(1)
    graph = graphs.capture(lambda: values.normal_())
    first = values.clone()
    graph.replay()
    torch.manual_seed(1)
    assert torch.equal(first, torch.randn(3)) and torch.equal(values, torch.randn(3))


def test_random_streams_are_those_of_the_graphs_in_a_capture():
    steps, tracker = GraphedSteps(), random.CudaRNGStatesTracker()
    make = mock.Mock()
    with mock.patch.object(random, "_CUDA_RNG_STATE_TRACKER", tracker):
        steps._make_tracker(make, True, force_reset=True)
        steps._make_tracker(make)
    assert make.call_args_list[0] == mock.call(True, force_reset=True)
    assert random.is_graph_safe_cuda_rng_tracker(tracker)
    with pytest.raises(Exception, match="not added"), tracker.fork("none"):
        pass
    steps._graphs = mock.Mock(is_capturing=True)
    tracker.fork("one")
    tracker.fork()
    names = ("one", random._MODEL_PARALLEL_RNG_TRACKER_NAME)
    assert steps._graphs.drawing_from.mock_calls == [mock.call(name) for name in names]
    assert steps._get_states(lambda: (1, 2, 3)) == (None,) * 3
    steps._set_states(mock.Mock(side_effect=AssertionError), None, None, None)
    assert steps._get_state(mock.Mock(side_effect=AssertionError), graph_safe=False) is None
    steps._set_states(mock.Mock(side_effect=AssertionError), None, graph_safe=False)
    assert steps._graphs.refuse_draws.mock_calls == [mock.call()] * 2
    steps._graphs = None
    assert steps._get_states(lambda: (1, 2, 3)) == (1, 2, 3)
    assert steps._get_state(lambda graph_safe: graph_safe, graph_safe=False) is False
    steps._set_states(make, 1, graph_safe=False)
    make.assert_called_with(1, graph_safe=False)
    steps._set_states(make, 1, 2, 3)
    make.assert_called_with(1, 2, 3)
    steps.close(True)
    assert "fork" not in vars(tracker) and not random.is_graph_safe_cuda_rng_tracker(tracker)
