"""What operators are told about a page store, and what they can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from page_store_tools import (
    CORRUPT,
    MISS,
    OK,
    PAGE_BYTES,
    SKIPPED,
    chain,
    disk_bytes,
    flip,
    namespace,
    num_stored,
    open_store,
    read,
    verify_index,
    write,
)

from hicache.errors import ConfigError
from hicache.storage.page_store import (
    Limits,
    collect_garbage,
    list_pages,
    rebuild_store,
    summarize,
    verify_pages,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_summary_tells_what_there_is(fast_path: Path) -> None:
    storage = open_store(fast_path, max_bytes=3_000_000)
    other = open_store(fast_path, model="other", page_bytes=100)
    write(storage, chain(1, 70))
    write(other, chain(1, 3), page_bytes=100)
    summary = summarize(str(fast_path))
    found = {space.digest: (space.page_bytes, space.num_pages) for space in summary.namespaces}
    assert found == {
        namespace().digest: (PAGE_BYTES, 70),
        namespace("other").digest: (100, 3),
    }
    assert summary.path == str(fast_path)
    assert summary.format_version == 1
    assert summary.limits == Limits(3_000_000, 0)
    assert summary.num_owners == 1
    assert 0 <= disk_bytes(fast_path) - summary.segment_bytes - summary.index_bytes < 100_000
    assert summary.free_bytes == 0
    storage.close()
    other.close()
    summary = summarize(str(fast_path))
    assert summary.limits is None
    # So small a store has groups of four pages, and each has a header.
    used = 70 * 2 + 18 + 3 + 1
    assert summary.segment_bytes - summary.free_bytes == used * 4096


def test_verifying_reads_every_page_and_finds_the_damaged(fast_path: Path) -> None:
    storage = open_store(fast_path)
    keys = chain(1, 200)
    for start in range(0, 200, 10):
        write(storage, keys[start : start + 10], parent=keys[start - 1] if start else b"")
    pages = list(list_pages(str(fast_path)))
    assert [page.key for page in pages] == keys
    assert {page.outcome for page in pages} == {None}
    assert {page.namespace_digest for page in pages} == {namespace().digest}
    flip(pages[37], 4999)
    flip(pages[120])
    for _ in range(2):
        outcomes = [page.outcome for page in verify_pages(str(fast_path))]
        assert [n for n, outcome in enumerate(outcomes) if outcome is not OK] == [37, 120]
        assert outcomes[37] is CORRUPT
    assert num_stored(storage, keys) == 200
    assert len(list(verify_pages(str(fast_path), remove_damaged=True))) == 200
    assert num_stored(storage, keys) == 198
    assert read(storage, keys[36:39]) == [OK, MISS, SKIPPED]
    assert {page.outcome for page in verify_pages(str(fast_path))} == {OK}
    verify_index(fast_path)
    storage.close()


def test_pages_that_go_while_they_are_verified_are_left_out(fast_path: Path) -> None:
    storage = open_store(fast_path)
    write(storage, chain(1, 20))
    pages = verify_pages(str(fast_path))
    assert next(pages).outcome is OK
    storage.clear()
    write(storage, chain(2, 20))
    assert {page.outcome for page in pages} <= {OK}
    storage.close()


def test_the_garbage_collector_gives_free_space_back_to_the_file_system(fast_path: Path) -> None:
    storage = open_store(fast_path)
    keys = chain(1, 300)
    write(storage, keys)
    write(storage, chain(2, 5))
    before = disk_bytes(fast_path)
    assert storage.clear() == 305
    write(storage, keys[:3])
    assert disk_bytes(fast_path) >= before
    report = collect_garbage(str(fast_path))
    assert report.released_bytes > 200 * 8192
    assert disk_bytes(fast_path) <= before - report.released_bytes + 100_000
    assert read(storage, keys[:3]) == [OK] * 3
    assert write(storage, keys)[3:] == [OK] * 297
    assert read(storage, keys) == [OK] * 300
    verify_index(fast_path)
    storage.close()


@pytest.mark.parametrize(
    "ask",
    [
        summarize,
        lambda path: list(list_pages(path)),
        lambda path: list(verify_pages(path)),
        collect_garbage,
        rebuild_store,
    ],
)
def test_what_is_no_store_is_refused_and_left_alone(
    fast_path: Path, ask: Callable[[str], object]
) -> None:
    for path in (fast_path / "nothing", fast_path):
        with pytest.raises(ConfigError, match="no hicache page store"):
            ask(str(path))
    assert list(fast_path.iterdir()) == []
