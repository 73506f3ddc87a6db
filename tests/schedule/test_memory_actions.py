"""Offload and recomputation in schedules: what the simulator, the validator, the text form and lowering make of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import offload_oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from random_schedules import random_schedules
from refusals import refused

from megatron_pipemem.errors import CostsError, ScheduleError
from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.schedule.action import COMPUTE, COPIES, MEMORY, RECOMPUTE, Kind
from megatron_pipemem.schedule.costs import SELECTIVE_BYTES, Channel, Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.validator import validate, validate_program

ROUND_TRIP = (Kind.OFFLOAD, Kind.WAIT_OFFLOAD, Kind.RELOAD, Kind.WAIT_RELOAD)


@st.composite
def with_round_trips(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """Some stages recomputed, in part or wholly, and some of the activations that are kept away for some time."""
    again = draw(st.dictionaries(st.integers(0, schedule.num_stages - 1), st.sampled_from([Kind.R, Kind.RS])))
    chance = draw(st.randoms(use_true_random=True))
    orders = []
    for order in with_recompute(schedule, again).orders:
        actions = list(order)
        for forward in [action for action in order if action.kind is Kind.F and again.get(action.stage) != Kind.R]:
            if chance.random() < 0.5:
                continue
            made = actions.index(forward)
            used = next(
                at
                for at, action in enumerate(actions)
                if action[1:] == forward[1:] and action.kind in (Kind.RS, Kind.I, Kind.B)
            )
            places = sorted((chance.randint(made + 1, used) for _ in ROUND_TRIP), reverse=True)
            for kind, at in zip(reversed(ROUND_TRIP), places, strict=True):
                actions.insert(at, forward._replace(kind=kind))
        orders.append(tuple(actions))
    return replace(schedule, orders=tuple(orders))


@st.composite
def prices(draw: st.DrawFn, num_devices: int) -> tuple[Costs, dict[str, float]]:
    """Costs of one number per stage, and what the oracle calls the same."""
    counts = draw(st.tuples(*[st.integers(1, 9)] * 5, st.integers(0, 20), st.integers(0, 20), st.integers(0, 3)))
    # Sums of different prices are never equal, so that hardly any two devices get anywhere at one time.
    roots = (2, 3, 5, 7, 19, 11, 13, 17)
    f, i, w, r, rs, out, back, p2p = (n * root**0.5 for n, root in zip(counts, roots, strict=True))
    cut = draw(st.integers(0, num_devices))
    switches = draw(st.sampled_from([(), (tuple(range(cut)),), (tuple(range(cut)), tuple(range(cut, num_devices)))]))
    channel = Channel(out, back, draw(st.booleans()), tuple(filter(None, switches)))
    costs = Costs(f, i, w, p2p, recompute=r, recompute_selective=rs, channel=channel)
    return costs, {"F": f, "I": i, "W": w, "B": i + w, "R": r, "RS": rs, "OFFLOAD": out, "RELOAD": back}


def one_chunk_each(schedule: Schedule, costs: Costs) -> Costs:
    """The same price for every stage, however many its device has."""
    stages = schedule.num_stages
    whole = {name: (getattr(costs, name),) * stages for name in ("forward", "backward_input", "backward_weight")}
    channel = replace(costs.channel, offload=(costs.channel.offload,) * stages, reload=(costs.channel.reload,) * stages)
    again = {name: (getattr(costs, name),) * stages for name in ("recompute", "recompute_selective")}
    return replace(costs, **whole, **again, channel=channel)


@examples(150)
@given(data=st.data())
def test_simulator_and_validator_agree_with_the_oracle(data: st.DataObject) -> None:
    schedule = data.draw(with_round_trips(data.draw(random_schedules())))
    costs, seconds = data.draw(prices(schedule.num_devices))
    assert offload_oracle.mistakes(schedule) == []
    validate(schedule)
    channel = costs.channel
    timeline = simulate(schedule, one_chunk_each(schedule, costs))
    played = offload_oracle.play(schedule, seconds, costs.p2p, channel.duplex, channel.switches, SELECTIVE_BYTES)
    assert [peak * schedule.num_stages for peak in timeline.peaks] == pytest.approx(played.device_peaks)
    assert [peak * schedule.num_stages for peak in timeline.host_peaks] == pytest.approx(played.host_peaks)
    if not simultaneous(schedule, played):
        assert_same_run(timeline, played)


def assert_same_run(timeline: Timeline, played: offload_oracle.Played) -> None:
    assert timeline.makespan == pytest.approx(played.makespan)
    assert timeline.stall_seconds == pytest.approx(played.waited)
    for lane, copies in zip(timeline.transfers, played.copies, strict=True):
        assert [str(action) for action, _, _ in lane] == [action for action, _, _ in copies]
        assert [span for _, *span in lane] == [pytest.approx(span) for _, *span in copies]


def simultaneous(schedule: Schedule, played: offload_oracle.Played) -> bool:
    """Whether devices issued copies at one time: then either may come first."""
    issued = sorted(
        (start, device)
        for device, (order, spans) in enumerate(zip(schedule.orders, played.spans, strict=True))
        for action, (start, _) in zip(order, spans, strict=True)
        if action.kind in COPIES
    )
    return any(b[0] - a[0] < 1e-9 and a[1] != b[1] for a, b in pairwise(issued))


def test_a_shared_channel_serves_in_the_order_of_issue() -> None:
    """Device 1 issues its copy while that of device 0 is under way, and before the next one of device 0."""
    text = "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0WAIT_OFFLOAD0,0WAIT_OFFLOAD1,0RELOAD0,0WAIT_RELOAD0,0B0,0RELOAD1,0WAIT_RELOAD1,0B1\n"
    text += "1F0,1OFFLOAD0,1F1,1WAIT_OFFLOAD0,1RELOAD0,1WAIT_RELOAD0,1B0,1B1\n"
    schedule = Schedule.from_csv(text)
    validate(schedule)
    costs = Costs(2, 2, 2, channel=Channel(5, 1, switches=((0, 1),)))
    copies = [[(str(a), start, end) for a, start, end in lane] for lane in simulate(schedule, costs).transfers]
    assert copies[0][:2] == [("0OFFLOAD0", 2, 7), ("0OFFLOAD1", 7, 12)]
    assert copies[1][0] == ("1OFFLOAD0", 12, 17)
    apart = simulate(schedule, replace(costs, channel=Channel(5, 1)))
    assert apart.transfers[1][0][1:] == (4, 9)


@examples(150)
@given(data=st.data())
def test_a_misplaced_action_on_memory_is_caught(data: st.DataObject) -> None:
    schedule = data.draw(with_round_trips(data.draw(random_schedules())))
    device = data.draw(st.integers(0, schedule.num_devices - 1))
    order = list(schedule.orders[device])
    movable = [at for at, action in enumerate(order) if action.kind in MEMORY | RECOMPUTE]
    if not movable:
        return
    at = data.draw(st.sampled_from(movable))
    action = order.pop(at)
    if data.draw(st.booleans()):
        order.insert(data.draw(st.integers(0, len(order))), action)
    orders = (*schedule.orders[:device], tuple(order), *schedule.orders[device + 1 :])
    mutant = replace(schedule, orders=orders)
    if offload_oracle.mistakes(mutant):
        with pytest.raises(ScheduleError) as raised:
            validate(mutant)
        assert raised.value.code in ("missing-action", "wrong-order") and raised.value.action
    else:
        validate(mutant)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0OFFLOAD0,0WAIT_OFFLOAD0,0RELOAD0,0B0", ("missing-action", "0B0", "0WAIT_RELOAD0")),
        ("0F0,0OFFLOAD0,0B0", ("missing-action", "0WAIT_RELOAD0")),
        ("0F0,0RELOAD0,0B0", ("missing-action", "0RELOAD0", "0WAIT_OFFLOAD0")),
        ("0F0,0R0,0OFFLOAD0,0WAIT_OFFLOAD0,0RELOAD0,0WAIT_RELOAD0,0B0", ("useless-action",)),
        ("0F0,0B0,0F1,0R1,0B1", ("missing-action", "0B0", "0R0")),
        ("0F0,0RS0,0B0,0F1,0B1", ("missing-action", "0B1", "0RS1")),
        (
            "0F0,0OFFLOAD0,0WAIT_OFFLOAD0,0RELOAD0,0RS0,0WAIT_RELOAD0,0B0",
            ("wrong-order", "0RS0", "0WAIT_RELOAD0"),
        ),
        ("0F0,0R0,0RS0,0B0", ("duplicate-action", 0)),
        ("0F0,0R0", ("useless-action",)),
        ("0F0,0OFFLOAD0,0WAIT_OFFLOAD0,0RELOAD0,0WAIT_RELOAD0", ("useless-action", "0OFFLOAD0")),
        (
            "0F0,0OFFLOAD0,0RELOAD0,0WAIT_OFFLOAD0,0WAIT_RELOAD0,0B0",
            ("wrong-order", "0RELOAD0", "0WAIT_OFFLOAD0"),
        ),
    ],
)
def test_messages_name_the_mend(text: str, message: str) -> None:
    with refused(*message, kind=ScheduleError):
        validate(Schedule.from_csv(text))


def test_caps_hold_at_every_position() -> None:
    schedule = Schedule.from_csv("0F0,0OFFLOAD0,0WAIT_OFFLOAD0,0F1,0RELOAD0,0WAIT_RELOAD0,0B0,0B1")
    validate(schedule, memory_cap=2.0, host_budget=1.0)
    with refused("over-cap", 4, "0RELOAD0", 1, kind=ScheduleError):
        validate(schedule, memory_cap=1.0)
    with refused("over-cap", 1, "0OFFLOAD0", "0.5", kind=ScheduleError):
        validate(schedule, host_budget=0.5)


@examples(60)
@given(data=st.data())
def test_text_and_program_keep_all_actions(data: st.DataObject) -> None:
    schedule = data.draw(with_round_trips(data.draw(random_schedules())))
    again = Schedule.from_csv(schedule.to_csv())
    assert again.orders == schedule.orders
    bare = replace(schedule, orders=tuple(tuple(a for a in o if a.kind not in MEMORY) for o in schedule.orders))
    assert (schedule.digest == bare.digest) == (schedule.orders == bare.orders)
    assert {a.kind for order in schedule.forward_only().orders for a in order} == {Kind.F}
    program = lower(schedule)
    validate_program(program)
    for actions, order in zip(program.actions, schedule.orders, strict=True):
        assert tuple(a for a in actions if a in set(order)) == order
    for device, actions in enumerate(program.actions):
        for at, action in enumerate(actions):
            if action.kind is Kind.OFFLOAD and (send := action._replace(kind=Kind.SEND_F)) in actions:
                assert actions.index(send) < at, device


def test_receives_are_posted_before_waits_for_copies() -> None:
    schedule = build_schedule("po-f", num_devices=4, num_microbatches=8, k=1.0)
    for actions in lower(schedule).actions:
        for at, action in enumerate(actions):
            consumers = {Kind.RECV_F: Kind.F, Kind.RECV_I: Kind.I}
            if action.kind in consumers and any(a.kind in COMPUTE for a in actions[:at]):
                consumer = actions.index(action._replace(kind=consumers[action.kind]))
                assert any(a.kind in COMPUTE for a in actions[at:consumer]), action


def test_channels_from_ratios_and_files(tmp_path) -> None:
    placement, half = Placement.linear(2), Channel(ratio=0.5)
    for costs, seconds in (
        (Costs(1, 2, 3, channel=half), (1.5, 1.5)),
        (Costs((1, 2), 2, 3, channel=half), (1.5, 1.75)),
    ):
        assert costs.transfer_seconds(placement) == {Kind.OFFLOAD: seconds, Kind.RELOAD: seconds}
    assert Channel(2.0).reload == 2.0
    path = tmp_path / "costs.json"
    path.write_text('{"forward": 1, "recompute": 2, "channel": {"ratio": 1, "duplex": true, "switches": [[0, 1]]}}')
    assert Costs.from_json(path) == Costs(1, recompute=2, channel=Channel(duplex=True, switches=((0, 1),), ratio=1.0))
    path.write_text('{"channel": {"offload": [1, 2], "reload": 3}}')
    assert Costs.from_json(path).channel == Channel((1.0, 2.0), 3.0)
    copies = Costs(channel=Channel(2.0)).transfer_seconds(Placement.interleaved(2, 2))
    assert copies == {Kind.OFFLOAD: (1.0,) * 4, Kind.RELOAD: (1.0,) * 4}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Channel(-1.0),
        lambda: Channel("fast"),
        lambda: Channel(1, switches=((0, 1), (1, 2))),
        lambda: Channel(ratio=-1),
        lambda: Costs(channel=Channel(1, switches=((0, 9),))).transfer_seconds(Placement.linear(2)),
        lambda: simulate(
            plan_offload(
                build_schedule("1f1b", num_devices=2, num_microbatches=4), Costs(channel=Channel((1, 2, 3)))
            ).schedule
        ),
    ],
)
def test_channels_that_make_no_sense(wrong) -> None:
    with pytest.raises(CostsError):
        wrong()
