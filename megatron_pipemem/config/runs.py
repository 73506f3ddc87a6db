"""Describe a run: a model on a cluster, cut up in a given way, under a schedule, with the rest of its flags.

model: llama3-8b
cluster: h100-80g
parallelism: {tp: 4, pp: 4, dp: 2, micro_batch: 1, global_batch: 64}
schedule: {name: v-half}
training: {iterations: 1000, save_interval: 100}
megatron: {lr: 3.0e-4, bf16: true}
output: out/runs/mine
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from megatron_pipemem.config.cluster import Cluster
from megatron_pipemem.config.model import Execution, Fp8, Model, Recomputable, Recompute
from megatron_pipemem.config.values import MOST_DEVICES, Amount, Count, CountOrZero, Devices, Limited
from megatron_pipemem.errors import ConfigError, PipememError
from megatron_pipemem.request import CAP, FILE_SUFFIX, SENT, WEIGHTS, ScheduleOptions
from megatron_pipemem.schedule.options import AUTO, GATHERED, OFF, SHARDED, STOCK, Offload, early_weights
from megatron_pipemem.schedule.registry import family, register_module


@dataclass(frozen=True)
class Parallelism(Limited):
    """Describe how a model is cut up.

    Args:
        tp: tensor-parallel ranks.
        pp: pipeline ranks.
        dp: data-parallel ranks.
        cp: context-parallel ranks.
        ep: expert-parallel ranks, of the data-parallel ones.
        chunks: stages per pipeline rank, where the schedule leaves a choice.
        micro_batch: sequences of a microbatch.
        global_batch: sequences of a step, over all data-parallel ranks.
        sequence_parallel: shard what lies between tensor-parallel layers along the sequence.
        expert_load: the most tokens that the experts of a rank get, over an even share: plans fit up to that.
    """

    tp: Devices = 1
    pp: Devices = 1
    dp: Devices = 1
    cp: Devices = 1
    ep: Devices = 1
    chunks: Count | None = None
    micro_batch: Count = 1
    global_batch: Count = 1
    sequence_parallel: bool = False
    expert_load: Amount = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks > MOST_DEVICES:
            raise ConfigError("too-large", f"makes {self.ranks:,} ranks; give at most {MOST_DEVICES:,}", key="tp")

    @property
    def ranks(self) -> int:
        """Devices of the whole run."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def microbatches(self) -> int:
        """Microbatches of a pipeline in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    def with_microbatches(self, count: int) -> Parallelism:
        """Return the same ranks with a global batch of so many microbatches per pipeline."""
        return replace(self, global_batch=count * self.micro_batch * self.dp)


MOCK = "mock"
"""Made-up tokens in place of a dataset."""

SCRIPTS = (Path(__file__).parents[1] / "scripts").resolve()
"""The folder of the training script and of what starts it."""

REPORT = "report.json"
"""What a run writes about itself into its output folder."""

STOCK_OVERLAPS = {"tp_overlap": "tp-comm-overlap", "ep_overlap": "overlap-moe-expert-parallel-comm"}
"""Fields of ``Execution`` -> flags that hide messages within layers under Megatron's own schedules alone."""

BY_ACTION = ("core_attn", "layernorm", "activation")
"""What ``--pipemem-recompute selective`` makes again of layers whose attention is not fused and whose norms stand alone."""


@dataclass(frozen=True)
class ScheduleChoice(ScheduleOptions, Limited):
    """Say which schedule runs, and how.

    Args:
        name: a family of ``pipemem schedules``, a schedule file (``.csv``), ``auto`` for a search, or ``stock`` for
            Megatron's own.
        memory_cap: the most a rank may hold: activation units (``"0.5"``) or, with ``auto``, bytes (``"6GiB"``).
        slices: number of pieces into which every microbatch is cut along its sequence, where the schedule leaves a choice.
        offload: which activations wait on the host: ``off``, ``half``, ``full`` or ``auto``.
        microbatch_costs: ``tokens``, ``FLOPs``, a JSON file of weights, or ``module:function``.
        recompute: which forwards run again before their backward, see ``Execution``.
        recompute_modules: what ``selective`` runs again; ``BY_ACTION`` are run again by an action of the schedule, where it is
            not Megatron's own.
        module: Python file or module that adds the family to the table.
    """

    name: str = STOCK
    memory_cap: str | None = field(default=None, metadata={"flag": CAP})
    slices: Count | None = None
    offload: Offload = field(default=OFF, metadata={"flag": SENT})
    microbatch_costs: str | None = field(default=None, metadata={"flag": WEIGHTS})
    recompute: Recompute = "none"
    recompute_modules: tuple[Recomputable, ...] = ("core_attn",)
    module: str | None = None

    @property
    def recomputes_by_action(self) -> bool:
        """Whether what is recomputed is an action of the schedule, rather than Megatron's own business."""
        return self.recompute == "selective" and self.name != STOCK and set(self.recompute_modules) == set(BY_ACTION)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.slices or 1) > 1 and (self.name == STOCK or self.name.endswith(FILE_SUFFIX)):
            raise ConfigError(
                "no-slices",
                f"is {self.slices}, but schedule {self.name} cannot be told how to cut microbatches; name one with an option "
                "slices, or auto",
                key="slices",
            )
        try:
            early_weights(self.early_weights, 0, 0)
        except PipememError as error:
            raise ConfigError(error.code, str(error), key="early_weights") from error
        if self.module is not None:
            try:
                register_module(self.module)
            except PipememError as error:
                raise ConfigError(error.code, str(error), key="module") from error


@dataclass(frozen=True)
class Training(Limited):
    """Say how long to train, on what, and what is kept.

    Args:
        iterations: training steps in all, over all restarts.
        save_interval: steps between checkpoints; 0 for none. Checkpoints are resumed from when the run starts again.
        load: folder of a checkpoint to start from, where the run has none of its own yet.
        data: prefix of a Megatron dataset (files ``.bin`` and ``.idx``), several as ``weight prefix weight prefix``, or
            ``mock`` for made-up tokens.
        cache: folder of the datasets' index files.
    """

    iterations: Count = 10
    save_interval: CountOrZero = 0
    load: str | None = None
    data: str = MOCK
    cache: str | None = None


@dataclass(frozen=True)
class Run:
    """Everything that starts a training run.

    Args:
        model: its shape.
        cluster: where it runs.
        parallelism: how it is cut up.
        schedule: in which order.
        training: how long, on what.
        precision: of parameters and activations.
        megatron: every other flag of the training script: ``lr: 1e-4`` is ``--lr 1e-4``, ``true`` gives a bare flag,
            ``false`` and ``null`` leave it out, a list gives several values.
        environment: variables of every rank.
        output: folder of the run's report, timelines and checkpoints, from the working directory.
        trace: whether timelines of plan and run are drawn.
        script: the training script; by default ``pretrain_gpt.py`` of ``SCRIPTS``.
    """

    config_folder: ClassVar[str] = "runs"

    model: Model
    cluster: Cluster
    parallelism: Parallelism = field(default_factory=Parallelism)
    schedule: ScheduleChoice = field(default_factory=ScheduleChoice)
    training: Training = field(default_factory=Training)
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    megatron: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    output: str = "out/runs/run"
    trace: bool = False
    script: str | None = None

    @property
    def report(self) -> Path:
        """Path of the report that a run writes about itself."""
        return Path(self.output) / REPORT

    @property
    def checkpoints(self) -> str:
        """The folder of its checkpoints, where it saves any."""
        return f"{self.output}/checkpoints"

    @property
    def unfinished(self) -> bool:
        """Whether the last checkpoint is of a step before the last, so that starting the run again goes on from there."""
        try:
            saved = int((Path(self.checkpoints) / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return self.training.save_interval > 0 and saved < self.training.iterations

    @property
    def on_cpu(self) -> bool:
        return self.cluster.backend == "gloo"

    @property
    def flags(self) -> dict[str, Any]:
        """Flags under ``megatron``, by the names of the training script's flags without dashes in front."""
        return {key.replace("_", "-"): value for key, value in self.megatron.items()}

    @property
    def delays_updates(self) -> bool:
        """Whether the gradients of a batch wait for their norm while the next batch adds up its own beside them."""
        name = self.schedule.name
        if not self.schedule.overlap_steps or name in (AUTO, STOCK) or name.endswith(FILE_SUFFIX):
            return False
        return family(name).asynchronous

    @property
    def rolls_back(self) -> bool:
        """Whether a step may have to be rolled back: it is taken before it is known whether gradients must be clipped."""
        clip = self.flags.get("clip-grad")  # Megatron clips by default
        may_clip = clip is None or float(clip) > 0
        return self.schedule.overlap_steps and may_clip and not self.delays_updates

    @property
    def schedule_options(self) -> dict[str, Any]:
        """Options of its schedule, stages per pipeline rank and slices included; a file has none, and says those numbers
        itself.
        """
        if self.schedule.name.endswith(FILE_SUFFIX):
            return self.schedule.options
        given = {"chunks": self.parallelism.chunks, "slices": self.schedule.slices}
        return self.schedule.options | {key: value for key, value in given.items() if value is not None}

    @property
    def execution(self) -> Execution:
        """What the costs of a microbatch depend on."""
        cut, choice = self.parallelism, self.schedule
        return Execution(
            micro_batch=cut.micro_batch,
            tp=cut.tp,
            sequence_parallel=cut.sequence_parallel,
            cp=cut.cp,
            ep=cut.ep,
            recompute=choice.recompute,
            recompute_modules=choice.recompute_modules,
            attention="unfused" if self.on_cpu else "flash",
            precision=self.precision,
            fp8=cast(Fp8, self.flags.get("fp8-recipe", "delayed") if self.flags.get("fp8-format") else "none"),
            implementation=self.implementation,
            expert_load=self._expert_load(),
            **{name: choice.name == STOCK and bool(self.flags.get(flag)) for name, flag in STOCK_OVERLAPS.items()},
            weight_inputs=self._weight_inputs(),
            early_weights=choice.early_weights,
        )

    def _weight_inputs(self) -> Literal["sharded", "gathered"]:
        if self.schedule.weight_inputs == AUTO:
            return SHARDED if self.parallelism.tp <= self.cluster.devices_per_node else GATHERED
        return self.schedule.weight_inputs

    def _expert_load(self) -> float:
        """Return the most tokens that the experts of a rank get, over an even share: as the run says, and not above the
        capacity beyond which Megatron drops them. A rank with all experts gets what there is, or the padded capacity.
        """
        load, capacity = self.parallelism.expert_load, self.flags.get("moe-expert-capacity-factor")
        if capacity is not None and self.flags.get("moe-pad-expert-input-to-capacity"):
            return float(str(capacity))
        if self.parallelism.ep == 1:
            return 1.0
        return load if capacity is None else min(load if load > 1 else inf, float(str(capacity)))

    @property
    def implementation(self) -> Literal["local", "transformer_engine"]:
        """Whose layers it trains: Transformer Engine's are Megatron's default, and CPU ranks have them only if asked."""
        default = "local" if self.on_cpu else "transformer_engine"
        return "local" if self.flags.get("transformer-impl", default) == "local" else "transformer_engine"


def resolve_script(run: Run) -> Path:
    """Return the training script of a run.

    Raises:
        ConfigError: there is none.
    """
    if run.script is not None:
        path = Path(run.script)
        if not path.is_file():
            raise ConfigError("no-file", f"there is no training script {path}; give the path of one", key="script")
        return path
    return SCRIPTS / "pretrain_gpt.py"
