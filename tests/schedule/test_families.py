"""Every family: correct for any p and m, and exactly as fast and as small as its source says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import offload_oracle
import oracle
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from lanes import examples
from promises import assert_bubble_as_promised, assert_peak_as_promised, letters
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.family import Family, Formula
from megatron_pipemem.schedule.registry import build_schedule, families, family, synchronous_families
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.validator import validate

SYNCHRONOUS = (*synchronous_families(),)
NAMES = [each.name for each in SYNCHRONOUS]
OFFLOADING = [each.name for each in families() if each.offloads]


def bubble(name: str, p: int) -> int:
    """In unit passes, by the closed form, for ``2p`` microbatches."""
    v = family(name).chunks or 2
    found = family(name).bubble.compute(p=Fraction(p), m=Fraction(2 * p), v=v, n=1, f=v, i=v, w=v, b=2 * v)
    return int(found)


def build(name: str, p: int, m: int, **options: object) -> Schedule:
    return build_schedule(name, num_devices=p, num_microbatches=m, **options)


def build_or_skip(family: Family, p: int, m: int) -> Schedule:
    """Skips the test where the family says beforehand that it has none."""
    try:
        return build(family.name, p, m)
    except UnsupportedError:
        if p >= family.min_devices and not family.needs:
            raise
        pytest.skip("a family has no schedule of this size")


def build_or_reject(name: str, p: int, m: int) -> Schedule:
    """Reject the example if the family has no schedule of this size and says so beforehand."""
    try:
        return build(name, p, m)
    except UnsupportedError:
        assert p < family(name).min_devices or family(name).needs
        reject()


def in_unit_passes(schedule: Schedule) -> Timeline:
    """Simulated with one second per F, I and W of a stage."""
    v = schedule.placement.num_chunks
    return simulate(schedule, Costs(v, v, v))


def assert_correct(schedule: Schedule) -> None:
    assert oracle.check(schedule) == []
    assert oracle.disordered_weight_gradients(schedule) == []


def some_microbatches(p: int) -> tuple[int, ...]:
    """Fewer than p, not divisible, and many; fewer numbers for many devices; any number is drawn below."""
    return tuple(sorted({1, max(1, p - 1), p, p + 1, 2 * p, 4 * p + 1})) if p <= 9 else (1 + p // 3, p + 1, 2 * p + 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8, 11, 16])
def test_correct_and_within_its_peak(name: str, p: int) -> None:
    for m in some_microbatches(p):
        schedule = build(name, p, m)
        assert_correct(schedule)
        assert_peak_as_promised(family(name), schedule, max(oracle.peak(schedule)))


@examples(80)
@given(data=st.data())
def test_correct_for_any_devices_and_microbatches(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([each.name for each in families()]))
    p = data.draw(st.integers(1, 24))
    m = data.draw(st.integers(1, 4 * p + 1))
    schedule = build_or_reject(name, p, m)
    if name in OFFLOADING:
        assert offload_oracle.mistakes(schedule) == []
        validate(schedule)
        passes = [[action for action in order if action.kind.value in "FIWB"] for order in schedule.orders]
        schedule = replace(schedule, orders=tuple(map(tuple, passes)))
    else:
        assert_peak_as_promised(family(name), schedule, max(oracle.peak(schedule)))
    assert_correct(schedule)


@examples(150)
@given(data=st.data())
def test_simulator_and_validator_agree_with_the_oracle(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    p, m = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 25))
    options = {}
    if "chunks" in family(name).options:
        options["chunks"] = 2 * data.draw(st.integers(1, 3)) if name == "hanayo" else data.draw(st.integers(1, 4))
    if "group_size" in family(name).options:
        options["group_size"] = data.draw(st.integers(1 if name.startswith("gis") else p, p + 3))
    prices = data.draw(st.tuples(*[st.floats(0.1, 10)] * 3, st.floats(0, 5)))
    schedule = build(name, p, m, costs=Costs(*prices), **options)
    assert_correct(schedule)
    validate(schedule)
    timeline = simulate(schedule, Costs(*prices))
    assert timeline.makespan == pytest.approx(oracle.makespan(schedule, *prices))
    assert timeline.peaks == pytest.approx([float(peak) for peak in oracle.peak(schedule)])


@pytest.mark.parametrize(
    "family", [each for each in families() if isinstance(each.bubble, Formula)], ids=lambda family: family.name
)
@pytest.mark.parametrize("p", [*range(1, 9), 12, 13, 16])
def test_bubble_is_the_closed_form(family: Family, p: int) -> None:
    if family.offloads and p > 6:
        pytest.skip("planning takes long")
    for m in {2 * p, (p + 1) // 2 * 4}:  # groups of p, or of half of that
        schedule = build_or_skip(family, p, m)
        assert_bubble_as_promised(family, schedule)


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("p", [3, 5, 8, 12])
def test_v_bubble_is_reached_as_soon_as_the_microbatches_fill_the_peak(name: str, p: int) -> None:
    held = round(simulate(build(name, p, 4 * p)).peak * 2 * p)
    for m in (held, p + 2, 4 * p + 1, 9 * p):
        timeline = in_unit_passes(build(name, p, m))
        assert timeline.makespan - timeline.ideal == bubble(name, p)


@pytest.mark.parametrize("name", ["zb-h2", "zbv"])
@pytest.mark.parametrize("p", [1, 2, 3, 8, 13])
def test_no_bubble_within_a_device(name: str, p: int) -> None:
    timeline = in_unit_passes(build(name, p, max(1, 2 * p - 1)))
    assert timeline.device_bubble_rate == pytest.approx(0)


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("1f1b", lambda p, r: p - r),
        ("1f1b-eager", lambda p, r: 2 * (p - r) - 1),
        ("zb-h1", lambda p, r: p),
        ("zbv", lambda p, r: 2 * p),
    ],
)
@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_peak_of_every_device(name: str, held: Callable[[int, int], int], p: int) -> None:
    schedule = build(name, p, 4 * p)
    assert [peak * schedule.num_stages for peak in oracle.peak(schedule)] == [held(p, r) for r in range(p)]


# (p, m) -> makespan in unit passes, and the relative peak at p = 4, 8, 16.
MAKESPANS = {
    "1f1b": ({(4, 8): 33, (4, 17): 60, (8, 16): 69, (8, 33): 120, (16, 65): 240}, (1, 1, 1)),
    "interleaved": ({(4, 8): 57, (8, 16): 117}, (1.375, 1.4375, 1.46875)),
    "zb-h1": ({(4, 8): 27, (4, 17): 54, (8, 16): 55, (8, 33): 106, (16, 65): 210}, (1, 1, 1)),
    "1f1b-v": ({(4, 8): 63, (4, 17): 117, (8, 16): 129, (8, 33): 231, (16, 65): 465}, (0.75, 0.75, 0.6875)),
    "zbv": ({(4, 8): 51, (4, 17): 105, (8, 16): 103, (8, 33): 205, (16, 65): 405}, (1, 1, 1)),
    "v-half": ({(4, 8): 53, (4, 17): 107, (8, 16): 113, (8, 33): 215, (16, 65): 431}, (0.75, 0.625, 0.5625)),
    "v-min": ({(4, 8): 59, (4, 17): 113, (8, 16): 123, (8, 33): 225, (16, 65): 449}, (0.5, 0.5, 0.375)),
}


@pytest.mark.parametrize(
    ("name", "p", "m", "makespan", "peak"),
    [
        (name, p, m, makespan, peaks[(4, 8, 16).index(p)])
        for name, (makespans, peaks) in MAKESPANS.items()
        for (p, m), makespan in makespans.items()
    ],
)
def test_published_makespans(name: str, p: int, m: int, makespan: int, peak: float) -> None:
    timeline = in_unit_passes(build(name, p, m))
    assert (timeline.makespan, timeline.peak) == (makespan, pytest.approx(peak))


@pytest.mark.parametrize(
    ("p", "m", "forward", "backward_input", "backward_weight", "p2p", "rates"),
    [
        (8, 24, 18.522, 18.086, 9.337, 0.601, (0.2431, 0.1585, 0.1083)),
        (8, 24, 29.718, 29.444, 19.927, 0.527, (0.2347, 0.1323, 0.0698)),
        (16, 48, 11.347, 11.248, 8.132, 0.377, (0.2552, 0.1397, 0.0672)),
        (32, 96, 10.419, 10.207, 7.715, 0.408, (0.2646, 0.1421, 0.0641)),
    ],
    ids=["1.5B", "6.2B", "14.6B", "28.3B"],
)
def test_zero_bubble_paper_table_5(
    p: int,
    m: int,
    forward: float,
    backward_input: float,
    backward_weight: float,
    p2p: float,
    rates: tuple[float, ...],
) -> None:
    costs = Costs(forward, backward_input, backward_weight, p2p)
    simulated = [simulate(build(name, p, m), costs).device_bubble_rate for name in ("1f1b", "zb-h1", "zb-h2")]
    assert [round(rate, 4) for rate in simulated] == list(rates)


@pytest.mark.parametrize(
    ("p", "m", "costs", "rates"),
    [
        (8, 24, (1, 1, 1), {"1f1b": 0.226, "1f1b-v": 0.186, "zbv": 0.046, "v-half": 0.106, "v-min": 0.158}),
        (8, 24, (1, 1.5, 0.5), {"1f1b": 0.226, "1f1b-v": 0.186, "zbv": 0.089, "v-half": 0.222, "v-min": 0.415}),
        (4, 12, (1, 1.5, 0.5), {"1f1b": 0.200, "1f1b-v": 0.172, "zbv": 0.077, "v-half": 0.182, "v-min": 0.397}),
        (16, 64, (3, 4, 2), {"1f1b": 0.190, "v-half": 0.140, "v-min": 0.337}),
        (16, 64, (18.5, 18.1, 9.3), {"1f1b": 0.190, "v-half": 0.135, "v-min": 0.280}),
        (16, 64, (11.3, 11.2, 8.1), {"1f1b": 0.190, "v-half": 0.117, "v-min": 0.216}),
        (16, 128, (10.4, 10.2, 7.7), {"1f1b": 0.105, "v-half": 0.061, "v-min": 0.156}),
    ],
)
def test_bubbles_of_unequal_costs(p: int, m: int, costs: tuple[float, ...], rates: dict[str, float]) -> None:
    for name, rate in rates.items():
        assert simulate(build(name, p, m), Costs(*costs)).bubble_rate == pytest.approx(rate, abs=6e-4), name


def megatron_orders(p: int, m: int, v: int, group: int) -> list[list[int]]:
    """Megatron's own interleaved orders: chunks counted from 1, backwards negative."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    graphs = pytest.importorskip("megatron.core.transformer.cuda_graphs")
    table = schedules.get_schedule_table(m, v, group)
    orders = []
    for rank in range(p):
        communicator = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: p, rank=lambda rank=rank: rank),
            virtual_pipeline_model_parallel_size=v,
        )
        _, _, warm_up, _ = schedules.get_pp_rank_microbatches(m, v, group, p2p_communicator=communicator)
        orders.append(graphs.convert_schedule_table_to_order(warm_up, v, table))
    return orders


def signed_chunks(schedule: Schedule) -> list[list[int]]:
    chunk_of = schedule.placement.chunk_of
    return [[(1 if a.kind is Kind.F else -1) * (chunk_of(a.stage) + 1) for a in order] for order in schedule.orders]


@pytest.mark.parametrize(("p", "m"), [(5, 7), (4, 6), (8, 9), (3, 4)])
def test_interleaved_without_a_group_size_is_never_slower_than_megatrons_table(p: int, m: int) -> None:
    schedule, table = build("interleaved", p, m), build("interleaved", p, m, group_size=p)
    assert_correct(schedule)
    assert_correct(table)
    assert simulate(schedule).makespan <= simulate(table).makespan


@examples(100)
@given(data=st.data())
def test_interleaved_is_megatrons_order_wherever_megatron_allows_it(data: st.DataObject) -> None:
    p, v = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 5))
    group = data.draw(st.integers(p, 2 * p))
    m = group * data.draw(st.integers(1, 3)) + data.draw(st.one_of(st.just(0), st.integers(p, 2 * p)))
    if m % group == 0 or m % group >= p:
        schedule = build("interleaved", p, m, chunks=v, group_size=group)
        assert signed_chunks(schedule) == megatron_orders(p, m, v, group)


@pytest.mark.parametrize(("p", "m"), [(4, 4), (4, 6), (3, 3), (5, 7), (5, 12), (8, 1), (8, 9)])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaved_where_other_generators_deadlock(p: int, m: int, v: int) -> None:
    for group in (p, p + 1, 2 * p):
        schedule = build("interleaved", p, m, chunks=v, group_size=group)
        assert_correct(schedule)
        assert max(oracle.peak(schedule)) * p * v <= group * (v - 1) + 2 * p - 1


@pytest.mark.parametrize(
    "options", [{"chunks": 0}, {"chunks": "2"}, {"group_size": 3}, {"chunks": 1.5}, {"chunks": True}]
)
def test_interleaved_refuses_impossible_options(options: dict[str, object]) -> None:
    (option,) = options
    with refused("bad-number", option, kind=UnsupportedError):
        build("interleaved", 4, 8, **options)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
@pytest.mark.parametrize("p", [2, 3, 4, 7, 16])
def test_peaks_are_the_closed_forms(family: Family, p: int) -> None:
    for m in (1, p, 4 * p) if p < 16 else (4 * p,):
        schedule = build_or_skip(family, p, max(m, family.fewest_microbatches(p)))
        assert_peak_as_promised(family, schedule, max(simulate(schedule).peaks))


@pytest.mark.parametrize("v", [2, 4])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_peaks_of_offload_hold_for_ratios_up_to_one(p: int, v: int) -> None:
    for name, k in product(OFFLOADING, (0.6, 1.0)):
        schedule = build(name, p, 4 * p, chunks=v, k=k)
        peak = max(simulate(schedule).peaks)
        assert peak <= family(name).peak.compute(**letters(schedule)) <= 4 * peak


def test_a_wrong_closed_form_is_found() -> None:
    gpipe = family("gpipe")
    for wrong in (lambda m, **_: m, lambda p, m, **_: min(p, m) / p):
        claims = replace(gpipe, peak=Formula("wrong", wrong), bubble=Formula("wrong", lambda p, f, **_: p * f))
        with pytest.raises(AssertionError):
            test_peaks_are_the_closed_forms(claims, 4)
        with pytest.raises(AssertionError):
            test_bubble_is_the_closed_form(claims, 4)
