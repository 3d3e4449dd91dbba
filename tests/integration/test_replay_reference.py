"""Replays of public traces against hit counts that others have computed.

The traces lie beside the repository, in `shared/traces`, or where `HICACHE_TRACES` says. Without
them these tests are skipped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hicache.replay import CacheOptions, TimeModel, Trace, open_trace, replay, replay_belady
from hicache.types import WritePolicy

TRACES = Path(
    os.environ.get("HICACHE_TRACES") or Path(__file__).parents[2].parent / "shared" / "traces"
)
POLICIES = {"lru": "LRU", "lfu": "leaf-LFU", "fifo": "leaf-FIFO", "belady": "Belady"}

pytestmark = pytest.mark.skipif(
    not (TRACES / "reference.json").is_file(), reason="there are no reference traces"
)


def reference(name: str) -> tuple[Trace, dict[tuple[str, int | None], dict[str, Any]]]:
    """Return a trace, and its reference rows by policy and size (None for no bound)."""
    document = json.loads((TRACES / "reference.json").read_text(encoding="utf-8"))
    entry = document["traces"][name]
    rows = {
        (row["policy"], None if row["capacity_blocks"] == "inf" else row["capacity_blocks"]): row
        for row in entry["one_tier"]
    }
    return open_trace(TRACES / entry["file"]), rows


def two_tiers(
    name: str, policy: WritePolicy, device_blocks: int
) -> tuple[Trace, dict[CacheOptions, dict[str, Any]]]:
    """Return a trace, and its reference rows of LRU in two tiers by options."""
    document = json.loads((TRACES / "reference.json").read_text(encoding="utf-8"))
    entry = document["traces"][name]
    rows = {
        CacheOptions(
            device_blocks=device_blocks, host_blocks=row["l2_blocks"], write_policy=policy
        ): row
        for row in entry["two_tier"]
        if (row["l2_policy"], row["write_policy"]) == ("leaf-LRU", policy.value)
        and row["l1_blocks"] == device_blocks
    }
    return open_trace(TRACES / entry["file"]), rows


def check(name: str, policies: list[str], sizes: list[int | None] | None = None) -> None:
    trace, rows = reference(name)
    requests = list(trace)
    model = TimeModel()
    for policy in policies:
        known = {size: row for (one, size), row in rows.items() if one == POLICIES[policy]}
        options = [
            CacheOptions(policy=policy, device_blocks=size) for size in (sizes or list(known))
        ]
        run = replay_belady if policy == "belady" else replay
        for result in run(requests, options, block_tokens=trace.block_tokens, model=model):
            row = known[result.options.device_blocks]
            assert result.hit_blocks == row["hit_blocks"], result.options
            assert result.token_hit_ratio == pytest.approx(row["token_hit_ratio"], abs=1e-6)


@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_the_synthetic_trace_hits_as_often_as_the_reference(policy: str) -> None:
    check("synthetic", [policy], [1000, 10_000])


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["synthetic", "conversation"])
def test_every_size_of_a_trace_hits_as_often_as_the_reference(name: str, policy: str) -> None:
    check(name, [policy])


@pytest.mark.slow
def test_the_agentic_sessions_hit_as_often_as_the_reference() -> None:
    check("agentic-even", ["lru", "belady"], [977, 5859])


def test_two_tiers_that_write_on_eviction_hit_as_often_as_the_reference_within_its_tolerance() -> (
    None
):
    """Which of two blocks used last at the same time goes first is left open there."""
    trace, rows = two_tiers("synthetic", WritePolicy.WRITE_BACK, 1000)
    results = replay(trace, list(rows), block_tokens=trace.block_tokens, model=TimeModel())
    for result in results:
        known = rows[result.options]
        assert result.device_hits / result.num_blocks == pytest.approx(
            known["hit_ratio_l1"], abs=0.01
        )
        assert result.block_hit_ratio == pytest.approx(known["hit_ratio"], abs=0.01)


def test_two_tiers_that_write_at_once_hit_and_write_as_often_as_the_reference() -> None:
    trace, rows = two_tiers("synthetic", WritePolicy.WRITE_THROUGH, 1000)
    results = replay(trace, list(rows), block_tokens=trace.block_tokens, model=TimeModel())
    for result in results:
        known = rows[result.options]
        assert result.hit_blocks == known["hit_blocks"]
        assert result.num_written == known["d2h_blocks"]
