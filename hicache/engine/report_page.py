"""The demo's report as one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING

from hicache.engine.report import replace_file
from hicache.engine.report_plots import COLORS, plot_movements, plot_times, plot_tokens
from hicache.engine.report_table import (
    continued_note,
    format_bytes,
    format_factor,
    format_ms,
    format_share,
    restart_note,
)
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicache.engine.report import DemoReport

__all__ = ["render_html", "write_html"]


def write_html(report: DemoReport, path: Path) -> None:
    """Write the page of `report` to `path`; see `render_html` and `replace_file`."""
    replace_file(path, render_html(report))


def render_html(report: DemoReport) -> str:
    """Return `report` as one HTML page: headline, plots, tables and an explanation of the terms.

    The page has no script and fetches nothing; texts of the report are escaped. Not for several
    threads at a time, because matplotlib's style is one per process.

    Raises:
        ConfigError: Jinja2 or matplotlib is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError("the page needs Jinja2: pip install 'hicache[demo]'") from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "size": format_bytes,
        "ms": format_ms,
        "factor": format_factor,
        "share": format_share,
        "flat": _flatten,
    }
    template = resources.files("hicache.engine").joinpath("report_page.html.j2")
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        report=report,
        totals=report.totals,
        restart_note=restart_note(report),
        continued_note=continued_note(report),
        movements=report.movements.by_name(),
        colors=COLORS,
        plots={
            "tokens": plot_tokens(report.turns),
            "times": plot_times(report.turns),
            "movements": plot_movements(report.movements),
        },
    )


def _flatten(mapping: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
