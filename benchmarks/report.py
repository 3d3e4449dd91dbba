"""One HTML page of all results in a folder: `python -m benchmarks report DIR --html FILE`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plots import PLOTS
from benchmarks.table import Run, format_number, format_params, format_verdict
from hicache.engine.report import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.harness import Result

__all__ = ["main", "read_runs", "render_page"]


def main(arguments: Sequence[str]) -> None:
    """Do what `arguments` say. Wrong usage, and a folder without results, raise `SystemExit(2)`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the JSON files are")
    parser.add_argument("--html", metavar="FILE", type=Path, required=True, help="page to write")
    options = parser.parse_args(arguments)
    try:
        runs = read_runs(options.folder)
        options.html.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.html, render_page(runs))
    except (OSError, ValueError) as error:
        parser.error(str(error))


def read_runs(folder: Path) -> list[Run]:
    """Return the runs in `folder`, by name of their files.

    Raises:
        ValueError: a file is none of a benchmark, or there is none at all.
    """
    runs = [Run.read(path) for path in sorted(folder.glob("*.json"))]
    if not runs:
        raise ValueError(f"{folder} has no results; write some there with --json FILE")
    return runs


def render_page(runs: Sequence[Run]) -> str:
    """Return `runs` as one page that has no script and fetches nothing; texts are escaped.

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
    verdicts = [verdict for run in runs for result in run.results for verdict in _verdicts(result)]
    return environment.from_string(template).render(
        runs=runs,
        machines=_different([run.machine for run in runs]),
        verdicts=lambda result: list(_verdicts(result)),
        num_met=sum(met for _, met in verdicts),
        num_bars=len(verdicts),
        num_results=sum(len(run.results) for run in runs),
        peers=sorted({row.peer for run in runs for row in run.results if row.peer}),
        plots={run.benchmark: _plots(run) for run in runs},
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
