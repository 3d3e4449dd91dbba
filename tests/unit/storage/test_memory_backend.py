"""What `MemoryStorage` adds to the contract, and the rules of every page-wise backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicache.clock import ManualClock
from hicache.errors import ConfigError
from hicache.hashing import StorageNamespace
from hicache.storage.base import HiCacheStorageConfig
from hicache.storage.memory import MemoryPages, MemoryStorage, StoredPage
from hicache.testing.page_buffer import PageBuffer
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE_BYTES = 100
LATER = 1e9
OK, PRESENT, MISS = PageOutcome.OK, PageOutcome.PRESENT, PageOutcome.MISS
NO_SPACE, SKIPPED, TIMEOUT = PageOutcome.NO_SPACE, PageOutcome.SKIPPED, PageOutcome.TIMEOUT

KEYS = [PageHash(bytes([index]) * 32) for index in range(6)]
CHAIN = [b"", *KEYS[:-1]]
BUFFERS = [PageBuffer.holding(bytes([index]) * PAGE_BYTES) for index in range(6)]
PAGES = [buffer.page for buffer in BUFFERS]


def make_config(
    extra_config: Mapping[str, object] | None = None, *, model: str = "model"
) -> HiCacheStorageConfig:
    namespace = StorageNamespace(
        model=model,
        weights_revision="1",
        dtype="float16",
        layout="page_first",
        page_size=16,
        kv_shape="mha:layers=2,heads=2,head_dim=8",
    )
    return HiCacheStorageConfig(
        namespace=namespace,
        page_bytes=PAGE_BYTES,
        extra_config=extra_config or {},
        clock=ManualClock(),
    )


def make_storage(**extra_config: object) -> MemoryStorage:
    return MemoryStorage(make_config(extra_config))


def test_a_full_store_takes_no_page_more_and_keeps_what_it_has() -> None:
    storage = make_storage(max_bytes=3 * PAGE_BYTES + 99)
    outcomes = storage.batch_set(KEYS[:5], [b""] * 5, PAGES[:5], deadline=LATER)
    assert outcomes == [OK, OK, OK, NO_SPACE, NO_SPACE]
    assert storage.batch_exists(KEYS) == 3
    assert storage.batch_set(KEYS[:3], [b""] * 3, PAGES[:3], deadline=LATER) == [PRESENT] * 3


def test_clear_makes_room_again() -> None:
    storage = make_storage(max_bytes=PAGE_BYTES)
    for key, page in zip(KEYS, PAGES, strict=True):
        assert storage.batch_set([key], [b""], [page], deadline=LATER) == [OK]
        assert storage.clear() == 1


def test_the_bound_counts_all_namespaces_of_a_store() -> None:
    store = MemoryPages()
    first = MemoryStorage(make_config({"max_bytes": PAGE_BYTES}, model="first"), store=store)
    second = MemoryStorage(make_config({"max_bytes": PAGE_BYTES}, model="second"), store=store)
    assert first.batch_set(KEYS[:1], [b""], PAGES[:1], deadline=LATER) == [OK]
    assert second.batch_set(KEYS[:1], [b""], PAGES[:1], deadline=LATER) == [NO_SPACE]
    first.clear()
    assert second.batch_set(KEYS[:1], [b""], PAGES[:1], deadline=LATER) == [OK]


def test_a_replaced_page_is_counted_once() -> None:
    """Two threads that write one key both get to `put`."""
    store, page = MemoryPages(), StoredPage(bytes(PAGE_BYTES), b"")
    for _ in range(3):
        assert store.put(b"", KEYS[0], page, max_bytes=PAGE_BYTES)


def test_a_store_of_its_own_is_not_shared() -> None:
    make_storage().batch_set(KEYS[:1], [b""], PAGES[:1], deadline=LATER)
    assert make_storage().batch_exists(KEYS[:1]) == 0


def test_what_is_stored_does_not_follow_the_callers_memory() -> None:
    storage = make_storage()
    buffer = PageBuffer.holding(b"a" * PAGE_BYTES)
    storage.batch_set(KEYS[:1], [b""], [buffer.page], deadline=LATER)
    storage.batch_get(KEYS[:1], [b""], [buffer.page], deadline=LATER)
    other = PageBuffer.holding(b"b" * PAGE_BYTES)
    storage.batch_set(KEYS[1:2], [b""], [other.page], deadline=LATER)
    storage.batch_get(KEYS[1:2], [b""], [buffer.page], deadline=LATER)
    storage.batch_get(KEYS[:1], [b""], [other.page], deadline=LATER)
    assert (buffer.read(), other.read()) == (b"b" * PAGE_BYTES, b"a" * PAGE_BYTES)


def test_descendants_of_a_page_that_was_not_stored_are_skipped_and_other_chains_are_not() -> None:
    """Case C108: what could never be hit must not take space."""
    storage = make_storage(max_bytes=2 * PAGE_BYTES)
    storage.batch_set([KEYS[0], KEYS[5]], [b"", b""], [PAGES[0], PAGES[5]], deadline=LATER)
    keys = [KEYS[0], KEYS[1], KEYS[2], KEYS[3], KEYS[5]]
    parents = [b"", KEYS[0], KEYS[1], KEYS[2], b""]
    outcomes = storage.batch_set(keys, parents, PAGES[:5], deadline=LATER)
    assert outcomes == [PRESENT, NO_SPACE, SKIPPED, SKIPPED, PRESENT]


class TickingClock:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += 1.0
        return self.seconds


def test_a_deadline_that_passes_within_a_batch_ends_it_between_pages() -> None:
    config = HiCacheStorageConfig(
        namespace=make_config().namespace, page_bytes=PAGE_BYTES, clock=TickingClock()
    )
    storage = MemoryStorage(config)
    outcomes = storage.batch_set(KEYS, CHAIN, PAGES, deadline=4.0)
    assert outcomes == [OK] * 3 + [TIMEOUT] * 3
    assert storage.batch_exists(KEYS) == 3
    assert storage.batch_get(KEYS[:3], CHAIN[:3], PAGES[:3], deadline=6.0) == [OK, TIMEOUT, TIMEOUT]


def test_a_store_below_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not hold a single page of 100 bytes"):
        make_storage(max_bytes=PAGE_BYTES - 1)


def test_an_unknown_option_is_named_together_with_those_there_are() -> None:
    """Case C098."""
    with pytest.raises(ConfigError, match=r"no option 'max_size'.*known options: max_bytes"):
        make_storage(max_size=1000)


@pytest.mark.parametrize("value", ["1000", 1000.0, True, None])
def test_an_option_of_the_wrong_type_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'max_bytes'.*must be of type int"):
        make_storage(max_bytes=value)


def test_the_value_of_a_refused_option_is_not_shown() -> None:
    """Case C123: it can be a secret."""
    for options in ({"max_bytes": "hunter2"}, {"password": "hunter2"}):
        with pytest.raises(ConfigError) as caught:
            make_storage(**options)
        assert "hunter2" not in str(caught.value)


def test_a_page_without_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_bytes must be at least 1"):
        HiCacheStorageConfig(namespace=make_config().namespace, page_bytes=0)
