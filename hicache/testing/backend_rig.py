"""What the contract suites share: a backend under test, and pages that know their bytes."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final

import pytest

from hicache.clock import ManualClock
from hicache.hashing import TOKEN_BYTES, StorageNamespace, hash_pages
from hicache.storage.base import HiCacheStorage, HiCacheStorageConfig
from hicache.testing.page_buffer import PageBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache.types import PageHash, PageOutcome

__all__ = ["LATER", "NAMESPACE", "BackendRig", "prompt_keys"]

LATER: Final = 1e9
"""A deadline that is never reached."""

NAMESPACE: Final = StorageNamespace(
    model="organisation/model",
    weights_revision="1",
    dtype="float16",
    layout="page_first",
    page_size=16,
    kv_shape="mha:layers=2,heads=2,head_dim=8",
)


class BackendRig(ABC):
    """The base of a suite of tests over one backend."""

    page_bytes: ClassVar[int] = 4999
    """Length of the pages; odd, unless a backend needs something else."""

    @abstractmethod
    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        """Return a new backend; all that are made in one test have the same store below them."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """The clock of the backend under test."""
        return ManualClock()

    @pytest.fixture
    def config(self, clock: ManualClock) -> HiCacheStorageConfig:
        """What the backend under test is made from."""
        return HiCacheStorageConfig(namespace=NAMESPACE, page_bytes=self.page_bytes, clock=clock)

    @pytest.fixture
    def backend(self, config: HiCacheStorageConfig) -> Iterator[HiCacheStorage]:
        """The backend under test."""
        backend = self.make_backend(config)
        yield backend
        backend.close()

    def _payload(self, key: PageHash) -> bytes:
        return random.Random(key).randbytes(self.page_bytes)

    def _set(
        self,
        backend: HiCacheStorage,
        keys: Sequence[PageHash],
        *,
        parent_keys: Sequence[bytes] | None = None,
        deadline: float = LATER,
    ) -> list[PageOutcome]:
        """Store pages, each holding its `_payload`."""
        sources = [PageBuffer.holding(self._payload(key)) for key in keys]
        parents = _chain(keys) if parent_keys is None else parent_keys
        pages = [source.page for source in sources]
        return backend.batch_set(keys, parents, pages, deadline=deadline)

    def _get(
        self,
        backend: HiCacheStorage,
        keys: Sequence[PageHash],
        *,
        parent_keys: Sequence[bytes] | None = None,
        deadline: float = LATER,
    ) -> tuple[list[PageOutcome], list[bytes]]:
        """Return the outcomes and what the memory of each page holds afterwards."""
        targets = [PageBuffer(self.page_bytes) for _ in keys]
        parents = _chain(keys) if parent_keys is None else parent_keys
        pages = [target.page for target in targets]
        outcomes = backend.batch_get(keys, parents, pages, deadline=deadline)
        return outcomes, [target.read() for target in targets]


def prompt_keys(num_pages: int, *, first_token: int = 0) -> list[PageHash]:
    """Return the keys of a prompt's pages; one with another first token shares none of them."""
    tokens = range(first_token, first_token + num_pages)
    data = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in tokens)
    return hash_pages(data, page_size=1)


def _chain(keys: Sequence[PageHash]) -> list[bytes]:
    return [b"", *keys][: len(keys)]
