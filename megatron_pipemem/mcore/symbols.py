"""The functions of Megatron that this package replaces or uses, and how they are replaced and restored.

Before ``enable()`` changes anything, it checks that ``USED`` and all replaced functions exist with these parameters.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from megatron_pipemem.errors import UpstreamError

TESTED_VERSIONS = ("0.19.0", "0.19.2")


@dataclass(frozen=True)
class ModelClass:
    """A class of language models, or a function of one, which a version of Megatron may lack."""

    module: str  # dotted name
    name: str

    def find(self) -> type | None:
        """Return the class, or ``None`` if this version of Megatron does not have it."""
        try:
            return getattr(importlib.import_module(self.module), self.name, None)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{self.module}.".startswith(f"{error.name}."):
                return None
            raise

    def get(self) -> type:
        """Return the class. Raise an UpstreamError if this version of Megatron does not have it."""
        models = self.find()
        if models is None:
            raise UpstreamError(
                "other-version",
                f"megatron-core {megatron_version()} has no {self.name}; build a model of another class",
            )
        return models


GPT_MODELS = ModelClass("megatron.core.models.gpt.gpt_model", "GPTModel")
HYBRID_MODELS = ModelClass("megatron.core.models.hybrid.hybrid_model", "HybridModel")


@dataclass(frozen=True)
class Symbol:
    """A function of Megatron that this package replaces or uses."""

    module: str  # dotted name
    name: str  # attribute of the module, or ``Class.attribute``
    # names of parameters that it must have: a function without one of them does something else. ``a|b`` is one of the two,
    # if versions differ and the replacement takes both.
    parameters: tuple[str, ...] = ()
    by_name: bool = False  # modules import the function itself, so it is replaced in every module that holds it
    purposes: tuple[str, ...] = ()  # what it is replaced for, in the words of the documents; empty if it is only called
    of: ModelClass | None = None  # the class of models that it belongs to, which a version of Megatron may lack

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def is_of_program(self) -> bool:
        """Whether the function is in a program over Megatron-Core, which not every run imports."""
        return self.module.startswith(("megatron.training.", "megatron.bridge."))

    def owner(self) -> tuple[object, str]:
        """Return the module or class that has the function as an attribute, and the attribute's name.

        The module is imported. Raise an UpstreamError if the class does not exist.
        """
        # Through sys.modules: a package may re-export a function under the name of its own submodule.
        importlib.import_module(self.module)
        owner: object = sys.modules[self.module]
        *path, attribute = self.name.split(".")
        for part in path:
            owner = self._get(owner, part)
        return owner, attribute

    def resolve(self) -> Callable:
        """Return the function that Megatron calls at present, which may be a replacement.

        Raises:
            UpstreamError: there is no such function, or it lacks one of ``parameters``.
        """
        owner, attribute = self.owner()
        function = self._get(owner, attribute)
        # Compiled functions have no signature to ask for.
        present = inspect.signature(function).parameters if self.parameters else {}
        missing = {name for name in self.parameters if present.keys().isdisjoint(name.split("|"))}
        if missing:
            raise UpstreamError(
                "other-version",
                f"{self} has no parameter {', '.join(sorted(missing))} in {self._installed()}; {self._tested()}",
            )
        return function

    def _get(self, owner: object, attribute: str) -> Callable:
        try:
            return getattr(owner, attribute)
        except AttributeError:
            raise UpstreamError("other-version", f"{self._installed()} has no {self}; {self._tested()}") from None

    def _installed(self) -> str:
        if self._is_of_te:
            return f"transformer_engine {importlib.import_module('transformer_engine').__version__}"
        return f"megatron-core {megatron_version()}"

    def _tested(self) -> str:
        if self._is_of_te:
            return "install a version of the support matrix"
        return f"megatron_pipemem is tested with megatron-core {', '.join(TESTED_VERSIONS)}; install one of these"

    @property
    def _is_of_te(self) -> bool:
        return self.module.startswith("transformer_engine.")


Replacements = list[tuple[Symbol, Callable]]
"""Functions to replace, and their new functions. A new function gets the original as its first argument."""


class Feature:
    """A part of this package that replaces functions of Megatron."""

    def replacements(self) -> Replacements:
        """Return the functions to replace and their new functions. Those of programs that are not imported stay."""
        return []


@dataclass
class PatchSet:
    """The functions that are replaced at present. ``remove`` restores all originals."""

    _symbols: list[Symbol] = field(default_factory=list)
    _originals: list[tuple[object, str, object]] = field(default_factory=list)
    _by_name: list[tuple[str, Callable, Callable]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Return the name of each replaced function within its module, without duplicates."""
        return list(dict.fromkeys(symbol.name for symbol in self._symbols))

    def install(self, replacements: Replacements) -> None:
        """Replace all functions, or none if one of them fails.

        Functions of a class of models that this version lacks are left out. Raise an UpstreamError if a function is
        missing or lacks a parameter. If a function is replaced several times,
        each replacement gets the one before it as its original. A replacement has the attributes of the original,
        except those that the new function sets itself.
        """
        replacements = [(symbol, act) for symbol, act in replacements if symbol.of is None or symbol.of.find()]
        for symbol, _ in replacements:
            symbol.resolve()
        try:
            for symbol, act in replacements:
                owner, attribute = symbol.owner()
                original = getattr(owner, attribute)  # which another replacement may have put there
                replacement = _in_place_of(original, act)
                present = vars(owner).get(attribute, original)
                setattr(
                    owner, attribute, staticmethod(replacement) if isinstance(present, staticmethod) else replacement
                )
                self._symbols.append(symbol)
                self._originals.append((owner, attribute, present))
                if symbol.by_name:
                    self._by_name.append((symbol.name, original, replacement))
            _rebind(self._by_name)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        self._symbols.clear()
        while self._originals:
            owner, attribute, original = self._originals.pop()
            setattr(owner, attribute, original)
        by_name, self._by_name = self._by_name, []
        _rebind(
            [(name, replacement, original) for name, original, replacement in by_name]
        )  # also in modules imported since


_OF_TORCH = "torch triton sympy mpmath numpy networkx cuda".split()
_OF_PYTHON = "setuptools distutils packaging more_itertools typing_extensions attr attrs yaml click".split()
_LIBRARIES = (
    "wandb pydantic pydantic_core huggingface_hub trio anyio rich google transformers tokenizers omegaconf httpx httpx2 "
    "httpcore httpcore2 h11 jinja2 filelock psutil regex opentelemetry PIL tqdm"
).split()
_HOLD_NOTHING = {*sys.stdlib_module_names, *_OF_PYTHON, *_OF_TORCH, *_LIBRARIES}
_OWN_NAMES = ("megatron", "transformer_engine")
"""Packages with many modules, which import each other's functions under no other name."""


def _rebind(changes: Sequence[tuple[str, Callable, Callable]]) -> None:
    """Replace functions in every imported module that has them as attributes, under any name.

    ``changes`` are (name in its own module, present function, new function). A new function may itself be replaced by
    another change. All share one pass over the thousands of modules of a run. Modules of Python, PyTorch and common
    libraries are skipped, because they hold no function of Megatron.
    """
    replacements = {present: new for _, present, new in changes}
    kinds = {
        *map(type, replacements)
    }  # to ask for each value's id instead would call filelock's audit hook for every one
    names = {name for name, _, _ in changes}
    for path, module in list(sys.modules.items()) if changes else ():
        package = path.partition(".")[0]
        if package in _HOLD_NOTHING or not isinstance(module, ModuleType):
            continue
        attributes = vars(module)
        for name in names & attributes.keys() if package in _OWN_NAMES else list(attributes):
            value = attributes[name]
            while type(value) in kinds and value in replacements:
                value = replacements[value]
            if value is not attributes[name]:
                setattr(module, name, value)


def _in_place_of(original: Callable, act: Callable) -> Callable:
    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return act(original, *args, **kwargs)

    vars(replacement).update(vars(act))
    return replacement


def is_imported(module: str) -> bool:
    return isinstance(sys.modules.get(module), ModuleType)


def megatron_version() -> str:
    try:
        return str(importlib.import_module("megatron.core").__version__)
    except (ImportError, AttributeError):
        return "(not installed)"


def version_text() -> str:
    """Return the version of megatron-core for a message. An untested version is followed by the tested ones."""
    version = megatron_version().partition("+")[0]  # without the commit that it was built from
    return version if version in TESTED_VERSIONS else f"{version} (tested are {', '.join(TESTED_VERSIONS)})"


# The functions: those that are replaced, and private ones that this package calls.

_PARALLEL_STATE = "megatron.core.parallel_state"
INITIALIZE = Symbol(
    _PARALLEL_STATE, "initialize_model_parallel", by_name=True, purposes=("comparing the settings of all ranks",)
)
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_DDP = "megatron.core.distributed.distributed_data_parallel"
_LAYERS = "megatron.core.tensor_parallel.layers"
_RANDOM = "megatron.core.tensor_parallel.random"
_OPTIMIZERS = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
_TRAINING = "megatron.training.training"
_EXPERTS = "megatron.core.transformer.moe.moe_layer"

_EVERY = ("every schedule",)
_PLACED = ("V, wave and bidirectional placements",)
_BUILT = ("V, wave and bidirectional placements", "a cut vocabulary")
_SPLIT = ("split backwards",)
_FILES_OF_RANKS = ("checkpoints of `--ckpt-format torch`",)
_REPORTED = ("reports and traces",)
_OVERLAPPED = ("steps without a barrier",)
_ASYNCHRONOUS = ("asynchronous schedules",)
_LAYERWISE = ("`--pipemem-rng layerwise`",)
_LOGGED = ("numbers in the log",)
_REDUCED = ("sums of gradients during a step",)

_FORWARD_BACKWARD = (
    "forward_step_func",
    "data_iterator",
    "model",
    "num_microbatches",
    "seq_length",
    "micro_batch_size",
    "decoder_seq_length",
    "forward_only",
    "collect_non_loss_data",
    "first_val_step",
    "adjust_tensor_shapes_fn",
    "p2p_communicator",
    "pg_collection",
    "force_all_reduce",
)

# The step. The dispatcher looks the first two up in its module at every call, so programs that imported the dispatcher earlier
# get ours too. The last two are replaced to measure stock's own schedule, and called by ours.
WITH_INTERLEAVING = Symbol(
    _SCHEDULES, "forward_backward_pipelining_with_interleaving", _FORWARD_BACKWARD, purposes=(*_EVERY, *_REPORTED)
)
WITHOUT_INTERLEAVING = Symbol(
    _SCHEDULES, "forward_backward_pipelining_without_interleaving", _FORWARD_BACKWARD, purposes=(*_EVERY, *_REPORTED)
)
FORWARD_STEP = Symbol(
    _SCHEDULES,
    "forward_step",
    (
        "forward_step_func",
        "data_iterator",
        "model",
        "num_microbatches",
        "input_tensor",
        "forward_data_store",
        "config",
        "current_microbatch",
    ),
    purposes=(*_REPORTED, *_LAYERWISE),
)
BACKWARD_STEP = Symbol(
    _SCHEDULES, "backward_step", ("input_tensor", "output_tensor", "output_tensor_grad", "config"), purposes=_REPORTED
)
GRAPH_ORDER = Symbol(
    "megatron.core.transformer.cuda_graphs",
    "convert_schedule_table_to_order",
    ("num_warmup_microbatches", "num_model_chunks", "schedule_table"),
    purposes=("CUDA graphs of layers",),
)
"""The order in which Transformer Engine captures and replays CUDA graphs of layers."""

RNG_TRACKER = Symbol(
    "megatron.core.tensor_parallel.random",
    "initialize_rng_tracker",
    ("use_te_rng_tracker", "force_reset"),
    purposes=("CUDA graphs of passes",),
)
GET_RNG_STATES, SET_RNG_STATES = (
    Symbol(RNG_TRACKER.module, name, arguments, purposes=RNG_TRACKER.purposes)
    for name, arguments in (
        ("_get_all_rng_states", ()),
        ("_set_all_rng_states", ("cpu_rng_state", "cuda_rng_state", "cuda_rng_state_tracker")),
    )
)
"""The states with which a recomputed forward draws the numbers of the first one."""

# Which rank a chunk belongs to, and building the chunks.
RANK = Symbol(_PARALLEL_STATE, "get_pipeline_model_parallel_rank", purposes=_PLACED)
IS_FIRST = Symbol(_PARALLEL_STATE, "is_pipeline_first_stage", ("ignore_virtual", "vp_stage"), purposes=_PLACED)
IS_LAST = Symbol(_PARALLEL_STATE, "is_pipeline_last_stage", ("ignore_virtual", "vp_stage"), purposes=_PLACED)
TIED_GRADIENTS = Symbol(
    "megatron.core.distributed.finalize_model_grads",
    "_allreduce_word_embedding_grads",
    ("model", "config", "embd_group", "pp_group"),
    purposes=_PLACED,
)
_FULLY_PARALLEL = "megatron.core.dist_checkpointing.strategies.fully_parallel"
CHOOSE_WRITERS = Symbol(
    _FULLY_PARALLEL,
    "distribute_main_replicas_with_precomputed_distribution",
    ("sharded_state_dict", "parallelization_group", "precomputed_distribution"),
    purposes=_PLACED,
)
"""Chooses the data-parallel rank that writes or reads each entry of a checkpoint."""
FILL_ENTRIES = Symbol(
    _FULLY_PARALLEL,
    "FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_tensors",
    ("sharded_state_dict", "loaded_tensors"),
    purposes=_PLACED,
)
"""Puts the tensors that the data-parallel ranks have read into the state of this rank."""
_OF_STAGE = ("config", "vp_stage", "pp_rank")
LAYER_OFFSET = Symbol(
    "megatron.core.transformer.transformer_layer",
    "get_transformer_layer_offset",
    _OF_STAGE,
    by_name=True,
    purposes=_PLACED,
)
NUM_LAYERS = Symbol(
    "megatron.core.transformer.transformer_block", "get_num_layers_to_build", _OF_STAGE, by_name=True, purposes=_PLACED
)
LAYOUT_OFFSET, LAYOUT_NUM_LAYERS = (
    Symbol(
        "megatron.core.transformer.pipeline_parallel_layer_layout",
        f"PipelineParallelLayerLayout.{name}",
        ("self", "layer_type", "vp_stage", "pp_rank"),
        purposes=_PLACED,
    )
    for name in ("get_layer_offset", "get_num_layers_to_build")
)
BUILD_STAGES = Symbol(
    "megatron.training.models.dist_utils",
    "build_virtual_pipeline_stages",
    ("build_model_func", "pg_collection", "vp_size", "model_type"),
    by_name=True,
    purposes=_BUILT,
)
_ALLOCATION = "megatron.core.models.hybrid.hybrid_layer_allocation"
_SEGMENT, _SEGMENT_OF_GROUPS = "select_pipeline_segment", "select_pipeline_segment_with_logical_offset"
SELECT_SEGMENT, SELECT_SEGMENT_OF_GROUPS = (
    Symbol(_ALLOCATION, name, ("main_pattern", "pp_group", "vp_stage"), purposes=_PLACED, of=part)
    for name, part in ((_SEGMENT, HYBRID_MODELS), (_SEGMENT_OF_GROUPS, ModelClass(_ALLOCATION, _SEGMENT_OF_GROUPS)))
)
"""Functions that select a chunk's layers. The second one exists where patterns have groups of layers (``[*E]``)."""
GET_MODEL = Symbol(_TRAINING, "get_model", ("model_provider_func",), by_name=True, purposes=_BUILT)
PROVIDE_CHUNKS = Symbol(
    "megatron.bridge.models.model_provider",
    "_create_model",
    ("model_provider", "model_type", "pg_collection"),
    purposes=("every placement in Megatron-Bridge's loops",),
)

# Splitting backwards.
LINEAR = Symbol(
    _LAYERS,
    "linear_with_grad_accumulation_and_async_allreduce",
    (
        "input",
        "weight",
        "bias",
        "gradient_accumulation_fusion",
        "allreduce_dgrad",
        "sequence_parallel",
        "grad_output_buffer",
        "tp_group",
    ),
    purposes=(*_SPLIT, "offload", *_REPORTED),
)
LOOKUP = Symbol(_LAYERS, "VocabParallelEmbedding.forward", ("self", "input_"), purposes=_SPLIT)
LANGUAGE_MODULE = Symbol(
    "megatron.core.models.common.language_module.language_module",
    "LanguageModule.__init__",
    ("self", "config"),
    purposes=("refusals that need the model", *_SPLIT, "forwards and backwards in pairs", "CUDA graphs of passes"),
)
DDP = Symbol(
    _DDP,
    "DistributedDataParallel.__init__",
    ("self", "config", "ddp_config", "module"),
    purposes=(*_SPLIT, "forwards and backwards in pairs"),
)
# Keeping shards for W.
GATHER_GRADIENT = Symbol(
    "megatron.core.tensor_parallel.mappings",
    "_ReduceScatterToSequenceParallelRegion.backward",
    ("ctx", "grad_output"),
    purposes=_SPLIT,
)
TRANSFORMER_ENGINE = (
    Symbol(
        "transformer_engine.pytorch.distributed",
        "gather_along_first_dim",
        ("inp", "process_group", "async_op", "quantizer"),
        by_name=True,
        purposes=_SPLIT,
    ),
    Symbol(
        "transformer_engine.pytorch.module.base",
        "fill_userbuffers_buffer_for_all_gather",
        ("comm", "local_tensor", "quantizer", "process_group"),
        by_name=True,
        purposes=_SPLIT,
    ),
    Symbol(
        "transformer_engine.pytorch.module._common",
        "WeightGradStore.put",
        ("self", "tensor_list", "func"),
        purposes=_SPLIT,
    ),
)
"""Functions by which Transformer Engine gathers tensors, also into user buffers, and keeps them for W, if it is installed."""
TE_RNG_STATE = tuple(
    Symbol("transformer_engine.pytorch.distributed", name, parameters, purposes=RNG_TRACKER.purposes)
    for name, parameters in (
        ("_get_cuda_rng_state", ("device", "graph_safe")),
        ("_set_cuda_rng_state", ("new_state", "graph_safe")),
    )
)
"""The state with which Transformer Engine's recomputation, which Megatron takes in 8 bits, draws the numbers of a forward."""

# The losses of multi-token prediction, where the head is cut over the pipeline.
PROCESS_MTP_LOSS = tuple(
    Symbol(
        models.module,
        "process_mtp_loss",
        ("hidden_states", "labels", "loss_mask", "output_layer", "output_weight", "runtime_gather_output", "config"),
        purposes=("a cut vocabulary",),
        of=models,
    )
    for models in (GPT_MODELS, HYBRID_MODELS)
)

SHARE_OF_BATCH = Symbol(
    "megatron.core.utils",
    "get_batch_on_this_cp_rank",
    ("batch", "cp_group"),
    by_name=True,
    purposes=("context parallelism in sequence slices",),
)
_DEPTHS = "megatron.core.transformer.multi_token_prediction"
ROLL = Symbol(
    _DEPTHS, "roll_tensor", ("tensor|tensors", "shifts", "dims", "packed_seq_params"), purposes=("sequence slices",)
)
"""Rolls a tensor, or on ``dev`` a list of them (``sequence_fields`` are their names)."""
SAVE_DEPTH_LOSS = Symbol(
    _DEPTHS,
    "MTPLossLoggingHelper.save_loss_to_tracker",
    ("loss_sum", "num_tokens", "calculate_per_token_loss"),
    purposes=("sequence slices",),
    of=ModelClass(_DEPTHS, "MTPSequenceRollContext"),
)
"""Sums the losses of a depth, and on ``dev`` the tokens too."""

# The training loop: its optimizer, its checkpoints, its log.
_OPTIMIZER = ("config", "model_chunks")
GET_OPTIMIZER = Symbol(
    "megatron.core.optimizer", "get_megatron_optimizer", _OPTIMIZER, purposes=(*_OVERLAPPED, *_ASYNCHRONOUS)
)
GET_TRAINING_OPTIMIZER = Symbol(
    _TRAINING, "get_megatron_optimizer", _OPTIMIZER, purposes=(*_OVERLAPPED, *_ASYNCHRONOUS)
)
SAVE = Symbol(
    _TRAINING,
    "save_checkpoint",
    ("iteration", "non_persistent_ckpt"),
    purposes=(*_FILES_OF_RANKS, *_OVERLAPPED, *_ASYNCHRONOUS),
)
LOAD_FILES = Symbol(
    "megatron.training.checkpointing", "_load_base_checkpoint", ("load_dir", "rank0"), purposes=_FILES_OF_RANKS
)
LOAD = Symbol(_TRAINING, "load_checkpoint", ("ddp_model", "load_arg"), purposes=_ASYNCHRONOUS)
RESHARDABLE_STATE = Symbol(
    _DISTRIBUTED,
    "DistributedOptimizer.sharded_param_state_fully_reshardable",
    ("self", "model_sharded_state_dict"),
    purposes=("a fault of Megatron in saved optimizers",),
)
TRAIN = Symbol(_TRAINING, "train", purposes=(*_REPORTED, *_OVERLAPPED))
TRAINING_LOG = Symbol(
    _TRAINING, "training_log", ("loss_dict", "iteration", "grad_norm"), purposes=(*_REPORTED, *_OVERLAPPED)
)
SAVE_AND_TIME = Symbol(_TRAINING, "save_checkpoint_and_time", ("iteration",), purposes=(*_REPORTED, *_OVERLAPPED))

COUNT_PACKED_TOKENS = Symbol(
    _TRAINING, "update_seqlen_stats_from_cu_seqlens", ("cu_seqlens",), by_name=True, purposes=_LOGGED
)
REPORT_MEMORY = Symbol(
    _TRAINING, "report_theoretical_memory", ("args", "num_microbatches", "verbose"), purposes=_LOGGED
)
EVALUATE = Symbol(_TRAINING, "evaluate_and_print_results", ("prefix", "iteration"), purposes=_OVERLAPPED)
STOP_GATHERING = Symbol(_TRAINING, "disable_forward_pre_hook", ("model_chunks",), purposes=_OVERLAPPED)
DECIDE_EXIT = Symbol(_TRAINING, "checkpoint_and_decide_exit", ("optimizer", "iteration"), purposes=_OVERLAPPED)
SIGNALS = Symbol(
    "megatron.training.dist_signal_handler",
    "DistributedSignalHandler.signals_received",
    ("self",),
    purposes=_OVERLAPPED,
)
ALL_OF_PIPELINE = Symbol(_TRAINING, "logical_and_across_model_parallel_group", ("input", "group"), purposes=_OVERLAPPED)
MOST_OF_PIPELINE = Symbol(
    _TRAINING, "reduce_max_stat_across_model_parallel_group", ("stat", "group"), purposes=_OVERLAPPED
)
_BUCKET_GROUP = "megatron.core.distributed.param_and_grad_buffer"
GRADIENT_IS_READY = Symbol(
    _BUCKET_GROUP,
    "_ParamAndGradBucketGroup.register_grad_ready",
    ("self", "param", "force_all_reduce"),
    purposes=_REDUCED,
)
CHECK_GRADIENTS = Symbol(
    _BUCKET_GROUP,
    "_ParamAndGradBucketGroup.check_grads",
    ("self", "check_for_nan_or_inf", "check_for_large"),
    purposes=_REDUCED,
)
ZERO_GRAD_BUFFER = Symbol(_DDP, "DistributedDataParallel.zero_grad_buffer", ("self",), purposes=_OVERLAPPED)

# Where models and their layers begin to draw random numbers.
MODEL_INITS = tuple(
    Symbol(
        models.module,
        f"{models.name}.__init__",
        ("self", "config"),
        purposes=(*_LAYERWISE, "`place_model_chunks()`"),
        of=models,
    )
    for models in (GPT_MODELS, HYBRID_MODELS)
)
EMBEDDING = Symbol(
    "megatron.core.models.common.embeddings.language_model_embedding",
    "LanguageModelEmbedding.__init__",
    ("self",),
    purposes=_LAYERWISE,
)
BUILD_LAYER = Symbol(
    "megatron.core.transformer.transformer_block", "build_module", ("args", "kwargs"), purposes=_LAYERWISE
)
BUILD_HYBRID_LAYER = Symbol(
    "megatron.core.models.hybrid.hybrid_block",
    "build_module",
    ("args", "kwargs"),
    purposes=_LAYERWISE,
    of=HYBRID_MODELS,
)
BUILD_MTP_LAYER = Symbol(
    "megatron.core.transformer.multi_token_prediction", "build_module", ("args", "kwargs"), purposes=_LAYERWISE
)
EXPERTS = Symbol(
    "megatron.core.transformer.moe.experts",
    "SequentialMLP.__init__",
    ("self", "num_local_experts", "config", "submodules"),
    purposes=_LAYERWISE,
)
MLP = Symbol("megatron.core.transformer.mlp", "MLP.__init__", ("self", "config", "is_expert"), purposes=_LAYERWISE)

REPLACED = tuple(
    symbol
    for value in list(vars().values())
    for symbol in (value if isinstance(value, tuple) else [value])
    if isinstance(symbol, Symbol) and symbol.purposes
)
"""All functions that this package may replace."""

USED = (
    FORWARD_STEP,
    BACKWARD_STEP,
    Symbol(_SCHEDULES, "deallocate_output_tensor", ("out",)),
    Symbol(_SCHEDULES, "check_first_val_step", ("first_val_step", "forward_only")),
    Symbol(_SCHEDULES, "get_tensor_shapes", ("seq_length", "micro_batch_size", "config")),
    Symbol(_SCHEDULES, "forward_step_calc_loss", ("model", "output_tensor", "loss_func", "config", "vp_stage")),
    Symbol(_DDP, "DistributedDataParallel._make_backward_post_hook", ("param",)),
    Symbol(_RANDOM, "_fork_rng"),
    Symbol(
        "megatron.core.transformer.multi_token_prediction",
        "MTPLossLoggingHelper.save_metrics_to_tracker",
        ("loss", "correct", "total", "layer_number", "num_layers", "reduce_group", "avg_group"),
    ),
    Symbol("megatron.core.transformer.moe.moe_logging", "get_moe_metrics_tracker"),
    Symbol(_EXPERTS, "MoELayer.dispatch", ("hidden_states", "probs")),
    Symbol(_EXPERTS, "MoELayer.routed_experts_compute", ("hidden_states", "probs")),
    Symbol(_EXPERTS, "MoELayer.combine", ("output",)),
    Symbol(_EXPERTS, "MoELayer.postprocess", ("output", "shared_expert_output")),
    Symbol(
        "megatron.core.transformer.moe.token_dispatcher",
        "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
        ("point", "tokens_per_expert"),
    ),
    Symbol("megatron.core.transformer.mlp", "MLP.forward", ("hidden_states", "per_token_scale")),
    Symbol("megatron.core.transformer.moe.moe_utils", "get_capacity", ("num_tokens", "num_experts", "capacity_factor")),
    Symbol("megatron.core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler.set_loss_scale", ("scale",)),
    Symbol(_OPTIMIZERS, "Float16OptimizerWithFloat16Params._copy_main_params_to_model_params"),
    Symbol(_DISTRIBUTED, "DistributedOptimizer._copy_main_params_to_model_params"),
    Symbol(_BUCKET_GROUP, "_ParamAndGradBucketGroup.start_param_sync", ("force_sync",)),
    Symbol(_BUCKET_GROUP, "_ParamAndGradBucketGroup.start_grad_sync", ("force_all_reduce",)),
    Symbol(_DDP, "DistributedDataParallel.start_param_sync", ("force_sync",)),
    Symbol("megatron.core.optimizer.clip_grads", "multi_tensor_applier"),
    Symbol("megatron.core.optimizer.clip_grads", "l2_norm_impl"),
    Symbol(_OPTIMIZERS, "ChainedOptimizer.grads_states_parallel_group_is_shared", ("self",)),
    Symbol(_OPTIMIZERS, "MegatronOptimizer.get_grads_for_grad_norm", ("self",)),
    Symbol("megatron.core.utils", "prepare_input_tensors_for_wgrad_compute", ("grad_output", "all_gathered_input")),
    Symbol("megatron.core.utils", "get_tensor_model_parallel_group_if_none", ("tp_group",)),
)
"""Functions that steps call. If one of them changed, a step would fail in the middle."""
