"""Convert the words of a Megatron command to a run: model, parallel sizes, schedule, and all other flags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any, Literal, NoReturn

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.model import cut_flags, layout
from megatron_pipemem.model.expressions import listed
from megatron_pipemem.model.model import DELTA, EXPERTS, INDEX, LATENT, MAMBA, Model, Tower
from megatron_pipemem.request import flags_of
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.options import STOCK, parse_options
from megatron_pipemem.tools.advise.consumers import IMAGES, MEGATRON, TOWER, Consumer
from megatron_pipemem.tools.advise.shell import UNKNOWN
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import MOCK, Parallelism, Run, ScheduleChoice, Training
from megatron_pipemem.values import refuse_if, whole_number

_PER_NODE = ("nproc-per-node", "ntasks-per-node", "gpus-per-node", "actor-num-gpus-per-node")
_NODES = ("nnodes", "nodes", "actor-num-nodes")
_GPUS = "give --gpus N, or --pipemem-check=N"
_GPT2 = 50257
_TYPING_ERROR = 0.9
"""Similarity to a known flag above which an unknown flag counts as mistyped. Others are the program's own."""
_TRAINING = ("data-path", "mock-data", "data-cache-path", "save-interval", "load", "train-iters")
_ELSEWHERE = ("save", "pretrained-checkpoint", "exit-signal", "exit-signal-handler", "pipemem-report", "pipemem-trace")


@dataclass(frozen=True)
class Reading:
    """The run that a command starts, and the assumptions about it.

    Args:
        run: the run that the command starts.
        program: the training program, as the command names it.
        assumed: sentences about facts that the command leaves open.
        consumer: the kind of program.
    """

    run: Run
    program: str
    assumed: tuple[str, ...]
    consumer: Consumer = MEGATRON


@dataclass(frozen=True)
class Context:
    """Facts that a command or recipe may leave open. Numbers are ``None`` if they are not known otherwise."""

    known: Mapping[str, Mapping[str, Any]]  # flags of Megatron's parser, as ``megatron.known_flags`` describes them
    cluster: Cluster  # whose devices are priced; the number of nodes follows from the command
    devices: int | None = None  # of the whole run
    vocabulary: int | None = None  # tokens in the vocabulary
    images: int | None = None  # in a sequence, for a model with a vision tower


def parts(words: Sequence[str]) -> tuple[dict[str, str], str, Sequence[str]]:
    """Return the launcher's options of a command, the program (a script, or a module after ``-m``), and the words after it."""
    place = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    place = words.index("-m") + 1 if place is None else place
    return _launcher(words[:place]), words[place], words[place + 1 :]


def read_flags(given: Mapping[str, Any], launcher: Mapping[str, str], program: str, context: Context) -> Reading:
    """Return the run of a program with these flags (``read_command``).

    Args:
        given: values by flag without dashes; ``True`` for a flag without a value, a list for several values.
        launcher: options of the launcher by name without leading dashes.
        program: the training program or recipe.
        context: facts that the flags may leave open.
    """
    flags = _Flags(dict(given), context.known)
    assumed: list[str] = []
    model = replace(_model(flags, assumed, context.vocabulary), tower=_tower(flags, assumed, context.images))
    choice = _schedule(flags)
    cut, nodes, per_node = _parallelism(flags, launcher, context.devices, context.cluster, assumed)
    if choice.name == STOCK:
        cut = replace(cut, chunks=_chunks(flags, model, cut.pp))
    if model.experts and cut.tp > 1 and not cut.sequence_parallel:
        cut = replace(cut, sequence_parallel=True)
        assumed.append("--sequence-parallel, without which Megatron trains no experts on tensor-parallel ranks; add it")
    precision: Literal["bf16", "fp16", "fp32"] = "bf16" if flags.on("bf16") else "fp16" if flags.on("fp16") else "fp32"
    cluster = replace(context.cluster, nodes=nodes, devices_per_node=per_node)
    run = Run(model, cluster, cut, choice, _training(flags), precision, flags.left())
    if rank := run.execution.adapters:
        assumed.append(
            f"adapters of rank {rank} on all linear layers; the layers' own weights have no W, so a split backward gains "
            "little"
        )
    return Reading(run, program, tuple(assumed))


@dataclass
class _Flags:
    """The flags of a command. It notes each flag that is read, so that ``left`` returns the others."""

    given: dict[str, Any]  # values by flag without dashes
    known: Mapping[str, Mapping[str, Any]]  # flags of Megatron's parser
    asked: set[str] = field(default_factory=set)  # flags that have been read

    def get(self, name: str) -> Any:
        """Return the value of a flag, or Megatron's default.

        Raise a ConfigError if the value depends on an unknown variable, or is not among the flag's choices.
        """
        self.asked.add(name)
        value = self.given.get(name)
        if value is None:
            return self.known.get(f"--{name}", {}).get("default")
        if UNKNOWN in str(value):
            ask_for(str(value), f"--{name}")
        choices = self.known.get(f"--{name}", {}).get("choices")
        if choices and not isinstance(value, list) and str(value) not in choices:
            raise ConfigError("bad-choice", f"is {shortened(value)}; give {' or '.join(choices)}", key=f"--{name}")
        return value

    def real(self, name: str, default: float) -> float:
        value = self.get(name) or default
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError("bad-number", f"is {shortened(value)}; give a number", key=f"--{name}") from error

    def on(self, name: str) -> bool:
        self.asked.add(name)
        return self.given.get(name) is not None

    def number(self, name: str) -> int | None:
        return whole_number(self.get(name), name)

    def size(self, name: str) -> int:
        """Return the value of a flag that is at least 1, which is also its default."""
        value = self.number(name)
        refuse_if(value is not None and value < 1, "bad-number", f"--{name}", f"is {value}; give at least 1")
        return value or 1

    def sizes(self, fields: Mapping[str, str]) -> dict[str, int]:
        """Return the fields of a model that the command or Megatron's defaults give.

        ``fields`` has Megatron's attributes, whose names the flags have, by the fields.
        """
        found = {field: self.number(name.replace("_", "-")) for field, name in fields.items()}
        return {field: size for field, size in found.items() if size is not None}

    def need(self, name: str) -> int:
        value = self.number(name)
        if value is None:
            raise ConfigError(
                "unknown-size",
                "is missing, and the model's shape follows from it; add it to the command",
                key=f"--{name}",
            )
        return value

    def left(self) -> dict[str, Any]:
        """Return the flags that have not been read, except those with unknown values."""
        others = {name: value for name, value in self.given.items() if name not in self.asked}
        return {name: value for name, value in others.items() if UNKNOWN not in str(value)}


def ask_for(text: str, key: str) -> NoReturn:
    variable = text.split(UNKNOWN)[1]
    raise ConfigError(
        "unknown-size",
        f"needs a value that the script does not give; give --env {variable}=VALUE, or write the value into the script",
        key=key,
    )


def named(words: Sequence[str], known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a program's flags by name without dashes. Names that look mistyped are refused.

    The value is ``True`` for a flag without a value, and a list for several values. Of flags of this package that may be
    repeated, it is a list with the values of all occurrences.
    """
    found: dict[str, Any] = {}
    repeated = {flag.name for flag in flags_of(ScheduleChoice).values() if flag.repeated}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("--") or word == "--":
            continue
        word, equals, value = word.partition("=")
        values = [value] if equals else []
        flag = known.get(word)
        near = [] if flag is not None or UNKNOWN in word else get_close_matches(word, known, n=1, cutoff=_TYPING_ERROR)
        if near and not _is_variation(word, near[0]):
            raise ConfigError("unknown-flag", f"Megatron has no such flag; did you mean {near[0]}?", key=word)
        while flag is None or not flag["bare"]:
            if place == len(words) or words[place].startswith("--") or (values and (flag or {}).get("nargs") is None):
                break
            values.append(words[place])
            place += 1
        name = word.lstrip("-")
        if word in repeated:
            found[name] = [*found.get(name, []), *values]
        else:
            found[name] = True if not values else values[0] if len(values) == 1 else values
    return found


def _is_variation(word: str, known: str) -> bool:
    """Return whether a flag differs from another one by whole words or a number, which a typing error does not."""
    words, others = (set(each.strip("-0123456789").split("-")) for each in (word, known))
    return words <= others or others <= words


def _launcher(words: Sequence[str]) -> dict[str, str]:
    """Return the options of the launcher, such as torchrun, by name without leading dashes.

    Underscores in names become dashes, and ``-N`` is ``nodes``.
    """
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            continue
        value = value if equals else "".join(words[place + 1 : place + 2])
        found[{"-N": "nodes"}.get(name, name.lstrip("-").replace("_", "-"))] = value
    return found


def _whole(text: str | None) -> int | None:
    """Return a launcher's number; for a range of nodes like ``2:4``, the greatest. ``None`` if it is not a number.

    Raises:
        ConfigError: the value depends on a variable that is unknown.
    """
    if UNKNOWN in (text or ""):
        ask_for(str(text), "the launcher")
    match = re.fullmatch(r"(?:\d+:)?(\d+)", text or "")
    return int(match[1]) if match else None


def _parallelism(
    flags: _Flags, launcher: Mapping[str, str], devices: int | None, cluster: Cluster, assumed: list[str]
) -> tuple[Parallelism, int, int]:
    """Return the parallel sizes, the number of nodes, and the number of devices of each node.

    A sentence is added to ``assumed`` if the command leaves the number of nodes open. Raise a ConfigError if
    the number of devices is unknown or does not fit the parallel sizes.
    """
    tp, pp, cp, ep = (
        flags.size(f"{kind}-parallel-size") for kind in ("tensor-model", "pipeline-model", "context", "expert-model")
    )
    micro = flags.size("micro-batch-size")
    # With a known number of devices, the launcher's unknown values do not matter.
    launcher = {name: text for name, text in launcher.items() if devices is None or UNKNOWN not in text}
    per_node = next((found for name in _PER_NODE if (found := _whole(launcher.get(name)))), None)
    per_node = per_node or flags.number("actor-num-gpus-per-node")
    nodes = next((found for name in _NODES if (found := _whole(launcher.get(name)))), None) or flags.number(
        "actor-num-nodes"
    )
    group = tp * pp * cp
    unsaid = "the command does not give the number of devices"
    refuse_if(devices is None and per_node is None, "unknown-size", "devices", f"{unsaid}; {_GPUS}")
    devices = devices or (per_node or 1) * (nodes or 1)
    starts, open_nodes = f"the command starts {devices} processes on each node", "does not give the number of nodes"
    some = nodes is None and devices < group and devices % group
    refuse_if(some, "unknown-size", "devices", f"{starts}, and {open_nodes}; {_GPUS}")
    uneven = f"tp x pp x cp = {group} does not divide {devices} devices; {_GPUS}"
    refuse_if(devices % group, "does-not-divide", "devices", uneven)
    dp = devices // group
    if nodes is None:
        assumed.append(f"{devices} devices, so {dp} data-parallel ranks")
    batch = flags.number("global-batch-size") or micro * dp
    per_node = min(per_node or cluster.devices_per_node, devices)
    etp = flags.number("expert-tensor-parallel-size")
    experts = ep * (etp or tp)
    apart = f"{starts}, which pp = {pp} and ep x etp = {experts} do not divide, and {open_nodes}; {_GPUS}"
    refuse_if(nodes is None and (devices // pp) % experts, "unknown-size", "devices", apart)
    cut = Parallelism(tp, pp, dp, cp, ep, None if etp == tp else etp, None, micro, batch, flags.on("sequence-parallel"))
    return cut, -(-devices // per_node), per_node


def _chunks(flags: _Flags, model: Model, pp: int) -> int | None:
    """Return the number of stages per pipeline rank; ``None`` if it is one."""
    cut = cut_flags.cut_of(flags.given, pp, model.layers)
    for name in (cut_flags.VIRTUAL_STAGES, cut_flags.LAYERS_PER_STAGE):
        flags.get(name)
    return int(cut.chunks) if cut is not None and cut.chunks > 1 else None


def _schedule(flags: _Flags) -> ScheduleChoice:
    recompute = flags.get("recompute-granularity") or ("selective" if flags.on("recompute-activations") else "none")
    modules = flags.get("recompute-modules") or ["core_attn"]
    for name in ("recompute-method", "recompute-num-layers"):
        flags.get(name)
    said: dict[str, Any] = {"recompute": recompute}
    if recompute == "selective":
        said["recompute_modules"] = tuple([modules] if isinstance(modules, str) else modules)
    if (schedule := flags.given.get("pipemem-schedule")) is not None:
        flags.asked.add("pipemem-schedule")
        said["name"] = schedule
    for key, flag in flags_of(ScheduleChoice).items():
        if (value := flags.given.get(flag.name.lstrip("-"))) is not None:
            flags.asked.add(flag.name.lstrip("-"))
            said[key] = parse_options(flag.name, value) if flag.repeated else value
    return ScheduleChoice(**said)


def _training(flags: _Flags) -> Training:
    """Return the number of iterations, the data and the checkpoint folders. Unknown paths are left out."""
    given = {name: flags.given.get(name) for name in _TRAINING}
    flags.asked |= {*_TRAINING, *_ELSEWHERE}
    known = {name: value for name, value in given.items() if value is not None and UNKNOWN not in str(value)}
    data = known.get("data-path", MOCK)
    return Training(
        iterations=whole_number(known.get("train-iters"), "train-iters") or Training.iterations,
        save_interval=whole_number(known.get("save-interval"), "save-interval") or Training.save_interval,
        load=known.get("load"),
        data=" ".join(data) if isinstance(data, list) else str(data),
        cache=known.get("data-cache-path"),
    )


def _model(flags: _Flags, assumed: list[str], vocabulary: int | None) -> Model:
    pattern_flag, pattern = cut_flags.given_pattern(flags.given)
    other = (
        "belongs to an encoder-decoder model, which Megatron runs without these schedules; give a GPT or hybrid model"
    )
    for name in ("decoder-num-layers", "decoder-seq-length"):
        refuse_if(name in flags.given, "unsupported-model", f"--{name}", other)
    shape: dict[str, Any] = {
        "hidden": flags.need("hidden-size"),
        "heads": flags.need("num-attention-heads"),
        "sequence": flags.need("seq-length"),
    }
    if pattern_flag is None:
        shape |= {"layers": flags.need("num-layers"), "mtp_layers": flags.number("mtp-num-layers") or 0}
    else:
        layers, *further = pattern.split(layout.FURTHER)
        if not layout.is_cut(pattern):
            flags.get(pattern_flag)
        flags.asked |= {"num-layers", "mtp-num-layers"}
        layers = layout.pattern_layers(layers)
        shape |= {
            "layers": len(layers),
            "pattern": layers,
            "mtp_layers": len(further),
            "mtp_pattern": further[0] if further else None,
        }
    activation = next((name for name in ("swiglu", "squared-relu") if flags.on(name)), "gelu").replace("-", "_")
    hidden = shape["hidden"]
    ffn = flags.number("ffn-hidden-size") or (
        4 * hidden if activation != "swiglu" else int(4 * hidden * 2 / 3 / 64) * 64
    )
    rope = flags.on("use-rotary-position-embeddings")
    asked = str(flags.get("position-embedding-type"))  # read in any case, because scripts give both flags
    position = "rope" if rope else asked
    grouped = flags.on("group-query-attention")
    key_heads = flags.number("num-query-groups")
    rates = [flags.real(name, 0.0) for name in ("attention-dropout", "hidden-dropout")]
    flags.get("max-position-embeddings")
    bias = "all" if not flags.on("disable-bias-linear") else "none"
    shape |= {
        "kv_heads": key_heads if grouped else None,
        "head_channels": flags.number("kv-channels"),
        "ffn": ffn,
        "activation": activation,
        "norm": str(flags.get("normalization")).lower(),
        "position": "learned" if position == "learned_absolute" else "none" if position == "none" else "rope",
        "bias": "qkv_only" if flags.on("add-qkv-bias") and bias == "none" else bias,
        "tied": not flags.on("untie-embeddings-and-output-weights"),
        "dropout": max(rates),
        "qk_norm": flags.on("qk-layernorm"),
        "attention_gate": flags.on("attention-output-gate"),
    }

    if flags.on("multi-latent-attention"):
        shape |= flags.sizes(LATENT)
    variant = flags.get("experimental-attention-variant")
    if variant == "dsa":
        shape |= flags.sizes(INDEX)
    if variant == "gated_delta_net":
        shape["attention_every"] = _attention_every(str(flags.get("linear-attention-freq")), shape["layers"])
    if variant == "gated_delta_net" or "G" in pattern:
        shape |= flags.sizes(DELTA)
    if "M" in pattern:
        shape |= flags.sizes(MAMBA)
    shape |= _experts(flags, shape["layers"], pattern_flag is not None)
    model = Model(**shape, vocabulary=1)
    return replace(model, vocabulary=vocabulary or _vocabulary(flags, model, assumed))


def _attention_every(text: str, layers: int) -> int:
    """Return the model setting ``attention_every`` that ``--linear-attention-freq``, a number or a list, describes."""
    if text.isdecimal():
        return int(text)
    linear = listed(text, "--linear-attention-freq")
    steps = range(1, layers + 1) if len(linear) == layers else ()
    every = next((n for n in steps if linear == [int((i + 1) % n > 0) for i in range(layers)]), None)
    if every is None:
        raise ConfigError(
            "unsupported-model",
            f"is {shortened(text)}, which is not supported; give attention to every n-th layer",
            key="--linear-attention-freq",
        )
    return every


def _tower(flags: _Flags, assumed: list[str], images: int | None) -> Tower | None:
    """Return the vision tower of the command's model, or ``None``.

    Its number of images is ``images``, the user's, or else that of the command. If both are unknown, a sentence is
    added to ``assumed``.
    """
    tower: Tower | None = flags.given.get(TOWER)
    flags.asked |= {TOWER, IMAGES}
    if tower is None:
        return None
    said = flags.given.get(IMAGES)
    if said is not None:
        count, *sides = said
        fixed = tower.projection == 0  # its images are scaled to one size
        patches = tower.patches if fixed else max(1, prod(side // tower.patch for side in sides))
        tower = replace(tower, images=max(1, count), patches=patches)
    if images is not None:
        tower = replace(tower, images=images)
    elif said is None:
        assumed.append(f"{tower.images} image of {tower.patches:,} patches in a sequence; --images N changes it")
    return tower


def _experts(flags: _Flags, layers: int, is_hybrid: bool) -> dict[str, Any]:
    experts = flags.number("num-experts")
    if not experts:
        return {}
    shape: dict[str, Any] = {
        "experts": experts,
        **flags.sizes(EXPERTS),
        "router_score": flags.get("moe-router-score-function"),
        "router_bias": flags.on("moe-router-enable-expert-bias"),
        "router_scale": flags.real("moe-router-topk-scaling-factor", 1.0),
    }
    flags.on("no-bias-swiglu-fusion")
    return shape if is_hybrid else shape | _expert_layers(flags, layers)


def _expert_layers(flags: _Flags, layers: int) -> dict[str, int]:
    """Return the model settings ``moe_every`` and ``dense_layers`` that ``--moe-layer-freq`` describes.

    The flag is a number, or a list like ``([0]*3+[1]*58)``. Raise a ConfigError for a list that these settings cannot
    express.
    """
    text = str(flags.get("moe-layer-freq"))
    if text.isdecimal():
        return {"moe_every": int(text)}
    has = listed(text, "--moe-layer-freq")
    dense = has.index(1) if 1 in has else 0
    steps = range(1, layers + 1) if len(has) == layers else ()
    every = next((step for step in steps if has[dense:] == [int(n % step == 0) for n in range(layers - dense)]), None)
    if every is None or (every > 1 and dense):
        raise ConfigError(
            "unsupported-model",
            f"is {shortened(text)}, which is not supported; give experts to every n-th of {layers} layers, or to all layers "
            "after the dense ones",
            key="--moe-layer-freq",
        )
    return {"moe_every": every, "dense_layers": dense}


def _vocabulary(flags: _Flags, model: Model, assumed: list[str]) -> int:
    """Return the vocabulary's number of tokens, from the command, a known model of this shape, or the tokenizer.

    A sentence is added to ``assumed`` unless the command gives the number. Raise a ConfigError if all are unknown.
    """
    said = flags.number("vocab-size") or flags.number("padded-vocab-size")
    if said is not None:
        return said
    for path in sorted((Path(__file__).parents[1] / "config" / "models").glob("*.yaml")):
        other = load(path.stem, Model)
        if _shape(other) == _shape(model):
            assumed.append(f"a vocabulary of {other.vocabulary:,}, as {path.stem} has, whose shape this is")
            return other.vocabulary
    if flags.given.get("tokenizer-type") == "GPT2BPETokenizer" or "merge-file" in flags.given:
        assumed.append(f"a vocabulary of {_GPT2:,}, as GPT-2's tokenizer has")
        return _GPT2
    raise ConfigError(
        "unknown-size",
        "is missing, and no known model has this shape; add it to the command, or give --vocabulary N",
        key="--vocab-size",
    )


def _shape(model: Model) -> tuple[int, ...]:
    return (model.layers, model.hidden, model.heads, model.key_heads, model.ffn_width, model.experts)
