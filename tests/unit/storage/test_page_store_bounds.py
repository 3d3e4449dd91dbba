"""The page store keeps its limits at every moment, and gives up what is of least use."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from page_store_tools import (
    NO_SPACE,
    OK,
    PAGE_BYTES,
    PRESENT,
    SKIPPED,
    chain,
    disk_bytes,
    num_stored,
    open_store,
    read,
    verify_index,
    watched,
    write,
)

from hicache.errors import ConfigError
from hicache.storage.page_store import limits, summarize

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.storage.page_store import PageStore

MAX_BYTES = 2_000_000


def churn(storage: PageStore, rng: random.Random, *, num_writes: int, page_bytes: int) -> None:
    """Write chains that branch from each other, and read some."""
    chains = [chain(rng.getrandbits(31), 2)]
    for _ in range(num_writes):
        stem = rng.choice(chains)
        stem = stem[: rng.randrange(len(stem) + 1)]
        tail = chain(rng.getrandbits(31), rng.choice([1, 2, 7, 30]), stem[-1] if stem else b"")
        chains = [*chains, stem + tail][-20:]
        outcomes = write(storage, stem + tail, page_bytes=page_bytes)
        assert set(outcomes) <= {OK, PRESENT, NO_SPACE, SKIPPED}
        read(storage, rng.choice(chains), page_bytes=page_bytes)


@pytest.mark.parametrize("page_bytes", [4096, 5000, 65_536])
def test_a_store_is_never_larger_than_its_limit(fast_path: Path, page_bytes: int) -> None:
    """C080: neither while it writes nor afterwards; the newest tenth of the pages is found."""
    seed = page_bytes
    storage = open_store(fast_path, page_bytes=page_bytes, max_bytes=MAX_BYTES)
    with watched(fast_path, MAX_BYTES):
        churn(storage, random.Random(seed), num_writes=40, page_bytes=page_bytes)
        # Pages that nobody reads, as many again as there is room for.
        unread = [chain(name, 3) for name in range(MAX_BYTES // page_bytes // 3)]
        for keys in unread:
            assert write(storage, keys, page_bytes=page_bytes) == [OK] * 3
    for keys in unread[-max(len(unread) // 10, 1) :]:
        assert read(storage, keys, page_bytes=page_bytes) == [OK] * 3
    assert disk_bytes(fast_path) > MAX_BYTES // 2
    verify_index(fast_path)
    storage.close()
    assert disk_bytes(fast_path) <= MAX_BYTES


def test_namespaces_with_pages_of_different_lengths_share_one_limit(fast_path: Path) -> None:
    sizes = [4096, 20_000, 100_000]
    storages = [
        open_store(fast_path, model=str(size), page_bytes=size, max_bytes=MAX_BYTES)
        for size in sizes
    ]
    rng = random.Random(7)
    with watched(fast_path, MAX_BYTES):
        for _ in range(8):
            for storage, size in zip(storages, sizes, strict=True):
                churn(storage, rng, num_writes=2, page_bytes=size)
                keys = chain(rng.getrandbits(31), 2)
                assert write(storage, keys, page_bytes=size) == [OK, OK]
                assert read(storage, keys, page_bytes=size) == [OK, OK]
    verify_index(fast_path)
    for storage in storages:
        storage.close()


@pytest.mark.parametrize("smaller", [600_000, 1_000_000])
def test_a_smaller_limit_is_kept_as_soon_as_the_store_is_open(
    fast_path: Path, smaller: int
) -> None:
    """C114: what an earlier run has left counts, can be hit, and makes room."""
    storage = open_store(fast_path, max_bytes=MAX_BYTES)
    keys = chain(1, 150)
    assert write(storage, keys) == [OK] * 150
    storage.close()
    assert disk_bytes(fast_path) > smaller

    storage = open_store(fast_path, max_bytes=smaller)
    assert disk_bytes(fast_path) <= smaller
    found = storage.batch_exists(keys)
    assert 0 < found == num_stored(storage, keys)
    assert read(storage, keys[:found]) == [OK] * found
    with watched(fast_path, smaller):
        churn(storage, random.Random(3), num_writes=10, page_bytes=PAGE_BYTES)
    verify_index(fast_path)
    storage.close()


def test_the_strictest_limit_of_several_instances_counts_while_it_is_open(fast_path: Path) -> None:
    generous = open_store(fast_path, max_bytes=MAX_BYTES)
    write(generous, chain(1, 150))
    strict = open_store(fast_path, model="other", max_bytes=1_000_000)
    assert disk_bytes(fast_path) <= 1_000_000
    with watched(fast_path, 1_000_000):
        write(generous, chain(2, 150))
    strict.close()
    write(generous, chain(3, 150))
    assert disk_bytes(fast_path) > 1_000_000
    generous.close()


def test_a_batch_larger_than_the_store_is_stored_as_far_as_it_fits(fast_path: Path) -> None:
    """C081: neither its ancestors nor its own pages make room for it."""
    storage = open_store(fast_path, max_bytes=1_000_000)
    others, stem = chain(1, 10), chain(2, 10)
    write(storage, others)
    write(storage, stem)
    tail = chain(3, 400, stem[-1])
    outcomes = write(storage, tail, parent=stem[-1])
    num_good = outcomes.count(OK)
    assert 20 < num_good < 300
    assert outcomes == [OK] * num_good + [NO_SPACE] + [SKIPPED] * (399 - num_good)
    assert "no room" in str(storage.stats().last_error)
    whole = stem + tail[:num_good]
    assert read(storage, whole) == [OK] * len(whole)
    assert num_stored(storage, others) == 0
    verify_index(fast_path)
    storage.close()


def test_pages_that_a_batch_found_stored_do_not_make_room_for_its_others(fast_path: Path) -> None:
    """C081: never present and then gone."""
    storage = open_store(fast_path, max_bytes=1_000_000)
    old = chain(1, 5)
    write(storage, old)
    for name in range(10, 30):
        write(storage, chain(name, 10))
        assert read(storage, old) == [OK] * 5
    new = old + chain(2, 400, old[-1])
    outcomes = write(storage, new)
    assert outcomes[:5] == [PRESENT] * 5
    assert storage.batch_exists(new) == outcomes.index(NO_SPACE)
    storage.close()


def test_what_was_used_last_stays(fast_path: Path) -> None:
    """C089: reading and finding stored are uses; a page stays as long as those below it."""
    storage = open_store(fast_path, max_bytes=1_500_000, eviction_policy="lru")
    chains = [chain(name, 5) for name in range(10)]
    for keys in chains:
        assert write(storage, keys) == [OK] * 5
    read(storage, chains[0])
    write(storage, chains[1])
    tail = chain(100, 1, chains[2][-1])
    write(storage, tail, parent=chains[2][-1])
    name = 1000
    while num_stored(storage, chains[8]):
        write(storage, chain(name, 2))
        name += 1
    kept = [num_stored(storage, keys) for keys in chains[:9]]
    assert kept == [5, 5, 5, 0, 0, 0, 0, 0, 0]
    assert num_stored(storage, tail) == 1
    verify_index(fast_path)
    storage.close()


def test_a_tail_goes_before_its_head_and_a_head_before_a_newer_tail_elsewhere(
    fast_path: Path,
) -> None:
    storage = open_store(fast_path, max_bytes=1_000_000, eviction_policy="lru")
    keys = chain(1, 40)
    write(storage, keys)
    seen = []
    name = 1000
    while storage.batch_exists(keys):
        write(storage, chain(name, 1))
        name += 1
        found = storage.batch_exists(keys)
        assert num_stored(storage, keys) == found
        seen.append(found)
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 5
    storage.close()


def test_pieces_of_space_are_used_for_pages_that_are_larger(fast_path: Path) -> None:
    """C090: pages of two blocks were given up between others that stay; one of 16 fits."""
    options: dict[str, Any] = {"max_bytes": 1_500_000, "eviction_policy": "lru"}
    small = open_store(fast_path, model="small", **options)
    chains = [chain(name, 1) for name in range(200)]
    kept, given_up = chains[::2], chains[1::2]
    large = open_store(fast_path, model="large", page_bytes=60_000, **options)
    for keys in chains:
        write(small, keys)
    stored = [keys for keys in kept if num_stored(small, keys)]
    for keys in stored:
        read(small, keys)
    assert any(num_stored(small, keys) for keys in given_up)
    keys = chain(1000, 3)
    assert write(large, keys, page_bytes=60_000) == [OK] * 3
    assert read(large, keys, page_bytes=60_000) == [OK] * 3
    assert all(num_stored(small, keys) for keys in stored)
    verify_index(fast_path)
    small.close()
    large.close()


class FakeSystem(NamedTuple):
    f_bavail: int
    f_blocks: int = 1 << 30
    f_frsize: int = 4096


def test_free_space_that_is_to_be_left_is_left(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store stops growing, makes room of its own, and shrinks when others take more."""
    floor = 10_000_000
    others = 0

    def statvfs(path: object) -> FakeSystem:
        return FakeSystem((floor + MAX_BYTES - others - disk_bytes(fast_path)) // 4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(limits, "SHRINK_INTERVAL_SECONDS", 0)
    storage = open_store(fast_path, min_free_bytes=floor)
    rng = random.Random(1)
    churn(storage, rng, num_writes=40, page_bytes=PAGE_BYTES)
    assert MAX_BYTES // 2 < disk_bytes(fast_path) <= MAX_BYTES
    others = MAX_BYTES // 2
    for _ in range(30):
        assert write(storage, chain(rng.getrandbits(31), 3)) == [OK] * 3
    assert MAX_BYTES // 4 < disk_bytes(fast_path) <= MAX_BYTES - others
    others = 0
    churn(storage, rng, num_writes=30, page_bytes=PAGE_BYTES)
    assert disk_bytes(fast_path) > MAX_BYTES // 2
    verify_index(fast_path)
    storage.close()


def test_a_file_system_that_does_not_show_what_it_got_back_does_not_empty_the_store(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is lacking is given back once, and again only after some time."""
    floor, lacking = 10_000_000, 20
    num_free = floor // 4096 + 2000
    monkeypatch.setattr(os, "statvfs", lambda path: FakeSystem(num_free))
    storage = open_store(fast_path, min_free_bytes=floor, page_bytes=4096)
    keys = chain(1, 1000)
    assert write(storage, keys, page_bytes=4096) == [OK] * 1000
    num_free = floor // 4096 + 1 - lacking
    for name in range(2, 12):
        assert write(storage, chain(name, 1), page_bytes=4096) == [OK]
    assert 1000 - 256 - lacking <= num_stored(storage, keys) < 1000
    verify_index(fast_path)
    storage.close()


def test_what_a_file_system_lacks_is_asked_for_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = [0.0]
    monkeypatch.setattr(os, "statvfs", lambda path: FakeSystem(7))
    floor = limits.FreeSpaceFloor("", now=lambda: times[-1])
    bounds = limits.Limits(min_free_bytes=10 * 4096)
    assert floor.num_lacking(bounds) == 3
    assert floor.num_lacking(bounds) == 3
    floor.wait()
    assert floor.num_lacking(bounds) == 0
    times.append(limits.SHRINK_INTERVAL_SECONDS)
    assert floor.num_lacking(bounds) == 3
    assert floor.num_lacking(bounds._replace(min_free_bytes=0)) == 0


def test_a_small_store_takes_little_space(fast_path: Path) -> None:
    storage = open_store(fast_path)
    write(storage, chain(1, 2))
    assert disk_bytes(fast_path) < 3_000_000
    assert summarize(str(fast_path)).segment_bytes < 3_000_000
    storage.close()


@pytest.mark.parametrize("max_bytes", [0, 100_000, 520_000])
def test_a_limit_that_holds_no_index_and_pages_is_refused(fast_path: Path, max_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"max_bytes={max_bytes} is too little.*give at least"):
        open_store(fast_path, max_bytes=max_bytes)


def test_a_negative_floor_is_refused(fast_path: Path) -> None:
    with pytest.raises(ConfigError, match="min_free_bytes must not be negative"):
        open_store(fast_path, min_free_bytes=-1)
