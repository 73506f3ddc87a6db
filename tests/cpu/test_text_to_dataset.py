"""Any folder of text becomes byte-level training data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
from text_to_dataset import DatasetError, find_documents, split

TOOL = REPOSITORY / "scripts" / "text_to_dataset.py"
Tool = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tool(environment: dict[str, str]) -> Tool:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOL), *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def write(folder: Path, **texts: str) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return sorted(folder.glob("*.txt"))


def test_documents_come_back_byte_for_byte(
    script: Callable[..., object], lane: Callable[[str], object], tmp_path: Path
) -> None:
    texts = {"a": "first", "b": "zweiter Text: äöü €", "c": "line\nline\x00\n", "d": "last"}
    write(tmp_path / "text", **texts)
    printed = script(TOOL, tmp_path / "text", tmp_path / "new" / "data", "--valid-fraction", 0.25)
    documents = lane(f"""
from megatron.core.datasets.indexed_dataset import IndexedDataset
prefix = {str(tmp_path / "new" / "data")!r}
result = {{part: [document.tolist() for document in IndexedDataset(prefix + part)] for part in ("_train", "_valid")}}
""")
    encoded = {name: [*text.encode(), 256] for name, text in texts.items()}
    assert documents == {"_train": [encoded["a"], encoded["b"], encoded["c"]], "_valid": [encoded["d"]]}
    assert f"3 documents, {sum(map(len, documents['_train']))} tokens" in printed


def test_nothing_is_held_back_at_fraction_zero(script: Callable[..., object], tmp_path: Path) -> None:
    write(tmp_path / "text", only="text")
    script(TOOL, tmp_path / "text", tmp_path / "data", "--valid-fraction", 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data_train.bin", "data_train.idx", "text"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["text", "--glob", "*.rst"], "no non-empty file that matches *.rst; give another --glob"),
        (["text", "--valid-fraction", "1.5"], "--valid-fraction 1.5 is out of range; give a number from 0 to below 1"),
        (["text", "--valid-fraction", "0.1"], "give more documents, or a fraction of at least 0.5"),
    ],
)
def test_refuses_in_one_sentence(tool: Tool, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    write(tmp_path / "text", a="text", b="text", empty="")
    result = tool(tmp_path / arguments[0], tmp_path / "data", *arguments[1:])
    assert result.returncode == 2
    assert sentence in result.stderr and result.stderr.count("\n") == 1
    assert not list(tmp_path.glob("data*"))


def test_finds_files_in_subfolders_once_and_in_order(tmp_path: Path) -> None:
    write(tmp_path, b="x", a="x")
    nested = write(tmp_path / "deeper", c="x")
    assert find_documents(tmp_path, ["*.txt", "a.*"]) == [tmp_path / "a.txt", tmp_path / "b.txt", *nested]


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("count", [100, 101, 677])
def test_split_keeps_every_document_and_the_fraction(count: int, fraction: float) -> None:
    documents = [Path(str(number)) for number in range(count)]
    train, valid = split(documents, fraction)
    assert sorted(train + valid, key=documents.index) == documents
    assert abs(len(valid) - count * fraction) < 1


def test_split_refuses_an_empty_part() -> None:
    with pytest.raises(DatasetError):
        split([Path("a")], 0.5)
