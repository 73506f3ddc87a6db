"""Draw the pictures of the documents.

python scripts/doc_pictures.py [NAME...]

Without names, all are drawn. The command of a picture stands beside it in its document.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
_COMMAND = re.compile(r"`pipemem ((?:show|pareto) [^`]*) --output docs/images/([\w.]+)`")


def commands() -> dict[str, list[str]]:
    """Return the words after ``pipemem`` that draw every picture with a command, by the picture's name."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))]
    return {name: shlex.split(words) for text in texts for words, name in _COMMAND.findall(" ".join(text.split("\n")))}


def main(names: Sequence[str]) -> None:
    drawn = commands()
    for name in names or drawn:
        words = [*drawn[name], "--output", str(IMAGES / name)]
        subprocess.run([sys.executable, "-m", "megatron_pipemem", *words], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
