"""Times to first token against sums made by hand: a block of 4 tokens, 1 byte of KV a token."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from small_traces import BLOCK_TOKENS, make_request

from hicache.replay.cache import CacheOptions, Found
from hicache.replay.time_model import LoadRule, TimeModel
from hicache.replay.timeline import Timeline
from hicache.types import PrefetchPolicy

# A block takes 4 s to compute, 1 s from the host, 2 s from storage to the host.
MODEL = TimeModel(
    prefill_tokens_per_second=1.0,
    kv_bytes_per_token=1,
    link_bytes_per_second=4.0,
    storage_bytes_per_second=2.0,
    timeout_base_seconds=3.0,
    timeout_per_ki_token_seconds=0.0,
)
AUTO, ALWAYS, NEVER = LoadRule.AUTO, LoadRule.ALWAYS, LoadRule.NEVER
ADAPTIVE = PrefetchPolicy.ADAPTIVE


def timeline(
    policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE, load: LoadRule = ALWAYS, **changes: Any
) -> Timeline:
    model = dataclasses.replace(MODEL, **changes)
    return Timeline(model, CacheOptions(prefetch_policy=policy, load=load), BLOCK_TOKENS)


def serve(
    line: Timeline,
    arrival: float,
    *,
    device: int = 0,
    host: int = 0,
    stored: int = 0,
    rest: int = 1,
) -> int:
    """Serve a request with so many blocks in each tier; return how many came from storage."""
    request = make_request([0] * (device + host + stored + rest), arrival=arrival)
    found = Found(device, host, stored)
    num_arrived = line.fetch(request, found)
    line.serve(request, found._replace(storage=num_arrived))
    return num_arrived


def mean(line: Timeline) -> float:
    return line.summary().ttft_seconds_mean


def test_a_request_waits_for_those_before_it() -> None:
    line = timeline()
    serve(line, 0.0)
    serve(line, 1.0)
    # The second begins at 4 s, and its first token is there at 8 s.
    assert mean(line) == pytest.approx((4.0 + 7.0) / 2)
    assert line.summary().engine_seconds == pytest.approx(8.0)
    assert line.summary().utilisation == pytest.approx(8.0)


def test_loading_and_computing_go_on_together() -> None:
    line = timeline()
    serve(line, 0.0, host=2, rest=1)
    assert mean(line) == pytest.approx(4.0)
    line = timeline()
    serve(line, 0.0, host=20, rest=1)
    assert mean(line) == pytest.approx(20.0)


def test_the_last_token_of_a_prompt_is_computed_whatever_is_cached() -> None:
    line = timeline()
    serve(line, 0.0, device=1, rest=0)
    assert mean(line) == pytest.approx(1.0)


def test_what_is_before_a_token_makes_it_dearer() -> None:
    line = timeline(attention_per_ki_token=1024 / 10)
    serve(line, 0.0, device=5, rest=5)
    # 20 tokens, before each of which are 30 on average.
    assert mean(line) == pytest.approx(20 * (1 + 30 / 10))


def test_under_wait_complete_a_request_waits_for_all_of_storage() -> None:
    line = timeline()
    assert serve(line, 0.0, stored=3) == 3
    assert mean(line) == pytest.approx(3 * 2.0 + 4.0)


def test_a_read_takes_a_while_whatever_its_size() -> None:
    line = timeline(storage_latency_seconds=5.0)
    assert serve(line, 0.0, stored=3) == 3
    assert mean(line) == pytest.approx(5.0 + 3 * 2.0 + 4.0)


def test_under_best_effort_a_request_takes_what_came_while_it_waited() -> None:
    line = timeline(PrefetchPolicy.BEST_EFFORT)
    assert serve(line, 0.0, stored=3, rest=0) == 0
    # It waits from 7 s to 12 s: time for two blocks of 2 s.
    assert serve(line, 7.0, stored=3, rest=0) == 2
    assert mean(line) == pytest.approx((12.0 + 9.0) / 2)


def test_under_timeout_a_request_waits_no_longer_than_it_may() -> None:
    line = timeline(PrefetchPolicy.TIMEOUT)
    assert serve(line, 0.0, stored=3, rest=0) == 1
    assert mean(line) == pytest.approx(3.0 + 8.0)


def test_storage_reads_for_one_request_after_another() -> None:
    line = timeline()
    serve(line, 0.0, stored=3)
    serve(line, 0.0, stored=5)
    # The engine is free at 10 s, but the second read lasts from 6 s to 16 s, and its load 5 s.
    assert mean(line) == pytest.approx((10.0 + 21.0) / 2)


def test_storage_ends_the_block_that_it_is_at_when_nobody_waits_any_more() -> None:
    line = timeline(PrefetchPolicy.TIMEOUT)
    # Of the first request's read one block has come at 3 s, and the second ends at 4 s.
    assert serve(line, 0.0, stored=9, rest=0) == 1
    # The engine computes the other eight until 35 s.
    assert serve(line, 3.0, stored=30, rest=0) == (35 - 4) // 2


def test_speed_moves_arrivals_together() -> None:
    line = timeline(speed=2.0)
    serve(line, 0.0)
    serve(line, 2.0)
    assert mean(line) == pytest.approx((4.0 + 7.0) / 2)


def test_never_loading_computes_what_the_device_lacks() -> None:
    line = timeline(load=NEVER)
    assert serve(line, 0.0, device=1, host=2, stored=3) == 0
    assert mean(line) == pytest.approx((2 + 3 + 1) * 4.0)


def learnt(policy: PrefetchPolicy = ADAPTIVE, load: LoadRule = AUTO, **changes: Any) -> Timeline:
    """A line that has served requests from every tier, long before the first second."""
    line = timeline(policy, load, **changes)
    for arrival in (-3e6, -2e6, -1e6):
        serve(line, arrival)
        serve(line, arrival + 1e5, host=1)
        serve(line, arrival + 2e5, stored=1)
    return line


def ttft(line: Timeline, **blocks: int) -> float:
    """Time to first token of a request that comes after all others have ended."""
    before, _ = mean(line), serve(line, 1000.0, **blocks)
    return mean(line) * 10 - before * 9


def test_a_slow_link_loads_as_much_as_is_computed_meanwhile() -> None:
    assert ttft(learnt(link_bytes_per_second=1.0), host=10, rest=0) == pytest.approx(20.0)
    assert ttft(learnt(link_bytes_per_second=1.0), host=10, rest=10) == pytest.approx(40.0)


def test_a_request_that_could_run_computes_what_storage_delivers_later() -> None:
    assert ttft(learnt(), stored=10) == pytest.approx(10 * 2.0 + 10 * 1.0)
    assert ttft(learnt(storage_bytes_per_second=0.1), stored=10) == pytest.approx(44.0)


def test_a_slow_store_is_used_while_a_request_waits() -> None:
    line = learnt(storage_bytes_per_second=0.5)
    serve(line, 500.0, rest=140)
    # The engine is busy until 1060 s; a block comes in 8 s.
    assert serve(line, 1000.0, stored=10) == 7


def test_nobody_waits_behind_a_long_read_of_another_request() -> None:
    line = learnt(storage_bytes_per_second=1.1, prefill_tokens_per_second=1.0)
    assert serve(line, 1000.0, stored=100) == 100
    assert serve(line, 1000.0, stored=10) == 10
    hasty = learnt(PrefetchPolicy.WAIT_COMPLETE, storage_bytes_per_second=1.1)
    assert serve(hasty, 1000.0, stored=100) == 100
    # To wait for those 100 is worse than to compute 10.
    assert serve(hasty, 1000.0, stored=10) == 0


@pytest.mark.parametrize(
    ("link", "storage", "prefill", "gap"),
    list(itertools.product((0.5, 4.0, 100.0), (0.05, 1.0, 50.0), (0.2, 1.0, 5.0), (5.0, 50.0))),
)
def test_loading_by_cost_is_never_worse_than_always_or_never(
    link: float, storage: float, prefill: float, gap: float
) -> None:
    """Hits of each tier come in turn; 1 % is for what is tried to see whether it is still slow."""
    means = {}
    for load in LoadRule:
        policy = ADAPTIVE if load is AUTO else PrefetchPolicy.WAIT_COMPLETE
        line = learnt(
            policy,
            load,
            link_bytes_per_second=link,
            storage_bytes_per_second=storage,
            prefill_tokens_per_second=prefill,
        )
        for index in range(200):
            device, host, stored = index % 3, index * 7 % 11, index * 5 % 13
            serve(line, index * gap, device=device, host=host, stored=stored, rest=index % 4)
        means[load] = mean(line)
    assert means[AUTO] <= 1.01 * min(means[ALWAYS], means[NEVER]), means


def test_without_requests_all_times_are_zero() -> None:
    assert timeline().summary().engine_seconds == 0.0
