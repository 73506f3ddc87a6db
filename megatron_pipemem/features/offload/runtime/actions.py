"""Perform a program's actions on memory."""

from __future__ import annotations

from megatron_pipemem.features.offload.runtime.engine import OffloadEngine
from megatron_pipemem.runtime.executor import Executor, Handlers
from megatron_pipemem.runtime.instructions import Instruction
from megatron_pipemem.schedule.action import Kind


class OffloadActions:
    """Captures what the forwards of stages that move keep, and moves it when the program says so.

    Args:
        engine: within its ``step()`` while the executor runs.
    """

    def __init__(self, engine: OffloadEngine):
        self._engine = engine

    def extend(self, executor: Executor) -> Handlers:
        """See ``StepFeature``."""
        engine, others = self._engine, dict(executor.handlers)
        executor.host_bytes = lambda: engine.host_bytes

        def captured(each: Instruction) -> None:
            run = others[each.action.kind]
            # A forward that is run again keeps nothing but its input; what moves is made by the R.
            if not each.offloaded or (each.again is Kind.R and each.action.kind is Kind.F):
                run(each)
                return
            with engine.capture(each.key):
                run(each)
            engine.stay(each.key, executor.kept(each))

        return {
            Kind.F: captured,
            Kind.R: captured,
            Kind.OFFLOAD: lambda each: engine.offload(each.key),
            Kind.RELOAD: lambda each: engine.reload(each.key),
            Kind.WAIT_OFFLOAD: lambda each: engine.wait(each.key),
            Kind.WAIT_RELOAD: lambda each: engine.wait(each.key),
        }
