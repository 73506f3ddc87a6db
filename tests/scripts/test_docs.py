"""Numbers in docs/ that are cheap to compute are what today's code gives."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_pipemem.cli.app import load_commands
from megatron_pipemem.config.refusals import SCHEDULES, refuse
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.launch.command import flag_parser
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import SELECTIVE_SECONDS
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import SELECTIVE_BYTES, Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, synchronous_schedules
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.stream import family_window, steady, stream
from megatron_pipemem.schedule.waits import run_single_queues

ROOT = Path(__file__).parents[2]
UNEQUAL = Costs(1, 1.5, 0.5)


def text(document: str) -> str:
    """On one line."""
    return " ".join((ROOT / document).read_text(encoding="utf-8").split())


def run(name: str, p: int, m: int, costs: Costs | None = None, **options) -> Timeline:
    return simulate(build_schedule(name, num_devices=p, num_microbatches=m, costs=costs, **options), costs)


def rate(name: str, p: int, m: int, costs: Costs | None = None, **options) -> str:
    return f"{100 * run(name, p, m, costs, **options).bubble_rate:.1f}"


def least_rate(placements: list[Placement], m: int, costs: Costs, cap: float) -> float:
    work = m * (costs.forward + costs.backward_input + costs.backward_weight)
    return 1 - work / min(lower_bound(placement, m, costs, cap) for placement in placements)


def test_searching_for_unequal_costs():
    v = [Placement.v_shape(8)]
    optimal = f"{100 * least_rate(v, 24, UNEQUAL, 0.625):.1f}"
    assert (
        f"on 8 devices and 24 microbatches V-Half idles {rate('v-half', 8, 24, UNEQUAL)}% and V-Min "
        f"{rate('v-min', 8, 24, UNEQUAL)}% of a step. With two chunks per device as they, the search finds {optimal}%"
    ) in text("docs/search.md")


def test_single_queues():
    said = text("docs/how-it-works.md")
    for arguments, costs in (("", Costs()), ("--costs 1,1.5,.5 --p2p .05 ", Costs(1, 1.5, 0.5, p2p=0.05))):
        schedule = build_schedule("v-half", num_devices=8, num_microbatches=32, costs=costs)
        queued = run_single_queues(lower(schedule, single_queue=True, costs=costs), costs).makespan
        usual = simulate(schedule, costs).makespan
        command = f"pipemem simulate v-half -p 8 -m 32 {arguments}--single-queue # "
        assert f"{command}{usual:.1f} as usual, {queued:.1f} in single queues" in said


def test_asynchronous():
    window = family_window("pipedream-2bw", 4, 8, steady(4, 8)).simulate()
    said = (
        f"is {100 * window.bubble_rate:.1f} % instead of {rate('1f1b', 4, 8)} %. `zb-h1` ({rate('zb-h1', 4, 8)} %) and "
    )
    assert f"p = 4 and m = 8 the bubble {said}`zbv` ({rate('zbv', 4, 8)} %)" in text("docs/other-schedules.md")


def test_bidirectional():
    said = text("docs/other-schedules.md")
    doubled, plain = ([rate("chimera", 4, m, doubling=each) for m in (8, 16, 32)] for each in (True, False))
    assert (
        f"m = 8, 16, 32 the bubble is {' %, '.join(doubled)} %; without doubling it is {' %, '.join(plain)} %" in said
    )
    quickstart = re.search(r"<!-- quickstart -->(.*?)<!-- end", (ROOT / "docs/start.md").read_text(), re.DOTALL)[1]
    rows = {tuple(line.split()[:2]): line.split() for line in quickstart.splitlines() if "%" in line}
    for name, engine in (("1f1b", "stock"), ("chimera", "pipemem"), ("gems", "pipemem"), ("dualpipe", "pipemem")):
        _, _, _, _, _, counted, share, megabytes, bubble, _ = rows[name, engine]
        label = "stock 1F1B" if engine == "stock" else f"`{name}`"
        shown = re.search(rf"\| {label} \| ([\d ]+) \| ([\d.]+) \| ([\d ]+) \| ([\d.]+) % \|", said)
        assert (shown[1].replace(" ", ""), shown[2], shown[4] + "%") == (counted, share, bubble)
        assert f"{int(shown[3].replace(' ', '')) / 1e6:.1f}" == megabytes


def test_search_names_the_bounds():
    """Stars and brackets of the tables. No family of up to eight devices is faster than the search."""
    document = (ROOT / "docs/search.md").read_text(encoding="utf-8")
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
                best = min(each.bubble_rate for each in families if each.peak <= cap + 1e-9)
                assert float(reached) <= best + 5e-5
    assert compared == 11 * 4 + 3 * 4


def test_search_in_words():
    said = text("docs/search.md")
    v = [[Placement.v_shape(p)] for p in (8, 8, 16)]
    bounds = [least_rate(v[i], m, UNEQUAL, 1.0) for i, m in enumerate((24, 64, 64))]
    shown = [f"{bound:.4f}".lstrip("0") for bound in bounds]
    assert f"a bubble of {shown[0]} (p = 8, m = 24), {shown[1]} (8, 64) and {shown[2]} (16, 64)" in said
    assert f"takes V-Half on 8 devices from a bubble of {run('v-half', 8, 24, UNEQUAL).bubble_rate:.3f}".replace(
        " 0.", " ."
    ) in said  # fmt: skip


def test_offload():
    said = text("docs/offload.md")
    assert (SELECTIVE_SECONDS, SELECTIVE_BYTES) == (1 / 20, 13 / 32) and "1/20 of F and makes 13/32" in said
    assert "`10 / (3 (6h + s)) * C / B`" in said
    assert f"220 TFLOP/s and 15 GB/s that is {10 / (3 * 7 * 4096) * 220 / 15 * 1e3:.3f}" in said


def test_steps_without_a_barrier():
    found = stream(build_schedule("zbv", num_devices=8, num_microbatches=16), steps=8)
    step, period, gain = f"{found.synchronous:.4g}", f"{found.period:.4g}", f"{found.gain:.3f}"
    assert f"a step {step}, period {period}, gain {gain}" in text("docs/other-schedules.md")
    other = stream(build_schedule("zbv", num_devices=8, num_microbatches=16), Costs(1, 1.2, 0.8))
    assert f"gain {other.gain:.3f}" in text("docs/other-schedules.md")


def test_no_page_sends_cuda_graphs_or_user_buffers_to_a_schedule_that_refuses_them():
    rows = (ROOT / "docs" / "choosing-a-schedule.md").read_text(encoding="utf-8").splitlines()
    graphs, buffers = ([row for row in rows if words in row] for words in ("| CUDA graphs", "| user buffers"))
    with pytest.raises(UnsupportedError):
        refuse({"cuda_graph_impl": "local"}.get, SCHEDULES)
    assert len(graphs) == 1 and graphs[0].endswith("| stock Megatron |")
    refuse({"tp_comm_overlap": True}.get, SCHEDULES)
    (row,) = buffers
    named = re.findall(r"`([\w-]+)`", row.split("|")[3])
    assert named and not any(Request(name).may_split for name in named)


def test_the_readme_counts_no_schedules():
    assert not re.search(r"All \d+ schedules\]", text("README.md"))


def test_when_not_to_use():
    assert float(rate("1f1b", 4, 256)) == pytest.approx(100 * 3 / 259, abs=0.05)
    assert "`(p-1)/(m+p-1)`: 1 % at p = 4, m = 256" in text("docs/choosing-a-schedule.md")


def test_the_start_page_has_every_flag_of_a_run():
    said = text("docs/start.md")
    flags = [option for each in flag_parser()._actions for option in each.option_strings if each.help]
    assert len(flags) > 10 and [flag for flag in flags if f"`{flag}" not in said and flag not in ("-h", "--help")] == []


def test_commands_have_the_options_that_they_are_shown_with():
    """They are parsed, not run; those with an ellipsis are no commands."""
    commands, seen = {name: each for name, each in load_commands().items() if not each.hidden}, 0
    for document in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")):
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
