"""Page stores for tests: pages that know their bytes, and looks at the disk."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

from hicache.clock import ManualClock
from hicache.hashing import TOKEN_BYTES, StorageNamespace, hash_pages
from hicache.storage.base import HiCacheStorageConfig
from hicache.storage.page_store import PageStore, check_store
from hicache.testing.page_buffer import PageBuffer
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache.storage.base import HiCacheStorage
    from hicache.storage.page_store import StoredPage

PAGE_BYTES = 5000
LATER = 1e18
SEGMENT_BYTES = 16 << 30
BLOCK_BYTES = 4096

OK, PRESENT, MISS = PageOutcome.OK, PageOutcome.PRESENT, PageOutcome.MISS
CORRUPT, TRUNCATED = PageOutcome.CORRUPT, PageOutcome.TRUNCATED
FAILED, NO_SPACE, SKIPPED = PageOutcome.FAILED, PageOutcome.NO_SPACE, PageOutcome.SKIPPED


def namespace(model: str = "model") -> StorageNamespace:
    return StorageNamespace(
        model=model,
        weights_revision="1",
        dtype="float16",
        layout="page_first",
        page_size=1,
        kv_shape="mha:layers=2,heads=2,head_dim=8",
    )


def open_store(
    path: Path | str,
    *,
    page_bytes: int = PAGE_BYTES,
    model: str = "model",
    segment_bytes: int = SEGMENT_BYTES,
    **options: object,
) -> PageStore:
    """Open a store with no floor for free space, unless one is given."""
    config = HiCacheStorageConfig(
        namespace=namespace(model),
        page_bytes=page_bytes,
        extra_config={"path": str(path), "min_free_bytes": 0, **options},
        clock=ManualClock(),
    )
    return PageStore(config, segment_bytes=segment_bytes)


def chain(name: int, num_pages: int, prior: bytes = b"") -> list[PageHash]:
    """Return keys chained from each other, the first from `prior`; another name, other keys."""
    tokens = name.to_bytes(TOKEN_BYTES, "little") * num_pages
    return hash_pages(tokens, page_size=1, prior=prior)


def payload_of(key: bytes, page_bytes: int = PAGE_BYTES) -> bytes:
    return random.Random(key).randbytes(page_bytes)


def write(
    storage: PageStore,
    keys: Sequence[PageHash],
    *,
    parent: bytes = b"",
    page_bytes: int = PAGE_BYTES,
) -> list[PageOutcome]:
    """Store pages of one prefix, each with its `payload_of`."""
    sources = [PageBuffer.holding(payload_of(key, page_bytes)) for key in keys]
    return storage.batch_set(
        keys, [parent, *keys[:-1]], [source.page for source in sources], deadline=LATER
    )


def read(
    storage: HiCacheStorage,
    keys: Sequence[PageHash],
    *,
    parent: bytes = b"",
    page_bytes: int = PAGE_BYTES,
) -> list[PageOutcome]:
    """Read pages of one prefix, and check the bytes of those that are `OK`."""
    targets = [PageBuffer(page_bytes) for _ in keys]
    pages = [target.page for target in targets]
    outcomes = storage.batch_get(keys, [parent, *keys][: len(keys)], pages, deadline=LATER)
    for key, target, outcome in zip(keys, targets, outcomes, strict=True):
        content = target.read()
        assert outcome is not OK or content == payload_of(key, page_bytes), key.hex()
    return outcomes


def num_stored(storage: PageStore, keys: Sequence[PageHash]) -> int:
    """Return how many of the keys are stored, wherever there are holes."""
    return sum(storage.batch_exists([key]) for key in keys)


def disk_bytes(path: Path | str) -> int:
    """Return what everything below `path` takes on the disk."""
    total = 0
    for folder, _, names in os.walk(path):
        total += sum(os.stat(f"{folder}/{name}").st_blocks * 512 for name in names)
    return total


def verify_index(path: Path | str) -> None:
    violations = check_store(str(path))
    assert not violations, "\n".join(violations)


def flip(page: StoredPage, position: int = 0, *, mask: int = 1) -> None:
    """Change a byte of a page that lies in one piece."""
    patch_file(page.file, page.offset + position, mask=mask)


def patch_file(path: Path | str, offset: int, *, mask: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
