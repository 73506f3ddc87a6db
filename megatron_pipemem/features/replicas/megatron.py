"""Add a second replica of the model to a step: its batches, and sums of the replicas' gradients."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_pipemem.features.replicas.runtime import Channels, ReplicaReducer, connect_replicas
from megatron_pipemem.mcore.model.replicas import gradients
from megatron_pipemem.mcore.step.batch_distribution import Dealer, deal
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.runtime.executor import StepFeature
from megatron_pipemem.runtime.transport import Pipeline, destroy_groups


class ReplicaSteps(Extension):
    """Keeps the communicators of the sums between steps. Does nothing where the model stands on the devices once."""

    def __init__(self) -> None:
        self._channels: dict[Pipeline, Channels] = {}
        self._dealer: Dealer | None = None

    def prepare(self, step: Step) -> None:
        self._dealer = None
        if step.pipeline.placement.replicas > 1:
            self._dealer, step.iterators = deal(step.iterators[0], step.program.schedule, step.pipeline.device)

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        pipeline = step.pipeline
        if pipeline.placement.replicas == 1:
            return ()
        if pipeline not in self._channels:
            self._channels[pipeline] = connect_replicas(pipeline.placement, pipeline.group, step.message.device)
        reducer = ReplicaReducer(
            pipeline.placement,
            pipeline.device,
            self._channels[pipeline],
            lambda stage: gradients(step.stages[stage].model),
        )
        return [reducer]

    def settle(self, step: Step) -> None:
        if self._dealer is not None:
            self._dealer.finish()

    def close(self, orderly: bool) -> None:
        channels, self._channels = self._channels, {}
        if orderly:
            destroy_groups([group for opened in channels.values() for group in opened.values()])
