"""Laws of the page of results: it says what the files say, and needs nothing but itself."""

from __future__ import annotations

import dataclasses
import html
import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import main
from benchmarks.bars import BARS
from benchmarks.catalogue import known_benchmarks
from benchmarks.harness import Bar, Result, summarise
from benchmarks.plots import PLOTS
from benchmarks.report import render_page
from benchmarks.stored_runs import add_run
from benchmarks.table import Run, read_runs

if TYPE_CHECKING:
    from pathlib import Path


def rows(benchmark: str) -> list[Result]:
    """Return figures of the kind that `benchmark` gives, enough for each of its plots."""
    if benchmark == "tree":
        evict = [
            summarise("evict", [leaves / 100], params={"leaves": leaves, "shared_parent": False})
            for leaves in (100, 1000)
        ]
        return [*evict, *(one.beside("sglang-1", [7.0]) for one in evict)]
    if benchmark == "copy":
        params: dict[str, str | int | float | bool] = {
            "layout": "page_first",
            "pages": "random",
            "shape": "1x1x8",
            "page_size": 4,
        }
        return [
            summarise(name, [4.0], params=params, unit="GB/s", better="higher").beside(
                "memcpy", [8.0]
            )
            for name in ("write", "load")
        ]
    if benchmark == "store":
        store: dict[str, str | int | float | bool] = {"threads": 1, "huge_pages": True}
        return [
            summarise(
                name, [4.0], params={**store, "page_bytes": size}, unit="GB/s", better="higher"
            ).beside(peer, [8.0])
            for name in ("read_warm", "write_warm")
            for size in (1 << 14, 3 << 20)
            for peer in ("memcpy", "preadv" if name == "read_warm" else "pwritev", "other-1-file")
        ]
    if benchmark == "controller":
        return [
            summarise("call", [1.0, 9.0], params={"call": "insert", "background": background})
            for background in ("quiet", "full")
        ]
    if benchmark == "replay":
        found: dict[str, str | int | float | bool] = {"trace": "synthetic", "policy": "adaptive"}
        return [
            summarise(
                "block_hit_ratio", [0.3], params={**found, "blocks": blocks}, unit="ratio",
                better="higher",
            ).beside(peer, [0.2])
            for blocks in (1_000, 5_859)
            for peer in ("lru", "belady", "sglang-1-lru")
        ]  # fmt: skip
    computed = summarise("ttft", [90.0], params={"tier": "none"}, unit="ms")
    bars = (Bar(5, "ratio"),)
    cached = summarise("ttft", [30.0], params={"tier": "L2"}, unit="ms", bars=bars)
    return [computed, cached.beside("computed", [90.0])]


def run_of(benchmark: str) -> Run:
    return Run(
        benchmark=benchmark,
        command=f"python -m benchmarks {benchmark} <&>",
        noise={"before": "quiet"},
        results=rows(benchmark),
    )


def test_the_page_has_every_run_with_its_command_bars_and_peers(tmp_path: Path) -> None:
    for benchmark in PLOTS:
        run_of(benchmark).write(tmp_path / f"{benchmark}.json")
    page = tmp_path / "new" / "report.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    for benchmark in PLOTS:
        assert f"python -m benchmarks {benchmark} &lt;&amp;&gt;" in text
    assert "ratio &gt;= 5 not met" in text
    assert "sglang-1" in text
    assert "<script" not in text
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text)
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("benchmark", list(PLOTS))
def test_a_plot_is_one_svg_element_and_empty_where_nothing_was_measured(benchmark: str) -> None:
    for _, draw in PLOTS[benchmark]:
        assert ET.fromstring(draw(rows(benchmark))).tag == "{http://www.w3.org/2000/svg}svg"
        assert draw([]) == ""


def test_the_page_says_of_every_bar_of_the_design_what_came_of_it() -> None:
    page = render_page([run_of("replay"), run_of("tree")])
    for asked in BARS:
        assert f'<th scope="row">{asked.what}</th>' in page
    verdicts = re.findall(r"(?:>|\n)(met|not met|not measured)</td>", page)
    assert len(verdicts) == len(BARS)
    # Evictions from 100 and 1,000 leaves take 1 and 10 us; .3 of the synthetic trace is too little.
    assert {word: verdicts.count(word) for word in ("met", "not met")} == {"met": 2, "not met": 1}
    assert "2 of 3" in page


def test_a_benchmark_that_failed_and_a_peer_that_stands_nowhere_are_named() -> None:
    asked = dataclasses.replace(run_of("tree"), command="tree --peers sglang,lmcache")
    page = render_page([asked], failed={"store": 2})
    assert "store failed with status 2" in page
    assert "lmcache was asked for" in page
    assert "sglang was asked for" not in page


def test_a_figure_that_is_worse_than_stored_runs_is_marked(tmp_path: Path) -> None:
    before, now = run_of("controller"), run_of("controller")
    for _ in range(3):
        add_run(before, tmp_path)
    slower = dataclasses.replace(before.results[0], median=50.0)
    now = dataclasses.replace(now, results=[slower, *before.results[1:]])
    page = render_page([now], history=tmp_path)
    assert page.count(", worse</td>") == 1
    assert "0.10, worse" in page
    assert ">1.00</td>" in page


def test_the_page_says_how_the_work_was_checked() -> None:
    checks = known_benchmarks()["tree"].partition("\n")[2]
    assert " ".join(checks.split()) in html.unescape(render_page([run_of("tree")]))


def test_a_machine_that_several_runs_share_is_shown_once() -> None:
    page = render_page([run_of("tree"), run_of("copy")])
    assert page.count('<th scope="row">cores</th>') == 1


@pytest.mark.parametrize("content", [None, "{}"], ids=["no file", "another file"])
def test_a_folder_without_results_is_wrong_usage(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "tree.json").write_text(content)
    with pytest.raises(SystemExit) as exit_info:
        main(["report", str(tmp_path), "--html", str(tmp_path / "report.html")])
    assert exit_info.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_runs_are_read_in_order_of_their_files(tmp_path: Path) -> None:
    for benchmark in ("tree", "copy"):
        run_of(benchmark).write(tmp_path / f"{benchmark}.json")
    assert [run.benchmark for run in read_runs(tmp_path)] == ["copy", "tree"]
