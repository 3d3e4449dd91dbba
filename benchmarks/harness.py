"""What every benchmark shares: timing, results and their bars, the JSON.

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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TextIO

__all__ = [
    "Bar",
    "CheckFailed",
    "Result",
    "Step",
    "alternate",
    "check",
    "describe_noise",
    "run_steps",
    "summarise",
    "time_calls",
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
    """What a figure has to reach: at most `limit`, or at least where higher is better.

    A `ratio` is to be at least `limit`, and asks nothing of a figure without a peer.
    """

    limit: float
    statistic: Literal["median", "p99", "ratio"] = "median"

    def asks_for_more(self, result: Result) -> bool:
        """Whether more is better of what `result` is asked for."""
        return self.statistic == "ratio" or result.better == "higher"


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

    def reached(self, bar: Bar) -> float | None:
        """Return what `bar` asks about; None where that is a ratio and there is no peer."""
        return {"median": self.median, "p99": self.p99, "ratio": self.ratio}[bar.statistic]

    def meets(self, bar: Bar) -> bool:
        """Whether the figure reaches `bar`."""
        reached = self.reached(bar)
        if reached is None:
            return True
        return reached >= bar.limit if bar.asks_for_more(self) else reached <= bar.limit

    def beside(self, peer: str, values: Sequence[float]) -> Result:
        """Return this figure with the median of what `peer` reached at the same work."""
        return dataclasses.replace(self, peer=peer, peer_median=statistics.median(values))

    def to_json(self) -> dict[str, Any]:
        """Return the figure as plain data, which `from_json` reads back."""
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
            "bars": [dataclasses.asdict(bar) for bar in self.bars],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        """Return the figure that `to_json` gave."""
        fields = {name: value for name, value in data.items() if name != "ratio"}
        return cls(**{**fields, "bars": tuple(Bar(**bar) for bar in data["bars"])})


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


def alternate(
    ours: Callable[[int], Sequence[float]],
    theirs: Callable[[int], Sequence[float]],
    *,
    samples: int,
    rounds: int = 10,
) -> tuple[list[float], list[float]]:
    """Measure both in turn, so that what disturbs the machine for a while disturbs both.

    Args:
        ours: measures as many times as it is told and returns the values.
        theirs: measures the same work of the peer.
        samples: values of each, at least.
        rounds: how often they take turns.
    """
    mine: list[float] = []
    others: list[float] = []
    for _ in range(rounds):
        mine += ours(math.ceil(samples / rounds))
        others += theirs(math.ceil(samples / rounds))
    return mine, others


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
