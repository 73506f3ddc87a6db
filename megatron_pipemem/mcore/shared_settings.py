"""Compare the plugin's settings on all ranks of a model, before the plugin communicates in any other way.

Ranks with other settings build other models, and wait for messages that nobody sends. They are compared as soon as
Megatron's process groups exist: at the end of ``initialize_model_parallel()`` or in ``enable()``, whichever comes last,
else before the first step of a pipeline. The settings go through the store of the default process group. So a rank
without the plugin, which would take part in no collective, is missed after some time, and no device is needed.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.mcore.agreement import Groups, groups_of_model
from megatron_pipemem.mcore.symbols import INITIALIZE, Feature, Replacements, megatron_version
from megatron_pipemem.part_costs import prices_of
from megatron_pipemem.request import MicrobatchCosts, Request, flags_of
from megatron_pipemem.runtime.first_failure import watch_job

PATIENCE = 120.0
"""Seconds to wait for a rank that has not told its settings, before it counts as a rank without the plugin. All ranks of
a job make or use Megatron's global process groups at the same time."""
LATER_PATIENCE = 600.0
"""The same for a pipeline with groups of its own, whose ranks may come from other work: Megatron's groups wait as long."""

_POLL = timedelta(seconds=0.1)
_PREFIX = "pipemem/settings"
_PACKAGE = __name__.partition(".")[0]
_VERSIONS = {_PACKAGE: lambda: importlib.import_module(_PACKAGE).__version__, "megatron-core": megatron_version}

_COMPARED: Mapping[str, Callable[[Request], object]] = {
    # Folders may differ between hosts. Only rank 0 writes these files, but all ranks measure if there are any.
    "report": lambda request: request.report is not None,
    "trace": lambda request: request.trace is not None,
    # A file may be in another folder on another host, and must have the same contents.
    "schedule": lambda request: request.schedule if request.file is None else f"file {request.file.digest[:12]}",
    "file": lambda request: None,  # the schedule above
    "costs": lambda request: _digest_of_file(request.costs, lambda: repr(prices_of(request.costs))),
    "microbatch_costs": lambda request: _weigher(request.microbatch_costs),
    # The schedules of a module are compared before their first step, with all others (``agreement.agree``).
    "schedule_module": lambda request: request.schedule_module and Path(request.schedule_module).name,
}
"""Settings that are not compared as they are, and why. All other fields of ``Request`` must be equal on all ranks."""


def shared_settings(request: Request) -> dict[str, str]:
    """Return the settings and versions that must be equal on all ranks, as text by flag, field or package."""
    flags = flags_of(Request)
    settings = {name: tell() for name, tell in _VERSIONS.items()}
    for setting in fields(Request):
        value = _COMPARED[setting.name](request) if setting.name in _COMPARED else getattr(request, setting.name)
        name = flags[setting.name].name if setting.name in flags else setting.name
        settings[name] = repr(sorted(value.items())) if isinstance(value, Mapping) else f"{value}"
    return settings


def _weigher(value: MicrobatchCosts | None) -> str:
    """Return the name of a function that weighs microbatches, or the setting that names one, or a hash of its file."""
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return _digest_of_file(value, lambda: Path(str(value)).read_text())


def _digest_of_file(value: object, contents: Callable[[], str]) -> str:
    """Return the setting ``value`` as text, or a hash of its contents if it names a file."""
    if not Path(f"{value}").is_file():
        return f"{value}"
    return f"file {hashlib.sha256(contents().encode()).hexdigest()[:12]}"


@dataclass
class RankFacts:
    """The facts that a rank knows about the ranks of its model."""

    settings: dict[str, int] = field(default_factory=dict)
    """The lowest rank with the settings of each hash."""
    missing: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    """The ranks of the model."""
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Code and message of the refusal of each rank that cannot go on."""

    def add(self, other: RankFacts) -> None:
        """Add the facts that another rank knows."""
        for digest, rank in other.settings.items():
            self.settings[digest] = min(rank, self.settings.get(digest, rank))
        self.missing |= other.missing
        self.ranks |= other.ranks
        self.failures |= other.failures


@dataclass(frozen=True)
class Meeting:
    """One exchange of facts by one rank, through the keys of a store.

    ``lines`` has the global ranks of each of the rank's groups, in one order on all ranks, by a name that no other
    meeting has. Facts travel along one line after the other, so that they reach all ranks of the model. First, every
    rank tells its own facts along all its lines. A line with a rank that does not is then left out. Its other ranks
    know what is missing, and tell it along their other lines.
    """

    store: Any
    rank: int
    lines: Mapping[str, Sequence[int]]
    patience: float

    def exchange(self, facts: RankFacts) -> list[str]:
        """Add the facts of all ranks of the model to ``facts``, and return the names of lines with a missing rank."""
        own = pickle.dumps(facts)
        for name in self.lines:
            self._write_facts(f"{name}/first", own)
        deadline = time.monotonic() + self.patience
        incomplete = [
            name for name in self.lines if self._read_facts(f"{name}/first", self.lines[name], facts, deadline)
        ]
        for name in self.lines:
            if name not in incomplete:
                self._write_facts(name, pickle.dumps(facts))
                # Another rank of the line may come late, and then wait for a rank that this one does not know.
                self._read_facts(name, self.lines[name], facts, time.monotonic() + 2 * self.patience)
        for name in incomplete:  # the missing rank must not find these facts later
            self.store.delete_key(f"{name}/first/{self.rank}")
        return incomplete

    def _write_facts(self, key: str, facts: bytes) -> None:
        self.store.set(f"{key}/{self.rank}", facts)

    def _read_facts(self, key: str, line: Sequence[int], facts: RankFacts, deadline: float) -> set[int]:
        """Add the facts of the line's other ranks to ``facts``, and return the ranks that tell none until ``deadline``.

        ``deadline`` is a time of ``time.monotonic``.
        """
        missing = {f"{key}/{rank}": rank for rank in line if rank != self.rank}
        while True:
            for name in [name for name in missing if self.store.check([name])]:
                facts.add(pickle.loads(self.store.get(name)))
                del missing[name]
            if not missing or time.monotonic() > deadline:
                facts.missing |= {*missing.values()}
                return {*missing.values()}
            with suppress(RuntimeError):  # of torch, after the time-out
                self.store.wait([next(iter(missing))], _POLL)


_meetings: Counter[tuple[int, ...]] = Counter()
"""The number of meetings of this process along a line, because a store keeps the keys of earlier ones."""


def _named(lines: Iterable[Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the lines of a new meeting by their names."""
    named: dict[str, Sequence[int]] = {}
    for line in map(tuple, lines):
        digest = hashlib.sha256(repr(line).encode()).hexdigest()
        named[f"{_PREFIX}/{digest[:16]}/{_meetings[line]}"] = line
        _meetings[line] += 1
    return named


@dataclass(eq=False)
class SharedSettings(Feature):
    """Compares the settings of a run on all ranks of a model.

    ``failure`` is the reason why this rank cannot go on, which then ends all ranks. ``joins`` gets the process groups
    of every model that is compared, or that takes a step.
    """

    request: Request
    failure: PipememError | None = None
    joins: Callable[[Groups], None] = lambda groups: None
    _compared: set[dist.ProcessGroup] = field(default_factory=set)

    def replacements(self) -> Replacements:
        return [(INITIALIZE, self._initialize)]

    def _initialize(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self._compared.clear()
        self.compare_model_parallel()

    def compare_model_parallel(self) -> None:
        """Compare the settings on the ranks of Megatron's global process groups, if there are any.

        Raises:
            UnsupportedError: ranks have other settings or versions, or have not enabled the plugin.
        """
        if dist.is_initialized() and parallel_state.is_initialized():
            groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "dp"])
            self.join(groups, groups.pp, PATIENCE)

    def join(
        self, groups: ProcessGroupCollection, pipeline: dist.ProcessGroup, patience: float = LATER_PATIENCE
    ) -> None:
        """Compare the settings on the ranks of a model, unless those of its pipeline have been compared already.

        A rank that has not told its settings after ``patience`` seconds counts as a rank without the plugin.

        Raises:
            UnsupportedError: as ``compare_model_parallel``.
        """
        along = groups_of_model(groups, pipeline)
        self.joins(along)
        if pipeline not in self._compared:
            self._compare([dist.get_process_group_ranks(group) for group in along], patience)
            self._compared.add(pipeline)

    def _compare(self, lines: Sequence[Sequence[int]], patience: float) -> None:
        failure = self.failure
        if lines and dist.get_backend() != "fake":  # whose ranks do not exist
            rank, settings = dist.get_rank(), shared_settings(self.request)
            store: Any = dist.distributed_c10d._get_default_store()
            digest = hashlib.sha256(repr(settings).encode()).hexdigest()
            store.set(f"{_PREFIX}/{digest}", pickle.dumps(settings))
            facts = RankFacts({digest: rank}, ranks={member for line in lines for member in line})
            if failure is not None:
                facts.failures[rank] = failure.code, f"{failure}"
            named = _named(lines)
            for name in Meeting(store, rank, named, patience).exchange(facts):
                _meetings[tuple(named[name])] -= 1  # for the missing rank, this meeting is still to come
            watch_job(starts=True, ranks=facts.ranks)
            if failure is None:
                _refuse(facts, lambda digest: pickle.loads(store.get(f"{_PREFIX}/{digest}")), patience)
        if failure is not None:
            raise failure


def _refuse(facts: RankFacts, settings_of: Callable[[str], Mapping[str, str]], patience: float) -> None:
    """Raise an UnsupportedError if a rank is missing, cannot go on, or has other settings than the first rank.

    ``settings_of`` returns the settings of a digest, and ``patience`` are the seconds that were waited.
    """
    if facts.failures:
        raise UnsupportedError(*facts.failures[min(facts.failures)])
    if facts.missing:
        ranks = ", ".join(map(str, sorted(facts.missing)))
        raise UnsupportedError(
            "ranks-differ",
            f"the plugin is not enabled on rank {ranks}, or that rank is more than {patience:g} s late; start every rank with "
            "the same --pipemem flags, or call enable() on every rank",
        )
    if len(facts.settings) > 1:
        (first, first_digest), (second, second_digest) = sorted(
            (rank, digest) for digest, rank in facts.settings.items()
        )[:2]
        first_settings, second_settings = settings_of(first_digest), settings_of(second_digest)
        differing = [
            name
            for name in sorted({*first_settings, *second_settings})
            if first_settings.get(name) != second_settings.get(name)
        ]
        differences = ", ".join(
            f"{name} {second_settings.get(name)} where rank {first} has {first_settings.get(name)}"
            for name in differing
        )
        raise UnsupportedError(
            "ranks-differ",
            f"rank {second} has {differences}; start every rank with the same --pipemem flags and package versions",
        )
