"""Results of a replay as pictures in files."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hicache.replay.advice import Advice, Curve
    from hicache.replay.replay import ReplayResult

__all__ = ["PLOT_SUFFIXES", "plot_advice", "plot_results", "require_plotting"]

PLOT_SUFFIXES: Final = (".svg", ".png", ".pdf")

_COLORS: Final = ("#2f78c4", "#e09f3e", "#2a9d8f", "#9a5b9f", "#c0562d", "#5b7a9d", "#9a9a9a")
"""Apart from each other for colour-blind eyes."""

_MAX_TICKS: Final = 5

_STYLE: Final[Mapping[Any, object]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hicache replay",
    "font.size": 9,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.25,
}


def require_plotting(path: Path) -> None:
    """Check before the work begins that a picture can be drawn into `path`.

    Raises:
        ConfigError: matplotlib is not installed, or the name has no suffix of a picture.
    """
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'hicache[demo]'")


def plot_results(results: Sequence[ReplayResult], path: Path, *, title: str) -> None:
    """Draw hit ratio and median time to first token over the size of L1, a line per combination."""
    lines: defaultdict[str, list[ReplayResult]] = defaultdict(list)
    for result in results:
        lines[_label(result)].append(result)

    def draw(figure: Figure) -> None:
        hits, times = figure.subplots(1, 2)
        for color, (label, members) in zip(_cycle(len(lines)), lines.items(), strict=True):
            sizes = [_finite(result, results) for result in members]
            order = sorted(range(len(sizes)), key=sizes.__getitem__)
            xs = [sizes[index] for index in order]
            style = {"marker": "o", "markersize": 3.5, "color": color}
            ratios = [members[index].token_hit_ratio for index in order]
            hits.plot(xs, ratios, label=label, **style)
            times.plot(xs, [members[index].times.ttft_seconds_p50 for index in order], **style)
        sizes = sorted({_finite(result, results) for result in results})
        _finish(hits, "L1, blocks", "token hit ratio", sizes)
        _finish(times, "L1, blocks", "time to first token, median, s", sizes)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(title)

    _save(draw, path)


def plot_advice(advice: Advice, path: Path, *, title: str) -> None:
    """Draw hit ratio over the sizes of L2 and L3, with what is worth having."""
    curves = [("L2", advice.host), ("L3", advice.storage)]
    drawn = [(tier, curve) for tier, curve in curves if len(curve.sizes) > 1]

    def draw(figure: Figure) -> None:
        for axes, (tier, curve) in zip(
            figure.subplots(1, max(1, len(drawn)), squeeze=False)[0], drawn, strict=False
        ):
            _draw_curve(axes, tier, curve)
        figure.suptitle(title)

    _save(draw, path)


def _draw_curve(axes: Axes, tier: str, curve: Curve) -> None:
    ratios = [result.token_hit_ratio for result in curve.results]
    seconds = [result.times.ttft_seconds_p50 for result in curve.results]
    right = axes.twinx()
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    right.plot(curve.sizes, seconds, color=_COLORS[1], marker="o", markersize=3.5)
    right.set_ylabel("time to first token, median, s", color=_COLORS[1])
    right.set_ylim(bottom=0)
    axes.plot(curve.sizes, ratios, color=_COLORS[0], marker="o", markersize=3.5)
    axes.axvline(curve.size, color="#606060", linestyle="--", linewidth=1)
    axes.annotate(
        "worth having" if curve.size else "none",
        (curve.size, 0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 6) if curve.size else (4, 6),
        textcoords="offset points",
        ha="right" if curve.size else "left",
    )
    _finish(axes, f"{tier}, blocks", "token hit ratio", curve.sizes)
    axes.yaxis.label.set_color(_COLORS[0])


def _finish(axes: Axes, x_label: str, y_label: str, sizes: Sequence[int]) -> None:
    # Sizes go by factors, but none is a size too.
    axes.set_xscale("symlog", linthresh=next((size for size in sizes if size), 1), linscale=0.3)
    step = -(-len(sizes) // _MAX_TICKS)
    axes.set_xticks(sizes[::step], [f"{size:,}" for size in sizes[::step]])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)


def _label(result: ReplayResult) -> str:
    options = result.options
    if options.host_blocks == 0:
        return options.policy
    sizes = [
        f"{tier} {'inf' if size is None else f'{size:,}'}"
        for tier, size in (("L2", options.host_blocks), ("L3", options.storage_blocks))
        if size != 0
    ]
    return ", ".join([options.policy, *sizes, options.write_policy.value])


def _finite(result: ReplayResult, results: Sequence[ReplayResult]) -> int:
    """Return the size of L1, and for one without bound twice the largest that has one."""
    size = result.options.device_blocks
    if size is not None:
        return size
    return 2 * max((one.options.device_blocks or 1 for one in results), default=1)


def _cycle(count: int) -> list[str]:
    return [_COLORS[index % len(_COLORS)] for index in range(count)]


def _save(draw: Callable[[Figure], None], path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(dict(_STYLE)):
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        draw(figure)
        figure.savefig(path, dpi=150)
