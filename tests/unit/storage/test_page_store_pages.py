"""What `PageStore` adds to the contract: damage, foreign directories, neighbours, forks."""

from __future__ import annotations

import json
import os
import shutil
import threading
from typing import TYPE_CHECKING

import pytest
from page_store_tools import (
    BLOCK_BYTES,
    CORRUPT,
    LATER,
    MISS,
    OK,
    PAGE_BYTES,
    PRESENT,
    SKIPPED,
    TRUNCATED,
    chain,
    flip,
    namespace,
    num_stored,
    open_store,
    payload_of,
    read,
    verify_index,
    write,
)

from hicache.errors import ClosedError, ConfigError
from hicache.storage.base import HiCacheStorageConfig
from hicache.storage.page_store import PageStore, list_pages, summarize
from hicache.testing.page_buffer import PageBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hicache.storage.page_store import StoredPage
    from hicache.types import PageHash

KEYS = chain(1, 5)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[PageStore]:
    storage = open_store(tmp_path)
    yield storage
    storage.close()


def page_of(path: Path, key: PageHash) -> StoredPage:
    (page,) = (page for page in list_pages(str(path)) if page.key == key)
    return page


def test_pages_of_one_write_lie_next_to_each_other_on_block_boundaries(
    storage: PageStore, tmp_path: Path
) -> None:
    write(storage, KEYS)
    pages = list(list_pages(str(tmp_path)))
    assert [page.key for page in pages] == KEYS
    assert {page.file for page in pages} == {pages[0].file}
    stride = -(-PAGE_BYTES // BLOCK_BYTES) * BLOCK_BYTES
    assert [page.offset - pages[0].offset for page in pages] == [n * stride for n in range(5)]
    assert all(page.offset % BLOCK_BYTES == 0 for page in pages)
    for page in pages:
        with open(page.file, "rb") as file:
            file.seek(page.offset)
            assert file.read(PAGE_BYTES) == payload_of(page.key)


@pytest.mark.usefixtures("plain_io")
def test_a_batch_is_written_and_read_with_one_call(
    storage: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    preadv, pwritev = os.preadv, os.pwritev

    def note_read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(("read", len(buffers)))
        return preadv(fd, buffers, offset)

    def note_write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(("write", len(buffers)))
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", note_read)
    monkeypatch.setattr(os, "pwritev", note_write)
    write(storage, KEYS)
    read(storage, KEYS)
    # Between the pages lies what fills their last blocks; the header is one buffer more.
    assert calls == [("write", 9), ("write", 1), ("read", 9)]


@pytest.mark.parametrize("position", [0, 1, 4095, 4096, PAGE_BYTES - 1])
@pytest.mark.parametrize("mask", [1, 0x80, 0xFF])
def test_one_changed_byte_anywhere_is_never_good_and_is_repaired(
    storage: PageStore, tmp_path: Path, position: int, mask: int
) -> None:
    """C048, C062: the page is dropped, the next write repairs, a counter shows it."""
    write(storage, KEYS)
    flip(page_of(tmp_path, KEYS[2]), position, mask=mask)
    assert read(storage, KEYS) == [OK, OK, CORRUPT, SKIPPED, SKIPPED]
    assert storage.batch_exists(KEYS) == 2
    assert storage.stats().get_outcomes[CORRUPT] == 1
    assert write(storage, KEYS) == [PRESENT, PRESENT, OK, PRESENT, PRESENT]
    assert read(storage, KEYS) == [OK] * 5
    verify_index(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 4096, PAGE_BYTES - 1])
def test_a_segment_cut_within_a_page_is_a_miss_for_every_look_at_it(
    storage: PageStore, tmp_path: Path, length: int
) -> None:
    """C061: also those behind it are gone; what lies before is not."""
    write(storage, KEYS)
    page = page_of(tmp_path, KEYS[2])
    os.truncate(page.file, page.offset + length)
    assert storage.batch_exists(KEYS) == 2
    assert read(storage, KEYS) == [OK, OK, TRUNCATED, SKIPPED, SKIPPED]
    assert write(storage, KEYS) == [PRESENT, PRESENT, OK, OK, OK]
    assert read(storage, KEYS) == [OK] * 5
    verify_index(tmp_path)


def test_a_page_cut_short_is_truncated_although_its_memory_holds_the_right_bytes(
    storage: PageStore, tmp_path: Path
) -> None:
    write(storage, KEYS[:1])
    page = page_of(tmp_path, KEYS[0])
    os.truncate(page.file, page.offset + PAGE_BYTES - 1)
    target = PageBuffer.holding(payload_of(KEYS[0]))
    assert storage.batch_get(KEYS[:1], [b""], [target.page], deadline=LATER) == [TRUNCATED]


@pytest.mark.parametrize("again", [False, True])
def test_a_segment_that_was_deleted_is_a_miss_and_its_pages_are_repaired(
    tmp_path: Path, again: bool
) -> None:
    """C020; a process that still has the file open goes on with the one that is there."""
    storage = open_store(tmp_path)
    write(storage, KEYS)
    os.unlink(page_of(tmp_path, KEYS[0]).file)
    if again:
        storage.close()
        storage = open_store(tmp_path)
        assert read(storage, KEYS)[0] is TRUNCATED
    assert storage.batch_exists(KEYS) == 0
    assert write(storage, KEYS) == [OK] * 5
    storage.close()
    storage = open_store(tmp_path)
    assert read(storage, KEYS) == [OK] * 5
    storage.close()


def test_bytes_of_another_page_are_never_good(storage: PageStore, tmp_path: Path) -> None:
    """C048: two pages that changed places."""
    write(storage, KEYS)
    first, second = page_of(tmp_path, KEYS[0]), page_of(tmp_path, KEYS[1])
    with open(first.file, "r+b") as file:
        for page, key in ((first, KEYS[1]), (second, KEYS[0])):
            file.seek(page.offset)
            file.write(payload_of(key))
    assert read(storage, KEYS)[0] is CORRUPT
    assert read(storage, KEYS[1:])[0] is CORRUPT
    assert write(storage, KEYS) == [OK, OK, PRESENT, PRESENT, PRESENT]


def overwrite_during_read(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    """Let `meanwhile` happen after the next look-up and before its bytes are read."""
    preadv = os.preadv

    def first_meanwhile(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        monkeypatch.setattr(os, "preadv", preadv)
        meanwhile()
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", first_meanwhile)


@pytest.mark.usefixtures("plain_io")
@pytest.mark.parametrize("stored_again", [False, True])
def test_a_page_removed_and_written_over_while_it_is_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored_again: bool
) -> None:
    """C027: the bytes read are another page's; nothing is the matter with any page there is."""
    storage = open_store(tmp_path, max_bytes=700_000)
    write(storage, KEYS)

    def replace() -> None:
        # More than there is room for, so that every block is written again.
        outcomes = write(storage, chain(2, 200))
        assert 0 < outcomes.count(OK) < 200
        if stored_again:
            # The first of these takes the place where they were.
            write(storage, chain(3, 5))
            write(storage, KEYS)

    overwrite_during_read(monkeypatch, replace)
    assert read(storage, KEYS) == [MISS] + [SKIPPED] * 4
    assert read(storage, KEYS) == ([OK] * 5 if stored_again else [MISS] + [SKIPPED] * 4)
    assert set(storage.stats().get_outcomes) <= {OK, MISS, SKIPPED}
    verify_index(tmp_path)
    storage.close()


def test_a_batch_with_pages_that_are_stored_already_fills_the_holes(
    storage: PageStore, tmp_path: Path
) -> None:
    keys = chain(3, 9)
    for index in (1, 2, 5, 8):
        write(storage, [keys[index]], parent=keys[index - 1])
    expected = [OK, PRESENT, PRESENT, OK, OK, PRESENT, OK, OK, PRESENT]
    assert write(storage, keys) == expected
    assert read(storage, keys) == [OK] * 9
    assert num_stored(storage, keys) == 9
    verify_index(tmp_path)


def test_clear_removes_one_namespace_and_no_file_of_anybody_else(tmp_path: Path) -> None:
    """C077, C079."""
    storage, other = open_store(tmp_path), open_store(tmp_path, model="other")
    write(storage, KEYS)
    write(other, KEYS)
    foreign = [tmp_path / "notes.txt", tmp_path / "data" / "notes.txt", tmp_path / "owners" / "me"]
    for path in foreign:
        path.write_bytes(b"mine")
    assert storage.clear() == 5
    assert read(storage, KEYS)[0] is MISS
    assert read(other, KEYS) == [OK] * 5
    storage.close()
    other.close()
    open_store(tmp_path).close()
    assert all(path.read_bytes() == b"mine" for path in foreign)


def test_the_directory_says_what_it_is(tmp_path: Path) -> None:
    storage = open_store(tmp_path)
    record = json.loads((tmp_path / "FORMAT").read_text())
    assert (record["magic"], record["version"]) == ("hicache page store", 1)
    assert record["block_bytes"] == BLOCK_BYTES
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"FORMAT", "UNSYNCED", "index", "data", "owners"}
    storage.close()
    assert list((tmp_path / "owners").iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [b"{}", b"[]", b"\x80\x04c__builtin__\neval\n", b"[" * 100_000, b"\xff", b'{"magic": 1}'],
)
def test_a_directory_of_something_else_is_refused_and_left_alone(
    tmp_path: Path, content: bytes
) -> None:
    """C120: nothing found there is executed."""
    (tmp_path / "FORMAT").write_bytes(content)
    with pytest.raises(ConfigError, match="not that of a hicache page store"):
        open_store(tmp_path)
    assert (tmp_path / "FORMAT").read_bytes() == content


def test_another_format_version_is_refused_by_name(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    record = json.loads((tmp_path / "FORMAT").read_text())
    (tmp_path / "FORMAT").write_text(json.dumps({**record, "version": 7}))
    with pytest.raises(ConfigError, match="format version 7; this version of hicache reads ver"):
        open_store(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "model-0123/namespace.json"])
def test_a_directory_that_is_not_empty_is_no_store_and_left_alone(
    tmp_path: Path, name: str
) -> None:
    """The second is what versions with a file a page wrote."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"no hicache page store and not empty.*one file a page"):
        open_store(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]
    assert file.read_bytes() == b"mine"


@pytest.mark.parametrize("below", [".", "deeper/still"])
def test_a_path_that_is_a_file_or_lies_below_one_is_refused(tmp_path: Path, below: str) -> None:
    """C102: at construction, saying what to do."""
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="set option 'path' to a directory"):
        open_store(file / below)


def test_a_relative_path_means_the_directory_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_store("store")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert write(storage, KEYS) == [OK] * 5
    storage.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "store"]


def test_another_page_length_under_the_same_namespace_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path, page_bytes=64).close()
    with pytest.raises(ConfigError, match="pages of 64 bytes for this very namespace"):
        open_store(tmp_path, page_bytes=128)


def test_a_namespace_is_described_for_people(tmp_path: Path) -> None:
    """C096: a model path of any length works."""
    model = "/models/" + "m" * 4000
    storage = open_store(tmp_path, model=model)
    (found,) = summarize(str(tmp_path)).namespaces
    assert found.description["model"] == model
    assert found.page_bytes == PAGE_BYTES
    storage.close()


@pytest.mark.parametrize("options", [{}, {"path": ""}, {"fsync": True}])
def test_the_directory_must_be_given(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="needs the option 'path'"):
        PageStore(HiCacheStorageConfig(namespace=namespace(), page_bytes=64, extra_config=options))


@pytest.mark.parametrize("option", ["Path", "max_size", "file_storage_path"])
def test_an_unknown_option_is_named_and_so_are_the_known(tmp_path: Path, option: str) -> None:
    """C098."""
    with pytest.raises(ConfigError, match=f"no option '{option}'.*direct_io, eviction_policy"):
        PageStore(
            HiCacheStorageConfig(
                namespace=namespace(),
                page_bytes=64,
                extra_config={"path": str(tmp_path), option: "value"},
            )
        )


def test_no_descriptor_and_no_thread_stays_behind_a_store(tmp_path: Path) -> None:
    for _ in range(2):
        num_before = len(os.listdir("/proc/self/fd")), threading.active_count()
        storages = [open_store(tmp_path, model=str(n), direct_io=bool(n)) for n in range(2)]
        for storage in storages:
            write(storage, KEYS)
            read(storage, KEYS)
            storage.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == num_before


def run_in_fork(body: Callable[[], object]) -> str:
    """Run `body` in a forked process; return what it raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body()
            message = "nothing"
        except BaseException as error:  # noqa: BLE001  # reported to the parent
            message = f"{type(error).__name__}: {error}"
        os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader, "rb") as pipe:
        return pipe.read().decode()


def test_a_forked_process_is_told_that_the_store_is_its_parents(
    storage: PageStore, tmp_path: Path
) -> None:
    write(storage, KEYS)
    closed = run_in_fork(lambda: read(storage, KEYS))
    assert closed.startswith(ClosedError.__name__)
    assert "opened before a fork" in closed
    refused = run_in_fork(lambda: open_store(tmp_path))
    assert refused.startswith(ConfigError.__name__)
    assert "before this process was forked" in refused
    assert run_in_fork(storage.close) == "nothing"
    assert run_in_fork(lambda: write(open_store(tmp_path.parent / "other"), KEYS)) == "nothing"
    assert read(storage, KEYS) == [OK] * 5
    shutil.rmtree(tmp_path.parent / "other")


def test_a_forked_process_does_not_keep_what_its_parent_had_leased(tmp_path: Path) -> None:
    """Else a parent that died would seem to live as long as its child does."""
    storage = open_store(tmp_path)
    write(storage, KEYS)
    (lock,) = (tmp_path / "owners").iterdir()

    def has_no_descriptor() -> None:
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert str(lock) not in links

    assert run_in_fork(has_no_descriptor) == "nothing"
    storage.close()
