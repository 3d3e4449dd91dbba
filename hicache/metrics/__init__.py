"""What can be seen of a cache from outside: one frozen snapshot, and its form for Prometheus.

The form is in `hicache.metrics.prometheus`, which needs `prometheus_client`; nothing else does.
"""

from hicache.metrics.snapshot import (
    CacheSnapshot,
    CallUse,
    MovementUse,
    PoolUse,
    StoreUse,
    TierUse,
)

__all__ = ["CacheSnapshot", "CallUse", "MovementUse", "PoolUse", "StoreUse", "TierUse"]
