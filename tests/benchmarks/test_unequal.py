"""The benchmark of unequal microbatches: its data, its plans, and devices whose passes weigh what microbatches do. No times."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.registry import build_schedule

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_plans_beat_arrival_order_in_the_memory_of_stock(benchmark, tmp_path):
    output = tmp_path / "unequal.json"
    sizes = "--quick --distributions sft --devices 2 --microbatches 8 --seconds 0.02 --output".split()
    benchmark("unequal.py", *sizes, output)
    assert [result["packed"] for result in json.loads(output.read_text())] == [False, True]
    for result in json.loads(output.read_text()):
        ways = {row[0]["name"]: row[0] for row in result["rows"]}
        assert ways["1F1B, arrival order"]["speedup"] == 1
        for name in ("1f1b", "zb-h1", "zbv"):
            plan = ways[f"plan of {name}"]
            assert plan["speedup"] >= 1
            assert plan["memory"] <= 1 + 1e-9
            assert plan["over_bound"] >= 1 - 1e-9


def test_documents_fit_their_context_and_repacking_keeps_them(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from lengths import DISTRIBUTIONS, first_fit_decreasing, weigh

    for lengths in DISTRIBUTIONS.values():
        for packed in (False, True):
            batch = lengths.batch(16, Random(0), packed)
            assert len(batch) == 16
            assert max(map(sum, batch)) <= lengths.context
            repacked = first_fit_decreasing(batch)
            assert sorted(sum(repacked, [])) == sorted(sum(batch, []))
            assert max(map(sum, repacked)) <= max(map(sum, batch))
            weights, again = weigh(batch), weigh(repacked, len(batch))
            for kind in (Kind.F, Kind.I, Kind.W):  # the same work, however it is cut
                assert sum(again.seconds_of(kind)) == pytest.approx(sum(weights.seconds_of(kind)))
            assert sum(weights.time) == pytest.approx(16)


def test_a_sleeping_device_takes_and_holds_what_microbatches_weigh(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(BENCHMARKS)
    from emulated.device import SleepingStage
    from emulated.measure import _weights
    from emulated.runtimes import device_of

    from megatron_pipemem.schedule.action_prices import ActionPrices

    weights = MicrobatchFactors((1.0, 4.0), (1.0, 2.5), {Kind.W: (2.0, 1.0)})
    costs = Costs(0.002, 0.002, 0.002, microbatch=weights)
    schedule = build_schedule("1f1b", num_devices=1, num_microbatches=2)
    device = device_of(schedule, costs)
    stage = SleepingStage(device, 0)
    import torch

    outputs = [stage(torch.zeros(2, 8, requires_grad=True)) for _ in range(2)]
    assert device.peak == 3.5
    for output in outputs:
        output.sum().backward()
    took = {(kind, k): end - start for (kind, _, k), start, end in device.passes}
    prices = ActionPrices(schedule, costs)
    assert all(seconds >= prices.of(kind, 0, k) for (kind, k), seconds in took.items())
    measured = _weights(device.passes, prices)
    assert measured.keys() == {"F", "I", "W"}
    assert all(
        now >= weights.seconds_of(Kind(kind))[k] for kind, spans in measured.items() for k, now in enumerate(spans)
    )
