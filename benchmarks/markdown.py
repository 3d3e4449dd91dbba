"""The tables of a run as Markdown: `python -m benchmarks report DIR --markdown FILE`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.bar_report import report_bars
from benchmarks.catalogue import known_benchmarks
from benchmarks.table import format_number, format_params, format_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.harness import Result
    from benchmarks.table import Run

__all__ = ["render_markdown"]

_INTRODUCTION = """\
# Benchmark results

Made by `python -m benchmarks report DIR --markdown FILE`; not to be edited. What the rows are, and
how they are measured, is in [benchmarks.md](benchmarks.md). Each part names the commit that it was
measured on.

Beside a figure stands what another system reached in the same turns, and how many times better
hicache is: above 1 hicache is. Where hicache was measured anew beside a system, its own figure
stands in front. In brackets is what the figure has to reach. Figures of a shared machine differ
from run to run by a fifth and more: the ratios are what to look at.
"""


def render_markdown(runs: Sequence[Run]) -> str:
    """Return the bars of the design and all figures of `runs` as Markdown."""
    parts = [_INTRODUCTION, *_machines(runs), _bars(runs)]
    about = known_benchmarks()
    for run in runs:
        title = about.get(run.benchmark, "").partition("\n")[0]
        quick = " Fewer samples and smaller sizes than usual." if run.quick else ""
        parts.append(
            f"## {run.benchmark}\n\n{title}{quick}\n\n    {run.command}\n\n"
            f"Commit {run.commit or 'unknown'}, {run.date}. "
            + " ".join(f"{when.capitalize()}: {noise}." for when, noise in run.noise.items())
            + "\n"
        )
        parts += [_figures(name, rows) for name, rows in _by_name(run.results).items()]
    return "\n".join(parts)


def _machines(runs: Sequence[Run]) -> Iterable[str]:
    """Yield a line for each machine."""
    seen = set()
    for run in runs:
        line = "; ".join(_facts(run.machine)) + ".\n"
        if line not in seen:
            seen.add(line)
            yield line


def _facts(machine: Mapping[str, Any]) -> Iterable[str]:
    """Yield what there is to know of a machine, in words."""
    for name, value in machine.items():
        if isinstance(value, Mapping):
            yield from _facts(value)
        elif name.endswith("_bytes"):
            yield f"{name.removesuffix('_bytes')} {value / 1e9:.0f} GB"
        elif value:
            yield f"{name} {value}"


def _bars(runs: Sequence[Run]) -> str:
    """Return every bar of the design with the row that is farthest from it."""
    reports = report_bars(runs)
    num_met = sum(report.found.is_met for report in reports)
    rows = [
        [
            report.asked.what,
            report.limit,
            "not measured" if report.reached is None else format_number(report.reached),
            str(report.found.num_rows),
            "" if report.reached is None else "met" if report.found.is_met else "**not met**",
        ]
        for report in reports
    ]
    titles = ["bar", "asked for", "reached by the row that is farthest", "rows", ""]
    return f"## Bars\n\n{num_met} of {len(rows)} are met.\n\n{_table(titles, rows, {2, 3})}"


def _by_name(results: Iterable[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for row in results:
        groups.setdefault(row.name, []).append(row)
    return groups


@dataclasses.dataclass
class _Line:
    """Figures that were taken under the same conditions, one beside each system."""

    own: Result
    beside: dict[str, Result]


def _figures(name: str, results: Sequence[Result]) -> str:
    """Return the table of all rows of one name."""
    lines: dict[str, _Line] = {}
    for row in results:
        line = lines.setdefault(format_params(row.params), _Line(row, {}))
        if row.peer is not None:
            line.beside[row.peer] = row
    shared = _shared([line.own.params for line in lines.values()])
    varying = list(
        dict.fromkeys(
            key for line in lines.values() for key in line.own.params if key not in shared
        )
    )
    peers = list(dict.fromkeys(peer for line in lines.values() for peer in line.beside))
    first = results[0]
    has_tail = any(line.own.samples > 1 for line in lines.values())
    titles = [*varying, "hicache", *["p99"] * has_tail, *(f"beside {peer}" for peer in peers)]
    rows = [
        [
            *(
                _param(key, line.own.params[key]) if key in line.own.params else ""
                for key in varying
            ),
            format_number(line.own.median) + _verdict(line.own, {"median"}),
            *[format_number(line.own.p99) + _verdict(line.own, {"p99"})] * has_tail,
            *(_beside(line.own, line.beside.get(peer)) for peer in peers),
        ]
        for line in lines.values()
    ]
    where = f" ({format_params(shared)})" if shared else ""
    more = "more" if first.better == "higher" else "less"
    numeric = set(range(len(varying), len(titles)))
    return (
        f"### `{name}`\n\nIn {first.unit}, {more} is better{where}.\n\n"
        f"{_table(titles, rows, numeric)}"
    )


def _param(key: str, value: object) -> str:
    """Return the value of a parameter; lengths as people say them."""
    if key.endswith("_bytes") and isinstance(value, int) and value and not value % 1024:
        return f"{value >> 20} MiB" if not value % (1 << 20) else f"{value >> 10} KiB"
    return format_value(value)


def _shared(params: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the parameters that all have alike."""
    first = params[0]
    return {
        key: value
        for key, value in first.items()
        if all(key in one and one[key] == value for one in params)
    }


def _beside(own: Result, row: Result | None) -> str:
    """Return what a system reached, after hicache's own figure in those turns if it is another."""
    if row is None:
        return ""
    mine, anew = format_number(own.median), format_number(row.median)
    before = "" if mine == anew else f"{anew} / "
    return f"{before}{format_number(row.peer_median)} = {row.ratio:.2f}{_verdict(row, {'ratio'})}"


def _verdict(row: Result, statistics: set[str]) -> str:
    """Return the bars of a figure and whether it reaches them."""
    bars = [bar for bar in row.bars if bar.statistic in statistics]
    texts = [f"{bar.limit:,g} {'met' if row.meets(bar) else '**not met**'}" for bar in bars]
    return f" ({', '.join(texts)})" if texts else ""


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], numeric: set[int]) -> str:
    """Return a table; the columns in `numeric` are aligned to the right."""
    rule = ["---:" if column in numeric else "---" for column in range(len(titles))]
    lines = [[_plain(cell) for cell in row] for row in (titles, *rows)]
    lines.insert(1, rule)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _plain(cell: str) -> str:
    return cell.replace("|", "\\|")
