"""Describe a run: a model on a cluster, its parallelism, its schedule, and the other flags of its training script.

In a file, a run is a flat mapping of Megatron's argument names (``keys``):

model: llama3-8b
cluster: h100-80g
tp: 4
pp: 4
dp: 2
global_batch: 64
schedule: v-half
train_iters: 1000
save_interval: 100
lr: 3.0e-4
output: out/runs/mine
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from megatron_pipemem.errors import ConfigError, PipememError
from megatron_pipemem.model.model import (
    BY_ACTION,
    Execution,
    Fp8,
    Model,
    Recomputable,
    Recompute,
    RecomputeMethod,
    Trainable,
    attention_of,
    fullest_load,
)
from megatron_pipemem.queues import CONNECTIONS
from megatron_pipemem.request import CAP, FILE_SUFFIX, SENT, WEIGHTS, ScheduleOptions
from megatron_pipemem.schedule.options import (
    AUTO,
    COUNT,
    COUNT_OR_ZERO,
    GATHERED,
    OFF,
    SHARDED,
    STOCK,
    Offload,
    early_wgrad,
)
from megatron_pipemem.schedule.registry import family, register_module
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.values import MOST_DEVICES, Amount, Count, Devices, Limited, refuse_if


@dataclass(frozen=True)
class Parallelism(Limited):
    """The number of ranks for each kind of parallelism, and the batch sizes."""

    tp: Devices = 1  # tensor parallelism
    pp: Devices = 1  # pipeline
    dp: Devices = 1  # data parallelism
    cp: Devices = 1  # context parallelism
    ep: Devices = 1  # expert parallelism, within tp x cp x dp
    etp: Devices | None = None  # tensor-parallel ranks over which an expert is cut; default: tp
    chunks: Count | None = None  # stages per pipeline rank, for schedules that allow several numbers
    micro_batch: Count = 1  # sequences per microbatch
    global_batch: Count = 1  # sequences per step, over all data-parallel ranks
    sequence_parallel: bool = False
    # Tokens of the fullest rank's experts, as a multiple of even routing. Plans reserve memory for them.
    expert_load: Amount = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        too_many = f"makes {self.ranks:,} ranks; give at most {MOST_DEVICES:,}"
        refuse_if(self.ranks > MOST_DEVICES, "too-large", "tp", too_many)

    @property
    def ranks(self) -> int:
        """The number of devices of the whole run."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def cuts_layers(self) -> bool:
        """Whether tensor or context parallelism cuts layers, for which Megatron demands one connection before Blackwell."""
        return self.tp > 1 or self.cp > 1

    def why_not_experts(self) -> str | None:
        """Return the reason why experts cannot be divided among these ranks; ``None`` if they can."""
        ranks, etp = self.tp * self.dp * self.cp, self.etp or self.tp
        if ranks % (etp * self.ep) == 0:
            return None
        remedy = "such as etp to 1, which leaves experts whole" if etp > 1 else "such as ep to a divisor of it"
        return f"tp x dp x cp = {ranks} is not a multiple of etp x ep = {etp} x {self.ep}; change one of these sizes, {remedy}"

    @property
    def microbatches(self) -> int:
        """The number of microbatches that each pipeline runs in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    def with_microbatches(self, count: int) -> Parallelism:
        """Return the same ranks with a global batch that gives each pipeline ``count`` microbatches."""
        return replace(self, global_batch=count * self.micro_batch * self.dp)


SCRIPTS = (Path(__file__).parents[2] / "scripts").resolve()
"""The folder with the training script and the scripts that start it."""

REPORT = "report.json"
"""The name of a run's report in its output folder."""

FREEZES: dict[Trainable, str] = {
    "language": "freeze-language-model",
    "tower": "freeze-vision-model",
    "projection": "freeze-vision-projection",
}
"""Flags, named after Megatron-Bridge's settings, that freeze a part of a model with a vision tower."""

ADAPTERS = "adapter-rank"
"""The key of the rank of low-rank adapters among a run's flags. They freeze the language model. Megatron has no such flag."""

TP_OVERLAP, EP_OVERLAP = OVERLAPS = ("tp-comm-overlap", "overlap-moe-expert-parallel-comm")
"""Flags that hide messages within layers. Only Megatron's own schedules allow the first one. With the second one forwards
and backwards run in pairs.
"""
RECOMPUTE_FLAG = "pipemem-recompute"
NUMBERS = {"train-iters": COUNT, "save-interval": COUNT_OR_ZERO}
"""Flags that launches and reports read as numbers. No price depends on them."""


@dataclass(frozen=True)
class ScheduleChoice(ScheduleOptions, Limited):
    """The schedule of a run and its options. ``ScheduleOptions`` has the fields that are also flags."""

    name: str = STOCK  # a family, a schedule file (.csv), auto for a search, or stock for Megatron's own schedule
    memory_cap: str | None = field(default=None, metadata={"flag": CAP})
    slices: Count | None = None  # pieces into which sequences are cut, for schedules that allow several numbers
    offload: Offload = field(default=OFF, metadata={"flag": SENT})
    microbatch_costs: str | None = field(default=None, metadata={"flag": WEIGHTS})
    recompute: Recompute = "none"
    recompute_method: RecomputeMethod = "uniform"  # see Execution
    recompute_num_layers: Count = 1
    # modules that ``selective`` recomputes (see Execution)
    recompute_modules: tuple[Recomputable, ...] = ("core_attn",)
    module: str | None = None  # Python file or module that registers the family

    @property
    def recomputes_by_action(self) -> bool:
        """Whether selective recompute is an action of the schedule, RS.

        Otherwise Megatron itself recomputes, if ``recompute`` is not ``none``. ``full`` is always Megatron's.
        """
        return self.recompute == "selective" and self.name != STOCK and set(self.recompute_modules) == set(BY_ACTION)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_fixed = self.name == STOCK or self.name.endswith(FILE_SUFFIX)
        fixed = f"is {self.slices}, but schedule {self.name} has no option slices; name one that has, or auto"
        refuse_if((self.slices or 1) > 1 and is_fixed, "no-slices", "slices", fixed)
        with _at("early_wgrad"):
            early_wgrad(self.early_wgrad, 0, 0)
        with _at("module"):
            if self.module is not None:
                register_module(self.module)


@contextmanager
def _at(key: str) -> Iterator[None]:
    """Turn an error of this package that the block raises into a ConfigError about ``key``."""
    try:
        yield
    except PipememError as error:
        raise ConfigError(error.code, str(error), key=key) from error


@dataclass(frozen=True)
class Run:
    """Everything that is needed to start a training run."""

    config_folder: ClassVar[str] = "runs"

    model: Model
    cluster: Cluster
    parallelism: Parallelism = field(default_factory=Parallelism)
    schedule: ScheduleChoice = field(default_factory=ScheduleChoice)
    flags: dict[str, Any] = field(default_factory=dict)
    """Every other flag of the training script, by its name without leading dashes: ``{"lr": 1e-4}`` is ``--lr 1e-4``,
    ``True`` gives a bare flag, ``False`` and ``None`` leave the flag out, a list gives several values."""
    environment: dict[str, str] = field(default_factory=dict)  # environment variables of every rank
    output: str = "out/runs/run"  # folder of the report, timelines and checkpoints, relative to the working directory
    trace: bool = False  # draw the timelines of the plan and of the run
    script: str | None = None  # path of the training script; default: pretrain_gpt.py in SCRIPTS

    def __post_init__(self) -> None:
        for flag, limit in NUMBERS.items():
            problem = None if self.flags.get(flag) is None else limit.problem(self.flags[flag])
            refuse_if(problem, "bad-number", f"--{flag}", str(problem))

    @property
    def report(self) -> Path:
        """Path of the JSON report that the run writes."""
        return Path(self.output) / REPORT

    @property
    def checkpoints(self) -> str:
        """Path of the folder with the run's checkpoints."""
        return f"{self.output}/checkpoints"

    @property
    def is_unfinished(self) -> bool:
        """Whether the run saves checkpoints and has one from before its last step, from which a restart continues."""
        try:
            saved = int((Path(self.checkpoints) / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return self.save_interval > 0 and saved < self.iterations

    @property
    def on_cpu(self) -> bool:
        return self.cluster.backend == "gloo"

    @property
    def demanded_environment(self) -> dict[str, str]:
        """The environment without which Megatron stops at the start. It demands none of FSDP, nor beside expert overlap."""
        connections = self.cluster.max_connections
        free = self.pairs or any(self.flags.get(name) for name in ("use-megatron-fsdp", "use-torch-fsdp2"))
        return (
            {} if connections is None or free or not self.parallelism.cuts_layers else {CONNECTIONS: str(connections)}
        )

    @property
    def precision(self) -> Literal["bf16", "fp16", "fp32"]:
        """The type of activations and gradients: ``bf16`` if no flag says another one."""
        if self.flags.get("fp16"):
            return "fp16"
        return "bf16" if self.flags.get("bf16", True) else "fp32"

    @property
    def iterations(self) -> int:
        """The number of training steps of the run, over all restarts."""
        return int(self.flags.get("train-iters") or 10)

    @property
    def save_interval(self) -> int:
        """The number of steps between checkpoints, 0 for none. A restarted run resumes from the last checkpoint."""
        return int(self.flags.get("save-interval") or 0)

    @property
    def data(self) -> list[str]:
        """The prefix of a Megatron dataset, or weights and prefixes in turn; empty for made-up tokens."""
        data = self.flags.get("data-path") or ()
        return data.split() if isinstance(data, str) else [*map(str, data)]

    @property
    def pairs(self) -> bool:
        """Whether forwards run together with backwards, which hides the exchange of the experts' tokens."""
        return bool(self.flags.get(EP_OVERLAP))

    @property
    def has_graphs(self) -> bool:
        """Whether passes, layers or the step run as CUDA graphs."""
        return self.flags.get("cuda-graph-impl") not in (None, "none")

    @property
    def delays_updates(self) -> bool:
        """Whether the optimizer step of a batch waits for its gradient norm while the next batch already runs."""
        name = self.schedule.name
        if not self.schedule.overlap_steps or name in (AUTO, STOCK) or name.endswith(FILE_SUFFIX):
            return False
        return family(name).asynchronous

    @property
    def rolls_back(self) -> bool:
        """Whether an optimizer step may have to be undone, because it was taken before its gradient norm was known."""
        clip = self.flags.get("clip-grad")  # Megatron clips by default
        may_clip = clip is None or float(clip) > 0
        return self.schedule.overlap_steps and may_clip and not self.delays_updates

    @property
    def units(self) -> Units:
        """The units of a pipeline's step: its microbatches, each whole or in slices."""
        return Units.equal(self.parallelism.microbatches, self.schedule.slices or 1)

    def with_parts(self, parts: int) -> Run:
        """Return the run with so many parts of every microbatch. If it has several, its schedule is chosen later."""
        choice = replace(self.schedule, slices=parts, name=AUTO) if parts > 1 else replace(self.schedule, slices=None)
        return replace(self, schedule=choice)

    @property
    def schedule_options(self) -> dict[str, Any]:
        """Options of the schedule, with chunks and slices. A schedule file keeps its own, so these are not added."""
        if self.schedule.name.endswith(FILE_SUFFIX):
            return self.schedule.options
        counts = {"chunks": self.parallelism.chunks, "slices": self.schedule.slices}
        return self.schedule.options | {key: value for key, value in counts.items() if value is not None}

    @property
    def execution(self) -> Execution:
        """The settings that decide the costs of a microbatch on one rank."""
        cut, choice = self.parallelism, self.schedule
        backend, fuses_softmax = self.flags.get("attention-backend"), not self.flags.get("no-masked-softmax-fusion")
        attention, fused_softmax = attention_of(
            not self.on_cpu, str(backend), self.implementation, self.precision, fuses_softmax
        )
        return Execution(
            micro_batch=cut.micro_batch,
            tp=cut.tp,
            sequence_parallel=cut.sequence_parallel,
            cp=cut.cp,
            gathers_keys=cut.cp > 1 and not self.units.are_whole,
            ep=cut.ep,
            etp=cut.etp,
            recompute=choice.recompute,
            recompute_modules=choice.recompute_modules,
            recompute_method=choice.recompute_method,
            recompute_num_layers=choice.recompute_num_layers,
            attention=attention,
            fused_softmax=fused_softmax,
            precision=self.precision,
            fp8=cast(Fp8, self.flags.get("fp8-recipe", "delayed") if self.flags.get("fp8-format") else "none"),
            implementation=self.implementation,
            fused_rotations=not (self.on_cpu or self.flags.get("no-rope-fusion")),
            rotary_percent=float(str(self.flags.get("rotary-percent", 1.0))),
            expert_load=self._expert_load(),
            tp_overlap=choice.name == STOCK and bool(self.flags.get(TP_OVERLAP)),
            wgrad_inputs=self._wgrad_inputs(),
            early_wgrad=choice.early_wgrad,
            frozen=tuple(part for part, flag in FREEZES.items() if self.flags.get(flag)),
            adapters=int(str(self.flags.get(ADAPTERS, 0))),
        )

    def _wgrad_inputs(self) -> Literal["sharded", "gathered"]:
        if self.schedule.wgrad_inputs == AUTO:
            return SHARDED if self.parallelism.tp <= self.cluster.devices_per_node else GATHERED
        return self.schedule.wgrad_inputs

    def _expert_load(self) -> float:
        """Return the load of the fullest rank's experts (``fullest_load``)."""
        capacity = self.flags.get("moe-expert-capacity-factor")
        return fullest_load(
            self.parallelism.ep,
            None if capacity is None else float(str(capacity)),
            bool(self.flags.get("moe-pad-expert-input-to-capacity")),
            self.parallelism.expert_load,
        )

    @property
    def implementation(self) -> Literal["local", "transformer_engine"]:
        """Whether layers are Megatron's own or Transformer Engine's. The default is ``local`` on CPU ranks only."""
        default = "local" if self.on_cpu else "transformer_engine"
        return "local" if self.flags.get("transformer-impl", default) == "local" else "transformer_engine"


def resolve_script(run: Run) -> Path:
    """Return the path of the run's training script. Raise a ConfigError if the file does not exist."""
    if run.script is None:
        return SCRIPTS / "pretrain_gpt.py"
    path = Path(run.script)
    refuse_if(not path.is_file(), "no-file", "script", f"there is no training script {path}; give the path of one")
    return path
