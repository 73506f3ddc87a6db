"""What YAML means in configurations, and what of it is refused before it takes memory or stack."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lanes import examples
from refusals import refused

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.tools.config.loading import MOST_LEVELS, YamlError, read_raw, read_yaml, write_yaml
from megatron_pipemem.values import converted


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3.0e-4", 3e-4),
        ("-1e5", -1e5),
        (".5", 0.5),
        ("1_000", 1000),
        ("-.inf", -math.inf),
        ("1.2.3", "1.2.3"),
        ("1e5x", "1e5x"),
        ("2024-01-02", "2024-01-02"),
        ("[1, 2.5, x, yes, off, null, ~, '1']", [1, 2.5, "x", True, False, None, None, "1"]),
        ("a: &once [x]\nb: [*once, *once]", {"a": ["x"], "b": [["x"], ["x"]]}),
        ("<<: {a: 1, b: 1}\nb: 2", {"a": 1, "b": 2}),
        ("", None),
    ],
)
def test_values(text, value):
    parsed = read_yaml(text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &a [*a]", "*a stands within its own anchor"),
        ("a: " + "[" * 3000 + "]" * 3000, f"line 1, column 53: nested more than {MOST_LEVELS} deep"),
        ("".join(f"{' ' * i}a:\n" for i in range(3000)), f"nested more than {MOST_LEVELS} deep"),
        ("- " * 3000 + "x", "nested more than"),
        ("{a: " * 3000, "nested more than"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: duplicate key 'a'"),
        ("1: 2", "line 1, column 1: a key is not text; write it in quotes"),
        ("a: !!python/object:os.system x", "line 1, column 4: the tag tag:yaml.org,2002:python/object:os.system"),
        ("!!timestamp x", "the tag"),
        ("a: b: c", "line 1, column 5: mapping values are not allowed here"),
        ("a: 1" + "0" * 5000, "4300 digits"),
        ("a: \x00", "special characters are not allowed"),
    ],
)
def test_what_is_refused_is_refused_in_a_line(text, says):
    with pytest.raises(YamlError) as error:
        read_yaml(text)
    assert says in str(error.value) and "\n" not in str(error.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@examples(100)
@example({"1e5": "-1.5e-3"})
@given(VALUES)
def test_what_is_written_is_read_as_it_was(value):
    assert read_yaml(write_yaml(value)) == value


@examples(300)
@given(st.text(alphabet="ab:&*!-[]{}|>'\"#%@`?,. 0123e\n\t<", max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        read_yaml(text)
    except YamlError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("hint", "value", "wanted"),
    [
        (int, 3.0, 3),
        (float, 3, 3.0),
        (str, 0.9, "0.9"),
        (str | None, None, None),
        (int | None, 4, 4),
        (Literal["a", "b"], "b", "b"),
        (tuple[tuple[int, ...], ...], [[1, 2.0], []], ((1, 2), ())),
        (dict[str, str], {"a": 1}, {"a": "1"}),
        (dict[str, Any], {"a": [1]}, {"a": [1]}),
        (list[Any], (1, "x"), [1, "x"]),
        (bool, True, True),
    ],
)
def test_values_become_what_their_field_wants(hint, value, wanted):
    result = converted(value, hint)
    assert result == wanted and type(result) is type(wanted)


@pytest.mark.parametrize(
    ("hint", "value", "says"),
    [
        (int, 3.5, "is 3.5; give a whole number"),
        (int, True, "is True; give a whole number"),
        (int, math.nan, "give a whole number"),
        (int, math.inf, "give a whole number"),
        (int | None, "3", "is '3'; give a whole number"),
        (float, "x", "give a number"),
        (float, 10**400, "is a number of 401 digits, which is too large"),
        (bool, 1, "give true or false"),
        (str, True, "in quotes if YAML would read it otherwise"),
        (Literal["a", "b", "c"], "d", "is 'd'; give a, b or c"),
        (tuple[int, ...], {"a": 1}, "give a list of values"),
        (tuple[int, ...], ["x"], "is 'x'; give a whole number"),
        (dict[str, Any], [1], "is [1]; give a mapping of keys to values"),
    ],
)
def test_others_are_refused_with_what_would_fit(hint, value, says):
    with pytest.raises(ValueError) as error:
        converted(value, hint)
    assert says in str(error.value)


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("# a\n" * 3_000_000, encoding="utf-8")
    with refused("too-large", kind=ConfigError):
        read_raw(path)
