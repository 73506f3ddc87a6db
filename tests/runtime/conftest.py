from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from streams import Streams


@pytest.fixture(scope="session")
def rank_files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where four gloo ranks, started once, have written the results of all selected cases.

    Those of ``toy.py`` are in ``rank0.json`` to ``rank3.json``, in the order of ``executor_cases``. Those of
    ``vocabulary_model.py`` are in ``rank0.pt`` to ``rank3.pt``, all of them or none.
    """
    folder, of_vocabulary = tmp_path_factory.mktemp("ranks"), Path(__file__).with_name("test_vocabulary_ranks.py")
    asked = executor_cases(request.session)
    if any(item.path == of_vocabulary for item in request.session.items):
        import torch
        from test_vocabulary_ranks import CASES

        torch.save(CASES, folder / "cases.pt")
    (folder / "cases.json").write_text(json.dumps(asked))
    command = [sys.executable, str(Path(__file__).with_name("toy.py")), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def executor_cases(session: pytest.Session) -> list[dict[str, Any]]:
    """Return the cases of ``test_executor.py`` that this run of pytest has selected."""
    return [item.callspec.params["case"] for item in session.items if "seen_by_executor" in item.fixturenames]


@pytest.fixture
def gpu() -> Iterator[Streams]:
    """The stream sanitizer, switched on for the test. The test fails if it has found anything."""
    from streams import Streams

    with Streams() as streams:
        yield streams
    assert not streams.findings
