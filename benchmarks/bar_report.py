"""What came of each bar of the design in a run, in words."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from benchmarks.bars import BARS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.bars import Asked, Found
    from benchmarks.table import Run

__all__ = ["BarReport", "report_bars"]


@dataclasses.dataclass(frozen=True)
class BarReport:
    """A bar of the design and what came of it."""

    asked: Asked
    found: Found

    @property
    def limit(self) -> str:
        """What is asked for, with the direction that the row has where it was measured."""
        bar, row = self.asked.bar, self.found.row
        more = bar.statistic == "ratio" if row is None else bar.asks_for_more(row)
        unknown = row is None and bar.statistic != "ratio"
        sign = "" if unknown else ("≥ " if more else "≤ ")
        return f"{'p99 ' if bar.statistic == 'p99' else ''}{sign}{bar.limit:,g}"

    @property
    def reached(self) -> float | None:
        """By the row that is farthest from the limit."""
        return None if self.found.row is None else self.found.row.reached(self.asked.bar)


def report_bars(runs: Iterable[Run]) -> list[BarReport]:
    """Return what came of every bar in `runs`."""
    rows = [(run.benchmark, row) for run in runs for row in run.results]
    return [
        BarReport(asked, asked.find(row for name, row in rows if name == asked.benchmark))
        for asked in BARS
    ]
