"""`FileStorage` keeps the storage contract."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from hicache.storage.file import FileStorage
from hicache.testing.storage_contract import DamageContract

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.storage.base import HiCacheStorage, HiCacheStorageConfig
    from hicache.types import PageHash


class TestFileStorage(DamageContract):
    """C030 (empty batches), C099."""

    @pytest.fixture(autouse=True)
    def _make_root(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        return FileStorage(dataclasses.replace(config, extra_config={"path": str(self.root)}))

    def corrupt(self, key: PageHash) -> None:
        path = self._page_path(key)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    def truncate(self, key: PageHash) -> None:
        path = self._page_path(key)
        path.write_bytes(path.read_bytes()[:-1])

    def _page_path(self, key: PageHash) -> Path:
        (path,) = self.root.rglob(f"{key.hex()}.kv")
        return path
