"""One prompt's KV through all three tiers and back, without a model: run it and read along."""

import tempfile

import torch

from hicache.config import HiCacheConfig, HostPoolConfig, PrefetchConfig, StorageConfig
from hicache.device import create_device
from hicache.hiradix_cache import HiRadixCache, create_hiradix_cache
from hicache.layout import KVGeometry
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.radix import RadixKey


def settle(cache: HiRadixCache) -> None:
    """Do what a scheduler does every step, until nothing is in flight."""
    while cache.num_in_flight:
        cache.check_hicache_events()


def main() -> None:
    """Show it; raises when a byte is not as it was."""
    # The engine's part: KV tensors, and the free list of their pages.
    device = create_device("cpu")
    geometry = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
    pool = DeviceKVPool(geometry, num_pages=8, torch_device=device.torch_device)
    allocator = PageAllocator(8)

    with tempfile.TemporaryDirectory() as directory:
        config = HiCacheConfig(
            page_size=4,
            host=HostPoolConfig(ratio=2.0),
            storage=StorageConfig(
                backend="file",
                extra_config={"path": directory},
                model_name="example",
                weights_revision="1",
            ),
            prefetch=PrefetchConfig(threshold_tokens=4),
        )
        cache, counter = create_hiradix_cache(
            config, device=device, device_pool=pool, device_allocator=allocator
        )

        # A request of 16 tokens has been computed: its KV lies in four pages of its own.
        key = RadixKey(range(16))
        pages = allocator.alloc(4)
        assert pages is not None
        pool.key_pages(1)[pages] = 1.5
        cache.insert(key, pages, request_id="a", chunked=False)  # L1, and on its way to L2 and L3
        settle(cache)

        cache.evict(4)  # L1 forgets it
        found = cache.match_prefix(key)
        print(
            f"after eviction: {found.device_hit_tokens} tokens in L1, {found.host_hit_tokens} in L2"
        )

        cache.reset()  # L1 and L2 forget everything; L3 keeps it
        cache.prefetch_from_storage("b", key)
        settle(cache)
        found = cache.match_prefix(key)
        print(f"after prefetch: {found.host_hit_tokens} tokens in L2 came from L3")

        load = cache.init_load_back(found)  # L2 -> L1, layer by layer
        counter.set_consumer(cache.ready_to_load_host_cache())
        slots = pool.get_key_buffer(1).view(8, 4, 2, 8)  # waits for layer 1 and no other
        assert torch.all(slots[load.device_pages] == 1.5)
        print(f"loaded {len(load.device_pages)} pages back to L1, every byte as it was")
        settle(cache)
        cache.close()


if __name__ == "__main__":
    main()
