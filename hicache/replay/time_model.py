"""When the first token of a request is there: one engine, one link, one disk."""

from __future__ import annotations

import dataclasses
from array import array
from typing import TYPE_CHECKING

import numpy as np

from hicache.errors import ConfigError
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from hicache.replay.request import TraceRequest

__all__ = ["TimeModel", "TimeSummary", "Timeline"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeModel:
    """Speeds, of which times to first token follow.

    Attributes:
        prefill_tokens_per_second: how fast the engine computes prompts.
        kv_bytes_per_token: of KV, all layers.
        link_bytes_per_second: from host memory to the device.
        storage_bytes_per_second: from storage to host memory.
        timeout_base_seconds: under the prefetch policy `timeout`, what any request may wait.
        timeout_per_ki_token_seconds: likewise, for each 1024 tokens of the prompt.
        speed: requests arrive so many times as fast as in the trace.
    """

    prefill_tokens_per_second: float = 20_000.0
    kv_bytes_per_token: int = 131_072
    link_bytes_per_second: float = 50e9
    storage_bytes_per_second: float = 5e9
    timeout_base_seconds: float = 1.0
    timeout_per_ki_token_seconds: float = 0.25
    speed: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name.startswith("timeout")
            if not (value > 0 or (may_be_zero and value == 0)):
                raise ConfigError(f"{field.name} must be more than 0, not {value}")

    def storage_seconds(self, num_tokens: int) -> float:
        """Return how long storage takes to deliver tokens."""
        return num_tokens * self.kv_bytes_per_token / self.storage_bytes_per_second

    def engine_seconds(self, computed_tokens: int, loaded_tokens: int) -> float:
        """Return how long the engine takes for a prompt: layers are loaded while others compute."""
        load = loaded_tokens * self.kv_bytes_per_token / self.link_bytes_per_second
        return max(computed_tokens / self.prefill_tokens_per_second, load)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeSummary:
    """Times of a whole replay.

    Attributes:
        ttft_seconds_p50, ttft_seconds_p90, ttft_seconds_p99, ttft_seconds_mean: from arrival to the
            first token.
        engine_seconds: that the engine was at work.
        utilisation: the share of the trace's time that the work takes; at 1 or more the queue
            grows as long as requests arrive.
    """

    ttft_seconds_p50: float
    ttft_seconds_p90: float
    ttft_seconds_p99: float
    ttft_seconds_mean: float
    engine_seconds: float
    utilisation: float


class Timeline:
    """One engine that takes prompts one after another, as they arrive.

    What was found for a request is what all earlier ones have left, whether or not they have ended
    by then. Generated tokens take no time, and writes do not hold up loads: the link goes both
    ways.
    """

    def __init__(self, model: TimeModel, prefetch_policy: PrefetchPolicy) -> None:
        self._model = model
        self._policy = prefetch_policy
        self._engine_free = 0.0
        self._storage_free = 0.0
        self._ready = 0.0
        self._first_arrival: float | None = None
        self._last_arrival = 0.0
        self._busy_seconds = 0.0
        self._ttfts = array("d")

    def fetch(self, request: TraceRequest, num_blocks: int, block_tokens: int) -> int:
        """Read blocks from storage from the arrival on; return how many have arrived in time.

        Storage serves one request after another. Under `best_effort` the read ends when the engine
        is free, under `timeout` when the request has waited as long as it may.
        """
        model = self._model
        arrival = self._ready = request.arrival_seconds / model.speed
        if not num_blocks:
            return 0
        begin = max(arrival, self._storage_free)
        block_seconds = model.storage_seconds(block_tokens)
        end = begin + num_blocks * block_seconds
        latest = max(arrival, self._engine_free)
        if self._policy is PrefetchPolicy.TIMEOUT:
            allowed = model.timeout_per_ki_token_seconds * request.input_tokens / 1024
            latest = max(latest, arrival + model.timeout_base_seconds + allowed)
        if self._policy is PrefetchPolicy.WAIT_COMPLETE or end <= latest:
            self._ready = self._storage_free = end
            return num_blocks
        num_arrived = max(0, int((latest - begin) / block_seconds))
        self._ready = self._storage_free = latest
        return min(num_arrived, num_blocks)

    def serve(self, request: TraceRequest, computed_tokens: int, loaded_tokens: int) -> None:
        """Compute the rest of a prompt once the engine is free and what was fetched is there.

        At least one token is computed: the first answer follows from it.
        """
        arrival = request.arrival_seconds / self._model.speed
        service = self._model.engine_seconds(max(1, computed_tokens), loaded_tokens)
        begin = max(arrival, self._engine_free, self._ready)
        self._engine_free = begin + service
        self._busy_seconds += service
        self._ttfts.append(self._engine_free - arrival)
        if self._first_arrival is None:
            self._first_arrival = arrival
        self._last_arrival = arrival

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
