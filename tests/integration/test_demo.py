"""The demo as a person runs it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from hicache.cli import main
from hicache.engine import demo
from hicache.engine.weights import WeightsUnavailable

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_demo_finds_its_kv_in_every_tier_and_answers_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_file, page = tmp_path / "report.json", tmp_path / "report.html"
    status = main(["demo", "--model", "random", "--json", str(report_file), "--html", str(page)])
    printed = capsys.readouterr().err
    assert status == 0, printed
    assert "answers: equal" in printed

    report = json.loads(report_file.read_text())
    assert report["answers_equal"] is True
    assert {"model", "config", "machine", "turns", "movements"} <= set(report)
    before = [turn for turn in report["turns"] if not turn["after_restart"]]
    after = [turn for turn in report["turns"] if turn["after_restart"]]
    for tier in ("device", "host", "storage"):
        assert sum(turn[f"{tier}_hit_tokens"] for turn in before), tier
    assert sum(turn["storage_hit_tokens"] for turn in after)
    assert all(turn["answer_tokens"] >= 32 for turn in report["turns"])
    delayed = sum(turn["delayed_hit_tokens"] for turn in report["turns"])
    assert report["totals"]["all"]["delayed_hit_tokens"] == delayed
    assert report["counters"]["delayed_hit_tokens"] == delayed
    for name in ("write", "load", "persist", "prefetch"):
        assert report["movements"][name]["bytes"] > 0, name
    assert page.read_text().count("<svg") == 3


def test_weights_that_cannot_be_fetched_are_said_and_the_random_model_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(*args: object, **kwargs: object) -> Path:
        raise WeightsUnavailable("no network; connect and run it again")

    monkeypatch.setattr(demo, "fetch_gguf", unavailable)
    said: list[str] = []
    arguments = demo._with_weights(demo.DemoArguments(model="smollm2"), said.append)
    assert arguments.model == "random"
    assert "no network" in said[0]
    assert "random model" in said[0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--storage", "ftp:somewhere"], "file:DIRECTORY"),
        (["--page-size", "0"], "page_size"),
        (["--storage", "file:/dev/null/x"], "writable|create|directory"),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_the_reason(
    arguments: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--model", "random", *arguments]) in (1, 2)
    assert re.search(reason, capfd.readouterr().err)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--help"])
    assert stop.value.code == 0
    assert "token for token" in " ".join(capsys.readouterr().out.split())


def test_wrong_usage_ends_with_status_2() -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--write-policy", "sometimes"])
    assert stop.value.code == 2
