"""What the CPU lane answers in place of CUDA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_pipemem.mcore import on_cpu_ranks
from megatron_pipemem.tools.cpu.ranks import start_ranks


def test_importing_the_package_activates_nothing() -> None:
    assert not on_cpu_ranks()


def test_activating_twice_changes_nothing_more(lane: Callable[[str], object]) -> None:
    lane("""
from megatron_pipemem.mcore import on_cpu_ranks
from megatron_pipemem.tools.cpu import activate
before = torch.empty, torch.Tensor.to, torch.cuda.Stream, torch.distributed.new_group
assert on_cpu_ranks()
activate()
assert before == (torch.empty, torch.Tensor.to, torch.cuda.Stream, torch.distributed.new_group)
""")


def test_comes_before_megatron_and_leaves_alone_what_is_the_users_and_out_what_cannot_be_imported(
    python: Callable[[str], str], tmp_path: Path
) -> None:
    """Fused weight gradients are an option. Importing Transformer Engine without a GPU ends in other errors than
    Megatron expects.
    """
    (tmp_path / "transformer_engine.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    refused = python(f"""
        import os, sys
        sys.path.insert(0, {str(tmp_path)!r})
        os.environ["OMP_NUM_THREADS"] = "2"
        import torch
        from megatron_pipemem.tools.cpu import activate
        from megatron_pipemem.errors import UnsupportedError
        available = torch.cuda.is_available
        sys.modules["megatron.core"] = object()
        try:
            activate()
        except UnsupportedError as error:
            print(error.code)
        assert torch.cuda.is_available is available
        del sys.modules["megatron.core"]
        activate(emulate_fused_gradients=False)
        assert torch.get_num_threads() == 2 and os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        from megatron.core.extensions import transformer_engine
        from megatron.core.tensor_parallel import layers
        assert not layers._grad_accum_fusion_available and not transformer_engine.HAVE_TE
    """)
    assert refused == "enabled-too-late"


def test_all_groups_share_one_network_thread(lane: Callable[[str], object]) -> None:
    threads = lane("""
import os
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
def made() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    first, last = timedelta(seconds=33), timedelta(seconds=77)
    for group in [dist.new_group([0], timeout=first, backend=backend) for backend in (None, "nccl", "gloo")]:
        dist.barrier(group)
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == first
        dist.distributed_c10d._set_pg_timeout(last, group)  # as Megatron does after the first step
        assert options._timeout == last
made()
dist.destroy_process_group()
made()
result = [Path(f"/proc/self/task/{number}/comm").read_text().strip() for number in os.listdir("/proc/self/task")]
dist.destroy_process_group()
""")
    assert threads.count("gloo_tcp_loop") == 1 and threads.count("pt_gloo_runloop") > 1


COLLECTIVES = """
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
collectives = {
    "sum": lambda tensor, how: dist.all_reduce(tensor, **how),
    "gather": lambda tensor, how: dist.all_gather_into_tensor(torch.empty(16), tensor, **how),
    "gather a list": lambda tensor, how: dist.all_gather([torch.empty(8), torch.empty(8)], tensor=tensor, **how),
    "scatter": lambda tensor, how: dist.reduce_scatter_tensor(torch.empty(4), input=tensor, **how),
}
dist.init_process_group("nccl")
held = set()
for _ in range(100):
    for name, collective in collectives.items():
        for how in ({}, {"async_op": True}):
            tensor = torch.ones(8)
            storage = StorageWeakRef(tensor.untyped_storage())
            work = collective(tensor, how)
            if how:
                work.wait()
            del tensor
            if not storage.expired():
                held.add((name, *how))
            del work
sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,))
dist.all_reduce(sparse)
work = dist.all_reduce(torch.ones(2), async_op=True)
(sums,) = work.get_future().wait()
work.wait()
dist.barrier()
print(sorted(held), sparse.to_dense().tolist(), sums.tolist(), work.is_success())
"""


def test_a_collective_that_is_done_holds_nothing(tmp_path: Path) -> None:
    """On two ranks. Without the lane, gloo's thread still has about every fourth tensor here. Futures and sparse sums stay."""
    logs = [tmp_path / "first", tmp_path / "second"]
    ranks = start_ranks(exec, [(COLLECTIVES, {})] * 2, logs)
    for rank in ranks:
        rank.join()
    assert [log.read_text().splitlines()[-1] for log in logs] == ["[] [2.0, 0.0] [2.0, 2.0] True"] * 2
    assert [rank.exitcode for rank in ranks] == [0, 0]


EXPRESSIONS = {
    # tensors asked of CUDA, in all the ways Megatron does
    "torch.empty(2, device='cuda').device.type": "'cpu'",
    "torch.zeros(2, device='cuda:1').device.type": "'cpu'",
    "torch.ones(2, device=torch.cuda.current_device()).device.type": "'cpu'",
    "torch.full((2,), 1.0, device=torch.device('cuda', 0)).device.type": "'cpu'",
    "torch.tensor([1], dtype=torch.int, device='cuda').tolist()": "[1]",
    "torch.arange(3, device='cuda', pin_memory=True).tolist()": "[0, 1, 2]",
    "torch.empty_like(torch.ones(2), device='cuda').device.type": "'cpu'",
    "torch.ones(2).new_zeros(2, device='cuda').tolist()": "[0.0, 0.0]",
    "torch.ones(2).to('cuda').device.type": "'cpu'",
    "torch.ones(2).to(0, torch.float16).dtype": "torch.float16",
    "torch.ones(2).to(device='cuda:0', dtype=torch.float16).dtype": "torch.float16",
    "torch.ones(2).to(torch.float64, True).dtype": "torch.float64",
    "torch.nn.Linear(2, 2, device='cuda').cuda(0).weight.device.type": "'cpu'",
    "torch.ones(2).cuda(non_blocking=True).pin_memory().tolist()": "[1.0, 1.0]",
    # the meta device is not CUDA
    "torch.empty(2, device='meta').device.type": "'meta'",
    "torch.ones(2).to('meta').device.type": "'meta'",
    # names by which Megatron's optimizers sort parameters
    "torch.ones(2).type()": "'torch.cuda.FloatTensor'",
    "torch.ones(2).bfloat16().type()": "'torch.cuda.BFloat16Tensor'",
    "torch.ones(2).type('torch.cuda.HalfTensor').dtype": "torch.float16",
    "torch.ones(2).type(torch.int64).dtype": "torch.int64",
    # devices
    "torch.cuda.is_available(), torch.accelerator.is_available()": "(True, False)",
    "torch.cuda.device_count(), torch.cuda.current_device()": "(1, 0)",
    "torch.cuda.get_device_capability()": "(8, 0)",
    "torch.cuda.get_device_properties(0).major": "8",
    "torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()": "(0, 0)",
    "torch.cuda.memory_stats()['allocation.all.current']": "0",
    # profilers
    "torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())": "None",
    "torch.cuda.memory._snapshot()['segments']": "[]",
    "torch.cuda.memory._record_memory_history(True, trace_alloc_max_entries=1)": "None",
    # streams
    "torch.cuda.current_stream() is torch.cuda.default_stream()": "True",
    "torch.cuda.Stream().record_event().query()": "True",
    # what Megatron would compile
    "torch.compile(abs)(-1), torch.compile(mode='default')(abs)(-1)": "(1, 1)",
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_answers(lane: Callable[[str], object], expression: str) -> None:
    assert lane(f"result = repr(({expression}))") == EXPRESSIONS[expression]


def test_ranges_for_a_profiler_can_be_seen(lane: Callable[[str], object]) -> None:
    assert lane("""
import torch
with torch.autograd.profiler.emit_nvtx(record_shapes=False):
    within = torch.autograd._profiler_enabled()
result = within, torch.autograd._profiler_enabled()
""") == (True, False)


def test_streams_nest_and_events_measure_time(lane: Callable[[str], object]) -> None:
    lane("""
import time
first, second = torch.cuda.Stream(), torch.cuda.Stream()
with torch.cuda.stream(first):
    with torch.cuda.stream(second):
        assert torch.cuda.current_stream() is second
    assert torch.cuda.current_stream() is first
assert torch.cuda.current_stream() is torch.cuda.default_stream()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
began = time.perf_counter()
start.record(); time.sleep(0.02); end.record()
assert 20 <= start.elapsed_time(end) <= 1000 * (time.perf_counter() - began)
""")


def test_cuda_random_state_is_the_state_that_kernels_draw_from(lane: Callable[[str], object]) -> None:
    lane("""
torch.cuda.manual_seed(7)
state = torch.cuda.get_rng_state()
drawn = torch.rand(3, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(drawn, torch.rand(3))
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
model_parallel_cuda_manual_seed(3, tp_rank=0, ep_rank=0, etp_rank=0)
before = torch.cuda.get_rng_state()
with get_cuda_rng_tracker().fork():
    torch.rand(3)
assert torch.equal(before, torch.cuda.get_rng_state())
""")


def test_cuda_tensors_in_backward_passes_and_other_threads(lane: Callable[[str], object]) -> None:
    lane("""
import threading
from torch.utils.checkpoint import checkpoint
devices = []
def layer(x):
    devices.append(torch.empty(1, device="cuda").device.type)
    return x * 2
x = torch.ones(2, requires_grad=True)
checkpoint(layer, x, use_reentrant=True).sum().backward()
thread = threading.Thread(target=layer, args=(x,))
thread.start(); thread.join()
assert devices == ["cpu"] * 3 and x.grad.tolist() == [2.0, 2.0]
""")


def test_meta_device_context_still_holds(lane: Callable[[str], object]) -> None:
    lane("""
with torch.device("meta"):
    assert torch.nn.Linear(2, 2).weight.device.type == "meta"
""")


def test_nccl_groups_become_gloo(lane: Callable[[str], object]) -> None:
    lane("""
import tempfile
dist = torch.distributed
store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
assert dist.get_backend() == "gloo"
assert dist.get_backend(dist.new_group([0], backend="nccl", pg_options=None)) == "gloo"
dist.destroy_process_group()
""")


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_norms_accept_sequence_parallelism(lane: Callable[[str], object], norm: str) -> None:
    lane(f"""
from types import SimpleNamespace
from megatron.core.transformer.torch_norm import WrappedTorchNorm
config = SimpleNamespace(layernorm_zero_centered_gamma=False, persist_layer_norm=True, sequence_parallel=True,
                         memory_efficient_layer_norm=False, normalization="{norm}")
built = WrappedTorchNorm(config, 8, eps=1e-3)
assert type(built) is torch.nn.{norm} and built.eps == 1e-3
assert all(parameter.sequence_parallel for parameter in built.parameters())
assert config.sequence_parallel and config.persist_layer_norm
""")


def test_fused_weight_gradients_match_autograd(lane: Callable[[str], object]) -> None:
    lane("""
import fused_weight_gradient_mlp_cuda as fused
inputs, weight = torch.randn(6, 3), torch.randn(4, 3, requires_grad=True)
grad_output = torch.randn(6, 4)
main_grad = torch.ones(4, 3)
fused.wgrad_gemm_accum_fp32(inputs, grad_output, main_grad)
(inputs @ weight.t()).backward(grad_output)
torch.testing.assert_close(main_grad, 1 + weight.grad)
from megatron.core.tensor_parallel import layers
assert layers._grad_accum_fusion_available
""")
