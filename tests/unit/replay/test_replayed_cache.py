"""Single traits of a replayed cache, on traces of a few requests made by hand."""

from __future__ import annotations

import dataclasses
import random

import pytest
from small_traces import BLOCK_TOKENS, make_request, random_requests

from hicache.replay import CacheOptions, ReplayResult, TimeModel, TraceRequest, replay
from hicache.replay.time_model import LoadRule
from hicache.types import PrefetchPolicy, StorageAdmission, WritePolicy

# A token takes 1 s to compute and 8 s to load.
SLOW_LINK = TimeModel(
    prefill_tokens_per_second=1.0, kv_bytes_per_token=8, link_bytes_per_second=1.0
)


def replayed(requests: list[TraceRequest], options: CacheOptions) -> ReplayResult:
    return replay(requests, [options], block_tokens=BLOCK_TOKENS, model=SLOW_LINK)[0]


def test_a_block_that_is_partly_filled_counts_with_its_tokens() -> None:
    result = replayed([make_request([0, 1], tokens=6)] * 2, CacheOptions())
    assert (result.hit_blocks, result.hit_tokens, result.num_tokens) == (2, 6, 12)
    assert (result.block_hit_ratio, result.token_hit_ratio) == (0.5, 0.5)


def test_what_the_device_has_is_not_loaded() -> None:
    result = replayed([make_request([0, 1])] * 2, CacheOptions())
    # 8 tokens are computed, then the last of 8.
    assert result.times.engine_seconds == 9.0


def test_what_the_host_has_is_loaded() -> None:
    circle = [make_request([0]), make_request([1]), make_request([0])]
    result = replayed(circle, CacheOptions(device_blocks=1, host_blocks=None))
    assert (result.device_hits, result.host_hits) == (0, 1)
    assert result.times.engine_seconds == 4.0 + 4.0 + 32.0


def test_storage_gives_up_the_end_of_the_oldest_prefix() -> None:
    circle = [make_request([0, 1]), make_request([2, 3]), make_request([0, 1])]
    options = CacheOptions(device_blocks=2, host_blocks=2, storage_blocks=3)
    result = replayed(circle, options)
    assert (result.hit_blocks, result.storage_hits) == (1, 1)
    assert result.num_stored == 2 + 2 + 1


def test_what_does_not_come_in_time_is_no_hit() -> None:
    circle = [make_request([0, 1]), make_request([2, 3]), make_request([0, 1], arrival=1e6)]
    options = CacheOptions(device_blocks=2, host_blocks=2, storage_blocks=None)
    assert replayed(circle, options).storage_hits == 2
    hasty = dataclasses.replace(options, prefetch_policy=PrefetchPolicy.BEST_EFFORT)
    assert replayed(circle, hasty).storage_hits == 0


def test_a_run_that_the_host_cannot_hold_is_not_written() -> None:
    options = CacheOptions(device_blocks=4, host_blocks=3)
    result = replayed([make_request([0, 1, 2, 3])], options)
    assert (result.num_written, result.num_unwritten) == (0, 4)


def test_behind_means_on_eviction_at_the_latest() -> None:
    """Block 3 goes unwritten, as four do not fit; what is left of the run does when 2 goes."""
    long = make_request([0, 1, 2, 3])
    options = CacheOptions(device_blocks=4, host_blocks=3, write_policy=WritePolicy.WRITE_BEHIND)
    result = replayed([long, make_request([9]), make_request([8]), long], options)
    assert (result.device_hits, result.host_hits) == (2, 1)


def hot_and_cold() -> list[TraceRequest]:
    """Prompts that come again and again, and after every third of them one that never does."""
    rng = random.Random(3)
    starts = [rng.randrange(20) if n % 4 else 100 + n for n in range(4000)]
    return [make_request([4 * start + block for block in range(4)]) for start in starts]


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
@pytest.mark.parametrize("host_blocks", [60, None])
def test_adaptive_writes_less_of_what_never_comes_again_and_hits_as_often(
    policy: str, host_blocks: int | None
) -> None:
    """With an L2 that has room for everything and with one that has not."""
    options = CacheOptions(policy=policy, device_blocks=40, host_blocks=host_blocks)
    late = dataclasses.replace(options, write_policy=WritePolicy.WRITE_BACK)
    adaptive = dataclasses.replace(options, write_policy=WritePolicy.ADAPTIVE)
    before, after = replayed(hot_and_cold(), late), replayed(hot_and_cold(), adaptive)
    assert after.num_written < 0.8 * before.num_written
    assert after.hit_blocks >= 0.98 * before.hit_blocks


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_BACK, WritePolicy.ADAPTIVE])
def test_storage_that_takes_some_takes_less_and_hits_as_often(policy: WritePolicy) -> None:
    all_of_it = CacheOptions(
        device_blocks=20, host_blocks=40, storage_blocks=None, write_policy=policy
    )
    some = dataclasses.replace(all_of_it, storage_admission=StorageAdmission.ADAPTIVE)
    before, after = replayed(hot_and_cold(), all_of_it), replayed(hot_and_cold(), some)
    assert after.num_stored < 0.8 * before.num_stored
    assert after.hit_blocks >= 0.98 * before.hit_blocks


@pytest.mark.parametrize("link", [2.0, 20.0])
@pytest.mark.parametrize("storage", [0.2, 2.0, 20.0])
@pytest.mark.parametrize("speed", [0.1, 1.0])
def test_loading_by_cost_is_never_worse_than_always_or_never(
    link: float, storage: float, speed: float
) -> None:
    """On what the real tree finds in three tiers; a token takes 1 s to compute."""
    model = TimeModel(
        prefill_tokens_per_second=1.0,
        kv_bytes_per_token=1,
        link_bytes_per_second=link,
        storage_bytes_per_second=storage,
        speed=speed / 10,
    )
    tiers = CacheOptions(device_blocks=8, host_blocks=24, storage_blocks=None)
    lanes = [dataclasses.replace(tiers, load=load) for load in (LoadRule.ALWAYS, LoadRule.NEVER)]
    lanes.append(dataclasses.replace(tiers, prefetch_policy=PrefetchPolicy.ADAPTIVE))
    requests = random_requests(random.Random(7), 800)
    results = replay(requests, lanes, block_tokens=BLOCK_TOKENS, model=model)
    always, never, by_cost = (result.times.ttft_seconds_mean for result in results)
    assert by_cost <= 1.01 * min(always, never)
    assert results[1].num_recomputed > 0
    assert results[0].hit_blocks >= results[1].hit_blocks
