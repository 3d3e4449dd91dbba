"""The command as it is typed: what it writes, what it refuses."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from small_traces import random_requests

from hicache.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.capture import CaptureFixture


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A Mooncake file of 150 requests, 10 s from one to the next."""
    rng = random.Random(1)
    path = tmp_path / "small.jsonl"
    lines = [
        json.dumps(
            {
                "timestamp": 10_000 * index,
                "input_length": 512 * len(request.blocks),
                "output_length": 100,
                "hash_ids": request.blocks.tolist(),
            }
        )
        for index, request in enumerate(random_requests(rng, 150, max_blocks=20))
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def run(trace: Path, *options: str) -> dict[str, Any]:
    target = trace.with_name("report.json")
    assert main(["replay", str(trace), "--json", str(target), *options]) == 0
    report: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return report


def test_a_size_gives_one_result_with_the_agreed_fields(
    trace: Path, capsys: CaptureFixture[str]
) -> None:
    report = run(trace, "--capacity-blocks", "20")
    assert (report["trace"], report["block_tokens"]) == ("small.jsonl", 512)
    (result,) = report["results"]
    assert (result["policy"], result["capacity_blocks"], result["requests"]) == ("lru", 20, 150)
    assert result["hits_by_tier"] == {"device": result["hit_blocks"], "host": 0, "storage": 0}
    assert result["block_hit_ratio"] == result["hit_blocks"] / result["blocks"]
    assert 0 < result["block_hit_ratio"] <= result["token_hit_ratio"] < 1
    assert result["written_blocks_per_requested"] == 0
    out = capsys.readouterr().out
    assert f"{result['block_hit_ratio']:.4f}" in out
    assert "page size of 1" in out


def test_options_given_again_are_combined(trace: Path) -> None:
    report = run(
        trace,
        *("--policy", "lru", "--policy", "belady", "--capacity-blocks", "9"),
        *("--capacity-blocks", "inf", "--host-blocks", "0", "--host-blocks", "15"),
        *("--write-policy", "write_back", "--write-policy", "write_through"),
    )
    found = [
        (one["policy"], one["capacity_blocks"], one["host_blocks"], one["write_policy"])
        for one in report["results"]
    ]
    # Where nothing is written, one write policy stands for both.
    assert found == [
        ("lru", 9, 0, "write_back"),
        ("lru", 9, 15, "write_back"),
        ("lru", 9, 15, "write_through"),
        ("lru", "inf", 0, "write_back"),
        ("lru", "inf", 15, "write_back"),
        ("lru", "inf", 15, "write_through"),
        ("belady", 9, 0, "write_back"),
        ("belady", 9, 15, "write_back"),
        ("belady", "inf", 0, "write_back"),
        ("belady", "inf", 15, "write_back"),
    ]


def test_without_a_size_there_is_a_curve_up_to_all_blocks(trace: Path) -> None:
    report = run(trace)
    sizes = [one["capacity_blocks"] for one in report["results"]]
    ratios = [one["block_hit_ratio"] for one in report["results"]]
    assert sizes[-1] == report["distinct_blocks"]
    assert ratios == sorted(ratios)


def test_three_tiers_hit_in_each_and_answers_take_part(trace: Path) -> None:
    sizes = ("--capacity-blocks", "9", "--host-blocks", "20", "--storage-blocks", "inf")
    (result,) = run(trace, *sizes, "--insert-output")["results"]
    assert all(result["hits_by_tier"].values())
    assert result["stored_blocks"] > 0
    assert result["storage_admission"] == "all"
    (some,) = run(trace, *sizes, "--storage-admission", "adaptive")["results"]
    assert some["storage_admission"] == "adaptive"


def test_a_part_of_the_trace_can_be_replayed(trace: Path) -> None:
    assert run(trace, "--limit", "7")["results"][0]["requests"] == 7


@pytest.mark.parametrize("name", ["curve.svg", "curve.png"])
def test_results_are_drawn(trace: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    plot = trace.with_name(name)
    run(trace, "--plot", str(plot), "--policy", "lru", "--policy", "belady")
    assert plot.stat().st_size > 1000


def test_advice_names_sizes_policies_and_what_to_expect(
    trace: Path, capsys: CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = trace.with_name("advice.svg")
    policies = ("--policy", "lru", "--policy", "lfu")
    report = run(trace, "--advise", "--capacity-blocks", "9", "--plot", str(plot), *policies)
    advice = report["advice"]
    assert advice["policy"] in ("lru", "lfu")
    assert advice["host_blocks"] in [point["blocks"] for point in advice["host_curve"]]
    assert advice["token_hit_ratio"] == report["results"][0]["token_hit_ratio"]
    out = capsys.readouterr().out
    for word in ("L1", "L2", "L3", "Evict by", "Time to first token", "Load of one engine"):
        assert word in out
    assert "worth having" in plot.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--policy", "best"], "there is no eviction policy 'best'"),
        (["--storage-blocks", "5"], "give --host-blocks as well"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--plot", "curve.txt"], "must end in"),
        (["--json", "/dev/null/report.json"], "cannot be written"),
        (["--engine-price", "3"], "give --advise as well"),
        (["--advise"], "needs the size of L1"),
        (["--advise", "--capacity-blocks", "1", "--capacity-blocks", "2"], "one size of L1"),
        (["--advise", "--capacity-blocks", "9", "--memory-price", "3"], "--engine-price"),
        (["--advise", "--engine-price", "-3"], "at least 0"),
        (["--speed", "0"], "speed must be more than 0"),
        (["--block-tokens", "100"], "say how many tokens an id stands for"),
        (["--format", "log"], "line 1: give 'tokens'"),
        (["--tokenizer", "none.json", "--format", "log"], "none.json cannot be read"),
    ],
)
def test_what_cannot_work_ends_with_2_and_says_why(
    trace: Path, options: list[str], complaint: str, capsys: CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), *options]) == 2
    assert complaint in capsys.readouterr().err


def test_a_size_that_is_none_is_wrong_usage(trace: Path, capsys: CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["replay", str(trace), "--capacity-blocks", "-1"])
    assert caught.value.code == 2
    assert "invalid size" in capsys.readouterr().err


def test_help_teaches_the_formats_and_gives_examples(capsys: CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    out = capsys.readouterr().out
    for word in ("hash_ids", "output_tokens", "belady", "--advise", "examples:", "Exit status"):
        assert word in out
