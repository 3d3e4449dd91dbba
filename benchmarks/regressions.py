"""Whether a run is worse than stored ones, beyond their noise: `python -m benchmarks history`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.stored_runs import HISTORY, StoredRun, add_run, is_exact, read_stored, row_key
from benchmarks.table import format_number, read_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.harness import Result
    from benchmarks.table import Run

__all__ = ["Change", "Verdict", "compare", "compare_all", "format_changes", "main"]

_EXACT_FLOOR: Final = 0.02
_RATIO_FLOOR: Final = 0.15
_ALONE_FLOOR: Final = 0.2
"""Changes that are never called one, as shares: of counts, beside a peer, and of times alone."""

_DEVIATIONS: Final = 4.0
_FEW_RUNS: Final = 6.0
"""A change has to be 4 * (1 + 6 / n) deviations of n stored runs, since few know it badly."""

_FEWEST: Final = 3
"""Stored runs that say something about noise; what is counted has none."""

_MAD_TO_DEVIATION: Final = 1.4826
"""Of values that are spread normally, by the median of their distances from the median."""


class Verdict(str, Enum):
    """What came of a figure."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"
    UNKNOWN = "unknown"
    """There are too few stored runs to tell."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One figure beside those of stored runs.

    Attributes:
        row: the figure.
        verdict: what came of it.
        factor: how many times better it is than the median of stored runs; 1 where there is none.
        allowed: a factor between this and its inverse passes for noise; 1 where there is none.
        num_stored: stored runs that have the figure.
    """

    row: Result
    verdict: Verdict
    factor: float = 1.0
    allowed: float = 1.0
    num_stored: int = 0


def compare(run: Run, stored: Iterable[StoredRun]) -> list[Change]:
    """Return what came of every figure of `run` since `stored` runs of its benchmark.

    Where there is a peer the ratio to it is compared, because what slows the machine slows both.
    What is counted is compared as it is, with the newest run of the same minor version of Python;
    anything else with all runs of the same kind of machine.
    """
    now, past = StoredRun.of(run), list(stored)
    return [_change(row, now, past) for row in run.results]


def compare_all(runs: Iterable[Run], folder: Path = HISTORY) -> list[tuple[str, Change]]:
    """Return what came of every figure since the runs stored in `folder`, with its benchmark.

    Raises:
        ValueError: something else is stored there.
    """
    return [
        (run.benchmark, change)
        for run in runs
        for change in compare(run, read_stored(run.benchmark, folder))
    ]


def _change(row: Result, now: StoredRun, stored: Sequence[StoredRun]) -> Change:
    key, exact = row_key(row), is_exact(row)
    past = [
        height
        for one in stored
        if key in one.rows and one.comparable(now, exact=exact)
        if (height := _height(row, *one.rows[key])) is not None
    ]
    if exact:
        # What was stored last was meant; there is no noise to learn from older ones.
        past = past[-1:]
    height = _height(row, *now.rows[key])
    if height is None or len(past) < (1 if exact else _FEWEST):
        return Change(row=row, verdict=Verdict.UNKNOWN, num_stored=len(past))
    center = statistics.median(past)
    deviation = _MAD_TO_DEVIATION * statistics.median(abs(one - center) for one in past)
    floor = _ALONE_FLOOR if row.peer is None else _RATIO_FLOOR
    spread = _DEVIATIONS * (1 + _FEW_RUNS / len(past)) * deviation
    allowed = math.log1p(_EXACT_FLOOR) if exact else max(math.log1p(floor), spread)
    change = height - center
    if abs(change) <= allowed:
        verdict = Verdict.SAME
    else:
        verdict = Verdict.BETTER if change > 0 else Verdict.WORSE
    return Change(
        row=row,
        verdict=verdict,
        factor=math.exp(change),
        allowed=math.exp(allowed),
        num_stored=len(past),
    )


def _height(row: Result, median: float, ratio: float | None) -> float | None:
    """Return how good a figure of the row's kind is, as a logarithm; None where it has none."""
    by_ratio = ratio is not None and not is_exact(row)
    value = ratio if by_ratio else median
    if value is None or value <= 0:
        return None
    return math.log(value) if by_ratio or row.better == "higher" else -math.log(value)


def format_changes(changes: Iterable[tuple[str, Change]]) -> str:
    """Return the figures that changed beyond noise, by benchmark, and how many there are of each.

    The worst come first.
    """
    listed = sorted(changes, key=lambda item: item[1].factor)
    counts = Counter(change.verdict for _, change in listed)
    lines = [
        f"{change.verdict.value:<6}  {change.factor:>6.2f} times as good as in {change.num_stored} "
        f"stored runs (noise up to {change.allowed:.2f})  {format_number(change.row.median)} "
        f"{change.row.unit}  {benchmark}: {row_key(change.row)}"
        for benchmark, change in listed
        if change.verdict in (Verdict.WORSE, Verdict.BETTER)
    ]
    lines.append(
        f"{counts[Verdict.WORSE]} worse, {counts[Verdict.BETTER]} better, "
        f"{counts[Verdict.SAME]} as before, {counts[Verdict.UNKNOWN]} with too few stored runs"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Do what `arguments` say; return 1 when a figure is worse. Wrong usage is `SystemExit(2)`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks history",
        description="Runs of the past, and whether new results are worse beyond their noise. Times "
        "are compared with at least three runs of the same kind of machine: beside a peer the "
        "ratio, otherwise the median. What is counted is compared with the last run.",
        epilog="exit status: 0 done, 1 a figure is worse beyond noise, 2 wrong usage",
    )
    parser.add_argument(
        "do", choices=("add", "check"),
        help="store the results of a folder, or compare them with what is stored",
    )  # fmt: skip
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the JSON files are")
    parser.add_argument(
        "--history", metavar="DIR", type=Path, default=HISTORY,
        help="where runs are stored (benchmarks/history)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        runs = read_runs(options.folder)
        if options.do == "add":
            for run in runs:
                print(f"{run.benchmark}: {add_run(run, options.history)}")
            return 0
        changes = compare_all(runs, options.history)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(format_changes(changes))
    return int(any(change.verdict is Verdict.WORSE for _, change in changes))
