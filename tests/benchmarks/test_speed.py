"""Parts H, I and J of the one-GPU proof, rehearsed on CPU, and what a machine lacks is said before anything starts."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import run_program

from megatron_pipemem.tools.cpu.ranks import end_ranks, start_ranks

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(PROGRAMS)
    names = ("hands", "needs", "one_process", "processes", "proof", "prove", "shares", "speed")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def rehearse(program: str, path: Path, *more: str) -> dict[str, dict]:
    """Return the rows of a program by their cases. It is forked from a process that has imported Megatron."""
    words, log = (PROGRAMS / f"{program}.py", "--rehearse", "--output", str(path), *more), path.with_suffix(".log")
    (process,) = processes = start_ranks(run_program, [words], [log])
    try:
        process.join()  # tests/watching/patience.py ends one that waits
    finally:
        end_ranks(processes)
    assert path.exists(), log.read_text()
    data = json.loads(path.read_text())
    assert [row["missed"] for row in data["rows"] if row["missed"]] == []
    assert process.exitcode == 0 and data["complete"], log.read_text()
    return {row["case"]: row["values"] for row in data["rows"]}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> dict[str, dict]:
    return rehearse("one_process", tmp_path_factory.mktemp("h") / "rows.json")


OURS = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min", "gis", "auto under 1", "auto under 0.75")
STOCK = ("1f1b", "interleaved")


def test_every_schedule_takes_its_simulated_time_on_virtual_streams(one_process):
    workload = "p = 4, m = 8, h = 32, local layers"
    ours = {name: one_process[f"pipemem {name}, {workload}"] for name in OURS}
    stock = {name: one_process[f"stock {name}, {workload}"] for name in STOCK}
    assert len(one_process) == len(OURS) + len(STOCK) + 1
    for values in ours.values():
        assert values["measured_over_simulated"] == pytest.approx(1, abs=1e-9)
    # Stock waits for its messages, of .05 each. A step without messages is (m + p - 1) (F + B) = 33.
    for name, values in stock.items():
        assert ours[name]["seconds"] < values["seconds"] < 1.01 * ours[name]["seconds"]
    assert 33 < ours["1f1b"]["seconds"] < 34
    assert ours["zb-h1"]["I_ms"] == [1250.0] * 4 and ours["zbv"]["W_ms"] == [375.0] * 8
    assert len({values["loss"] for values in (*ours.values(), *stock.values())}) == 1
    peak = {name: max(values["predicted_GiB"]) for name, values in ours.items()}
    assert peak["v-min"] < peak["v-half"] < 0.8 * peak["1f1b"] < peak["interleaved"]


def test_processes_train_with_the_plugin_and_predict_the_same_bytes(one_process, tmp_path):
    rows = rehearse("processes", tmp_path / "rows.json")
    workload = "p = 4, m = 4, h = 32, local layers"
    ours = {name: rows[f"pipemem {name}, {workload}"] for name in ("1f1b", "zb-h1", "interleaved", "auto under 1")}
    stock = {name: rows[f"stock {name}, {workload}"] for name in STOCK}
    assert len(rows) == len(ours) + len(stock) + 1
    assert len({values["loss"] for values in (*ours.values(), *stock.values())}) == 1
    for values in (*ours.values(), *stock.values()):
        assert values["seconds"] > 0 and values["simulated_seconds"] > 0 and len(values["host_ahead_ms"]) == 4
    # Four microbatches fill 1F1B's warm-up, so eight hold no more.
    played = one_process["pipemem 1f1b, p = 4, m = 8, h = 32, local layers"]
    assert ours["1f1b"]["predicted_GiB"] == played["predicted_GiB"]


def test_passes_are_timed_beside_every_number_of_blocks(tmp_path):
    (values,) = rehearse("waiting_kernels", tmp_path / "rows.json").values()
    names = {f"{kind}_beside_{blocks}_blocks" for kind in "FIW" for blocks in (4, 8, 12, 24, 32)}
    assert {*values} == names | {"F_ms", "I_ms", "W_ms"}
    assert all(value > 0 for value in values.values())


# What a machine may lack, and a part of the sentence.

GOOD = {
    "has_gpu": lambda: True,
    "multiprocessors": lambda: 132,
    "other_processes": list,
    "nccl_version": lambda: (2, 30, 7),
}


@pytest.fixture
def machine(gpu, monkeypatch):
    """A machine that lacks nothing, or what the arguments say."""

    def make(has_mps: bool = True, **lacks) -> None:
        for name, probe in (GOOD | lacks).items():
            monkeypatch.setattr(gpu.needs, name, probe)
        monkeypatch.setattr(gpu.shares, "mps_control", lambda: "/usr/bin/control" if has_mps else None)

    return make


@pytest.mark.parametrize(
    ("lacks", "words", "unable"),
    [
        ({}, "", ""),
        ({"has_gpu": lambda: False}, "no CUDA GPU", "ABCDEFGHIJ"),
        ({"has_mps": False}, "nvidia-cuda-mps-control", "I"),
        ({"multiprocessors": lambda: 60}, "60 multiprocessors", "HIJ"),
        ({"multiprocessors": lambda: 64}, "", ""),
        ({"other_processes": lambda: ["4711, python3"]}, "4711, python3", "HIJ"),
        ({"nccl_version": lambda: (2, 29, 7)}, "NCCL 2.29.7", "CGI"),
        ({"nccl_version": lambda: (3, 0, 1)}, "", ""),
    ],
)
def test_one_sentence_says_what_the_machine_lacks(gpu, machine, lacks, words, unable):
    machine(**lacks)
    faults = gpu.prove.faults_of(gpu.prove.EXPERIMENTS)
    assert "".join(sum(faults.values(), [])) == unable
    assert len(faults) == bool(unable) and all(words in fault and "\n" not in fault for fault in faults)


def test_a_process_list_that_cannot_be_read_is_a_fault(gpu, machine):
    def missing() -> list[str]:
        raise FileNotFoundError("nvidia-smi")

    machine(other_processes=missing)
    assert "nvidia-smi" in gpu.needs.fault("one_process")


@pytest.mark.parametrize("program", ["one_process", "processes", "waiting_kernels"])
def test_a_program_that_lacks_something_starts_nothing(gpu, machine, monkeypatch, tmp_path, capsys, program):
    machine(multiprocessors=lambda: 8)
    monkeypatch.setattr(sys, "argv", [program, "--output", str(tmp_path / "rows.json")])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit) as left:
        importlib.import_module(program).main()
    assert left.value.code == 2 and "8 multiprocessors" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_experiments_that_lack_nothing_run_and_the_status_says_that_others_did_not(
    gpu, machine, monkeypatch, tmp_path, capsys
):
    machine(has_mps=False)
    ran = []
    monkeypatch.setattr(gpu.prove, "run", lambda experiment, *_: ran.append(str(experiment)) or 0)
    monkeypatch.setattr(sys, "argv", ["prove.py", "--only", "H", "I", "--output", str(tmp_path)])
    assert gpu.prove.main() == gpu.prove.FAILED
    assert ran == ["H one_process, part p4", "H one_process, part p8", "H one_process, part more"]
    assert capsys.readouterr().err.startswith("I cannot run: nvidia-cuda-mps-control")
    monkeypatch.setattr(sys, "argv", ["prove.py", "--only", "I", "--output", str(tmp_path)])
    assert gpu.prove.main() == gpu.prove.NOTHING


# Rows


def test_parts_have_every_workload_once(gpu, monkeypatch):
    monkeypatch.setattr(gpu.proof, "kinds_of_layers", lambda: ("local", "te"))
    played = [workload for part in gpu.one_process.PARTS for workload in gpu.one_process.workloads(part, False)]
    assert len(played) == len({*played}) == 2**4
    assert played[0] == gpu.speed.Workload(4, 8, 4096, "local") and played[1] == gpu.speed.Workload(8, 16)


def measured(gpu, schedule: str, seconds: float, fused: bool = True, loss: float = 2.0):
    from megatron_pipemem import build_schedule

    schedule = build_schedule(schedule, num_devices=4, num_microbatches=8)
    passes = {"F": 1.0, "B": 2.0} if fused else {"F": 1.0, "I": 1.25, "W": 0.75}
    medians = [(kind, stage, price) for kind, price in passes.items() for stage in range(4)]
    return gpu.speed.Measured([seconds], [loss], medians=medians, orders=schedule.to_csv(), predicted_bytes=[1 << 30])


def test_a_later_call_compares_with_the_rows_that_are_there(gpu, tmp_path):
    speed = gpu.speed
    cases = [speed.STOCK.plain, speed.STOCK, speed.PRICED]

    def table():
        return speed.Table(gpu.proof.Report(tmp_path / "rows.json", rehearsal=True), speed.FIRST, 0.03)

    assert table().missing(cases) == cases and table().costs() is None
    table().add(speed.STOCK.plain, measured(gpu, "1f1b", 33.0))
    table().add(speed.STOCK, speed.Measured([33.5], [2.0]))
    table().add(speed.PRICED, measured(gpu, "zb-h1", 28.8, fused=False))
    assert table().missing(cases) == []
    ours, stock, split = (row.values for row in table().report.rows)
    assert ours["simulated_seconds"] == stock["simulated_seconds"] == pytest.approx(33)
    assert split["times_as_fast_as_stock_1f1b"] == 33.5 / 28.8
    assert ours["times_as_fast_as_stock_1f1b"] == 33.5 / 33 and ours["as_simulated"] == 1
    assert split["as_simulated"] == pytest.approx(33 / split["simulated_seconds"])
    costs = table().costs()
    assert (costs.forward, costs.backward_input, costs.backward_weight) == (1.0, 1.25, 0.75)
    table().add_order(cases)
    assert table().report.rows[-1].missed == ()


def test_a_row_that_breaks_a_claim_says_so(gpu, tmp_path):
    speed = gpu.speed
    table = speed.Table(gpu.proof.Report(tmp_path / "rows.json", rehearsal=True), speed.FIRST, 0.03)
    table.add(speed.STOCK, speed.Measured([33.5], [2.0]))
    assert "pipemem 1f1b has not run" in table.report.rows[-1].missed[0]
    table = speed.Table(gpu.proof.Report(tmp_path / "others.json", rehearsal=True), speed.FIRST, 0.03)
    table.add(speed.STOCK.plain, measured(gpu, "1f1b", 33.0))
    table.add(speed.STOCK, speed.Measured([50.0], [math.nextafter(2.0, 3.0)]))
    assert repr(math.nextafter(2.0, 3.0)) in table.report.rows[-1].missed[0]
    table.add(speed.PRICED, measured(gpu, "zb-h1", 40.0, fused=False, loss=2.0))
    slow, other_loss = table.report.rows[-1].missed
    assert "of its simulation" in slow and "the loss is 2.0" in other_loss
    table.add_order([speed.STOCK.plain, speed.PRICED])
    assert table.report.rows[-1].missed == ("pipemem zb-h1 should be faster than pipemem 1f1b",)


def test_peaks_are_those_of_each_stream_over_what_it_had_before(gpu):
    def entry(action: str, stream: int, size: int) -> dict:
        return {"action": action, "stream": stream, "size": size}

    trace = [
        *(entry("alloc", 7, 10), entry("alloc", 9, 100), entry("alloc", 7, 5), entry("free_requested", 7, 10)),
        *(entry("alloc", 7, 4), entry("free_completed", 7, 10), entry("alloc", 7, 3), entry("segment_alloc", 7, 64)),
    ]
    before = [{"stream": 7, "allocated_size": 8, "total_size": 32}, {"stream": 1, "allocated_size": 1}]
    segments = [{"stream": 7, "total_size": 32}, {"stream": 7, "total_size": 64}, {"stream": 9, "total_size": 128}]
    peaks = gpu.one_process.peaks_of([7, 9], before, {"device_traces": [trace], "segments": segments})
    assert peaks == ([19, 100], [88, 128])


def test_tables_are_written_between_their_marks_and_replaced(gpu, tmp_path):
    path = tmp_path / "note.md"
    path.write_text("# Notes\n\nBefore.\n")

    def row(case: str, **values) -> tuple[str, dict]:
        return "H", {"case": case, "values": values, "missed": []}

    gpu.prove.write_note(path, [row("a", seconds=1.5, F_ms=[1.0, 2.25])], "one GPU")
    text = path.read_text()
    assert text.startswith("# Notes\n\nBefore.\n\n## H, I and J") and "| a | 1.5 | 1 2.25 | holds |" in text
    path.write_text(text + "After.\n")
    rows = [row("b", seconds=2.0), row("c", seconds=3.0, loss=1.0), row("shares", shared=0)]
    gpu.prove.write_note(path, [*rows, ("C", rows[0][1])], "one GPU")
    text = path.read_text()
    assert "| a |" not in text and text.count("| b | 2 |  | holds |") == 1 and "| c | 3 | 1 | holds |" in text
    assert text.count("## H, I and J") == 1 and text.endswith("After.\n") and "| shares | 0 | holds |" in text


def test_an_attempt_ends_if_shares_overlap_and_auto_gets_the_prices_of_zb_h1(gpu, monkeypatch, tmp_path):
    speed, cases = gpu.speed, [gpu.speed.PRICED, gpu.speed.Case("auto", 2, cap=1.0)]
    table = speed.Table(gpu.proof.Report(tmp_path / "rows.json", rehearsal=True), speed.FIRST, None)
    results = [measured(gpu, "zb-h1", 29.0, fused=False), measured(gpu, "zbv", 29.0, fused=False)]

    @contextmanager
    def ranks_of(attempt, workload, missing, rehearse):
        assert missing == cases
        apart = attempt.name != "MPS"
        shares = {"values": {"shared": 0 if apart else 3}, "missed": [] if apart else ["3 multiprocessors are shared"]}
        for number, result in enumerate([shares, *map(asdict, results)]):
            (tmp_path / str(number)).write_text(json.dumps(result))
        yield tmp_path, []

    monkeypatch.setattr(gpu.processes, "ranks_of", ranks_of)
    limits, green, _ = gpu.processes.ATTEMPTS
    assert not gpu.processes.run_attempt(limits, table, cases, rehearse=False)
    assert table.missing(cases) == cases and not (tmp_path / "costs.json").exists()
    assert gpu.processes.run_attempt(green, table, cases, rehearse=False) and not table.missing(cases)
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert costs == {"forward": 1.0, "backward_input": 1.25, "backward_weight": 0.75, "p2p": 0.0}
    assert not gpu.processes.write_costs(tmp_path / "none.json", None)
    shares = [row.values["shared"] for row in table.report.rows if "shared" in row.values]
    assert shares == [3, 0]


# Shares and turns


def test_shares_are_whole_granules_and_apart(gpu):
    assert [gpu.shares.share_size(132, ranks) for ranks in (4, 8)] == [32, 16]
    assert gpu.shares.share_size(gpu.needs.MULTIPROCESSORS_NEEDED, 8) == gpu.shares.GRANULE
    values, missed = gpu.shares.overlaps([frozenset({0, 1}), frozenset({2, 3})])
    assert values == {"multiprocessors": [2, 2], "shared": 0} and not missed
    values, missed = gpu.shares.overlaps([frozenset({0, 1}), frozenset({1, 2}), frozenset({1})])
    assert values["shared"] == 2 and len(missed) == 1


@pytest.mark.parametrize("limit", [25, None])
def test_the_service_starts_before_the_ranks_and_ends_after_them(gpu, monkeypatch, tmp_path, limit):
    program, log = tmp_path / "control", tmp_path / "log"
    program.write_text(f'#!/bin/sh\necho "$@" "$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" >> {log}\ncat >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setattr(gpu.shares, "mps_control", lambda: str(program))
    monkeypatch.setattr(gpu.shares.time, "sleep", lambda seconds: None)
    with gpu.shares.mps(limit) as environment:
        assert log.read_text().split() == ["-d"]  # the service itself has no limit
        assert environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") == (None if limit is None else "25")
        folders = [Path(environment[f"CUDA_MPS_{name}_DIRECTORY"]) for name in ("PIPE", "LOG")]
        assert all(folder.is_dir() for folder in folders)
    assert log.read_text().split() == ["-d", "quit"] and not any(folder.exists() for folder in folders)


def test_ranks_that_wait_for_messages_that_nobody_sends_are_stuck(gpu, monkeypatch):
    import torch

    monkeypatch.setattr(gpu.hands, "PATIENCE_SECONDS", 0.1)
    machine, turns = gpu.hands.Virtual(2, 0.0), gpu.hands.Turns(gpu.hands.Crew(2))
    office = gpu.hands.Office(machine, turns)

    def wait(rank: int) -> None:
        with machine.on(rank):
            office.receive((1 - rank, rank), torch.zeros(1)).wait()

    with pytest.raises(gpu.hands.Stuck, match="rank 0 waits for a message; rank 1 waits for a message"):
        turns.run(wait)


def test_a_message_begins_when_both_ends_are_posted_and_the_earlier_one_has_ended(gpu):
    import torch

    machine, turns = gpu.hands.Virtual(2, 2.0), gpu.hands.Turns(gpu.hands.Crew(2))
    office = gpu.hands.Office(machine, turns)

    def work(rank: int) -> list[float]:
        with machine.on(rank):
            if rank == 0:
                for value in (1.0, 2.0):
                    office.send((0, 1), torch.tensor([value]))
                return []
            machine.run(5.0)
            buffers = [torch.zeros(1) for _ in range(2)]
            tickets = [office.receive((0, 1), buffer) for buffer in buffers]
            ends = []
            for ticket in tickets:
                ticket.wait()
                ends.append(machine.now())
            return [*ends, *(buffer.item() for buffer in buffers)]

    assert turns.run(work) == [[], [7.0, 9.0, 1.0, 2.0]]
