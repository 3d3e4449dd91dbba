"""While little or nothing was used again, a page store keeps what is newest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from page_store_tools import LATER, OK, chain, num_stored, open_store, verify_index

from hicache.testing.page_buffer import PageBuffer

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.storage.page_store import PageStore
    from hicache.types import PageHash, PageOutcome

PAGE_BYTES = 4096
PAGE = PageBuffer.holding(bytes(PAGE_BYTES))
"""Source of every page, and target of every read."""


def write_chain(storage: PageStore, keys: list[PageHash], batch: int) -> None:
    """Store pages of one prefix, so many in a call."""
    parents = [b"", *keys[:-1]]
    for first in range(0, len(keys), batch):
        part = keys[first : first + batch]
        pages = [PAGE.page] * len(part)
        storage.batch_set(part, parents[first : first + batch], pages, deadline=LATER)


def read_chain(storage: PageStore, keys: list[PageHash]) -> list[PageOutcome]:
    pages = [PAGE.page] * len(keys)
    return storage.batch_get(keys, [b"", *keys[:-1]], pages, deadline=LATER)


@pytest.mark.parametrize(("length", "batch"), [(1, 1), (10, 10), (40, 8), (40, 40), (200, 64)])
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_without_any_reuse_the_newest_pages_stay(
    fast_path: Path, policy: str, length: int, batch: int
) -> None:
    """Of twice as many as there is room for, across reopenings; then reads alone find them."""
    options: dict[str, Any] = {"page_bytes": PAGE_BYTES, "max_bytes": 3_000_000}
    prompts = [chain(name, length) for name in range(1500 // length)]
    storage = open_store(fast_path, eviction_policy=policy, **options)
    for number, keys in enumerate(prompts):
        if number % (len(prompts) // 3) == 0:
            storage.close()
            storage = open_store(fast_path, eviction_policy=policy, **options)
        write_chain(storage, keys, batch)
    storage.close()
    storage = open_store(fast_path, eviction_policy=policy, **options)
    num_newest = max(len(prompts) // 10, 1)
    assert not num_stored(storage, prompts[0])
    for keys in [*prompts[-num_newest:], *prompts[:num_newest]] * 3:
        storage.batch_exists(keys)
    for keys in prompts[-num_newest:]:
        assert read_chain(storage, keys) == [OK] * length
    storage.close()
    verify_index(fast_path)


@pytest.mark.parametrize("every", [500, 100])
def test_a_few_uses_do_not_turn_the_order_round(fast_path: Path, every: int) -> None:
    """What little they show is of the age at which they came, not of all that is older."""
    storage = open_store(fast_path, page_bytes=PAGE_BYTES, max_bytes=1_500_000)
    for name in range(1500):
        write_chain(storage, chain(name, 1), 1)
        if name % every == every - 1:
            assert read_chain(storage, chain(name - 3, 1)) == [OK]
    newest = [key for name in range(1480, 1500) for key in chain(name, 1)]
    assert num_stored(storage, newest) == len(newest)
    storage.close()
