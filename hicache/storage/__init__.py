"""The third tier: pages kept outside of the process's cache, behind one contract.

`base` is the contract, `factory` makes a backend of its name, and each backend has a module. A
backend sees addresses and lengths of host memory, never tensors or pools.
"""

from hicache.storage.base import (
    DEFAULT_CALL_BYTES,
    HiCacheStorage,
    HiCacheStorageConfig,
    Page,
    Piece,
    StorageCapabilities,
    StorageFigures,
    StorageStats,
)
from hicache.storage.factory import StorageBackendFactory

__all__ = [
    "DEFAULT_CALL_BYTES",
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "Page",
    "Piece",
    "StorageBackendFactory",
    "StorageCapabilities",
    "StorageFigures",
    "StorageStats",
]
