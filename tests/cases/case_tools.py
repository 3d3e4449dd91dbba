"""What several acceptance cases use beside the rig of `tests/unit/hiradix_cache`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builders import Rig, config_for
from scripted_parts import injected

from hicache.storage.page_store import PageStore
from hicache.testing.faulty_storage import FaultyStorage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from hicache.config import HiCacheConfig
    from hicache.storage import HiCacheStorageConfig
    from hicache.testing.faulty_storage import Fault, Gate, Verb


def file_config(path: Path, *, host_pages: int = 16, **options: object) -> HiCacheConfig:
    """A configuration whose store is made by `FileRig`."""
    storage = injected(extra_config={"path": str(path)})
    return config_for(host_pages, storage=storage, **options)


class FileRig(Rig):
    """A rig over a page store in `path`, whose calls can be held or fail."""

    def __init__(
        self,
        path: Path,
        *,
        host_pages: int = 16,
        faults: Mapping[Verb, Iterable[Fault | None]] | None = None,
        gates: Mapping[Verb, Gate] | None = None,
        **options: object,
    ) -> None:
        def create(config: HiCacheStorageConfig) -> FaultyStorage:
            return FaultyStorage(PageStore(config), faults=faults, gates=gates)

        config = file_config(path, host_pages=host_pages, **options)
        super().__init__(config, create_storage=create)
        self.gates += (gates or {}).values()
