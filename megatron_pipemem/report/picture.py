"""Write what matplotlib draws as PNG or SVG, in one style. It is imported only when a picture is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import check_suffix, whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pipemem",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": "#9aa0a6",
    "axes.labelcolor": "#3c4043",
    "xtick.color": "#3c4043",
    "ytick.color": "#3c4043",
}
_DPI = 150


def write_picture(draw: Callable[[], Figure], path: str | Path, what: str, instead: str = "") -> Path:
    """Draw, and write PNG or SVG by the suffix of ``path``. The same drawing always gives the same bytes.

    Args:
        draw: makes the picture.
        path: of the file. Folders are made as needed.
        what: is drawn, for the error's sentence.
        instead: what to do without matplotlib but to install it, for the error's sentence.

    Raises:
        UnsupportedError: the suffix is neither, or matplotlib, or what it needs, is missing.
        OutputError: it cannot be written.
    """
    path = Path(path)
    check_suffix(path, SUFFIXES, what)
    try:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            figure = draw()
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            with whole_file(path) as beside:
                figure.savefig(beside, format=path.suffix[1:], dpi=_DPI, metadata=metadata)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "not-installed", f"a {path.suffix} picture needs {error.name}: pip install {error.name}{instead}"
        ) from error
    return path


def figure_of(axes: Axes) -> Figure:
    """Return the figure that axes stand in."""
    from matplotlib.figure import Figure

    assert isinstance(axes.figure, Figure), "nothing here draws figures within figures"
    return axes.figure


def axes_for_points(size: tuple[float, float], title: str, x: str, y: str) -> Axes:
    """Return the axes of a new figure, empty.

    Args:
        size: width and height in inches.
        title: above them.
        x: what goes to the right.
        y: what goes up.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=_DPI, facecolor="white", layout="constrained")
    axes = figure.add_subplot(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.grid(color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes
