"""Lists and layouts with repetitions: read as Megatron reads them, and refused before they fill the memory."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from refusals import refused

from megatron_pipemem.errors import ConfigError, PipememError
from megatron_pipemem.mcore.launch import add_virtual_stages, take_flags
from megatron_pipemem.model import layout
from megatron_pipemem.model.expressions import listed, unrolled
from megatron_pipemem.tools.megatron.known_flags import known_flags
from megatron_pipemem.values import MOST_LAYERS

NUMBERS = st.integers(0, 12).map(str)
LISTS = st.recursive(
    st.lists(NUMBERS, max_size=4).map(lambda entries: f"[{','.join(entries)}]"),
    lambda inner: st.one_of(
        st.tuples(inner, NUMBERS).map("*".join),
        st.tuples(NUMBERS, inner).map("*".join),
        st.tuples(inner, inner).map("+".join),
        inner.map("({})".format),
    ),
    max_leaves=6,
)
LAYOUTS = st.recursive(
    st.tuples(st.sampled_from("tm|"), st.integers(0, 4)).map(lambda pair: f"{pair[0]}*{pair[1]}"),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map("".join),
    max_leaves=6,
)
HUGE = "9" * 11
LONG_LISTS = (
    f"[0]*{HUGE}",
    f"{HUGE}*[1]",
    f"[1]+[0]*{HUGE}",
    "[0]*1000*1000*1000*1000",
    f"[{'[0]*999,' * 9}]*{HUGE}",
    "+".join(["[0]*999"] * 2),
    f"[0]*{'9' * 5000}",
    f"{'9*' * 3000}[1]",
    f"[{'0,' * 5000}]",
    "(" * 9000,
    "[" * 9000,
    "1+" * 4999 + "1",
    "9**9**9**9**[1]",
    "[0]*-1",
    "[0][0]",
    "[0]*\x00",
    "[x]",
    "__import__('os')",
)
LONG_LAYOUTS = (
    f"Et*{HUGE}L",
    f"E(t*9|)*{HUGE}L",
    "E((((t*99)*99)*99)*99)*99L",
    f"Et*{'9' * 5000}L",
    f"E{'t' * 10001}L",
    "Et*9999*9999*9999L",
)


@examples(200)
@given(LISTS)
def test_lists_are_those_of_python(text: str) -> None:
    expected = eval(text)
    if len(expected) <= MOST_LAYERS:
        try:
            assert listed(text, "--moe-layer-freq") == expected
        except ConfigError as error:  # a part of the expression is longer than its result
            assert error.code == "too-large"
    else:
        with refused("too-large"):
            listed(text, "--moe-layer-freq")


@examples(100)
@given(LAYOUTS, LAYOUTS, st.integers(0, 3))
def test_layouts_are_those_of_megatron(first: str, second: str, times: int) -> None:
    text = f"Et{first}({second})*{times}|tL"
    stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    expected = tuple(
        sum(layer.name == "decoder" for layer in s) + any(layer.name == "mtp" for layer in s) for s in stages
    )
    assert layout.read(text) == expected


@pytest.mark.parametrize("read, texts", [(listed, LONG_LISTS), (unrolled, LONG_LAYOUTS)])
def test_what_is_too_long_is_refused_before_it_is_built(read, texts) -> None:
    for text in texts:
        tracemalloc.start()
        try:
            with pytest.raises(ConfigError) as refusal:
                read(text, "--flag")
            assert tracemalloc.get_traced_memory()[1] < 16 << 20, text[:40]
        finally:
            tracemalloc.stop()
        assert refusal.value.code in ("too-large", "bad-syntax"), text[:40]
        assert len(str(refusal.value)) < 300


def test_all_lists_of_megatron_are_checked() -> None:
    evaluated = {name[2:] for name, flag in known_flags().items() if str(flag["type"]).endswith("freq_type")}
    assert evaluated == set(layout.LIST_FLAGS)


@pytest.mark.parametrize(
    "flags",
    [
        *((f"--{flag}", f"[0]*{HUGE}", f"--{flag}", "1") for flag in layout.LIST_FLAGS),
        (f"--{layout.FLAG}=Et*{HUGE}L",),
        (f"--{layout.PATTERN}", "M" * 2000),
        ("--pipeline-model-parallel-size", HUGE),
        ("--num-layers", "9" * 5000),
    ],
)
def test_a_run_refuses_them_before_megatron_reads_them(flags: tuple[str, ...]) -> None:
    words = ["--num-layers", "8", "--pipeline-model-parallel-size", "2", *flags, "--pipemem-schedule", "v-half"]
    with pytest.raises(PipememError) as refusal:
        add_virtual_stages(*take_flags(words))
    assert refusal.value.code in ("too-large", "bad-number")
    assert len(str(refusal.value)) < 300
