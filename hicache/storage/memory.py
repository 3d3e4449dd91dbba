"""A storage backend that keeps pages in the memory of the process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from hicache.errors import ConfigError
from hicache.storage.base import HiCacheStorageConfig, StorageCapabilities
from hicache.storage.page_memory import page_checksum, page_views
from hicache.storage.pagewise import PagewiseStorage
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from hicache.storage.base import Page

__all__ = ["MemoryPages", "MemoryStorage", "StoredPage"]


class StoredPage(NamedTuple):
    """A page's bytes and the checksum that they had when they were written."""

    payload: bytes
    checksum: bytes


class MemoryPages:
    """Pages of any number of namespaces; outlives the `MemoryStorage` instances that share it.

    Thread-safe: one lock guards the pages and their total size, held for a look-up or a change and
    never while bytes are copied.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: dict[tuple[bytes, PageHash], StoredPage] = {}
        self._num_bytes = 0

    def find(self, namespace_digest: bytes, key: PageHash) -> StoredPage | None:
        """Return the page, or `None`."""
        with self._lock:
            return self._pages.get((namespace_digest, key))

    def put(
        self, namespace_digest: bytes, key: PageHash, page: StoredPage, *, max_bytes: int | None
    ) -> bool:
        """Store or replace a page; return `False`, changing nothing, if that is too much.

        Args:
            namespace_digest: of the page's namespace.
            key: the page's hash.
            page: what to store.
            max_bytes: bound for the payload of all pages of this store; `None`: no bound.
        """
        name = (namespace_digest, key)
        with self._lock:
            replaced = self._pages.get(name)
            num_bytes = self._num_bytes + len(page.payload)
            if replaced is not None:
                num_bytes -= len(replaced.payload)
            if max_bytes is not None and num_bytes > max_bytes:
                return False
            self._pages[name] = page
            self._num_bytes = num_bytes
            return True

    def remove(self, namespace_digest: bytes, key: PageHash, page: StoredPage) -> None:
        """Remove this very page; one that has taken its place meanwhile stays."""
        name = (namespace_digest, key)
        with self._lock:
            if self._pages.get(name) is page:
                del self._pages[name]
                self._num_bytes -= len(page.payload)

    def clear(self, namespace_digest: bytes) -> int:
        """Remove all pages of one namespace; return how many those were."""
        with self._lock:
            names = [name for name in self._pages if name[0] == namespace_digest]
            for name in names:
                self._num_bytes -= len(self._pages.pop(name).payload)
            return len(names)


class MemoryStorage(PagewiseStorage):
    """Keeps pages in a `MemoryPages`: for tests, demonstrations and one-process use.

    Bytes are copied in and out while holding the interpreter lock. Options in `extra_config`:

    - `max_bytes` (int): bound for the payload of all pages in the store; a page beyond it is
      `NO_SPACE`. No page is ever evicted. Without it there is no bound.
    """

    def __init__(self, config: HiCacheStorageConfig, *, store: MemoryPages | None = None) -> None:
        """Build on `store`, or on a new one.

        Raises:
            ConfigError: an option is unknown or cannot work.
        """
        super().__init__(config)
        options = config.checked_extra_config("memory", {"max_bytes": int})
        self._max_bytes: int | None = options.get("max_bytes")
        if self._max_bytes is not None and self._max_bytes < config.page_bytes:
            raise ConfigError(
                f"max_bytes={self._max_bytes} does not hold a single page of "
                f"{config.page_bytes} bytes; give more, or leave it out for no bound"
            )
        self._namespace_digest = config.namespace.digest
        self._store = MemoryPages() if store is None else store

    @property
    def capabilities(self) -> StorageCapabilities:
        """See `HiCacheStorage.capabilities`."""
        return StorageCapabilities(durable=False, shared_between_processes=False)

    def _has_page(self, key: PageHash) -> bool:
        stored = self._store.find(self._namespace_digest, key)
        return stored is not None and len(stored.payload) == self._page_bytes

    def _read_page(self, key: PageHash, page: Page) -> PageOutcome:
        stored = self._store.find(self._namespace_digest, key)
        if stored is None:
            return PageOutcome.MISS
        if len(stored.payload) != self._page_bytes:
            outcome = PageOutcome.TRUNCATED
        elif page_checksum([stored.payload]) != stored.checksum:
            outcome = PageOutcome.CORRUPT
        else:
            _scatter(stored.payload, page)
            return PageOutcome.OK
        self._store.remove(self._namespace_digest, key, stored)
        return outcome

    def _write_page(self, key: PageHash, parent_key: bytes, page: Page) -> PageOutcome:
        if self._has_page(key):
            return PageOutcome.PRESENT
        payload = b"".join(page_views(page))
        stored = StoredPage(payload, page_checksum([payload]))
        if self._store.put(self._namespace_digest, key, stored, max_bytes=self._max_bytes):
            return PageOutcome.OK
        return PageOutcome.NO_SPACE

    def _clear_pages(self) -> int:
        return self._store.clear(self._namespace_digest)


def _scatter(payload: bytes, page: Page) -> None:
    source = memoryview(payload)
    start = 0
    for view in page_views(page):
        view[:] = source[start : start + len(view)]
        start += len(view)
