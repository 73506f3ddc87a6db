"""Predict the seconds and bytes of a vision tower and of its projections, which are part of the first stage.

A tower of Megatron's layers is cut by tensor parallelism, and others run as a whole on every tensor-parallel rank.
Every context-parallel rank has whole images. I computes the tower's weight gradients: its layers have a configuration
of their own, which does not delay them, and no stage waits for I of the first. Attention is priced over all patches of
an image, also where a model cuts it into windows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megatron_pipemem.config.cluster import Cluster
from megatron_pipemem.config.model import Execution, Model, Passes, Tower
from megatron_pipemem.planner.activations import Kept
from megatron_pipemem.planner.counts import Matrix, projection_matrices
from megatron_pipemem.planner.prices import Price, layer

_COLOURS = 3


@lru_cache(maxsize=1024)
def tower_price(model: Model, execution: Execution, cluster: Cluster) -> Price:
    """Predict the seconds and bytes of a model's vision tower, patches and projections included.

    All are 0 for a model without a tower.
    """
    tower = model.tower
    if tower is None:
        return Price()
    own = _execution(tower, execution)
    encoder = layer(tower.model(), own, cluster) * tower.layers + _patches(tower, own, cluster)
    if "tower" in execution.frozen:  # autograd keeps nothing of it
        encoder = Price(
            seconds=Passes(encoder.seconds.forward),
            communication=Passes(encoder.communication.forward),
            parameters=encoder.parameters,
            frozen=encoder.parameters,
        )
    whole = encoder + _projections(model, tower, own, cluster, "projection" in execution.frozen)
    seconds = whole.seconds
    return replace(whole, seconds=Passes(seconds.forward, seconds.input + seconds.weight), kept=Kept(whole.kept.saved))


def _execution(tower: Tower, execution: Execution) -> Execution:
    """Return the settings of the tower's layers, from those of the model.

    The images of a microbatch are in place of its sequences. They are cut by tensor parallelism only, if at all.
    """
    return replace(
        execution,
        micro_batch=execution.micro_batch * tower.images,
        tp=execution.tp if tower.shared else 1,
        sequence_parallel=False,
        cp=1,
        ep=1,
        etp=None,
        recompute=execution.recompute if tower.shared else "none",
        fp8=execution.fp8 if tower.shared else "none",
        tp_overlap=False,
        frozen=(),
    )


def _patches(tower: Tower, own: Execution, cluster: Cluster) -> Price:
    """Predict the seconds of the linear layer that embeds patches. Its I takes none, because pixels have no gradient."""
    matrix = Matrix(_COLOURS * tower.frames * tower.patch**2, tower.hidden, "none", bias=True)
    seconds = 2 * own.tokens(tower.model()) * matrix.products(1) / cluster.flops
    return Price(seconds=Passes(seconds, 0.0, seconds), parameters=matrix.parameters(1))


def _projections(model: Model, tower: Tower, own: Execution, cluster: Cluster, frozen: bool) -> Price:
    matrices, tp, count = projection_matrices(model), own.tp, 1 + tower.deepstack
    tokens = own.tokens(tower.model()) / tower.merge
    seconds = 2 * tokens * sum(each.products(tp) for each in matrices) / cluster.flops * count
    inputs, outputs = (
        tokens * own.element * sum(side(each, tp) for each in matrices) * count for side in (Matrix.depth, Matrix.width)
    )
    parameters = sum(each.parameters(tp) for each in matrices) * count
    # The norm's input and the activation's input are kept until I, and the inputs of both matrices until W.
    saved = 2 * inputs
    if frozen:
        return Price(
            seconds=Passes(seconds, seconds), kept=Kept(saved - inputs), parameters=parameters, frozen=parameters
        )
    return Price(seconds=Passes(seconds, seconds, seconds), kept=Kept(saved, inputs + outputs), parameters=parameters)
