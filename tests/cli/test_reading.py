"""What commands print is whole at any width: no cell is cut, no number lost, in a terminal, a pipe or a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from megatron_pipemem.tools.launch.grid.points import load_points
from megatron_pipemem.tools.launch.grid.store import Result, Store

MIB = 1 << 20
RUN = Path(__file__).parents[2] / "configs" / "runs" / "tiny-cpu.yaml"
_ONLY = "schedule=1f1b,v-half tp=1 micro_batch=1 recompute=none variant=plain".split()
COMMANDS = {
    "schedules": "schedules",
    "one schedule": "schedules gis-h",
    "simulate": "simulate v-half -p 16 -m 20 --costs 1,1.5,.5 --p2p 0.0123456",
    "search": "simulate auto -p 2 -m 4 --costs 1.000123,1.52345,.51234 --memory-cap .7 -o max_chunks=3 -o seconds=60",
    "show": "show v-half gems -p 4 -m 32",
    "pareto": "pareto -p 2 -m 4 --costs 1,1.5,.5 --caps 1 --seconds 60 --all",
    "check": "check TABLE",
    "profile": "profile --model llama3-70b --formulas",
    "plan": f"plan {RUN} --search-seconds 0 --top 4 {' '.join(f'--only {limit}' for limit in _ONLY)}",
    "layout": "layout llama3-8b -p 4 -v 2 -m 8 --dp 2 --beside Et*4|(t*4|)*6t*4L",
    "launch": f"launch {RUN} --print",
    "report": "report GRID --output PICTURE",
}
UNTIMED = ("search seconds", "considered in")
"""Lines that are another at every call."""
PICTURES = ("show", "one schedule")
"""They have as many letters as there are columns."""
NUMBERED = ("simulate", "pareto", "plan", "report", "profile", "layout")


@pytest.fixture
def arguments(tmp_path, monkeypatch) -> Callable[[str], list[str]]:
    """The words of a command, with files for their stand-ins."""
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "t.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")

    def words(text: str) -> list[str]:
        if not text.startswith("launch"):  # which asks the cache for Megatron's flags: to compute them takes 10 s
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        names = {"TABLE": tmp_path / "t.csv", "GRID": tmp_path / "grid", "PICTURE": tmp_path / "p.svg"}
        if "GRID" in text and not names["GRID"].exists():
            trained_grid(tmp_path)
        return [str(names.get(word, word)) for word in text.split()]

    return words


def trained_grid(folder: Path) -> None:
    """Runs of large models, with the numbers that they would have."""
    points = [{"schedule": name, "pp": 2, "dp": 2} for name in ("1f1b", "v-half", "po-f")]
    (folder / "g.yaml").write_text(yaml.safe_dump({"run": str(RUN), "points": points}))
    store = Store(folder / "grid")
    store.create(folder / "g.yaml", load_points(folder / "g.yaml"))
    for index, settings in enumerate(store.settings()):
        predicted, counted = (12_345 + index) * MIB, (12_345 + index**2) * MIB
        rates = {"predicted_bubble_rate": (0.1234, 0.2), "measured_bubble_rate": (0.2345, 0.3)}
        sizes = {"predicted_peak_bytes": (predicted, 1), "counted_peak_bytes": (counted, 1)}
        sizes |= {"bytes_of_1f1b": 23_456 * MIB}
        speed = {"seconds_per_step": 12.34 + index, "tokens_per_second": 1_234_567.8 * (index + 1)}
        result = Result(index, settings, "done", exit_code=0, devices=4, **rates, **sizes, **speed)
        (store.place(index) / "result.json").write_text(json.dumps(asdict(result)))


def words_of(text: str) -> Counter[str]:
    """Without rules and colons, which other widths need in other numbers."""
    kept = (line for line in text.splitlines() if not any(name in line for name in UNTIMED))
    return Counter(word.strip(",;=≠") for line in kept for word in line.split() if set(word) - set("─-|"))


def numbers(name: str, answer: dict) -> Iterator[str]:
    """Every number of ``--json`` that the table of a command claims to show, as it shows it."""
    if name == "simulate":
        yield from (f"{answer[key]:.6g}" for key in ("makespan", "lower_bound", "peak_activation"))
        yield from (f"{answer[key]:.2%}" for key in ("bubble_rate", "device_bubble_rate"))
    elif name == "pareto":
        for choice in answer["choices"]:
            yield from (f"{choice['peak_activation']:.4g}", f"{choice['bubble_rate']:.2%}")
    elif name == "plan":
        for plan in answer["plans"]:
            yield from (f"{plan['seconds']:.4g}", f"{plan['mfu']:.1%}", f"{plan['idle_rate']:.1%}")
            yield from (str(plan[key]) for key in ("tp", "pp", "dp", "micro_batch"))
        yield from map(str, list(answer["rejected"].values())[:6])
    elif name == "report":
        for point in answer["results"]:
            yield from (f"{point['tokens_per_second']:,.0f}", f"{point['seconds_per_step']:.4g}")
            yield from (f"{max(point[key]) / MIB:,.0f}" for key in ("predicted_peak_bytes", "counted_peak_bytes"))
            yield from (f"{min(point[key]):.1%}" for key in ("predicted_bubble_rate", "measured_bubble_rate"))
            yield f"{point['share_of_1f1b']:.2f}"
    elif name == "profile":
        for layer in answer["parts"]["layers"].values():
            yield from (f"{1e3 * seconds:.3f}" for seconds in layer["seconds"].values())
            yield f"{layer['parameters']:,}"
    elif name == "layout":
        for layout in answer["layouts"].values():
            yield from (f"{1e3 * seconds:.1f}" for seconds in layout["rank_seconds"])
            yield f"{layout['step_seconds']:.4g}"


@pytest.mark.parametrize("name", COMMANDS)
def test_no_cell_is_cut_and_no_number_lost_at_any_width(pipemem, arguments, monkeypatch, name):
    words = arguments(COMMANDS[name])
    expected: set[str] = set()
    if name in NUMBERED:
        expected = set(numbers(name, json.loads(pipemem(*words, "--json").stdout)))
        assert len(expected) > 2
    whole = Counter()
    for width in (None, "80", "60"):  # None: into a pipe
        if width is not None:
            monkeypatch.setenv("COLUMNS", width)
        result = pipemem(*words)
        assert result.exit_code == 0, result.output
        assert "…" not in result.stdout
        shown = words_of(result.stdout)
        assert expected <= set(shown), f"at {width}: {expected - set(shown)}"
        whole = whole or shown
        if name not in PICTURES:
            assert not whole - shown, f"at {width}: {whole - shown}"
