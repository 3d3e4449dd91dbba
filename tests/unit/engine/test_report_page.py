"""Laws of the demo's page: complete, self-contained, escaped, and valid with every report."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import pytest

from hicache.engine.report import (
    AnswerDifference,
    DemoReport,
    MovementReport,
    Movements,
    TurnReport,
)
from hicache.engine.report_page import render_html, write_html
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Reads a page: its elements with their attributes, and the cells of every table row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data.strip()

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def make_turns(users: int, turns: int, **changes: Any) -> tuple[TurnReport, ...]:
    return tuple(
        TurnReport(
            **{
                "user": user,
                "turn": turn,
                "after_restart": turn >= turns // 2,
                "prompt_tokens": 1000 + 64 * turn + user,
                "device_hit_tokens": 64 * turn,
                "host_hit_tokens": user,
                "storage_hit_tokens": 300,
                "computed_tokens": 700,
                "ttft_seconds": 0.1 + 0.01 * user,
                "ttft_uncached_seconds": 0.4 + 0.1 * turn,
                "answer_tokens": 8,
                "answer_equal": True,
                **changes,
            }
        )
        for turn in range(turns)
        for user in range(users)
    )


def make_report(turns: tuple[TurnReport, ...], **changes: Any) -> DemoReport:
    values: dict[str, Any] = {
        "model": "smollm2",
        "config": {"page_size": 64, "storage": {"backend": "file", "extra_config": {}}},
        "machine": {"cpu": "a CPU", "device": None},
        "turns": turns,
        "movements": Movements(write=MovementReport(num_bytes=1 << 30, seconds=0.5)),
    }
    return DemoReport(**{**values, **changes})


REPORT = make_report(make_turns(3, 4))


@pytest.fixture(scope="module")
def text() -> str:
    """The page of `REPORT`."""
    return render_html(REPORT)


def test_the_page_has_every_turn_and_three_plots(text: str) -> None:
    page = Page(text)
    assert page.count("svg") == 3
    first = [row[:8] for row in page.rows if len(row) == 12 and row[0].isdigit()]
    assert first == [
        [
            str(turn.user),
            str(turn.turn),
            str(turn.prompt_tokens),
            str(turn.device_hit_tokens),
            str(turn.host_hit_tokens),
            str(turn.storage_hit_tokens),
            str(turn.computed_tokens),
            f"{turn.ttft_seconds * 1e3:.1f}",
        ]
        for turn in REPORT.turns
    ]
    assert page.rows.count(["after the restart"]) == 1
    assert ["page_size", "64"] in page.rows
    assert ["storage.backend", "file"] in page.rows
    assert ["device", "none"] in page.rows
    assert ["write", "1.07 GB", "0.500", "2.15 GB/s"] in page.rows


def test_pages_of_an_earlier_run_are_said_where_there_were_any(text: str) -> None:
    continued = render_html(make_report(make_turns(1, 2), num_pages_at_start=1234))
    assert "L3 had 1,234 pages of a run that did not end" in continued
    assert "that did not end" not in text


@pytest.mark.parametrize("size", [(0, 0), (1, 2), (15, 4)])
def test_a_report_of_any_length_makes_a_valid_page(size: tuple[int, int]) -> None:
    page = Page(render_html(make_report(make_turns(*size), movements=Movements())))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {target for _, target in re.findall(r'(href="|url\()#([^")]+)', page.text)} == set(ids)
    assert page.count("svg") == 3


def test_times_of_zero_make_a_page() -> None:
    assert Page(render_html(make_report(make_turns(2, 2, ttft_seconds=0.0)))).count("svg") == 3


def test_the_page_fetches_nothing_and_runs_nothing(text: str) -> None:
    page = Page(text)
    assert page.count("script") == page.count("link") == page.count("img") == 0
    for _, attributes in page.elements:
        for name in ("src", "href", "xlink:href", "data", "onload"):
            assert (attributes.get(name) or "#").startswith("#")
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "@import" not in text


def test_the_plots_take_the_colour_of_the_text(text: str) -> None:
    assert "currentColor" in text
    assert "#010203" not in text


def test_texts_of_the_report_are_escaped() -> None:
    evil = "<script>alert('x')</script> & \"q\""
    report = make_report(
        make_turns(1, 1, text=evil), model=evil, config={evil: evil}, machine={"cpu": evil}
    )
    page = Page(render_html(report))
    assert page.count("script") == 0
    assert "<script" not in page.text
    assert [evil, evil] in page.rows
    assert ["0", "0", evil] in page.rows


def test_answers_that_differ_are_marked_and_listed(text: str) -> None:
    difference = AnswerDifference(
        user=0, turn=0, position=5, cached_top2=((7, 1.5), (8, 1.25)),
        uncached_top2=((8, 1.5), (7, 1.25)), near_tie=False,
    )  # fmt: skip
    turns = make_turns(1, 1, answer_equal=False) + make_turns(1, 3)[1:]
    different = render_html(make_report(turns, differences=(difference,)))
    row = ["0", "0", "5", "7 (1.50000), 8 (1.25000)", "8 (1.50000), 7 (1.25000)", "no"]
    assert row in Page(different).rows
    assert '<b class="bad">no</b>' in different
    assert "1 of 3 answers differ" in " ".join(different.split())

    assert '<b class="good">yes</b>' in text
    assert 'class="bad"' not in text
    assert "Differences" not in text


def test_rendering_leaves_the_state_of_matplotlib_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    before = mpl.rcParams.copy()
    render_html(make_report(make_turns(1, 2)))
    assert mpl.rcParams.copy() == before


def test_equal_reports_make_equal_pages(tmp_path: Path, text: str) -> None:
    write_html(REPORT, tmp_path / "deep" / "report.html")
    assert (tmp_path / "deep" / "report.html").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_extra_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'hicache\[demo\]'"):
        render_html(make_report(make_turns(1, 1)))
