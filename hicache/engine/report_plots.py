"""The demo's plots as SVG elements that stand in a page and take its text colour."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from hicache.engine.figures import INK, render_svg
from hicache.engine.report_table import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

    return render_svg("Tokens of each prompt by where their KV came from", draw, height_inches=3.4)


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

    return render_svg("Time to first token of each turn, with and without", draw, height_inches=3.4)


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

    return render_svg("Bytes moved and bandwidth of each movement", draw, height_inches=2.2)


def _label_turns(axes: Axes, turns: Sequence[TurnReport]) -> None:
    step = -(-len(turns) // _MAX_LABELS) or 1
    shown = range(0, len(turns), step)
    labels = [f"u{turns[index].user} t{turns[index].turn}" for index in shown]
    axes.set_xticks(list(shown), labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, max(len(turns), 1) - 0.4)
    axes.grid(visible=False, axis="x")
    for index in range(1, len(turns)):
        if turns[index].after_restart and not turns[index - 1].after_restart:
            axes.axvline(index - 0.5, color=INK, linestyle="--", linewidth=1)
            axes.text(index - 0.4, 1, "restart", transform=axes.get_xaxis_transform())
