"""Page stores for tests: pages that know their bytes, and looks at the disk."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from typing import TYPE_CHECKING, Any, Literal

from hicache.clock import ManualClock
from hicache.hashing import TOKEN_BYTES, StorageNamespace, hash_pages
from hicache.storage import native_io
from hicache.storage.base import HiCacheStorageConfig
from hicache.storage.page_store import PageStore, check_store
from hicache.testing.page_buffer import PageBuffer
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import pytest

    from hicache.storage.base import HiCacheStorage
    from hicache.storage.page_store import StoredPage

PAGE_BYTES = 5000
LATER = 1e18
SEGMENT_BYTES = 16 << 30
BLOCK_BYTES = 4096

OK, PRESENT, MISS = PageOutcome.OK, PageOutcome.PRESENT, PageOutcome.MISS
CORRUPT, TRUNCATED = PageOutcome.CORRUPT, PageOutcome.TRUNCATED
FAILED, NO_SPACE, SKIPPED = PageOutcome.FAILED, PageOutcome.NO_SPACE, PageOutcome.SKIPPED


def namespace(model: str = "model", dtype: str = "float16") -> StorageNamespace:
    return StorageNamespace(
        model=model,
        weights_revision="1",
        dtype=dtype,
        layout="page_first",
        page_size=1,
        kv_shape="mha:layers=2,heads=2,head_dim=8",
    )


def open_store(
    path: Path | str,
    *,
    page_bytes: int = PAGE_BYTES,
    model: str = "model",
    dtype: str = "float16",
    segment_bytes: int = SEGMENT_BYTES,
    **options: object,
) -> PageStore:
    """Open a store with no floor for free space, unless one is given."""
    config = HiCacheStorageConfig(
        namespace=namespace(model, dtype),
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


@contextlib.contextmanager
def watched(path: Path, max_bytes: int) -> Iterator[None]:
    """Look at the disk all the time from another thread; the largest sight must be in bounds."""
    largest = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal largest
        while not ended.is_set():
            # A lock file can go between the listing and the look.
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, disk_bytes(path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    assert 0 < largest <= max_bytes


def verify_index(path: Path | str) -> None:
    violations = check_store(str(path))
    assert not violations, "\n".join(violations)


def break_moves(
    patch: pytest.MonkeyPatch,
    verb: Literal["read", "write"],
    error: int,
    *,
    first: int = 0,
    last: int = 1 << 30,
) -> None:
    """Let the calls that move bytes fail from the `first` to the `last`; the very first is 0.

    Those of the native module and those of Python are counted together: what fails in one is tried
    again by the other, which is a call more.
    """
    num_calls = 0

    def breaking(move: Callable[..., Any]) -> Callable[..., Any]:
        def moves(*arguments: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if first < num_calls <= last + 1:
                raise OSError(error, os.strerror(error))
            return move(*arguments)

        return moves

    places: list[tuple[Any, str]] = [(os, "preadv" if verb == "read" else "pwritev")]
    if native_io.HAS_NATIVE_IO:
        places.append((native_io.page_io, f"{verb}_pages"))
    for owner, name in places:
        patch.setattr(owner, name, breaking(getattr(owner, name)))


def flip(page: StoredPage, position: int = 0, *, mask: int = 1) -> None:
    """Change a byte of a page that lies in one piece."""
    patch_file(page.file, page.offset + position, mask=mask)


def patch_file(path: Path | str, offset: int, *, mask: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
