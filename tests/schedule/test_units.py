"""The arithmetic of units, against lists."""

import io
import re
import tokenize
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from refusals import refused

from megatron_pipemem.schedule.units import WHOLE, Units


@examples(100)
@given(st.lists(st.integers(1, 4), max_size=6) | st.integers(1, 4).flatmap(lambda n: st.lists(st.just(n), max_size=6)))
def test_units_are_those_of_a_list_of_microbatches(sizes):
    members = [[sum(sizes[:k]) + j for j in range(size)] for k, size in enumerate(sizes)]
    units = Units(tuple(sum(sizes[: k + 1]) for k in range(len(sizes))))
    assert len(units) == sum(sizes)
    assert units.num_microbatches == len(sizes)
    assert units.parts == max(sizes, default=1)
    assert (units.lead, units.are_whole) == (units.parts - 1, units.parts == 1)
    assert [list(units.of(k)) for k in range(len(sizes))] == members
    for k, own in enumerate(members):
        for j, unit in enumerate(own):
            assert (units.microbatch(unit), units.part(unit)) == (k, j)
            assert (units.first(unit), units.last(unit)) == (own[0], own[-1])
            assert units.before(unit) == (own[j - 1] if j else None)
            assert units.after(unit) == (own[j + 1] if j + 1 < len(own) else None)
    backwards = [unit for own in members for unit in reversed(own)]
    assert [units.backward(place) for place in range(len(units))] == backwards
    assert [units.backward(unit) for unit in backwards] == list(range(len(units)))
    assert units.sizes == tuple(sizes)
    assert units.are_equal == (len({*sizes}) < 2)
    assert units.times(2).sizes == (*sizes, *sizes)
    if len({*sizes}) == 1:
        assert units == Units.equal(len(sizes), sizes[0])
        assert hash(units) == hash(Units.equal(len(sizes), sizes[0]))


def test_a_microbatch_without_units_is_refused():
    for ends in ((0,), (2, 2), (3, 1)):
        with refused("bad-number"):
            Units(ends)


def test_any_number_of_whole_microbatches():
    assert WHOLE.are_whole
    assert [WHOLE.microbatch(unit) for unit in (0, 7)] == [WHOLE.last(unit) for unit in (0, 7)] == [0, 7]


PACKAGE = Path(__file__).parents[2] / "megatron_pipemem"
ROOMS = ("features/slices/", "tools/planner/slices.py")
NAME_SLICES = {
    # options of users: who reads them, hands them on or prints them
    *("request.py", "schedule/options.py", "choose/searching.py", "search/search.py"),
    *("tools/config/runs.py", "tools/cli/options.py", "tools/cli/loading.py", "tools/cli/plan.py"),
    "tools/planner/ways.py",
    # the word in the header of a schedule file
    "schedule/csv_format.py",
    # declarations of families and programs
    *("schedule/family.py", "families/interleaved.py", "families/one_f_one_b.py", "tools/advise/consumers.py"),
    # gates
    *("conflicts.py", "gates.py", "refusals.py"),
    # proposals, which compare plans with slices and without
    *("tools/planner/space.py", "tools/planner/planning.py", "tools/advise/advice.py"),
}


def test_slices_have_few_rooms():
    """The code of all other files knows only units. Texts may say slices anywhere, and any file may import from a room."""
    naming = set()
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        source = re.sub(r"(features|planner)\.slices\b", "", file.read_text(encoding="utf-8"))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        names = {token.string for token in tokens if token.type == tokenize.NAME}
        # Python's own, and a span of a trace.
        if any("slice" in name.lower() for name in names - {"slice", "islice", "add_slice"}) and not name.startswith(
            ROOMS
        ):
            naming.add(name)
    assert naming == NAME_SLICES
