"""Count the bytes of weights, gradients and optimizer per parameter, by the flags of Megatron's optimizers.

In 16 bits, with fp32 gradients and Adam, a parameter takes 2 + 4 + 12 bytes: its weight, its gradient, and the
optimizer's fp32 copy of the weight and two moments. These flags change that:

* ``--grad-reduce-in-bf16`` and ``--main-grads-dtype bf16`` sum gradients in 16 bits, as fp16 does unless
  ``--accumulate-allreduce-grads-in-fp32`` is given. The optimizer's step then makes an fp32 copy of them for a moment,
  unless the optimizer is precision-aware;
* ``--optimizer`` sgd and lion have one moment. Muon has one for the matrices of layers, and leaves embedding and output
  layer to its scalar optimizer. Ranks that share its state get whole matrices, which count as if they were even shares;
* ``--use-precision-aware-optimizer`` holds moments in their own types. Of the fp32 weights it stores only the 16 bits
  that bf16 weights lack. Moments that its kernel cannot read are copied to fp32 during the step;
* ``--optimizer-cpu-offload`` moves a fraction of the fp32 weights and moments to the host, with a copy of the gradients;
* ``--fp8-param-gather`` keeps the weights of linear layers in 8 bits only;
* ``--use-megatron-fsdp`` shares gradients and weights among ranks too, by ``--data-parallel-sharding-strategy``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.tools.config.arguments import Arguments, frozen_flags

DISTRIBUTED = "use-distributed-optimizer"
"""The flag that shards the optimizer."""
_FP32, _HALF = 4, 2
_BYTES = {"fp32": _FP32, "fp16": _HALF, "bf16": _HALF, "fp8": 1}
_MOMENTS = {
    "adam": 2 * _FP32,
    "sgd": _FP32,
    "lion": _FP32,
    "muon": _FP32,
    "dist_muon": _FP32,
    "adaptive_muon": 2 * _FP32,
}
"""Bytes of fp32 moments per parameter, by optimizer."""
_MUON = ("muon", "dist_muon", "adaptive_muon")
_SHARED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""The number of parts of (optimizer, gradients, weights) that ranks share, by the strategy of Megatron-FSDP."""
_FLAGS = (
    *("optimizer", "muon-scalar-optimizer", DISTRIBUTED, "num-distributed-optimizer-instances"),
    *("accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16", "use-precision-aware-optimizer"),
    *("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"),
    *("optimizer-cpu-offload", "optimizer-offload-fraction", "overlap-cpu-optimizer-d2h-h2d"),
    *("fp8-format", "fp8-recipe", "fp8-param-gather"),
    *("use-megatron-fsdp", "data-parallel-sharding-strategy", "megatron-fsdp-main-grads-dtype"),
)
"""All flags that decide the bytes of a parameter."""


@dataclass(frozen=True)
class ParameterBytes:
    """The bytes per parameter on its rank and, for the optimizer, on the rank that updates it."""

    weight: float
    gradient: float  # in the buffer that sums gradients
    optimizer: float  # state on the device, for a parameter of the layers
    ends_optimizer: float  # likewise for one of the embedding or the output layer
    extra_in_optimizer_step: float = 0.0  # in addition to all others on the device
    host: float = 0.0  # state and gradient on the host
    host_share: float = 0.0  # fraction of the parameters that the host updates
    hides_copies: bool = False  # whether copies to and from the host run while the host updates
    keeps_weights: bool = True  # whether 16-bit weights exist beside their 8-bit copies
    instances: int = 1  # groups of ranks that share an optimizer
    shared_parts: int = 0  # ranks share the first of (optimizer, gradients, weights), so many

    @property
    def rollback(self) -> float:
        """Bytes of a copy of the optimizer's state, and of the weights if they are the only fp32 ones."""
        return self.optimizer + (self.weight if self.weight == _FP32 else 0)

    @property
    def shards_optimizer(self) -> bool:
        return self.shared_parts >= 1

    @property
    def shards_gradients(self) -> bool:
        return self.shared_parts >= 2

    @property
    def shards_weights(self) -> bool:
        return self.shared_parts >= 3


def parameter_bytes(precision: str, flags: Mapping[str, Any]) -> ParameterBytes:
    """Return the bytes per parameter of a run with this precision and these flags, by name without dashes.

    Raises:
        UnsupportedError: the bytes of the optimizer are unknown (``unknown-optimizer``).
    """
    return _parameter_bytes(precision, tuple((name, flags[name]) for name in _FLAGS if name in flags))


@lru_cache(maxsize=256)
def _parameter_bytes(precision: str, flags: tuple[tuple[str, Any], ...]) -> ParameterBytes:
    args = Arguments(dict(flags), frozen_flags())
    weight = _FP32 if precision == "fp32" else _HALF
    master = 0 if precision == "fp32" else _FP32
    gradient = _gradient_bytes(precision, args)
    in_fp32 = _FP32 if gradient < _FP32 else 0  # a copy of the gradient for the step
    moments = _moments(args.optimizer)
    state = ends = master + moments
    share, extra = 0.0, float(in_fp32)
    if args.optimizer in _MUON:
        ends = master + _moments(args.muon_scalar_optimizer)
    elif args.optimizer_cpu_offload:
        share = min(1.0, args.optimizer_offload_fraction)
        state = ends = (1 - share) * state
        extra = (1 - share) * in_fp32
    elif args.use_precision_aware_optimizer:
        state, extra = _precision_aware(precision, args, in_fp32)
        ends = state
    shared = 1 if args.use_distributed_optimizer or args.optimizer == "dist_muon" else 0
    return ParameterBytes(
        weight,
        gradient,
        state,
        ends,
        extra,
        host=share * (_FP32 + moments + _FP32),
        host_share=share,
        hides_copies=args.overlap_cpu_optimizer_d2h_h2d,
        keeps_weights=not (args.fp8 and args.fp8_param_gather),
        instances=args.num_distributed_optimizer_instances,
        shared_parts=_SHARED[args.data_parallel_sharding_strategy] if args.use_megatron_fsdp else shared,
    )


def _gradient_bytes(precision: str, args: Arguments) -> int:
    if precision == "fp32":
        return _FP32
    if args.use_megatron_fsdp:
        return _BYTES.get(args.megatron_fsdp_main_grads_dtype, _HALF)
    in_fp32 = args.accumulate_allreduce_grads_in_fp32
    if precision == "bf16":  # Megatron's default, unless a flag asks for 16 bits
        in_fp32 = not args.grad_reduce_in_bf16 and (in_fp32 or args.main_grads_dtype == "fp32")
    return _FP32 if in_fp32 else _HALF


def _moments(optimizer: str) -> int:
    if optimizer == "soap":
        raise UnsupportedError(
            "unknown-optimizer",
            "--optimizer soap keeps two square matrices for each side of a weight: their bytes follow from the sides of "
            f"every matrix, and prices here are per parameter; compare the run with one of {', '.join(_MOMENTS)}",
        )
    if optimizer not in _MOMENTS:
        raise UnsupportedError(
            "unknown-optimizer",
            f"--optimizer {optimizer} keeps tensors whose bytes are not known here; compare the run with one of "
            f"{', '.join(_MOMENTS)}",
        )
    return _MOMENTS[optimizer]


def _precision_aware(precision: str, args: Arguments, in_fp32: int) -> tuple[int, float]:
    """Return the bytes per parameter of a precision-aware Adam: its state, and its copies during the step.

    ``in_fp32`` are the bytes of a gradient's fp32 copy.
    """
    main, moments = args.main_params_dtype, (args.exp_avg_dtype, args.exp_avg_sq_dtype)
    # With scales per block, Megatron holds the fp32 weights itself, and the optimizer reads fp32 gradients.
    is_alone = main != "fp32" or not args.fp8 or args.fp8_recipe == "delayed"
    master = _HALF if is_alone and main == "fp32" and precision == "bf16" else _BYTES[main]
    read_as_they_are = moments == ("bf16", "bf16")
    copied = [kind for kind in (main, *(() if read_as_they_are else moments)) if kind != "fp32"]
    extra = _FP32 * len(copied) + (0 if is_alone else in_fp32)
    return master + sum(_BYTES[kind] for kind in moments), float(extra)
