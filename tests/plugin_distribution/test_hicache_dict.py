import pytest
from hicache_dict import SERVER, DictStorage

from hicache.storage import HiCacheStorageConfig
from hicache.testing.storage_contract import StorageContract


class TestDictStorage(StorageContract):
    @pytest.fixture(autouse=True)
    def start_empty(self) -> None:
        SERVER.clear()

    def make_backend(self, config: HiCacheStorageConfig) -> DictStorage:
        return DictStorage(config)
