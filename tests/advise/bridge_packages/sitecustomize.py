"""Let Megatron-Bridge be imported where its data loaders and vision libraries are not installed.

Recipes import them and never use them. Only packages that Megatron-Bridge imports itself, and that are missing, are replaced.
Its training loop calls the functions of ``ANSWERS``, which answer as the packages do.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import te_stand_in  # noqa: F401 - Transformer Engine's compiled part

MISSING = (
    "datasets",
    "diffusers",
    "modelopt",
    "nvidia_resiliency_ext",
    "toml",
    "torch.utils.tensorboard",
    "megatron.energon",
)
ANSWERS = {"get_tensor_shapes_adjust_fn_for_distillation": lambda model, **_: None}
"""What modelopt answers for a model that it did not make."""


class Absent(ModuleType):
    """A module in which every name is a class, or a decorator if it is in small letters."""

    __path__: list[str] = []
    __version__ = "99.0.0"  # new enough for what asks

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        made = ANSWERS.get(name, _decorator)
        if not name.islower():
            made = type(name, (), {"__init__": lambda self, *_, **__: None})
        setattr(self, name, made)
        return made


def _decorator(*arguments: object, **_: object) -> object:
    return arguments[0] if arguments and callable(arguments[0]) else lambda function: function


class Finder(MetaPathFinder, Loader):
    """Finds the missing packages and their modules."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if f"{name}.".startswith(_PREFIXES) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


_PREFIXES = tuple(f"{name}." for name in MISSING)
sys.meta_path.insert(0, Finder())


def answer_for(*names: str) -> None:
    """Replace further packages."""
    global _PREFIXES
    _PREFIXES += tuple(f"{name}." for name in names)
