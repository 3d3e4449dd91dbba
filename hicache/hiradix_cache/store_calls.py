"""What can be done to the store of a cache at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache.config import StorageConfig
    from hicache.controller import StoragePolicies
    from hicache.hiradix_cache.parts import CacheParts
    from hicache.hiradix_cache.publishing import Publisher

__all__ = ["StoreCalls"]


class StoreCalls:
    """Attaches, detaches and clears the store; the cache forgets what it believed of the old one.

    Args:
        parts: of the cache.
        publisher: notices when ranks are found to be lost meanwhile.
    """

    def __init__(self, parts: CacheParts, publisher: Publisher) -> None:
        self._parts = parts
        self._publisher = publisher
        self._controller = parts.controller

    def attach(self, storage: StorageConfig, policies: StoragePolicies | None) -> None:
        """See `HiRadixCache.attach_storage_backend`."""
        controller = self._controller
        write_policy, was_attached = controller.config.write_policy, controller.storage is not None
        with self._publisher.noticing():
            controller.attach_storage_backend(storage, policies=policies)
            if controller.config.write_policy is not write_policy:
                self._parts.writer.reset()
            if not was_attached:
                self._forget_store()

    def detach(self, timeout_seconds: float) -> None:
        """See `HiRadixCache.detach_storage_backend`."""
        with self._publisher.noticing():
            self._controller.detach_storage_backend(timeout_seconds)

    def clear(self) -> int:
        """See `HiRadixCache.clear_storage_backend`."""
        with self._publisher.noticing():
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
