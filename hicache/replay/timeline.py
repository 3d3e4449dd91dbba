"""When the first token of each request of a trace is there."""

from __future__ import annotations

import math
from array import array
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicache.controller.cost_model import CostModel, StorageWait, StoredHit
from hicache.replay.time_model import LoadRule, TimeSummary
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from hicache.replay.cache import CacheOptions, Found
    from hicache.replay.request import TraceRequest
    from hicache.replay.time_model import TimeModel

__all__ = ["Timeline"]

_ROUNDING = 1e-6
"""Of a block, that a sum of times may lack."""

_RECENT = 32
"""Requests that tell how many others come in a while, and what they want from storage."""


class _Read(NamedTuple):
    """Blocks that storage reads one after another, the first of which it begins at `begin`."""

    begin: float
    latency: float
    block_seconds: float
    num_blocks: int

    @property
    def end(self) -> float:
        """When the last one has come."""
        return self.seconds_of(self.num_blocks) + self.begin

    def seconds_of(self, num_blocks: int) -> float:
        """Return how long it takes for some of them."""
        return self.latency + num_blocks * self.block_seconds

    def num_arrived(self, now: float) -> int:
        """Return how many have come by then."""
        num_blocks = (now - self.begin - self.latency) / self.block_seconds
        return min(self.num_blocks, max(0, int(num_blocks + _ROUNDING)))

    def num_begun(self, now: float) -> int:
        """Return how many storage reads when it is told then to go on with none."""
        if now <= self.begin:
            return 0
        return min(self.num_blocks, self.num_arrived(now) + 1)


class Timeline:
    """One engine that takes prompts one after another, as they arrive.

    What was found for a request is what all earlier ones have left, whether or not they have ended
    by then. Generated tokens take no time, and writes do not hold up loads: the link goes both
    ways. What is worth reading and loading is decided as `HiRadixCache` decides it, by the code of
    `CostModel`, which learns speeds from what reads, loads and passes have taken before.

    Args:
        model: speeds.
        options: of the cache: what waits for storage, and what becomes of hits.
        block_tokens: tokens in a block.
    """

    def __init__(self, model: TimeModel, options: CacheOptions, block_tokens: int) -> None:
        self._model = model
        self._policy = options.prefetch_policy
        self._rule = options.load
        self._block_tokens = block_tokens
        self._costs = CostModel(page_size=block_tokens)
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._engine_free = 0.0
        self._storage_free = 0.0
        self._ready = 0.0
        self._first_arrival: float | None = None
        self._last_arrival = 0.0
        self._busy_seconds = 0.0
        self._ttfts = array("d")

    def fetch(self, request: TraceRequest, found: Found) -> int:
        """Read blocks from storage from the arrival on; return how many have arrived in time.

        Storage serves one request after another. Under `best_effort` the read ends when the engine
        is free, under `timeout` when the request has waited as long as it may, under `adaptive`
        when the rest is computed sooner (before anything was computed, as under `timeout`). Storage
        ends the block that it is at.
        """
        arrival = self._ready = request.arrival_seconds / self._model.speed
        self._recent.append((arrival, found.storage))
        begin = max(arrival, self._storage_free)
        num_blocks = self._num_worth_reading(request, found, begin - arrival)
        if not num_blocks:
            return 0
        read = _Read(begin, self._model.storage_latency_seconds, self._block_seconds, num_blocks)
        latest = self._latest(request, found, read)
        if read.end <= latest:
            num_begun, num_arrived, self._ready = num_blocks, num_blocks, read.end
        else:
            num_begun, num_arrived = read.num_begun(latest), read.num_arrived(latest)
            self._ready = latest
        if num_begun:
            self._storage_free = begin + read.seconds_of(num_begun)
            self._costs.note_read(num_begun, read.seconds_of(num_begun))
        return num_arrived

    def serve(self, request: TraceRequest, found: Found) -> int:
        """Compute the rest of a prompt once the engine is free and what was fetched is there.

        At least one token is computed: the first answer follows from it.

        Returns:
            Blocks that the host has and that were computed all the same.
        """
        arrival = request.arrival_seconds / self._model.speed
        num_blocks = found.host + found.storage
        num_loaded = self._num_worth_loading(request, found)
        service = self._service_seconds(request, found.device, num_loaded)
        begin = max(arrival, self._engine_free, self._ready)
        self._engine_free = begin + service
        self._busy_seconds += service
        self._ttfts.append(self._engine_free - arrival)
        if self._first_arrival is None:
            self._first_arrival = arrival
        self._last_arrival = arrival
        return num_blocks - num_loaded

    def summary(self) -> TimeSummary:
        """Return the times so far."""
        ttfts = np.frombuffer(self._ttfts) if self._ttfts else np.zeros(1)
        p50, p90, p99 = (float(value) for value in np.percentile(ttfts, [50, 90, 99]))
        span = self._last_arrival - (self._first_arrival or 0.0)
        return TimeSummary(
            ttft_seconds_p50=p50,
            ttft_seconds_p90=p90,
            ttft_seconds_p99=p99,
            ttft_seconds_mean=float(ttfts.mean()),
            engine_seconds=self._busy_seconds,
            utilisation=self._busy_seconds / span if span > 0 else 0.0,
        )

    @property
    def _block_seconds(self) -> float:
        return self._model.storage_seconds(self._block_tokens)

    def _num_worth_reading(
        self, request: TraceRequest, found: Found, backlog_seconds: float
    ) -> int:
        if self._rule is LoadRule.NEVER or not found.storage:
            return 0
        if self._rule is LoadRule.ALWAYS:
            return found.storage
        return self._costs.leading_pages_to_read(
            StoredHit(
                num_pages=found.storage,
                num_host_pages=found.host,
                first_token=found.device * self._block_tokens,
                num_tokens=request.input_tokens,
                num_pages_ahead=int(backlog_seconds / self._block_seconds),
            ),
            may_refuse=self._policy is not PrefetchPolicy.ADAPTIVE,
            loads_partly=True,
        )

    def _latest(self, request: TraceRequest, found: Found, read: _Read) -> float:
        """Return until when a request waits for a read, at most."""
        model, arrival = self._model, self._ready
        could_run = max(arrival, self._engine_free)
        if self._policy is PrefetchPolicy.WAIT_COMPLETE:
            return read.end
        is_unknown = self._costs.speeds.compute is None
        if self._policy is PrefetchPolicy.TIMEOUT or (
            self._policy is PrefetchPolicy.ADAPTIVE and is_unknown
        ):
            allowed = model.timeout_per_ki_token_seconds * request.input_tokens / 1024
            return max(could_run, arrival + model.timeout_base_seconds + allowed)
        if self._policy is PrefetchPolicy.ADAPTIVE:
            return self._worth_waiting_until(found, read, could_run)
        return could_run

    def _worth_waiting_until(self, found: Found, read: _Read, could_run: float) -> float:
        """Return until when a request that could run waits on for a read."""
        first_block = found.device + found.host
        num_arrived = read.num_arrived(could_run)
        first_token, last_token = (
            (first_block + num_blocks) * self._block_tokens
            for num_blocks in (num_arrived, read.num_blocks)
        )
        last_came = read.begin if not num_arrived else read.begin + read.seconds_of(num_arrived)
        wait = StorageWait(
            first_token=first_token,
            last_token=last_token,
            awaited_from_token=first_token,
            waited_seconds=0.0,
            quiet_seconds=max(0.0, could_run - last_came),
            num_pages_ahead=int(max(0.0, read.begin - could_run) / self._block_seconds)
            + self._num_beside(read.num_blocks - num_arrived, could_run - self._ready),
        )
        if first_token < last_token and self._costs.is_worth_waiting(wait):
            return could_run + (self._costs.speeds.compute_seconds(first_token, last_token) or 0.0)
        if could_run == read.begin and self._costs.begins_useless_read():
            # The block that storage begins just then is measured, though nobody waits for it.
            return math.nextafter(could_run, math.inf)
        return could_run

    def _num_beside(self, num_blocks: int, seconds: float) -> int:
        """Return how many blocks storage would read for requests that came in so many seconds.

        Were it to read for all in turn, as many for each: see `StoreQueue.num_pages_beside`. Those
        requests are still to be replayed; as many are assumed as came in as long a time before.
        """
        span = self._recent[-1][0] - self._recent[0][0]
        if span <= 0:
            return 0
        wanted = sum(min(num_blocks, stored) for _, stored in self._recent)
        return int(wanted * seconds / span)

    def _num_worth_loading(self, request: TraceRequest, found: Found) -> int:
        num_blocks = found.host + found.storage
        if self._rule is LoadRule.NEVER:
            return 0
        if self._rule is LoadRule.ALWAYS:
            return num_blocks
        return self._costs.leading_pages_to_load(
            num_blocks,
            first_token=found.device * self._block_tokens,
            num_tokens=request.input_tokens,
        )

    def _service_seconds(
        self, request: TraceRequest, device_blocks: int, loaded_blocks: int
    ) -> float:
        """Return how long the engine takes for a prompt, and learn from it."""
        model, size = self._model, self._block_tokens
        on_device = request.prefix_tokens(device_blocks, size)
        present = request.prefix_tokens(device_blocks + loaded_blocks, size)
        first_token = min(present, request.input_tokens - 1)
        computing = model.compute_seconds(first_token, request.input_tokens)
        middle = (first_token + request.input_tokens) // 2
        if not loaded_blocks:
            self._note_pass(first_token, middle)
        self._note_pass(middle, request.input_tokens)
        if not loaded_blocks:
            return computing
        loading = model.load_seconds(present - on_device)
        self._costs.note_load(loaded_blocks, loading)
        return max(computing, loading)

    def _note_pass(self, first_token: int, last_token: int) -> None:
        """Learn from one of the two passes of a prompt; beside a load it would tell nothing."""
        self._costs.note_prefill(
            last_token - first_token,
            self._model.compute_seconds(first_token, last_token),
            context_tokens=(first_token + last_token) / 2,
        )
