"""Laws of the tables for the docs: every figure stands in them once, beside all systems."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import main
from benchmarks.bars import BARS
from benchmarks.harness import Bar, Result, summarise
from benchmarks.markdown import render_markdown
from benchmarks.table import Run
from hicache.engine.machine import machine_facts

if TYPE_CHECKING:
    from pathlib import Path


def a_read(page_bytes: int, threads: int, speed: float, *, limit: float = 0.75) -> Result:
    return summarise(
        "read_warm",
        [speed, speed],
        params={"page_bytes": page_bytes, "threads": threads, "huge_pages": True},
        unit="GB/s",
        better="higher",
        bars=(Bar(limit, "ratio"),),
    )


def run_of(*results: Result, benchmark: str = "store") -> Run:
    return Run(
        benchmark=benchmark,
        command=f"python -m benchmarks {benchmark}",
        noise={"before": "quiet", "after": "loud"},
        commit="abc",
        date="2026-01-02",
        machine={"cpu": "a cpu", "memory_bytes": 4 * 10**9, "gpu": None, "versions": {"x": 1}},
        results=results,
    )


def tables(text: str) -> dict[str, list[list[str]]]:
    """Return the cells of each table by the heading above it."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|"):
            found.setdefault(heading, []).append(re.split(r"(?<!\\)\|", line)[1:-1])
    return {
        heading: [[cell.strip() for cell in row] for row in rows] for heading, rows in found.items()
    }


def test_figures_of_the_same_conditions_are_one_line_with_every_system() -> None:
    one, two = a_read(1 << 14, 1, 4.0), a_read(3 << 20, 2, 5.0)
    beside = [("memcpy", one, 8.0), ("other|1", one, 2.0), ("memcpy", two, 5.0)]
    text = render_markdown([run_of(*(own.beside(peer, [speed]) for peer, own, speed in beside))])
    assert tables(text)["`read_warm`"] == [
        ["page_bytes", "threads", "hicache", "p99", "beside memcpy", "beside other\\|1"],
        ["---", "---", "---:", "---:", "---:", "---:"],
        ["16 KiB", "1", "4", "4", "8 = 0.50 (0.75 **not met**)", "2 = 2.00 (0.75 met)"],
        ["3 MiB", "2", "5", "5", "5 = 1.00 (0.75 met)", ""],
    ]
    assert "In GB/s, more is better (huge_pages=true)." in text


def test_a_figure_that_was_taken_anew_beside_a_system_stands_in_front_of_it() -> None:
    alone = summarise("match", [10.0], params={"nodes": 1}, bars=(Bar(15), Bar(9, "p99")))
    anew = summarise("match", [12.0], params={"nodes": 1}).beside("other", [24.0])
    assert tables(render_markdown([run_of(alone, anew)]))["`match`"][2] == [
        "10 (15 met)",
        "12 / 24 = 2.00",
    ]


def test_a_condition_that_only_some_figures_have_is_left_open_for_the_others() -> None:
    rows = [
        summarise("step", [1.0], params={"state": "idle"}),
        summarise("step", [2.0], params={"state": "idle", "ranks": 2}),
    ]
    lines = tables(render_markdown([run_of(*rows)]))["`step`"]
    assert [line[0] for line in lines] == ["ranks", "---", "", "2"]


def test_every_bar_of_the_design_is_there_with_what_came_of_it() -> None:
    results = [
        a_read(128 << 10, threads, 4.0).beside("memcpy", [peer])
        for threads, peer in ((1, 4.0), (2, 8.0))
    ]
    text = render_markdown([run_of(*results)])
    lines = tables(text)["Bars"]
    assert [line[0] for line in lines[2:]] == [asked.what for asked in BARS]
    (line,) = [line for line in lines if line[0] == "warm reads of 128 KiB, of memcpy"]
    assert line[1:] == ["≥ 0.75", "0.5", "2", "**not met**"]
    assert sum(line[2] == "not measured" for line in lines) == len(BARS) - 1
    assert f"0 of {len(BARS)} are met" in text


def test_machine_commit_command_and_noise_are_named() -> None:
    text = render_markdown([run_of(a_read(1 << 14, 1, 4.0))])
    assert "cpu a cpu; memory 4 GB; x 1." in text
    assert "    python -m benchmarks store\n" in text
    assert "Commit abc, 2026-01-02. Before: quiet. After: loud.\n" in text
    assert "Fewer samples" not in text
    quick = dataclasses.replace(run_of(a_read(1 << 14, 1, 4.0)), quick=True)
    assert "Fewer samples" in render_markdown([quick])


def test_the_command_writes_the_tables_the_page_or_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = dataclasses.replace(run_of(a_read(1 << 14, 1, 4.0)), machine=machine_facts())
    run.write(tmp_path / "store.json")
    tables_file, page = tmp_path / "new" / "results.md", tmp_path / "other" / "report.html"
    assert main(["report", str(tmp_path), "--markdown", str(tables_file)]) == 0
    assert tables_file.read_text(encoding="utf-8").startswith("# Benchmark results")
    both = ["--html", str(page), "--markdown", str(tables_file)]
    assert main(["report", str(tmp_path), *both]) == 0
    assert page.exists()
    with pytest.raises(SystemExit) as exit_info:
        main(["report", str(tmp_path)])
    assert exit_info.value.code == 2
    assert "name what to write" in capsys.readouterr().err
