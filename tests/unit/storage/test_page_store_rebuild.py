"""The index of a page store can be lost: the headers have all that it says."""

from __future__ import annotations

import logging
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from page_store_tools import (
    BLOCK_BYTES,
    CORRUPT,
    MISS,
    OK,
    PRESENT,
    SKIPPED,
    chain,
    num_stored,
    open_store,
    patch_file,
    read,
    verify_index,
    write,
)

from hicache.errors import ConfigError
from hicache.storage.page_store import list_pages, rebuild_store, summarize

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def delete(index: Path) -> None:
    shutil.rmtree(index)


def delete_the_file(index: Path) -> None:
    (index / "data.mdb").unlink()


def empty(index: Path) -> None:
    (index / "data.mdb").write_bytes(b"")


def overwrite(index: Path) -> None:
    (index / "data.mdb").write_bytes(os.urandom(100_000))


def cut(index: Path) -> None:
    os.truncate(index / "data.mdb", 5 * 4096)


def take_anothers(index: Path) -> None:
    other = index.parent.parent / "other"
    open_store(other).close()
    shutil.copy(other / "index" / "data.mdb", index / "data.mdb")


@pytest.mark.parametrize("damage", [delete, delete_the_file, empty, overwrite, cut, take_anothers])
def test_an_index_that_is_lost_or_damaged_is_made_again(
    fast_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = fast_path / "store"
    first, second = open_store(path), open_store(path, model="other", page_bytes=20_000)
    chains = [chain(name, 70) for name in range(3)]
    for keys in chains:
        write(first, keys)
    write(second, chains[0], page_bytes=20_000)
    branch = chain(9, 5, chains[0][30])
    write(first, branch, parent=chains[0][30])
    first.close()
    second.close()

    damage(path / "index")
    with caplog.at_level(logging.WARNING):
        first = open_store(path)
    assert "rebuilt it from the headers: 285 pages" in caplog.text
    second = open_store(path, model="other", page_bytes=20_000)
    for keys in [*chains, branch]:
        assert read(first, keys) == [OK] * len(keys)
    assert read(second, chains[0], page_bytes=20_000) == [OK] * 70
    verify_index(path)
    assert write(first, chain(20, 100)) == [OK] * 100
    verify_index(path)
    descriptions = [namespace.description for namespace in summarize(str(path)).namespaces]
    assert sorted(description["model"] for description in descriptions) == ["model", "other"]
    first.close()
    second.close()


def lose_the_index(path: Path) -> None:
    shutil.rmtree(path / "index")


def test_pages_that_were_removed_do_not_come_back(fast_path: Path) -> None:
    storage, other = open_store(fast_path), open_store(fast_path, model="other")
    keys = chain(1, 100)
    write(storage, keys)
    write(other, keys)
    assert storage.clear() == 100
    storage.close()
    other.close()
    lose_the_index(fast_path)
    storage, other = open_store(fast_path), open_store(fast_path, model="other")
    assert num_stored(storage, keys) == 0
    assert read(other, keys) == [OK] * 100
    storage.close()
    other.close()


def test_what_has_taken_the_place_of_something_else_counts(fast_path: Path) -> None:
    """Headers of pages that were given up can be left; whoever came last has the blocks."""
    storage = open_store(fast_path, max_bytes=1_000_000, eviction_policy="lru")
    stored = []
    for name in range(40):
        keys = chain(name, 10)
        write(storage, keys)
        stored.append(keys)
    num_before = sum(num_stored(storage, keys) for keys in stored)
    newest = [num_stored(storage, keys) for keys in stored[-4:]]
    storage.close()
    lose_the_index(fast_path)
    storage = open_store(fast_path, max_bytes=1_000_000, eviction_policy="lru")
    verify_index(fast_path)
    assert [num_stored(storage, keys) for keys in stored[-4:]] == newest
    assert sum(num_stored(storage, keys) for keys in stored) >= num_before
    for keys in stored:
        assert set(read(storage, keys)) <= {OK, MISS, SKIPPED}
    # The order of eviction is that of the writes.
    while num_stored(storage, stored[-2]) == 10:
        name += 1
        write(storage, chain(name, 5))
    assert num_stored(storage, stored[-1]) == 10
    storage.close()


@pytest.mark.parametrize("position", [0, 8, 10, 12, 16, 24, 28, 32, 40, 42, 44, 48, 80, 112, 300])
def test_a_header_with_any_byte_changed_is_not_believed(fast_path: Path, position: int) -> None:
    """Its pages are missing afterwards and repaired by the next write; others are as they were."""
    storage = open_store(fast_path)
    first, second = chain(1, 5), chain(2, 5)
    write(storage, first)
    write(storage, second)
    storage.close()
    (headers,) = (fast_path / "data").glob("*.headers")
    patch_file(headers, position, mask=0x10)
    lose_the_index(fast_path)
    storage = open_store(fast_path)
    assert read(storage, first) == [MISS] + [SKIPPED] * 4
    assert read(storage, second) == [OK] * 5
    assert write(storage, first) == [OK] * 5
    assert read(storage, first) == [OK] * 5
    verify_index(fast_path)
    storage.close()


def test_a_header_that_lies_elsewhere_is_not_believed(fast_path: Path) -> None:
    storage = open_store(fast_path)
    keys = chain(1, 5)
    write(storage, keys)
    storage.close()
    (headers,) = (fast_path / "data").glob("*.headers")
    content = headers.read_bytes()
    headers.write_bytes(bytes(BLOCK_BYTES) + content[:-BLOCK_BYTES])
    lose_the_index(fast_path)
    storage = open_store(fast_path)
    assert num_stored(storage, keys) == 0
    assert write(storage, keys) == [OK] * 5
    storage.close()


def test_pages_whose_bytes_are_not_those_of_their_header_are_found_out(fast_path: Path) -> None:
    """As after a power loss, when headers were on the disk and payloads were not."""
    storage = open_store(fast_path)
    keys = chain(1, 5)
    write(storage, keys)
    (third,) = (page for page in list_pages(str(fast_path)) if page.key == keys[2])
    storage.close()
    patch_file(third.file, third.offset)
    lose_the_index(fast_path)
    storage = open_store(fast_path)
    assert read(storage, keys) == [OK, OK, CORRUPT, SKIPPED, SKIPPED]
    assert write(storage, keys) == [PRESENT, PRESENT, OK, PRESENT, PRESENT]
    verify_index(fast_path)
    storage.close()


def test_a_segment_that_was_lost_with_the_index_costs_its_pages(fast_path: Path) -> None:
    storage = open_store(fast_path)
    keys = chain(1, 5)
    write(storage, keys)
    storage.close()
    (segment,) = (fast_path / "data").glob("*.pages")
    segment.unlink()
    lose_the_index(fast_path)
    storage = open_store(fast_path)
    assert num_stored(storage, keys) == 0
    assert write(storage, keys) == [OK] * 5
    assert read(storage, keys) == [OK] * 5
    verify_index(fast_path)
    storage.close()


def test_an_index_is_not_made_again_under_those_who_use_the_store(fast_path: Path) -> None:
    path = fast_path / "store"
    storage = open_store(path)
    keys = chain(1, 5)
    write(storage, keys)
    with pytest.raises(ConfigError, match="in use; stop the processes"):
        rebuild_store(str(path))
    lose_the_index(path)
    with pytest.raises(ConfigError, match="cannot be rebuilt while processes use it"):
        open_store(path, model="other")
    # The one that had it open lets it go and may.
    assert read(storage, keys) == [OK] * 5
    storage.close()
    assert rebuild_store(str(path)) == 5
    storage = open_store(path)
    assert read(storage, keys) == [OK] * 5
    storage.close()
