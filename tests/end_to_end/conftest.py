"""What the end-to-end tests share: rank processes that live as long as the session, and runs that are made once."""

from __future__ import annotations

import asyncio
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import getdoc
from itertools import count
from pathlib import Path

import packages
import pytest
import torch
from ranks import ConductedRanks, Ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
pytest.register_assert_rewrite("comparing")
from comparing import (  # noqa: E402
    assert_close_gradients,
    assert_close_training,
    assert_predicted_bytes,
    assert_same_training,
)
from model_flags import as_hybrid  # noqa: E402
from text_to_dataset import find_documents, write_dataset  # noqa: E402

# A GPT small enough that a step takes tenths of a second. Dropout is off because its random numbers depend on the placement.
# Gradients are never clipped, because the norm's last bits do too and would reach the weights.
MODEL = """
--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --vocab-size 1000
--attention-dropout 0 --hidden-dropout 0 --transformer-impl local --distributed-backend gloo --no-persist-layer-norm
--no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion --seed 1234
--tokenizer-type NullTokenizer --num-workers 0 --lr 1e-3 --lr-decay-style constant --log-interval 1
--clip-grad 1000 --micro-batch-size 1 --eval-iters 0 --eval-interval 100
""".split()
DEFAULTS = {
    "--pipeline-model-parallel-size": "4",
    "--global-batch-size": "6",
    "--train-iters": "2",  # a wrong gradient shows in the second loss
    "--no-gradient-accumulation-fusion": None,
    "--no-rope-fusion": None,
    "--split": "80,10,10",
}
# Of a run that shows a feature or a flag: with two chunks per rank, it has stages between the ends, too.
SMALL = {"--pipeline-model-parallel-size": "2", "--num-layers": "4", "--global-batch-size": "4"}
TWO_RANKS_A_STAGE = {
    *(f"--{name}-parallel-size" for name in ("tensor-model", "expert-model", "context")),
    "--use-distributed-optimizer",
}


@dataclass(frozen=True)
class Run:
    """What a training run showed. Runs are equal if everything that does not depend on the clock or the placement is."""

    # Of every iteration or evaluation, exact.
    losses: list[float]
    grad_norms: list[float]
    validation: list[dict[str, float]]
    # Bytes per rank; stock predicts ``None``.
    predicted_peaks: list[int | None]
    counted_peaks: list[int]
    # Of every rank: rows of embedding and head, a hash of every chunk's trained weights, layers of Transformer Engine.
    vocabulary_rows: list[list[int]] = field(compare=False)
    weights: list[list[str]] = field(compare=False)
    layers: list[list[str]] = field(compare=False)
    # Whether each step ran by the order for one hardware queue, on every rank of a run as on GPUs.
    single_queues: list[list[bool]] = field(compare=False)
    # Tokens, and squares of the lengths, of every step's packed documents, on every rank.
    packed: list[list[tuple[float, float]]] = field(compare=False)
    # Of CUDA graphs, on every rank.
    replays: list[int] = field(compare=False)
    # Of the report.
    plans: list[dict] = field(compare=False)
    ranks: list[dict] = field(compare=False)
    last_step: dict | None = field(compare=False)
    bytes_of_1f1b: int | None = field(compare=False)
    # Names, iterations and values of what went to TensorBoard.
    scalars: list[tuple[str, int, float]] = field(compare=False)
    # Whole gradients of the first step, if they were asked for, by the parameter's name in checkpoints and its layer.
    gradients: dict[tuple, torch.Tensor] | None = field(compare=False)

    def of_ranks(self, what: str) -> list:
        return [rank[what] for rank in self.ranks]


@dataclass
class Trainer:
    """Trains a GPT on the text that ``--data-path`` names; equal requests are served from memory."""

    ranks: Ranks | ConductedRanks
    folder: Path
    text: Path
    defaults: dict[str, str | None] = field(default_factory=lambda: DEFAULTS)
    _runs: dict[tuple, Run] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def __call__(
        self,
        schedule: str,
        *flags: str,
        ranks: int | None = None,
        gradients: bool = False,
        model: str = "gpt",
        **how: object,
    ) -> Run:
        """Return a run of two steps on all ranks, with the ``defaults`` unless ``flags`` say otherwise.

        ``+`` in front of a default flag takes it away. Fewer ``ranks`` leave the others idle. ``gradients`` notes those of the
        first step, for runs without data parallelism. With ``model="hybrid"``, the HybridModel with the layers of that GPT
        is trained. ``training.run`` says ``how`` else a run can be.
        """
        flags = as_hybrid(flags, int(self.defaults.get("--num-layers", 8))) if model == "hybrid" else flags
        size = ranks or self.ranks.size
        key = (schedule, flags, size, gradients, *sorted(how.items()))
        if key not in self._runs:
            self._runs[key] = self._train(schedule, flags, size, gradients, how)
        return self._runs[key]

    def _train(self, schedule: str, flags: tuple[str, ...], ranks: int, gradients: bool, how: dict) -> Run:
        given = [flag for flag in flags if not flag.startswith("+")]
        without = {*given, *(flag.removeprefix("+") for flag in flags if flag.startswith("+"))}
        defaults = [
            part
            for flag, value in self.defaults.items()
            if flag not in without
            for part in (flag, value)
            if part is not None
        ]
        number = next(self._numbers)  # a case that fails leaves files, which the next one must not find
        path = self.folder / f"report{number}.json"
        noted = self.folder / f"gradients{number}"
        if gradients:
            noted.mkdir()
            how = {**how, "gradients": str(noted)}
        # Not ``--mock-data``: every run would shuffle its millions of samples, which takes longer than to train.
        data = ["--data-path", str(self.text), "--data-cache-path", str(self.text.parent / "cache")]
        words = [*MODEL, *data, *defaults, *given, "--pipemem-schedule", schedule]
        seen = self.ranks.run({"flags": words, "report": str(path), "ranks": ranks, **how})
        for rank, result in enumerate(seen):
            assert result["replaced"] == [], f"rank {rank} still has replaced symbols after disable()"
        report = seen[0]["report"] or {"losses": [], "grad_norms": [], "plans": [], "ranks": []}
        of_every_rank = ("vocabulary_rows", "weights", "layers", "single_queues", "packed", "replays")
        return Run(
            validation=next((r["validation"] for r in reversed(seen) if any(r["validation"])), []),
            predicted_peaks=[rank["predicted_peak_bytes"] for rank in report["ranks"]],
            counted_peaks=[rank["counted_peak_bytes"] for rank in report["ranks"]],
            **{name: report[name] for name in ("losses", "grad_norms", "plans", "ranks")},
            **{name: report.get(name) for name in ("last_step", "bytes_of_1f1b")},
            **{name: [rank[name] for rank in seen] for name in of_every_rank},
            scalars=seen[-1]["scalars"],
            gradients=_whole_gradients(noted) if gradients else None,
        )


def _whole_gradients(folder: Path) -> dict[tuple, torch.Tensor]:
    """Every rank's parts in their places; NaN where no rank has any."""
    whole: dict[tuple, torch.Tensor] = {}
    for part in sorted(folder.iterdir()):
        for name, shape, place, gradient in torch.load(part, weights_only=False):
            whole.setdefault(name, torch.full(shape, torch.nan))[place] = gradient
        part.unlink()
    return whole


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A data set of 257 tokens: the bytes of asyncio's sources."""
    path = tmp_path_factory.mktemp("text") / "asyncio"
    write_dataset(find_documents(Path(sysconfig.get_path("stdlib")) / path.name, ["*.py"]), path)
    return path


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Lines of asyncio's docstrings. Their lengths divide by 4, so that two context-parallel ranks need no padding."""
    lines = [line for value in vars(asyncio).values() for line in (getdoc(value) or "").split("\n")]
    return [line[: len(line) // 4 * 4] for line in lines if len(line) > 5]


@pytest.fixture(scope="session")
def packed(tmp_path_factory, documents) -> tuple[str, ...]:
    """Flags of Megatron's SFT data: every sample packs one to four documents, of which a token is a byte."""
    # Imported here, because every worker imports this file, and transformers takes seconds.
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("conversations")
    letters = ["<unk>", "</s>", *sorted(ByteLevel.alphabet())]
    bytes_alone = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, [], unk_token="<unk>"))
    bytes_alone.pre_tokenizer = ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(folder)
    samples = [documents[first : first + 1 + first % 4] for first in range(100)]
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps({"messages": [_turn(text) for text in sample]}) for sample in samples))
    return (
        *("--sft", "--data-path", str(data), "--no-create-attention-mask-in-dataloader"),
        *("--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(folder)),
        *("--sft-tokenizer-prompt-format", "identity", "--eval-iters", "1"),
    )


def _turn(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}  # which begins a conversation


@pytest.fixture(scope="session")
def train(tmp_path_factory, text) -> Iterator[Trainer]:
    folder = tmp_path_factory.mktemp("training")
    ranks = Ranks("training", folder)
    yield Trainer(ranks, folder, text)
    ranks.stop()


@pytest.fixture(scope="session")
def train_small(train, tmp_path_factory, text) -> Iterator[Callable[..., Run]]:
    """``train`` four layers with four microbatches on a pipeline of two ranks.

    Stages have two ranks each if a flag shares their work or their optimizer, or with ``ranks=4``.
    """
    folders = [tmp_path_factory.mktemp("small") for _ in range(2)]
    two = Trainer(Ranks("training", folders[0], size=2), folders[0], text, DEFAULTS | SMALL)
    four = Trainer(train.ranks, folders[1], text, DEFAULTS | SMALL)

    def run(schedule: str, *flags: str, ranks: int | None = None, **how: object) -> Run:
        size = ranks or (4 if TWO_RANKS_A_STAGE & {*flags} else 2)
        return (two if size == 2 else four)(schedule, *flags, ranks=size, **how)

    yield run
    two.ranks.stop()


@pytest.fixture(scope="session")
def train_with_transformer_engine(tmp_path_factory, text) -> Iterator[Callable[..., Run]]:
    """``train`` a GPT of Transformer Engine's layers, of the newest ``version`` and on four ranks unless they are given.

    There are ranks of one version and number at a time: ask for everything of these before you ask for others. They also find
    ``mamba_ssm`` as ``tests/mamba`` computes it.
    """
    trainers: dict[tuple[str, int], Trainer] = {}
    layers = ("--transformer-impl", "transformer_engine")

    def stop() -> None:
        for kind in list(trainers):
            trainers.pop(kind).ranks.stop()

    def call(schedule: str, *flags: str, version: str = packages.NEWEST, size: int = 4, **how) -> Run:
        if (version, size) not in trainers:
            stop()
            folder = tmp_path_factory.mktemp("transformer_engine")
            path = [*packages.folders(version), packages.FLASH_ATTENTION, packages.MAMBA]
            ranks = ConductedRanks("training", folder, path, size)
            trainers[version, size] = Trainer(ranks, folder, text)
        backend = () if "--attention-backend" in flags else ("--attention-backend", "unfused")
        return trainers[version, size](schedule, *layers, *backend, *flags, **how)

    yield call
    stop()


@pytest.fixture(scope="session")
def ranks_without_training(tmp_path_factory) -> Iterator[ConductedRanks]:
    """Ranks of ``plain_loop``, in which nothing has imported ``megatron.training``."""
    ranks = ConductedRanks("plain_loop", tmp_path_factory.mktemp("plain_loop"), [], preload=["plain_loop"])
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def emulate(tmp_path_factory, text) -> Iterator[Callable[..., Run]]:
    """``emulate(rule, *flags, stages=2, replicas=1)``: a small run as ``scripts/emulate.py`` predicts it, on one rank."""
    folder = tmp_path_factory.mktemp("emulation")
    ranks = Ranks("training", folder, size=1)
    trainer = Trainer(ranks, folder, text, DEFAULTS | SMALL | {"--pipeline-model-parallel-size": "1"})

    def run(rule: str, *flags: str, stages: int = 2, replicas: int = 1, **how) -> Run:
        return trainer("stock", *flags, emulate=(rule, stages, replicas), **how)

    yield run
    ranks.stop()


@pytest.fixture(scope="session")
def equals_stock(train_small) -> Callable[..., tuple[Run, Run]]:
    """``equals_stock(schedule, *flags, ours=...)``: a run that trains as stock's run with ``flags`` does, and stock's.

    Args:
        ours: flags of the plugin.
        close: whether the run adds the same numbers in another order (``assert_close_training``).
        nbytes: ``exact``, or ``bounded`` where routing or Megatron's recomputation decides, or ``None``.
        within: the largest relative difference of a parameter's gradient in the first step, which is compared if given.
        train: what trains. Other arguments go to it.
    """

    def check(
        schedule: str,
        *flags: str,
        ours: Sequence[str] = (),
        close: bool = False,
        nbytes: str | None = "exact",
        within: float | None = None,
        train: Callable[..., Run] = train_small,
        **how: object,
    ) -> tuple[Run, Run]:
        how |= {"gradients": True} if within is not None else {}
        run, stock = train(schedule, *flags, *ours, **how), train("stock", *flags, **how)
        (assert_close_training if close else assert_same_training)(run, stock)
        if nbytes is not None:
            assert_predicted_bytes(run, exact=nbytes == "exact")
        if within is not None:
            assert_close_gradients(run, stock, within)
        return run, stock

    return check
