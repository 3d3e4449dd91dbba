"""What can be done to the store of a cache at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache.config import StorageConfig
    from hicache.controller import StoragePolicies
    from hicache.hiradix_cache.parts import CacheParts

__all__ = ["StoreCalls"]


class StoreCalls:
    """Attaches and clears the store, and lets the cache forget what it believed of the old one."""

    def __init__(self, parts: CacheParts) -> None:
        self._parts = parts
        self._controller = parts.controller

    def attach(self, storage: StorageConfig, policies: StoragePolicies | None) -> None:
        """See `HiRadixCache.attach_storage_backend`."""
        controller = self._controller
        write_policy, was_attached = controller.config.write_policy, controller.storage is not None
        controller.attach_storage_backend(storage, policies=policies)
        if controller.config.write_policy is not write_policy:
            self._parts.writer.reset()
        if not was_attached:
            self._forget_store()

    def clear(self) -> int:
        """See `HiRadixCache.clear_storage_backend`."""
        try:
            return self._controller.clear_storage_backend()
        finally:
            # Also when the backend failed: some pages may be gone, or those of another rank.
            self._forget_store()

    def _forget_store(self) -> None:
        """Forget what storage is believed to hold, and to lack."""
        self._parts.tree.forget_persisted()
        self._parts.persister.forget()
        self._parts.prefetcher.forget_doubts()
