"""The quick lane is whole: what it lists is there, and no package is without a test."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_pipemem"
LANE = [
    line
    for line in (ROOT / "tests" / "quick.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
# What runs in processes of its own only, and the test that starts them.
STARTED = {
    "features": "tests/end_to_end/test_offload.py",
    "features/slices": "tests/end_to_end/test_slices.py",
    "features/slices/megatron": "tests/end_to_end/test_slices.py",
}
PACKAGES = sorted(
    file.parent
    for file in PACKAGE.rglob("__init__.py")
    if len([*file.parent.glob("*.py")]) > 1 or file.stat().st_size > 500
)


def files(entry: str) -> list[Path]:
    path = ROOT / entry.partition("::")[0]
    return sorted(path.glob("test_*.py")) if path.is_dir() else [path]


def imported(file: Path) -> set[str]:
    """Modules that a test names, in its imports."""
    imports = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            imports |= {str(node.module), *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            imports |= {name.name for name in node.names}
    return imports


def of_tests() -> set[Path]:
    """Return the packages with a module that some test of the lane imports."""
    modules = set().union(*(imported(file) for entry in LANE for file in files(entry)))
    places = [ROOT.joinpath(*module.split(".")) for module in modules if module.startswith(PACKAGE.name)]
    return {place if place.is_dir() else place.parent for place in places if place.is_dir() or _is_module(place)}


def _is_module(place: Path) -> bool:
    return place.with_suffix(".py").is_file()


def test_what_is_listed_exists():
    for entry in LANE:
        path, _, test = entry.partition("::")
        assert (ROOT / path).exists(), entry
        if test:
            functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
            assert test.partition("[")[0] in functions, entry


def test_every_package_is_tested():
    started = {package for package, test in STARTED.items() if any(entry.startswith(f"{test}::") for entry in LANE)}
    left = {package.relative_to(PACKAGE).as_posix() for package in {*PACKAGES} - of_tests()}
    assert left <= started
