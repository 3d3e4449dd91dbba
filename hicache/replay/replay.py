"""Drives several caches with the requests of one trace, in one pass."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hicache.radix import RadixKey
from hicache.replay.belady import belady_hits
from hicache.replay.cache import CacheOptions, Found, ReplayedCache
from hicache.replay.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache.replay.request import TraceRequest
    from hicache.replay.time_model import TimeModel, TimeSummary

__all__ = ["BELADY", "ReplayResult", "replay", "replay_belady", "replay_uncached"]

BELADY = "belady"
"""Name of the offline bound among the policies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What one cache made of a trace.

    Attributes:
        options: of the cache.
        num_requests: of the trace.
        num_blocks: that all requests together asked for.
        num_tokens: likewise.
        device_hits, host_hits, storage_hits: leading blocks of requests by where they were.
        hit_tokens: in all tiers; a block that is partly filled counts with what is in it.
        num_written: blocks written to L2.
        num_unwritten: blocks that L2 had no room for.
        num_stored: blocks written to L3.
        num_recomputed: blocks that the host had and that were computed all the same.
        times: what the time model makes of it.
    """

    options: CacheOptions
    num_requests: int
    num_blocks: int
    num_tokens: int
    device_hits: int
    host_hits: int
    storage_hits: int
    hit_tokens: int
    num_written: int
    num_unwritten: int
    num_stored: int
    num_recomputed: int
    times: TimeSummary

    @property
    def hit_blocks(self) -> int:
        """Leading blocks found in any tier."""
        return self.device_hits + self.host_hits + self.storage_hits

    @property
    def block_hit_ratio(self) -> float:
        """Hits by requested blocks."""
        return self.hit_blocks / max(1, self.num_blocks)

    @property
    def token_hit_ratio(self) -> float:
        """Hits by requested tokens."""
        return self.hit_tokens / max(1, self.num_tokens)

    @property
    def written_blocks_per_requested(self) -> float:
        """Blocks written to L2 by requested blocks."""
        return self.num_written / max(1, self.num_blocks)


def replay(
    requests: Iterable[TraceRequest],
    options: Sequence[CacheOptions],
    *,
    block_tokens: int,
    model: TimeModel,
    insert_output: bool = False,
    progress: Callable[[int], object] = lambda _count: None,
) -> list[ReplayResult]:
    """Replay a trace on a cache for each of `options`; the trace is read once.

    Args:
        requests: in the order in which they arrive.
        options: of the caches.
        block_tokens: tokens in a block.
        model: speeds.
        insert_output: whether answers are put in, where `TraceRequest.cached_blocks` tells them.
        progress: told of every request that is done.

    Raises:
        ConfigError: there is no such policy.
        TraceError: the trace cannot be read.
    """
    lanes = [_Lane(chosen, block_tokens, model) for chosen in options]
    for request in requests:
        key = RadixKey(request.blocks)
        cached = request.cached_blocks if insert_output else None
        inserted = key if cached is None else RadixKey(cached)
        for lane in lanes:
            lane.take(request, key, inserted)
        progress(1)
    return [lane.result() for lane in lanes]


def replay_belady(
    requests: Sequence[TraceRequest],
    options: Sequence[CacheOptions],
    *,
    block_tokens: int,
    model: TimeModel,
) -> list[ReplayResult]:
    """Return the upper bound for each of `options`: one memory as large as all tiers together.

    Its hits count as the device's. Answers are not put in.
    """
    distinct = sum(len(request.blocks) for request in requests)
    results = []
    capacities = [_total_blocks(chosen, distinct) for chosen in options]
    for chosen, hits in zip(options, belady_hits(requests, capacities), strict=True):
        tally = _Tally(chosen, block_tokens, model)
        for request, num_hits in zip(requests, hits, strict=True):
            tally.count(request, Found(num_hits, 0, 0))
        results.append(tally.result(None))
    return results


def replay_uncached(requests: Iterable[TraceRequest], model: TimeModel) -> TimeSummary:
    """Return the times of an engine that computes every prompt whole."""
    timeline = Timeline(model, CacheOptions(), 1)
    for request in requests:
        timeline.serve(request, Found(0, 0, 0))
    return timeline.summary()


class _Tally:
    """Counts of one cache and its time line."""

    def __init__(self, options: CacheOptions, block_tokens: int, model: TimeModel) -> None:
        self.timeline = Timeline(model, options, block_tokens)
        self._options = options
        self._block_tokens = block_tokens
        self._requests = self._blocks = self._tokens = 0
        self._device = self._host = self._storage = self._hit_tokens = self._recomputed = 0

    def count(self, request: TraceRequest, hits: Found) -> None:
        """Count a request and serve it on the time line."""
        self._requests += 1
        self._blocks += len(request.blocks)
        self._tokens += request.input_tokens
        self._device += hits.device
        self._host += hits.host
        self._storage += hits.storage
        self._hit_tokens += request.prefix_tokens(sum(hits), self._block_tokens)
        self._recomputed += self.timeline.serve(request, hits)

    def result(self, cache: ReplayedCache | None) -> ReplayResult:
        """Return the counts, and those of the cache if there is one."""
        return ReplayResult(
            options=self._options,
            num_requests=self._requests,
            num_blocks=self._blocks,
            num_tokens=self._tokens,
            device_hits=self._device,
            host_hits=self._host,
            storage_hits=self._storage,
            hit_tokens=self._hit_tokens,
            num_written=cache.num_written if cache else 0,
            num_unwritten=cache.num_unwritten if cache else 0,
            num_stored=cache.num_stored if cache else 0,
            num_recomputed=self._recomputed,
            times=self.timeline.summary(),
        )


class _Lane:
    """One cache and what is counted of it."""

    def __init__(self, options: CacheOptions, block_tokens: int, model: TimeModel) -> None:
        self._cache = ReplayedCache(options)
        self._tally = _Tally(options, block_tokens, model)
        self._block_tokens = block_tokens

    def take(self, request: TraceRequest, key: RadixKey, inserted: RadixKey) -> None:
        found = self._cache.look_up(key)
        in_time = self._tally.timeline.fetch(request, found)
        fetched = self._cache.fetch(key, in_time)
        self._tally.count(request, found._replace(storage=fetched))
        self._cache.insert(inserted)

    def result(self) -> ReplayResult:
        return self._tally.result(self._cache)


def _total_blocks(options: CacheOptions, distinct: int) -> int:
    sizes = (options.device_blocks, options.host_blocks, options.storage_blocks)
    return sum(distinct if size is None else size for size in sizes)
