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
from megatron_pipemem.tools.report.timeline import bytes_text

GIB, MIB = 1 << 30, 1 << 20
RUN = Path(__file__).parents[2] / "configs" / "runs" / "tiny-cpu.yaml"
_ONLY = "schedule=1f1b,v-half tp=1 micro_batch=1 recompute=none variant=plain".split()
COMMANDS = {
    "schedules": "schedules",
    "one schedule": "schedules gis-h",
    "simulate": "simulate v-half -p 16 -m 20 --costs 1,1.5,.5 --p2p 0.0123456",
    "asynchronous": "simulate pipedream -p 8 -m 16",
    "search": "simulate auto -p 2 -m 4 --costs 1.000123,1.52345,.51234 --memory-cap .7 -o max_chunks=3 -o seconds=60",
    "offload": "simulate zbv -p 4 -m 8 --offload half --offload-ratio .4",
    "recompute": "simulate zbv -p 4 -m 8 --offload off -o recompute=full",
    "vocabulary": "simulate 1f1b -p 4 -m 8 --vocab-parallel auto --head-cost 2 --layers 16",
    "bytes": "simulate 1f1b -p 4 -m 8 --costs COSTS",
    "show": "show v-half gems -p 4 -m 32",
    "pareto": "pareto -p 2 -m 4 --costs 1,1.5,.5 --caps 1 --seconds 60 --all",
    "check": "check TABLE",
    "written": "check 1f1b --write OUT -p 2 -m 2",
    "profile": "profile --model llama3-70b --formulas",
    "plan": f"plan {RUN} --search-seconds 0 --top 4 {' '.join(f'--only {each}' for each in _ONLY)}",
    "layout": "layout llama3-8b -p 4 -v 2 -m 8 --dp 2 --beside Et*4|(t*4|)*6t*4L",
    "launch": f"launch {RUN} --print",
    "report": "report GRID --output PICTURE",
}
UNTIMED = ("search seconds", "considered in")
"""Lines that are another at every call."""
PICTURES = ("show", "one schedule")
"""They have as many letters as there are columns."""
NO_NUMBERS = ("schedules", "written", "launch", *PICTURES)


@pytest.fixture
def arguments(tmp_path, monkeypatch) -> Callable[[str], list[str]]:
    """The words of a command, with files for their stand-ins."""
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "t.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    costs = {"forward": 1, "backward_input": 1, "backward_weight": 1, "memory": {"F": 3 * GIB}}
    (tmp_path / "c.json").write_text(json.dumps(costs))

    def words(text: str) -> list[str]:
        if not text.startswith("launch"):  # which asks the cache for Megatron's flags: to compute them takes 10 s
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        names = {"COSTS": tmp_path / "c.json", "TABLE": tmp_path / "t.csv", "OUT": tmp_path / "o.csv"}
        names |= {"GRID": tmp_path / "grid", "PICTURE": tmp_path / "p.svg"}
        if "GRID" in text and not names["GRID"].exists():
            trained_grid(tmp_path)
        return [str(names.get(word, word)) for word in text.split()]

    return words


def trained_grid(folder: Path) -> None:
    """Runs of large models, with the numbers that they would have."""
    points = [{"schedule.name": name, "parallelism": {"pp": 2, "dp": 2}} for name in ("1f1b", "v-half", "po-f")]
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
    kept = (line for line in text.splitlines() if not any(each in line for each in UNTIMED))
    return Counter(word.strip(",;=≠") for line in kept for word in line.split() if set(word) - set("─-|"))


def numbers(name: str, found: object) -> Iterator[str]:
    """Every number of ``--json`` that the table of a command claims to show, as it shows it."""
    if name == "pareto":
        for choice in found["choices"]:
            yield from (f"{choice['peak_activation']:.4g}", f"{choice['bubble_rate']:.2%}")
    elif name == "plan":
        for each in found["plans"]:
            yield from (f"{each['seconds']:.4g}", f"{each['mfu']:.1%}", f"{each['bubble_rate']:.1%}")
            yield from (str(each[key]) for key in ("tp", "pp", "dp", "micro_batch"))
        yield from map(str, list(found["rejected"].values())[:12])
    elif name == "report":
        for each in found["results"]:
            yield from (f"{each['tokens_per_second']:,.0f}", f"{each['seconds_per_step']:.4g}")
            yield from (f"{max(each[key]) / MIB:.4g}" for key in ("predicted_peak_bytes", "counted_peak_bytes"))
            yield from (f"{min(each[key]):.1%}" for key in ("predicted_bubble_rate", "measured_bubble_rate"))
            yield f"{each['share_of_1f1b']:.2f}"
    elif name == "profile":
        for layer in found["parts"]["layers"].values():
            yield from (f"{1e3 * seconds:.3f}" for seconds in layer["seconds"].values())
            yield f"{layer['parameters']:,}"
    elif name == "layout":
        for each in found["layouts"].values():
            yield from (f"{1e3 * seconds:.1f}" for seconds in each["rank_seconds"])
            yield from (f"{each['step_seconds']:.4g}", f"{each['imbalance']:.1%}")
    elif name == "check":
        yield from (f"{found[key]:.6g}" for key in ("peak_activation", "bubble_rate", "devices", "microbatches"))
    else:
        left_out = (
            "search_seconds",
            "transfers",
            "host_peak",
            "stall_seconds",
            "weight_versions",
            "replicas",
            "pairs",
            "slices",
        )
        yield from (bytes_text(each).split()[0] for each in found.pop("peak_bytes", None) or ())
        for key, fact in found.items():
            for number in fact if isinstance(fact, list) else [fact]:
                if isinstance(number, int | float) and (key not in left_out or number > 1):
                    digits = ".2%" if key.endswith("rate") else ".4g" if isinstance(fact, list) else ".6g"
                    yield f"{number:{digits}}"


@pytest.mark.parametrize("name", COMMANDS)
def test_no_cell_is_cut_and_no_number_lost_at_any_width(pipemem, arguments, monkeypatch, name):
    words = arguments(COMMANDS[name])
    wanted: set[str] = set()
    if name not in NO_NUMBERS:
        wanted = set(numbers(name, json.loads(pipemem(*words, "--json").stdout)))
        assert len(wanted) > 2
    whole = Counter()
    for width in (None, "80", "60"):  # None: into a pipe
        if width is not None:
            monkeypatch.setenv("COLUMNS", width)
        result = pipemem(*words)
        assert result.exit_code == 0, result.output
        assert "…" not in result.stdout
        shown = words_of(result.stdout)
        assert wanted <= set(shown), f"at {width}: {wanted - set(shown)}"
        whole = whole or shown
        if name not in PICTURES:
            assert not whole - shown, f"at {width}: {whole - shown}"
