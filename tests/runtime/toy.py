"""A toy pipeline without Megatron: linear layers that split their backward, run by the executor on gloo ranks.

As a program, started by ``conftest.py``, it also runs the cases of ``vocabulary_model.py`` on these ranks. Every rank
writes its results to files.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import vocabulary_model
from forking import fork_ranks
from offload_orders import with_offload, with_recompute

from megatron_pipemem.features.offload.runtime import OffloadEngine
from megatron_pipemem.features.offload.runtime.engine import OffloadActions
from megatron_pipemem.runtime.activation_ledger import (
    ActivationLedger,
    BytesBySize,
    bytes_per_action,
    predict_peak_bytes,
)
from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.runtime.selective import region
from megatron_pipemem.runtime.trace import Trace
from megatron_pipemem.runtime.transport import MessageFormat, Pipeline, Transport, connect, polls_departures
from megatron_pipemem.runtime.weight_gradients import DeferredWeightGradient, current_queue
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Program, Schedule
from megatron_pipemem.schedule.validator import validate_program

DEVICES = 4
WIDTH, ROWS = 6, 3


@dataclass
class Gemm(DeferredWeightGradient):
    weight: torch.nn.Parameter = field()
    input: torch.Tensor
    grad_output: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.input, self.grad_output

    def run(self) -> None:
        gradient = self.grad_output.t() @ self.input
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad.add_(gradient)


class SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, boxed_weight, queue):
        ctx.save_for_backward(input)
        ctx.weight, ctx.queue = boxed_weight[0], queue
        return input @ boxed_weight[0].t()

    @staticmethod
    def backward(ctx, grad_output):
        (input,) = ctx.saved_tensors
        ctx.queue.put(Gemm(ctx.weight, input.detach(), grad_output.detach()))
        return grad_output @ ctx.weight, None, None


class Stage(torch.nn.Module):
    """Two linear layers with a tanh, which is cheap to run again; splits its backward while a queue is collecting."""

    def __init__(self, index: int):
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 2) for _ in range(2)
        )
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for weight in self.weights:
            queue = current_queue()
            x = torch.nn.functional.linear(x, weight) if queue is None else SplitLinear.apply(x, [weight], queue)
            x = region(torch.tanh, lambda: nullcontext)(x)
        return x


def batch(microbatch: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 + microbatch))


def rows_of(microbatch: int, variable: str) -> int:
    """``variable``: whether every ``message`` tells its shape, or all of a ``step`` are known; empty if there is but one."""
    return ROWS + (microbatch % 3 if variable else 0)


class Runner:
    """What ``ChunkStage`` is to Megatron, for the toy."""

    def __init__(
        self,
        index: int,
        num_stages: int,
        engine: OffloadEngine | None = None,
        variable: str = "",
        fail_at: int | None = None,
    ):
        self.stage = Stage(index)
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.variable, self.fail_at = variable, fail_at
        self.engine = engine
        self.losses: list[torch.Tensor] = []
        self.reductions = 0

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        output = self._run(microbatch, input)
        if self.is_last:
            self.losses.append(output.detach().clone())
        return output

    def recompute(self, microbatch: int, input: torch.Tensor | None) -> torch.Tensor:
        return self._run(microbatch, input)

    def _run(self, microbatch: int, input: torch.Tensor | None) -> torch.Tensor:
        if microbatch == self.fail_at:
            raise RuntimeError("boom")
        x = batch(microbatch, rows_of(microbatch, self.variable)) if self.is_first else input
        if self.is_first:
            x.requires_grad_(torch.is_grad_enabled())
            if self.engine is not None:
                self.engine.exclude([x])
        output = self.stage(x)
        return output.square().sum() if self.is_last else output

    def release_output(self, output: torch.Tensor) -> None:
        output.data = torch.empty(1)

    def backward(self, microbatch, input, output, output_gradient):
        torch.autograd.Variable._execution_engine.run_backward(
            (output,),
            (torch.ones_like(output) if output_gradient is None else output_gradient,),
            False,
            False,
            (),
            True,
            True,
        )
        return None if input is None else input.grad

    def reduce_gradients(self) -> None:
        self.reductions += 1


def alone(placement: Placement) -> Pipeline:
    """A pipeline of this process, which sends nothing."""
    return Pipeline(None, placement, 0, range(1), {})


def run_step(
    program: Program,
    pipeline: Pipeline,
    engine: OffloadEngine | None = None,
    in_sequence: bool = False,
    **runner_options,
):
    """One step on this rank. Returns the runners, the ledger and the trace."""
    placement, device = program.placement, pipeline.device
    variable = runner_options.get("variable", "")
    runners = {
        stage: Runner(stage, placement.num_stages, engine, **runner_options) for stage in placement.stages[device]
    }
    shapes = [(rows_of(microbatch, variable), WIDTH) for microbatch in range(program.schedule.num_microbatches)]
    message = MessageFormat(
        None if variable else (ROWS, WIDTH),
        torch.float32,
        torch.device("cpu"),
        shapes if variable == "step" else None,
    )
    polls = polls_departures(program)
    transport = Transport(pipeline, message, in_sequence, polls)
    permanent = [p for runner in runners.values() for p in runner.stage.parameters()]
    ledger, trace = ActivationLedger(permanent, [(1, rows) for rows, _ in shapes]), Trace()
    with engine.step(permanent, lambda tensor: ledger.hold(tensor)) if engine else nullcontext():
        features = [OffloadActions(engine)] if engine else []
        Executor(program, device, runners, transport, features, ledger, trace).run()
    return runners, ledger, trace


def make_schedule(case: dict, devices: int) -> Schedule:
    schedule = build_schedule(
        case["schedule"], num_devices=devices, num_microbatches=case["microbatches"], **case.get("options", {})
    )
    schedule = with_recompute(schedule, case.get("recompute", ()))
    schedule = with_recompute(schedule, case.get("selective", ()), Kind.RS)
    return with_offload(schedule, case.get("offload", ()), case.get("every", 1))


def make_program(case: dict) -> Program:
    schedule, single_queue = make_schedule(case, DEVICES), case.get("single_queue", False)
    program = lower(schedule.forward_only() if case["forward_only"] else schedule, single_queue=single_queue)
    validate_program(program, single_queue=single_queue)
    return program


def run_case(case: dict, program: Program, device: int, connections: dict, engine: OffloadEngine) -> dict:
    schedule, forward_only = program.schedule, case["forward_only"]
    pipeline = connections.get(schedule.placement.devices)
    if pipeline is None:
        pipeline = connections[schedule.placement.devices] = connect(schedule.placement, dist.group.WORLD, "cpu")
    with torch.set_grad_enabled(not forward_only):
        runners, ledger, trace = run_step(
            program, pipeline, engine, case.get("single_queue", False), variable=case["variable"]
        )
    moved = engine.statistics()
    seen = {
        "losses": [loss.item() for runner in runners.values() for loss in runner.losses],
        "actions": [str(t.action) for t in trace.actions()],
        "reductions": {stage: runner.reductions for stage, runner in runners.items()},
        "left_bytes": ledger.entries[-1].bytes,
        "counted_peak": ledger.peak,
        "counted_host_peak": moved.host_peak_bytes,
        "ledger_host_peak": ledger.host_peak,
        "left_away_bytes": engine.host_bytes,
        "bytes_out": moved.bytes_out,
        "bytes_in": moved.bytes_in,
        "in_vain": moved.held_elsewhere_bytes,
    }
    if not forward_only:
        seen["gradients"] = {
            stage: [p.grad.flatten().tolist() for p in runner.stage.parameters()] for stage, runner in runners.items()
        }
        actions = program.actions[device]
        for what, on_host in (("predicted_peak", False), ("predicted_host_peak", True)):
            if case["variable"]:
                foretold = BytesBySize(on_host)
                foretold.learn(ledger.entries)
                seen[what] = foretold.peak(actions, ledger.tokens_of)
            else:
                changes = bytes_per_action(ledger.entries, program.placement.num_stages, on_host=on_host)
                seen[what] = predict_peak_bytes(actions, changes)
    return seen


def run_cases(cases: list[dict], programs: list[Program], out: Path) -> None:
    rank = dist.get_rank()
    connections: dict = {}
    engine = OffloadEngine.on(torch.device("cpu"), 1 << 20, min_bytes=1, guard=True)
    seen = [run_case(case, program, rank, connections, engine) for case, program in zip(cases, programs, strict=True)]
    engine.close()
    (out / f"rank{rank}.json").write_text(json.dumps(seen))


def run_all(cases: list[dict], programs: list[Program], vocabulary_cases: list | None, out: Path) -> None:
    run_cases(cases, programs, out)
    if vocabulary_cases is not None:
        vocabulary_model.run_cases(vocabulary_cases, out)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    cases, of_vocabulary = json.loads((folder / "cases.json").read_text()), folder / "cases.pt"
    vocabulary_cases = torch.load(of_vocabulary, weights_only=False) if of_vocabulary.exists() else None
    programs = [*map(make_program, cases)]
    sys.exit(fork_ranks(DEVICES, run_all, cases, programs, vocabulary_cases, folder))
