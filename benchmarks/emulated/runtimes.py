"""The runtimes that are compared. Each prepares a step of the same sleeping stages and runs it as it would any model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from emulated.device import ROWS, WIDTH, Device, SleepingStage
from emulated.vocabulary import SleepingVocabulary, open_channels
from megatron_pipemem.features.slices.runtime import KeyValueCache
from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.runtime.transport import MessageFormat, Transport, connect
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.schedule.validator import validate_program

CPU = torch.device("cpu")

MEGATRON = {"1f1b": 1, "interleaved": 2}
"""Stock Megatron-Core's pipelined functions, and their chunks per device."""

TORCH = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipe-v": pipelining.schedules.ScheduleDualPipeV,
}


@dataclass(frozen=True)
class Step:
    """One way to run a training step on this rank.

    Args:
        runtime: whose code runs it.
        name: the schedule, in the runtime's own spelling.
        device: records what this rank does.
        run: runs one step.
        plan: the order it promises.
        costs: what its passes take.
        executor: of ours, makes the executor of one step.
    """

    runtime: str
    name: str
    device: Device
    run: Callable[[], object]
    plan: Schedule
    costs: Costs
    executor: Callable[[], Executor] | None = None


def our_steps(schedules: Iterable[tuple[str, Schedule, Costs]], keys_and_values: float = 0.0) -> Iterator[Step]:
    """This project's executor and transport, without Megatron around them.

    Args:
        schedules: name, order and prices of each.
        keys_and_values: of what F keeps, the part that is keys and values, where sequences are cut into equal slices.
    """
    pipelines = {}
    vocabulary_channels = None
    for name, schedule, costs in schedules:
        placement = schedule.placement
        program = lower(schedule)
        validate_program(program)
        if placement.devices not in pipelines:
            assert dist.group.WORLD is not None
            pipelines[placement.devices] = connect(placement, dist.group.WORLD, CPU)
        device = device_of(schedule, costs, keys_and_values)
        kind: Callable[[Device, int, Placement], _Runner] = _Runner
        vocabulary = None
        if schedule.vocabulary_barriers:
            vocabulary_channels = vocabulary_channels or open_channels()
            kind, vocabulary = _RunnerBetween, SleepingVocabulary(device, schedule, vocabulary_channels)
        elif not schedule.units.are_whole:
            kind = partial(_RunnerOfSlices, slices=schedule.units.parts, keys_and_values=keys_and_values)
        runners = {stage: kind(device, stage, placement) for stage in placement.stages[dist.get_rank()]}
        message = MessageFormat((ROWS, 1, WIDTH), torch.float32, CPU)

        def executor(
            program=program,
            runners=runners,
            pipeline=pipelines[placement.devices],
            message=message,
            vocabulary=vocabulary,
        ):
            features = [vocabulary.passes()] if vocabulary else []
            return Executor(program, dist.get_rank(), runners, Transport(pipeline, message), features)

        def run(made=executor) -> None:
            made().run()

        yield Step("pipemem", name, device, run, schedule, costs, executor)


def device_of(schedule: Schedule, costs: Costs, keys_and_values: float = 0.0) -> Device:
    """A device whose passes take, and whose activations count for, what the costs say of the schedule's microbatches, or of
    their slices without keys and values.
    """
    weights, slices = costs.microbatch, schedule.units.parts
    tokens: Sequence[float] = weights.tokens if weights else ()
    if slices > 1:
        tokens = [(1 - keys_and_values) / slices] * len(schedule.units)
    return Device(ActionPrices(schedule, costs).of, tokens)


class _Runner:
    """A sleeping stage as our executor asks for it."""

    def __init__(self, device: Device, stage: int, placement: Placement):
        self._stage = SleepingStage(device, stage)
        self._is_last = placement.next_stage(stage) is None

    def forward(self, microbatch: int, input: torch.Tensor | None) -> torch.Tensor:
        output = self._stage(torch.zeros(ROWS, 1, WIDTH) if input is None else input)
        return output.sum() if self._is_last else output

    def release_output(self, output: torch.Tensor) -> None:
        """Nothing to gain: outputs are a few bytes."""

    def backward(self, microbatch, input, output, output_gradient):
        torch.autograd.backward(output, output_gradient)
        return None if input is None else input.grad

    def reduce_gradients(self) -> None:
        """One data-parallel rank has nothing to sum."""


class _RunnerBetween(_Runner):
    """A sleeping stage where embedding and head are not in the stages."""

    def forward(self, microbatch: int, input: torch.Tensor | None) -> torch.Tensor:
        assert input is not None, "the embedding is before the first stage"
        # Its output has the batch first.
        return self._stage(input.transpose(0, 1).contiguous() if self._stage.stage == 0 else input)


class _RunnerOfSlices(_Runner):
    """A sleeping stage whose slices share keys and values, kept as in a run."""

    def __init__(self, device: Device, stage: int, placement: Placement, slices: int, keys_and_values: float):
        super().__init__(device, stage, placement)
        self._device, self._slices, self._share = device, slices, keys_and_values
        self._caches: dict[int, KeyValueCache] = {}

    def forward(self, microbatch: int, input: torch.Tensor | None) -> torch.Tensor:
        number, part = divmod(microbatch, self._slices)
        if part == 0:
            self._caches[number] = KeyValueCache(self._slices * ROWS, self._hold)
        output = self._stage(torch.zeros(ROWS, 1, WIDTH) if input is None else input)
        output = output + self._caches[number].append(output, part * ROWS).mean(0, keepdim=True)
        return output.sum() if self._is_last else output

    def backward(self, microbatch, input, output, output_gradient):
        gradient = super().backward(microbatch, input, output, output_gradient)
        if microbatch % self._slices == 0:
            del self._caches[microbatch // self._slices]
        return gradient

    def _hold(self, tensor: torch.Tensor) -> None:
        self._device.hold(tensor, self._share * tensor.size(0) / (self._slices * ROWS))


def torch_steps(microbatches: int, costs: Costs) -> Iterator[Step]:
    """``torch.distributed.pipelining``."""
    rank, devices = dist.get_rank(), dist.get_world_size()
    looped = tuple(range(devices))
    placements = {
        "1f1b": looped,
        "interleaved": looped + looped,
        "zbv": looped + looped[::-1],
        "dualpipe-v": looped + looped[::-1],
    }
    for name, schedule_class in TORCH.items():
        placement = Placement.from_devices(placements[name])
        device = device_of(Schedule(name, placement, Units.equal(microbatches), ()), costs)
        stages = [
            pipelining.PipelineStage(SleepingStage(device, stage), stage, placement.num_stages, CPU)
            for stage in placement.stages[rank]
        ]
        single = issubclass(schedule_class, pipelining.schedules.PipelineScheduleSingle)
        schedule = schedule_class(stages[0] if single else stages, microbatches, loss_fn=lambda output, _: output.sum())
        batch = torch.zeros(microbatches * ROWS, WIDTH)

        def run(schedule=schedule, stages=stages, batch=batch):
            inputs = (batch,) if any(stage.is_first for stage in stages) else ()
            target = batch if any(stage.is_last for stage in stages) else None
            schedule.step(*inputs, target=target, return_outputs=False)

        # The table of the one-stage class is off by one microbatch on its last rank, and its runtime does not use it.
        plan = _our_plan(name, microbatches) if single else _torch_plan(schedule)
        yield Step("torch", name, device, run, plan, costs)


def _our_plan(name: str, microbatches: int) -> Schedule:
    return build_schedule(name, num_devices=dist.get_world_size(), num_microbatches=microbatches)


def _torch_plan(schedule) -> Schedule:
    cells = (["" if action is None else str(action) for action in row] for row in schedule.pipeline_order.values())
    return Schedule.from_csv("".join(",".join(row) + "\n" for row in cells), "torch")


def megatron_steps(microbatches: int, costs: Costs) -> Iterator[Step]:
    """Stock Megatron-Core on CPU ranks, its schedule functions called directly. Its interleaved one takes multiples of the
    devices only, and is left out for other numbers of microbatches.
    """
    from megatron_pipemem.tools.cpu import activate

    activate()
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.transformer import TransformerConfig
    from stock_steps import stock_config, stock_groups

    rank, devices = dist.get_rank(), dist.get_world_size()
    groups = stock_groups(devices)

    class Chunk(torch.nn.Module):
        def __init__(self, config: TransformerConfig, stage: SleepingStage, vp_stage: int | None):
            super().__init__()
            self.config, self.stage, self.vp_stage = config, stage, vp_stage
            self.model_type = ModelType.encoder_or_decoder
            self.input: torch.Tensor | None = None

        def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
            (self.input,) = tensors

        def forward(self) -> torch.Tensor:
            return self.stage(torch.zeros(ROWS, 1, WIDTH) if self.input is None else self.input)

    def forward_step(_, chunk: Chunk):
        return chunk(), lambda output: (output.sum(), {})

    for name, chunks in MEGATRON.items():
        if chunks > 1 and microbatches % devices:
            continue
        config = stock_config(devices, chunks, WIDTH, deallocate_pipeline_outputs=True)
        placement = Placement.from_devices(tuple(range(devices)) * chunks)
        plan = _our_plan(name, microbatches)
        device = device_of(plan, costs)
        models = [
            Chunk(config, SleepingStage(device, stage), chunk if chunks > 1 else None)
            for chunk, stage in enumerate(placement.stages[rank])
        ]
        function = (
            schedules.forward_backward_pipelining_with_interleaving
            if chunks > 1
            else schedules.forward_backward_pipelining_without_interleaving
        )
        run = partial(
            function,
            forward_step_func=forward_step,
            data_iterator=[None] * chunks,
            model=models,
            num_microbatches=microbatches,
            seq_length=ROWS,
            micro_batch_size=1,
            p2p_communicator=P2PCommunicator(groups.pp, config),
            pg_collection=groups,
        )
        # Our families of these names are Megatron's orders to the letter.
        yield Step("megatron", name, device, run, plan, costs)
