"""The settings of programs that train with Megatron: their fields, Megatron's flags for these, and the words to change."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.flags import Flags, words
from megatron_pipemem.model import layout
from megatron_pipemem.model.cut_flags import LAYERS_PER_STAGE, VIRTUAL_STAGES, is_given
from megatron_pipemem.schedule.options import STOCK
from megatron_pipemem.tools.advise import advice
from megatron_pipemem.tools.advise.advice import OURS, Advice, Way, changed_flags
from megatron_pipemem.tools.config.arguments import ENDS, LAYOUT, UNKNOWN, VIRTUAL, MissingSetting
from megatron_pipemem.tools.config.loading import known_model, unpriced_part
from megatron_pipemem.tools.config.runs import ADAPTERS, EP_OVERLAP, FREEZES, Run
from megatron_pipemem.tools.launch.command import model_flags
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown
from megatron_pipemem.tools.planner.pricing import STOCKS
from megatron_pipemem.tools.planner.space import STOCKS_ALONE

_KNOWN = "Qwen/Qwen3-8B"
"""The model of examples in messages."""
TOWER, IMAGES = "vision-tower", "vision-images"
"""Keys of a model's ``Tower`` and of its images (number, height, width) among its flags. Megatron has no such flags."""


def flags_of_model(name: str, setting: str) -> dict[str, Any]:
    """Return the flags of a public model's shape, by its name on Hugging Face, or the path of a folder with that name.

    Raise a MissingSetting about ``setting``, the name of the setting that names the model, if the shape is unknown.
    """
    if (part := unpriced_part(name)) is not None:
        raise ConfigError(
            "unsupported-model",
            f"{name} has {part}, whose seconds and bytes are not known; no schedules can be compared for this model",
        )
    model = known_model(name)
    if model is None:
        name = name.replace(UNKNOWN, "")
        word = f"{setting}={_KNOWN}"
        shown = f"the sizes of {name} are not known here" if name not in ("", "None") else "no model is named"
        message = f"{shown}; give the name of a model on Hugging Face with these sizes, as in {word}"
        raise MissingSetting(message, setting, word, "MODEL")
    if model.activation == "geglu":  # costs the same, and Megatron's parser has no flag for it
        model = replace(model, activation="swiglu")
    flags = {flag: value for flag, value in model_flags(model).items() if value is not None and value is not False}
    return flags if model.tower is None else flags | {TOWER: model.tower}


def adapter_flags(rank: int) -> dict[str, Any]:
    """Return the flags of a model whose layers are frozen and have low-rank adapters; none for rank 0."""
    return {FREEZES["language"]: True, ADAPTERS: rank} if rank else {}


@dataclass(frozen=True)
class Consumer:
    """A program that trains with Megatron, and how its settings are spelled."""

    # words that make the program import a module of the user's, whose import enables the schedule without a flag of ours
    hook: tuple[str, ...] = ()
    where: str | None = None  # the place of the call that enables a schedule, if no flag does
    # spells a field of Megatron's configuration with its value; None if the program takes Megatron's flags
    setting: Callable[[str, Any], list[str]] | None = None
    families: tuple[str, ...] = (*STOCKS, *OURS)  # schedules that the program can run
    slices: bool = False  # whether its sequences can be cut: they are not packed, and equally long
    pairs: bool = False  # whether it can run the schedules in which pairs pay
    vocabulary: bool = False  # whether its vocabulary can be cut: its forward step returns Megatron's token losses

    def advise(self, run: Run, slowdown: MeasuredSlowdown | None = None) -> Advice:
        """Return the advice for a run of the program, as ``advice.advise`` does."""
        return advice.advise(run, slowdown, self.families, self.slices, self.pairs, self.vocabulary)


def changes(consumer: Consumer, today: Run, way: Way, written: Flags) -> tuple[list[str], list[str]]:
    """Return the words to add to a program's settings, and those to remove, so that ``today``'s run becomes ``way``.

    ``written`` are the flags of the program's command, by the names that it writes.
    """
    hook = [*consumer.hook] if not way.is_stock and way.run.schedule.name != today.schedule.name else []
    added: list[str] = []
    gone: list[str] = []
    if consumer.setting is None:
        more, less = changed_flags(today, way.run)
        stays = {name.partition("=")[0] for name in more if "=" in name}  # an option of a schedule, with another value
        less = _without(_as_written(less, written), stays) | _refused_beside(more, way, written)
        foreign = {flag for flag in {*more, *less} if consumer.hook and flag.startswith("pipemem-")}
        return [*hook, *words(_without(more, foreign))], words(_without(less, foreign))
    for field, value in _changed_fields(today, way.run, way.step.placement.num_chunks).items():
        words_of = gone if value is None and consumer is SWIFT and field != _RECOMPUTE else added
        words_of += consumer.setting(field, value)
    return [*hook, *added], gone


_RECOMPUTE = "recompute_granularity"
_OTHER_NAMES = {VIRTUAL_STAGES: LAYERS_PER_STAGE, "recompute-granularity": "recompute-activations"}
"""Flags that say in a command what another flag says of a run."""


def _as_written(less: Flags, written: Flags) -> Flags:
    """Return those flags to remove that a command has, by the names that it writes; all if there is no command."""
    names = [*(name.partition("=")[0] for name in less), *(_OTHER_NAMES[name] for name in less if name in _OTHER_NAMES)]
    return {name: written[name] for name in names if is_given(written, name)} if written else less


def _refused_beside(more: Flags, way: Way, written: Flags) -> Flags:
    """Return the flags of a command that Megatron refuses beside those of a way (its ``validate_args``)."""
    gone = [] if {VIRTUAL_STAGES, layout.FLAG}.isdisjoint(more) else [LAYERS_PER_STAGE]
    gone += layout.PATTERN_FLAGS[1:] if layout.PATTERN in more else []
    if way.step.placement.num_chunks > 1 and way.run.parallelism.pp == 2:
        gone.append("no-overlap-p2p-communication")
    return {name: written[name] for name in gone if is_given(written, name)}


def _without(flags: Flags, names: Collection[str]) -> Flags:
    return {flag: value for flag, value in flags.items() if flag not in names}


def call(way: Way) -> str | None:
    """Return the Python call that enables a schedule of this package; ``None`` for Megatron's own."""
    return (
        None if way.is_stock else f'megatron_pipemem.enable("{way.run.schedule.name}"{", pairs=True" * way.run.pairs})'
    )


def _changed_fields(today: Run, other: Run, chunks: int) -> dict[str, Any]:
    """Return Megatron's fields that differ between two runs: recompute, chunks, layout and overlaps, with the new values.

    A field that is no longer needed has the value ``None``.
    """
    fields: dict[str, Any] = {}
    if other.schedule.recompute == "none" != today.schedule.recompute:
        fields[_RECOMPUTE] = None
    if chunks != (today.parallelism.chunks or 1):
        fields[VIRTUAL] = None if chunks == 1 else chunks
    for flag, field in ((layout.FLAG, LAYOUT), (layout.PATTERN, layout.PATTERN_ARGUMENT)):
        if other.flags.get(flag) != today.flags.get(flag):
            fields[field] = other.flags.get(flag)
    fields |= {field: None for flag, field in ENDS.items() if today.flags.get(flag) and not other.flags.get(flag)}
    kept = other.flags if other.schedule.name == STOCK else {}  # of a call of ours, the setting is an argument
    gone = (flag for flag in STOCKS_ALONE if today.flags.get(flag) is True and flag not in kept)
    fields |= {flag.replace("-", "_"): False for flag in gone}
    return fields | ({EP_OVERLAP.replace("-", "_"): True} if kept.get(EP_OVERLAP) and not today.pairs else {})


def _python(field: str, value: Any) -> list[str]:
    section = "comm_overlap" if field.replace("_", "-") in STOCKS_ALONE else "model"
    return [f"config.{section}.{field} = {json.dumps(value) if isinstance(value, str) else value}"]


def _hydra(prefix: str, own: Sequence[str], others: str) -> Callable[[str, Any], list[str]]:
    """Return a function that spells overrides of Hydra.

    The fields in ``own`` are keys under ``prefix``. All other fields are in the mapping ``others`` under ``prefix``.
    """

    def spelled(field: str, value: Any) -> list[str]:
        return [f"++{prefix}{'' if field in own else f'.{others}'}.{field}={json.dumps(value)}"]

    return spelled


def _nemo_rl(field: str, value: Any) -> list[str]:
    if field == _RECOMPUTE:  # which its own switch sets
        return ["++policy.megatron_cfg.activation_checkpointing=false"]
    return _hydra("policy.megatron_cfg", [*ENDS.values()], "model_overrides")(field, value)


def _swift(field: str, value: Any) -> list[str]:
    if field == _RECOMPUTE:  # whose default is selective
        return [f"--{_RECOMPUTE}", "none"]
    flags = {field: flag.replace("-", "_") for flag, field in ENDS.items()}
    name = f"--{flags.get(field, field)}"
    return [name] if value is None else [name, str(value).lower() if value is False else str(value)]


MEGATRON = Consumer(slices=True, pairs=True, vocabulary=True)
BRIDGE = Consumer(where="in the recipe", setting=_python, pairs=True)
BRIDGE_HYBRID = replace(BRIDGE, families=("1f1b", "zb-h1", "gis"))  # its provider refuses virtual stages
NEMO_RL = Consumer(
    where="at the beginning of NeMo-RL's MegatronPolicyWorkerImpl.__init__",
    setting=_nemo_rl,
    families=("1f1b", "zb-h1"),  # it passes one model and one data iterator
)
SLIME = Consumer(
    ("--custom-megatron-init-path", "my_pipemem.init"),
    "in init(args) of my_pipemem.py",
    families=(*STOCKS, "zb-h1", "gis"),  # its model provider drops the process groups of a chunk
)
VERL = Consumer(
    ("++ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=my_pipemem",),
    "in my_pipemem.py",
    _hydra("actor_rollout_ref.actor.megatron", [VIRTUAL], "override_transformer_config"),
    (*STOCKS, "zb-h1", "gis"),  # its names of weights follow from ranks
)
VERL_SFT = Consumer(
    where="in my_pipemem.py, which VERL_USE_EXTERNAL_MODULES=my_pipemem in the environment imports",
    setting=_hydra("engine", [VIRTUAL], "override_transformer_config"),
    families=VERL.families,
)
SWIFT = Consumer(
    ("--external_plugins", "my_pipemem.py"),
    "in my_pipemem.py",
    _swift,
    (*STOCKS, "zb-h1", "gis"),  # mcore-bridge builds the chunks itself, for Megatron's own placement
)
