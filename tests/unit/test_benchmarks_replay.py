"""Laws of the benchmark of replays: hits are counted twice, and whoever counts wrong is found."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import benchmarks.peers.sglang_replay
import benchmarks.replay
from benchmarks.harness import CheckFailed
from benchmarks.peers.sglang_process import SglangProcess
from benchmarks.peers.sglang_replay import hits_as_sglang_counts, rows_beside
from benchmarks.replay_counts import POLICIES, ReplayCounts, hits_of_single_blocks
from benchmarks.replay_traces import ReplayTrace, find_traces, made_up_trace
from hicache.replay import CacheOptions, TimeModel, TraceRequest, replay

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.harness import Result

SIZES = (20, 60)
TRACE = made_up_trace(200, sizes=SIZES)


def run(trace: ReplayTrace) -> list[Result]:
    (step,) = benchmarks.replay.steps(quick=True, traces=[trace])
    return list(step.run())


def requests_of(*prompts: list[int]) -> list[TraceRequest]:
    """Return requests of these blocks; a number stands for the block with all before it."""
    return [
        TraceRequest(
            arrival_seconds=float(second),
            input_tokens=512 * len(blocks),
            output_tokens=0,
            blocks=np.array(blocks, dtype=np.int32),
        )
        for second, blocks in enumerate(prompts)
    ]


# -- hicache alone --------------------------------------------------------------------------------


def test_the_adaptive_policy_stands_alone_and_beside_each_of_the_others_at_every_size() -> None:
    rows = run(TRACE)
    found = [row for row in rows if row.name == "block_hit_ratio"]
    assert [(row.params["blocks"], row.peer) for row in found] == [
        (size, peer) for size in SIZES for peer in (None, *POLICIES[1:], "belady")
    ]
    assert all(0 < row.median < 1 and row.params["policy"] == "adaptive" for row in found)
    bounds = [row.ratio for row in found if row.peer == "belady"]
    assert all(ratio is not None and ratio <= 1 for ratio in bounds)
    leads = [row for row in rows if row.name == "lead"]
    for lead, size in zip(leads, SIZES, strict=True):
        own = {row.peer: row for row in found if row.params["blocks"] == size}
        fixed = max(own[peer].peer_median or 0 for peer in ("lru", "slru"))
        assert lead.median == pytest.approx(100 * (own[None].median - fixed))
    speeds = [row.params["policy"] for row in rows if row.name == "requests"]
    assert speeds == [*POLICIES, "belady"]


def test_a_trace_that_is_made_up_has_no_bars() -> None:
    assert not any(row.bars for row in run(TRACE))


def test_hits_that_others_have_counted_differently_fail_the_check() -> None:
    known = {("lru", SIZES[0]): 1}
    with pytest.raises(CheckFailed, match=r"lru finds \d+ blocks .* and should find 1"):
        run(dataclasses.replace(TRACE, known=known))


def test_lru_over_single_blocks_drops_the_end_of_what_was_used_longest_ago() -> None:
    requests = requests_of([0, 1, 2], [9], [0, 8], [9], [0, 1, 2])
    # After the third one 2 is gone, after the fourth nothing, so 9, then 0 and 1 are found.
    assert hits_of_single_blocks(requests, 4) == 1 + 1 + 2


def test_a_trace_is_made_up_in_the_same_way_from_the_same_seed() -> None:
    first, again, other = (
        [request.blocks.tolist() for request in made_up_trace(50, seed=seed).requests]
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_traces_are_read_once() -> None:
    num_reads = []

    def read() -> list[TraceRequest]:
        num_reads.append(1)
        return requests_of([0])

    trace = ReplayTrace("any", (1,), read)
    assert trace.requests is trace.requests
    assert len(num_reads) == 1


def test_without_public_traces_one_is_made_up_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HICACHE_TRACES", str(tmp_path))
    (step,) = benchmarks.replay.steps(quick=True)
    assert step.label == "made up from seed 0"
    assert "there are no public traces" in capsys.readouterr().err


def test_public_traces_come_with_what_is_known_about_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}] * 2
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, lines)))
    counted = [
        {"policy": "LRU", "capacity_blocks": 1_000, "hit_blocks": 2},
        {"policy": "ARC", "capacity_blocks": 1_000, "hit_blocks": 7},
    ]
    entry = {"file": "one.jsonl", "one_tier": counted}
    document = {"traces": dict.fromkeys(("conversation", "synthetic", "agentic-even"), entry)}
    (tmp_path / "reference.json").write_text(json.dumps(document))
    monkeypatch.setenv("HICACHE_TRACES", str(tmp_path))
    conversation, synthetic = find_traces(quick=True)
    assert [len(one.requests) for one in (conversation, synthetic)] == [2, 2]
    assert conversation.known == {("lru", 1_000): 2}
    assert ReplayCounts(conversation).hits["lru", 1_000] == 2
    assert len(find_traces(quick=False)) == 3


# -- beside SGLang --------------------------------------------------------------------------------


class SglangDouble(SglangProcess):
    """Answers as SGLang's process does."""

    def __init__(self, *, too_many: int = 0) -> None:
        self.name = "double"
        self.policies: list[str] = []
        self._too_many = too_many

    def call(self, do: str, /, **arguments: Any) -> Any:
        if do == "reset":
            self.policies.append(arguments["eviction_policy"])
            return True
        trace = np.load(arguments["path"])
        ends = np.cumsum(trace["lengths"])[:-1]
        prompts = [blocks.tolist() for blocks in np.split(trace["blocks"], ends)]
        return hits_as_sglang_counts(requests_of(*prompts), arguments["size"]) + self._too_many


def test_the_adaptive_policy_stands_beside_each_of_sglangs_and_lru_beside_lru() -> None:
    peer = SglangDouble()
    rows = rows_beside(ReplayCounts(TRACE), peer)
    assert [(row.name, row.params["blocks"], row.peer) for row in rows] == [
        (name, size, f"double-{policy}")
        for size in SIZES
        for name, policy in (
            ("block_hit_ratio", "lru"), ("block_hit_ratio", "slru"), ("block_hit_ratio", "lfu"),
            ("hit_blocks", "lru"),
        )
    ]  # fmt: skip
    assert peer.policies == ["lru", "slru", "lfu"] * 2


def test_a_peer_that_finds_other_blocks_than_its_rules_say_fails_the_check() -> None:
    with pytest.raises(CheckFailed, match="double finds"):
        rows_beside(ReplayCounts(TRACE), SglangDouble(too_many=1))


def test_evicting_whole_runs_and_refreshing_the_rest_of_one_costs_sglang_hits() -> None:
    requests = requests_of([0, 1, 2], [9], [0, 8], [9], [0, 1, 2])
    # The third one refreshes 1 and 2 as well, so 9 goes; when it comes back they go both.
    assert hits_as_sglang_counts(requests, 4) == 1 + 0 + 1
    (own,) = replay(requests, [CacheOptions(device_blocks=4)], block_tokens=512, model=TimeModel())
    assert own.hit_blocks == 1 + 1 + 2
