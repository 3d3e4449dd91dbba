"""The demo over several ranks, as a person runs it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from hicache.cli import main
from hicache.engine import demo
from hicache.engine.demo_options import DemoSize
from hicache.engine.model_config import tiny_config
from hicache.storage.page_store import summarize

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GUARD_SECONDS = 120.0
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two conversations of two turns, one of them after the restart."""
    size = DemoSize(
        num_users=2,
        turns_before_restart=1,
        turns_after_restart=1,
        source_tokens=300,
        answer_tokens=16,
        device_tokens=2560,
        chunk_tokens=512,
    )
    monkeypatch.setitem(demo._SIZES, "random", size)


def test_two_ranks_answer_as_without_a_cache_and_one_goes_on_from_what_they_have_stored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], small: None
) -> None:
    report_file, page = tmp_path / "report.json", tmp_path / "report.html"
    arguments = ["--model", "random", "--tp", "2", "--json", str(report_file), "--html", str(page)]
    status = main(["demo", *arguments])
    printed = capfd.readouterr().err
    assert status == 0, printed
    report = json.loads(report_file.read_text())
    assert report["answers_equal"] is True
    config = report["config"]
    assert (config["tp_size"], config["pp_size"], config["restart_tp_size"]) == (2, 1, 1)
    assert config["cache"]["host"]["layout"] == "page_head"
    after = [turn for turn in report["turns"] if turn["after_restart"]]
    assert len(after) == 2
    assert all(turn["storage_hit_tokens"] for turn in after)
    # Two ranks add in another order than one, and that is all the difference there is.
    assert 0 < report["restart_logit_difference"] < 1e-3
    for where in (printed, page.read_text()):
        assert "logits of the same prompt differ" in where


def test_stages_restart_as_they_were(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], small: None
) -> None:
    report_file = tmp_path / "report.json"
    ways = ["--pp", "2", "--layout", "page_first"]
    assert main(["demo", "--model", "random", *ways, "--json", str(report_file)]) == 0, (
        capfd.readouterr().err
    )
    report = json.loads(report_file.read_text())
    assert report["answers_equal"] is True
    assert report["config"]["cache"]["host"]["layout"] == "page_first"
    assert report["restart_logit_difference"] is None
    after = [turn for turn in report["turns"] if turn["after_restart"]]
    assert all(turn["storage_hit_tokens"] for turn in after)


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8") as file:
        return [int(child) for child in file.read().split()]


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + GUARD_SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def stores_something(storage: Path) -> bool:
    if not (storage / "FORMAT").exists():
        return False
    return sum(one.num_pages for one in summarize(str(storage)).namespaces) > 50


@pytest.mark.parametrize("way", ["a rank is killed", "Ctrl-C", "the parent is killed"])
def test_when_it_is_ended_half_way_no_process_is_left(way: str, tmp_path: Path) -> None:
    storage = tmp_path / "l3"
    options = ["--model", "random", "--tp", "2", "--storage", f"file:{storage}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hicache.cli", "demo", *options],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: stores_something(storage), "the demo stores too little")
        ranks = children_of(process.pid)
        assert len(ranks) == 2
        if way == "a rank is killed":
            os.kill(ranks[1], signal.SIGKILL)
        elif way == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(process.pid, signal.SIGKILL)
        _, printed = process.communicate(timeout=GUARD_SECONDS)
        wait_until(lambda: all(map(is_gone, ranks)), "an orphan is left")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if way == "a rank is killed":
        assert process.returncode == 1
        assert "before the restart process 1 was ended by SIGKILL" in printed
        assert "Traceback" not in printed
    else:
        assert process.returncode != 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tp", "3"], "3 tensor-parallel ranks cannot share 4 query heads on 2 KV heads"),
        (["--tp", "5"], "need a query head each, and tiny-llama has 4"),
        (["--pp", "5"], "5 pipeline stages need a layer each"),
        (["--tp", "0"], "at least 1"),
        (["--tp", "2", "--layout", "page_first"], "take page_head, or equal numbers of ranks"),
        (["--tp", "2", "--serve"], "runs on one rank"),
    ],
)
def test_ranks_that_cannot_be_are_refused_before_anything_is_started(
    arguments: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--model", "random", *arguments]) == 2
    assert re.search(reason, capfd.readouterr().err)


def test_the_real_models_heads_may_be_split_unevenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2 has 9 query heads on 3 KV heads: storage keeps each KV head by itself."""
    shape = dataclasses.replace(tiny_config(), num_heads=9, num_kv_heads=3)
    monkeypatch.setattr(demo, "smollm2_config", lambda: shape)
    assert demo._layout(demo.DemoArguments(tp=2)) == ("page_head", 3)
