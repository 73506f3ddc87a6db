"""Replace functions of Megatron: check all before the first is replaced, and restore all afterwards.

``symbols`` has the list of the functions.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from megatron_pipemem.errors import UpstreamError

TESTED_VERSIONS = ("0.19.0", "0.19.2")


@dataclass(frozen=True)
class Symbol:
    """A function of Megatron that this package replaces or uses."""

    module: str  # dotted name
    name: str  # attribute of the module, or ``Class.attribute``
    # names of parameters that it must have: a function without one of them does something else
    parameters: tuple[str, ...] = ()
    by_name: bool = False  # modules import the function itself, so it is replaced in every module that holds it

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def of_program(self) -> bool:
        """Whether the function is in a program over Megatron-Core, which not every run imports."""
        return self.module.startswith(("megatron.training.", "megatron.bridge."))

    def owner(self) -> tuple[object, str]:
        """Return the module or class that has the function as an attribute, and the attribute's name.

        The module is imported. Raise an UpstreamError if the class does not exist.
        """
        # Through sys.modules: a package may re-export a function under the name of its own submodule.
        importlib.import_module(self.module)
        owner: object = sys.modules[self.module]
        *path, attribute = self.name.split(".")
        for part in path:
            owner = self._get(owner, part)
        return owner, attribute

    def resolve(self) -> Callable:
        """Return the function that Megatron calls at present, which may be a replacement.

        Raises:
            UpstreamError: there is no such function, or it lacks one of ``parameters``.
        """
        owner, attribute = self.owner()
        function = self._get(owner, attribute)
        # Compiled functions have no signature to ask for.
        missing = set(self.parameters) - set(inspect.signature(function).parameters) if self.parameters else set()
        if missing:
            raise UpstreamError(
                "other-version",
                f"{self} has no parameter {', '.join(sorted(missing))} in {self._installed()}; {self._tested()}",
            )
        return function

    def _get(self, owner: object, attribute: str) -> Callable:
        try:
            return getattr(owner, attribute)
        except AttributeError:
            raise UpstreamError("other-version", f"{self._installed()} has no {self}; {self._tested()}") from None

    def _installed(self) -> str:
        if self._is_of_te:
            return f"transformer_engine {importlib.import_module('transformer_engine').__version__}"
        return f"megatron-core {megatron_version()}"

    def _tested(self) -> str:
        if self._is_of_te:
            return "install a version of the support matrix, or pass --pipemem-weight-inputs gathered, which needs none of it"
        return f"megatron_pipemem is tested with megatron-core {', '.join(TESTED_VERSIONS)}; install one of these"

    @property
    def _is_of_te(self) -> bool:
        return self.module.startswith("transformer_engine.")


Replacements = list[tuple[Symbol, Callable]]
"""Functions to replace, and their new functions. A new function gets the original as its first argument."""


class Feature:
    """A part of this package that replaces functions of Megatron."""

    def replacements(self) -> Replacements:
        """Return the functions to replace and their new functions. Those of programs that are not imported stay."""
        return []


@dataclass
class PatchSet:
    """The functions that are replaced at present. ``remove`` restores all originals."""

    _symbols: list[Symbol] = field(default_factory=list)
    _originals: list[tuple[object, str, object]] = field(default_factory=list)
    _by_name: list[tuple[str, Callable, Callable]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Return the name of each replaced function within its module, without duplicates."""
        return list(dict.fromkeys(symbol.name for symbol in self._symbols))

    def install(self, replacements: Replacements) -> None:
        """Replace all functions, or none if one of them fails.

        Raise an UpstreamError if a function is missing or lacks a parameter. If a function is replaced several times,
        each replacement gets the one before it as its original. A replacement has the attributes of the original,
        except those that the new function sets itself.
        """
        for symbol, _ in replacements:
            symbol.resolve()
        try:
            for symbol, act in replacements:
                owner, attribute = symbol.owner()
                original = getattr(owner, attribute)  # which another replacement may have put there
                replacement = _in_place_of(original, act)
                held = vars(owner).get(attribute, original)
                setattr(owner, attribute, staticmethod(replacement) if isinstance(held, staticmethod) else replacement)
                self._symbols.append(symbol)
                self._originals.append((owner, attribute, held))
                if symbol.by_name:
                    self._by_name.append((symbol.name, original, replacement))
            _rebind(self._by_name)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        self._symbols.clear()
        while self._originals:
            owner, attribute, original = self._originals.pop()
            setattr(owner, attribute, original)
        by_name, self._by_name = self._by_name, []
        _rebind(
            [(name, replacement, original) for name, original, replacement in by_name]
        )  # also in modules imported since


_OF_TORCH = "torch triton sympy mpmath numpy networkx cuda".split()
_OF_PYTHON = "setuptools distutils packaging more_itertools typing_extensions attr attrs yaml click".split()
_LIBRARIES = (
    "wandb pydantic pydantic_core huggingface_hub trio anyio rich google transformers tokenizers omegaconf httpx httpx2 "
    "httpcore httpcore2 h11 jinja2 filelock psutil regex opentelemetry PIL tqdm"
).split()
_HOLD_NOTHING = {*sys.stdlib_module_names, *_OF_PYTHON, *_OF_TORCH, *_LIBRARIES}
_OWN_NAMES = ("megatron", "transformer_engine")
"""Packages with many modules, which import each other's functions under no other name."""


def _rebind(changes: Sequence[tuple[str, Callable, Callable]]) -> None:
    """Replace functions in every imported module that has them as attributes, under any name.

    ``changes`` are (name in its own module, present function, new function). A new function may itself be replaced by
    another change. All share one pass over the thousands of modules of a run. Modules of Python, PyTorch and common
    libraries are skipped, because they hold no function of Megatron.
    """
    wanted_by_id = {id(held): wanted for _, held, wanted in changes}
    names = {name for name, _, _ in changes}
    for path, module in list(sys.modules.items()) if changes else ():
        package = path.partition(".")[0]
        if package in _HOLD_NOTHING or not isinstance(module, ModuleType):
            continue
        held = vars(module)
        if package not in _OWN_NAMES and wanted_by_id.keys().isdisjoint(map(id, held.values())):
            continue
        for name in [each for each in names if each in held] if package in _OWN_NAMES else list(held):
            value = held[name]
            while id(value) in wanted_by_id:
                value = wanted_by_id[id(value)]
            if value is not held[name]:
                setattr(module, name, value)


def _in_place_of(original: Callable, act: Callable) -> Callable:
    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return act(original, *args, **kwargs)

    vars(replacement).update(vars(act))
    return replacement


def is_imported(module: str) -> bool:
    return isinstance(sys.modules.get(module), ModuleType)


def megatron_version() -> str:
    try:
        return str(importlib.import_module("megatron.core").__version__)
    except (ImportError, AttributeError):
        return "(not installed)"


def version_told() -> str:
    """Return the version of megatron-core for a message. An untested version is followed by the tested ones."""
    version = megatron_version().partition("+")[0]  # without the commit that it was built from
    return version if version in TESTED_VERSIONS else f"{version} (tested are {', '.join(TESTED_VERSIONS)})"
