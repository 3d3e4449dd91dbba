"""What every benchmark shares: timing, results and their bars, the table, the JSON.

A benchmark is a list of steps. A step does its work, checks that the work was right, and returns
what it measured; a figure of wrong work is no figure, so a failed check ends the run.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import statistics
import time
from typing import TYPE_CHECKING, Any, Literal

from hicache.engine.machine import machine_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TextIO

__all__ = [
    "Bar",
    "CheckFailed",
    "Result",
    "Step",
    "check",
    "describe_noise",
    "format_table",
    "run_steps",
    "summarise",
    "time_calls",
    "to_json",
]

_PROGRESS_WIDTH = 24


class CheckFailed(Exception):
    """The work that was measured was not done right; the message says what was wrong."""


def check(condition: bool, message: str) -> None:
    """Raise `CheckFailed` with `message` unless `condition` holds."""
    if not condition:
        raise CheckFailed(message)


@dataclasses.dataclass(frozen=True)
class Bar:
    """What a figure has to reach: at most `limit`, or at least where higher is better."""

    limit: float
    statistic: Literal["median", "p99"] = "median"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One figure.

    Attributes:
        name: what was measured; the same name with other `params` is another figure.
        params: under which conditions, as plain values.
        unit: of `median`, `p99` and `peer_median`.
        better: which way is better.
        median: of all samples; for a figure that is counted or derived, the figure.
        p99: 99 of 100 samples are at least as good.
        samples: how many there were.
        bars: what the figure has to reach.
        peer: name of the system that did the same work beside it, or None.
        peer_median: the peer's median, None without a peer.
    """

    name: str
    params: Mapping[str, str | int | float | bool]
    unit: str
    better: Literal["lower", "higher"]
    median: float
    p99: float
    samples: int
    bars: tuple[Bar, ...] = ()
    peer: str | None = None
    peer_median: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times better than the peer (above 1 is better); None without a peer."""
        if self.peer_median is None:
            return None
        if self.better == "lower":
            return self.peer_median / self.median
        return self.median / self.peer_median

    def meets(self, bar: Bar) -> bool:
        """Whether the figure reaches `bar`."""
        value = getattr(self, bar.statistic)
        return bool(value <= bar.limit if self.better == "lower" else value >= bar.limit)

    def to_json(self) -> dict[str, object]:
        """Return the figure as plain data; the bars are not part of it."""
        return {
            "name": self.name,
            "params": dict(self.params),
            "unit": self.unit,
            "better": self.better,
            "median": self.median,
            "p99": self.p99,
            "samples": self.samples,
            "peer": self.peer,
            "peer_median": self.peer_median,
            "ratio": self.ratio,
        }


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of a benchmark: a label for who watches, and the work that returns figures."""

    label: str
    run: Callable[[], Sequence[Result]]


def time_calls(call: Callable[[], object], *, samples: int) -> list[float]:
    """Return how long each of `samples` calls took in us, after a tenth as many untimed ones.

    The time of an empty call (0.1 us) is in every sample; the garbage collector stays as it is.
    """
    for _ in range(math.ceil(samples / 10)):
        call()
    clock = time.perf_counter_ns
    times = [0] * samples
    for index in range(samples):
        begin = clock()
        call()
        times[index] = clock() - begin
    return [nanoseconds / 1e3 for nanoseconds in times]


def summarise(
    name: str,
    values: Sequence[float],
    *,
    params: Mapping[str, str | int | float | bool],
    unit: str = "us",
    better: Literal["lower", "higher"] = "lower",
    bars: tuple[Bar, ...] = (),
) -> Result:
    """Return the figure that `values`, of which there is at least one, come to."""
    worst_last = sorted(values, reverse=better == "higher")
    return Result(
        name=name,
        params=params,
        unit=unit,
        better=better,
        median=statistics.median(values),
        p99=worst_last[math.ceil(0.99 * len(values)) - 1],
        samples=len(values),
        bars=bars,
    )


def run_steps(steps: Sequence[Step], *, watch: TextIO) -> list[Result]:
    """Run `steps` in order and return all figures.

    Shows a progress bar on `watch` while a person is watching, that is, if it is a terminal.

    Raises:
        CheckFailed: as soon as a step finds that its work was not right.
    """
    results: list[Result] = []
    try:
        for done, step in enumerate(steps):
            filled = "#" * (done * _PROGRESS_WIDTH // len(steps))
            _show(watch, f"[{filled:.<{_PROGRESS_WIDTH}}] {done}/{len(steps)} {step.label}")
            # What the step before has left is not this one's to collect.
            gc.collect()
            results += step.run()
    finally:
        _show(watch, "")
    return results


def _show(watch: TextIO, line: str) -> None:
    if watch.isatty():
        watch.write(f"\r\x1b[2K{line}")
        watch.flush()


def describe_noise() -> str:
    """Return in words how quiet the machine is: its load, and how evenly a fixed loop runs."""
    loop = summarise("loop", time_calls(lambda: sum(range(1000)), samples=3000), params={})
    return (
        f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, a fixed "
        f"loop takes {loop.median:.1f} us, its p99 {loop.p99:.1f} us"
    )


def to_json(benchmark: str, results: Sequence[Result]) -> dict[str, Any]:
    """Return the figures of one benchmark beside the facts about this machine, as plain data."""
    return {
        "benchmark": benchmark,
        "machine": machine_facts(),
        "results": [result.to_json() for result in results],
    }


def format_table(results: Sequence[Result]) -> str:
    """Return the figures as aligned plain text, each with its bar and whether it is met.

    The columns of the peer are there if any figure has one.
    """
    rows = [["name", "params", "median", "p99", "unit", "samples", "bar"]]
    rows += [
        [
            result.name,
            " ".join(f"{key}={_plain(value)}" for key, value in result.params.items()),
            _number(result.median),
            _number(result.p99),
            result.unit,
            str(result.samples),
            "; ".join(_verdict(result, bar) for bar in result.bars) or "-",
        ]
        for result in results
    ]
    if any(result.peer for result in results):
        rows[0] += ["peer", "peer median", "ratio"]
        for row, result in zip(rows[1:], results, strict=True):
            row += [result.peer or "-", _number(result.peer_median), _number(result.ratio)]
    numeric = {"median", "p99", "samples", "peer median", "ratio"}
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if title in numeric else cell.ljust(width)
            for title, cell, width in zip(rows[0], row, widths, strict=True)
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _verdict(result: Result, bar: Bar) -> str:
    sign = "<=" if result.better == "lower" else ">="
    statistic = "" if bar.statistic == "median" else f"{bar.statistic} "
    return f"{statistic}{sign} {bar.limit:g} {'met' if result.meets(bar) else 'NOT met'}"
