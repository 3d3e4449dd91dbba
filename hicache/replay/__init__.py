"""Request traces through the real tree: hit ratios, movements and times of sizes and policies."""

from hicache.replay.belady import belady_hits
from hicache.replay.cache import CacheOptions
from hicache.replay.replay import ReplayResult, replay, replay_belady
from hicache.replay.request import TraceError, TraceRequest
from hicache.replay.time_model import TimeModel
from hicache.replay.trace import Trace, open_trace

__all__ = [
    "CacheOptions",
    "ReplayResult",
    "TimeModel",
    "Trace",
    "TraceError",
    "TraceRequest",
    "belady_hits",
    "open_trace",
    "replay",
    "replay_belady",
]
