"""Numbers in docs/ that are cheap to compute are what today's code gives."""

from __future__ import annotations

import re
import shlex
import sys
from itertools import chain
from pathlib import Path

import pytest
from commands import pipemem
from lanes import rest_nightly

from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, synchronous_schedules
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.tools.cli.app import load_commands

ROOT = Path(__file__).parents[2]


def run(name: str, p: int, m: int, costs: Costs | None = None, **options) -> Timeline:
    return simulate(build_schedule(name, num_devices=p, num_microbatches=m, costs=costs, **options), costs)


def least_rate(placements: list[Placement], m: int, costs: Costs, cap: float) -> float:
    work = m * (costs.forward + costs.backward_input + costs.backward_weight)
    return 1 - work / min(lower_bound(placement, m, costs, cap) for placement in placements)


def test_search_names_the_bounds():
    """Stars and brackets of the tables. No family of up to eight devices is faster than the search."""
    document = (ROOT / "benchmarks/notes/search.md").read_text(encoding="utf-8")
    caps, compared = (0.5, 0.625, 0.75, 1.0), 0
    for line in document.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        two_chunks = len(cells) == 7
        if not (two_chunks or len(cells) == 6) or not re.fullmatch(r"[\d.]+:[\d.]+:[\d.]+", cells[two_chunks]):
            continue
        p, m = map(int, cells.pop(0).split(",")) if two_chunks else (8, 24)
        costs = Costs(*map(float, cells[0].split(":")), p2p=float(cells[1]))
        most = 2 if two_chunks else 8
        placements = [Placement.interleaved(p, k) for k in range(1, most + 1)]
        placements += [Placement.wave(p, k) for k in range(2, most + 1, 2)]
        families = [simulate(s, costs) for s in synchronous_schedules(p, m, costs, 2)] if two_chunks and p <= 8 else []
        for cap, cell in zip(caps, cells[2:6], strict=True):
            reached, optimal, bound = re.fullmatch(r"([\d.]+)(?:(\*)| \(([\d.]+)\))", cell).groups()
            least = least_rate(placements, m, costs, cap)
            assert f"{least:.4f}" == (reached if optimal else bound), line
            compared += 1
            if families:
                best = min(family.bubble_rate for family in families if family.peak <= cap + 1e-9)
                assert float(reached) <= best + 5e-5
    assert compared == 11 * 4 + 3 * 4


def test_commands_have_the_options_that_they_are_shown_with():
    """They are parsed, not run; those with an ellipsis are no commands."""
    commands, seen = {name: command for name, command in load_commands().items() if not command.hidden}, 0
    for document in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")):
        for line in document.read_text(encoding="utf-8").splitlines():
            shown = re.search(r"^(?:    )?(?:time )?(?:\.venv/bin/)?pipemem (.+)", line)
            if shown is None or "..." in line or "…" in line or "mine.py" in line:  # a file of the reader's own
                continue
            name, *arguments = shlex.split(shown[1], comments=True)
            if name.startswith("-") or "--help" in arguments:  # typer's own, which end at once
                continue
            try:
                commands[name].make_context(name, arguments)
            except Exception as error:  # of typer's own copy of click, which has no public name
                pytest.fail(f"{document.name}: {line.strip()}: {error}")
            seen += 1
    assert seen > 30


@pytest.fixture(scope="module")
def pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import doc_pictures

        yield doc_pictures
    sys.modules.pop("doc_pictures", None)


def test_every_picture_is_drawn_by_a_command_and_shown_and_small(pictures):
    names = [path.name for path in pictures.IMAGES.iterdir()]
    assert sorted(names) == sorted([*pictures.PICTURES, *pictures.commands()])
    assert all((pictures.IMAGES / name).stat().st_size < 120_000 for name in names)
    documents = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    shown = [
        re.findall(r"!\[[^]]+\]\((?:docs/)?images/([\w.-]+)\)", path.read_text(encoding="utf-8")) for path in documents
    ]
    assert sorted(chain.from_iterable(shown)) == sorted(names)


def test_pictures_of_ideas_are_those_of_the_code(pictures):
    """Every byte: they are text, without widths of letters."""
    drawn = {name: draw() for name, draw in pictures.PICTURES.items()}
    now = {name: (pictures.IMAGES / name).read_text(encoding="utf-8") for name in drawn}
    assert [name for name in drawn if drawn[name] != now[name]] == [], "python scripts/doc_pictures.py NAME"


TIMELINES = ("offload.png", "pairs.png", "schedules.png", "slices.png", "steps.png", "vocabulary.png")


@pytest.mark.parametrize("name", rest_nightly((*TIMELINES, "pareto.png"), TIMELINES, "tests/report/test_pareto.py"))
def test_a_picture_is_what_the_command_beside_it_draws(pictures, tmp_path, name):
    """Titles, captions, and a hash of texts and shapes stand in the file, so that pixels may differ between machines."""
    read = pytest.importorskip("PIL.Image").open
    drawn = tmp_path / name
    assert pipemem(*pictures.commands()[name], "--output", str(drawn)).exit_code == 0
    same = read(pictures.IMAGES / name).text["Description"] == read(drawn).text["Description"]
    assert same, f"python scripts/doc_pictures.py {name}"


def test_every_shipped_model_and_cluster_is_listed():
    document = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    for folder in ("models", "clusters"):
        names = [path.stem for path in (ROOT / "megatron_pipemem/tools/config" / folder).glob("*.yaml")]
        assert names and [name for name in names if f"`{name}`" not in document] == []
