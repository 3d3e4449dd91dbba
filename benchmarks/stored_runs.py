"""Runs of the past, in few bytes: a file of JSON lines for each benchmark."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.table import format_params

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.harness import Result
    from benchmarks.table import Run

__all__ = ["HISTORY", "StoredRun", "add_run", "is_exact", "read_stored", "row_key"]

HISTORY: Final = Path(__file__).parent / "history"

_MAX_FILE_BYTES: Final = 80 << 10
"""With a dozen benchmarks the whole history stays below 1 MB, however long it goes on."""

_MAX_RUNS: Final = 10
"""Of one kind of machine; what has been so for ten runs is no surprise in the eleventh."""

_EXACT_UNITS: Final = frozenset({"blocks", "bytecodes", "calls", "ratio"})
"""What is counted: the same on every machine."""

_DIGITS: Final = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredRun:
    """What is kept of a run.

    Attributes:
        date, commit, quick: as of the `Run`.
        cpu, cores, device, python: the kind of machine, with the minor version of Python.
        rows: median and ratio to the peer by `row_key`; the ratio is None without a peer.
    """

    date: str
    commit: str
    quick: bool
    cpu: str
    cores: int
    device: str | None
    python: str
    rows: Mapping[str, tuple[float, float | None]]

    @classmethod
    def of(cls, run: Run) -> StoredRun:
        """Return what is kept of `run`."""
        rows = {
            row_key(row): (_short(row.median), None if row.ratio is None else _short(row.ratio))
            for row in run.results
        }
        major, minor, *_ = run.machine["versions"]["python"].split(".")
        return cls(
            date=run.date,
            commit=run.commit,
            quick=run.quick,
            cpu=run.machine["cpu"],
            cores=run.machine["cores"],
            device=run.machine["device"],
            python=f"{major}.{minor}",
            rows=rows,
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be equal for times to be compared."""
        return self.quick, self.cpu, self.cores, self.device, self.python

    def comparable(self, other: StoredRun, *, exact: bool) -> bool:
        """Whether figures of both can be compared; exact ones need the same Python alone."""
        return self.python == other.python if exact else self.kind == other.kind

    def to_line(self) -> str:
        """Return the run as a line of JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_line(cls, line: str) -> StoredRun:
        """Return the run of a line; a `ValueError` when it is none."""
        fields: dict[str, Any] = json.loads(line)
        try:
            rows = {key: (median, ratio) for key, (median, ratio) in fields.pop("rows").items()}
            return cls(**fields, rows=rows)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{line[:40]!r} is none") from error


def row_key(row: Result) -> str:
    """Return what tells a row from the others of its benchmark."""
    beside = "" if row.peer is None else f" / {row.peer}"
    return f"{row.name} {format_params(row.params)}{beside}"


def is_exact(row: Result) -> bool:
    """Whether the figure is counted, so that it does not depend on the machine."""
    return row.unit in _EXACT_UNITS


def read_stored(benchmark: str, folder: Path = HISTORY) -> list[StoredRun]:
    """Return the stored runs of a benchmark, oldest first; none where there is no file.

    Raises:
        ValueError: the file holds something else; the message names it.
    """
    path = _path(benchmark, folder)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return [StoredRun.from_line(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path} holds something else than stored runs: {error}") from error


def add_run(run: Run, folder: Path = HISTORY) -> Path:
    """Store a run and return its file.

    Of the runs of its kind of machine the oldest goes when there are more than 10, and the oldest
    of all goes while the file has more than 80 KiB.
    """
    stored = [*read_stored(run.benchmark, folder), StoredRun.of(run)]
    kinds = Counter(one.kind for one in stored)
    lines = []
    for one in stored:
        kinds[one.kind] -= 1
        if kinds[one.kind] < _MAX_RUNS:
            lines.append(one.to_line() + "\n")
    path = _path(run.benchmark, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(_newest(lines)), encoding="utf-8")
    return path


def _newest(lines: Sequence[str]) -> Sequence[str]:
    """Return as many of the last lines as a file may hold."""
    num_bytes = 0
    for index in range(len(lines) - 1, -1, -1):
        num_bytes += len(lines[index].encode())
        if num_bytes > _MAX_FILE_BYTES:
            return lines[index + 1 :]
    return lines


def _path(benchmark: str, folder: Path) -> Path:
    return folder / f"{benchmark}.jsonl"


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
