"""Predict seconds, bytes and parameters of the parts of a model on one rank, and the offload ratio.

Formulas, with ``n`` tokens of a microbatch on the rank and ``e`` bytes per element:

* matrix products: FLOPs of ``model.counts`` over the speed that the cluster achieves on large ones. Tiles are
  computed in waves over the device's multiprocessors, and the last wave is half empty on average. So a product of ``n``
  by ``k`` and ``k`` by ``c`` takes as long as one with ``_HALF_WAVE`` results more than ``n c``: small microbatches and
  slices are slower;
* with an fp8 recipe, linear layers run at ``fp8_tflops``, and quantising their inputs moves bytes. Attention and the
  head stay in 16 bits;
* norms, activations, residuals: F writes and reads once every tensor that the layer could keep, and I does that twice,
  at the speed of the device's memory;
* tensor parallelism: two all-reduces of ``n h e`` bytes in F and in I, or with sequence parallelism as many bytes in
  gathers and scatters. Gathers of W start early enough to run during its products, so W takes the longer of the two
  times;
* context parallelism: in F, each rank's keys and values pass all other ranks one after another. In I they do so again,
  with their gradients (arXiv 2310.01889). Attention hides these messages if it takes longer;
* expert parallelism: two all-to-all in F and in I of the tokens that leave the rank;
* a ring of ``r`` ranks moves ``(r - 1) / r`` of the bytes in a gather or scatter, and twice that in an all-reduce;
* recomputation belongs to I, with its communication;
* ``--tp-comm-overlap`` of Megatron's own schedules hides messages behind matrix products. A ring of ``r`` ranks exposes
  at least ``1 / r`` of its messages;
* ``--overlap-moe-expert-parallel-comm`` hides all-to-all in pairs of a forward and a backward, which depend on the order
  of passes. So the prices of passes include their all-to-all, and ``Price.exchange`` has it apart;
* a vision tower and its projections are part of the first stage. A tower of Megatron's layers is cut by tensor
  parallelism, and others run as a whole on every tensor-parallel rank. Every context-parallel rank has whole images. I
  computes the tower's weight gradients: its layers have a configuration of their own, which does not delay them, and no
  stage waits for I of the first. Attention is priced over all patches of an image, also where a model cuts it into
  windows.

Seconds are the time that a pass occupies its device, including messages. The planner, `pipemem profile` without a
measurement, and the costs files of the latter agree on this. A measurement runs on one device alone, so its seconds are
those of computing only.

The offload ratio k is the time to move a layer's activations to the host and back, over the time of the layer's F, I
and W. The paper (arXiv 2503.01328) has ``k = 10 / (3 (6h + s)) * C / B`` for GPT-3's layer in 16 bits with norms,
activation and dropout recomputed (``20bsh`` bytes, ``12bsh(6h + s)`` FLOPs). ``C`` is the achieved FLOP/s, and ``B``
the bytes per second of one direction. Here bytes and FLOPs are those of any model, cut and recomputed in any way. For
``k <= 1`` computing hides all copies of a link that carries one direction at a time; otherwise it hides the fraction
``1/k``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_pipemem.model import activations, counts
from megatron_pipemem.model.activations import moved_bytes
from megatron_pipemem.model.counts import layer_flops
from megatron_pipemem.model.model import Execution, Model, Recomputable, Sublayer, Tower
from megatron_pipemem.part_costs import Passes, Summed
from megatron_pipemem.tools.config.cluster import Cluster, HostChannel, Link
from megatron_pipemem.tools.planner.parameter_bytes import ParameterBytes

_HALF_WAVE = 2**20  # results: half of some 120 multiprocessors times a tile of 128 x 128
_REPEATS: dict[str, tuple[str, ...]] = {Sublayer.FFN: ("mlp",), Sublayer.EXPERTS: ("moe",)}
"""Modules by block. Recomputing one of them sends the messages of the block's F again."""
_AS_MODELLED = Passes(1.0, 1.0, 1.0)
_LOGIT = 4  # bytes: the loss is computed in fp32
# Bytes per parameter of a mixed-precision Adam: fp32 gradient, master copy and two moments, and the 16-bit parameter.
_ADAM_BYTES = 4 + 3 * 2 * 4 + 2


@dataclass(frozen=True)
class Price(Summed):
    """The seconds, bytes and parameters of one layer, the embedding or the head.

    They are those of one rank and one microbatch.
    """

    seconds: Passes = Passes()  # everything included
    communication_seconds: Passes = Passes()  # the part of them in tensor-, context- and expert-parallel messages
    exchange_seconds: Passes = Passes()  # the part of them in which tokens travel to experts and back
    recompute_seconds: float = 0.0  # the part of I for recomputation
    kept_bytes: activations.KeptBytes = activations.KeptBytes()  # bytes of activations
    offloaded_bytes: float = 0.0  # bytes of them that offload moves each way
    parameters: int = 0  # on the rank
    expert_parameters: int = 0  # trained parameters of experts among them; fewer ranks share their optimizer
    end_parameters: int = 0  # trained parameters of the embedding and the output layer among them
    frozen_parameters: int = 0  # parameters among them without gradients
    quantised_bytes: float = 0.0  # bytes of 8-bit copies of weights, by rows and by columns

    @property
    def trained(self) -> tuple[int, int]:
        """Number of parameters with gradients, and of experts' parameters among them."""
        return self.parameters - self.frozen_parameters, self.expert_parameters

    def quantised(self, execution: Execution) -> float:
        """Return the number of parameters with 8-bit copies."""
        return self.quantised_bytes / (2 * execution.product_element)

    def without_weights(self, execution: Execution) -> Price:
        """Return the price without W if the run freezes the language model. Call it for parts of that model only."""
        if "language" not in execution.frozen:
            return self
        trains, waits = self.seconds, self.communication_seconds
        return replace(
            self,
            seconds=Passes(trains.forward, trains.input),
            communication_seconds=Passes(waits.forward, waits.input),
            kept_bytes=activations.KeptBytes(self.kept_bytes.saved),
            expert_parameters=0,
            end_parameters=0,
            frozen_parameters=self.parameters,
        )


@dataclass(frozen=True)
class MeasuredSlowdown:
    """The ratios of measured to predicted seconds of F, I and W, for a layer and for the head, and of messages.

    A profile with one parallelism is used for every parallelism.
    """

    layer: Passes = _AS_MODELLED
    head: Passes = _AS_MODELLED
    messages: float = 1.0  # between pipeline ranks
    launching: tuple[tuple[str, float], ...] = ()
    """By kind of layer, the measured seconds in which the host launches F, I and W; empty if they are not measured."""


def each_pass(function: Callable[..., float], *passes: Passes) -> Passes:
    """Apply ``function`` to the F values of ``passes``, to their I values and to their W values."""
    kinds = ("forward", "input", "weight")
    return Passes(*(function(*(getattr(operand, kind) for operand in passes)) for kind in kinds))


@lru_cache(maxsize=1024)
def layer(
    model: Model, execution: Execution, cluster: Cluster, kind: str | None = None, slowdown: Passes = _AS_MODELLED
) -> Price:
    """Predict the seconds and bytes of one layer, on one rank for one microbatch.

    ``kind`` names the layer's blocks (``Sublayer``), by default those of the model's first layer. ``slowdown`` has the
    measured over the predicted seconds of each pass. It multiplies computing, and no messages.
    """
    kind = kind or model.kinds[0]
    flops = counts.layer_flops(model, execution, kind)
    plain = counts.layer_flops(model, replace(execution, recompute="none"), kind)
    touched = sum(tensor.nbytes for tensor in activations.layer_tensors(model, execution, kind))
    moving = 2 * touched / (cluster.memory_gb_per_s * 1e9)
    of_blocks = [(block, _block_messages(model, execution, cluster, Sublayer(block))) for block in kind]
    messages = sum(sum(seconds) for _, seconds in of_blocks)
    of_keys = sum((_key_messages(model, execution, cluster, Sublayer(block)) for block in kind), Passes())
    recomputes_all = execution.recompute == "full"
    repeated = sum(sum(seconds) for block, seconds in of_blocks if execution.recomputes(*_REPEATS.get(block, ())))
    repeated += recomputes_all * (messages + of_keys.forward)
    tails = _tails(model, execution, kind)
    products = _product_seconds(execution, cluster, plain, tails)
    shown = _shown_messages(execution, [seconds for _, seconds in of_blocks], products)
    exchange = sum(expert for _, (_, expert) in of_blocks)
    shown += of_keys
    communication = shown + Passes(input=repeated)
    recompute = products.forward + moving
    if not recomputes_all:
        more = flops.input - plain.input
        core = min(more, (plain.forward - plain.weight) * execution.recomputes("core_attn"))
        recompute = core / cluster.flops + (more - core) / _rate(execution, cluster)
    if execution.recompute == "selective":
        # Recomputation writes the dropped tensors, and reads about as many bytes.
        dropped = activations.layer_bytes(model, replace(execution, recompute="none"), kind).saved
        dropped -= activations.layer_bytes(model, execution, kind).saved
        recompute += 2 * max(0.0, dropped) / (cluster.memory_gb_per_s * 1e9)
    computing = products + Passes(moving, 2 * moving) + _quantising_seconds(model, execution, cluster, kind)
    computing = each_pass(operator.mul, computing, slowdown)
    trains = "language" not in execution.frozen
    early = computing.weight * counts.early_share(model, execution, kind) * trains
    computing += Passes(input=early, weight=-early)
    gathers = _shown_gathers(model, execution, cluster, kind, computing.weight)
    communication += Passes(weight=gathers)
    recompute = recompute * slowdown.input + repeated
    price = Price(
        seconds=computing + shown + Passes(input=recompute, weight=gathers),
        communication_seconds=communication,
        exchange_seconds=Passes(exchange, exchange),
        recompute_seconds=recompute,
        kept_bytes=activations.layer_bytes(model, execution, kind),
        offloaded_bytes=activations.moved_bytes(model, execution, kind),
        parameters=counts.layer_parameters(model, execution, kind),
        expert_parameters=counts.expert_parameters(model, execution, kind),
        quantised_bytes=_cached_bytes(model, execution, kind),
    ).without_weights(execution)
    return price + _adapters(model, execution, cluster, kind) if execution.adapters else price


def _adapters(model: Model, execution: Execution, cluster: Cluster, kind: str) -> Price:
    """Predict the seconds and bytes of the low-rank adapters of one layer.

    An adapter multiplies the input of a linear layer by two matrices, and adds the result to the layer's output. All
    experts of a rank share an adapter. I leaves it the layer's inputs and output gradients until W.
    """
    tp, n, rank = execution.tp, execution.tokens(model), execution.adapters
    adapted = [matrix for block in kind for matrix in counts.matrices(model, execution, block) if matrix.waits]
    inputs, outputs = (
        sum(side(matrix, tp) * matrix.visits for matrix in adapted)
        for side in (counts.Matrix.depth, counts.Matrix.width)
    )
    products = 2 * n * rank * (inputs + outputs) / cluster.flops
    moved = n * execution.element / (cluster.memory_gb_per_s * 1e9)
    seconds = Passes(
        products + moved * (inputs + 3 * outputs),
        products + moved * (2 * inputs + outputs),
        products + moved * (inputs + outputs),
    )
    return Price(
        seconds=seconds,
        kept_bytes=activations.KeptBytes(0.0, activations.layer_bytes(model, execution, kind).after_input),
        parameters=sum(rank * (matrix.inputs + matrix.outputs) // (matrix.ranks or tp) for matrix in adapted),
    )


@lru_cache(maxsize=1024)
def embedding(model: Model, execution: Execution, cluster: Cluster) -> Price:
    """Predict the seconds and bytes of the input embedding, on one rank for one microbatch.

    F copies rows of the table, and sums them over tensor-parallel ranks. W adds their gradients.
    """
    nbytes = execution.tokens(model) * model.hidden * execution.element
    moving = 2 * nbytes / (cluster.memory_gb_per_s * 1e9)
    messages = all_reduce(nbytes, execution.tp, cluster.link(execution.tp))
    parameters = counts.embedding_parameters(model, execution)
    return Price(
        seconds=Passes(moving + messages, 0.0, moving),
        communication_seconds=Passes(messages),
        kept_bytes=activations.embedding_bytes(model, execution),
        parameters=parameters,
        end_parameters=parameters,
    ).without_weights(execution)


@lru_cache(maxsize=1024)
def head(model: Model, execution: Execution, cluster: Cluster, slowdown: Passes = _AS_MODELLED) -> Price:
    """Predict the seconds and bytes of final norm, output layer and loss, on one rank for one microbatch.

    With multi-token prediction, they run once for each predicted token. The logits are read and written in fp32 twice
    in F and once in I. ``slowdown`` has the measured over the predicted seconds of each pass, without messages.
    """
    flops = counts.head_flops(model, execution)
    between = execution.tokens(model) * model.hidden * execution.element
    depths = model.heads_of_output
    moving = 2 * depths * logit_bytes(model, execution) / (cluster.memory_gb_per_s * 1e9)
    messages = depths * all_reduce(between, execution.tp, cluster.link(execution.tp))
    computing = each_pass(operator.mul, flops * (1 / cluster.flops) + Passes(2 * moving, moving), slowdown)
    if "head" in counts.early_modules(model, execution) and "language" not in execution.frozen:
        computing = Passes(computing.forward, computing.input + computing.weight)
    sums = depths * 3 * all_reduce(execution.tokens(model) * _LOGIT, execution.tp, cluster.link(execution.tp))
    gathered = messages / 2 if execution.sequence_parallel else 0.0
    communication = Passes(gathered + sums, messages / 2 if execution.sequence_parallel else messages)
    parameters = counts.head_parameters(model, execution)
    return Price(
        seconds=computing + communication,
        communication_seconds=communication,
        kept_bytes=activations.head_bytes(model, execution),
        parameters=parameters,
        end_parameters=parameters,
    ).without_weights(execution)


def ahead(
    model: Model,
    execution: Execution,
    cluster: Cluster,
    slowdown: MeasuredSlowdown | None = None,
    looks_up: bool = True,
) -> Price:
    """Predict the seconds and bytes of all layers of multi-token prediction, which are on one stage.

    With ``looks_up``, their stage has a copy of the embedding, in which they look up tokens.
    Without such layers, everything is 0.
    """
    layers = model.all_kinds[model.layers :]
    if not layers:
        return Price()
    own = layer(model, execution, cluster, layers[0], (slowdown or MeasuredSlowdown()).layer) * len(layers)
    if not looks_up:
        return own
    lookup = replace(embedding(model, execution, cluster), parameters=0, end_parameters=0) * len(layers)
    parameters = counts.embedding_parameters(model, execution)
    copy = Price(parameters=parameters, end_parameters=parameters)
    return own + lookup + copy.without_weights(execution)


def last(model: Model, execution: Execution, cluster: Cluster) -> Price:
    """Predict the seconds and bytes of multi-token prediction and the head, on one rank for one microbatch."""
    return ahead(model, execution, cluster) + head(model, execution, cluster)


def logit_bytes(model: Model, execution: Execution) -> float:
    """Return the fp32 bytes of one microbatch's logits on one rank."""
    return execution.tokens(model) * execution.vocabulary_rows(model) * _LOGIT


def adam_seconds(cluster: Cluster, of: ParameterBytes | None = None) -> float:
    """Return the seconds of an optimizer step per parameter, by the speed of the device's memory, which limits it.

    ``of`` says which share of the parameters the host updates, as fast as it copies. Before that, gradients are copied to
    the host, and then the weights back.
    """
    on_device = _ADAM_BYTES / (cluster.memory_gb_per_s * 1e9)
    if of is None or not of.host_share:
        return on_device
    host = cluster.host
    update = _ADAM_BYTES / (host.d2h_gb_per_s * 1e9)
    copies = of.gradient / (host.d2h_gb_per_s * 1e9) + of.weight / (host.h2d_gb_per_s * 1e9)
    on_host = max(update, copies) if of.hides_copies else update + copies
    return (1 - of.host_share) * on_device + of.host_share * on_host


def gather(nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-gather whose result has ``nbytes``; a reduce-scatter takes as long. 0 for one rank."""
    return link.seconds(nbytes * (ranks - 1) / ranks) if ranks > 1 else 0.0


def _shown_gathers(model: Model, execution: Execution, cluster: Cluster, kind: str, products: float) -> float:
    """Return the seconds by which the gathers of W exceed ``products``, the seconds of W's products that hide them."""
    layers = [matrix for block in kind for matrix in counts.matrices(model, execution, block)]
    gathered = activations.gathered_in_weight(model, execution, layers)
    gathers = sum(gather(nbytes, execution.tp, cluster.link(execution.tp)) for nbytes in gathered)
    return max(0.0, gathers - products)


def all_reduce(nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-reduce of ``nbytes``: a reduce-scatter and an all-gather."""
    return 2 * gather(nbytes, ranks, link)


def _tails(model: Model, execution: Execution, kind: str) -> Passes:
    """Return the FLOPs that would fill the half-empty last waves of a layer's products, in each of F, I and W.

    The products of all experts count once, because they are computed in groups.
    """
    tp, n = execution.tp, execution.tokens(model)
    products = [matrix for block in kind for matrix in counts.matrices(model, execution, block) if matrix.waits]
    forward, backward = sum(matrix.depth(tp) for matrix in products), sum(matrix.width(tp) for matrix in products)
    return Passes(forward, backward, len(products) * n) * (2 * _HALF_WAVE)


def _cached_bytes(model: Model, execution: Execution, kind: str) -> float:
    if execution.fp8 == "none":
        return 0.0
    matrices = (matrix for block in kind for matrix in counts.matrices(model, execution, block) if matrix.waits)
    return 2 * execution.product_element * sum(matrix.parameters(execution.tp) for matrix in matrices)


def _product_seconds(execution: Execution, cluster: Cluster, flops: Passes, tails: Passes) -> Passes:
    """Return the seconds of matrix products. Linear layers may be in 8 bits, and attention never is.

    W has linear layers only. F and I each have as many FLOPs of linear layers as W.
    """
    linear = Passes(flops.weight, flops.weight, flops.weight)
    return (linear + tails) * (1 / _rate(execution, cluster)) + (flops + linear * -1) * (1 / cluster.flops)


def _rate(execution: Execution, cluster: Cluster) -> float:
    """Return the achieved FLOPs per second of linear layers."""
    return cluster.flops if execution.fp8 == "none" else cluster.fp8_flops


def _quantising_seconds(model: Model, execution: Execution, cluster: Cluster, kind: str) -> Passes:
    """Return the seconds to quantise the inputs and output gradients of a layer's linear layers.

    Each is read once and written in 8 bits twice: by rows for one product, and by columns for the other. F
    quantises the inputs and I the gradients. Without an fp8 recipe, all seconds are 0.
    """
    if execution.fp8 == "none":
        return Passes()
    products = [matrix for block in kind for matrix in counts.matrices(model, execution, block) if matrix.waits]
    moved = execution.tokens(model) * (execution.element + 2 * execution.product_element)
    inputs, outputs = (
        moved * sum(side(matrix, execution.tp) * matrix.visits for matrix in products)
        for side in (counts.Matrix.depth, counts.Matrix.width)
    )
    return Passes(inputs, outputs) * (1 / (cluster.memory_gb_per_s * 1e9))


def _shown_messages(execution: Execution, messages: Sequence[tuple[float, float]], products: Passes) -> Passes:
    """Return the seconds of a layer's messages that no computation hides, in F and in I.

    Without the flag that overlaps tensor-parallel messages with products, these are all messages. ``messages`` has the
    seconds of tensor-parallel and of expert-parallel messages of every block in F. I has as many.
    """
    shown = Passes()
    for tensor, expert in messages:
        # No product hides the first part that a ring sends. The messages of all blocks overlap with the products evenly.
        beside = (seconds / len(messages) for seconds in (products.forward, products.input + products.weight))
        hidden = Passes(*(min(tensor - tensor / execution.tp, seconds) for seconds in beside))
        shown += Passes(tensor + expert, tensor + expert) + hidden * -float(execution.tp_overlap)
    return shown


def _block_messages(model: Model, execution: Execution, cluster: Cluster, block: Sublayer) -> tuple[float, float]:
    """Return the seconds of a block's tensor-parallel and of its expert-parallel messages, in F of a microbatch."""
    n, e, tp = execution.tokens(model), execution.element, execution.tp
    link = cluster.link(tp)
    ranks = execution.expert_tp if block is Sublayer.EXPERTS else tp
    seconds = all_reduce(n * model.hidden * e, ranks, link)
    if block is Sublayer.ATTENTION and model.key_heads < tp:
        # Every rank gathers queries, keys and values of all heads, and scatters their gradients.
        seconds += gather(n * model.qkv_width * e, tp, link)
    if block is Sublayer.LATENT_ATTENTION and execution.implementation == "local":
        # The latents' ranks are cut, and gathered.
        width = (model.q_lora_rank or 0) + (model.kv_lora_rank or 0) + model.qk_pos_emb_head_dim
        seconds += gather(n * width * e, tp, link)
    if block is Sublayer.DELTA_NET and execution.cp > 1:  # every rank gets all tokens of a part of the heads
        keys, values = model.linear_widths
        seconds += gather(n * (2 * keys + 3 * values) / tp * e, execution.cp, cluster.link(execution.cp, tp))
    if block is Sublayer.EXPERTS and execution.ep > 1:
        sent = (
            n * model.experts_per_token * execution.expert_load * model.expert_channels / execution.sequence_ranks * e
        )
        return seconds, 2 * gather(sent, execution.ep, cluster.link(execution.ep, execution.expert_tp))
    return seconds, 0.0


def _key_messages(model: Model, execution: Execution, cluster: Cluster, block: Sublayer) -> Passes:
    """Return the seconds in which context-parallel ranks exchange keys and values without attention to hide them.

    The ranks form a ring (arXiv 2310.01889). In the backward it sends keys and values with their gradients, and twice the
    products hide them. Ranks that share sequence slices gather keys and values once, and scatter the sums of gradients.
    Blocks without attention, and one rank, take 0.
    """
    latents = (Sublayer.SPARSE_ATTENTION, Sublayer.REUSED_INDEX)
    if block not in (Sublayer.ATTENTION, Sublayer.LATENT_ATTENTION, *latents) or execution.cp == 1:
        return Passes()
    width: float = 2 * execution.key_groups(model) * model.channels
    if block is Sublayer.LATENT_ATTENTION:
        width = model.heads / execution.tp * (model.latent_query_channels + model.v_head_dim)
    if block in latents:
        width = (model.kv_lora_rank or 0) + model.qk_pos_emb_head_dim
        width += model.dsa_indexer_head_dim * (block is Sublayer.SPARSE_ATTENTION)
    nbytes = execution.tokens(model) * width * execution.element
    link = cluster.link(execution.cp, execution.tp)
    if execution.gathers_keys:
        seconds = gather(nbytes * execution.cp, execution.cp, link)
        return Passes(seconds, seconds)
    ring = max(
        0.0, link.seconds(nbytes) * (execution.cp - 1) - counts.core_flops(model, execution, block) / cluster.flops
    )
    return Passes(ring, 2 * ring)


_COLOURS = 3


@lru_cache(maxsize=1024)
def tower_price(model: Model, execution: Execution, cluster: Cluster) -> Price:
    """Predict the seconds and bytes of a model's vision tower, patches and projections included.

    All are 0 for a model without a tower.
    """
    tower = model.tower
    if tower is None:
        return Price()
    own = _tower_execution(tower, execution)
    encoder = layer(tower.model(), own, cluster) * tower.layers + _patches(tower, own, cluster)
    if "tower" in execution.frozen:  # autograd keeps nothing of it
        encoder = Price(
            seconds=Passes(encoder.seconds.forward),
            communication_seconds=Passes(encoder.communication_seconds.forward),
            parameters=encoder.parameters,
            frozen_parameters=encoder.parameters,
        )
    whole = encoder + _projections(model, tower, own, cluster, "projection" in execution.frozen)
    seconds = whole.seconds
    return replace(
        whole,
        seconds=Passes(seconds.forward, seconds.input + seconds.weight),
        kept_bytes=activations.KeptBytes(whole.kept_bytes.saved),
    )


def _tower_execution(tower: Tower, execution: Execution) -> Execution:
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
    matrix = counts.Matrix(_COLOURS * tower.frames * tower.patch**2, tower.hidden, "none", bias=True)
    seconds = 2 * own.tokens(tower.model()) * matrix.products(1) / cluster.flops
    return Price(seconds=Passes(seconds, 0.0, seconds), parameters=matrix.parameters(1))


def _projections(model: Model, tower: Tower, own: Execution, cluster: Cluster, frozen: bool) -> Price:
    matrices, tp, count = counts.projection_matrices(model), own.tp, 1 + tower.deepstack
    tokens = own.tokens(tower.model()) / tower.merge
    seconds = 2 * tokens * sum(matrix.products(tp) for matrix in matrices) / cluster.flops * count
    inputs, outputs = (
        tokens * own.element * sum(side(matrix, tp) for matrix in matrices) * count
        for side in (counts.Matrix.depth, counts.Matrix.width)
    )
    parameters = sum(matrix.parameters(tp) for matrix in matrices) * count
    # The norm's input and the activation's input are kept until I, and the inputs of both matrices until W.
    saved = 2 * inputs
    if frozen:
        return Price(
            seconds=Passes(seconds, seconds),
            kept_bytes=activations.KeptBytes(saved - inputs),
            parameters=parameters,
            frozen_parameters=parameters,
        )
    return Price(
        seconds=Passes(seconds, seconds, seconds),
        kept_bytes=activations.KeptBytes(saved, inputs + outputs),
        parameters=parameters,
    )


CHEAP: tuple[Recomputable, ...] = ("layernorm", "activation")
"""Modules that are cheaper to compute again than to move."""


def offload_ratio(
    model: Model,
    execution: Execution,
    flops: float,
    channel: HostChannel,
    sharing: int = 1,
    seconds: float | None = None,
) -> float:
    """Return the offload ratio k of the model's most frequent kind of layer: seconds of its copies over its computing.

    Up to 1, computing can hide all copies. ``flops`` is the achieved number of FLOPs per second. ``sharing`` is the
    number of devices that use the link to the host at once. ``seconds`` is the measured sum of the layer's F, I and W,
    if there is one.
    """
    if seconds is None:
        seconds = layer_flops(model, execution, model.main_kind).total / flops
    return channel.round_trip_seconds(moved_bytes(model, execution, model.main_kind), sharing) / seconds


def cheap_recompute(execution: Execution) -> Execution:
    """Return the execution with recomputation of norms, activation and dropout masks added, as offload assumes.

    With full recomputation, it is unchanged.
    """
    if execution.recompute == "full":
        return execution
    modules = execution.recompute_modules if execution.recompute == "selective" else ()
    return replace(execution, recompute="selective", recompute_modules=tuple(dict.fromkeys((*modules, *CHEAP))))
