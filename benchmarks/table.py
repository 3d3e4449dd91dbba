"""Results as text and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Bar, Result
from hicache.engine.machine import machine_facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Run",
    "format_number",
    "format_params",
    "format_table",
    "format_value",
    "format_verdict",
    "read_runs",
]


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def _commit() -> str:
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        answer = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return answer.stdout.strip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The figures of one benchmark, and what has to stand beside them.

    Attributes:
        benchmark: its name.
        command: what was typed.
        noise: how quiet the machine was before and after, in words.
        quick: whether it took fewer samples and smaller sizes.
        date: of the day, in UTC.
        commit: what was measured; with a `+` where files were changed since, empty where unknown.
        machine: facts about it.
        results: the figures.
    """

    benchmark: str
    command: str
    noise: Mapping[str, str]
    quick: bool = False
    date: str = dataclasses.field(default_factory=_today)
    commit: str = dataclasses.field(default_factory=_commit)
    machine: Mapping[str, Any] = dataclasses.field(default_factory=machine_facts)
    results: Sequence[Result]

    def write(self, path: Path) -> None:
        """Write the run to `path` as JSON, which `read` reads back."""
        document = {
            "benchmark": self.benchmark,
            "command": self.command,
            "noise": dict(self.noise),
            "quick": self.quick,
            "date": self.date,
            "commit": self.commit,
            "machine": dict(self.machine),
            "results": [result.to_json() for result in self.results],
        }
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read what `write` wrote.

        Raises:
            ValueError: the file is none of a benchmark; the message names it.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            results = [Result.from_json(result) for result in document.pop("results")]
            return cls(**document, results=results)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is no result of a benchmark: {error}") from error


def read_runs(folder: Path) -> list[Run]:
    """Return the runs in `folder`, by name of their files.

    Raises:
        ValueError: a file is none of a benchmark, or there is none at all.
    """
    runs = [Run.read(path) for path in sorted(folder.glob("*.json"))]
    if not runs:
        raise ValueError(f"{folder} has no results; write some there with --json FILE")
    return runs


def format_table(results: Sequence[Result]) -> str:
    """Return the figures as aligned plain text, each with its bar and whether it is met.

    The columns of the peer are there if any figure has one.
    """
    rows = [["name", "params", "median", "p99", "unit", "samples", "bar"]]
    rows += [
        [
            result.name,
            format_params(result.params),
            format_number(result.median),
            format_number(result.p99),
            result.unit,
            str(result.samples),
            "; ".join(format_verdict(result, bar) for bar in result.bars) or "-",
        ]
        for result in results
    ]
    if any(result.peer for result in results):
        rows[0] += ["peer", "peer median", "ratio"]
        for row, result in zip(rows[1:], results, strict=True):
            row += [
                result.peer or "-",
                format_number(result.peer_median),
                format_number(result.ratio),
            ]
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


def format_params(params: Mapping[str, object]) -> str:
    """Return `name=value` of every parameter, in order."""
    return " ".join(f"{key}={format_value(value)}" for key, value in params.items())


def format_number(value: float | None) -> str:
    """Return three digits that say something, or all of them where there are more."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_verdict(result: Result, bar: Bar) -> str:
    """Return what the bar asks for and whether the figure reaches it."""
    statistic = "" if bar.statistic == "median" else f"{bar.statistic} "
    met = "met" if result.meets(bar) else "NOT met"
    return f"{statistic}{'>=' if bar.asks_for_more(result) else '<='} {bar.limit:g} {met}"


def format_value(value: object) -> str:
    """Return a parameter's value."""
    return str(value).lower() if isinstance(value, bool) else str(value)
