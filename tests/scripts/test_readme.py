"""What the README shows is what the commands beside it print."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_schedules_is_current(capsys):
    runpy.run_path(str(ROOT / "scripts" / "schedule_table.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("\n") >= 10 and printed in README


def test_links_lead_somewhere():
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", README)]
    assert len(targets) >= 6
    assert [target for target in targets if not target.startswith("http") and not (ROOT / target).exists()] == []
