"""How fast an engine, its link and its disk are, and what came of it."""

from __future__ import annotations

import dataclasses
from enum import Enum

from hicache.errors import ConfigError

__all__ = ["LoadRule", "TimeModel", "TimeSummary"]

_MAY_BE_ZERO = ("timeout", "attention", "storage_latency")
"""Beginnings of names."""


class LoadRule(str, Enum):
    """What becomes of hits in L2 and L3."""

    AUTO = "auto"
    """Loaded as far as that is faster than computing, by what both took so far."""
    ALWAYS = "always"
    NEVER = "never"
    """They are computed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeModel:
    """Speeds, of which times to first token follow.

    Attributes:
        prefill_tokens_per_second: how fast the engine computes prompts.
        kv_bytes_per_token: of KV, all layers.
        link_bytes_per_second: from host memory to the device.
        storage_bytes_per_second: from storage to host memory.
        storage_latency_seconds: of a read, whatever its size.
        attention_per_ki_token: how much longer a token takes to compute for each 1024 tokens before
            it, as a part of what the first one takes.
        timeout_base_seconds: under the prefetch policy `timeout`, what any request may wait.
        timeout_per_ki_token_seconds: likewise, for each 1024 tokens of the prompt.
        speed: requests arrive so many times as fast as in the trace.
    """

    prefill_tokens_per_second: float = 20_000.0
    kv_bytes_per_token: int = 131_072
    link_bytes_per_second: float = 50e9
    storage_bytes_per_second: float = 5e9
    storage_latency_seconds: float = 0.0
    attention_per_ki_token: float = 0.0
    timeout_base_seconds: float = 1.0
    timeout_per_ki_token_seconds: float = 0.25
    speed: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name.startswith(_MAY_BE_ZERO)
            if not (value > 0 or (may_be_zero and value == 0)):
                raise ConfigError(f"{field.name} must be more than 0, not {value}")

    def storage_seconds(self, num_tokens: int) -> float:
        """Return how long storage takes to deliver tokens, besides the latency."""
        return num_tokens * self.kv_bytes_per_token / self.storage_bytes_per_second

    def load_seconds(self, num_tokens: int) -> float:
        """Return how long the link takes for tokens."""
        return num_tokens * self.kv_bytes_per_token / self.link_bytes_per_second

    def compute_seconds(self, first_token: int, last_token: int) -> float:
        """Return how long the engine computes the tokens `[first_token, last_token)` of a prompt.

        Layers are loaded meanwhile, so a prompt takes the longer of both.
        """
        num_tokens = last_token - first_token
        mean_context = (first_token + last_token) / 2
        growth = 1 + self.attention_per_ki_token * mean_context / 1024
        return num_tokens * growth / self.prefill_tokens_per_second


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
