"""A page is read with the parent that it was stored with, so copies elsewhere are chained alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from builders import PAGE, Rig, config_for, tokens
from scripted_parts import injected

from hicache.hashing import hash_pages
from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages, MemoryStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.storage import HiCacheStorageConfig, Page
    from hicache.types import PageHash, PageOutcome

STORE_BATCH_PAGES = 2


class ChainStorage(MemoryStorage):
    """Notes what each page that is stored or read is chained from."""

    def __init__(self, config: HiCacheStorageConfig) -> None:
        super().__init__(config, store=MemoryPages())
        self.stored: dict[PageHash, bytes] = {}
        self.read: dict[PageHash, bytes] = {}

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        self.read.update(zip(keys, parent_keys, strict=True))
        return super().batch_get(keys, parent_keys, pages, deadline=deadline)

    def batch_set(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        self.stored.update(zip(keys, parent_keys, strict=True))
        return super().batch_set(keys, parent_keys, pages, deadline=deadline)


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_a_page_is_read_with_the_parent_that_it_was_stored_with(salt: str | None) -> None:
    """In batches, and below what is in memory already."""
    key = RadixKey(tokens(*range(1, 9)), cache_salt=salt)
    backends: list[ChainStorage] = []

    def create(config: HiCacheStorageConfig) -> ChainStorage:
        backends.append(ChainStorage(config))
        return backends[-1]

    config = config_for(storage=injected(batch_pages=STORE_BATCH_PAGES))
    with Rig(config, create_storage=create) as rig:
        rig.insert(key)
        rig.drop_memory()
        brought = [rig.prefetch(key.prefix(num_pages * PAGE)) for num_pages in (3, 8)]
        assert brought == [3 * PAGE, 5 * PAGE]
    (backend,) = backends
    keys = hash_pages(key.data, PAGE, key.namespace)
    chain = dict(zip(keys, [key.namespace, *keys], strict=False))
    assert backend.stored == backend.read == chain
