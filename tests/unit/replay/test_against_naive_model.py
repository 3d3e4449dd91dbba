"""The real tree against models that keep single blocks and look at all of them."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest
from small_traces import BLOCK_TOKENS, random_requests

from hicache.radix import RadixKey, check_tree
from hicache.replay import CacheOptions, TimeModel, replay, replay_belady
from hicache.replay.cache import ReplayedCache
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache.replay import ReplayResult, TraceRequest

SEEDS = range(10)
WRITING = (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK, WritePolicy.WRITE_BEHIND)


class NaiveCache:
    """L1 and L2 as sets of blocks; every victim is found by looking at all."""

    def __init__(self, order: str, device: int, host: int, selective: bool) -> None:
        self.order, self.device_size, self.host_size = order, device, host
        self.selective = selective
        self.device: set[int] = set()
        self.host: set[int] = set()
        self.parent: dict[int, int] = {}
        self.count: Counter[int] = Counter()
        self.used: defaultdict[int, int] = defaultdict(int)
        self.created: dict[int, int] = {}
        self.tick = 0
        self.written = 0

    def serve(self, path: list[int]) -> tuple[int, int]:
        self.tick += 1
        num_device = leading(path, self.device)
        num_all = leading(path, self.device | self.host)
        for above, block in zip([-1, *path], path, strict=False):
            self.parent[block] = above
            if block not in self.device | self.host:
                self.count[block], self.created[block] = 0, self.tick
            self.count[block] += 1
            self.used[block] = self.tick
        self.device |= set(path)
        if self.host_size:
            self.write([block for block in path if not self.selective or self.count[block] > 1])
        while len(self.device) > self.device_size:
            self.device.remove(min(self.leaves(self.device), key=self.key))
        return num_device, num_all - num_device

    def write(self, path: list[int]) -> None:
        missing = [block for block in path if block not in self.host]
        if not missing or len(missing) > self.host_size:
            return
        while len(self.host) + len(missing) > self.host_size:
            free = self.leaves(self.host) - {self.parent[missing[0]]}
            if free - self.device:
                self.host.remove(min(free - self.device, key=self.key))
            elif free:
                # The device will lose last what was used last.
                self.host.remove(max(free, key=lambda block: self.used[block]))
            else:
                return
        self.host |= set(missing)
        self.written += len(missing)

    def leaves(self, tier: set[int]) -> set[int]:
        return tier - {self.parent[block] for block in tier}

    def key(self, block: int) -> tuple[int, ...]:
        return {
            "lru": (self.used[block],),
            "mru": (-self.used[block],),
            "fifo": (self.created[block],),
            "lfu": (self.count[block], self.used[block]),
        }[self.order]


def leading(path: Iterable[int], blocks: set[int]) -> int:
    found = 0
    for block in path:
        if block not in blocks:
            break
        found += 1
    return found


def replayed(requests: list[TraceRequest], options: CacheOptions) -> ReplayResult:
    return replay(requests, [options], block_tokens=BLOCK_TOKENS, model=TimeModel())[0]


def naive_hits(requests: list[TraceRequest], cache: NaiveCache) -> tuple[int, int]:
    hits = [cache.serve(request.blocks.tolist()) for request in requests]
    return sum(device for device, _ in hits), sum(host for _, host in hits)


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "mru"])
@pytest.mark.parametrize("seed", SEEDS)
def test_one_tier_hits_what_a_naive_model_of_the_policy_hits(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng)
    size = rng.randint(3, 25)
    found = replayed(requests, CacheOptions(policy=policy, device_blocks=size))
    assert (found.device_hits, 0) == naive_hits(requests, NaiveCache(policy, size, 0, False))


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE])
@pytest.mark.parametrize("seed", SEEDS)
def test_two_tiers_hit_and_write_what_a_naive_model_does(policy: WritePolicy, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng)
    device, host = rng.randint(3, 15), rng.randint(5, 25)
    found = replayed(
        requests, CacheOptions(device_blocks=device, host_blocks=host, write_policy=policy)
    )
    naive = NaiveCache("lru", device, host, policy is WritePolicy.WRITE_THROUGH_SELECTIVE)
    assert (found.device_hits, found.host_hits) == naive_hits(requests, naive)
    assert found.num_written == naive.written


@pytest.mark.parametrize("policy", WRITING)
@pytest.mark.parametrize("seed", SEEDS)
def test_with_an_l2_without_bound_nothing_is_lost(policy: WritePolicy, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng)
    options = CacheOptions(device_blocks=rng.randint(3, 15), host_blocks=None, write_policy=policy)
    everything = replayed(requests, CacheOptions()).hit_blocks
    assert replayed(requests, options).hit_blocks == everything


@pytest.mark.parametrize("policy", [*WRITING, WritePolicy.ADAPTIVE])
@pytest.mark.parametrize("seed", SEEDS)
def test_with_an_l3_without_bound_nothing_that_was_written_is_lost(
    policy: WritePolicy, seed: int
) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, max_blocks=5)
    options = CacheOptions(
        device_blocks=rng.randint(5, 15), host_blocks=20, storage_blocks=None, write_policy=policy
    )
    everything = replayed(requests, CacheOptions()).hit_blocks
    assert replayed(requests, options).hit_blocks == everything


def three_tiers(rng: random.Random) -> CacheOptions:
    return CacheOptions(
        policy=rng.choice(["lru", "lfu", "fifo", "mru"]),
        device_blocks=rng.randint(1, 15),
        host_blocks=rng.randint(1, 15),
        storage_blocks=rng.choice([0, 5, 20]),
        write_policy=rng.choice(list(WritePolicy)),
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_cache_hits_more_than_one_that_knows_the_future(seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng)
    options = three_tiers(rng)
    bound = replay_belady(requests, [options], block_tokens=BLOCK_TOKENS, model=TimeModel())[0]
    assert replayed(requests, options).hit_blocks <= bound.hit_blocks


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_stays_sound_and_within_its_sizes(seed: int) -> None:
    rng = random.Random(seed)
    options = three_tiers(rng)
    cache = ReplayedCache(options)
    for request in random_requests(rng):
        key = RadixKey(request.blocks)
        cache.fetch(key, cache.look_up(key).storage)
        cache.insert(key)
        # Page ids repeat, because no bytes stand behind them.
        faults = [fault for fault in check_tree(cache.tree) if not names_a_page_id(fault)]
        assert not faults
        residency = cache.tree.residency
        assert options.device_blocks is not None
        assert options.host_blocks is not None
        assert residency.num_device_pages <= options.device_blocks
        assert residency.num_host_pages <= options.host_blocks
        assert not cache.tree.open_tickets


def names_a_page_id(fault: str) -> bool:
    return "shares" in fault


@pytest.mark.parametrize("seed", range(10))
def test_several_caches_in_one_pass_are_what_each_is_alone(seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng)
    options = [three_tiers(rng) for _ in range(4)]
    together = replay(requests, options, block_tokens=BLOCK_TOKENS, model=TimeModel())
    assert together == [replayed(requests, one) for one in options]
