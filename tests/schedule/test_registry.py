"""The schedule table: look-up, options, refusals, and families of other people."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
from refusals import refused

from megatron_pipemem.errors import UnknownScheduleError, UnsupportedError
from megatron_pipemem.schedule import registry
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import (
    Family,
    build_schedule,
    families,
    family,
    register_module,
    register_schedule,
)
from megatron_pipemem.schedule.simulator import simulate


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    families()
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))


def renamed(name: str, **changes: object) -> Family:
    return replace(family("1f1b"), name=name, **changes)


def install(folder: Path, name: str, module: str, target: str = "FAMILY", entry: str = "mine") -> None:
    """A package with one entry point, as pip leaves it behind."""
    (folder / f"{name}.py").write_text(textwrap.dedent(module))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[megatron_pipemem.schedules]\n{entry} = {name}:{target}\n")


@pytest.mark.parametrize(
    ("asked", "suggested"),
    [
        ("v-haf", "v-half"),
        ("v_min", "v-min"),
        ("1f1", "1f1b"),
    ],
)
def test_unknown_names_suggest_the_nearest(asked: str, suggested: str) -> None:
    with refused("unknown-schedule", suggested, kind=UnknownScheduleError) as raised:
        build_schedule(asked, num_devices=4, num_microbatches=8)
    assert str(raised.value).startswith(f"unknown schedule '{asked}'; ")
    assert re.search(r"lists all (\d+)", str(raised.value))[1] == str(len(families()))


@pytest.mark.parametrize("count", [0, -1, 1.5, "4", None, True])
@pytest.mark.parametrize("what", ["num_devices", "num_microbatches"])
def test_counts_must_be_whole_and_positive(what: str, count: object) -> None:
    counts = {"num_devices": 4, "num_microbatches": 8, what: count}
    with refused("bad-number", what, 1, count, kind=UnsupportedError):
        build_schedule("1f1b", **counts)


@pytest.mark.parametrize(
    ("name", "option", "told"),
    [
        ("1f1b", {"colour": "red"}, ("unknown-option", "colour", "none")),
        ("interleaved", {"colour": "red"}, ("unknown-option", "colour", "chunks, group_size, slices")),
        ("v-half", {"chunks": 4}, ("needs-chunks", 2, 4)),
    ],
)
def test_options_that_a_family_lacks_name_what_it_has(name: str, option: dict[str, object], told: tuple) -> None:
    with refused(*told, name, kind=UnsupportedError):
        build_schedule(name, num_devices=4, num_microbatches=8, **option)


@pytest.mark.parametrize("name", [family.name for family in families() if "memory_cap" not in family.options])
def test_a_cap_at_the_peak_is_met_and_below_it_refused(name: str) -> None:
    size = {"num_devices": 4, "num_microbatches": 8}
    peak = simulate(build_schedule(name, **size)).peak
    build_schedule(name, **size, memory_cap=peak)
    with refused("over-cap", name, f"{peak:.4g}", *size.values(), kind=UnsupportedError):
        build_schedule(name, **size, memory_cap=peak - 0.01)


def test_cap_and_costs_reach_the_families_that_list_them() -> None:
    received = {}

    def build(p: int, m: int, **arguments: object):
        received.update(arguments)
        return family("gpipe").build(p, m)

    register_schedule(renamed("mine", build=build, options={"memory_cap": "the cap", "costs": "the costs"}))
    arguments = {"num_devices": 2, "num_microbatches": 2, "memory_cap": 1.5, "costs": Costs(p2p=1)}
    build_schedule("mine", **arguments)
    assert received == {"memory_cap": 1.5, "costs": Costs(p2p=1)}
    received.clear()
    build_schedule("mine", num_devices=2, num_microbatches=2)
    assert received == {}
    assert build_schedule("1f1b", **arguments) == build_schedule("1f1b", num_devices=2, num_microbatches=2)


@pytest.mark.parametrize(
    ("name", "options", "chunks"),
    [
        ("1f1b", {}, 1),
        ("v-half", {}, 2),
        ("interleaved", {}, 2),
        ("gis", {"chunks": 3}, 3),
        ("hanayo", {}, 4),
        ("hanayo", {"waves": 3}, 6),
    ],
)
def test_chunks_per_device(name: str, options: dict[str, object], chunks: int) -> None:
    assert family(name).chunks_per_device(options) == chunks


def test_users_register_families() -> None:
    mine = renamed(
        "mine", options={"depth": "how deep"}, build=lambda p, m, depth=1: family("gpipe").build(p, m * depth)
    )
    assert register_schedule(mine) is mine
    assert family("mine") is mine
    assert families()[-1] is mine
    assert build_schedule("mine", num_devices=2, num_microbatches=3, depth=2).num_microbatches == 6


def test_a_name_is_registered_once_unless_replaced() -> None:
    with refused("exists-already", "1f1b", kind=UnsupportedError):
        register_schedule(renamed("1f1b"))
    better = renamed("1f1b", summary="better")
    register_schedule(better, replace=True)
    assert family("1f1b") is better


def test_installed_packages_add_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = """
        from dataclasses import replace
        from megatron_pipemem.schedule.registry import family
        FAMILY = replace(family("1f1b"), name="mine", summary="installed")
    """
    install(tmp_path, "pipemem_good_plugin", module)
    monkeypatch.syspath_prepend(tmp_path)
    assert "pipemem_good_plugin" not in sys.modules
    assert families()[-1].summary == "installed"
    assert build_schedule("mine", num_devices=2, num_microbatches=3).num_microbatches == 3
    with refused("unknown-schedule", "mine", kind=UnknownScheduleError):
        family("mime")


def test_a_broken_package_is_named_and_hurts_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "pipemem_broken_plugin", "import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    assert build_schedule("v-half", num_devices=2, num_microbatches=2).num_devices == 2
    for ask in (families, lambda: family("mine")):
        with refused(
            "cannot-import", "mine", "pipemem_broken_plugin", "a_module_that_is_not_there", kind=UnsupportedError
        ):
            ask()


REGISTERING = """
    from megatron_pipemem import Family, register_schedule
    from megatron_pipemem.families.one_f_one_b import gpipe
    FAMILY = register_schedule(
        Family(name="mine", build=gpipe, summary="registers itself", peak="m/p", bubble="(p-1)(F+B)", source="a test")
    )
"""


@pytest.mark.parametrize("ask", [families, lambda: [family("mine")]])
def test_an_installed_package_may_register_its_family_itself(ask, tmp_path: Path, monkeypatch) -> None:
    name = f"pipemem_registering_plugin_{ask.__name__.strip('<>')}"
    install(tmp_path, name, REGISTERING)
    monkeypatch.syspath_prepend(tmp_path)
    assert ask()[-1].summary == "registers itself"
    assert family("mine") is sys.modules[name].FAMILY


def test_a_peak_and_a_bubble_that_nobody_declares_are_measured() -> None:
    plain = Family("mine", family("gpipe").build, "three lines are enough")
    p, m = plain.example.num_devices, plain.example.num_microbatches
    assert plain.peak.startswith(f"{m / p:.4g} (p={p}, m={m}")
    assert plain.bubble.startswith(f"{3 * (p - 1)} (p={p}, m={m}")
    plain.check()
    assert replace(plain, peak="7").peak == "7"


@pytest.mark.parametrize(
    ("build", "declared", "derived"),
    [
        ("zb-h1", {"splits_backward": False}, "splits_backward=True"),
        ("1f1b", {"splits_backward": True}, "splits_backward=False"),
        ("zbv", {"placement": "linear"}, "placement='v'"),
        ("zbv", {"chunks": 1}, "chunks=2"),
        ("po-h", {"offloads": False}, "offloads=True"),
        ("gems", {"replicas": 1}, "replicas=2"),
        ("pipedream", {"asynchronous": False}, "asynchronous=True"),
        ("slimpipe", {"slices": 1}, "slices=4"),
    ],
)
def test_what_is_declared_must_be_true(build: str, declared: dict[str, object], derived: str) -> None:
    mine = Family("mine", lambda p, m: family(build).schedule(p, m, {}), "claims", "1", "0", "a test", **declared)
    ((name, value),) = declared.items()
    with refused("family-declaration", "mine", f"{name}={value!r}", 4, 8, derived, kind=UnsupportedError):
        register_schedule(mine)
    with pytest.raises(UnknownScheduleError):
        family("mine")


@pytest.mark.parametrize("built_in", families(), ids=lambda family: family.name)
def test_the_built_in_families_are_what_they_declare(built_in: Family) -> None:
    built_in.check()


@pytest.mark.parametrize(
    ("build", "what"), [(lambda p, m: None, "it returns None"), (lambda p: p, "takes 1 positional argument")]
)
def test_a_family_that_builds_nothing_is_refused(build, what: str) -> None:
    with refused("family-build-failed", "mine", 4, 8, what, kind=UnsupportedError):
        register_schedule(Family("mine", build, "nothing", "1", "0", "a test"))


@pytest.mark.parametrize("how", ["a file", "a module"])
@pytest.mark.parametrize("form", ["FAMILY = (", "FAMILY = register_schedule(", "register_schedule("])
def test_a_module_adds_the_families_that_it_registers_or_names(how: str, form: str, tmp_path, monkeypatch) -> None:
    stem = f"pipemem_module_{crc32((how + form).encode())}"
    path = tmp_path / f"{stem}.py"
    path.write_text(textwrap.dedent(REGISTERING).replace("FAMILY = register_schedule(", form))
    monkeypatch.syspath_prepend(tmp_path)
    target = str(path) if how == "a file" else stem
    (added,) = register_module(target)
    assert added is family("mine") and register_module(target) == (added,)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, ("cannot-import",)),
        ("1/0", ("cannot-import",)),
        ("x = 1", ("cannot-import", "register_schedule")),
        (REGISTERING.replace("mine", "1f1b"), ("exists-already", "odd.py", "1f1b")),
    ],
)
def test_a_module_without_a_family_is_refused_in_one_sentence(text: str | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    if text is not None:
        path.write_text(textwrap.dedent(text))
    with refused(*told, kind=UnsupportedError):
        register_module(str(path))
    with refused("cannot-import", "no.such.module", kind=UnsupportedError):
        register_module("no.such.module")


def test_no_family_is_imported_or_built_before_somebody_asks() -> None:
    """But for a file that is added and registers its family itself, which builds it."""
    code = """
import sys
from importlib import import_module
from pkgutil import iter_modules
import megatron_pipemem, megatron_pipemem.tools.cli.app
from megatron_pipemem.schedule import registry
from megatron_pipemem import families
assert not [name for name in sys.modules if name.startswith("megatron_pipemem.families.v_shape")]
names = [family.name for family in registry.families()]
assert names[:2] == ["gpipe", "1f1b"]
modules = [import_module(f"{families.__name__}.{module.name}") for module in iter_modules(families.__path__)]
ours = [family for module in modules for family in registry.families_of(module)]
assert names[:len(ours)] == [*families.ORDER] and {family.name for family in ours} == {*families.ORDER}
assert len(ours) > 20 and not [family for family in ours if "example" in family.__dict__]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("module", "target"),
    [("FAMILY = 3", "3"), ("from megatron_pipemem.families.one_f_one_b import gpipe as FAMILY", "gpipe")],
)
def test_an_entry_point_must_lead_to_its_family(
    module: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"pipemem_odd_plugin_{target}"
    install(tmp_path, name, module)
    monkeypatch.syspath_prepend(tmp_path)
    with refused("family-declaration", "mine", target, kind=UnsupportedError):
        family("mine")
