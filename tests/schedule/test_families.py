"""Every family: correct for any p, m and number of slices, and exactly as fast and as small as its source says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
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
from megatron_pipemem.schedule.registry import build_schedule, families, family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate

OFFLOADING = [family.name for family in families() if family.offloads]


def build(name: str, p: int, m: int, **options: object) -> Schedule:
    return build_schedule(name, num_devices=p, num_microbatches=m, **options)


def built(family: Family, p: int, m: int, **options: object) -> Schedule | None:
    """``None`` if the family says beforehand that it has no schedule of this size."""
    try:
        return build(family.name, p, m, **options)
    except UnsupportedError:
        assert p < family.min_devices or family.needs
        return None


def some_microbatches(p: int) -> tuple[int, ...]:
    """Fewer than p, not divisible, and many; fewer numbers for many devices; any number is drawn below."""
    return tuple(sorted({1, max(1, p - 1), p, p + 1, 2 * p, 4 * p + 1})) if p <= 9 else (1 + p // 3, p + 1, 2 * p + 1)


FEW, MANY = [1, 2, 3, 4, 5, 6], [7, 8, 11, 12, 16]
NUMBERS_OF_DEVICES = rest_nightly(
    [FEW, MANY], [FEW], "test_any_size_and_options_are_correct_and_as_the_oracle_plays_them"
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


@examples(230)
@given(data=st.data())
def test_any_size_and_options_are_correct_and_as_the_oracle_plays_them(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(families()))
    p = data.draw(st.integers(1, 12))
    m, options = data.draw(st.integers(1, 3 * p + 1)), {}
    if "chunks" in family.options and not family.offloads:
        options["chunks"] = data.draw(st.integers(1, 3)) * (2 if family.name == "hanayo" else 1)
    if "group_size" in family.options:
        options["group_size"] = data.draw(st.integers(1 if family.name.startswith("gis") else p, p + 3))
    prices = data.draw(st.tuples(*[st.floats(0.1, 10)] * 3, st.floats(0, 5)))
    schedule = (
        built(family, p, m, **options) if family.offloads else built(family, p, m, costs=Costs(*prices), **options)
    )
    assume(schedule is not None)
    if family.offloads:
        assert_correct(without_copies(schedule))
        return
    assert_correct(schedule)
    timeline = simulate(schedule, Costs(*prices))
    assert timeline.makespan == pytest.approx(oracle.makespan(schedule, *prices))
    assert timeline.peaks == pytest.approx([float(peak) for peak in oracle.peak(schedule)])
    if "group_size" not in options:
        assert_peak_as_promised(family, schedule, max(oracle.peak(schedule)))


@pytest.mark.parametrize(
    "family", [family for family in families() if isinstance(family.bubble, Formula)], ids=lambda family: family.name
)
@pytest.mark.parametrize("devices", NUMBERS_OF_DEVICES)
def test_bubble_is_the_closed_form(family: Family, devices: list[int]) -> None:
    for p in devices:
        if family.offloads and p > 6:  # planning takes long
            continue
        for m in {2 * p, (p + 1) // 2 * 4}:  # groups of p, or of half of that
            if schedule := built(family, p, m):
                assert_bubble_as_promised(family, schedule)


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


# Name and options of a family: (p, m), the makespan in unit passes of a stage, and the peak in activations of a stage.
PAPERS = [
    # arXiv 2405.15362, and 1F1B, ZB-H1 and ZB-H2 of arXiv 2401.10241. As many microbatches as the peak holds are enough.
    ("1f1b", {}, [(4, 8, 33, 4), (4, 17, 60, 4), (8, 16, 69, 8), (8, 33, 120, 8), (16, 65, 240, 16)]),
    ("zb-h1", {}, [(4, 8, 27, 4), (4, 17, 54, 4), (8, 16, 55, 8), (8, 33, 106, 8), (16, 65, 210, 16)]),
    ("zb-h2", {}, [(8, 15, 52, 15), (8, 16, 55, 15)]),
    ("1f1b-v", {}, [(4, 8, 63, 6), (4, 17, 117, 6), (8, 16, 129, 12), (8, 33, 231, 12), (16, 65, 465, 22)]),
    ("zbv", {}, [(4, 8, 51, 8), (4, 17, 105, 8), (8, 15, 97, 16), (8, 33, 205, 16), (16, 65, 405, 32)]),
    ("v-half", {}, [(5, 6, 47, 6), (4, 8, 53, 6), (4, 17, 107, 6), (8, 10, 77, 10), (8, 33, 215, 10), (16, 65, 431, 18)]),
    ("v-min", {}, [(3, 4, 29, 4), (4, 8, 59, 4), (4, 17, 113, 4), (8, 8, 75, 8), (8, 33, 225, 8), (16, 65, 449, 12)]),
    # arXiv 2104.04473, 2211.05953 and 2107.06925. A short step of looped-bfs waits for every chunk.
    ("interleaved", {}, [(4, 8, 57, 11), (8, 16, 117, 23)]),
    ("looped-bfs", {"chunks": 4}, [(4, 2, 51, 8)]),
    ("chimera", {}, [(4, 4, 16, 4), (8, 8, 36, 8), (8, 24, 96, 8)]),
    # arXiv 2503.01328; with groups of 1 the orders that PipeOffload begins with.
    ("gis", {"chunks": 2}, [(8, 32, 206, 16)]),
    ("gis", {"chunks": 5}, [(8, 32, 494, 40)]),
    ("gis", {"chunks": 2, "group_size": 4}, [(8, 32, 210, 12)]),
    ("gis", {"chunks": 4, "group_size": 4}, [(8, 32, 410, 20)]),
    ("gis-h", {"chunks": 2}, [(8, 32, 210, 12)]),
    ("gis-h", {"chunks": 5}, [(8, 32, 510, 24)]),
    ("gis-h", {"chunks": 2, "group_size": 1}, [(8, 32, 215, 13)]),
    ("gis-h", {"chunks": 5, "group_size": 1}, [(8, 32, 536, 24)]),
    # arXiv 2308.15762: bubbles of .333, .213 and .119.
    ("hanayo", {"waves": 1}, [(4, 4, 36, 8)]),
    ("hanayo", {"waves": 2}, [(4, 4, 61, 16)]),
    ("hanayo", {"waves": 4}, [(4, 4, 109, 32)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "rows"), PAPERS)
def test_published_makespans_and_peaks(name: str, options: dict[str, int], rows: list[tuple[int, ...]]) -> None:
    for p, m, makespan, peak in rows:
        schedule = build(name, p, m, **options)
        chunks = schedule.placement.num_chunks // schedule.placement.replicas
        timeline = simulate(schedule, Costs(chunks, chunks, chunks))
        assert (timeline.makespan, timeline.peak * schedule.placement.model_stages) == pytest.approx((makespan, peak))


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
    *(("interleaved", options, "bad-number") for options in ({"chunks": "2"}, {"chunks": 1.5}, {"group_size": 3})),
    *product(("interleaved", "gis", "gis-h", "looped-bfs"), ({"chunks": 0}, {"chunks": True}), ("bad-number",)),
    *product(("gis", "gis-h"), ({"group_size": 0}, {"group_size": 2.0}), ("bad-number",)),
    *(("hanayo", options, "bad-number") for options in ({"waves": 0}, {"waves": "2"}, {"chunks": 1})),
    ("looped-bfs", {"group_size": 2}, "unknown-option"),
    ("hanayo", {"chunks": 3}, "needs-chunks"),
    ("hanayo", {"chunks": 2, "waves": 2}, "conflicting-options"),
    ("pipedream-2bw", {"update_every": 3}, "bad-number"),
    ("pipedream-2bw", {"update_every": "4"}, "bad-number"),
    ("pipedream", {"vertical_sync": 1}, "bad-choice"),
    *(("chimera", {"doubling": doubling}, "bad-choice") for doubling in ("yes", 1)),
    *(("chimera", {"num_devices": p}, "needs-devices") for p in (3, 7)),
    ("dualpipe", {"num_devices": 3}, "needs-devices"),
    *(("dualpipe", {"num_microbatches": m}, "needs-microbatches") for m in (6, 9)),
    *(("slimpipe", {"slices": slices}, "slices-do-not-fit") for slices in (1, 6)),
]


@pytest.mark.parametrize(("name", "changes", "code"), REFUSED)
def test_what_a_family_lacks_is_refused_by_its_name(name: str, changes: dict[str, object], code: str) -> None:
    with refused(code, name, kind=UnsupportedError):
        build_schedule(name, **{"num_devices": 4, "num_microbatches": 8, **changes})


# ---------------------------------------------------------------------------- groups, waves, orders fitted to costs


def bubble_and_peak(name: str, p: int, m: int, v: int, **options: object) -> tuple[float, float]:
    """In unit passes of one chunk, and in stage activations."""
    schedule = build(name, p, m, chunks=v, **options)
    assert_correct(schedule)
    return oracle.makespan(schedule, v, v, v) - 3 * m * v, max(oracle.peak(schedule)) * schedule.num_stages


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


def test_waves_or_chunks_say_how_the_model_is_cut() -> None:
    waves = build("hanayo", 4, 6, waves=3)
    assert build("hanayo", 4, 6, chunks=6) == waves == build("hanayo", 4, 6, waves=3, chunks=6)
    assert build("hanayo", 4, 6).placement.devices == (0, 1, 2, 3, 3, 2, 1, 0) * 2
    assert build("hanayo", 4, 6, waves=1).placement.name == "v"


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
    prices = st.one_of(price, st.lists(price, min_size=p, max_size=p).map(tuple))
    costs = Costs(data.draw(prices), data.draw(prices), data.draw(prices), data.draw(st.floats(0, 2)))
    cap = data.draw(st.integers(1, 3 * p)) / p
    schedule = auto(p, m, costs=costs, memory_cap=cap)
    assert_correct(schedule)
    assert max(oracle.peak(schedule)) <= cap + 1e-9
    validate(schedule, memory_cap=cap)
    for name, peak in (("zb-h1", 1), ("zb-h2", 2 - 1 / p)):
        if cap >= peak:
            fixed = build(name, p, m)
            assert simulate(schedule, costs).makespan <= simulate(fixed, costs).makespan * (1 + 1e-8)


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


# ------------------------------------------------------------------------------------------------------ sequence slices


# SlimPipe takes multiples of p alone.
NAMES = [family.name for family in families() if "slices" in family.options and family.name != "slimpipe"]


# Over digests of all orders for p from 1 to 9, before there were slices.
UNSLICED = {
    "v-min": "1daa18786099d9ce",
    "v-half": "aefe12cf893299a3",
    "zbv": "a83c76edae27fa89",
    "1f1b-v": "f89d515777555be8",
    "interleaved": "601a091f438f65af",
    "zb-h1": "aec0647ea46ee5d1",
    "zb-h2": "60e8558c9e975e27",
}


@pytest.mark.parametrize("name", UNSLICED)
def test_whole_sequences_run_in_the_orders_that_families_had_before_slices(name: str) -> None:
    digests = []
    for p in range(1, 10):
        for m in (1, 2, p, p + 1, 2 * p, 3 * p + 2, 7 * p + 1):
            schedule = build(name, p, m, slices=1)
            assert schedule == build(name, p, m)
            digests.append(schedule.digest)
    assert hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16] == UNSLICED[name]


SIZES = [(p, m) for p in (1, 2, 3, 4) for m in (1, p - 1, p, p + 1, 2 * p, 3 * p + 1) if m]
SLICED = [
    *((name, {}, sizes) for name in NAMES for sizes in (((2, SIZES), (5, SIZES)), ((16, [(16, 2)]), (3, [(12, 24)])))),
    *(("interleaved", {"chunks": v}, [(n, [(p, 2 * p), (p, 4 * p + 1)]) for p, n in ((3, 3), (4, 6))]) for v in (1, 3)),
]
"""Family, options, and numbers of slices with devices and microbatches."""


@pytest.mark.parametrize(("name", "options", "sizes"), SLICED)
def test_correct_and_as_small_and_fast_as_promised(name: str, options: dict, sizes: list) -> None:
    for n, shapes in sizes:
        for p, m in shapes:
            schedule = build(name, p, m, slices=n, **options)
            assert_correct(schedule)
            assert schedule.units.parts == n
            whole = build(name, p, m, slices=1, **options)
            if "chunks" not in options:
                assert max(oracle.peak(schedule)) <= max(oracle.peak(whole)), "slices save memory"
                assert oracle.makespan(schedule, 1, 1, 1) <= oracle.makespan(whole, 1, 1, 1) + 1e-9, "and cost no time"
            assert_peak_as_promised(family(name), schedule, max(oracle.peak(schedule)))
            if m >= 2 * p:
                assert_bubble_as_promised(family(name), schedule)


@pytest.mark.parametrize("name", NAMES)
def test_slices_are_whole_numbers(name: str) -> None:
    for slices in (0, "2", 1.5, True):
        with refused("bad-number", name, 1, kind=UnsupportedError):
            build(name, 2, 2, slices=slices)


@examples(60)
@given(data=st.data())
def test_interleaved_slices_in_groups_of_any_size(data: st.DataObject) -> None:
    p, m, n, v = (data.draw(st.integers(1, most)) for most in (5, 7, 6, 4))
    group = data.draw(st.integers(p, 2 * p + n))
    schedule = build("interleaved", p, m, chunks=v, group_size=group, slices=n)
    assert_correct(schedule)
    # A microbatch's slices are in as many groups more than one, each of which holds all chunks.
    groups = 1 + -(-(n - 1) // group)
    assert max(oracle.peak(schedule)) * p * v * n <= 2 * p - 2 + n + (v - 1) * groups * group


def test_the_order_of_seq1f1b_on_two_devices() -> None:
    """Two microbatches of two slices: 0 and 1, 2 and 3."""
    assert [" ".join(map(str, order)) for order in build("seq1f1b", 2, 2, slices=2).orders] == [
        "0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2",
        "1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2",
    ]
    assert build("seq1f1b", 4, 9, slices=1).orders == build("1f1b", 4, 9).orders


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("p", "times"), [(1, 2), (2, 1), (3, 3), (4, 2), (6, 1)])
def test_slimpipe_holds_one_microbatch_on_every_device(p: int, times: int, v: int) -> None:
    n = times * p
    for m in (1, 2, p + 1, 2 * p):
        schedule = build("slimpipe", p, m, slices=n, chunks=v)
        assert_correct(schedule)
        assert_peak_as_promised(family("slimpipe"), schedule, max(oracle.peak(schedule)))
        assert_bubble_as_promised(family("slimpipe"), schedule)
        further = [(1 if v == 1 else 2) * (p - 1 - device) for device in range(p)]
        assert [peak * p * n * v for peak in oracle.peak(schedule)] == [
            min(n * v + more, m * n * v) for more in further
        ]
    if (p, times, v) == (4, 2, 1):
        assert build("slimpipe", 4, 3, slices=8, chunks=1).orders == build("seq1f1b", 4, 3, slices=8).orders
        assert build("slimpipe", 4, 3) == build("slimpipe", 4, 3, slices=4, chunks=2)
