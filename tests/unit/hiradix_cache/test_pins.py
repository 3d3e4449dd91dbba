"""Pinned prefixes stay in memory for their time, on every rank alike, and keep nobody waiting."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from builders import PAGE, Rig, config_for, store_with, tokens
from scripted_parts import faulty_storage, injected, memory_storage
from test_two_ranks import Rank, run_both, stores

from hicache.errors import CapacityError, ConfigError
from hicache.radix import RadixKey
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from hicache.hiradix_cache import PinnedPrefix

KEY = RadixKey(tokens(1, 2, 3))


def scan(rig: Rig, num_prompts: int, *, first: int = 100) -> None:
    """Insert prompts of two pages that never come again.

    Each comes to rest before the next one: what is still copied cannot be evicted, and pins yield
    when nothing else can.
    """
    for number in range(first, first + num_prompts):
        rig.insert(RadixKey(tokens(number, number + 1000)), request_id=f"scan {number}")
        rig.settle()


def resident(rig: Rig, key: RadixKey = KEY) -> int:
    """Pages of `key` in memory."""
    return sum(rig.hit(key))


def only(pinned: tuple[PinnedPrefix, ...]) -> PinnedPrefix:
    (one,) = pinned
    return one


@pytest.mark.parametrize("eviction_policy", ["lru", "adaptive", "slru", "lfu", "priority", "mru"])
@pytest.mark.parametrize("write_policy", WritePolicy)
def test_a_pinned_prefix_survives_a_scan_under_every_policy(
    write_policy: WritePolicy, eviction_policy: str
) -> None:
    config = config_for(write_policy=write_policy, eviction_policy=eviction_policy)
    with Rig(config) as rig:
        rig.insert(KEY)
        rig.cache.pin_prefix(KEY, seconds=60.0)
        scan(rig, 40)
        assert resident(rig) == 3


def test_a_pinned_prefix_goes_like_any_other_after_its_time() -> None:
    with Rig() as rig:
        rig.insert(KEY)
        rig.clock.advance(1.0)
        rig.step()
        rig.cache.pin_prefix(KEY, seconds=60.0)
        rig.clock.advance(59.0)
        scan(rig, 40)
        assert resident(rig) == 3
        rig.clock.advance(1.0)
        rig.step()
        assert rig.cache.pinned_prefixes() == ()
        scan(rig, 40, first=300)
        assert resident(rig) == 0


@pytest.mark.parametrize("write_policy", WritePolicy)
def test_a_pin_holds_on_the_host_when_the_device_is_given_to_others(
    write_policy: WritePolicy,
) -> None:
    with Rig(config_for(write_policy=write_policy)) as rig:
        rig.insert(KEY)
        rig.cache.pin_prefix(KEY, seconds=60.0)
        rig.settle()
        rig.evict_device()
        assert rig.hit(KEY) == (0, 3)
        scan(rig, 40)
        assert rig.hit(KEY) == (0, 3)
        assert only(rig.cache.pinned_prefixes()).held_tokens == len(KEY)


def test_a_pinned_run_on_the_host_outlives_copies_of_what_the_device_has() -> None:
    """Whichever of the two a policy gives up first."""
    with Rig(config_for(host_pages=4, write_policy=WritePolicy.WRITE_THROUGH)) as rig:
        rig.insert(KEY)
        rig.cache.pin_prefix(KEY, seconds=60.0)
        rig.settle()
        rig.evict_device()
        rig.insert(RadixKey(tokens(9)))
        rig.settle()
        rig.insert(RadixKey(tokens(10)))
        rig.settle()
        assert rig.hit(KEY) == (0, 3)


def test_what_is_inserted_later_of_a_pinned_prefix_is_pinned_too() -> None:
    with Rig() as rig:
        pinned = rig.cache.pin_prefix(KEY, seconds=60.0)
        assert (pinned.num_tokens, pinned.held_tokens) == (len(KEY), 0)
        rig.insert(KEY.prefix(PAGE), chunked=True)
        rig.insert(KEY.extend(tokens(7, 8)), chunked=False)
        scan(rig, 40)
        assert resident(rig) == 3
        assert resident(rig, KEY.extend(tokens(7, 8))) == 3


def test_a_pin_outlives_a_reset() -> None:
    with Rig() as rig:
        rig.cache.pin_prefix(KEY, seconds=60.0)
        rig.insert(KEY)
        rig.settle()
        rig.cache.reset()
        assert only(rig.cache.pinned_prefixes()).held_tokens == 0
        rig.insert(KEY)
        scan(rig, 40)
        assert resident(rig) == 3


def test_pins_yield_when_nothing_else_is_left() -> None:
    with Rig(config_for(pinned_share=1.0), device_pages=8) as rig:
        for number in (1, 2):
            key = RadixKey(tokens(*range(number * 10, number * 10 + 4)))
            rig.insert(key)
            rig.cache.pin_prefix(key, seconds=60.0)
        rig.settle()
        whole = RadixKey(tokens(*range(50, 58)))
        rig.insert(whole)
        assert rig.hit(whole) == (8, 0)


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_pins_evictions_and_prompts_keeps_every_invariant(seed: int) -> None:
    rng = random.Random(seed)
    keys = [RadixKey(tokens(*(rng.randrange(3) for _ in range(3)))) for _ in range(8)]
    policy = rng.choice(list(WritePolicy))
    with Rig(config_for(8, write_policy=policy, pinned_share=1.0)) as rig:
        for number in range(120):
            key = rng.choice(keys)
            action = rng.randrange(6)
            if action < 3:
                rig.insert(key, request_id=str(number))
            elif action == 3:
                with suppress(CapacityError):
                    rig.cache.pin_prefix(
                        key.prefix(rng.randint(1, 3) * PAGE), seconds=rng.choice([1, 9])
                    )
            elif action == 4 and (pins := rig.cache.pinned_prefixes()):
                assert rig.cache.unpin_prefix(rng.choice(pins).pin_id)
            else:
                rig.clock.advance(rng.choice([0.0, 2.0]))
            rig.step()
            for pinned in rig.cache.pinned_prefixes():
                assert pinned.device_tokens <= pinned.held_tokens <= pinned.num_tokens
                assert pinned.seconds_left > 0


def test_an_unpinned_prefix_goes_but_for_what_another_pin_holds() -> None:
    with Rig() as rig:
        rig.insert(KEY)
        short = rig.cache.pin_prefix(KEY.prefix(PAGE), seconds=60.0)
        long = rig.cache.pin_prefix(KEY, seconds=60.0)
        assert rig.cache.unpin_prefix(long.pin_id)
        assert not rig.cache.unpin_prefix(long.pin_id)
        scan(rig, 60)
        assert resident(rig) == 1
        assert rig.cache.unpin_prefix(short.pin_id)
        scan(rig, 60, first=300)
        assert resident(rig) == 0


def test_a_pin_of_one_tenant_is_none_of_another() -> None:
    mine, other = (RadixKey(tokens(1, 2, 3), cache_salt=salt) for salt in ("a", "b"))
    with Rig() as rig:
        rig.insert(mine)
        rig.insert(other)
        rig.cache.pin_prefix(mine, seconds=60.0)
        scan(rig, 60)
        assert (resident(rig, mine), resident(rig, other)) == (3, 0)


def test_time_counts_from_the_first_step_whatever_the_clock_reads() -> None:
    with Rig() as rig:
        rig.clock.advance(1e6)
        rig.insert(KEY)
        rig.cache.pin_prefix(KEY, seconds=60.0)
        rig.step()
        assert only(rig.cache.pinned_prefixes()).seconds_left == 60.0
        rig.clock.advance(20.0)
        rig.step()
        assert only(rig.cache.pinned_prefixes()).seconds_left == pytest.approx(40.0)


def test_a_pin_after_a_pause_without_any_lasts_for_its_time() -> None:
    with Rig() as rig:
        rig.step()
        rig.cache.pin_prefix(KEY, seconds=10.0)
        rig.clock.advance(10.0)
        rig.step()
        rig.clock.advance(500.0)
        rig.step()
        assert rig.cache.pin_prefix(KEY, seconds=10.0).seconds_left == 10.0
        rig.clock.advance(9.0)
        rig.step()
        assert only(rig.cache.pinned_prefixes()).seconds_left == 1.0


def test_pinning_again_may_lengthen_but_not_shorten() -> None:
    with Rig() as rig:
        for seconds in (60.0, 90.0, 10.0):
            rig.cache.pin_prefix(KEY, seconds=seconds)
        assert only(rig.cache.pinned_prefixes()).seconds_left == 90.0


def test_listing_is_no_use_and_changes_nothing() -> None:
    with Rig() as rig:
        rig.insert(KEY)
        rig.cache.pin_prefix(KEY, seconds=60.0)
        before = [(node.id, node.last_access) for node in rig.cache.tree.nodes()]
        pinned = only(rig.cache.pinned_prefixes())
        assert (pinned.device_tokens, pinned.held_tokens) == (len(KEY), len(KEY))
        assert [(node.id, node.last_access) for node in rig.cache.tree.nodes()] == before


def test_no_more_than_the_share_is_pinned_and_common_pages_count_once() -> None:
    with Rig(config_for(pinned_share=0.5), device_pages=8) as rig:
        rig.clock.advance(1.0)
        rig.step()
        rig.cache.pin_prefix(KEY, seconds=60.0)
        rig.cache.pin_prefix(RadixKey(tokens(1, 2, 4)), seconds=60.0)
        with pytest.raises(CapacityError, match="20 tokens would be pinned"):
            rig.cache.pin_prefix(RadixKey(tokens(8)), seconds=60.0)
        assert len(rig.cache.pinned_prefixes()) == 2
        rig.clock.advance(61.0)
        rig.step()
        rig.cache.pin_prefix(RadixKey(tokens(8)), seconds=60.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_pin_lasts_for_a_time(seconds: float) -> None:
    with Rig() as rig, pytest.raises(ConfigError, match="a pin lasts for"):
        rig.cache.pin_prefix(KEY, seconds=seconds)


def test_less_than_a_page_cannot_be_pinned() -> None:
    with Rig() as rig, pytest.raises(ConfigError, match="only whole pages"):
        rig.cache.pin_prefix(KEY.prefix(PAGE - 1), seconds=1.0)


def test_a_pinned_prefix_comes_back_from_storage_and_is_pinned_when_it_is_used() -> None:
    create = memory_storage(store_with(KEY))
    with Rig(config_for(storage=injected()), create_storage=create) as rig:
        rig.cache.pin_prefix(KEY, seconds=60.0)
        assert rig.prefetch(KEY) == len(KEY)
        rig.load(KEY)
        rig.insert(KEY)
        scan(rig, 40)
        assert resident(rig) == 3


def test_pins_end_on_all_ranks_in_the_same_step_by_the_slowest_clock() -> None:
    """C066: what goes first follows from pins, so they must be equal in every step."""

    def script(rank: Rank) -> object:
        rig, ahead = rank.rig, 1000.0 if rank.number else 60.0
        rig.insert(KEY)
        rank.step()
        pinned = rig.cache.pin_prefix(KEY, seconds=60.0)
        for number in range(100, 110):
            rig.insert(RadixKey(tokens(number, number + 50)), request_id=str(number))
            rank.step(3)
        held = resident(rig)
        rig.clock.advance(ahead - 0.5)
        rank.step()
        left = [one.pin_id for one in rig.cache.pinned_prefixes()]
        rig.clock.advance(1.0)
        rank.step()
        gone = rig.cache.pinned_prefixes() == ()
        rank.settle()
        return pinned.pin_id, held, left == [pinned.pin_id], gone

    first, second = run_both(script, *map(faulty_storage, stores()))
    assert first == second
    assert isinstance(first, tuple)
    assert first[1:] == (3, True, True)


def test_under_the_policy_priority_less_important_requests_lose_their_pages_first() -> None:
    config = config_for(eviction_policy="priority", write_policy=WritePolicy.WRITE_BEHIND)
    with Rig(config, device_pages=6) as rig:
        held = []
        for number, priority in ((30, 5), (20, 0), (10, -5)):
            key = RadixKey(tokens(number, number + 1))
            rig.insert(key, request_id=str(number), priority=priority)
            held.append(key)
        rig.settle()
        for expected in ([2, 2, 0], [2, 0, 0], [0, 0, 0]):
            rig.evict_device(rig.device_pages.num_available + 2)
            assert [rig.hit(key)[0] for key in held] == expected


def test_a_run_has_the_largest_priority_of_the_requests_that_inserted_it() -> None:
    with Rig(config_for(eviction_policy="priority")) as rig:
        shared = KEY.prefix(PAGE)
        priorities = []
        for request_id, priority in enumerate((-3, 4, 0)):
            rig.insert(KEY, request_id=str(request_id), priority=priority)
            priorities.append({one.priority for one in rig.cache.tree.nodes()})
        assert priorities == [{-3}, {4}, {4}]
        rig.insert(shared.extend(tokens(9)), request_id="other", priority=-1)
        assert sorted(one.priority for one in rig.cache.tree.nodes()) == [-1, 4, 4]
