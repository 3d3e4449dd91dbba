"""How advice chooses, on a trace that goes round in a circle of 30 blocks, 10 in each prompt."""

from __future__ import annotations

import pytest
from small_traces import make_request

from hicache.errors import ConfigError
from hicache.replay import CacheOptions, TimeModel
from hicache.replay.advice import Advice, Prices, Workload, advise
from hicache.types import WritePolicy

GIB = 1 << 30

# A block of 4 tokens is a GiB; it takes 40 s to compute and 4 s to load.
MODEL = TimeModel(
    prefill_tokens_per_second=0.1,
    kv_bytes_per_token=GIB // 4,
    link_bytes_per_second=GIB / 4,
    storage_bytes_per_second=GIB / 8,
)


def prompts(order: str) -> Workload:
    """A prompt of 10 blocks for each letter, every 100 s."""
    requests = [
        make_request(
            [10 * "abc".index(letter) + block for block in range(10)], arrival=100.0 * index
        )
        for index, letter in enumerate(order)
    ]
    return Workload(requests=requests, block_tokens=4, model=MODEL)


def advice_for(
    prices: Prices | None = None,
    *,
    workload: Workload | None = None,
    base: CacheOptions | None = None,
) -> Advice:
    return advise(
        workload or prompts("abc" * 12 + "a"),
        base or CacheOptions(device_blocks=10, host_blocks=None, storage_blocks=None),
        policies=["lru", "mru"],
        prices=prices or Prices(),
    )


def test_the_smallest_l2_that_saves_nearly_all_is_taken() -> None:
    advice = advice_for()
    assert list(advice.host.sizes) == [0, 10, 20, 30]
    # L1 holds one prompt and L2 the other two.
    assert advice.host.size == 20
    assert advice.storage.size == 0
    assert advice.expected.hit_blocks == 34 * 10


def test_a_larger_l2_for_a_rare_prompt_is_not_taken() -> None:
    advice = advice_for(workload=prompts("ab" * 20 + "c" + "ab" * 20 + "c"))
    assert advice.host.size == 10
    assert advice.host.gains[1] < max(advice.host.gains)


def test_l2_is_no_larger_than_it_may_be() -> None:
    base = CacheOptions(device_blocks=10, host_blocks=15, storage_blocks=None)
    advice = advice_for(base=base)
    assert max(advice.host.sizes) == 15


def test_what_a_small_l2_cannot_hold_is_worth_an_l3() -> None:
    base = CacheOptions(device_blocks=10, host_blocks=10, storage_blocks=None)
    advice = advice_for(base=base, workload=prompts("ababababc" * 6))
    assert (advice.host.size, advice.storage.size) == (10, 20)
    assert advice.expected.storage_hits > 0
    assert advice.expected.hit_blocks > advice.storage.results[0].hit_blocks


def test_memory_that_costs_more_than_it_saves_is_not_worth_having() -> None:
    advice = advice_for(Prices(engine_hour=1.0, memory_gib_hour=100.0))
    assert advice.host.size == 0
    assert advice.expected.options.host_blocks == 0
    assert advice.write_policies == []


def test_memory_for_nothing_is_taken() -> None:
    advice = advice_for(Prices(engine_hour=1.0, memory_gib_hour=0.0))
    assert advice.host.size >= 20


def test_the_first_policy_is_kept_unless_another_is_clearly_better() -> None:
    everything = CacheOptions(device_blocks=30, host_blocks=None, storage_blocks=None)
    assert advice_for(base=everything).expected.options.policy == "lru"
    # In a circle that is larger than L1 alone, the most recently used goes best.
    dear = Prices(engine_hour=1.0, memory_gib_hour=1e6)
    assert advice_for(dear).expected.options.policy == "mru"


def test_a_policy_that_is_hardly_better_is_not_taken() -> None:
    dear = Prices(engine_hour=1.0, memory_gib_hour=1e6)
    advice = advice_for(dear, workload=prompts("a" * 1200 + "bab"))
    lru, mru = (one.token_hit_ratio for one in advice.policies)
    assert lru < mru < lru + 0.001
    assert advice.expected.options.policy == "lru"


def test_of_write_policies_with_equal_hits_the_one_that_writes_least_is_taken() -> None:
    advice = advice_for()
    options = advice.expected.options
    by_policy = {one.options.write_policy: one for one in advice.write_policies}
    assert set(by_policy) == set(WritePolicy)
    most = max(one.hit_tokens for one in by_policy.values())
    good = [one for one in by_policy.values() if one.hit_tokens >= 0.98 * most]
    assert by_policy[options.write_policy].num_written == min(one.num_written for one in good)


def test_an_l1_without_bound_leaves_nothing_to_advise() -> None:
    with pytest.raises(ConfigError, match="needs the size of L1"):
        advice_for(base=CacheOptions(device_blocks=None))


def test_prices_of_memory_need_the_price_of_an_engine() -> None:
    with pytest.raises(ConfigError, match="--engine-price"):
        Prices(storage_gib_hour=1.0)
