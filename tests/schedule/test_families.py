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
from hypothesis import assume, given
from hypothesis import strategies as st
from lanes import examples, rest_nightly
from promises import assert_bubble_as_promised, assert_correct, assert_peak_as_promised, letters
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


def built(family: Family, p: int, m: int) -> Schedule | None:
    """``None`` if the family says beforehand that it has no schedule of this size."""
    try:
        return build(family.name, p, m)
    except UnsupportedError:
        assert p < family.min_devices or family.needs
        return None


def in_unit_passes(schedule: Schedule) -> Timeline:
    """Simulated with one second per F, I and W of a stage."""
    v = schedule.placement.num_chunks
    return simulate(schedule, Costs(v, v, v))


def some_microbatches(p: int) -> tuple[int, ...]:
    """Fewer than p, not divisible, and many; fewer numbers for many devices; any number is drawn below."""
    return tuple(sorted({1, max(1, p - 1), p, p + 1, 2 * p, 4 * p + 1})) if p <= 9 else (1 + p // 3, p + 1, 2 * p + 1)


FEW, MANY = [1, 2, 3, 4, 5, 6], [7, 8, 11, 12, 16]
NUMBERS_OF_DEVICES = rest_nightly(
    [FEW, MANY], [FEW], "test_correct_for_any_devices_and_microbatches, test_published_makespans"
)


def without_copies(schedule: Schedule) -> Schedule:
    """The passes of a schedule alone, once its copies to the host and back have been found right."""
    assert offload_oracle.mistakes(schedule) == []
    validate(schedule)
    passes = [[action for action in order if action.kind.value in "FIWB"] for order in schedule.orders]
    return replace(schedule, orders=tuple(map(tuple, passes)))


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
@pytest.mark.parametrize("devices", NUMBERS_OF_DEVICES)
def test_correct_and_within_its_peak(family: Family, devices: list[int]) -> None:
    for p in devices:
        numbers = some_microbatches(p)
        if family.offloads:  # planning takes long
            numbers = (1, p, 4 * p) if p < 8 else (4 * p,)
        for m in sorted({max(m, family.fewest_microbatches(p)) for m in numbers}):
            if schedule := built(family, p, m):
                assert_peak_as_promised(family, schedule, max(simulate(schedule).peaks))
                assert_correct(without_copies(schedule) if family.offloads else schedule)


@examples(80)
@given(data=st.data())
def test_correct_for_any_devices_and_microbatches(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(families()))
    p = data.draw(st.integers(1, 16))
    m = data.draw(st.integers(1, 3 * p + 1))
    schedule = built(family, p, m)
    assume(schedule is not None)
    if family.offloads:
        schedule = without_copies(schedule)
    else:
        assert_peak_as_promised(family, schedule, max(oracle.peak(schedule)))
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
    timeline = simulate(schedule, Costs(*prices))
    assert timeline.makespan == pytest.approx(oracle.makespan(schedule, *prices))
    assert timeline.peaks == pytest.approx([float(peak) for peak in oracle.peak(schedule)])


@pytest.mark.parametrize(
    "family", [each for each in families() if isinstance(each.bubble, Formula)], ids=lambda family: family.name
)
@pytest.mark.parametrize("devices", NUMBERS_OF_DEVICES)
def test_bubble_is_the_closed_form(family: Family, devices: list[int]) -> None:
    for p in devices:
        if family.offloads and p > 6:  # planning takes long
            continue
        for m in {2 * p, (p + 1) // 2 * 4}:  # groups of p, or of half of that
            if schedule := built(family, p, m):
                assert_bubble_as_promised(family, schedule)


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("p", [3, 5, 8])
def test_v_bubble_is_reached_as_soon_as_the_microbatches_fill_the_peak(name: str, p: int) -> None:
    held = round(simulate(build(name, p, 4 * p)).peak * 2 * p)
    for m in (held, p + 2, 4 * p + 1, 9 * p):
        timeline = in_unit_passes(build(name, p, m))
        assert timeline.makespan - timeline.ideal == bubble(name, p)


@pytest.mark.parametrize("name", ["zb-h2", "zbv"])
@pytest.mark.parametrize("p", [1, 2, 3, 8])
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


@pytest.mark.parametrize("name", MAKESPANS)
def test_published_makespans(name: str) -> None:
    makespans, peaks = MAKESPANS[name]
    timelines = {size: in_unit_passes(build(name, *size)) for size in makespans}
    assert {size: each.makespan for size, each in timelines.items()} == makespans
    for (p, _), each in timelines.items():
        assert each.peak == pytest.approx(peaks[(4, 8, 16).index(p)])


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
    ("p", "v"),
    rest_nightly(product((2, 4, 8), (2, 4)), [(2, 4), (4, 2)], "test_offload.py::test_everything_can_be_planned"),
)
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
            test_correct_and_within_its_peak(claims, [4])
        with pytest.raises(AssertionError):
            test_bubble_is_the_closed_form(claims, [4])


REFUSED = [
    *(("interleaved", each) for each in ({"chunks": "2"}, {"chunks": 1.5}, {"group_size": 3})),
    *product(("interleaved", "gis", "gis-h", "looped-bfs"), ({"chunks": 0}, {"chunks": True})),
    *product(("gis", "gis-h"), ({"group_size": 0}, {"group_size": 2.0})),
    *(("hanayo", each) for each in ({"waves": 0}, {"waves": "2"}, {"chunks": 1})),
]


@pytest.mark.parametrize(("name", "options"), REFUSED)
def test_numbers_that_make_no_sense_are_refused(name: str, options: dict[str, object]) -> None:
    (option,) = options
    with refused("bad-number", name, option, kind=UnsupportedError):
        build(name, 4, 8, **options)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("looped-bfs", {"group_size": 2}, ("unknown-option", "group_size")),
        ("hanayo", {"chunks": 3}, ("needs-chunks",)),
        ("hanayo", {"chunks": 2, "waves": 2}, ("conflicting-options", 2, 4)),
    ],
)
def test_options_that_do_not_fit_are_refused(name: str, options: dict[str, object], why: tuple[object, ...]) -> None:
    with refused(*why, kind=UnsupportedError):
        build(name, 4, 8, **options)


# ---------------------------------------------------------------------------- published numbers: groups, waves, fitted orders


def bubble_and_peak(name: str, p: int, m: int, v: int, **options: object) -> tuple[float, float]:
    """In unit passes of one chunk, and in stage activations."""
    schedule = build(name, p, m, chunks=v, **options)
    assert_correct(schedule)
    return oracle.makespan(schedule, v, v, v) - 3 * m * v, max(oracle.peak(schedule)) * schedule.num_stages


@pytest.mark.parametrize(
    ("v", "gis", "gis_h"), [(2, (14, 16), (18, 12)), (3, (14, 24), (22, 16)), (5, (14, 40), (30, 24))]
)
def test_published_bubbles_and_peaks(v: int, gis: tuple[int, int], gis_h: tuple[int, int]) -> None:
    assert bubble_and_peak("gis", 8, 32, v) == gis
    assert bubble_and_peak("gis-h", 8, 32, v) == gis_h


@pytest.mark.parametrize(
    ("v", "group", "percent", "stages"), [(2, 4, 9.4, 6), (2, 8, 7.3, 8), (4, 4, 6.8, 5), (4, 8, 3.7, 8)]
)
def test_published_percentages(v: int, group: int, percent: float, stages: int) -> None:
    bubble, peak = bubble_and_peak("gis", 8, 32, v, group_size=group)
    assert bubble / (3 * 32 * v) == pytest.approx(percent / 100, abs=6e-4)
    assert peak / v == stages


@pytest.mark.parametrize(("p", "v", "bubble", "peak"), [(8, 2, 23, 13), (8, 3, 34, 16), (8, 5, 56, 24)])
def test_uniform_repeating(p: int, v: int, bubble: int, peak: int) -> None:
    assert bubble_and_peak("gis-h", p, 4 * p, v, group_size=1) == (bubble, peak)


@examples(60)
@given(data=st.data())
def test_groups_that_do_not_divide_are_balanced_and_cost_nothing(data: st.DataObject) -> None:
    p, v = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 4))
    m, group = data.draw(st.integers(1, 40)), data.draw(st.integers((p + 1) // 2, p))
    bubble, peak = bubble_and_peak("gis", p, m, v, group_size=group)
    assert peak <= group * (v - 1) + p
    groups = -(-m // group)
    if m // groups >= (p + 1) // 2 and groups > 1:
        largest = -(-m // groups)
        assert (bubble, peak) == (2 * (p - 1) + (p - largest) * (v - 1), largest * (v - 1) + p)


@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (4, 2), (5, 5), (8, 3), (8, 20)])
def test_looped_bfs(p: int, m: int, v: int) -> None:
    assert bubble_and_peak("looped-bfs", p, m, v) == (3 * (p - 1) + 3 * (v - 1) * max(0, p - m), m * v)


def hanayo(p: int, m: int, **options: object) -> Schedule:
    schedule = build("hanayo", p, m, **options)
    assert_correct(schedule)
    return schedule


@pytest.mark.parametrize(("waves", "rate"), [(1, 0.333), (2, 0.213), (4, 0.119)])
def test_rates_for_as_many_microbatches_as_devices(waves: int, rate: float) -> None:
    assert simulate(hanayo(4, 4, waves=waves)).bubble_rate == pytest.approx(rate, abs=5e-4)


@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_memory_is_that_of_1f1b_or_a_microbatch_more(p: int, waves: int) -> None:
    for m in (1, p, p + 1, 2 * p + 1, 4 * p):
        schedule = hanayo(p, m, waves=waves)
        most = 1 if m <= p else 1 + 1 / p
        assert max(oracle.peak(schedule)) <= min(most, m / p) + 1e-9


def test_waves_or_chunks_say_how_the_model_is_cut() -> None:
    assert hanayo(4, 6, chunks=6) == hanayo(4, 6, waves=3) == hanayo(4, 6, waves=3, chunks=6)
    assert hanayo(4, 6).placement.devices == (0, 1, 2, 3, 3, 2, 1, 0) * 2
    assert hanayo(4, 6, waves=1).placement.name == "v"


# arXiv 2401.10241, table 5: p, m, seconds of F, I, W and a message, and the rates of 1F1B, ZB-1P (that of ZB-H1) and ZB-H2.
PROFILES = {
    "1.5B": (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    "6.2B": (8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
    "14.6B": (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    "28.3B": (32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641)),
}


def auto(p: int, m: int, **arguments: object) -> Schedule:
    return build("zb-auto", p, m, **arguments)


@pytest.mark.parametrize("profile", rest_nightly(PROFILES, ["1.5B", "6.2B"], "the smaller models of the table"))
def test_rates_of_the_zero_bubble_paper(profile: str) -> None:
    p, m, prices, published = PROFILES[profile]
    costs = Costs(*prices)
    named = [simulate(build(name, p, m), costs).device_bubble_rate for name in ("1f1b", "zb-h1", "zb-h2")]
    assert [round(rate, 4) for rate in named] == list(published)
    assert round(simulate(auto(p, m, costs=costs), costs).device_bubble_rate, 4) == published[1]
    assert simulate(auto(p, m, costs=costs, memory_cap=2), costs).device_bubble_rate < published[2]


@examples(60)
@given(data=st.data())
def test_within_the_cap_and_no_slower_than_what_is_written_down(data: st.DataObject) -> None:
    p, m = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 24))
    price = st.floats(0.1, 10)
    each = st.one_of(price, st.lists(price, min_size=p, max_size=p).map(tuple))
    costs = Costs(data.draw(each), data.draw(each), data.draw(each), data.draw(st.floats(0, 2)))
    cap = data.draw(st.integers(1, 3 * p)) / p
    schedule = auto(p, m, costs=costs, memory_cap=cap)
    assert_correct(schedule)
    assert max(oracle.peak(schedule)) <= cap + 1e-9
    validate(schedule, memory_cap=cap)
    for name, peak in (("zb-h1", 1), ("zb-h2", 2 - 1 / p)):
        if cap >= peak:
            known = build(name, p, m)
            assert simulate(schedule, costs).makespan <= simulate(known, costs).makespan * (1 + 1e-8)


@pytest.mark.parametrize("cap", [0.5, 1.25])
@pytest.mark.parametrize("costs", [Costs(p2p=0.3), Costs(1, 1.5, 0.5)])
def test_an_order_fitted_to_the_costs_beats_one_for_equal_passes(costs: Costs, cap: float) -> None:
    fitted, equal = auto(8, 24, costs=costs, memory_cap=cap), auto(8, 24, memory_cap=cap)
    assert simulate(fitted, costs).makespan < simulate(equal, costs).makespan
    assert simulate(equal).makespan <= simulate(fitted).makespan


@pytest.mark.parametrize("p", [1, 4])
def test_less_than_one_microbatch_is_refused(p: int) -> None:
    assert simulate(auto(p, 3, memory_cap=1 / p)).peak == pytest.approx(1 / p)
    with refused("cap-unreachable", f"{1 / p:.4g}", p, kind=UnsupportedError):
        auto(p, 3, memory_cap=0.9 / p)
