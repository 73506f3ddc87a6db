"""Convert a folder of text files to Megatron's indexed datasets, with one token per byte.

python scripts/text_to_dataset.py FOLDER OUTPUT [--glob '*.py' ...] [--valid-fraction 0.05]

The output is OUTPUT_train.bin/.idx and OUTPUT_valid.bin/.idx. Each file is a document. Its tokens are its bytes (0 to
255) and an end-of-document token (256, the last of the vocabulary, as NullTokenizer expects). Train with:

--tokenizer-type NullTokenizer --vocab-size 257 --train-data-path OUTPUT_train --valid-data-path OUTPUT_valid
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_pipemem.errors import OutputError
from megatron_pipemem.files import whole_file

END_OF_DOCUMENT = 256
DEFAULT_GLOBS = ("*.py", "*.txt", "*.md")


class DatasetError(ValueError):
    """The error for text that cannot become a dataset. The message has the reason and the remedy."""


def find_documents(folder: Path, globs: Sequence[str] = DEFAULT_GLOBS) -> list[Path]:
    """Return the non-empty files in ``folder`` and below that match a glob, in the same order on every machine.

    Raise a DatasetError if there are none, or no such folder.
    """
    if not folder.is_dir():
        raise DatasetError(f"{folder} is not a folder; give one that holds text files")
    paths = {path for pattern in globs for path in folder.rglob(pattern)}
    documents = sorted(path for path in paths if path.is_file() and path.stat().st_size > 0)
    if not documents:
        raise DatasetError(f"{folder} has no non-empty file that matches {' '.join(globs)}; give another --glob")
    return documents


def split(documents: Sequence[Path], valid_fraction: float) -> tuple[list[Path], list[Path]]:
    """Return the training documents and the validation documents.

    Every n-th document is for validation, such that their share is about ``valid_fraction``. Raise a DatasetError for a
    fraction below 0 or from 1 up, and if none is left for validation although the fraction is not 0.
    """
    if not 0 <= valid_fraction < 1:
        raise DatasetError(f"--valid-fraction {valid_fraction} is out of range; give a number from 0 to below 1")
    train: list[Path] = []
    valid: list[Path] = []
    for position, document in enumerate(documents, start=1):
        due = int(position * valid_fraction) > len(valid)
        (valid if due else train).append(document)
    if valid_fraction and not valid:
        raise DatasetError(
            f"--valid-fraction {valid_fraction} of {len(documents)} documents leaves none for validation; "
            f"give more documents, or a fraction of at least {1 / len(documents):.3g}"
        )
    return train, valid


def write_dataset(documents: Sequence[Path], prefix: Path) -> int:
    """Write the documents as a dataset, ``prefix.bin`` and ``prefix.idx``, and return its number of tokens.

    Tokens are unsigned 16-bit numbers, the type that Megatron chooses for a vocabulary of this size.
    """
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    num_tokens = 0
    with whole_file(get_idx_path(str(prefix))) as index, whole_file(get_bin_path(str(prefix))) as text_file:
        builder = IndexedDatasetBuilder(str(text_file), dtype=numpy.uint16)
        for document in documents:
            text = numpy.frombuffer(document.read_bytes(), dtype=numpy.uint8)
            tokens = torch.from_numpy(numpy.append(text.astype(numpy.int32), numpy.int32(END_OF_DOCUMENT)))
            builder.add_document(tokens, [len(tokens)])
            num_tokens += len(tokens)
        builder.finalize(str(index))
    return num_tokens


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with text, searched with all subfolders")
    parser.add_argument("output", type=Path, help="path without extension; _train and _valid are added")
    parser.add_argument("--glob", nargs="+", default=DEFAULT_GLOBS, help="file names to take (default: %(default)s)")
    parser.add_argument("--valid-fraction", type=float, default=0.05, help="share of the files (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        parts = split(find_documents(options.folder, options.glob), options.valid_fraction)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for name, documents in zip(("train", "valid"), parts, strict=True):
            if documents:
                prefix = options.output.with_name(f"{options.output.name}_{name}")
                print(f"{prefix}: {len(documents)} documents, {write_dataset(documents, prefix)} tokens", flush=True)
    except (DatasetError, OutputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
