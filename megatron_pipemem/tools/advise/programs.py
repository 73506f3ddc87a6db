"""Read the runs of programs with settings of their own: NeMo-RL, verl, slime, ms-swift and recipes of Megatron-Bridge.

All of them build a public model, by its name on Hugging Face, and set fields of Megatron's configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_pipemem.errors import ConfigError, UpstreamError
from megatron_pipemem.model.model import Tower
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.tools.advise.consumers import (
    BRIDGE,
    BRIDGE_HYBRID,
    IMAGES,
    NEMO_RL,
    SLIME,
    SWIFT,
    TOWER,
    VERL,
    VERL_SFT,
    Consumer,
    adapter_flags,
    flags_of_model,
)
from megatron_pipemem.tools.advise.evaluation import other_places
from megatron_pipemem.tools.advise.flat_settings import flags_in, has_flags_of_megatron, inherited
from megatron_pipemem.tools.advise.missing import collected
from megatron_pipemem.tools.advise.reading import Context, Reading, launched, named, read_flags, split_command, started
from megatron_pipemem.tools.advise.shell import SWIFT_PROGRAMS
from megatron_pipemem.tools.config.arguments import ENDS, UNKNOWN, MissingSetting, ask_for, flags_of_attributes
from megatron_pipemem.tools.config.loading import (
    BASE,
    YamlError,
    known_model,
    model_within,
    override,
    read_raw,
    read_yaml,
    typed,
    unpriced_part,
)
from megatron_pipemem.tools.megatron.asking import answers
from megatron_pipemem.values import refuse_if, whole_number

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_FULL = "every sequence has the greatest length, and forwards without a backward are not counted"
_OF_VERL = {
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
}
"""verl's defaults of the settings that are read."""
_SFT_OF_VERL = "verl.trainer.sft_trainer"
_ENGINE = "engine=megatron"
_OF_BRIDGE = {
    **dict.fromkeys(("-gb", "--global_batch_size"), "train.global_batch_size"),
    **dict.fromkeys(("-mb", "--micro_batch_size"), "train.micro_batch_size"),
    **dict.fromkeys(("-sl", "--seq_length"), "dataset.seq_length"),
    **dict.fromkeys(("-tp", "--tensor_model_parallel_size"), "model.tensor_model_parallel_size"),
    **dict.fromkeys(("-pp", "--pipeline_model_parallel_size"), "model.pipeline_model_parallel_size"),
    **dict.fromkeys(("-cp", "--context_parallel_size"), "model.context_parallel_size"),
    **dict.fromkeys(("-vp", "--virtual_pipeline_model_parallel_size"), "model.virtual_pipeline_model_parallel_size"),
    **dict.fromkeys(("-ep", "--expert_model_parallel_size"), "model.expert_model_parallel_size"),
    **dict.fromkeys(("-etp", "--expert_tensor_parallel_size"), "model.expert_tensor_parallel_size"),
}
"""Settings of a recipe by the options of Megatron-Bridge's ``run_recipe.py``."""
_TASKS = {"pretrain": "pretrain", "sft": "sft", "lora": "peft", "dora": "peft"}
"""The part of a recipe's name by the mode of ``run_recipe.py``."""
_OF_AREAL = ("gconfig", "actor")
_COMMAND = "give the command of its training after --, or a file of pipemem plan"
_RANK, _RANK_OF_SWIFT = 32, 8  # of adapters, unless a setting gives it
PREFIX = "bridge:"
SOURCES = {
    "train.sh [ARGUMENTS]": "a launch script of Megatron-LM and its forks (also `--yaml-cfg`), slime, verl (PPO, GRPO, SFT), "
    "ms-swift (also its YAML files)",
    "FILE.yaml [KEY=VALUE]": "a run file; settings of NeMo-RL, verl, Primus or FlagScale, or any file with Megatron's flags "
    "in snake case",
    "bridge:RECIPE [FILE.yaml] [KEY=VALUE]": "a recipe of Megatron-Bridge, or your own as bridge:MODULE:FUNCTION, with YAML "
    "files and overrides; also a script that calls its `run_recipe.py`",
    "-- COMMAND": "a training command with its launcher: torchrun, srun, mpirun, deepspeed, accelerate",
}
"""What a run is read from, by the form of the words. `advise --help` and the documents show it."""
_KINDS = ("experimental-attention-variant", "linear-", "dsa-", "attention-output-gate")
"""Beginnings of flags that say of which kinds a model's attention is."""
_CHILD = "megatron_pipemem.tools.megatron.bridge_recipe"
_SECONDS = 600  # in which the recipes are evaluated
_PRICED = ("gated_delta_net", "dsa")
"""Kinds of attention, in addition to plain and latent attention, whose seconds and bytes can be predicted."""


def is_settings(raw: Mapping[str, Any]) -> bool:
    """Return whether a YAML file holds settings of a program, and not a run of this package."""
    keys = {"policy", "actor_rollout_ref", "defaults", "modules", *_OF_AREAL}
    return (
        bool(keys & raw.keys())
        or _is_sft_of_verl(raw)
        or (has_flags_of_megatron(raw) and "base" not in raw and not {"model", "cluster"} <= raw.keys())
    )


def _is_sft_of_verl(raw: Mapping[str, Any]) -> bool:
    engine = raw.get("engine")
    return isinstance(engine, Mapping) and "data" in raw and "model" in raw


def read_settings(path: Path, overrides: Iterable[str], context: Context) -> Reading:
    """Return the run of a program's settings in a YAML file, after overrides like ``key=value``.

    Raises:
        ConfigError: the settings are of another program (``wrong-file``), or a size is missing.
    """
    return collected(lambda own: _read_settings(path, own, context), overrides)


def _read_settings(path: Path, overrides: list[str], context: Context) -> Reading:
    raw = inherited(path)
    refuse_if(
        {*_OF_AREAL} <= raw.keys(), "wrong-file", str(path), "has AReaL's settings, which are not read; " + _COMMAND
    )
    if _is_sft_of_verl(raw):
        settings = _Settings(raw)
        settings.change(overrides)
        return _verl_sft(settings, {}, str(path), context)
    if not {"policy", "actor_rollout_ref"} & raw.keys():
        if not has_flags_of_megatron(raw) and not any("model" in key for key in raw.get("modules", {})):
            raise ConfigError("wrong-file", f"has no settings of a known program; {_COMMAND}", file=path)
        flags, launcher, not_read = flags_in(path, overrides, context.flag_table)
        reading = read_flags(flags, launcher, str(path), context)
        return replace(reading, not_read=(*not_read, *reading.not_read))
    settings = _Settings(raw)
    settings.change(overrides)
    if "actor_rollout_ref" in settings.raw:
        return _verl(settings, str(path), context)
    if not settings.get("policy.megatron_cfg.enabled", False):
        raise ConfigError(
            "wrong-file",
            "does not train with Megatron, because policy.megatron_cfg.enabled is not true; give settings of a run "
            "with Megatron",
            file=path,
        )
    return _nemo_rl(settings, str(path), context)


def read_program(words: Sequence[str], context: Context) -> Reading:
    """Return the run that a command starts, a script of Megatron or another program; see ``read_flags``.

    A YAML file after ``--config`` is read by ``read_settings``. All values that are missing are asked for at once.
    """
    return collected(lambda own: _read_program(own, context), words)


def _read_program(words: Sequence[str], context: Context) -> Reading:
    if any(_plus(word).startswith("actor_rollout_ref.") for word in words):
        settings = _Settings({})
        settings.change(word for word in words if re.match(r"[+~]*[\w.]+=", word))
        return _verl(settings, "verl", context)
    if _SFT_OF_VERL in words:
        settings = _Settings({})
        settings.change(word for word in words if re.match(r"[+~]*[\w.]+=", word))
        return _verl_sft(settings, launched(words), _SFT_OF_VERL, context)
    if any(PurePosixPath(word).name == "run_recipe.py" for word in words):
        return _bridge(*split_command(words), context)
    is_swift = any(word.startswith(SWIFT_PROGRAMS) for word in words)
    place = next((place for place, word in enumerate(words) if word == "--config"), len(words))
    if not is_swift and place + 1 < len(words) and words[place + 1].endswith((".yaml", ".yml")):
        return read_settings(Path(words[place + 1]), words[place + 2 :], context)
    launcher, program, rest = split_command(words)
    if is_swift:
        return _swift(*_swift_settings(rest, context), launcher, program, context)
    flags = named(rest, context.flag_table)
    if isinstance(file := flags.get("yaml-cfg"), str) and UNKNOWN not in file:
        flags = flags_in(Path(file), (), context.flag_table)[0] | flags
    if "hf-checkpoint" in flags or any(name.startswith("rollout-") for name in flags):
        return _slime(flags, program, context)
    return read_flags(flags, launcher, program, context)


class _Settings:
    """Nested settings by dotted keys. References to other keys are followed."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw

    def change(self, overrides: Iterable[str]) -> None:
        """Apply overrides of Hydra: ``key=value``, with or without ``+`` in front. Other words are ignored."""
        for text in overrides:
            key, equals, value = _plus(text).partition("=")
            if not equals or text.startswith("-"):
                continue
            try:
                override(self.raw, key, value if UNKNOWN in value else read_yaml(value))
            except YamlError:
                override(self.raw, key, value)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key; ``default`` if it is missing or null."""
        here: Any = self.raw
        for part in key.split("."):
            here = here.get(part) if isinstance(here, Mapping) else None
        reference = _REFERENCE.fullmatch(here) if isinstance(here, str) else None
        if reference is not None and reference[1] != key:
            return self.get(reference[1], default)
        return default if here is None else here

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if UNKNOWN in str(value):
            ask_for(str(value), key)
        if value is None:
            missing = f"is missing, and the run's shape follows from it; give {key}=NUMBER"
            raise MissingSetting(missing, key, f"{key}=1")
        if not isinstance(value, int):
            raise ConfigError("bad-number", f"is {shortened(value)}; give a whole number", key=key)
        return value

    def fields(self, key: str) -> dict[str, Any]:
        """Return the values directly below a key, without nested mappings."""
        section = self.get(key, {})
        names = section if isinstance(section, Mapping) else {}
        values = {name: self.get(f"{key}.{name}") for name in names}
        return {name: value for name, value in values.items() if not isinstance(value, Mapping)}


def _plus(text: str) -> str:
    return text.lstrip("+")


def _reading(
    flags: Mapping[str, Any],
    launcher: Mapping[str, str],
    program: str,
    context: Context,
    consumer: Consumer,
    assumed: Sequence[str] = (),
) -> Reading:
    set_flags = {name: value for name, value in flags.items() if value is not False}
    reading = read_flags(set_flags, launcher, program, context)
    return replace(reading, assumed=(*assumed, *reading.assumed, _FULL), consumer=consumer)


def _on(nodes: int, per_node: int) -> dict[str, str]:
    """Return the options of a launcher for ``nodes`` nodes with ``per_node`` devices each."""
    return {"nnodes": str(nodes), "nproc-per-node": str(per_node)}


def _replicas(flags: Mapping[str, Any], devices: int) -> int:
    kinds = ("tensor-model", "pipeline-model", "context")
    return max(1, devices // prod(max(1, _number(flags, f"{kind}-parallel-size") or 1) for kind in kinds))


def _packed(flags: dict[str, Any], samples: int, tokens: int, devices: int) -> None:
    """Set in ``flags`` the batch sizes for sequences that are packed into microbatches of up to ``tokens`` tokens.

    ``samples`` is the number of sequences of a step, and ``devices`` that of all devices of the run.
    """
    micro = max(1, tokens // int(flags["seq-length"]))
    batch = micro * _replicas(flags, devices)
    flags["micro-batch-size"], flags["global-batch-size"] = micro, -(-samples // batch) * batch


def _model_flags(name: str, setting: str, context: Context) -> tuple[dict[str, Any], list[str]]:
    """Return the flags of the model that ``setting`` names, and a sentence if the model is a guess.

    A name that begins with a public model's is taken for it. Of a placeholder, which has no number, the model is the one in
    the name of the script. Raise a MissingSetting if neither is a public model.
    """
    if known_model(name) is not None or unpriced_part(name) is not None:
        return flags_of_model(name, setting), []
    last = PurePosixPath(name.replace(UNKNOWN, "").rstrip("/")).name
    model, where = model_within(last), "with whose name it begins"
    if not any(letter.isdecimal() for letter in last):
        model, where = (
            model_within(PurePosixPath(context.source).stem),
            f"by the name of {PurePosixPath(context.source).name}",
        )
    if model is None:
        return flags_of_model(name, setting), []
    shown = shortened(name.replace(UNKNOWN, "")) if name else "empty"
    return flags_of_model(model, setting), [
        f"the sizes of {model}, {where}, because {setting} is {shown}; {setting}=MODEL changes it"
    ]


def _nemo_rl(settings: _Settings, program: str, context: Context) -> Reading:
    policy = "policy.megatron_cfg"
    own = settings.fields(policy)
    if not own.get("activation_checkpointing"):
        own |= {"recompute_granularity": None, "recompute_modules": None}
    elif own.setdefault("recompute_granularity", "full") == "full":
        own |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    groups = (
        settings.fields(f"{policy}.{name}")
        for name in ("optimizer", "distributed_data_parallel_config", "model_overrides")
    )
    for group in groups:
        own |= group
    if settings.get(f"{policy}.fp8_cfg.enabled", False):
        own |= settings.fields(f"{policy}.fp8_cfg")
    model_flags, assumed = _model_flags(str(settings.get("policy.model_name")), "policy.model_name", context)
    flags = model_flags | dict(flags_of_attributes(own, context.flag_table))
    flags |= {
        "seq-length": settings.number("policy.max_total_sequence_length"),
        "micro-batch-size": settings.number("policy.train_micro_batch_size"),
        "global-batch-size": settings.number("policy.train_global_batch_size"),
        "bf16": settings.get("policy.precision") == "bfloat16",
    }
    if settings.get(f"{policy}.peft.enabled", False):
        flags |= adapter_flags(settings.number(f"{policy}.peft.dim", _RANK))
    nodes, per_node = settings.number("cluster.num_nodes", 1), settings.number("cluster.gpus_per_node")
    if settings.get("policy.generation.colocated.enabled", True) is False:
        others = "policy.generation.colocated.resources"
        apart = settings.get(f"{others}.num_nodes")
        nodes, per_node = (
            (nodes - int(apart), per_node)
            if apart and nodes > 1
            else (nodes, per_node - settings.number(f"{others}.gpus_per_node"))
        )
    return _reading(flags, _on(nodes, per_node), program, context, NEMO_RL, assumed)


def _verl_flags(
    settings: _Settings, model: str, config: str, optimizer: str, context: Context
) -> tuple[dict[str, Any], list[str]]:
    """Return the flags of verl's settings, and a sentence if the model is a guess.

    ``model``, ``config`` and ``optimizer`` are the keys of the model, of Megatron's sizes, and of the optimizer.
    """
    own: dict[str, Any] = {"sequence_parallel": True, "use_distributed_optimizer": True}
    for group in (config, f"{config}.override_transformer_config", f"{optimizer}.override_optimizer_config"):
        own |= settings.fields(group)
    own |= {"fp16": True} if own.get("dtype") == "float16" else {"bf16": True}
    for name in [name for name, value in own.items() if UNKNOWN in str(value)]:
        value = own.pop(name)
        if name.endswith("_size") or name.startswith(("num_", "recompute")):
            ask_for(str(value), f"{config}.{name}")
    if own.get("recompute_granularity") is None:
        own.pop("recompute_modules", None)
    flags, assumed = _model_flags(str(settings.get(f"{model}.path")), f"{model}.path", context)
    flags |= dict(flags_of_attributes(own, context.flag_table))
    flags.pop("mtp-num-layers", None)  # verl trains without
    flags |= adapter_flags(settings.number(f"{model}.lora.rank", 0) or settings.number(f"{model}.lora_rank", 0))
    return flags, assumed


def _verl(settings: _Settings, program: str, context: Context) -> Reading:
    actor = "actor_rollout_ref.actor"

    def number(key: str) -> int:
        return settings.number(key, _OF_VERL.get(key))

    flags, assumed = _verl_flags(settings, "actor_rollout_ref.model", f"{actor}.megatron", f"{actor}.optim", context)
    flags["seq-length"] = number("data.max_prompt_length") + number("data.max_response_length")
    nodes, per_node = number("trainer.nnodes"), number("trainer.n_gpus_per_node")
    samples = number(f"{actor}.ppo_mini_batch_size") * number("actor_rollout_ref.rollout.n")
    if settings.get(f"{actor}.use_dynamic_bsz", False):
        tokens = number(f"{actor}.ppo_max_token_len_per_gpu") * (_number(flags, "context-parallel-size") or 1)
        _packed(flags, samples, tokens, nodes * per_node)
    else:
        flags["micro-batch-size"] = number(f"{actor}.ppo_micro_batch_size_per_gpu")
        flags["global-batch-size"] = samples
    return _reading(flags, _on(nodes, per_node), program, context, VERL, assumed)


def _verl_sft(settings: _Settings, launcher: Mapping[str, str], program: str, context: Context) -> Reading:
    """Return the run of verl's trainer for supervised fine-tuning, whose ``engine`` has to be Megatron."""
    engine = settings.get("engine", {})
    kind = engine.get(BASE, engine.get("strategy")) if isinstance(engine, Mapping) else engine
    if UNKNOWN in str(kind):
        ask_for(str(kind), "engine")
    if f"engine={kind}" != _ENGINE:
        raise ConfigError(
            "wrong-file",
            f"the run trains with {kind or 'fsdp'}, not with Megatron; give {_ENGINE} if Megatron trains it",
            key="engine",
        )
    flags, assumed = _verl_flags(settings, "model", "engine", "optim", context)
    flags["seq-length"] = settings.number("data.max_length", 1024)
    samples = settings.number("data.train_batch_size", 256)
    launcher = launcher or _on(settings.number("trainer.nnodes", 1), settings.number("trainer.n_gpus_per_node", 1))
    if settings.get("data.use_dynamic_bsz", True):
        tokens = settings.number("data.max_token_len_per_gpu", 8192) * (_number(flags, "context-parallel-size") or 1)
        _packed(flags, samples, tokens, started(launcher, context) or 1)
    else:
        flags["micro-batch-size"] = settings.number("data.micro_batch_size_per_gpu", 4)
        flags["global-batch-size"] = samples
    return _reading(flags, launcher, program, context, VERL_SFT, assumed)


def _slime(flag_values: Mapping[str, Any], program: str, context: Context) -> Reading:
    name = str(flag_values.get("hf-checkpoint"))
    shape = flags_of_model(name, "--hf-checkpoint") if known_model(name) is not None else {}
    flags = {flag: shape.get(flag) if shape and UNKNOWN in str(value) else value for flag, value in flag_values.items()}
    if (
        shape and flags.pop("spec", None) is not None
    ):  # the layers of the checkpoint's model, some of which have no flag
        flags = {flag: value for flag, value in shape.items() if flag.startswith(_KINDS)} | flags
    flags |= {"bf16": "fp16" not in flag_values, "use-distributed-optimizer": True}
    nodes, per_node = _number(flag_values, "actor-num-nodes") or 1, _number(flag_values, "actor-num-gpus-per-node") or 8
    answers = _number(flag_values, "rollout-max-response-len")
    longest = _number(flag_values, "rollout-max-context-len") or (
        answers and answers + (_number(flag_values, "rollout-max-prompt-len") or 0)
    )
    tokens = _number(flag_values, "max-tokens-per-gpu") if flag_values.get("use-dynamic-batch-size") else None
    tokens = tokens and tokens * (_number(flag_values, "context-parallel-size") or 1)
    flags["seq-length"] = longest or tokens or flag_values.get("seq-length")
    samples = _number(flag_values, "global-batch-size") or (
        (_number(flag_values, "rollout-batch-size") or 1)
        * (_number(flag_values, "n-samples-per-prompt") or 1)
        // (_number(flag_values, "num-steps-per-rollout") or 1)
    )
    flags["global-batch-size"] = samples
    if tokens:
        _packed(flags, samples, tokens, nodes * per_node)
    return _reading(flags, _on(nodes, per_node), program, context, SLIME)


def _swift_settings(words: Sequence[str], context: Context) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of ms-swift, and a sentence if their file is in another place than the command says.

    They are flags, over those of a YAML file: the first word, or the value of ``--config``. Its group ``train`` has those
    of the ranks that train, as ``--use_ray`` starts them.
    """
    flags = named(words, {})
    named_file = words[0] if words and words[0].endswith((".yaml", ".yml")) else flags.pop("config", None)
    if named_file is None:
        return flags, []
    folder = Path(context.source).parent if context.source else None
    path = Path(str(named_file))
    file = next((place for place in (path, *other_places(str(path), folder)) if place.is_file()), path)
    raw = read_raw(file)
    group = raw.pop("train", {})
    settings = {key.replace("-", "_"): value for key, value in (raw | group).items() if not isinstance(value, Mapping)}
    settings |= {name.replace("-", "_"): value for name, value in flags.items()}
    return settings, [] if file == path else [f"{path} is not there; {file} is read"]


def _swift(
    flag_values: Mapping[str, Any],
    notes: Sequence[str],
    launcher: Mapping[str, str],
    program: str,
    context: Context,
) -> Reading:
    if (devices := flag_values.get("gpus")) is not None and not launcher:
        launcher = {"nnodes": "1", "nproc-per-node": str(devices)}
    texts = {"true": True, "false": False, "none": None, "null": None}
    own: dict[str, Any] = {
        name.replace("-", "_"): texts.get(str(value).lower(), value) for name, value in flag_values.items()
    }
    defaults = {"micro_batch_size": 1, "global_batch_size": 16, "recompute_granularity": "selective", "bf16": True}
    defaults |= {"use_distributed_optimizer": True, "expert_tensor_parallel_size": 1}
    own = {**defaults, **own}
    longest = _number(own, "packing_length") or _number(own, "max_length")
    answers = _number(own, "max_completion_length")
    own["seq_length"] = longest and longest + (answers or 0)
    name = str(own.get("model", own.get("mcore_model", own.get("load"))))
    flags, assumed = _model_flags(name, "--model", context)
    if not own.get("mtp_num_layers"):
        flags.pop("mtp-num-layers", None)
    if not own["seq_length"]:  # a row says which length is assumed
        del own["seq_length"]
        flags.pop("seq-length", None)
    if str(own.get("tuner_type", own.get("train_type", "full"))).startswith("lora"):
        flags |= adapter_flags(_number(own, "lora_rank") or _RANK_OF_SWIFT)
    ends = {flag: own[name] for flag in ENDS if (name := flag.replace("-", "_")) in own}
    flags |= dict(flags_of_attributes(own, context.flag_table)) | ends
    if (task := own.get("task_type")) not in (None, "causal_lm"):
        assumed = [*assumed, f"the output layer of a language model, although --task_type {task} has another"]
    reading = _reading(flags, launcher, program, context, SWIFT, assumed)
    return replace(reading, not_read=(*notes, *reading.not_read))


def _number(settings: Mapping[str, Any], name: str) -> int | None:
    value = settings.get(name)
    if UNKNOWN in str(value):
        ask_for(str(value), f"--{name}")
    return whole_number(value, name)


def evaluate(names: Sequence[str], changes: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the settings of each recipe, in the order of the names, as ``tools.megatron.bridge_recipe.evaluated`` returns them.

    ``changes`` are YAML files and overrides like ``model.num_layers=2``, for all of them.

    Raises:
        UpstreamError: Megatron-Bridge cannot be imported (``not-installed``), or a recipe takes too long
            (``no-answer``).
    """
    try:
        yield from answers(["-m", _CHILD, *names, *changes], _SECONDS, "Megatron-Bridge")
    except UpstreamError as error:
        hint = "pip install megatron-bridge" if error.code == "not-installed" else "the recipe may wait for a network"
        raise UpstreamError(error.code, f"{error}; {hint}") from error


def read_recipe(name: str, context: Context, changes: Sequence[str] = ()) -> Reading:
    """Return the run that a recipe configures, after ``changes`` (``evaluate``).

    Args:
        name: a recipe of Megatron-Bridge, with or without ``_config``; or a user's recipe, as
            ``package.module:function``.
        context: facts that the recipe may leave open. A part of its name like ``_32gpu_`` gives the number of devices.

    Raises:
        ConfigError: no such recipe (``unknown-recipe``), or a size is missing.
        UnsupportedError: the model cannot be priced (``unsupported-model``).
    """
    full_name = name if name.endswith("_config") or ":" in name else f"{name}_config"
    for text in changes:
        is_file = text.endswith((".yaml", ".yml"))
        refuse_if(is_file and not Path(text).is_file(), "no-file", text, "is not there; give the path of a YAML file")
        refuse_if(not is_file and "=" not in text, "bad-syntax", text, "is no override; write KEY=VALUE, or FILE.yaml")
    (facts,) = evaluate([full_name], changes)
    return run_of(facts, context)


def _bridge(launcher: Mapping[str, str], program: str, words: Sequence[str], context: Context) -> Reading:
    """Return the run of Megatron-Bridge's ``run_recipe.py``."""
    options: dict[str, str] = {}
    overrides: list[str] = []
    place = 0
    while place < len(words):
        name, equals, value = words[place].partition("=")
        if not name.startswith("-"):
            overrides += [words[place]] if equals else []
        else:
            following = "".join(words[place + 1 : place + 2])
            takes_next = not equals and bool(following) and (following[0] != "-" and "=" not in following)
            options[name] = following if takes_next else value
            place += takes_next
        place += 1
    mode = options.get("--mode", "")
    recipe = options.get("--recipe", f"{options.get('--model', '')}_{_TASKS.get(mode, mode)}_config")
    if UNKNOWN in recipe:
        ask_for(recipe, "--recipe")
    changes = [f"{_OF_BRIDGE[name]}={value}" for name, value in options.items() if name in _OF_BRIDGE]
    overrides = [*changes, *overrides]
    for text in overrides:
        if UNKNOWN in text and text.startswith(("model.", "train.", "dataset.seq")) and "_size" in text:
            ask_for(text, text.partition("=")[0])
    devices = context.devices or started(launcher, context)
    kept = [text for text in overrides if UNKNOWN not in text]
    reading = read_recipe(recipe, replace(context, devices=devices), kept)
    return replace(reading, program=program)


def run_of(facts: Mapping[str, Any], context: Context) -> Reading:
    """Return the run that an evaluated recipe configures, or raise the errors of ``read_recipe``."""
    recipe = facts["asked"]
    if "names" in facts:
        near = get_close_matches(recipe, facts["names"], n=1)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else "see megatron.bridge.recipes"
        raise ConfigError("unknown-recipe", f"Megatron-Bridge has no recipe {recipe}; {hint}")
    if "error" in facts:
        raise ConfigError(
            "cannot-evaluate",
            f"the recipe {recipe} raises an error on this machine: {facts['error']}; remove its cause, or give a launch "
            "script or run file",
        )
    if facts["unknown"] is not None:
        try:
            flags_of_model(facts["unknown"], "model")
        except MissingSetting as error:
            hint = "are not known here; unset HF_HUB_OFFLINE to ask Hugging Face"
            raise ConfigError("unknown-size", f"the sizes of {facts['unknown']} {hint}") from error
    values = facts["values"]
    variant = values.get("experimental_attention_variant")
    unpriced = ["hyper-connections"] if values.get("enable_hyper_connections") else []
    unpriced += [f"attention of the kind {variant}"] if variant not in (None, *_PRICED) else []
    if unpriced:
        raise ConfigError(
            "unsupported-model",
            f"{recipe} has {' and '.join(unpriced)}, whose seconds and bytes are not known; no schedules can be compared "
            "for this model",
        )
    if facts["adapters"] is not None and not facts["rank"]:
        raise ConfigError(
            "unsupported-model",
            f"{recipe} trains adapters of the kind {facts['adapters']}, which have no rank, and whose seconds and bytes "
            "are not known; no schedules can be compared for this model",
        )
    alike = known_model(facts["tokenizer"] or "")
    tokens = facts["vocabulary"] or (alike and alike.vocabulary)
    base = {} if tokens is None else {"vocab-size": tokens}
    if facts["model"] is not None:
        base |= flags_of_model(facts["model"], "model")
    flags = base | dict(flags_of_attributes(values, context.flag_table)) | dict.fromkeys(facts.get("frozen", ()), True)
    flags |= adapter_flags(facts["rank"] or 0)
    if flags.get("expert-model-parallel-size", 1) > 1:  # Megatron-Bridge does not cut experts by default
        flags.setdefault("expert-tensor-parallel-size", 1)
    _add_tower(flags, facts)
    match = re.search(r"_(\d+)gpu", facts["name"])
    devices = context.devices or (int(match[1]) if match else None)
    launcher = {}
    if devices is not None:
        launcher = {"processes": str(devices), "nproc-per-node": str(min(devices, context.cluster.devices_per_node))}
    reading = read_flags(flags, launcher, f"{PREFIX}{facts['name']}", context)
    return replace(reading, consumer=BRIDGE if reading.run.model.pattern is None else BRIDGE_HYBRID)


def _add_tower(flags: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Put the vision tower and the images of a recipe among its ``flags``, which are changed.

    Raise a ConfigError if the tower cannot be priced.
    """
    if "images" in facts:
        flags[IMAGES] = facts["images"]
    if "tower" in facts:
        try:
            flags[TOWER] = typed(facts["tower"], Tower, prefix="tower.")
        except ConfigError as error:
            message = f"{facts['asked']} has a vision tower whose seconds and bytes are not known: {error}"
            raise ConfigError("unsupported-model", message) from error
