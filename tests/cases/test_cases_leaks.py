"""Acceptance cases: pages, descriptors and memory come back."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import PAGE, Rig, config_for, store_with, tokens
from case_tools import FileRig
from page_store_tools import break_moves
from scripted_parts import faulty_storage, injected
from serving import Variant, answers_without_cache, finish, make_engine
from storage_damage import num_stored_pages, remove_stored_pages

from hicache.engine.request import Request
from hicache.hashing import StorageNamespace
from hicache.pools import PageAllocator
from hicache.radix import CopyKind, RadixKey
from hicache.storage import HiCacheStorageConfig
from hicache.storage.page_store import PageStore
from hicache.testing.faulty_storage import Fault, Gate, Verb
from hicache.testing.page_buffer import PageBuffer
from hicache.types import PageHash, PageOutcome, PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

LONG = RadixKey(tokens(1, 2, 3, 4, 5, 6))


def resident_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_page_that_is_kept_keeps_no_more_memory_than_its_own_id() -> None:
    """C001."""
    allocator = PageAllocator(1000)
    kept = allocator.alloc(1)
    assert kept is not None
    before = resident_bytes()
    for _ in range(10_000):
        rest = allocator.alloc(999)
        assert rest is not None
        allocator.free(rest)
    assert kept.base is None
    assert kept.nbytes == 8
    assert resident_bytes() - before < 5 << 20


@pytest.mark.usefixtures("either_io")
def test_no_descriptor_is_lost_per_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C011: 2,000 writes and reads, then reads that fail."""
    namespace = StorageNamespace(
        model="model",
        weights_revision="1",
        dtype="float32",
        layout="page_first",
        page_size=PAGE,
        kv_shape="x",
    )
    config = HiCacheStorageConfig(
        namespace=namespace, page_bytes=64, extra_config={"path": str(tmp_path)}
    )
    storage = PageStore(config)
    buffer = PageBuffer.holding(bytes(64))
    keys = [PageHash(number.to_bytes(32, "little")) for number in range(2000)]

    def read(key: PageHash) -> PageOutcome:
        return storage.batch_get([key], [b""], [buffer.page], deadline=1e9)[0]

    def write(some: list[PageHash]) -> None:
        pages = [buffer.page] * len(some)
        outcomes = storage.batch_set(some, [b""] * len(some), pages, deadline=1e9)
        assert all(outcome.good for outcome in outcomes)

    write(keys[:1])
    before = num_descriptors()
    for start in range(0, len(keys), 100):
        write(keys[start : start + 100])
    assert {read(key) for key in keys} == {PageOutcome.OK}
    assert num_descriptors() == before
    break_moves(monkeypatch, "read", errno.EIO)
    assert {read(key) for key in keys} == {PageOutcome.FAILED}
    assert num_descriptors() == before


def test_a_request_that_must_not_be_cached_leaves_nothing_behind(tmp_path: Path) -> None:
    """C013: three chunks of a prompt; its answer is right, and it may use what others left."""
    engine, plain = make_engine(Variant(), tmp_path), make_engine(Variant(), None)
    cache = engine.cache
    assert cache is not None
    prompt = [token % 251 for token in range(280)]
    secret = Request("secret", prompt, max_new_tokens=32, cacheable=False)
    engine.run(secret)
    assert engine.settle()
    assert [secret.output_ids] == answers_without_cache([secret], plain)
    assert list(cache.tree.nodes()) == []
    controller = cache.controller
    assert controller.device_allocator.num_available == controller.device_allocator.num_pages
    assert controller.host_allocator.num_available == controller.host_allocator.num_pages
    assert num_stored_pages(tmp_path) == 0

    engine.run(Request("open", prompt[:160], max_new_tokens=1))
    num_nodes = len(list(cache.tree.nodes()))
    again = Request("again", prompt, max_new_tokens=32, cacheable=False)
    engine.run(again)
    assert again.device_hit_tokens == 160
    assert again.output_ids == secret.output_ids
    assert len(list(cache.tree.nodes())) == num_nodes
    finish(engine)


def test_requests_that_must_not_be_cached_are_right_when_they_are_retracted(tmp_path: Path) -> None:
    """C013: together they outgrow the device, and what one had computed is lost."""
    engine, plain = make_engine(Variant(), tmp_path), make_engine(Variant(), None)
    requests = [
        Request(str(n), [(n + 7 * t) % 251 for t in range(368)], max_new_tokens=32, cacheable=False)
        for n in range(2)
    ]
    engine.run(*requests)
    assert [r.output_ids for r in requests] == answers_without_cache(requests, plain)
    assert engine.cache is not None
    assert list(engine.cache.tree.nodes()) == []
    finish(engine)


def test_pages_that_storage_delivers_behind_a_hole_are_given_back_once() -> None:
    """C017: pages 0-1 come, 2 does not, 3-5 do."""
    create = faulty_storage(store_with(LONG), faults={Verb.GET: [Fault.HOLE]})
    config = config_for(storage=injected(batch_pages=5))
    with Rig(config, create_storage=create) as rig:
        assert rig.prefetch(LONG) == 2 * PAGE
        assert rig.hit(LONG) == (0, 2)
        assert rig.cache.tree.host_size == 2 * PAGE
        rest = rig.host_pages.alloc(14)
        assert rest is not None
        assert len(np.unique(rest)) == 14
        rig.host_pages.free(rest)


@pytest.mark.parametrize("when", ["before it is asked for", "between the question and the read"])
def test_a_page_file_that_is_missing_costs_nothing_but_the_hit(tmp_path: Path, when: str) -> None:
    """C020."""
    key = RadixKey(tokens(1))
    with FileRig(tmp_path) as rig:
        rig.insert(key)
        rig.settle()
    read = Gate()
    with FileRig(tmp_path, host_pages=64, gates={Verb.GET: read}) as rig:
        if when == "before it is asked for":
            remove_stored_pages(tmp_path)
            read.open()
        rig.begin_prefetch(key)
        if when != "before it is asked for":
            rig.step_until(read.entered.is_set)
            remove_stored_pages(tmp_path)
            read.open()
        rig.settle()
        assert rig.cache.check_prefetch_progress("p")
        assert rig.cache.pop_prefetch_loaded_tokens("p") == 0
        assert rig.host_pages.num_available == 64


@pytest.mark.usefixtures("either_io")
def test_writes_that_found_no_space_leave_nothing_and_do_not_block_later_ones(
    tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    """C021: four writes fail, and later ones work."""
    keys = [RadixKey(tokens(page)) for page in range(4)]
    with FileRig(tmp_path) as rig:
        with full_disk():
            for key in keys:
                rig.insert(key)
            rig.settle()
        stats = rig.cache.controller.stats[CopyKind.PERSIST]
        assert stats.outcomes == {"no_space": 4}
        assert rig.cache.num_in_flight == 0
        assert num_stored_pages(tmp_path) == 0
        rig.drop_memory()
        assert rig.host_pages.num_available == 16
        for key in keys:
            rig.insert(key)
        rig.settle()
        assert stats.outcomes == {"no_space": 4, "ok": 4}
        rig.drop_memory()
        assert [rig.prefetch(key) for key in keys] == [PAGE] * 4


def test_a_load_that_cannot_have_all_its_pages_brings_the_first_and_blocks_nobody() -> None:
    """C032, C033: 8 pages, and room for 2; what was not read is not delivered."""
    prompt = RadixKey(tokens(1, 2, 3, 4, 5, 6, 7, 8))
    write = Gate()
    create = faulty_storage(store_with(prompt), gates={Verb.SET: write})
    config = config_for(10, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, storage=injected())
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(write)
        rig.insert(RadixKey(tokens(*range(20, 28))))
        rig.step_until(write.entered.is_set)
        rig.begin_prefetch(prompt)
        rig.step_until(lambda: rig.cache.check_prefetch_progress("p"))
        assert rig.cache.pop_prefetch_loaded_tokens("p") == 2 * PAGE
        assert rig.hit(prompt) == (0, 2)
        rig.begin_prefetch(RadixKey(tokens(90, 91)), request_id="q")
        rig.step_until(lambda: rig.cache.check_prefetch_progress("q"))
        assert rig.cache.pop_prefetch_loaded_tokens("q") == 0
        write.open()
        rig.settle()
        assert rig.prefetch(prompt) == 6 * PAGE
        assert rig.hit(prompt) == (0, 8)
