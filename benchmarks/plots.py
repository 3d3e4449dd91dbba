"""The plots of the page, as SVG elements that stand in it and take its text colour."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from hicache.engine.figures import render_svg

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

    from benchmarks.harness import Result

    Draw = Callable[[Sequence[Result]], str]

__all__ = [
    "PLOTS",
    "plot_calls",
    "plot_copies",
    "plot_evictions",
    "plot_hit_ratios",
    "plot_transfers",
    "plot_ttft",
]

_OURS: Final = "#2f78c4"
_PEERS: Final = ("#e09f3e", "#9a5b9f", "#2a9d8f", "#c0562d")
_GREY: Final = "#9a9a9a"
"""Apart from each other for colour-blind eyes, on white and on black."""


def plot_evictions(results: Sequence[Result]) -> str:
    """Return the median time of an eviction over the size of the tree, a line for each system."""
    lines: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for result in results:
        if result.name != "evict" or result.params["shared_parent"]:
            continue
        leaves = int(result.params["leaves"])
        if result.peer is None or leaves not in lines["hicache"]:
            lines["hicache"][leaves] = result.median
        if result.peer is not None and result.peer_median is not None:
            lines[result.peer][leaves] = result.peer_median
    if not lines["hicache"]:
        return ""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        colors = {"hicache": _OURS}
        for name, points in lines.items():
            color = colors.setdefault(name, _PEERS[(len(colors) - 1) % len(_PEERS)])
            xs, ys = zip(*sorted(points.items()), strict=True)
            axes.plot(xs, ys, marker="o", markersize=4, color=color, label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("leaves of the tree")
        axes.set_ylabel("median of one eviction, us")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,g}")
        figure.legend(loc="outside upper left", ncols=5, frameon=False)

    return render_svg("Time of an eviction over the size of the tree", draw, height_inches=3.6)


def plot_copies(results: Sequence[Result]) -> str:
    """Return a pair of bars for each copy: hicache and memcpy."""
    copies = [one for one in results if one.name in ("write", "load") and one.peer == "memcpy"]
    if not copies:
        return ""
    panels: defaultdict[str, list[Result]] = defaultdict(list)
    for result in copies:
        panels[f"{result.params['layout']}, {result.params['pages']} pages"].append(result)

    def draw(figure: Figure) -> None:
        rows = -(-len(panels) // 2)
        grid = figure.subplots(rows, 2, sharex=True, squeeze=False)
        for axes, (title, panel) in zip(grid.flat, panels.items(), strict=False):
            labels = [
                f"{one.name} {one.params['shape']} {one.params['page_size']}" for one in panel
            ]
            heights = range(len(panel))
            axes.barh(
                [y - 0.2 for y in heights], [one.median for one in panel], 0.4,
                color=_OURS, label="hicache",
            )  # fmt: skip
            axes.barh(
                [y + 0.2 for y in heights], [one.peer_median or 0.0 for one in panel], 0.4,
                color=_GREY, label="memcpy",
            )  # fmt: skip
            axes.set_yticks(list(heights), labels)
            axes.set_title(title, loc="left", fontsize=9)
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
        for axes in grid[-1]:
            axes.set_xlabel("GB/s")
        handles, names = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=2, frameon=False)

    return render_svg(
        "Bandwidth of copies beside memcpy", draw, height_inches=1.0 + 2.3 * len(panels) / 2
    )


def plot_transfers(results: Sequence[Result]) -> str:
    """Return a bar for each system and page size, by direction and number of threads."""
    titles = {"read_warm": "reads", "write_warm": "writes"}
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for one in results:
        if one.name not in titles or not one.params["huge_pages"]:
            continue
        threads = int(one.params["threads"])
        title = f"{titles[one.name]}, {threads} thread{'s' * (threads > 1)}"
        panel = panels.setdefault(title, {"hicache": {}})
        page_bytes = int(one.params["page_bytes"])
        panel["hicache"][page_bytes] = one.median
        if one.peer is not None and one.peer_median is not None:
            # The two system calls are one side.
            name = "preadv, pwritev" if one.peer in ("preadv", "pwritev") else one.peer
            panel.setdefault(name, {})[page_bytes] = one.peer_median
    if not panels:
        return ""

    def draw(figure: Figure) -> None:
        grid = figure.subplots(-(-len(panels) // 2), 2, sharex=True, squeeze=False)
        for axes, (title, panel) in zip(grid.flat, panels.items(), strict=False):
            sizes = sorted(panel["hicache"])
            width = 0.8 / len(panel)
            for index, (name, speeds) in enumerate(panel.items()):
                xs = [sizes.index(size) + (index + 0.5) * width - 0.4 for size in speeds]
                color = _side_color(name, list(panel))
                axes.bar(xs, list(speeds.values()), width, color=color, label=name)
            axes.set_xticks(range(len(sizes)), [f"{size / 1024:,g} KiB" for size in sizes])
            axes.set_title(title, loc="left", fontsize=9)
            axes.set_ylabel("GB/s")
            axes.grid(visible=False, axis="x")
        handles, names = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=5, frameon=False)

    return render_svg("Bandwidth of the store beside other systems", draw, height_inches=4.8)


def _side_color(name: str, names: list[str]) -> str:
    fixed = {"hicache": _OURS, "memcpy": _GREY, "preadv, pwritev": _PEERS[2]}
    others = [one for one in names if one not in fixed]
    return fixed.get(name) or (_PEERS[0], _PEERS[1], _PEERS[3])[others.index(name) % 3]


def plot_ttft(results: Sequence[Result]) -> str:
    """Return a bar for each origin of the prompt."""
    rows = [result for result in results if result.name == "ttft"]
    if not rows:
        return ""
    names = {"none": "computed", "L1": "from L1", "L2": "from L2", "L3": "from L3"}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        labels = [names[str(row.params["tier"])] for row in rows]
        colors = [_GREY if row.peer is None else _OURS for row in rows]
        bars = axes.barh(labels, [row.median for row in rows], color=colors)
        texts = [
            f"{row.median:,.0f} ms" + (f", {row.ratio:.1f} times shorter" if row.ratio else "")
            for row in rows
        ]
        axes.bar_label(bars, texts, padding=4)
        axes.set_xlim(0, max(row.median for row in rows) * 1.25)
        axes.set_xlabel("median time to first token, ms")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")

    return render_svg("Time to first token by where the prompt was", draw, height_inches=2.2)


def plot_calls(results: Sequence[Result]) -> str:
    """Return median and p99 of each call of the scheduler, quiet and under full load."""
    calls = [result for result in results if result.name == "call"]
    if not calls:
        return ""
    by_call: dict[str, dict[str, Result]] = defaultdict(dict)
    for result in calls:
        by_call[str(result.params["call"])][str(result.params["background"])] = result

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for background, color, offset in (("quiet", _GREY, -0.16), ("full", _OURS, 0.16)):
            rows = [
                (y, by[background]) for y, by in enumerate(by_call.values()) if background in by
            ]
            ys = [y + offset for y, _ in rows]
            medians, p99s = ([row.median for _, row in rows], [row.p99 for _, row in rows])
            axes.hlines(ys, medians, p99s, color=color, alpha=0.6, linewidth=1.5)
            axes.scatter(medians, ys, s=20, color=color, label=f"{background} background, median")
            axes.scatter(p99s, ys, s=26, color=color, marker="|", label="p99")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.set_yticks(range(len(by_call)), list(by_call))
        axes.set_xlabel("us")
        axes.invert_yaxis()
        figure.legend(loc="outside upper left", ncols=4, frameon=False)

    return render_svg("Time of each call of the scheduler", draw, height_inches=3.8)


def plot_hit_ratios(results: Sequence[Result]) -> str:
    """Return a panel for each trace: the share of blocks found over the size of the cache."""
    panels: defaultdict[str, defaultdict[str, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for one in results:
        if one.name != "block_hit_ratio":
            continue
        lines, blocks = panels[str(one.params["trace"])], int(one.params["blocks"])
        lines[str(one.params["policy"])][blocks] = one.median
        if one.peer is not None and one.peer_median is not None:
            lines[one.peer][blocks] = one.peer_median
    if not panels:
        return ""

    def draw(figure: Figure) -> None:
        grid = figure.subplots(1, len(panels), squeeze=False)
        for axes, (title, lines) in zip(grid.flat, panels.items(), strict=True):
            for name, points in lines.items():
                color, style = _policy_style(name)
                sizes = sorted(points)
                heights = [points[size] for size in sizes]
                axes.plot(
                    sizes, heights, color=color, linestyle=style, marker="o", markersize=3,
                    label=name,
                )  # fmt: skip
            axes.set_title(title, loc="left", fontsize=9)
            axes.set_xscale("log")
            axes.set_ylim(bottom=0)
            axes.set_xlabel("blocks of the cache")
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.xaxis.set_minor_formatter("")
        grid[0][0].set_ylabel("share of blocks found")
        found: dict[str, Artist] = {}
        for axes in grid.flat:
            handles, names = axes.get_legend_handles_labels()
            found |= dict(zip(names, handles, strict=True))
        figure.legend(found.values(), found, loc="outside upper left", ncols=5, frameon=False)

    return render_svg("Blocks found by policy and size", draw, height_inches=3.4)


def _policy_style(name: str) -> tuple[str, str]:
    """Return color and kind of the line; a policy has one color in all systems."""
    fixed = {"adaptive": (_OURS, "-"), "belady": (_GREY, "--")}
    system, _, policy = name.rpartition("-")
    number = ("lru", "slru", "lfu").index(policy) if policy in ("lru", "slru", "lfu") else 3
    return fixed.get(name) or (_PEERS[number], ":" if system else "-")


PLOTS: Final[Mapping[str, Sequence[tuple[str, Draw]]]] = {
    "tree": (
        (
            "Evicting one page after 16 matches and an insert. Both axes are logarithmic.",
            plot_evictions,
        ),
    ),
    "copy": (
        (
            "Each row names the direction, layers x heads x elements of a head, and tokens in a "
            "page. memcpy copies as many equal pieces.",
            plot_copies,
        ),
    ),
    "store": (
        (
            "Pages in random batches of 128, through the page cache, into memory with 2 MiB pages.",
            plot_transfers,
        ),
    ),
    "controller": (
        (
            "From the median (dot) to the p99 (dash). The loop is a piece of Python that waits for "
            "nothing and is as long as the longest calls: what it suffers, every call suffers.",
            plot_calls,
        ),
    ),
    "replay": (
        (
            "Share of the blocks of all prompts that were found. Belady's rule knows the future; "
            "no cache can find more. Dotted: other systems.",
            plot_hit_ratios,
        ),
    ),
    "e2e": (("All but 40 tokens of the prompt come from the tier.", plot_ttft),),
}
"""By benchmark: caption and plot, which is empty where nothing of it was measured."""
