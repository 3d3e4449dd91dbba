"""The demo's plots as SVG elements that stand in a page and take its text colour."""

from __future__ import annotations

import html
import io
import re
import statistics
from typing import TYPE_CHECKING, Any, Final

from hicache.engine.report_table import format_bytes
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hicache.engine.report import Movements, TurnReport

__all__ = ["COLORS", "plot_movements", "plot_times", "plot_tokens"]

COLORS: Final[Mapping[str, str]] = {
    "L1": "#2f78c4",
    "L2": "#2a9d8f",
    "L3": "#e09f3e",
    "computed": "#9a9a9a",
}
"""By origin of tokens; apart from each other for colour-blind eyes, on white and on black."""

_INK: Final = "#010203"
"""Stands for the page's text colour, which matplotlib cannot name."""

_STYLE: Final[Mapping[Any, object]] = {
    "svg.fonttype": "none",
    "font.size": 8.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#808080",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}

_BAR: Final = "#5b7a9d"
"""Of bars that are of no tier."""

_MAX_LABELS: Final = 24
"""Turns that are named on an axis; of more, every second, third and so on."""


def plot_tokens(turns: Sequence[TurnReport]) -> str:
    """Return a bar per turn: the tokens of its prompt, stacked by origin."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        stacks = {
            "L1": [turn.device_hit_tokens for turn in turns],
            "L2": [turn.host_hit_tokens for turn in turns],
            "L3": [turn.storage_hit_tokens for turn in turns],
            "computed": [turn.computed_tokens for turn in turns],
        }
        bottoms = [0] * len(turns)
        for origin, tokens in stacks.items():
            axes.bar(range(len(turns)), tokens, 0.8, bottoms, color=COLORS[origin], label=origin)
            bottoms = [bottom + more for bottom, more in zip(bottoms, tokens, strict=True)]
        axes.set_ylabel("tokens of the prompt")
        _label_turns(axes, turns)
        figure.legend(loc="outside upper left", ncols=len(stacks), frameon=False)

    return _render("Tokens of each prompt by where their KV came from", draw, height_inches=3.4)


def plot_times(turns: Sequence[TurnReport]) -> str:
    """Return a pair of points per turn: time to first token with and without the cache."""
    cached = [turn.ttft_seconds * 1e3 for turn in turns]
    uncached = [turn.ttft_uncached_seconds * 1e3 for turn in turns]
    grey = COLORS["computed"]
    series = (("with the cache", COLORS["L1"], cached), ("without a cache", grey, uncached))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        xs = range(len(turns))
        if turns and min(*cached, *uncached) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.vlines(xs, cached, uncached, color=grey, alpha=0.5, zorder=1)
        for name, color, times in series:
            axes.scatter(xs, times, s=22, color=color, label=name, zorder=3)
            if times:
                median = statistics.median(times)
                label = f"median {median:.1f} ms"
                axes.axhline(median, color=color, linestyle=":", linewidth=1.2, label=label)
        axes.set_ylabel("time to first token, ms")
        _label_turns(axes, turns)
        figure.legend(loc="outside upper left", ncols=4, frameon=False)

    return _render("Time to first token of each turn, with and without", draw, height_inches=3.4)


def plot_movements(movements: Movements) -> str:
    """Return two bars per movement: bytes and bandwidth."""
    by_name = movements.by_name()

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, scale, unit, suffix, values in (
            (left, 1e6, "MB moved", "", [moved.num_bytes for moved in by_name.values()]),
            (right, 1e9, "GB/s", "/s", [moved.bytes_per_second for moved in by_name.values()]),
        ):
            bars = axes.barh(list(by_name), [value / scale for value in values], color=_BAR)
            axes.bar_label(bars, [format_bytes(value) + suffix for value in values], padding=4)
            axes.set_xlabel(unit)
            axes.set_xlim(0, max(values) / scale * 1.2 or 1)
            axes.grid(visible=False, axis="y")
        left.invert_yaxis()

    return _render("Bytes moved and bandwidth of each movement", draw, height_inches=2.2)


def _label_turns(axes: Axes, turns: Sequence[TurnReport]) -> None:
    step = -(-len(turns) // _MAX_LABELS) or 1
    shown = range(0, len(turns), step)
    labels = [f"u{turns[index].user} t{turns[index].turn}" for index in shown]
    axes.set_xticks(list(shown), labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, max(len(turns), 1) - 0.4)
    axes.grid(visible=False, axis="x")
    for index in range(1, len(turns)):
        if turns[index].after_restart and not turns[index - 1].after_restart:
            axes.axvline(index - 0.5, color=_INK, linestyle="--", linewidth=1)
            axes.text(index - 0.4, 1, "restart", transform=axes.get_xaxis_transform())


def _render(label: str, draw: Callable[[Figure], None], *, height_inches: float) -> str:
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
    svg = document[document.index("<svg") :].replace(_INK, "currentColor")
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    # Every figure numbers its groups from 1, but an id may occur only once in a page.
    svg = re.sub(r' id="([^"]+)"', lambda id_: id_[0] if id_[1] in used else "", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
