"""Answer the explorer's page: values of its controls in, pictures and numbers out.

The same function answers in the server and, on an exported page, in the browser. So it needs the standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qsl

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import ASSUMED_RATIO, Knowledge, Shape
from megatron_pipemem.conflicts import make_request
from megatron_pipemem.errors import PipememError, UnsupportedError, with_code
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.display import rare_collection
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.options import AUTO, Limit
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.size import estimated
from megatron_pipemem.search.result import ResultCache
from megatron_pipemem.tools.report.page import page_data


class Control(NamedTuple):
    """A number on the page: a slider from ``least`` to ``most``, with a field for numbers beyond these ends."""

    key: str
    label: str
    least: float
    most: float
    step: float  # of the slider
    default: float | None  # ``None`` for no number


CONTROLS = (
    Control("p", "devices p", 1, 32, 1, 8),
    Control("m", "microbatches m", 1, 128, 1, 32),
    Control("v", "chunks v", 1, 8, 1, 2),
    Control("f", "F forward", 0, 4, 0.1, 1),
    Control("i", "I input grad.", 0, 4, 0.1, 1),
    Control("w", "W weight grad.", 0, 4, 0.1, 1),
    Control("c", "message", 0, 1, 0.02, 0),
    Control("cap", "memory cap", 0.05, 2, 0.05, None),
)
NAMES = {"a": "1f1b", "b": "v-half"}
"""The keys of the two schedules, with their defaults."""
_WHOLE = ("p", "m", "v")
_MOST = 10**6
"""The largest number that a control takes."""
_LONGEST = 8.0
"""Estimated seconds of the largest schedule that the page draws."""
_SEARCH_SECONDS = 2


@rare_collection()
def explore_json(query: str) -> str:
    """Return the result of ``explore_data`` for a URL's query string, as JSON.

    With a key ``csv``, which names a schedule, the result is the text of that schedule's file, or of the error.
    """
    values = dict(parse_qsl(query, keep_blank_values=True))
    if name := values.get("csv"):
        try:
            return json.dumps(_timeline(name, _read(values)).schedule.to_csv())
        except PipememError as error:
            return json.dumps(with_code(error))
    return json.dumps(explore_data(values), allow_nan=False)


def explore_data(query: Mapping[str, str]) -> dict[str, object]:
    """Return the data of ``report/page.js`` and ``facts``: per schedule its numbers and command, or its error.

    ``query`` has the keys of ``CONTROLS`` and ``NAMES``. Missing keys have their defaults, and an empty ``b`` draws one
    schedule.
    """
    facts: list[dict[str, object]] = []
    timelines: list[Timeline] = []
    cap = None
    try:
        question = _read(query)
        cap = question.cap
        for name in filter(None, (query.get(key, default).strip() for key, default in NAMES.items())):
            try:
                timeline = _timeline(name, question)
            except PipememError as error:
                can_search = error.code == "over-cap" and name != AUTO
                facts.append({"schedule": name, "error": with_code(error), "instead": AUTO if can_search else ""})
            else:
                timelines.append(timeline)
                facts.append(_facts(name, timeline, question))
    except PipememError as error:
        facts.append({"schedule": "", "error": with_code(error), "instead": ""})
    near = cap is not None and cap <= 2 * max((timeline.peak for timeline in timelines), default=0.0)
    return page_data(timelines, cap if cap and near else 1.0) | {"facts": facts}


@dataclass(frozen=True)
class _Asked:
    """The numbers of a query. ``passes`` has the seconds of F, I and W, and ``message`` those of a message.

    ``cap`` is the memory cap in activation units; ``None`` for none.
    """

    devices: int
    microbatches: int
    chunks: int
    passes: tuple[float, float, float]
    message: float
    cap: float | None

    @property
    def costs(self) -> Costs:
        return Costs(*self.passes, p2p=self.message, channel=Channel(ratio=ASSUMED_RATIO))


def _read(query: Mapping[str, str]) -> _Asked:
    numbers = {control.key: _number(query.get(control.key, ""), control) for control in CONTROLS}
    p, m, v, *passes, message = (numbers[key] or 0.0 for key in ("p", "m", "v", "f", "i", "w", "c"))
    if not any(passes):
        raise UnsupportedError("no-time", "F, I and W all take 0 seconds; give one of them a price")
    forward, backward_input, backward_weight = passes
    return _Asked(int(p), int(m), int(v), (forward, backward_input, backward_weight), message, numbers["cap"])


def _number(text: str, control: Control) -> float | None:
    """Return the number that a user gave to a control, or the control's default if the text is empty.

    A text without a number, or with one that the control cannot have, raises an UnsupportedError.
    """
    if not text.strip():
        return control.default
    is_whole, is_cap = control.key in _WHOLE, control.default is None
    limit = Limit(control.least, _MOST) if is_whole else Limit(0, float(_MOST), above=is_cap)
    return limit.read(control.label, text)


def _timeline(name: str, question: _Asked) -> Timeline:
    """Return the simulation of the schedule of this name.

    A family whose order does not depend on costs is built once for all costs.
    """
    own = name != AUTO and "costs" not in family(name).options
    schedule = _schedule(
        name, question.devices, question.microbatches, question.chunks, question.cap, None if own else question.costs
    )
    return simulate(schedule, question.costs)


@lru_cache(maxsize=64)
def _schedule(
    name: str, devices: int, microbatches: int, chunks: int, cap: float | None, costs: Costs | None
) -> Schedule:
    options = _options(name, chunks)
    size = estimated(devices, microbatches, options.get("chunks", 2))
    if size.seconds > _LONGEST:
        raise UnsupportedError(
            "too-large",
            f"p = {devices} and m = {microbatches} make {size}, too much for a page; take fewer, or pipemem simulate",
        )
    limit = None if cap is None else MemoryCap(cap, in_bytes=False)
    knowledge = Knowledge(costs or Costs(), cache=ResultCache())
    try:
        request = make_request(name, memory_cap=limit, options=options)
        return choose(request, Shape(devices, None, microbatches), knowledge).schedule
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "not-installed",
            f"{name} needs {error.name} for these numbers, which this page lacks; pipemem explore has it",
        ) from error


def _options(name: str, chunks: int) -> dict[str, int]:
    """Return the options of the schedule of this name.

    ``chunks`` is among them only if the family has a choice. Most families have a fixed number of chunks.
    """
    if name == AUTO:
        return {"chunks": chunks, "seconds": _SEARCH_SECONDS}
    return {"chunks": chunks} if "chunks" in family(name).options else {}


def summary_of(name: str) -> str:
    """Return the sentence that describes the schedule family of this name."""
    return "The fastest order that a search finds." if name == AUTO else family(name).summary


def _facts(name: str, timeline: Timeline, question: _Asked) -> dict[str, object]:
    schedule = timeline.schedule
    return {
        "schedule": name,
        "summary": summary_of(name),
        "makespan": timeline.makespan,
        "bubble": timeline.bubble_rate,
        "peak": timeline.peak,
        "chunks": schedule.placement.num_chunks,
        "messages": timeline.messages,
        "command": _command(name, question),
    }


def _command(name: str, question: _Asked) -> str:
    """Return the ``pipemem simulate`` command that prints the numbers of this schedule on the page."""
    words = ["pipemem", "simulate", name, "-p", f"{question.devices}", "-m", f"{question.microbatches}"]
    for option, number in _options(name, question.chunks).items():
        words += ["--chunks", f"{number}"] if option == "chunks" else ["-o", f"{option}={number}"]
    if question.passes != (1, 1, 1):
        words += ["--costs", ",".join(f"{seconds:.12g}" for seconds in question.passes)]
    if question.message:
        words += ["--p2p", f"{question.message:.12g}"]
    if question.cap is not None:
        words += ["--memory-cap", f"{question.cap:.12g}"]
    return " ".join(words)
