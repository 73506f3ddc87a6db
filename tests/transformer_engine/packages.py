"""Packages that some tests need, each in a folder of its own beside the virtual environment's packages.

They are Transformer Engine's Python in several versions, and programs that train with Megatron. No package is imported here,
and none of its dependencies is installed: the CPU lane needs none of their compiled parts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VERSIONS = ("2.8.0", "2.14.0", "2.20.2")
NEWEST = VERSIONS[-1]
# What Transformer Engine imports and Megatron-Core does not bring.
NEEDS = ("onnxscript==0.7.2", "onnx==1.23.2", "onnx_ir==1.1.0", "ml_dtypes==0.6.0", "einops==0.8.2")
CONSUMERS = ("mbridge==0.15.1", "megatron-bridge==0.6.2")
"""Programs that build and train models of Megatron-Core."""
VERL = (
    "verl==0.9.1",
    "tensordict==0.15.3",
    "codetiming==1.4.0",
    "pyvers==0.2.3",
    "cloudpickle==3.1.3",
    "orjson==3.13.0",
    "importlib_metadata==10.2.0",
    "zipp==4.1.2",
)
"""verl, and what its training worker imports and uses."""

_ROOT = Path(sys.prefix) / "transformer_engine"
_UNREACHABLE = ("Retrying", "NewConnectionError", "ConnectTimeoutError", "Temporary failure in name resolution")


def folders(version: str) -> list[str]:
    """Where a version, what it imports and ``te_stand_in`` lie, for the module search path; they are installed if need be.

    Skips the test if the package index cannot be reached.
    """
    return [_installed(f"transformer_engine=={version}"), _installed(*NEEDS), str(Path(__file__).parent)]


FLASH_ATTENTION = str(Path(__file__).with_name("flash"))
"""Where the stand-in of flash-attn lies, for the module search path."""

MAMBA = str(Path(__file__).parents[1] / "mamba")
"""Where the stand-ins of ``mamba_ssm``, ``causal_conv1d`` and ``fla`` lie."""


def consumers() -> list[str]:
    """Where the programs that train with Megatron lie, and Transformer Engine, of which they take the layers.

    Skips the test if the package index cannot be reached.
    """
    return [*(_installed(consumer) for consumer in CONSUMERS), *folders(NEWEST)]


def verl() -> list[str]:
    """Where verl lies, with the packages of ``consumers``, and flash-attn's stand-in, which runs packed sequences."""
    return [_installed(*VERL), FLASH_ATTENTION, *consumers()]


def environment(version: str) -> dict[str, str]:
    """Of a process that can import this version, and the stand-in of flash-attn."""
    path = [*folders(version), FLASH_ATTENTION, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONWARNINGS": "ignore"}


def _installed(*requirements: str) -> str:
    folder = _ROOT / "-".join(requirements).replace("==", "-")
    if folder.exists():
        return str(folder)
    half = folder.with_name(f"{folder.name}.{os.getpid()}")
    options = "--disable-pip-version-check --no-deps --no-compile --only-binary :all: --retries 1 --timeout 30".split()
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(half), *requirements],
        capture_output=True,
        text=True,
        check=False,
    )
    if pip.returncode:
        shutil.rmtree(half, ignore_errors=True)
        said = pip.stdout + pip.stderr
        if any(sign in said for sign in _UNREACHABLE):
            pytest.skip(f"the package index cannot be reached for {' '.join(requirements)}")
        pytest.fail(f"pip could not install {' '.join(requirements)}:\n{said}")
    try:
        half.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(half)
    return str(folder)
