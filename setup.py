"""Packaging. Tool settings are in pyproject.toml, pinned versions for development in requirements.txt."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megatron-pipemem",
    version="0.1.0",
    description="Pipeline schedules with controllable memory for stock Megatron-Core",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_pipemem", "megatron_pipemem.*"]),
    package_data={"megatron_pipemem.report": ["page.*"], "megatron_pipemem.config": ["*/*.yaml"]},
    install_requires=["matplotlib>=3.8", "numpy>=1.26", "pyyaml>=6", "rich>=13", "typer>=0.12"],
    extras_require={
        "megatron": ["torch>=2.6", "megatron-core[training]>=0.19,<0.21", "psutil>=5.9"],
        "gpu": ["transformer-engine[pytorch]>=2.8"],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.7", "mkdocstrings[python]>=1.0"],
        "test": [
            "hypothesis>=6.100",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
            "selenium>=4.20",
        ],
    },
    entry_points={"console_scripts": ["pipemem=megatron_pipemem.cli.app:main"]},
)
