"""Learn the bytes of a rank's actions from the steps that count them, and predict the peaks of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_pipemem.runtime.activation_ledger import (
    ActivationLedger,
    BytesBySize,
    LedgerEntry,
    bytes_per_action,
    predict_peak_bytes,
)
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.message_memory import sent_bytes
from megatron_pipemem.schedule.schedule import Program
from megatron_pipemem.schedule.units import WHOLE


class PredictedPeaks(NamedTuple):
    """The most bytes that a rank holds in a step, as its program and the learnt bytes of actions say."""

    least_bytes: int  # for the least uneven routing to experts
    most_bytes: int  # for the most uneven routing; the same if nothing is routed
    host_bytes: int
    with_messages: int | None  # with sent messages that no answer has freed; ``None`` if their bytes are unknown


class ActionBytes:
    """The bytes by which every kind of action changes this rank's memory, per stage and part.

    They are those of the first step that has such an action. ``is_uneven`` says whether the number of tokens that
    experts get differs between microbatches.
    """

    def __init__(self) -> None:
        self.is_uneven = False
        self._changes: dict[bool, dict[Kind, list[int]]] = {False: {}, True: {}}
        """Key ``True`` is for the most tokens of experts, ``False`` for the fewest."""
        self._host_changes: dict[Kind, list[int]] = {}
        self._learnt: set[tuple[Kind, int]] = set()
        self._units = WHOLE
        """The units of the last step from which bytes were learnt."""
        self._treatments: dict[int, tuple[Kind | None, bool]] = {}
        """Per stage, the kind of its recomputation, and whether it is offloaded."""
        self._by_size: dict[tuple, tuple[BytesBySize, BytesBySize]] = {}
        """For microbatches that differ, bytes on the device and on the host, by the treatments of all stages."""

    @property
    def changes(self) -> dict[Kind, list[int]]:
        """The bytes by kind of action, one per stage and part, for the most tokens of experts."""
        return self._changes[True]

    def learn(self, program: Program, device: int, ledger: ActivationLedger) -> None:
        """Learn the bytes of actions that are new in this step.

        A later plan may have other kinds of actions. The bytes of a stage are learnt again if its activations begin or
        cease to be recomputed or offloaded.
        """
        stages, units = program.placement.num_stages, program.schedule.units
        had_as_many_parts = units.parts == self._units.parts
        self._units = units
        if not had_as_many_parts:
            self._changes, self._host_changes = {False: {}, True: {}}, {}
            self._learnt.clear()
        moved = {action.stage for action in program.actions[device] if action.kind is Kind.OFFLOAD}
        for stage in program.placement.stages[device]:
            treatment = (program.schedule.recomputed.get(stage), stage in moved)
            if self._treatments.get(stage, treatment) != treatment:
                self._learnt = {(kind, at) for kind, at in self._learnt if at // units.parts != stage}
            self._treatments[stage] = treatment
        actions = program.actions[device]
        unknown = {(kind, units.place(stage, unit)) for kind, stage, unit in actions} - self._learnt
        if unknown:
            of_step = {most: self._of_step(ledger.entries, stages, most) for most in (False, True)}
            on_host = bytes_per_action(ledger.entries, stages, on_host=True, units=units)
            tables = [(self._changes[most], of_step[most]) for most in of_step]
            for learnt, counted in (*tables, (self._host_changes, on_host)):
                for kind, at in unknown:
                    learnt.setdefault(kind, [0] * (stages * units.parts))[at] = counted[kind][at]
            self._learnt |= unknown
        if any(entry.routed for entry in ledger.entries):
            self._learn_routing(ledger.entries, stages)

    def predict(
        self, program: Program, device: int, ledger: ActivationLedger, bytes_of: Callable[[Action], int] | None = None
    ) -> PredictedPeaks:
        """Return the peaks of a step that has been learnt. ``bytes_of`` returns the bytes of a send's message."""
        actions, units = program.actions[device], program.schedule.units
        sent = None if bytes_of is None else sent_bytes(program, device, bytes_of)
        if has_sizes(ledger):
            treatments = tuple(sorted(self._treatments.items()))
            by_size = self._by_size.setdefault(treatments, (BytesBySize(), BytesBySize(on_host=True)))
            for changes in by_size:
                changes.learn(ledger.entries)
            on_device, on_host = (changes.peak(actions, ledger.tokens_of) for changes in by_size)
            with_sent = None if sent is None else by_size[0].peak(actions, ledger.tokens_of, sent)
            return PredictedPeaks(on_device, on_device, on_host, with_sent)
        least, most = (predict_peak_bytes(actions, self._changes[most], units) for most in (False, True))
        with_sent = None if sent is None else predict_peak_bytes(actions, self._changes[True], units, sent)
        return PredictedPeaks(least, most, predict_peak_bytes(actions, self._host_changes, units), with_sent)

    def _learn_routing(self, entries: Sequence[LedgerEntry], stages: int) -> None:
        """Extend the range of bytes to the routing of this step, because a later step may be as uneven."""
        for most, learnt in self._changes.items():
            counted = self._of_step(entries, stages, most)
            for at in range(stages * self._units.parts):
                takes, took = (
                    sum(max(0, changes[kind][at]) for kind in counted if kind in (Kind.F, Kind.R))
                    for changes in (counted, learnt)
                )
                if (takes > took) if most else (takes < took):
                    self.is_uneven = True
                    for kind, changes in counted.items():
                        learnt[kind][at] = changes[at]

    def _of_step(self, entries: Sequence[LedgerEntry], stages: int, most: bool) -> dict[Kind, tuple[int, ...]]:
        return bytes_per_action(entries, stages, most, units=self._units)


def has_sizes(ledger: ActivationLedger) -> bool:
    """Return whether the bytes of a step's actions follow from the sizes of their microbatches, which differ."""
    return ledger.tokens is not None and not any(entry.routed for entry in ledger.entries)
