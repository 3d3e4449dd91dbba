"""Each fault that was measured in LMCache 0.5.6, done to hicache: with the opposite outcome.

Named as the probes are. The `server_*` probes of that list need a node server; what its file
adapters do with another element type, a flipped byte or a cut file is done here to the store.
"""

from __future__ import annotations

import os
import statistics
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import GEOMETRY, PAGE, Rig, config_for, store_with, tokens
from case_tools import FileRig
from page_store_tools import (
    BLOCK_BYTES,
    MISS,
    NO_SPACE,
    OK,
    PAGE_BYTES,
    SKIPPED,
    chain,
    flip,
    num_stored,
    open_store,
    read,
    verify_index,
    write,
)
from scripted_parts import faulty_storage, injected
from storage_damage import remove_stored_pages

from benchmarks.bytecodes import count_bytecodes
from hicache.radix import RadixKey
from hicache.storage.page_store import list_pages, summarize
from hicache.testing.faulty_storage import Gate, Verb
from hicache.testing.stamped_kv import read_pages, stamp_of, write_stamps
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from hicache.storage.page_store import StoredPage

KEY = RadixKey(tokens(1, 2, 3, 4))
ROOM = 2_000_000
"""Bytes of a store that holds some dozens of pages."""


def page_of(path: Path, key: bytes) -> StoredPage:
    """Return where the page of a key is."""
    (page,) = (one for one in list_pages(str(path)) if one.key == key)
    return page


def page_bytes_of(kv: torch.Tensor) -> set[bytes]:
    """Return what each page of a tensor from `stamped_kv` holds."""
    return {page.numpy().tobytes() for page in kv.unbind(2)}


@pytest.mark.usefixtures("either_io")
@pytest.mark.parametrize("num_whole", [0, 2])
def test_truncated_file(tmp_path: Path, num_whole: int) -> None:
    """There: a full hit of another request's bytes, which the memory still held."""
    strangers = [RadixKey(tokens(*range(first, first + 8))) for first in (100, 200)]
    with FileRig(tmp_path) as rig:
        rig.insert(KEY)
        rig.settle()
        rig.drop_memory()
        for stranger in strangers:
            rig.insert(stranger)
            rig.settle()
        rig.evict_device()
        rig.cache.evict_host(16)
        theirs = [page_bytes_of(stamp_of(stranger, GEOMETRY)) for stranger in strangers]
        assert page_bytes_of(read_pages(rig.host_pool, np.arange(16))) == set().union(*theirs)

        cut = list(list_pages(str(tmp_path)))[num_whole]
        os.truncate(cut.file, cut.offset + 1000)
        assert rig.prefetch(KEY) == num_whole * PAGE
        assert rig.hit(KEY) == (0, num_whole)
        assert rig.host_pages.num_available == 16 - num_whole
        assert len(rig.load(KEY).device_pages) == num_whole
        assert [rig.prefetch(stranger) for stranger in strangers] == [0, 0]

        rig.insert(KEY)
        rig.settle()
        rig.drop_memory()
        assert rig.prefetch(KEY) == len(KEY)
        assert rig.hit(KEY) == (0, 4)


def test_bit_flip(tmp_path: Path) -> None:
    """There: a hit with a wrong value."""
    with FileRig(tmp_path) as rig:
        rig.insert(KEY)
        rig.settle()
        rig.drop_memory()
        pages = list(list_pages(str(tmp_path)))
        flip(pages[2], 123)
        hit = rig.prefetch(KEY)
        assert hit < len(KEY)
        assert rig.hit(KEY) == (0, hit // PAGE)


def test_missing_file(tmp_path: Path) -> None:
    """There: a KeyError, and a chunk of the staging pool is lost."""
    with FileRig(tmp_path) as rig:
        rig.insert(KEY)
        rig.settle()
        rig.drop_memory()
        for segment in {page.file for page in list_pages(str(tmp_path))}:
            os.unlink(segment)
        num_free = rig.host_pages.num_available
        assert rig.prefetch(KEY) == 0
        assert rig.host_pages.num_available == num_free


@pytest.mark.usefixtures("either_io")
def test_no_space_left(
    tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    """There: staging chunks leak, space is accounted for nothing, nothing is stored ever after."""
    storage = open_store(tmp_path)
    own, other = chain(1, 20), chain(2, 20)
    assert write(storage, own) == [OK] * 20
    before = summarize(str(tmp_path))
    with full_disk():
        for _ in range(50):
            assert write(storage, other) == [NO_SPACE] + [SKIPPED] * 19
            assert read(storage, own) == [OK] * 20
    assert "No space left on device" in str(storage.stats().last_error)
    assert num_stored(storage, other) == 0
    assert summarize(str(tmp_path)).segment_bytes == before.segment_bytes
    verify_index(tmp_path)
    assert write(storage, other) == [OK] * 20
    assert read(storage, own) == read(storage, other) == [OK] * 20
    verify_index(tmp_path)
    storage.close()


def test_no_space_left_below_the_limit(tmp_path: Path) -> None:
    """The same where it is the store's own limit that leaves none."""
    storage = open_store(tmp_path, max_bytes=ROOM)
    own = chain(1, 20)
    far_too_many = chain(2, 10_000)
    assert write(storage, own) == [OK] * 20
    assert NO_SPACE in write(storage, far_too_many)
    assert write(storage, own)[-1].good
    assert read(storage, own) == [OK] * 20
    verify_index(tmp_path)
    storage.close()


def test_restart(tmp_path: Path) -> None:
    """There: a new engine on the same folder finds nothing."""
    with FileRig(tmp_path) as rig:
        rig.insert(KEY)
        rig.settle()
    with FileRig(tmp_path) as rig:
        assert rig.prefetch(KEY) == len(KEY)
        assert rig.hit(KEY) == (0, 4)


def test_remove_and_store_again(tmp_path: Path) -> None:
    """C092. There: removed chunks stay accounted until nothing fits any more."""
    storage = open_store(tmp_path, max_bytes=ROOM)
    for number in range(20):
        keys = chain(number, 40)
        assert write(storage, keys) == [OK] * 40
        assert storage.batch_exists(keys) == 40
        assert storage.clear() == 40
        assert storage.batch_exists(keys) == 0
        assert summarize(str(tmp_path)).namespaces[0].num_pages == 0
        verify_index(tmp_path)
    storage.close()
    # What the process had leased is given back with it: nothing at all is in use.
    summary = summarize(str(tmp_path))
    assert summary.free_bytes == summary.segment_bytes


def test_clear_all(tmp_path: Path) -> None:
    """There: `clear` answers 0 and leaves every file, which goes on being a hit."""
    with FileRig(tmp_path) as rig:
        rig.insert(KEY)
        rig.settle()
        assert rig.cache.clear_storage_backend() == 4
        rig.drop_memory()
        assert rig.prefetch(KEY) == 0
    assert list(list_pages(str(tmp_path))) == []


def test_staging_pool_busy() -> None:
    """There: a retrieve that needs more than is free hangs for ever."""
    gate = Gate()
    first, second = KEY, RadixKey(tokens(11, 12, 13, 14))
    create = faulty_storage(store_with(first, second), gates={Verb.GET: gate})
    config = config_for(
        host_pages=5,
        storage=injected(num_workers=2),
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
    )
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(gate)
        assert rig.begin_prefetch(first, request_id="first")
        rig.step_until(gate.entered.is_set)
        rig.begin_prefetch(second, request_id="second")
        rig.step(50)
        assert not rig.cache.check_prefetch_progress("second")
        # The scheduler goes on meanwhile.
        rig.insert(RadixKey(tokens(21)))
        gate.open()
        for request_id in ("first", "second"):
            rig.step_until(partial(rig.cache.check_prefetch_progress, request_id))


def test_async_load_staging_short() -> None:
    """There: a load that gets a part of its memory keeps a lock for ever."""
    key = RadixKey(tokens(*range(1, 9)))
    config = config_for(host_pages=4, storage=injected())
    create = faulty_storage(store_with(key, host_pages=16))
    with Rig(config, create_storage=create) as rig:
        brought = rig.prefetch(key)
        assert 0 < brought <= 4 * PAGE
        assert rig.hit(key) == (0, brought // PAGE)
        rig.drop_memory()
        assert rig.prefetch(key.prefix(2 * PAGE), request_id="next") == 2 * PAGE


def test_store_again_in_full_pool() -> None:
    """There: to store what is stored already evicts something else."""
    a, b = RadixKey(tokens(1, 2, 3, 4)), RadixKey(tokens(11, 12, 13, 14))
    with Rig(config_for(host_pages=8)) as rig:
        for key in (a, b, b):
            rig.insert(key)
            rig.settle()
        rig.evict_device()
        assert (rig.hit(a), rig.hit(b)) == ((0, 4), (0, 4))


@pytest.mark.parametrize("tier", ["host", "storage"])
def test_eviction_order(tier: str, tmp_path: Path) -> None:
    """There: the head of a prompt goes first, and the seven chunks left are of no use."""
    if tier == "host":
        key = RadixKey(tokens(*range(1, 9)))
        with Rig(config_for(host_pages=8)) as rig:
            for end in range(1, 9):
                rig.insert(key.prefix(end * PAGE), chunked=end < 8)
                rig.settle()
            rig.evict_device()
            rig.insert(RadixKey(tokens(99)))
            rig.settle()
            assert rig.hit(key) == (0, 7)
        return
    storage = open_store(tmp_path, max_bytes=ROOM)
    prompt = chain(1, 1)
    while len(prompt) < 300:
        outcomes = write(storage, prompt[-1:], parent=prompt[-2] if len(prompt) > 1 else b"")
        if not outcomes[0].good or num_stored(storage, prompt) < len(prompt):
            break
        prompt = chain(1, len(prompt) + 1)
    assert write(storage, chain(2, 1)) == [OK]
    hit = storage.batch_exists(prompt)
    assert hit == num_stored(storage, prompt), "what is left must be a prefix"
    assert hit > len(prompt) // 2
    storage.close()


@pytest.mark.parametrize("eviction_policy", ["lru", "adaptive"])
def test_put_on_full_disk(fast_path: Path, eviction_policy: str) -> None:
    """C106. There: a put into a full tier of 100 times the entries takes 75 times as long."""
    means, maxima = [], []
    for num_pages in (200, 8000):
        storage = open_store(
            fast_path / str(num_pages),
            page_bytes=BLOCK_BYTES,
            max_bytes=num_pages * BLOCK_BYTES,
            eviction_policy=eviction_policy,
        )
        put = partial(write, storage, page_bytes=BLOCK_BYTES)
        for number in range(num_pages // 4 + 5):
            put(chain(number, 4))
        counts = []
        for number in range(10_000, 10_100):
            outcomes, count = count_bytecodes(partial(put, chain(number, 4)))
            assert outcomes == [OK] * 4
            counts.append(count)
        means.append(statistics.mean(counts))
        maxima.append(max(counts))
        storage.close()
    # A larger store makes room for more puts at once.
    assert means[1] < 1.5 * means[0], means
    assert maxima[1] < 3 * maxima[0], maxima


def test_store_with_pinned_entries() -> None:
    """There: a store walks past every pinned entry, 40 ms for 100,000 of them."""
    medians = []
    for num_pinned in (50, 1000):
        config = config_for(host_pages=num_pinned + 60)
        with Rig(config, device_pages=num_pinned + 20) as rig:
            for page in range(num_pinned):
                rig.cache.inc_lock_ref(rig.insert(RadixKey(tokens(page))).node)
            rig.settle()
            counts = []
            for page in range(40):
                key, own = RadixKey(tokens(5000 + page)), rig.alloc_device(1)
                _, stored = count_bytecodes(
                    partial(rig.cache.insert, key, own, request_id="r", chunked=False)
                )
                rig.remember(key)
                write_stamps(rig.pool, key, own, first_page=0)
                rig.settle()
                evicted, made_room = count_bytecodes(partial(rig.cache.evict, 1))
                assert evicted.num_freed == 1
                counts.append(stored + made_room)
            medians.append(statistics.median(counts))
            for node in list(rig.cache.tree.nodes()):
                while node.lock_ref and not node.tickets:
                    rig.cache.dec_lock_ref(node)
            rig.cache.reset()
    assert medians[1] < 1.2 * medians[0], medians


def test_server_file_adapters(tmp_path: Path) -> None:
    """There: an object read as another element type, or with a flipped byte, is a hit."""
    storage = open_store(tmp_path)
    keys = chain(1, 3)
    assert write(storage, keys) == [OK] * 3
    # As wide, so that pages are as long and nothing else tells them apart.
    other = open_store(tmp_path, dtype="bfloat16")
    assert other.batch_exists(keys) == 0
    assert read(other, keys) == [MISS, SKIPPED, SKIPPED]
    assert storage.batch_exists(keys) == 3
    flip(page_of(tmp_path, keys[1]), PAGE_BYTES // 2)
    assert [outcome is OK for outcome in read(storage, keys)] == [True, False, False]
    assert write(storage, keys)[1] is OK
    assert read(storage, keys) == [OK] * 3
    remove_stored_pages(tmp_path)
    assert storage.batch_exists(keys) == 0
    storage.close()
    other.close()


def test_pages_that_were_read_are_those_that_were_written(tmp_path: Path) -> None:
    """The control: without a fault everything is there."""
    with FileRig(tmp_path) as rig:
        rig.insert(KEY)
        rig.settle()
        rig.drop_memory()
        assert rig.prefetch(KEY) == len(KEY)
        assert rig.hit(KEY) == (0, 4)
        assert np.array_equal(rig.match(KEY).device_pages, np.empty(0, dtype=np.int64))
