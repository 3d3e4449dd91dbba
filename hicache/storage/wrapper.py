"""The base of backends that stand around another one."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from hicache.storage.answers import error_text
from hicache.storage.base import HiCacheStorage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache.storage.base import Page, StorageCapabilities, StorageFigures, StorageStats
    from hicache.types import PageHash, PageOutcome

__all__ = ["StorageVerb", "StorageWrapper", "storage_layers"]


class StorageVerb(str, Enum):
    """A call that reaches for pages."""

    EXISTS = "batch_exists"
    GET = "batch_get"
    SET = "batch_set"
    CLEAR = "clear"


class StorageWrapper(HiCacheStorage):
    """Passes every call on; a subclass overrides those that it does something about.

    What it wraps may be a plugin that breaks the contract. An answer that is none is passed on as
    it came, and so is an exception: whoever called at last reports it.
    """

    def __init__(self, inner: HiCacheStorage) -> None:
        """Stand around `inner`, and close it when closed."""
        self._inner = inner

    @property
    def inner(self) -> HiCacheStorage:
        """The wrapped backend."""
        return self._inner

    @property
    def capabilities(self) -> StorageCapabilities:
        """Those of the wrapped backend."""
        return self._inner.capabilities

    def batch_exists(self, keys: Sequence[PageHash]) -> int:
        """See `HiCacheStorage.batch_exists`."""
        return self._inner.batch_exists(keys)

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        """See `HiCacheStorage.batch_get`."""
        return self._inner.batch_get(keys, parent_keys, pages, deadline=deadline)

    def batch_set(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        """See `HiCacheStorage.batch_set`."""
        return self._inner.batch_set(keys, parent_keys, pages, deadline=deadline)

    def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """See `HiCacheStorage.register_memory`."""
        self._inner.register_memory(regions)

    def clear(self) -> int:
        """See `HiCacheStorage.clear`."""
        return self._inner.clear()

    def stats(self) -> StorageStats:
        """Return those of the wrapped backend: what has reached it, every attempt for itself."""
        return self._inner.stats()

    def figures(self) -> StorageFigures:
        """See `HiCacheStorage.figures`."""
        return self._inner.figures()

    def close(self) -> None:
        """See `HiCacheStorage.close`."""
        self._inner.close()

    def _newest_error(self) -> str | None:
        """Return what the wrapped backend knows of its newest error; if it cannot tell, why."""
        try:
            return self._inner.stats().last_error
        except Exception as error:  # noqa: BLE001  # told; no call has failed by it
            return f"stats: {error_text(error)}"


def storage_layers(storage: HiCacheStorage) -> Iterator[HiCacheStorage]:
    """Yield `storage` and what it stands around, from the outside in."""
    yield storage
    while isinstance(storage, StorageWrapper):
        storage = storage.inner
        yield storage
