"""The least of an engine: serves prompts from a cache without a model, and times every call."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import defaultdict, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from benchmarks.forest import VOCABULARY
from benchmarks.harness import check
from hicache.config import HiCacheConfig
from hicache.device import create_device
from hicache.hiradix_cache import HiRadixCache, LoadStatus, create_hiradix_cache
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.radix import RadixKey
from hicache.testing.invariants import check_system

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hicache.layout import KVGeometry
    from hicache.pools import Allocator
    from hicache.ranks import RankGroup
    from hicache.types import IntArray

    T = TypeVar("T")

__all__ = ["CacheSizes", "Scheduler", "Served", "drain", "new_key", "open_cache"]

_DRAIN_SECONDS = 60.0

_LOOP_LENGTH = 40_000
"""About half a millisecond."""

_NUM_WAITING = 8
"""Prompts that are prefetched while another one is served."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """How large a cache is.

    Attributes:
        geometry: of its pages.
        device_pages: L1.
        host_pages: L2.
    """

    geometry: KVGeometry
    device_pages: int
    host_pages: int


@dataclasses.dataclass(frozen=True)
class Served:
    """A cache and the free list that it shares with whoever schedules."""

    cache: HiRadixCache
    allocator: Allocator


@contextmanager
def open_cache(
    sizes: CacheSizes,
    storage: Mapping[str, object] | None,
    *,
    ranks: RankGroup | None = None,
) -> Iterator[Served]:
    """Provide a cache that writes through, and check it as a whole at the end.

    Args:
        sizes: of its pools.
        storage: backend and its options; None for two tiers.
        ranks: with whom it agrees; by default it is alone.

    Raises:
        CheckFailed: something is in flight for ever, or an invariant is broken.
    """
    device = create_device("cpu")
    allocator = PageAllocator(sizes.device_pages)
    options: dict[str, object] = {
        "page_size": sizes.geometry.page_size,
        "write_policy": "write_through",
        "prefetch_policy": "wait_complete",
        "host": {"size_bytes": sizes.host_pages * sizes.geometry.page_bytes},
    }
    if storage is not None:
        names = {"model_name": "benchmark", "weights_revision": "none"}
        options["storage"] = {**storage, **names}
    cache, _ = create_hiradix_cache(
        HiCacheConfig.from_mapping(options),
        device=device,
        device_pool=DeviceKVPool(
            sizes.geometry, num_pages=sizes.device_pages, torch_device=torch.device("cpu")
        ),
        device_allocator=allocator,
        ranks=ranks,
    )
    try:
        yield Served(cache, cache.device_allocator)
        drain(cache)
        violations = check_system(cache)
        check(not violations, f"the cache contradicts itself: {violations[:1]}")
    finally:
        closed = cache.close()
    check(closed, "the cache does not close")


def drain(cache: HiRadixCache) -> None:
    """Take what ends until nothing is in flight."""
    end = time.monotonic() + _DRAIN_SECONDS
    while cache.num_in_flight:
        check(time.monotonic() < end, f"{cache.num_in_flight} operations do not end")
        cache.check_hicache_events()
        time.sleep(0.0002)


def new_key(rng: np.random.Generator, num_tokens: int) -> RadixKey:
    """Return a key that nobody has had."""
    return RadixKey(rng.integers(VOCABULARY, size=num_tokens))


class Scheduler:
    """Serves prompts one after the other as an engine would, but computes nothing.

    Every prompt is prefetched, matched, loaded as far as the host has it, and inserted; one in
    `new_share` is new, the others come again and again.

    Args:
        served: the cache.
        num_prompts: prompts that come again; more than the cache holds.
        prompt_tokens: tokens of each, whole pages.
        new_share: one prompt in so many is new.
        quiet: let everything in flight end before each call, untimed.

    Attributes:
        times: us of each call, by its name; `loop` is a piece of Python that calls nothing and
            takes as long as the longest calls.
        num_served: prompts that were served.
    """

    def __init__(
        self,
        served: Served,
        *,
        num_prompts: int,
        prompt_tokens: int,
        new_share: int = 4,
        quiet: bool,
    ) -> None:
        self._cache, self._allocator = served.cache, served.allocator
        self._rng, self._tokens = random.Random(0), np.random.default_rng(0)
        self._prompt_tokens = prompt_tokens
        self._prompts = [new_key(self._tokens, prompt_tokens) for _ in range(num_prompts)]
        self._new_share = new_share
        self._quiet = quiet
        self._waiting: deque[tuple[str, RadixKey]] = deque()
        self._num_requests = 0
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.num_served = 0

    def step(self) -> None:
        """Collect what has ended, take in a prompt if few wait, serve the first if it can go."""
        cache = self._cache
        self._time("check_hicache_events", cache.check_hicache_events)
        if len(self._waiting) < _NUM_WAITING:
            self._take_in()
        request_id, key = self._waiting[0]
        ready = self._time(
            "check_prefetch_progress", lambda: cache.check_prefetch_progress(request_id)
        )
        if ready and self._serve(request_id, key):
            self._waiting.popleft()
            self.num_served += 1
            self._time("loop", lambda: sum(range(_LOOP_LENGTH)))
        elif ready:
            self._waiting.rotate(-1)

    def stop(self) -> None:
        """Forget who still waits."""
        while self._waiting:
            self._cache.release_aborted_request(self._waiting.popleft()[0])

    def _take_in(self) -> None:
        self._num_requests += 1
        request_id = str(self._num_requests)
        if self._num_requests % self._new_share == 0:
            key = new_key(self._tokens, self._prompt_tokens)
        else:
            key = self._rng.choice(self._prompts)
        self._time(
            "prefetch_from_storage", lambda: self._cache.prefetch_from_storage(request_id, key)
        )
        self._waiting.append((request_id, key))

    def _serve(self, request_id: str, key: RadixKey) -> bool:
        """Give the prompt all its pages and insert them; False when it has to wait."""
        cache = self._cache
        found = self._time("match_prefix", lambda: cache.match_prefix(key))
        node, pages = found.last_device_node, found.device_pages
        self._time("inc_lock_ref", lambda: cache.inc_lock_ref(node))
        status = LoadStatus.NOTHING
        if found.host_hit_tokens:
            load = self._time("init_load_back", lambda: cache.init_load_back(found))
            status = load.status
        if status is LoadStatus.QUEUED:
            cache.inc_lock_ref(load.node)
            cache.dec_lock_ref(node)
            node, pages = load.node, np.concatenate([pages, load.device_pages])
            # Nothing can end before: what is queued begins here.
            self._time("ready_to_load_host_cache", cache.ready_to_load_host_cache, settle=False)
        busy = status in (LoadStatus.BUSY, LoadStatus.NO_MEMORY)
        own = None if busy else self._own_pages(len(key) // found.slot_table.page_size - len(pages))
        if own is not None:
            cache.pop_prefetch_loaded_tokens(request_id)
        if own is not None and len(own):
            self._insert(request_id, key, pages, own)
        self._time("dec_lock_ref", lambda: cache.dec_lock_ref(node))
        return own is not None

    def _own_pages(self, count: int) -> IntArray | None:
        missing = count - self._allocator.num_available
        if missing > 0:
            self._time("evict", lambda: self._cache.evict(missing))
        return self._allocator.alloc(count)

    def _insert(self, request_id: str, key: RadixKey, pages: IntArray, own: IntArray) -> None:
        result = self._time(
            "insert",
            lambda: self._cache.insert(
                key, np.concatenate([pages, own]), request_id=request_id, chunked=False
            ),
        )
        # What the tree had already, beyond what was matched, has come meanwhile; behind a load
        # that is on its way it takes nothing.
        present, end = (
            max(0, num_pages - len(pages))
            for num_pages in (result.already_present_pages, result.end_page)
        )
        self._allocator.free(np.concatenate([own[:present], own[end:]]))

    def _time(self, name: str, call: Callable[[], T], *, settle: bool = True) -> T:
        if self._quiet and settle:
            drain(self._cache)
        begin = time.perf_counter_ns()
        result = call()
        self.times[name].append((time.perf_counter_ns() - begin) / 1e3)
        return result
