"""Single traits of a replayed cache, on traces of a few requests made by hand."""

from __future__ import annotations

import dataclasses

from small_traces import BLOCK_TOKENS, make_request

from hicache.replay import CacheOptions, ReplayResult, TimeModel, TraceRequest, replay
from hicache.types import PrefetchPolicy, WritePolicy

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
