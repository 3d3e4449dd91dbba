"""A storage backend that keeps pages in a dictionary, which stands for a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.storage import StorageCapabilities
from hicache.storage.page_memory import page_checksum, page_views
from hicache.storage.pagewise import PagewiseStorage
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from hicache.storage import HiCacheStorageConfig, Page
    from hicache.types import PageHash

SERVER: dict[bytes, dict[PageHash, tuple[bytes, bytes]]] = {}


class DictStorage(PagewiseStorage):
    def __init__(self, config: HiCacheStorageConfig) -> None:
        super().__init__(config)
        self._pages = SERVER.setdefault(config.namespace.digest, {})

    @property
    def capabilities(self) -> StorageCapabilities:
        return StorageCapabilities(durable=False, shared_between_processes=False)

    def _has_page(self, key: PageHash) -> bool:
        return key in self._pages

    def _read_page(self, key: PageHash, page: Page) -> PageOutcome:
        checksum, payload = self._pages.get(key, (b"", b""))
        if page_checksum([payload]) != checksum:
            return PageOutcome.CORRUPT if self._pages.pop(key, None) else PageOutcome.MISS
        for view in page_views(page):
            view[:], payload = payload[: len(view)], payload[len(view) :]
        return PageOutcome.OK

    def _write_page(self, key: PageHash, parent_key: bytes, page: Page) -> PageOutcome:
        payload = b"".join(page_views(page))
        stored = (page_checksum([payload]), payload)
        is_new = self._pages.setdefault(key, stored) is stored
        return PageOutcome.OK if is_new else PageOutcome.PRESENT

    def _clear_pages(self) -> int:
        return sum(self._pages.pop(key, None) is not None for key in list(self._pages))
