"""The controller: moves pages between tiers, and never blocks the scheduler for it."""

from hicache.controller.controller import HiCacheController
from hicache.controller.mover import LocalMover, Mover, PoolPair
from hicache.controller.operations import (
    CacheOperation,
    HiCacheAck,
    PrefetchOperation,
    StorageOperation,
)
from hicache.controller.stats import MovementStats
from hicache.controller.storage_attachment import (
    AttachmentState,
    StoragePolicies,
    StorageStatus,
)
from hicache.controller.storage_tier import StorageTier, thread_executor
from hicache.controller.store_opening import resilient_storage
from hicache.controller.workers import Executor, ThreadExecutor, Work

__all__ = [
    "AttachmentState",
    "CacheOperation",
    "Executor",
    "HiCacheAck",
    "HiCacheController",
    "LocalMover",
    "MovementStats",
    "Mover",
    "PoolPair",
    "PrefetchOperation",
    "StorageOperation",
    "StoragePolicies",
    "StorageStatus",
    "StorageTier",
    "ThreadExecutor",
    "Work",
    "resilient_storage",
    "thread_executor",
]
