"""What a user chose as `eviction_policy` holds for the store as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hicache.config import HiCacheConfig, StorageConfig
from hicache.device import create_device
from hicache.hiradix_cache import create_hiradix_cache
from hicache.layout import KVGeometry
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.storage import StorageBackendFactory
from hicache.storage.memory import MemoryStorage

if TYPE_CHECKING:
    from hicache.storage import HiCacheStorageConfig


class PolicyRecorder(MemoryStorage):
    """Keeps what it was built with."""

    policies: ClassVar[list[str | None]] = []

    def __init__(self, config: HiCacheStorageConfig) -> None:
        super().__init__(config)
        self.policies.append(config.eviction_policy)


def test_a_store_is_told_by_which_policy_the_cache_evicts() -> None:
    device = create_device("cpu")
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
    factory = StorageBackendFactory()
    factory.register_backend("recorder", __name__, "PolicyRecorder")
    storage = StorageConfig(backend="recorder", model_name="model", weights_revision="1")
    cache, _ = create_hiradix_cache(
        HiCacheConfig(page_size=4, eviction_policy="slru", storage=storage),
        device=device,
        device_pool=DeviceKVPool(geometry, num_pages=8, torch_device=device.torch_device),
        device_allocator=PageAllocator(8),
        factory=factory,
    )
    cache.close()
    assert PolicyRecorder.policies == ["slru"]
