"""Read YAML as configurations use it: text, numbers, truth values, lists, and mappings whose keys are text.

PyYAML reads it. On top of it, numbers with an exponent are numbers (``1e-4``), a key stands once in a mapping, dates are text,
tags are refused, and so is what would take unbounded memory or stack: deep nesting, and anchors that repeat each other.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MOST_LEVELS = 50
MOST_VALUES = 100_000
"""Anchors repeated as often as they are referred to."""

_FLOAT = "tag:yaml.org,2002:float"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_NUMBER = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)


class YamlError(ValueError):
    """No YAML, or not such as configurations use; the message says where and why on one line."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_FLOAT, _TIMESTAMP)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is no text; write it in quotes", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that would be read as a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT, _NUMBER, list("-+0123456789."))


def read_yaml(text: str) -> Any:
    """Return the one value that a YAML text describes; ``None`` for an empty text.

    Raises:
        YamlError: it describes none.
    """
    try:
        _check_extent(text)
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise YamlError(f"{_place(error.problem_mark or error.context_mark)}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from error
    except ValueError as error:  # of Python's own numbers
        raise YamlError(str(error)) from error


def write_yaml(value: Any, flow: bool = False) -> str:
    """Return text that ``read_yaml`` reads as this value, keys in their order; tuples become lists.

    Args:
        value: text, numbers, truth values, lists and mappings.
        flow: write each innermost list or mapping on one line.
    """
    style = {"default_flow_style": None, "width": 10_000} if flow else {}
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style)


def _check_extent(text: str) -> None:
    """Check the extent before anything is built: going through the parser's events takes no stack and little memory."""
    sizes = [0]
    anchors: dict[str, int] = {}
    open_anchors: list[str | None] = [None]
    for event in yaml.parse(text, _Loader):
        if getattr(event, "tag", None) is not None:
            raise YamlError(f"{_place(event.start_mark)}: the tag {event.tag} is not known here; leave it out")
        if isinstance(event, yaml.CollectionStartEvent):
            if len(sizes) > MOST_LEVELS:
                raise YamlError(f"{_place(event.start_mark)}: nested more than {MOST_LEVELS} deep")
            sizes.append(1)
            open_anchors.append(event.anchor)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            size, anchor = sizes.pop(), open_anchors.pop()
        elif isinstance(event, yaml.ScalarEvent):
            size, anchor = 1, event.anchor
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in open_anchors:
                raise YamlError(f"{_place(event.start_mark)}: *{event.anchor} refers to what it is a part of")
            size, anchor = anchors.get(event.anchor, 1), None
        else:
            continue
        if anchor is not None:
            anchors[anchor] = size
        sizes[-1] += size
        if sizes[-1] > MOST_VALUES:
            raise YamlError(
                f"{_place(event.start_mark)}: more than {MOST_VALUES} values, anchors repeated as often as referred to"
            )


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
