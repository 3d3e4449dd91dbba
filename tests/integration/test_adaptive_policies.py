"""What the adaptive policies reach on public traces, by `hicache replay`.

The traces lie beside the repository, in `shared/traces`, or where `HICACHE_TRACES` says. Without
them these tests are skipped. `docs/policies.md` has the figures at more sizes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicache.cli import main
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

TRACES = Path(
    os.environ.get("HICACHE_TRACES") or Path(__file__).parents[2].parent / "shared" / "traces"
)
CONVERSATION = "mooncake_conversation_trace.jsonl.xz"
SYNTHETIC = "mooncake_synthetic_trace.jsonl.xz"
AGENTS = "agentic_even.tar.xz"
FIXED = [policy.value for policy in WritePolicy if policy is not WritePolicy.ADAPTIVE]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TRACES / AGENTS).is_file(), reason="there are no traces"),
]


def replayed(trace: str, path: Path, *options: object) -> list[dict[str, Any]]:
    """Run the command; return the results of its JSON."""
    target = path / "results.json"
    arguments = ["replay", str(TRACES / trace), *map(str, options), "--json", str(target)]
    assert main(arguments) == 0
    results: list[dict[str, Any]] = json.loads(target.read_text(encoding="utf-8"))["results"]
    return results


def again(option: str, values: Iterable[object]) -> list[object]:
    return [text for value in values for text in (option, value)]


@pytest.mark.parametrize(
    ("trace", "bars"),
    [
        (CONVERSATION, {1000: 0.075, 5859: 0.170, 10_000: 0.219, 30_000: 0.328}),
        (SYNTHETIC, {5859: 0.324}),
        (AGENTS, {977: 0.521, 2930: 0.8739}),
    ],
    ids=["conversation", "synthetic", "agents"],
)
def test_adaptive_eviction_meets_its_bars(
    trace: str, bars: dict[int, float], tmp_path: Path
) -> None:
    options = ["--policy", "adaptive", *again("--capacity-blocks", bars)]
    found = {
        one["capacity_blocks"]: one["block_hit_ratio"]
        for one in replayed(trace, tmp_path, *options)
    }
    assert {size: ratio for size, ratio in found.items() if ratio < bars[size]} == {}


@pytest.mark.parametrize(
    ("trace", "eviction_policy", "device_blocks", "host_blocks"),
    [
        (CONVERSATION, "adaptive", 3000, 12_000),
        (SYNTHETIC, "adaptive", 3000, 6000),
        (SYNTHETIC, "adaptive", 10_000, 20_000),
        (SYNTHETIC, "lru", 3000, 6000),
    ],
)
def test_the_adaptive_write_policy_hits_like_the_best_fixed_one_and_writes_like_the_thriftiest(
    trace: str, eviction_policy: str, device_blocks: int, host_blocks: int, tmp_path: Path
) -> None:
    """At most 2 % fewer hits, and 5 % more written than the least of those within 2 %."""
    options: list[object] = ["--policy", eviction_policy]
    options += ["--capacity-blocks", device_blocks, "--host-blocks", host_blocks]
    options += again("--write-policy", ["adaptive", *FIXED])
    adaptive, *fixed = replayed(trace, tmp_path, *options)
    most = max(one["hit_blocks"] for one in fixed)
    good = [one for one in fixed if one["hit_blocks"] >= 0.98 * most]
    assert adaptive["hit_blocks"] >= 0.98 * most
    assert adaptive["written_blocks"] <= 1.05 * min(one["written_blocks"] for one in good)
