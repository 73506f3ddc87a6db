"""What the README and the tables of the documents show is what the commands beside them print."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from lanes import rest_nightly

from megatron_pipemem import refusals
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import family

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import doc_tables

        yield doc_tables
    for name in ("doc_tables", "quickstart"):
        sys.modules.pop(name, None)


def page(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def block(name: str, document: str) -> list[str]:
    text = page(document)
    return re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end of {name} -->", text, re.DOTALL)[1].split("\n")


CHOOSING, QUICKSTART = "docs/choosing-a-schedule.md", "docs/start.md"
RECIPES = "benchmarks/notes/recipes.md"


NAMES = (
    "bubbles",
    "research",
    "slices",
    "codes",
    "flags",
    "conflicts",
    "refusals",
    "parts",
    "pairs",
    "graphs",
    "classes",
    "queues",
    "sources",
)


@pytest.mark.parametrize("name", rest_nightly(NAMES, NAMES[:-1], "test_prices_of_single_queues_are_current"))
def test_a_generated_table_is_current(tables, name):
    text = block(name, f"docs/{tables.DOCUMENTS[name]}")
    assert text == tables.BLOCKS[name]().split("\n"), "python scripts/doc_tables.py writes this table anew"


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "v-half", "dualpipe", "seq1f1b", "pipedream"])
def test_prices_of_single_queues_are_current(tables, monkeypatch, name):
    """One family of every placement and kind of backward, with slices, and without a barrier between steps."""
    monkeypatch.setattr(tables, "families", lambda: [family(name)])
    listed = " ".join(block("queues", f"docs/{tables.DOCUMENTS['queues']}")).split(", ")
    assert [price for price in listed if price.startswith(f"`{name}` ")] == [tables.list_of_queues()]


def test_the_list_of_refusals_names_the_values_of_options_that_are_not_all_refused(tables):
    conditions = {
        (name, option)
        for name, table in vars(refusals).items()
        if isinstance(table, refusals.Refusals)
        for option in table.sentences.keys() & (refusals._REFUSED.keys() | table.only.keys())
    }
    assert [key for key in conditions if not {key, key[1]} & {*tables.REFUSED_VALUES}] == []


def test_every_generated_table_is_compared(tables):
    assert {*NAMES, "costs"} == {*tables.BLOCKS}, "that of costs has searches, and is checked below"


def test_the_claims_hold_for_the_costs_beside_them(tables):
    rows = {
        cells[0]: cells[1:]
        for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in block("costs", CHOOSING)[2:])
    }
    rates = {what: [float(cell.rstrip("%")) / 100 for cell in cells[2:]] for what, cells in rows.items()}
    peaks = {what: [float(cell) for cell in cells[:2]] for what, cells in rows.items()}
    for what, (name, options) in tables.COMPARED.items():
        runs = [tables._family(name, costs, **options) for costs in tables.COSTS.values()]
        held = [f"{peak:.{digits}f}" for digits, peak in zip((3, 2), tables._peaks(runs[0]), strict=True)]
        assert rows.pop(what) == [*held, *(f"{run.bubble_rate:.1%}" for run in runs)]
    assert list(rows) == list(tables.SEARCHES)
    # What a search finds is checked against the bound, which the one with two chunks is said to meet.
    p, m = tables.DEVICES, tables.MICROBATCHES
    two, eight = rows
    for index, costs in enumerate(tables.COSTS.values()):
        work = m * (costs.forward + costs.backward_input + costs.backward_weight)
        bound = [1 - work / lower_bound(Placement.wave(p, chunks), m, costs, tables.CAP) for chunks in (2, 8)]
        assert rates[two][index] == pytest.approx(bound[0], abs=6e-4)
        assert bound[1] - 6e-4 <= rates[eight][index] < rates[two][index]
    # The sentences above and below the table.
    said = re.findall(
        r"(?:`([a-z0-9-]+)`) \|[^|]* ([0-9.]+) \(\**([0-9.]+)\**\) of (?:the|1F1B's) bubble", page(CHOOSING)
    )
    names = [name for name, *_ in said]
    assert names == ["zb-h1", "interleaved", "gis", "zbv", "v-half"]
    for name, *shares in said:
        what = next(rate for rate in rates if rate in (f"`{name}`", f"`{name}`, 5 chunks"))
        assert [float(share) for share in shares] == pytest.approx(
            [rate / of_1f1b for rate, of_1f1b in zip(rates[what], rates["`1f1b`"], strict=True)], abs=0.01
        )
    compared = ("`1f1b`", "`interleaved`, 5 chunks", "`gis`, 5 chunks", "`zbv`", "`v-half`", "`v-min`")
    (f, equal), (i, _), (g, _), (z, _), (h, cheap), (v, small) = (rates[what] for what in compared)
    assert h < f / 2 and z == pytest.approx(f / 5, rel=0.05) and cheap > equal and small > 2 * equal
    assert (f, i, g, z) == pytest.approx((0.179, 0.042, 0.028, 0.035)), "as README and page say"
    assert [peaks[what][0] for what in compared] == [1, 1.175, 1, 1, 0.625, 0.5]
    for what in compared:
        units, share = peaks[what]
        assert share == pytest.approx(units, abs=0.04), "in bytes no more than the papers say"


def test_what_the_pages_say_of_public_recipes_is_what_their_table_shows():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block("recipes", RECIPES)[2:]]
    steps = [[float(cell.rstrip("%")) if cell != "-" else 0.0 for cell in (row[5], row[7])] for row in rows]
    tuned = [row for row, (ours, stock) in zip(rows, steps, strict=True) if stock <= ours]
    lacking = [row for row in tuned if row[4] == "-"]
    assert (len(rows), len(tuned), len(lacking)) == (22, 12, 3)
    (idle,) = {row[3] for row in rows if row[0] == "gpt_oss_20b_pretrain_16gpu"}
    assert f"{idle} for gpt_oss_20b" in page(CHOOSING)


def test_the_table_of_the_quickstart_is_of_todays_runs(tables):
    """Names, marks, plans and shares; final losses depend on the sources of the Python at hand, times on the machine."""
    quickstart = tables.quickstart
    rule = next(index for index, line in enumerate(block("quickstart", QUICKSTART)) if line.startswith("───"))
    rows = [line.split() for line in block("quickstart", QUICKSTART)[rule + 1 : -1]]
    assert [tuple(row[:2]) for row in rows] == [(run.schedule, run.engine) for run in quickstart.RUNS]
    stock = rows[0]
    for row, run in zip(rows, quickstart.RUNS, strict=True):
        _, _, loss, mark, predicted, counted, share, _, bubble, _ = row
        marks = {"emulator"} if run.is_asynchronous else {"yes", "~"} if family(run.schedule).replicas > 1 else {"yes"}
        assert mark in marks and (mark != "yes" or loss == stock[2])
        assert predicted == ("-" if run.engine == "stock" else counted)
        assert share == f"{int(counted) / int(stock[5]):.2f}"
        assert bubble == f"{quickstart.planned(run.schedule).bubble_rate:.1%}"


def test_a_run_of_the_quickstart_becomes_its_block(tables, tmp_path):
    row = {
        "schedule": "1f1b", "engine": "stock", "losses": [4.5, 3.25], "predicted_peak_bytes": [None], "identical": True,
        "counted_peak_bytes": [800], "counted_weight_bytes": [1_000_000], "seconds": 1.5, "compared_with": "stock",
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(tables.json.dumps([row]))
    shown = tables.table_of_quickstart(tmp_path)
    text = tables.written("a\n<!-- x -->\nold\n<!-- end of x -->\nb\n", {"x": shown})
    assert text == f"a\n<!-- x -->\n{shown}\n<!-- end of x -->\nb\n"
    assert shown.splitlines()[-2].split() == "1f1b stock 3.250000 yes - 800 1.00 1.0 27.3% 1.5".split()
    assert [line.split() for line in shown.splitlines()[:3]] == [
        line.split() for line in block("quickstart", QUICKSTART)[:3]
    ]
    with pytest.raises(SystemExit):
        tables.written("no block", {"x": shown})
