"""One page of all results in a folder: `python -m benchmarks report DIR --html FILE`."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bar_report import report_bars
from benchmarks.catalogue import known_benchmarks
from benchmarks.markdown import render_markdown
from benchmarks.plots import PLOTS
from benchmarks.regressions import Verdict, compare
from benchmarks.stored_runs import HISTORY, read_stored
from benchmarks.table import format_number, format_params, format_verdict, read_runs
from hicache.engine.report import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.harness import Result
    from benchmarks.regressions import Change
    from benchmarks.table import Run

__all__ = ["main", "missing_peers", "render_page", "write_page"]


def main(arguments: Sequence[str]) -> int:
    """Do what `arguments` say, and return 0.

    Wrong usage, and a folder without results, raise `SystemExit(2)`.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the JSON files are")
    parser.add_argument("--html", metavar="FILE", type=Path, help="page to write, with plots")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="the tables for the docs")
    options = parser.parse_args(arguments)
    if options.html is None and options.markdown is None:
        parser.error("name what to write: --html FILE, --markdown FILE or both")
    try:
        if options.html is not None:
            write_page(options.folder, options.html)
        if options.markdown is not None:
            options.markdown.parent.mkdir(parents=True, exist_ok=True)
            replace_file(options.markdown, render_markdown(read_runs(options.folder)))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def write_page(folder: Path, page: Path, *, failed: Mapping[str, int] | None = None) -> None:
    """Write the page of the results in `folder`.

    Args:
        folder: where the JSON files are.
        page: the file to write; its folder is made.
        failed: exit status of benchmarks that gave no result, which the page names.

    Raises:
        ValueError: there are no results, or Jinja2 or matplotlib is not installed.
    """
    runs = read_runs(folder)
    page.parent.mkdir(parents=True, exist_ok=True)
    replace_file(page, render_page(runs, failed=failed))


def render_page(
    runs: Sequence[Run], *, failed: Mapping[str, int] | None = None, history: Path = HISTORY
) -> str:
    """Return `runs` as one page that has no script and fetches nothing; texts are escaped.

    Args:
        runs: what was measured.
        failed: exit status of benchmarks that gave no result.
        history: where runs are stored that these are compared with.

    Raises:
        ValueError: Jinja2 or matplotlib is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ValueError("the page needs Jinja2: pip install 'hicache[demo]'") from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": format_number, "params": format_params}
    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    about = known_benchmarks()
    bars = report_bars(runs)
    return environment.from_string(template).render(
        sections=[_Section.of(run, about.get(run.benchmark, ""), history) for run in runs],
        failed=failed or {},
        missing=missing_peers(runs),
        machines=_different([run.machine for run in runs]),
        commits=sorted({f"{run.commit or 'unknown'} on {run.date}" for run in runs}),
        bars=bars,
        num_met=sum(bar.found.is_met for bar in bars),
        num_measured=sum(bar.found.row is not None for bar in bars),
        num_results=sum(len(run.results) for run in runs),
        peers=sorted({row.peer for run in runs for row in run.results if row.peer}),
    )


def missing_peers(runs: Sequence[Run]) -> list[str]:
    """Return the systems that were asked for with `--peers` and stand beside no figure."""
    measured = {row.peer for run in runs for row in run.results if row.peer}
    asked = set()
    for run in runs:
        words = shlex.split(run.command)
        if "--peers" in words:
            asked |= set(filter(None, words[words.index("--peers") + 1].split(",")))
    return sorted(name for name in asked if not any(peer.startswith(name) for peer in measured))


@dataclasses.dataclass(frozen=True)
class _Section:
    """What the page shows of a run."""

    run: Run
    title: str
    checks: str
    plots: Sequence[tuple[str, str]]
    rows: Sequence[tuple[Result, Sequence[tuple[str, bool]], Change]]
    num_worse: int

    @classmethod
    def of(cls, run: Run, about: str, history: Path) -> _Section:
        title, _, checks = about.partition("\n")
        changes = compare(run, read_stored(run.benchmark, history))
        return cls(
            run=run,
            title=title,
            checks=" ".join(checks.split()),
            plots=_plots(run),
            rows=[(change.row, list(_verdicts(change.row)), change) for change in changes],
            num_worse=sum(change.verdict is Verdict.WORSE for change in changes),
        )


def _different(machines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [one for index, one in enumerate(machines) if one not in machines[:index]]


def _verdicts(result: Result) -> Iterator[tuple[str, bool]]:
    for bar in result.bars:
        text = format_verdict(result, bar)
        met = result.meets(bar)
        yield text.removesuffix("NOT met").removesuffix("met").strip(), met


def _plots(run: Run) -> list[tuple[str, str]]:
    drawn = ((caption, draw(run.results)) for caption, draw in PLOTS.get(run.benchmark, ()))
    return [(caption, svg) for caption, svg in drawn if svg]
