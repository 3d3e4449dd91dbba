"""Figures as SVG elements that stand in a page and take its text colour."""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING, Any, Final

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.figure import Figure

__all__ = ["INK", "render_svg"]

INK: Final = "#010203"
"""Stands for the page's text colour, which matplotlib cannot name."""

_STYLE: Final[Mapping[Any, object]] = {
    "svg.fonttype": "none",
    "font.size": 8.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#808080",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def render_svg(label: str, draw: Callable[[Figure], None], *, height_inches: float) -> str:
    """Return what `draw` puts into an empty figure, with `label` for those who cannot see it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'hicache[demo]'") from error
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": label}):
        figure = Figure(figsize=(9.6, height_inches), layout="constrained")
        draw(figure)
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=metadata)
    return _embed(buffer.getvalue(), label)


def _embed(document: str, label: str) -> str:
    """Return the SVG element of a whole SVG document, fit to stand beside others in one page."""
    svg = document[document.index("<svg") :].replace(INK, "currentColor")
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    # Every figure numbers its groups from 1, but an id may occur only once in a page.
    svg = re.sub(r' id="([^"]+)"', lambda id_: id_[0] if id_[1] in used else "", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
