"""Attach and detach at start and later; a failure leaves everything as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from builders import GEOMETRY, PAGE, Rig, config_for, hicache_threads, tokens, until
from scripted_parts import injected, memory_storage

from hicache.config import StorageConfig
from hicache.device import create_device
from hicache.errors import ConfigError, HiCacheError, StorageError
from hicache.hiradix_cache import create_hiradix_cache
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hicache.config import HiCacheConfig
    from hicache.hiradix_cache import HiRadixCache
    from hicache.storage import HiCacheStorageConfig

KEY = RadixKey(tokens(1, 2, 3, 4))
LONG = RadixKey(tokens(1, 2, 3, 4, 5, 6))
COPY_THREADS = ["hicache-load", "hicache-write"]


def file_storage(path: Path, **options: object) -> StorageConfig:
    extra_config = {"path": str(path), **options}
    return StorageConfig(
        backend="file", extra_config=extra_config, model_name="model", weights_revision="1"
    )


def not_a_directory(path: Path) -> StorageConfig:
    (path.parent / f"{path.name}-file").touch()
    return file_storage(path.parent / f"{path.name}-file" / "below")


BAD: dict[str, Callable[[Path], StorageConfig]] = {
    "unknown backend": lambda path: StorageConfig(
        backend="nowhere", model_name="model", weights_revision="1"
    ),
    "unknown option": lambda path: file_storage(path, speed=3),
    "no directory": not_a_directory,
}
bad_storage = pytest.mark.parametrize("bad", BAD.values(), ids=BAD)


class UnregisteringStorage(MemoryStorage):
    """Cannot use the memory it is told of."""

    def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        raise StorageError(f"cannot pin {len(regions)} region(s)")


def build(config: HiCacheConfig) -> tuple[HiRadixCache, DeviceKVPool, PageAllocator]:
    """Put a cache together as an engine does."""
    pool = DeviceKVPool(GEOMETRY, num_pages=8, torch_device=torch.device("cpu"))
    allocator = PageAllocator(8)
    cache, _ = create_hiradix_cache(
        config, device=create_device("cpu"), device_pool=pool, device_allocator=allocator
    )
    return cache, pool, allocator


def test_a_store_named_at_construction_is_attached(tmp_path: Path) -> None:
    cache, _, _ = build(config_for(storage=file_storage(tmp_path)))
    assert cache.controller.storage == file_storage(tmp_path)
    assert cache.close()
    until(lambda: not hicache_threads())


@bad_storage
def test_a_store_that_cannot_be_had_stops_the_construction_and_nothing_is_left(
    tmp_path: Path, bad: Callable[[Path], StorageConfig]
) -> None:
    """C102."""
    with pytest.raises(ConfigError):
        build(config_for(storage=bad(tmp_path)))
    until(lambda: not hicache_threads())


def test_a_device_pool_of_another_page_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"page_size is 8 .* and {PAGE} in the device pool"):
        build(config_for(page_size=8))
    assert not hicache_threads()


@bad_storage
def test_an_attach_that_fails_changes_nothing_and_a_later_one_works(
    tmp_path: Path, bad: Callable[[Path], StorageConfig]
) -> None:
    with Rig() as rig:
        rig.insert(KEY)
        rig.settle()
        with pytest.raises(ConfigError):
            rig.cache.attach_storage_backend(bad(tmp_path))
        assert rig.cache.controller.storage is None
        assert not rig.begin_prefetch(LONG)
        assert sorted(hicache_threads()) == COPY_THREADS
        assert rig.hit(KEY) == (4, 0)
        rig.cache.attach_storage_backend(file_storage(tmp_path))
        rig.insert(KEY)
        rig.settle()
        rig.drop_memory()
        assert rig.prefetch(KEY) == len(KEY)


def test_a_backend_that_refuses_the_memory_is_closed_again() -> None:
    opened: list[MemoryStorage] = []

    def create(config: HiCacheStorageConfig) -> MemoryStorage:
        opened.append((UnregisteringStorage if not opened else MemoryStorage)(config))
        return opened[-1]

    with Rig(create_storage=create) as rig:
        with pytest.raises(StorageError, match="cannot pin"):
            rig.cache.attach_storage_backend(injected())
        with pytest.raises(HiCacheError, match="closed"):
            opened[0].batch_exists([])
        rig.cache.attach_storage_backend(injected())
        assert opened[1].batch_exists([]) == 0


def test_another_store_is_refused_until_a_detach(tmp_path: Path) -> None:
    with Rig(config_for(storage=injected())) as rig:
        with pytest.raises(HiCacheError, match="'injected' is attached; detach it first"):
            rig.cache.attach_storage_backend(file_storage(tmp_path))
        with pytest.raises(HiCacheError, match="is attached with other options; detach it"):
            rig.cache.attach_storage_backend(injected(num_workers=3))
        assert rig.cache.storage_status.config == injected()
        rig.cache.detach_storage_backend()
        rig.cache.detach_storage_backend()
        assert rig.cache.controller.storage is None
        until(lambda: sorted(hicache_threads()) == COPY_THREADS)
        rig.cache.attach_storage_backend(injected())


def test_attach_detach_and_clear_wait_for_no_operation_but_refuse() -> None:
    with Rig(config_for(storage=injected())) as rig:
        gate = rig.engine.write_gates[0] = rig.gate()
        rig.insert(KEY)
        for call in (rig.cache.detach_storage_backend, rig.cache.clear_storage_backend):
            with pytest.raises(HiCacheError, match=r"1 operation\(s\) are in flight"):
                call()
        gate.open()
        rig.settle()
        rig.cache.detach_storage_backend()
        rig.insert(RadixKey(tokens(9)))
        with pytest.raises(HiCacheError, match="cannot attach"):
            rig.cache.attach_storage_backend(injected())
        with pytest.raises(HiCacheError, match="no storage backend is attached"):
            rig.cache.clear_storage_backend()


def test_nodes_from_before_the_attach_are_persisted_under_the_keys_of_their_whole_prefix() -> None:
    """C072."""
    late, early = MemoryPages(), MemoryPages()
    for store, storage in ((late, None), (early, injected())):
        with Rig(config_for(storage=storage), create_storage=memory_storage(store)) as rig:
            rig.insert(LONG.prefix(2 * PAGE))
            rig.insert(LONG.prefix(4 * PAGE))
            rig.settle()
            if storage is None:
                rig.cache.attach_storage_backend(injected())
            rig.insert(LONG)
            rig.settle()
    assert set(late._pages) == set(early._pages)
    assert len(late._pages) == 6
    with Rig(config_for(storage=injected()), create_storage=memory_storage(late)) as rig:
        assert rig.prefetch(RadixKey(tokens(5, 6))) == 0
        assert rig.prefetch(LONG) == len(LONG)
        assert rig.hit(LONG) == (0, 6)


def test_a_store_attached_after_another_is_filled_anew() -> None:
    stores = [MemoryPages(), MemoryPages()]
    left = list(stores)
    with Rig(create_storage=lambda config: MemoryStorage(config, store=left.pop(0))) as rig:
        for _ in range(2):
            rig.cache.attach_storage_backend(injected())
            rig.insert(KEY)
            rig.settle()
            rig.cache.detach_storage_backend()
    assert [len(store._pages) for store in stores] == [4, 4]


def test_clear_says_how_many_pages_it_removed_and_they_are_persisted_again() -> None:
    """C077, C079."""
    with Rig(config_for(storage=injected())) as rig:
        rig.insert(LONG)
        rig.settle()
        assert rig.cache.clear_storage_backend() == 6
        assert rig.cache.clear_storage_backend() == 0
        rig.insert(LONG)
        rig.settle()
        assert rig.cache.clear_storage_backend() == 6
        rig.drop_memory()
        assert rig.prefetch(LONG) == 0


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_without_a_store_two_tiers_work_alone(policy: WritePolicy) -> None:
    with Rig(config_for(write_policy=policy)) as rig:
        rig.insert(KEY)
        rig.settle()
        rig.evict_device()
        rig.load(KEY)
        assert rig.hit(KEY) == (4, 0)
        assert sorted(hicache_threads()) == COPY_THREADS
