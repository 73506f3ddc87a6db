"""``megatron_flags.yaml`` says of each of Megatron's flags what it has to do with schedules: of all of them, and truly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megatron_pipemem import refusals
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.flags import flag_parser
from megatron_pipemem.mcore import refusals as refusals_of_models
from megatron_pipemem.mcore.launch import add_virtual_stages, take_flags
from megatron_pipemem.model import cut_flags, layout
from megatron_pipemem.tools.megatron.known_flags import described, known_flags

ROOT = Path(__file__).parents[2]
TABLE = {
    section: {title: names.split() for title, names in titles.items()}
    for section, titles in yaml.safe_load((Path(__file__).parent / "megatron_flags.yaml").read_text()).items()
}
NOT_EVERYWHERE = {name for names in TABLE.pop("not everywhere").values() for name in names}
LISTED = [name for titles in TABLE.values() for names in titles.values() for name in names]


def mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<!\w)(?<!\w-){re.escape(name)}(?![\w-])", text) is not None


def test_every_flag_of_megatron_stands_in_the_table_once():
    known = {name.lstrip("-") for name in known_flags().keys() - described(flag_parser()).keys()}
    missing, gone = sorted(known - {*LISTED}), sorted({*LISTED} - NOT_EVERYWHERE - known)
    assert not missing, f"what do these have to do with schedules? {missing}"
    assert not gone, f"Megatron has no such flags: {gone}"
    assert len(LISTED) == len({*LISTED}), f"twice: {sorted({name for name in LISTED if LISTED.count(name) > 1})}"
    assert {*LISTED} >= NOT_EVERYWHERE


@pytest.mark.parametrize("section", ["tested", "documented"])
def test_where_a_flag_is_said_to_be_it_is(section):
    for file, names in TABLE[section].items():
        text = (ROOT / file).read_text()
        assert [name for name in names if not mentions(text, f"--{name}")] == [], file


def test_what_is_said_to_be_refused_is_in_a_list_of_refusals():
    tables = [table for table in vars(refusals).values() if isinstance(table, refusals.Refusals)]
    told = [f"{attribute} {sentence}" for table in tables for attribute, sentence in table.sentences.items()]
    told += [table for table in vars(refusals).values() if isinstance(table, str)]
    told += [rule.sentence for rule in vars(refusals).values() if isinstance(rule, refusals.Rule)]
    told += [Path(module.__file__).read_text() for module in (refusals_of_models, cut_flags, layout)]
    for names in TABLE["refused"].values():
        for name in names:
            # Tables know a flag by the attribute that it sets.
            words = (name, name.replace("-", "_"), name.removesuffix("-format").replace("-", "_"))
            assert any(mentions(text, word) for text in told for word in words), name


def test_what_goes_with_no_schedule_is_refused_before_the_model_is_built():
    sizes = ["--pipeline-model-parallel-size", "4", "--num-layers", "24"]
    for name in TABLE["refused"]["with every schedule"]:
        if name.endswith("num-weight-shards"):  # as many as tensor-parallel ranks are fine
            continue
        flag = known_flags().get(f"--{name}")
        if flag is None and name in NOT_EVERYWHERE:
            continue
        value = [] if flag["bare"] else [flag["choices"][-1] if flag["choices"] else "2"]
        settings, others = take_flags([*sizes, f"--{name}", *value, "--pipemem-schedule", "1f1b"])
        with pytest.raises(UnsupportedError) as error:
            add_virtual_stages(settings, others)
        assert f"--{name}" in str(error.value)


def test_flags_stand_beside_known_ones():
    for flag, names in TABLE["beside"].items():
        assert names and flag.removeprefix("--") in LISTED, flag
