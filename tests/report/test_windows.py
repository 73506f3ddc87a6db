"""A window of a pipeline that is never flushed can be drawn, though it needs what ran before it."""

from __future__ import annotations

from megatron_pipemem.report.timeline import DrawnRun
from megatron_pipemem.schedule.stream import family_window, steady


def test_a_window_shows_its_own_messages_and_bubbles():
    timeline = family_window("pipedream-2bw", 4, 8, steady(4, 8)).simulate()
    shown = {(str(m.producer.action), str(m.consumer.action)) for m in DrawnRun(timeline).messages}
    assert ("0F3", "1F3") in shown and ("1B0", "0B0") in shown
    assert not any(producer == "0F0" for producer, _ in shown)
    idle = [sum(each.end - each.start for each in row) for row in DrawnRun(timeline).bubbles]
    assert idle == [timeline.makespan - work for work in timeline.work]
