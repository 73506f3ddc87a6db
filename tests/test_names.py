"""A class name of the package means one thing."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import megatron_pipemem

PACKAGE = Path(megatron_pipemem.__file__).parent


def test_no_class_name_stands_twice():
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^ *class (\w+)[(:\[]", path.read_text(encoding="utf-8"), re.MULTILINE):
            places[name].append(str(path.relative_to(PACKAGE)))
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
