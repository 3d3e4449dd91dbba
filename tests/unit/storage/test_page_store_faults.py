"""Whatever the disk does to the page store becomes an outcome, and it comes back by itself."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from typing import TYPE_CHECKING

import lmdb
import pytest
from page_store_tools import (
    FAILED,
    LATER,
    MISS,
    NO_SPACE,
    OK,
    PRESENT,
    SKIPPED,
    break_moves,
    chain,
    num_stored,
    open_store,
    payload_of,
    read,
    verify_index,
    write,
)

from hicache.errors import ConfigError, StorageError
from hicache.storage import native_io
from hicache.storage.page_store import native_transfer, segments, summarize
from hicache.testing.page_buffer import PageBuffer
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from hicache.storage.page_store import PageStore

KEYS = chain(1, 4)
TIMEOUT = PageOutcome.TIMEOUT


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[PageStore]:
    storage = open_store(tmp_path)
    yield storage
    storage.close()


def failing(error: int) -> Callable[..., int]:
    def fails(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    return fails


LARGE_PAGE_BYTES = 600_000


@pytest.fixture
def page_a_call(either_io: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of `LARGE_PAGE_BYTES` are each written by a call of its own, in C as in Python."""
    monkeypatch.setattr(native_transfer, "_CALL_BYTES", LARGE_PAGE_BYTES)


@pytest.mark.usefixtures("page_a_call")
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errno.ENOSPC, NO_SPACE),
        (errno.EDQUOT, NO_SPACE),
        (errno.EFBIG, NO_SPACE),
        (errno.EIO, FAILED),
        (errno.EROFS, FAILED),
    ],
)
@pytest.mark.parametrize("num_calls", [0, 1, 2])
def test_a_write_that_fails_half_way_publishes_what_was_whole_and_loses_no_space(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: int,
    outcome: PageOutcome,
    num_calls: int,
) -> None:
    """C018, C021."""
    page_bytes = LARGE_PAGE_BYTES
    storage = open_store(tmp_path, page_bytes=page_bytes)
    write(storage, chain(9, 1), page_bytes=page_bytes)
    free = summarize(str(tmp_path)).segment_bytes
    with monkeypatch.context() as patch:
        break_moves(patch, "write", error, first=num_calls)
        # With the pages also their header cannot be written, so that none is stored.
        outcomes = write(storage, KEYS, page_bytes=page_bytes)
    assert outcomes == [outcome, SKIPPED, SKIPPED, SKIPPED]
    assert os.strerror(error) in str(storage.stats().last_error)
    assert num_stored(storage, KEYS) == 0
    verify_index(tmp_path)
    assert write(storage, KEYS, page_bytes=page_bytes) == [OK] * 4
    assert read(storage, KEYS, page_bytes=page_bytes) == [OK] * 4
    assert summarize(str(tmp_path)).segment_bytes <= max(2 * free, 4 << 20)
    storage.close()


@pytest.mark.usefixtures("page_a_call")
def test_pages_before_one_that_could_not_be_written_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_store(tmp_path, page_bytes=LARGE_PAGE_BYTES)
    # The third page, and its second try in Python; the header goes well.
    break_moves(monkeypatch, "write", errno.EIO, first=2, last=3 if native_io.HAS_NATIVE_IO else 2)
    assert write(storage, KEYS, page_bytes=LARGE_PAGE_BYTES) == [OK, OK, FAILED, SKIPPED]
    assert read(storage, KEYS, page_bytes=LARGE_PAGE_BYTES) == [OK, OK, MISS, SKIPPED]
    verify_index(tmp_path)
    storage.close()


def test_a_read_error_is_a_failure_and_keeps_the_page(
    either_io: None, storage: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(storage, KEYS)
    with monkeypatch.context() as patch:
        break_moves(patch, "read", errno.EIO)
        assert read(storage, KEYS) == [FAILED, SKIPPED, SKIPPED, SKIPPED]
        assert storage.batch_exists(KEYS) == 4
    assert "Input/output error" in str(storage.stats().last_error)
    assert read(storage, KEYS) == [OK] * 4


@pytest.mark.usefixtures("either_io")
def test_a_disk_that_is_full_at_times_costs_what_is_written_then_and_nothing_else(
    tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    """C021: it is the kernel that says so."""
    storage = open_store(tmp_path)
    for name in range(10):
        keys = chain(100 + name, 20)
        assert write(storage, keys) == [OK] * 20
        with full_disk():
            assert write(storage, chain(200 + name, 20)) == [NO_SPACE] + [SKIPPED] * 19
            assert write(storage, keys) == [PRESENT] * 20
            assert read(storage, keys) == [OK] * 20
        assert num_stored(storage, chain(200 + name, 20)) == 0
        verify_index(tmp_path)
    for name in range(10):
        assert read(storage, chain(100 + name, 20)) == [OK] * 20
    storage.close()


def test_a_file_system_that_has_no_more_space_is_used_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be reserved is made room for, and what is stored can be read."""
    storage = open_store(tmp_path, eviction_policy="lru")
    first = chain(2, 60)
    write(storage, first)
    monkeypatch.setattr(segments, "reserve_range", failing(errno.ENOSPC))
    for name in range(10, 30):
        keys = chain(name, 60)
        assert write(storage, keys) == [OK] * 60
        assert read(storage, keys) == [OK] * 60
    assert storage.batch_exists(first) == 0
    verify_index(tmp_path)
    storage.close()


def test_a_new_store_without_any_space_answers_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "reserve_range", failing(errno.ENOSPC))
    storage = open_store(tmp_path)
    assert write(storage, KEYS) == [NO_SPACE, SKIPPED, SKIPPED, SKIPPED]
    monkeypatch.undo()
    assert write(storage, KEYS) == [OK] * 4
    storage.close()


def test_a_file_system_that_can_neither_reserve_nor_punch_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "reserve_range", lambda *_: False)
    monkeypatch.setattr(segments, "punch_range", lambda *_: False)
    for max_bytes in (1_500_000, 800_000):
        storage = open_store(tmp_path, max_bytes=max_bytes)
        for name in range(12):
            keys = chain(max_bytes + name, 20)
            assert write(storage, keys)[0] in (OK, NO_SPACE)
            found = storage.batch_exists(keys)
            assert read(storage, keys)[:found] == [OK] * found
        assert summarize(str(tmp_path)).segment_bytes <= 1_500_000
        verify_index(tmp_path)
        storage.close()


@pytest.mark.parametrize("how", ["moved away and back", "deleted and made again"])
def test_a_directory_that_vanishes_is_a_failure_until_it_is_there_again(
    tmp_path: Path, how: str
) -> None:
    path = tmp_path / "store"
    storage = open_store(path)
    write(storage, KEYS)
    path.rename(tmp_path / "elsewhere")
    for _ in range(2):
        with pytest.raises(StorageError, match="No such file or directory"):
            storage.batch_exists(KEYS)
        assert read(storage, KEYS) == [FAILED, SKIPPED, SKIPPED, SKIPPED]
        assert write(storage, KEYS) == [FAILED, SKIPPED, SKIPPED, SKIPPED]
    assert "No such file or directory" in str(storage.stats().last_error)
    assert not path.exists()
    if how == "moved away and back":
        (tmp_path / "elsewhere").rename(path)
        assert read(storage, KEYS) == [OK] * 4
    else:
        shutil.rmtree(tmp_path / "elsewhere")
        path.mkdir()
        assert read(storage, KEYS)[0] is MISS
    assert all(outcome.good for outcome in write(storage, KEYS))
    assert read(storage, KEYS) == [OK] * 4
    verify_index(path)
    storage.close()


def test_what_is_left_of_a_disk_that_is_no_longer_mounted_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    storage = open_store(path)
    write(storage, KEYS)
    path.rename(tmp_path / "elsewhere")
    path.mkdir()
    monkeypatch.setattr(storage._access, "_device", -1)
    assert write(storage, KEYS)[0] is FAILED
    assert list(path.iterdir()) == []
    path.rmdir()
    (tmp_path / "elsewhere").rename(path)
    assert read(storage, KEYS) == [OK] * 4
    storage.close()


def test_files_that_may_not_be_larger_are_no_space(tmp_path: Path) -> None:
    """In a process of its own, whose limit holds for index and segments alike."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        storage = open_store(tmp_path)
        results = [write(storage, chain(name, 40)) for name in range(20)]
        found = [storage.batch_exists(chain(name, 40)) for name in range(20)]
        read_back = [read(storage, chain(name, 40))[: found[name]] for name in range(20)]
        kinds = {outcome.value for outcomes in results for outcome in outcomes}
        sound = all(set(outcomes) <= {OK} for outcomes in read_back)
        os.write(writer, f"{sound} {sum(found) > 0} {' '.join(sorted(kinds))}".encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        answer = pipe.read().split()
    os.waitpid(pid, 0)
    assert answer[:2] == ["True", "True"]
    assert set(answer[2:]) <= {"ok", "present", "no_space", "skipped", "failed"}


def test_a_directory_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A test can run as root, who may write everywhere.
    monkeypatch.setattr(os, "open", failing(errno.EACCES))
    with pytest.raises(ConfigError, match=r"Permission denied.*can create and write in"):
        open_store(tmp_path)


def test_another_process_of_the_same_number_is_an_error_that_names_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers that do not share process numbers: LMDB tells processes apart by those."""

    def has_this_ones_place(*_: object, **__: object) -> object:
        raise lmdb.LockError("Resource temporarily unavailable")

    monkeypatch.setattr(lmdb, "open", has_this_ones_place)
    with pytest.raises(ConfigError, match=f"number of this one, {os.getpid()}.*hostPID"):
        open_store(tmp_path)


@pytest.mark.usefixtures("either_io")
def test_a_file_that_cannot_be_opened_is_an_error_and_keeps_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of a process without descriptors: its pages are not "cut short"."""
    with contextlib.closing(open_store(tmp_path)) as storage:
        write(storage, KEYS)
    storage = open_store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(errno.EMFILE))
        with pytest.raises(StorageError, match="Too many open files"):
            storage.batch_exists(KEYS)
        assert read(storage, KEYS) == [FAILED, SKIPPED, SKIPPED, SKIPPED]
        assert write(storage, KEYS) == [FAILED, SKIPPED, SKIPPED, SKIPPED]
    assert storage.batch_exists(KEYS) == 4
    assert read(storage, KEYS) == [OK] * 4
    storage.close()


class TickingClock:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += 1.0
        return self.seconds


def test_a_deadline_that_passes_within_a_batch_ends_it_between_pages(tmp_path: Path) -> None:
    page_bytes = 9_000_000
    storage = open_store(tmp_path, page_bytes=page_bytes)
    storage._clock = TickingClock()
    sources = [PageBuffer.holding(payload_of(key, page_bytes)) for key in KEYS]
    pages = [source.page for source in sources]
    outcomes = storage.batch_set(KEYS, [b"", *KEYS[:-1]], pages, deadline=5.0)
    assert outcomes == [OK, OK, OK, TIMEOUT]
    assert storage.batch_exists(KEYS) == 3
    outcomes = storage.batch_get(
        KEYS, [b"", *KEYS[:-1]], pages, deadline=storage._clock.seconds + 3
    )
    assert outcomes == [OK, OK, TIMEOUT, TIMEOUT]
    assert storage.batch_get(KEYS[:3], [b"", *KEYS[:2]], pages[:3], deadline=LATER) == [OK] * 3
    storage.close()
