"""Pages, and a backend in memory whose pages and calls fail as a test says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.clock import Clock, ManualClock
from hicache.hashing import TOKEN_BYTES, StorageNamespace, hash_pages
from hicache.storage.base import HiCacheStorageConfig
from hicache.storage.memory import MemoryStorage
from hicache.testing.page_buffer import PageBuffer
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.storage.base import Page

LATER = 1e9
PAGE_BYTES = 100
NUM_PAGES = 8
KEYS = hash_pages(bytes(NUM_PAGES * TOKEN_BYTES), page_size=1)
CHAIN = [b"", *KEYS[:-1]]

OK, PRESENT, MISS = PageOutcome.OK, PageOutcome.PRESENT, PageOutcome.MISS
FAILED, SKIPPED, TIMEOUT = PageOutcome.FAILED, PageOutcome.SKIPPED, PageOutcome.TIMEOUT
NO_SPACE, CORRUPT = PageOutcome.NO_SPACE, PageOutcome.CORRUPT


def make_config(clock: Clock | None = None, /, **extra_config: object) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        namespace=StorageNamespace(
            model="model",
            weights_revision="1",
            dtype="float16",
            layout="page_first",
            page_size=16,
            kv_shape="mha:layers=2,heads=2,head_dim=8",
        ),
        page_bytes=PAGE_BYTES,
        extra_config=extra_config,
        clock=clock or ManualClock(),
    )


def payload(key: PageHash) -> bytes:
    return (key * PAGE_BYTES)[:PAGE_BYTES]


def sources(keys: Sequence[PageHash]) -> list[PageBuffer]:
    """Memory that holds the pages; valid while the buffers live."""
    return [PageBuffer.holding(payload(key)) for key in keys]


def pages_in(buffers: Sequence[PageBuffer]) -> list[Page]:
    return [buffer.page for buffer in buffers]


SOURCES = sources(KEYS)
PAGES = pages_in(SOURCES)


class FlakyStorage(MemoryStorage):
    """`MemoryStorage` that fails as it is told.

    Attributes:
        reads, writes: for a page, the outcomes of its next reads or writes, before sound ones.
        error: what every call raises while it is set.
        calls: verb and keys of every call.
        chained: each page that it was asked for or given, and what that was chained from.
    """

    def __init__(self, config: HiCacheStorageConfig | None = None) -> None:
        super().__init__(config or make_config())
        self.reads: dict[PageHash, list[PageOutcome]] = {}
        self.writes: dict[PageHash, list[PageOutcome]] = {}
        self.error: Exception | None = None
        self.calls: list[tuple[str, list[PageHash]]] = []
        self.chained: set[tuple[PageHash, bytes]] = set()

    def hold(self, keys: Sequence[PageHash]) -> None:
        """Store pages, whatever fails."""
        for key in keys:
            buffer = PageBuffer.holding(payload(key))
            assert super()._write_page(key, b"", buffer.page).good

    def damage(self, key: PageHash) -> None:
        """Change a byte of a page that is stored."""
        stored = self._store.find(self._namespace_digest, key)
        assert stored is not None
        changed = stored._replace(payload=bytes([stored.payload[0] ^ 1]) + stored.payload[1:])
        self._store.put(self._namespace_digest, key, changed, max_bytes=None)

    @property
    def held(self) -> set[PageHash]:
        """The pages that are stored."""
        return {key for key in KEYS if self._has_page(key)}

    def batch_exists(self, keys: Sequence[PageHash]) -> int:
        self._enter("exists", keys)
        return super().batch_exists(keys)

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        self._enter("get", keys)
        self.chained.update(zip(keys, parent_keys, strict=True))
        return super().batch_get(keys, parent_keys, pages, deadline=deadline)

    def batch_set(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        self._enter("set", keys)
        self.chained.update(zip(keys, parent_keys, strict=True))
        return super().batch_set(keys, parent_keys, pages, deadline=deadline)

    def clear(self) -> int:
        self._enter("clear", [])
        return super().clear()

    def close(self) -> None:
        self._enter("close", [])
        super().close()

    def _enter(self, verb: str, keys: Sequence[PageHash]) -> None:
        self.calls.append((verb, list(keys)))
        if self.error is not None:
            raise self.error

    def _read_page(self, key: PageHash, page: Page) -> PageOutcome:
        if self.reads.get(key):
            return self.reads[key].pop(0)
        return super()._read_page(key, page)

    def _write_page(self, key: PageHash, parent_key: bytes, page: Page) -> PageOutcome:
        if self.writes.get(key):
            return self.writes[key].pop(0)
        return super()._write_page(key, parent_key, page)
