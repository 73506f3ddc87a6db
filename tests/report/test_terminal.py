"""The terminal picture."""

from __future__ import annotations

import io
import re
from collections import Counter

import pytest
from rich.console import Console

from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.stream import draw_steps
from megatron_pipemem.tools.report.terminal import TerminalTimeline


def lines(timeline, width: int = 80, **console) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, **console).print(TerminalTimeline(timeline))
    return out.getvalue().splitlines()


def test_golden(run):
    assert [line.rstrip() for line in lines(run("1f1b", 2, 2), width=60)] == [
        "1f1b: p=2, m=2, bubble 33.3%, peak 1",
        "                                                peak",
        "device 0 |F0--F1--        B0------    B1------| 1",
        "device 1 |    F0--B0------F1--B1------        | 0.5",
        "          0     time (F of a device = 1)     9",
        " F forward    B full backward",
        "number: microbatch, with dashes to the end of the pass",
        "peak: 1F1B's first device holds 1",
    ]


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (4, 8), (16, 64)])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_the_console_and_has_a_line_per_device(run, name, p, m, width):
    picture = lines(run(name, p, m), width)
    assert max(map(len, picture)) <= width
    assert [line.split("|")[0].strip() for line in picture if "|" in line] == [f"device {d}" for d in range(p)]


def test_every_action_is_labelled_when_there_is_room(run):
    timeline = run("zb-h1", 4, 8)
    for order, line in zip(timeline.schedule.orders, lines(timeline, width=200)[2:6], strict=True):
        assert all(f"{action.kind}{action.microbatch}" in line for action in order)


@pytest.mark.parametrize("costs", [Costs(), Costs(1, 1.5, 0.5)], ids=["equal passes", "short W"])
@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-min", "gems", "interleaved"])
def test_blanks_and_letters_of_squeezed_runs_have_their_shares_of_the_time(run, name, m, costs):
    timeline = run(name, 8, m, costs)
    seconds = [Counter({" ": timeline.makespan - work}) for work in timeline.work]
    for device, order in enumerate(timeline.schedule.orders):
        for action, (start, end) in zip(order, timeline.spans[device], strict=True):
            seconds[device][str(action.kind)] += end - start
    for width in (60, 80, 160):
        for device, line in enumerate(lines(timeline, width)[2:10]):
            cells = line.split("|")[1]
            shown = Counter(cells.upper())
            assert shown.keys() <= seconds[device].keys()
            for letter, time in seconds[device].items():
                share = pytest.approx(time / timeline.makespan, abs=1.5 / len(cells))
                assert shown[letter] / len(cells) == share, letter


def test_colours_only_where_the_terminal_has_them(run):
    timeline = run("1f1b", 2, 2)
    assert not any("\x1b" in line for line in lines(timeline))
    coloured = "\n".join(lines(timeline, force_terminal=True, color_system="truecolor"))
    assert "48;2;38;98;168" in coloured


@pytest.mark.parametrize("name", ["zbv", "dualpipe"])
def test_kinds_and_chunks_differ_in_terminals_with_16_colours(run, name):
    coloured = "\n".join(lines(run(name, 4, 8), 160, force_terminal=True, color_system="standard"))
    matches = re.findall(r"\x1b\[(?:\d+;)*((?:4|10)\d)m([A-Za-z])", coloured)
    colours = {letter: {code for code, other in matches if other == letter} for _, letter in matches}
    assert colours.keys() >= {"F", "f", "I", "i", "W", "w"} | ({"B", "b"} if name == "dualpipe" else set())
    assert all(len(codes) == 1 for codes in colours.values())
    assert len(set().union(*colours.values())) == len(colours)


def test_compared_runs_share_one_time_axis(run):
    """A column is as long in both: the shorter run ends earlier, and devices stand in one column."""
    longer, shorter = run("1f1b", 12, 24), run("zbv", 4, 24)
    for width in (60, 120, 400):
        out = io.StringIO()
        console = Console(file=out, width=width)
        for timeline in (longer, shorter):
            console.print(TerminalTimeline(timeline, [longer, shorter]))
        rows = [line for line in out.getvalue().splitlines() if line.startswith("device")]
        assert len({line.index("|") for line in rows}) == 1
        lengths = [len(line.split("|")[1]) for line in (rows[0], rows[-1])]
        assert lengths[1] / lengths[0] == pytest.approx(shorter.makespan / longer.makespan, abs=0.02)


def test_a_squeezed_run_says_so(run):
    said = " ".join(lines(run("zbv", 4, 64), width=60)[-2:])
    assert said.startswith("squeezed: ") and said.rstrip().endswith("with --output")
    assert "squeezed" not in lines(run("zbv", 4, 4), width=200)[-1]


def test_a_run_much_longer_than_the_others_has_its_own_time_axis(run):
    """On the common one it would leave them too few columns; it says how its columns compare."""
    others, gems = [run("1f1b", 4, 8), run("zbv", 4, 8)], run("gems", 4, 8)
    runs, pictures = [*others, gems], []
    for timeline in (others[0], gems):
        out = io.StringIO()
        Console(file=out, width=100).print(TerminalTimeline(timeline, runs))
        pictures.append(out.getvalue().splitlines())
    alone = io.StringIO()
    Console(file=alone, width=100).print(TerminalTimeline(others[0], others))
    assert pictures[0] == alone.getvalue().splitlines()
    columns = [len(picture[2].split("|")[1]) for picture in pictures]
    (note,) = [line for line in pictures[1] if line.startswith("own time axis")]
    seconds = [timeline.makespan / count for timeline, count in zip((others[0], gems), columns, strict=True)]
    assert float(note.split()[7]) == pytest.approx(seconds[1] / seconds[0], rel=0.02)


@pytest.mark.parametrize(("width", "squeezed"), [(40, True), (200, False)])
def test_a_mark_stands_before_each_next_step_of_every_device(run, width, squeezed):
    picture = lines(draw_steps(run("zb-h2", 3, 3), 3), width)
    rows = [line.split("|")[1] for line in picture if line.startswith("device")]
    assert len(rows) == 3 and len({len(row) for row in rows}) == 1 and max(map(len, picture)) <= width
    steps = [row.split("│") for row in rows]
    assert [len(row) for row in steps] == [3] * 3
    if not squeezed:
        numbers = [[[*map(int, re.findall(r"F(\d+)", step))] for step in row] for row in steps]
        assert numbers == [[[0, 1, 2], [3, 4, 5], [6, 7, 8]]] * 3
    assert any("│ next step" in line for line in picture), "an entry of the legend is not torn"


@pytest.mark.parametrize(("name", "options", "of"), [("1f1b", {}, "microbatch"), ("seq1f1b", {"slices": 2}, "slice")])
def test_numbers_are_explained_where_there_are_some(run, name, options, of):
    timeline = run(name, 2, 4, **options)
    wide, narrow = (" ".join(lines(timeline, width)) for width in (120, 24))
    assert f"number: {of}" in wide and "number:" not in narrow and "next step" not in wide
