"""What waits for W, when the sums of a chunk's gradients start, and how often a step asks the host about NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import MegatronModule, TransformerConfig
from refusals import refused
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore import agreement
from megatron_pipemem.mcore.model.linear import attach_ddp_hooks, split_linear
from megatron_pipemem.mcore.plugin import _Enabled
from megatron_pipemem.mcore.step import gradients
from megatron_pipemem.mcore.step.gradients import GradientReductions, SplitBackward, _BucketStarts
from megatron_pipemem.mcore.symbols import GATHER_GRADIENT, PatchSet
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.runtime.weight_gradients import WeightGradientQueue, collecting, shard_of
from megatron_pipemem.schedule.action import Action

LAYERS, WIDTH = 3, 8
STOCK = layers.linear_with_grad_accumulation_and_async_allreduce
SPLIT = "0F0 0I0 0W0 0F1 0I1 0F2 0I2 0W1 0W2 0REDUCE_GRAD"
WHOLE = "0F0 0B0 0F1 0B1 0REDUCE_GRAD"


@pytest.mark.parametrize("other", ["node-1", "node-2"])
def test_only_ranks_of_one_host_keep_shards_until_w(monkeypatch, other):
    """Whatever variables their launcher sets, and however many GPUs a rank sees."""
    group = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(gradients.dist, "get_process_group_ranks", lambda group: [2, 3])
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: "node-1")
    monkeypatch.setattr(agreement, "gather", lambda own, group: [own, other])
    split = SplitBackward(Request("zb-h1"), counted=False)
    (keep,) = (act for symbol, act in split.replacements() if symbol == GATHER_GRADIENT)
    sizes = SimpleNamespace(num_moe_experts=None, hidden_size=4)
    groups, context = SimpleNamespace(tp=group), SimpleNamespace(config=sizes)
    split.prepare(SimpleNamespace(groups=groups, chunks=[], context=context, forward_only=True))
    call = SimpleNamespace(input_split_sizes=None, use_global_buffer=False, group=group)
    with collecting(WeightGradientQueue()):
        (whole,) = keep(lambda ctx, shard: (torch.cat([shard, shard]),), call, torch.ones(2, 4))
    assert (shard_of(whole) is not None) == (other == "node-1")


class Linears(MegatronModule):
    """A row of weights, each as large as a bucket."""

    def __init__(self, config):
        super().__init__(config)
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator)) for _ in range(LAYERS)
        )

    def forward(self, x):
        for weight in self.weights:
            x = split_linear(STOCK, x, weight, None, False, False, False, tp_group=SimpleNamespace(size=lambda: 1))
        return x.sum()


class Stage:
    """``again``: how often a microbatch runs backward, by its number."""

    def __init__(self, model, again: dict[int, int]):
        self.model, self.again = model, again

    def forward(self, microbatch, input, will_recompute=False):
        generator = torch.Generator().manual_seed(microbatch)
        return self.model(torch.randn(4, WIDTH, generator=generator).requires_grad_())

    def backward(self, microbatch, input, output, output_gradient):
        for _ in range(self.again.get(microbatch, 1)):
            output.backward(retain_graph=True)

    def reduce_gradients(self):
        for group in self.model.bucket_groups:
            group.start_grad_sync()


class HostQueries(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Training:
    def __init__(self, model, feature: GradientReductions, events: list[str]):
        self.model, self.feature, self.events = model, feature, events
        self.in_step: list[str] = []

    def run(
        self,
        orders: str,
        single_queue: bool = False,
        again: dict[int, int] | None = None,
        replicas: int = 1,
        replays: bool = False,
    ) -> int:
        """Run a step, and return how often it asked the host for a value."""
        self.model.zero_grad_buffer()
        self.events.clear()
        placement = SimpleNamespace(
            replicas=replicas,
            previous_stage=lambda stage: None,
            next_stage=lambda stage: None,
            devices=(0,),
            stages=((0,),),
        )
        program = Hashable(
            actions=(tuple(map(Action.parse, orders.split())),),
            placement=placement,
            schedule=SimpleNamespace(vocabulary_barriers=0, name="test"),
        )
        step = SimpleNamespace(
            single_queue=single_queue,
            replays_passes=replays,
            pipeline=SimpleNamespace(placement=placement, device=0),
            program=program,
            stages={0: Stage(self.model, again or {})},
            context=SimpleNamespace(force_all_reduce=False),
        )
        transport = SimpleNamespace(finish=lambda: None)
        executor = Executor(program, 0, step.stages, transport, self.feature.extend_executor(step))
        with HostQueries() as queries:
            with self.feature.around(step), self.model.no_sync():
                executor.run()
            in_step, self.in_step = queries.count, list(self.events)
            self.model.finish_grad_sync()
            assert queries.count == in_step == 0, "no query before the gradients are finalized"
            self.feature.after(step)
        return queries.count

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [weight.main_grad.clone() for weight in self.model.module.weights]


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.fixture
def make(world, monkeypatch) -> Iterator:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    events: list[str] = []
    patches, feature = PatchSet(), GradientReductions()

    def build(overlap: bool = True, **options):
        names = "dp dp_cp intra_dp_cp expt_dp intra_expt_dp tp pp ep mp tp_ep_pp".split()
        groups = ProcessGroupCollection(**dict.fromkeys(names, world))
        config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
        ddp = DistributedDataParallelConfig(
            overlap_grad_reduce=overlap, bucket_size=WIDTH * WIDTH, check_for_nan_in_grad=True, **options
        )
        model = DistributedDataParallel(config, ddp, Linears(config), pg_collection=groups)
        attach_ddp_hooks([model])
        start, ready = Group.start_grad_sync, Group.register_grad_ready
        weights = list(model.module.weights)

        @wraps(start)
        def noted_start(group, *args, **kwargs):
            events.append(f"start {model.bucket_groups.index(group)}")
            return start(group, *args, **kwargs)

        @wraps(ready)
        def noted_ready(group, param, *args, **kwargs):
            events.append(f"ready {next(n for n, weight in enumerate(weights) if weight is param)}")
            return ready(group, param, *args, **kwargs)

        monkeypatch.setattr(Group, "start_grad_sync", noted_start)
        monkeypatch.setattr(Group, "register_grad_ready", noted_ready)
        patches.install(feature.replacements())
        return Training(model, feature, events)

    yield build
    patches.remove()


@pytest.mark.parametrize(("orders", "microbatches"), [(SPLIT, 3), (WHOLE, 2)])
def test_a_bucket_starts_behind_the_last_gradient_of_its_own_parameters(make, orders, microbatches):
    training = make()
    for _ in range(2):
        training.run(orders)
        last = ["ready 2", "start 0", "ready 1", "start 1", "ready 0", "start 2"]
        assert training.in_step == ["ready 2", "ready 1", "ready 0"] * (microbatches - 1) + last
    early = training.gradients
    training.run(orders, single_queue=True)
    assert training.in_step[-3:] == ["start 0", "start 1", "start 2"]
    assert all(map(torch.equal, training.gradients, early)), "with and without early starts, to the bit"
    for others in ({"replicas": 2}, {"replays": True}):
        training.run(orders, **others)
        assert training.in_step[-3:] == ["start 0", "start 1", "start 2"]


def test_a_last_backward_that_reports_too_little_leaves_the_rest_to_the_end(make):
    training = make()
    training.run(WHOLE, again={0: 2})
    assert training.in_step[-3:] == ["start 0", "start 1", "start 2"]
    training.run("0F0 0B0 0REDUCE_GRAD")
    assert training.in_step == ["ready 2", "ready 1", "ready 0", "start 0", "start 1", "start 2"]


def test_a_gradient_after_the_start_is_an_error_and_no_wrong_sum(make):
    with refused("late-gradient", kind=UnsupportedError):
        make().run(WHOLE, again={1: 2})


def test_buckets_start_in_megatrons_order_whatever_is_complete_first():
    """Ranks may see their parameters complete in different orders, and must post their collectives in one."""
    started: list[int] = []
    params = [torch.zeros(1) for _ in range(4)]

    def group(number):
        return Hashable(params={params[number]}, start_grad_sync=lambda force_all_reduce: started.append(number))

    groups = [group(number) for number in range(4)]
    model = SimpleNamespace(bucket_groups=groups[:3], expert_parallel_bucket_groups=groups[3:])
    starts = _BucketStarts(model, {params[0]: 2, params[1]: 1, params[3]: 1}, False)
    starts.start_complete()
    seen = []
    for number in (1, 0, 3, 0):
        starts.report(groups[number], params[number])
        seen.append(list(started))
    assert seen == [[], [], [3], [3, 0, 1, 2]]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_asks_the_host_once(make, overlap):
    assert make(overlap).run(SPLIT) == 1


def test_large_gradients_are_checked_where_megatron_checks_them(make):
    training = make(check_for_large_grads=True)
    with pytest.raises(AssertionError) as raised:
        training.run(SPLIT)
    assert "no query before" in str(raised.value), "the assertion of the stand-in for the device"


@contextmanager
def rerun(mode, state):
    machine = get_rerun_state_machine()
    before = machine.mode, machine.state
    machine.mode, machine.state = mode, state
    try:
        yield machine
    finally:
        machine.mode, machine.state = before


@pytest.mark.parametrize(("planted", "word"), [(math.nan, "NaN"), (math.inf, "Inf")])
def test_a_bad_gradient_ends_the_run_with_megatrons_message(make, monkeypatch, planted, word):
    training = make()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # Megatron names it
    with torch.no_grad():
        training.model.zero_grad_buffer()
        monkeypatch.setattr(training.model, "zero_grad_buffer", lambda: None)
        training.model.module.weights[1].main_grad[0, 0] = planted
    with pytest.raises(RuntimeError) as raised:
        training.run(SPLIT)
    assert f"found {word} in local grad norm for bucket #0" in str(raised.value)


@pytest.mark.parametrize(("state", "queries"), [(RerunState.INITIAL_RUN, 1), (RerunState.RERUNNING_IN_PLACE, 0)])
def test_megatron_judges_every_result_of_a_step_that_runs_again(make, state, queries):
    training = make()
    with rerun(RerunMode.VALIDATE_RESULTS, state) as machine:
        machine.validation_counts.clear()
        assert training.run(SPLIT) == queries
        assert sum(machine.validation_counts.values()) == (0 if queries else 2 * LAYERS)


@pytest.mark.parametrize(("name", "checks_late"), [("v-half", True), ("1f1b", True), ("pipedream-2bw", False)])
def test_weights_are_never_updated_before_the_check(name, checks_late):
    """A step of an asynchronous schedule updates weights itself."""
    features = _Enabled.of(Request(name)).features
    assert any(isinstance(feature, GradientReductions) for feature in features) == checks_late
