"""The four movements in a row, for each layout and store: the bytes come back as they went."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from builders import GEOMETRY, PAGE, Rig, config_for, tokens
from scripted_parts import injected, memory_storage

from hicache.config import HostPoolConfig, StorageConfig
from hicache.hiradix_cache import LoadStatus
from hicache.layout import HostLayout
from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages

if TYPE_CHECKING:
    from pathlib import Path

KEY = RadixKey(tokens(1, 2, 3, 4, 5))


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("backend", ["memory", "file"])
def test_what_was_inserted_comes_back_from_storage_byte_for_byte(
    tmp_path: Path, layout: HostLayout, policy: str, backend: str
) -> None:
    """C086, C112: inserted in chunks, found by an instance that knows nothing."""
    store = MemoryPages()
    storage = injected()
    if backend == "file":
        storage = StorageConfig(
            backend="file",
            extra_config={"path": str(tmp_path)},
            model_name="model",
            weights_revision="1",
        )
    config = config_for(
        write_policy=policy,
        prefetch_policy="wait_complete",
        host=HostPoolConfig(layout=layout, size_bytes=16 * GEOMETRY.page_bytes, huge_pages=False),
        storage=storage,
    )
    with Rig(config, create_storage=memory_storage(store)) as rig:
        for num_pages in (2, 3, 5):
            rig.insert(KEY.prefix(num_pages * PAGE), chunked=num_pages < 5)
        rig.settle()
        assert rig.hit(KEY) == (5, 0)
        rig.evict_device()
        assert rig.hit(KEY) == (0, 5)
        rig.drop_memory()
        assert rig.hit(KEY) == (0, 0)
        assert rig.prefetch(KEY) == len(KEY)
        assert rig.load(KEY).status is LoadStatus.QUEUED
        assert rig.hit(KEY) == (5, 0)
    with Rig(config, create_storage=memory_storage(store)) as rig:
        assert rig.prefetch(KEY) == len(KEY)
        assert rig.load(KEY).status is LoadStatus.QUEUED
        assert rig.hit(KEY) == (5, 0)
