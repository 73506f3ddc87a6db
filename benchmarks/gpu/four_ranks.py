"""Experiment C: every family on four NCCL ranks that share one GPU.

A tiny GPT trains four steps under every synchronous schedule, with a cut vocabulary, on DP2 x PP2 with overlapped gradient
reduction, with each step as one CUDA graph (where PyTorch can capture it), and with experts on EP2 x PP2, forwards and
backwards in pairs. NCCL (2.30 and later) lets ranks share a GPU with ``NCCL_MULTI_RANK_GPU_ENABLE=1``. All of it is repeated
with ``CUDA_DEVICE_MAX_CONNECTIONS`` of 8 and 1, and with the default process group bound to the device.

The process of a rank runs all cases of a setting, so kernels are loaded early. ``FRESH`` schedules run once more in ranks of
their own, where every kernel is launched for the first time among posted messages.

Three parts have rows of their own. ``passes``: schedules run with a CUDA graph for every pass. ``timers``: three schedules run
with Megatron's timers of level 2, which make every host wait for its device around every pass. ``usual-order``: all families
run with one connection by their usual order, if it is proved for a queue that starts launches in order. These rows decide
``megatron_pipemem.queues.ORDERED_STARTS_SUFFICE``.

Claims: every case ends, and its losses are stock 1F1B's to the bit (to 1e-5 where sums have another order).

    python benchmarks/gpu/four_ranks.py [--part families | passes | timers | usual-order] [--rehearse]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import proof

from megatron_pipemem.files import write_whole

RANKS, MICROBATCHES, STEPS = 4, 8, 4
"""On a GPU the first two steps run by the order for one hardware queue."""
FIRST_SECONDS, CASE_SECONDS = 120, 30
"""How long the ranks may take to start and run their first case, and for each further one, before they count as stuck."""
OTHER_ORDER = 1e-5
PARTS = ("families", "passes", "timers", "usual-order")
TIMED = {"1f1b": 1, "zb-h1": 1, "v-half": 2}
"""Names and chunks per rank of schedules that run with timers of level 2."""
GRAPHED = {"1f1b": 1, "zb-h1": 1, "zbv": 2, "v-half": 2}
"""Names and chunks per rank of schedules that run with every pass as a CUDA graph."""
FRESH = ("dualpipe", "gis", "v-half", "1f1b")
PAIRED = {"1f1b": 1, "zb-h1": 1, "zbv": 2, "v-half": 2, "dualpipe-v": 2}
"""Names and chunks per rank of schedules that run with pairs."""
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "expert_model_parallel_size": 2,
    "add_bias_linear": False,
}


@dataclass(frozen=True)
class Case:
    """One training of the tiny model. ``pipelines`` data-parallel pipelines share the ranks."""

    schedule: str
    chunks: int = 1
    vocabulary: str = "off"
    pipelines: int = 1
    exact: bool = True
    layers: str = "local"
    fresh: bool = False
    graph: bool = False
    passes: bool = False
    experts: bool = False
    pairs: bool = False
    timers: bool = False

    @property
    def peers(self) -> tuple[object, ...]:
        """Cases with the same losses, as far as sums have one order."""
        return self.pipelines, self.layers, self.experts

    def __str__(self) -> str:
        cut = "" if self.vocabulary == "off" else f", vocabulary {self.vocabulary}"
        name = self.schedule if self.layers == "local" else f"{self.schedule} of {self.layers} layers"
        cut += ", one graph" if self.graph else ", fresh ranks" if self.fresh else ""
        cut += ", graphs of passes" if self.passes else ""
        cut += ", pairs" if self.pairs else ""
        cut += ", timers of level 2" if self.timers else ""
        if self.experts:
            return f"{name}{cut}, EP2"
        return f"{name}{cut}" + (f", DP{self.pipelines} overlapped" if self.pipelines > 1 else "")


@dataclass(frozen=True)
class Setting:
    """How the ranks are started."""

    connections: int
    bound: bool
    usual_order: bool = False

    def __str__(self) -> str:
        return f"connections {self.connections}" + ", bound" * self.bound + ", usual order" * self.usual_order


def cases(part: str, rehearse: bool) -> list[Case]:
    """Stock first: the others are compared with it."""
    from megatron_pipemem.schedule.registry import families

    if part == "timers":
        return [Case("stock"), *(Case(name, chunks, timers=True) for name, chunks in TIMED.items())]
    if part == "passes":
        graphed = [Case(name, chunks, passes=True) for name, chunks in GRAPHED.items()]
        if rehearse:
            return [Case("stock"), graphed[-1]]
        return [Case("stock"), *graphed, _data_parallel("stock"), replace(_data_parallel("v-half", 2), passes=True)]
    if part == "usual-order":  # cases in which only the schedule differs
        every = cases("families", rehearse)
        return [c for c in every if not (c.fresh or c.graph or c.pipelines > 1 or c.layers != "local")]
    if rehearse:
        return [
            Case("stock"),
            Case("dualpipe", exact=False, fresh=True),
            Case("v-half", 2, vocabulary="2", exact=False),
            _data_parallel("stock"),
            _experts("stock"),
            _experts("v-half", 2, pairs=True),
        ]
    found = [Case("stock")]
    for each in families():
        if not (each.offloads or each.slices > 1 or each.asynchronous):
            chunks = each.chunks_per_device({}) // each.replicas
            found.append(Case(each.name, chunks, exact=each.replicas == 1))
    found[1:1] = [replace(case, fresh=True) for name in FRESH for case in found if case.schedule == name]
    found += [Case("v-half", 2, vocabulary=algorithm, exact=False) for algorithm in ("1", "2")]
    found += [_data_parallel("stock"), _data_parallel("1f1b"), _data_parallel("zb-h1"), _data_parallel("v-half", 2)]
    if _captures_steps():
        found += [Case(name, graph=True, fresh=True) for name in ("1f1b", "gpipe", "zb-h1", "zb-h2")]
    found += [_experts("stock"), _experts("v-half", 2)]
    found += [_experts(name, chunks, pairs=True) for name, chunks in PAIRED.items()]
    if "te" in proof.kinds_of_layers():
        of_te = [Case("stock"), Case("1f1b"), Case("zb-h1"), Case("zbv", 2), Case("v-half", 2), Case("dualpipe-v", 2)]
        found += [replace(case, layers="te") for case in of_te]
    return found


def _captures_steps() -> bool:
    """Whether this PyTorch lets Megatron capture a step whose graph of gradients began on another stream."""
    import torch

    return hasattr(torch.autograd.graph, "set_override_stale_capture_stream")


def _data_parallel(schedule: str, chunks: int = 1) -> Case:
    return Case(schedule, chunks, pipelines=2)


def _experts(schedule: str, chunks: int = 1, pairs: bool = False) -> Case:
    """Of two pipelines, because the experts of a layer are on two data-parallel ranks."""
    return Case(schedule, chunks, pipelines=2, experts=True, pairs=pairs)


def settings(part: str, rehearse: bool) -> list[Setting]:
    if part == "usual-order":
        return [Setting(1, bound=False, usual_order=True)]
    if rehearse:
        return [Setting(1, bound=False)]
    if part in ("passes", "timers"):
        return [Setting(8, bound=False)]
    return [Setting(connections, bound) for bound in (False, True) for connections in (8, 1)]


def main() -> int:
    if "--rank" in sys.argv:
        return run_rank(json.loads(sys.argv[sys.argv.index("--rank") + 1]))
    options = proof.arguments(__doc__, "four_ranks", PARTS)
    report = proof.Report(options.output, options.rehearse)
    for setting in settings(options.part, options.rehearse):
        reference: dict[tuple[int, str], list[str]] = {}
        left = missing(cases(options.part, options.rehearse), setting, report)
        for case, losses, seconds, failure in run_cases(left, setting, options.rehearse):
            if case.schedule == "stock":
                reference[case.peers] = losses
            if report.has(f"{case}, {setting}"):
                continue
            missed = [failure] if failure else _compare(case, losses, reference[case.peers])
            report.add(f"{case}, {setting}", {"seconds": seconds, "last_loss": _last(losses)}, missed)
            proof.say(f"{case}, {setting}: {'; '.join(missed) or 'equal'}")
    return report.finish()


def missing(all_cases: list[Case], setting: Setting, report: proof.Report) -> list[Case]:
    """The cases that an earlier call has not run, and stock's among them that these are compared with."""
    left = [case for case in all_cases if not report.has(f"{case}, {setting}")]
    peers = {case.peers for case in left}
    return [case for case in all_cases if case in left or (case.schedule == "stock" and case.peers in peers)]


def _last(losses: list[str]) -> float | None:
    return float.fromhex(losses[-1]) if losses else None


def _compare(case: Case, losses: list[str], reference: list[str]) -> list[str]:
    if not reference:
        return ["stock has no losses to compare with"]
    if losses == reference:
        return []
    worst = max(abs(float.fromhex(a) - float.fromhex(b)) for a, b in zip(losses, reference, strict=True))
    if not case.exact and worst <= OTHER_ORDER:
        return []
    return [f"losses differ from stock's by up to {worst:.3g}"]


def run_cases(all_cases: list[Case], setting: Setting, rehearse: bool):
    """Every case with its losses, seconds and, instead of losses, what went wrong. New ranks after one that did.

    The first case, stock's, comes first, then those that want fresh ranks.
    """
    fresh = [case for case in all_cases if case.fresh]
    for together in (all_cases[:1], *([case] for case in fresh), [c for c in all_cases[1:] if not c.fresh]):
        yield from run_together(together, setting, rehearse)


def run_together(waiting: list[Case], setting: Setting, rehearse: bool):
    """As ``run_cases``, in the same ranks."""
    while waiting:
        with tempfile.TemporaryDirectory() as folder:
            plan = {"cases": [asdict(case) for case in waiting], **asdict(setting), "rehearse": rehearse}
            ranks = start(Path(__file__), plan, setting, Path(folder))
            try:
                done = 0
                while done < len(waiting):
                    begin = time.monotonic()
                    result = await_result(Path(folder) / str(done), ranks, CASE_SECONDS if done else FIRST_SECONDS)
                    seconds = time.monotonic() - begin
                    if isinstance(result, str):
                        yield waiting[done], [], seconds, result
                        done += 1
                        break
                    yield waiting[done], result["losses"], result["seconds"], None
                    done += 1
            finally:
                stop(ranks)
            waiting = waiting[done:]


class ForkedRank:
    """A rank that is a fork of this process, in place of a ``subprocess.Popen``.

    A rehearsal whose process has imported Megatron need not import it four times more.
    """

    def __init__(self, run: Callable[[dict], int], plan: dict, environment: Mapping[str, str], log: Path):
        self._process = multiprocessing.get_context("fork").Process(
            target=self._run, args=(run, plan, environment, log)
        )
        self._process.start()
        self.kill, self.wait = self._process.kill, self._process.join

    def poll(self) -> int | None:
        """Return the exit code; ``None`` while the rank runs."""
        return self._process.exitcode

    @staticmethod
    def _run(run: Callable[[dict], int], plan: dict, environment: Mapping[str, str], log: Path) -> None:
        os.environ.update(environment)
        with log.open("w") as file:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(file.fileno(), stream.fileno())
        sys.exit(run(plan))


def stop(ranks: Sequence[subprocess.Popen | ForkedRank]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait()


def start(
    program: Path, plan: dict, setting: Setting, folder: Path, forked: Callable[[dict], int] | None = None
) -> list[subprocess.Popen | ForkedRank]:
    """Start four ranks of a program that takes a plan, which leave their results in a folder.

    With ``forked``, ranks are forks of this process, and call this function with their plan.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": str(setting.connections),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": "1",
    }
    plan = plan | {"folder": str(folder)}
    ranks: list[subprocess.Popen | ForkedRank] = []
    for rank in range(RANKS):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": "0"}
        if forked is not None:
            ranks.append(ForkedRank(forked, plan, own, folder / f"log-{rank}"))
            continue
        with (folder / f"log-{rank}").open("w") as log:
            command = [sys.executable, str(program), "--rank", json.dumps(plan)]
            ranks.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
    return ranks


def await_result(result: Path, ranks: Sequence[subprocess.Popen | ForkedRank], seconds: float) -> dict | str:
    """The result, or what happened instead."""
    deadline = time.monotonic() + seconds
    while not result.exists():
        dead = [number for number, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
        if dead:
            lines = (result.parent / f"log-{dead[0]}").read_text().strip().splitlines()
            # The last line may be NCCL's, which complains that the rank left without a goodbye.
            words = [line for line in lines if "Error:" in line] or lines
            return f"rank {dead[0]} failed: {words[-1] if words else 'without a word'}"
        if time.monotonic() > deadline:
            return f"no end within {seconds:.0f} s"
        time.sleep(0.05)
    return json.loads(result.read_text())


def run_rank(plan: dict) -> int:
    """One rank: every case in turn. The first rank whose pipeline ends here leaves the result in a file."""
    if plan["rehearse"]:
        from megatron_pipemem.tools.cpu import activate

        activate()
        sys.path.append(str(Path(__file__).parents[2] / "tests" / "transformer_engine"))
        import cuda_graphs

        cuda_graphs.install()  # a stand-in
    import torch
    import torch.distributed as dist

    from megatron_pipemem import queues
    from megatron_pipemem.mcore.step import extension
    from megatron_pipemem.runtime.transport import destroy_groups

    queues.ORDERED_STARTS_SUFFICE = plan["usual_order"]
    extension.LATE_STEPS = extension.FIRST_STEPS  # experts show the usual order in their few steps, too
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(0)
    bound: dict[str, Any] = {"device_id": torch.device("cuda:0")} if plan["bound"] else {}
    dist.init_process_group("nccl", **bound)
    for number, fields in enumerate(plan["cases"]):
        begin = time.perf_counter()
        losses = train(Case(**fields))
        # Megatron forgets its groups and does not close them, and the communicators of all cases would pile up.
        destroy_groups([group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD])
        everyones: list[list[str] | None] = [None] * RANKS
        dist.all_gather_object(everyones, losses)
        if dist.get_rank() == 0:
            (result, *_) = (each for each in everyones if each)
            found = {"losses": result, "seconds": time.perf_counter() - begin}
            write_whole(Path(plan["folder"]) / str(number), json.dumps(found))
    dist.destroy_process_group()
    return 0


def train(case: Case) -> list[str]:
    """Losses of every microbatch, exact, on the last ranks of the pipelines; nothing elsewhere."""
    import torch
    from gpt_chunks import Size, batches, builder, forward_step, make_config, open_pipelines, same_values
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.timers import Timers

    import megatron_pipemem

    devices, chunks, stock = RANKS // case.pipelines, case.chunks, case.schedule == "stock"
    size = Size(64, 4, 4, 32, 256, dtype=torch.bfloat16 if case.experts else torch.float32)
    more: dict[str, Any] = EXPERTS if case.experts else {}
    if case.graph:
        more = {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": STEPS - 2}
    if case.passes:
        more = {"cuda_graph_warmup_steps": STEPS - 2}
    if not stock:
        megatron_pipemem.enable(case.schedule, vocab_cut=case.vocabulary, pairs=case.pairs, graphs=case.passes)
    try:
        open_pipelines(devices, chunks, experts=2 if case.experts else 1, graph=case.graph)
        config = make_config(size, devices, chunks, case.layers, finalize_model_grads_func=finalize_model_grads, **more)
        if case.timers:
            config.timers = Timers(2, "minmax")
        chunk = builder(size, config, case.layers)

        def build(**ends):  # before anything is cut or copied
            model = chunk(**ends)
            same_values(model)
            return model

        if stock:
            groups = ProcessGroupCollection.use_mpu_process_groups()
            ends = {"pre_process": groups.pp.rank() == 0, "post_process": groups.pp.rank() == devices - 1}
            models = [build(**ends, pg_collection=groups)]
        else:
            models = megatron_pipemem.build_model_chunks(build)
        options = DistributedDataParallelConfig(overlap_grad_reduce=True)
        models = [DistributedDataParallel(config, options, model) for model in models]
        config.no_sync_func = [model.no_sync for model in models] if len(models) > 1 else models[0].no_sync
        replica = parallel_state.get_data_parallel_rank()
        run = get_forward_backward_func()
        if case.graph:  # as megatron.training does
            run = FullCudaGraphWrapper(run, config.cuda_graph_warmup_steps)
        losses = []
        for step in range(STEPS):
            for model in models:
                model.zero_grad_buffer()
            data = [batches(size, 100 * replica + step) for _ in models]
            seen = run(
                forward_step_func=forward_step,
                data_iterator=data if chunks > 1 else data[0],
                model=models if len(models) > 1 else models[0],
                num_microbatches=MICROBATCHES,
                forward_only=False,
                **size.message,
            )
            losses += [each["lm loss"].item().hex() for each in seen]
            with torch.no_grad():
                for model in models:
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.main_grad
        torch.cuda.synchronize()
        return losses
    finally:
        megatron_pipemem.disable()
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    sys.exit(main())
