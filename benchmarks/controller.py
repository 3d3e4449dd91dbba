"""What the cache costs the scheduler's thread: each call alone, and under full background load.

Every cache is checked as a whole at its end: one owner for each page, no broken invariant, nothing
in flight; and what was to be moved has been moved.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.harness import Bar, Result, Step, check, summarise, time_calls
from benchmarks.prompt import one_torch_thread
from benchmarks.rank_steps import RankSteps
from benchmarks.scheduler import CacheSizes, Scheduler, drain, new_key, open_cache
from hicache.hiradix_cache import LoadStatus
from hicache.layout import KVGeometry

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from benchmarks.scheduler import Served

    OpenCache = Callable[..., AbstractContextManager[Served]]

__all__ = ["Sizes", "steps"]

_EMPTY_STORE = {"backend": "memory"}

_PATIENCE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        calls: a cache for single calls; its pages have many layers and few bytes, because the
            scheduler's cost depends on the layers and not on the bytes.
        call_pages: pages of the prompts that are written and loaded.
        prefetch_tokens: tokens of the prompt that is looked for in storage.
        samples: timed calls of each kind.
        load: a cache for the background load, with pages of a real size.
        load_prompts: prompts that come again under load.
        load_prompt_pages: pages of each.
        load_seconds: how long the load is measured.
        step_seconds: how long the scheduler's thread leaves the others alone after each step.
    """

    calls: CacheSizes
    call_pages: tuple[int, ...] = (1, 64, 512)
    prefetch_tokens: int = 32_768
    samples: int = 500
    load: CacheSizes
    load_prompts: int = 32
    load_prompt_pages: int = 16
    load_seconds: float = 15.0
    step_seconds: float = 0.001

    @classmethod
    def full(cls) -> Sizes:
        """Return the sizes of a run that counts."""
        small = KVGeometry(num_layers=30, num_kv_heads=1, head_dim=8, dtype="float16", page_size=64)
        real = KVGeometry(
            num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", page_size=64
        )
        return cls(
            calls=CacheSizes(geometry=small, device_pages=1024, host_pages=1024),
            load=CacheSizes(geometry=real, device_pages=96, host_pages=192),
        )


def steps(
    *,
    quick: bool,
    peers: frozenset[str] = frozenset(),
    sizes: Sizes | None = None,
    open_cache: Callable[..., AbstractContextManager[Served]] = open_cache,
) -> list[Step]:
    """Return the parts of the benchmark.

    Args:
        quick: fewer samples.
        peers: there are none.
        sizes: instead of those that `quick` means.
        open_cache: what is measured, from sizes and storage; see `scheduler.open_cache`.
    """
    if sizes is None:
        sizes = Sizes.full()
        if quick:
            sizes = dataclasses.replace(sizes, samples=100, load_seconds=4.0)
    parts = [
        Step("idle", partial(_idle, sizes, open_cache)),
        Step("ranks", RankSteps(cache=sizes.calls, samples=2 * sizes.samples)),
        Step("life cycle", partial(_life_cycle, sizes, open_cache)),
    ]
    for num_pages in sizes.call_pages:
        parts += [
            Step(f"write {num_pages} pages", partial(_write, sizes, num_pages, open_cache)),
            Step(f"load {num_pages} pages", partial(_load, sizes, num_pages, open_cache)),
        ]
    parts.append(Step("prefetch", partial(_prefetch, sizes, open_cache)))
    parts += [
        Step(f"calls, {background} background", partial(_calls, sizes, background, open_cache))
        for background in ("quiet", "full")
    ]
    return parts


def _idle(sizes: Sizes, open_cache: OpenCache) -> list[Result]:
    """Time a step in which nothing has happened, of a cache with a store."""
    with open_cache(sizes.calls, _EMPTY_STORE) as served:
        times = time_calls(served.cache.check_hicache_events, samples=20 * sizes.samples)
    return [summarise("check_hicache_events", times, params={"state": "idle"}, bars=(Bar(10),))]


def _life_cycle(sizes: Sizes, open_cache: OpenCache) -> list[Result]:
    """Time what empties, changes and ends an idle cache, with a full tree and a store."""
    times: dict[str, list[float]] = {"reset": [], "detach": [], "attach": [], "close": []}
    rng, num_pages = np.random.default_rng(0), sizes.calls.device_pages // 2

    def fill(served: Served) -> None:
        pages = served.allocator.alloc(num_pages)
        assert pages is not None
        key = new_key(rng, num_pages * sizes.calls.geometry.page_size)
        served.cache.insert(key, pages, request_id="one", chunked=False)
        drain(served.cache)

    def time_one(name: str, call: Callable[[], object]) -> None:
        begin = time.perf_counter_ns()
        call()
        times[name].append((time.perf_counter_ns() - begin) / 1e3)

    for _ in range(max(3, sizes.samples // 25)):
        with open_cache(sizes.calls, _EMPTY_STORE) as served:
            cache, store = served.cache, served.cache.controller.storage
            assert store is not None
            fill(served)
            time_one("reset", cache.reset)
            check(served.allocator.num_available == sizes.calls.device_pages, "reset left pages")
            fill(served)
            time_one("detach", cache.detach_storage_backend)
            time_one("attach", partial(cache.attach_storage_backend, store))
            time_one("close", cache.close)
    bars = (Bar(50_000), Bar(50_000, "p99"))
    return [
        summarise(name, some, params={"state": "idle", "pages": num_pages}, bars=bars)
        for name, some in times.items()
    ]


def _write(sizes: Sizes, num_pages: int, open_cache: OpenCache) -> list[Result]:
    """Time insert and the steps that end its write, by page, without the time in between."""
    times, rng = [], np.random.default_rng(0)
    num_tokens = num_pages * sizes.calls.geometry.page_size
    with open_cache(sizes.calls, None) as served:
        cache = served.cache
        for _ in range(sizes.samples):
            key, pages = new_key(rng, num_tokens), served.allocator.alloc(num_pages)
            assert pages is not None
            begin = time.perf_counter_ns()
            node = cache.insert(key, pages, request_id="one", chunked=False).node
            spent = time.perf_counter_ns() - begin
            while not node.backed:
                time.sleep(0.0005)
                begin = time.perf_counter_ns()
                cache.check_hicache_events()
                spent += time.perf_counter_ns() - begin
            times.append(spent / 1e3 / num_pages)
            drain(cache)
            cache.evict(num_pages)
            check(served.allocator.num_available == sizes.calls.device_pages, "evict left pages")
    params = {"pages": num_pages, "layers": sizes.calls.geometry.num_layers}
    return [summarise("write_through_per_page", times, params=params)]


def _load(sizes: Sizes, num_pages: int, open_cache: OpenCache) -> list[Result]:
    """Time what begins a load: queueing it and starting it."""
    times, rng = [], np.random.default_rng(0)
    key = new_key(rng, num_pages * sizes.calls.geometry.page_size)
    with open_cache(sizes.calls, None) as served:
        cache, pages = served.cache, served.allocator.alloc(num_pages)
        assert pages is not None
        cache.insert(key, pages, request_id="one", chunked=False)
        for _ in range(sizes.samples):
            drain(cache)
            cache.evict(num_pages)
            found = cache.match_prefix(key)
            check(found.host_hit_tokens == len(key), "the host does not have the whole prompt")
            begin = time.perf_counter_ns()
            load = cache.init_load_back(found)
            producer = cache.ready_to_load_host_cache()
            times.append((time.perf_counter_ns() - begin) / 1e3)
            check(load.status is LoadStatus.QUEUED and producer >= 0, "the load does not start")
        drain(cache)
        found = cache.match_prefix(key)
        check(found.device_hit_tokens == len(key), "the load has not brought the whole prompt")
    params = {"pages": num_pages, "layers": sizes.calls.geometry.num_layers}
    return [summarise("load_back", times, params=params)]


def _prefetch(sizes: Sizes, open_cache: OpenCache) -> list[Result]:
    """Time what begins a prefetch: the hashes of the prompt, and a query for storage."""
    times, rng = [], np.random.default_rng(0)
    with open_cache(sizes.calls, _EMPTY_STORE) as served:
        cache = served.cache
        for index in range(sizes.samples):
            key = new_key(rng, sizes.prefetch_tokens)
            begin = time.perf_counter_ns()
            started = cache.prefetch_from_storage(str(index), key)
            times.append((time.perf_counter_ns() - begin) / 1e3)
            check(started, "the prefetch does not begin")
            drain(cache)
            check(cache.pop_prefetch_loaded_tokens(str(index)) == 0, "an empty store has pages")
    params = {"tokens": sizes.prefetch_tokens, "page_size": sizes.calls.geometry.page_size}
    return [summarise("prefetch_from_storage", times, params=params)]


def _calls(sizes: Sizes, background: str, open_cache: OpenCache) -> list[Result]:
    """Time the calls of a scheduler whose prompts keep all four movements busy, or none."""
    quiet = background == "quiet"
    with one_torch_thread(), tempfile.TemporaryDirectory() as folder:
        storage = {"backend": "file", "extra_config": {"path": str(Path(folder))}}
        with open_cache(sizes.load, storage) as served:
            scheduler = Scheduler(
                served,
                num_prompts=sizes.load_prompts,
                prompt_tokens=sizes.load_prompt_pages * sizes.load.geometry.page_size,
                quiet=quiet,
            )
            moved, begin = served.cache.controller.stats, time.monotonic()
            while (seconds := time.monotonic() - begin) < sizes.load_seconds or not all(
                stats.num_bytes for stats in moved.values()
            ):
                check(seconds < sizes.load_seconds + _PATIENCE_SECONDS, "a movement does not begin")
                scheduler.step()
                time.sleep(sizes.step_seconds)
            speeds = {kind: stats.num_bytes / seconds / 1e9 for kind, stats in moved.items()}
            scheduler.stop()
    rows = [
        summarise("call", times, params={"call": name, "background": background})
        for name, times in scheduler.times.items()
    ]
    rows += [
        summarise(
            "moved",
            [speed],
            params={"movement": kind.value, "background": background},
            unit="GB/s",
            better="higher",
        )
        for kind, speed in speeds.items()
    ]
    return rows
