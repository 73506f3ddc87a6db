"""The arithmetic of units, against lists."""

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
NAMES_SLICES = {
    *("choose/choice.py", "choose/searching.py", "conflicts.py", "errors.py", "gates.py", "refusals.py", "request.py"),
    *("families/interleaved.py", "families/one_f_one_b.py"),
    *("features/__init__.py", "features/vocabulary/megatron/step.py", "features/vocabulary/runtime/passes.py"),
    *("mcore/model/stages.py", "mcore/symbols.py"),
    *("schedule/csv_format.py", "schedule/family.py", "schedule/messages.py", "schedule/options.py"),
    *("schedule/registry.py", "schedule/schedule_file.py", "schedule/size.py"),
    *("search/portfolio.py", "search/search.py"),
}
"""Files of the core, besides ``features/slices``, that name slices: users' options and texts, and what builds them."""


TOOLS_WITH_SLICES = {
    *(f"advise/{name}.py" for name in ("advice", "consumers")),
    *(f"cli/{name}.py" for name in ("advise", "loading", "options", "plan", "schedules")),
    *("config/runs.py", "launch/feasibility.py"),
    *(f"planner/{name}.py" for name in ("memory", "planning", "run_prices", "slices", "space", "variants", "ways")),
}
"""Tools whose code has names of slices: options of users, and plans with and without slices."""
SLICES = "(?i)(?<![a-z])(un)?slice"


def test_slices_have_few_rooms():
    """All other files of the core know only units. A file that ceases to name slices leaves the list."""
    files = {file.relative_to(PACKAGE).as_posix(): file.read_text() for file in PACKAGE.rglob("*.py")}
    builtin = re.compile(r"\bislice\b|\bslice\(|[:\[] ?slice\b|the slice of each")
    naming = {name for name, text in files.items() if re.search(SLICES, builtin.sub("", text))}
    core = {name for name in naming if not name.startswith(("tools/", "scripts/", "features/slices/"))}
    assert core == NAMES_SLICES | {"model/partition.py"}, "contiguous slices of the model are another thing"


def test_slices_have_few_tools():
    """Texts for users may say slices anywhere. The code of all other tools knows only units."""
    naming = set()
    for file in (PACKAGE / "tools").rglob("*.py"):
        with file.open("rb") as lines:
            names = {token.string for token in tokenize.tokenize(lines.readline) if token.type == tokenize.NAME}
        if any(re.search(SLICES, name) for name in names - {"slice", "islice", "add_slice"}):
            naming.add(file.relative_to(PACKAGE / "tools").as_posix())
    assert naming == TOOLS_WITH_SLICES, "add_slice adds a span to a trace"
