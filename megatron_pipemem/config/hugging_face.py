"""The shapes of public models, by their names on Hugging Face. They ship with the package, so no network is needed."""

from __future__ import annotations

import re
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from megatron_pipemem.config.loading import SHIPPED, load, read_raw, typed
from megatron_pipemem.config.model import Model

_FILE = SHIPPED / "hugging_face.yaml"
_SAME_SHAPE = re.compile(r"-(instruct|base|chat|it|thinking|hf|bf16|fp8|rl|sft|\d{4})(?=-|$)")
"""Parts of names that change weights and no shape."""


def known_model(name: str) -> Model | None:
    """Return the shape of a model, or ``None`` if it is unknown.

    ``name`` is its name on Hugging Face, or the path of a folder whose name is that name.
    """
    shapes: dict[str, str | dict[str, Any]] = _table()["shapes"]
    shape: str | dict[str, Any] = _key(name)
    while isinstance(shape, str) and shapes.get(shape, shape) != shape:
        shape = shapes[shape]
    if isinstance(shape, dict):
        return typed(shape, Model, _FILE)
    return load(shape, Model) if (SHIPPED / Model.config_folder / f"{shape}.yaml").is_file() else None


def unpriced_part(name: str) -> str | None:
    """Return the part of this model that has no price, for example ``a vision tower``, or ``None``."""
    key = _key(name)
    return next((part for part, names in _table()["unpriced"].items() if key.startswith(tuple(names))), None)


def _key(name: str) -> str:
    last = PurePosixPath(name.rstrip("/")).name.lower().removeprefix("meta-")
    return _SAME_SHAPE.sub("", last)


@cache
def _table() -> dict[str, Any]:
    return read_raw(_FILE)
