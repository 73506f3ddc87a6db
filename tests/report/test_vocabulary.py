"""Vocabulary passes in pictures."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.report import TerminalTimeline, save_timeline
from megatron_pipemem.report.timeline import DrawnRun
from megatron_pipemem.schedule.action import COLLECTIVES, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.vocabulary import VocabularyCosts


def timeline_of(name, embed):
    costs = Costs(vocabulary=VocabularyCosts(0.5, 0.5, embed, embed))
    return simulate(with_vocabulary(build_schedule(name, num_devices=2, num_microbatches=3), 2, costs), costs)


def test_what_takes_no_time_has_no_box():
    for embed, kinds in ((0.0, set()), (0.25, {Kind.EMBED_F, Kind.EMBED_B})):
        timeline = timeline_of("zbv", embed)
        drawn = {box.action.kind for row in DrawnRun(timeline).rows for box in row}
        assert drawn == {Kind.F, Kind.I, Kind.W, Kind.S, Kind.T} | kinds
        assert not drawn & COLLECTIVES
        assert set(dict(DrawnRun(timeline).legend)) == drawn
        work = [sum(box.seconds for box in row) for row in DrawnRun(timeline).rows]
        assert work == list(timeline.work)


def test_terminal_and_file_name_the_passes(tmp_path):
    timeline = timeline_of("1f1b", 0.25)
    console = Console(width=200, record=True, file=StringIO(), color_system=None)
    console.print(TerminalTimeline(timeline))
    text = console.export_text()
    assert DrawnRun(timeline).headline in text and "2 barriers" in text and "S head scores" in text and "S2" in text
    picture = save_timeline(timeline, tmp_path / "run.svg").read_text()
    assert "head scores" in picture and "embedding gradient" in picture
