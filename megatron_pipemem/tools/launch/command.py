"""Build the command that starts a run.

Only this module writes a run as flags of the training script.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.flags import Flags, text_of, words
from megatron_pipemem.model import layout
from megatron_pipemem.model.arguments import arguments_of
from megatron_pipemem.model.cut_flags import VIRTUAL_STAGES
from megatron_pipemem.model.model import BY_ACTION, Model
from megatron_pipemem.refusals import GATHERED_KEYS, KEYS_FLAG
from megatron_pipemem.request import flags_of
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.options import STOCK
from megatron_pipemem.tools.config.arguments import flags_of_attributes, frozen_flags, setters
from megatron_pipemem.tools.config.runs import ADAPTERS, RECOMPUTE_FLAG, Run, ScheduleChoice, resolve_script
from megatron_pipemem.tools.cpu.flags import CPU_FLAGS
from megatron_pipemem.values import refuse_if

EXIT_SIGNAL = "SIGUSR1"
"""The signal at which a run saves a checkpoint and ends. Batch systems send it before they end a job."""
_OF_TRAINING = ("train-iters", "data-path", "data-cache-path", "save-interval", "load")
_FREE = ("recompute-method", "recompute-num-layers")
_POSITIONS = "max-position-embeddings"
"""Flags whose values do not change a plan, so that a run may have others than the default. The number of positions does so
if they are learned."""
_NODE_RANK, _MASTER_ADDR = "$NODE_RANK", "$MASTER_ADDR"
"""Variables that a shell replaces on every node."""


@dataclass(frozen=True)
class Nodes:
    """The number of nodes of a run, the rank of this node, and the address of node 0."""

    count: int = 1
    rank: int | str | None = None  # of this node, or a variable of the shell
    address: str | None = (
        None  # of node 0, or a variable of the shell; None if torchrun takes any free port of this node
    )
    port: int = 29500  # on node 0

    def with_variables(self) -> Nodes:
        """Return these nodes; if several, with ``$NODE_RANK`` and ``$MASTER_ADDR`` for an unknown rank and address."""
        if self.count == 1:
            return self
        rank = _NODE_RANK if self.rank is None else self.rank
        return replace(self, rank=rank, address=self.address or _MASTER_ADDR)


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and the environment variables to set in addition to those of its caller."""

    words: tuple[str, ...]
    environment: Mapping[str, str]

    def text(self) -> str:
        """Return the command as text for a shell, with one flag on each line."""
        lines: list[list[str]] = [["env", *(f"{key}={value}" for key, value in self.environment.items())]]
        for number, (before, word) in enumerate(zip(("", *self.words), self.words, strict=False)):
            follows_value = re.match("--[a-z-]+=", before)  # so it is an argument of its own
            if number == 0 or follows_value or re.match("-+[a-z]", word):
                lines.append([])
            lines[-1].append(word)
        if not self.environment:
            del lines[0]
        return " \\\n    ".join(" ".join(map(_quoted, line)) for line in lines)


def command(run: Run, nodes: Nodes | None = None) -> Command:
    """Return the torchrun command that starts the ranks of a run on one of its nodes.

    By default it runs on the smallest number of nodes on which the ranks fit. Raise a ConfigError if a key of the
    configuration has no flag or contradicts another key, or if several nodes lack a rank or an address.
    """
    nodes = nodes or Nodes(count=min_nodes(run))
    own = "is not part of pretrain_gpt.py; give the run's script, or start your own program"
    for key, part in (("model.tower", run.model.tower), (ADAPTERS, run.execution.adapters)):
        refuse_if(bool(part) and run.script is None, "unsupported-model", key, own)
    start = [sys.executable, "-m", "megatron_pipemem.ranks", *_rendezvous(run, nodes)]
    ours = ["-m", "megatron_pipemem", "run", *(["--cpu"] if run.on_cpu else [])]
    words = [*start, *ours, str(resolve_script(run)), *script_flags(run)]
    return Command(
        tuple(words), {key: str(value) for key, value in (run.demanded_environment | run.environment).items()}
    )


def min_nodes(run: Run) -> int:
    """Return the smallest number of nodes on which the ranks of a run fit, with equally many ranks on each node.

    The number may exceed that of the cluster's nodes.
    """
    ranks = run.parallelism.ranks
    least = -(-ranks // run.cluster.devices_per_node)
    return next(count for count in range(least, ranks + 1) if ranks % count == 0)


def ranks_per_node(run: Run, count: int) -> int:
    """Return the number of ranks per node on ``count`` nodes, or raise a ConfigError if that is not a whole number."""
    ranks = run.parallelism.ranks
    uneven = f"{ranks} ranks cannot be shared evenly by {count} nodes; change one of the two numbers"
    refuse_if(ranks % count, "does-not-divide", "pp", uneven)
    return ranks // count


def script_flags(run: Run) -> list[str]:
    """Return all flags of a run as words of a command line."""
    return words(all_flags(run))


def all_flags(run: Run) -> Flags:
    """Return all flags of a run's training script.

    The run's own flags override defaults of this package. Raise a ConfigError if they contradict another key.
    """
    fixed = _fixed(run, {**_planned(run), "save_interval": _training_flags(run), "output": _output_flags(run)})
    return {**fixed, **_defaults(run), **_others(run)}


def planned_flags(run: Run) -> list[str]:
    """Return the flags on which a plan depends, as words of a command line.

    They are all flags but those of data, checkpoints and output, and the defaults of this package.
    """
    return words({**_fixed(run, _planned(run)), **_others(run)})


def _planned(run: Run) -> dict[str, Flags]:
    """Return the flags that a plan decides, by the key of the run's configuration that sets them."""
    return {
        "model": _model_flags(run),
        "parallelism": _parallelism_flags(run),
        "schedule": _schedule_flags(run),
        "bf16": {} if run.precision == "fp32" else {run.precision: True},
    }


def _others(run: Run) -> Flags:
    """Return a run's own flags, without those of ``_training_flags``."""
    return {name: value for name, value in run.flags.items() if name not in _OF_TRAINING}


def _fixed(run: Run, flags: dict[str, Flags]) -> Flags:
    """Return ``flags`` in one mapping. Raise a ConfigError if a flag of the run has another value there."""
    free = _FREE if run.model.position == "learned" else (*_FREE, _POSITIONS)
    for name, value in _others(run).items():
        for key, fixed in flags.items():
            differs = name in fixed and name not in free and value not in (fixed[name], None, False)
            twice = f"is {shortened(value)}, and the run's {key} gives another value; change it there"
            refuse_if(differs, "conflicting-options", name.replace("-", "_"), twice)
    return {name: value for fixed in flags.values() for name, value in fixed.items()}


def model_flags(model: Model) -> Flags:
    """Return the training script's flags for the sizes of a model.

    Raise a ConfigError for geglu, which has no flag.
    """
    no_flag = "the training script has no flag for geglu; use swiglu to launch this run"
    refuse_if(model.activation == "geglu", "unsupported-setting", "model.gated_linear_unit", no_flag)
    arguments, flags_by_attribute = arguments_of(model), setters(frozen_flags())
    names = (flag.lstrip("-") for attribute in arguments for flag in flags_by_attribute.get(attribute, ()))
    flags = dict.fromkeys(names) | dict(flags_of_attributes(arguments, frozen_flags()))
    return flags | {"no-bias-swiglu-fusion": True} if model.experts and not model.fuses_experts else flags


def _model_flags(run: Run) -> Flags:
    """Return the flags of a run's model. Its layer pattern is left out if the run's flags have it, cut into stages."""
    flags = model_flags(run.model)
    cut = str(run.flags.get(layout.PATTERN, ""))
    return {key: value for key, value in flags.items() if key != layout.PATTERN or layout.without_cuts(cut) != value}


def _parallelism_flags(run: Run) -> Flags:
    cut = run.parallelism
    # Megatron refuses the number of chunks next to a layout or a layer pattern, which say it too.
    is_cut = run.flags.get(layout.FLAG) is not None or run.model.pattern is not None
    says_chunks = run.schedule.name == STOCK and not is_cut
    return {
        "tensor-model-parallel-size": cut.tp,
        "pipeline-model-parallel-size": cut.pp,
        "context-parallel-size": cut.cp if cut.cp > 1 else None,
        "expert-model-parallel-size": cut.ep if cut.ep > 1 else None,
        "expert-tensor-parallel-size": cut.etp,
        "sequence-parallel": cut.sequence_parallel,
        "micro-batch-size": cut.micro_batch,
        "global-batch-size": cut.global_batch,
        VIRTUAL_STAGES: cut.chunks if says_chunks else None,
        **({KEYS_FLAG: GATHERED_KEYS} if run.execution.gathers_keys else {}),
    }


def _schedule_flags(run: Run) -> Flags:
    choice = run.schedule
    options = choice.options if choice.name == STOCK else run.schedule_options
    flags = {key: flag.name.removeprefix("--") for key, flag in flags_of(ScheduleChoice).items() if not flag.repeated}
    settings = {key: getattr(choice, key) for key in flags if getattr(choice, key) != getattr(ScheduleChoice, key)}
    switches = run.cluster.switches if choice.offload != "off" else ()
    return {
        "pipemem-schedule": choice.name,
        "pipemem-schedule-module": choice.module,
        **{flags[key]: value for key, value in settings.items()},
        **_recompute_flags(choice),
        # A flag for each option, as --name=value because a list would be several values of one flag.
        **{f"pipemem-option={key}={text_of(value)}": True for key, value in options.items()},
        **(
            {f"pipemem-offload-option=switches={json.dumps(switches, separators=(',', ':'))}": True} if switches else {}
        ),
    }


def _recompute_flags(choice: ScheduleChoice) -> Flags:
    if choice.recompute == "none":
        return {}
    if choice.recompute == "full":
        return {
            "recompute-granularity": "full",
            "recompute-method": choice.recompute_method,
            "recompute-num-layers": choice.recompute_num_layers,
        }
    if choice.recomputes_by_action:
        return {RECOMPUTE_FLAG: "selective"}
    alone = (
        "has activation, which Megatron cannot recompute alone; write pipemem_recompute: selective, under any schedule but "
        f"{STOCK}, which recomputes {', '.join(BY_ACTION)}, or leave activation out to launch"
    )
    refuse_if("activation" in choice.recompute_modules, "unsupported-setting", "recompute_modules", alone)
    return {"recompute-granularity": "selective", "recompute-modules": choice.recompute_modules}


def _training_flags(run: Run) -> Flags:
    data: Flags = {"data-path": run.data} if run.data else {"mock-data": True}
    saving: Flags = {}
    load = run.flags.get("load")
    if run.save_interval:
        saving = {"save": run.checkpoints, "save-interval": run.save_interval}
        # At EXIT_SIGNAL, a rank saves its state and ends.
        saving |= {"exit-signal-handler": True, "exit-signal": EXIT_SIGNAL}
        if load is not None:
            # Megatron starts from the pretrained checkpoint only while the run has none of its own.
            saving["pretrained-checkpoint"] = load
        load = run.checkpoints
    cache = run.flags.get("data-cache-path")
    return {"train-iters": run.iterations, **data, "data-cache-path": cache, **saving, "load": load}


def _output_flags(run: Run) -> Flags:
    return {
        "pipemem-report": str(run.report),
        "pipemem-trace": f"{run.output}/timelines" if run.trace else None,
    }


def _defaults(run: Run) -> Flags:
    """Return the default flags of this package, which the run's own flags may override."""
    flags: Flags = {
        "tokenizer-type": "NullTokenizer",
        "log-interval": 1,
        "eval-iters": 0,
        "eval-interval": 1000,
        "lr": 1e-4,
    }
    if run.schedule.overlap_steps:  # a step that is logged or checked ends on all ranks together
        flags |= {"log-interval": 10, "rerun-mode": "disabled"}
    return flags | (CPU_FLAGS if run.on_cpu else {})


def _rendezvous(run: Run, nodes: Nodes) -> list[str]:
    """Return torchrun's own flags. They give each node's rank, so that a restarted rank runs on the same node.

    Raise a ConfigError if there are several nodes and this node's rank or the address of node 0 is unknown.
    """
    flags: Flags = {"nproc-per-node": ranks_per_node(run, nodes.count)}
    if nodes.count > 1 and (nodes.address is None or nodes.rank is None):
        raise ConfigError(
            "missing-option",
            f"{run.parallelism.ranks} ranks fill {nodes.count} nodes of the cluster; give the address of the first "
            "node (--master-addr or MASTER_ADDR) and the number of this node (--node-rank or NODE_RANK)",
        )
    if nodes.address is None:
        return words({"standalone": True, "local-addr": "127.0.0.1", **flags})
    node_flags: Flags = {"nnodes": nodes.count, "node-rank": nodes.rank or 0}
    return words({**node_flags, **flags, "master-addr": nodes.address, "master-port": nodes.port})


def _quoted(word: str) -> str:
    return f'"{word}"' if word in (_NODE_RANK, _MASTER_ADDR) else shlex.quote(word)
