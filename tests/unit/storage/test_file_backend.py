"""What `FileStorage` adds to the contract: damage, foreign files, full disks, descriptors."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from hicache.clock import ManualClock
from hicache.errors import ConfigError
from hicache.hashing import StorageNamespace
from hicache.storage.base import HiCacheStorageConfig
from hicache.storage.file import FileStorage
from hicache.storage.page_file import HEADER_BYTES
from hicache.testing.page_buffer import PageBuffer
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PAGE_BYTES = 1500
FILE_BYTES = HEADER_BYTES + PAGE_BYTES
LATER = 1e9
OK, PRESENT, MISS = PageOutcome.OK, PageOutcome.PRESENT, PageOutcome.MISS
CORRUPT, FOREIGN, TRUNCATED = PageOutcome.CORRUPT, PageOutcome.FOREIGN, PageOutcome.TRUNCATED
FAILED, NO_SPACE, SKIPPED = PageOutcome.FAILED, PageOutcome.NO_SPACE, PageOutcome.SKIPPED

KEYS = [PageHash(bytes([index]) * 32) for index in range(4)]
CHAIN = [b"", *KEYS[:-1]]
PAYLOADS = [bytes([index + 1]) * PAGE_BYTES for index in range(4)]
SOURCES = [PageBuffer.holding(payload) for payload in PAYLOADS]


def make_config(**extra_config: object) -> HiCacheStorageConfig:
    namespace = StorageNamespace(
        model="model",
        weights_revision="1",
        dtype="float16",
        layout="page_first",
        page_size=16,
        kv_shape="mha:layers=2,heads=2,head_dim=8",
    )
    return HiCacheStorageConfig(
        namespace=namespace, page_bytes=PAGE_BYTES, extra_config=extra_config, clock=ManualClock()
    )


def set_pages(storage: FileStorage, num_pages: int = 4) -> list[PageOutcome]:
    pages = [source.page for source in SOURCES[:num_pages]]
    return storage.batch_set(KEYS[:num_pages], CHAIN[:num_pages], pages, deadline=LATER)


def get_pages(storage: FileStorage, num_pages: int = 4) -> tuple[list[PageOutcome], list[bytes]]:
    """Return the outcomes and the payloads of the pages that are `OK`."""
    targets = [PageBuffer(PAGE_BYTES) for _ in range(num_pages)]
    pages = [target.page for target in targets]
    outcomes = storage.batch_get(KEYS[:num_pages], pages, deadline=LATER)
    num_ok = outcomes.count(OK)
    return outcomes, [target.read() for target in targets[:num_ok]]


def page_path(root: Path, index: int) -> Path:
    name = KEYS[index].hex()
    (directory,) = root.glob("model-*")
    return directory / name[:2] / f"{name}.kv"


def temporary_files(root: Path) -> list[Path]:
    return list(root.glob("*/tmp/*"))


@pytest.fixture
def storage(tmp_path: Path) -> FileStorage:
    return FileStorage(make_config(path=str(tmp_path)))


def test_a_page_lies_where_the_documentation_says(storage: FileStorage, tmp_path: Path) -> None:
    set_pages(storage)
    content = page_path(tmp_path, 3).read_bytes()
    assert content[HEADER_BYTES:] == PAYLOADS[3]
    assert content[56:88] == KEYS[3]
    assert content[88:120] == KEYS[2]
    assert temporary_files(tmp_path) == []


@pytest.mark.parametrize("position", [0, 8, 24, 60, 100, 121, 3000, 4095, 4096, 5000, -1])
def test_one_flipped_byte_anywhere_is_never_good_and_is_repaired(
    storage: FileStorage, tmp_path: Path, position: int
) -> None:
    """Cases C048 and C062: the file is dropped, the next write repairs, a counter shows it."""
    set_pages(storage)
    content = bytearray(page_path(tmp_path, 1).read_bytes())
    content[position] ^= 0x01
    page_path(tmp_path, 1).write_bytes(content)

    bad = FOREIGN if position == 0 else CORRUPT
    assert get_pages(storage) == ([OK, bad, SKIPPED, SKIPPED], PAYLOADS[:1])
    assert not page_path(tmp_path, 1).exists()
    assert storage.stats().get_outcomes[bad] == 1
    assert set_pages(storage) == [PRESENT, OK, PRESENT, PRESENT]
    assert get_pages(storage) == ([OK] * 4, PAYLOADS)


@pytest.mark.parametrize("length", [0, 1, 100, HEADER_BYTES, HEADER_BYTES + 1, FILE_BYTES - 1])
def test_a_cut_file_is_a_miss_for_every_look_at_it(
    storage: FileStorage, tmp_path: Path, length: int
) -> None:
    """Case C061."""
    set_pages(storage)
    os.truncate(page_path(tmp_path, 2), length)
    assert storage.batch_exists(KEYS) == 2
    assert get_pages(storage) == ([OK, OK, TRUNCATED, SKIPPED], PAYLOADS[:2])
    assert set_pages(storage)[2] is OK


def test_a_file_cut_between_the_look_at_its_length_and_the_read_is_truncated(
    storage: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the page's memory happens to hold the bytes that were not read."""
    set_pages(storage)
    fstat = os.fstat

    def fstat_then_cut(fd: int) -> os.stat_result:
        monkeypatch.setattr(os, "fstat", fstat)
        status = fstat(fd)
        os.truncate(page_path(tmp_path, 0), HEADER_BYTES + 1)
        return status

    monkeypatch.setattr(os, "fstat", fstat_then_cut)
    outcomes = storage.batch_get(KEYS[:1], [SOURCES[0].page], deadline=LATER)
    assert outcomes == [TRUNCATED]


def test_a_file_that_grew_is_damaged(storage: FileStorage, tmp_path: Path) -> None:
    set_pages(storage)
    with page_path(tmp_path, 0).open("ab") as file:
        file.write(b"x")
    assert storage.batch_exists(KEYS) == 0
    assert get_pages(storage)[0][0] is CORRUPT


def test_two_files_that_changed_places_are_foreign(storage: FileStorage, tmp_path: Path) -> None:
    """Case C048."""
    set_pages(storage)
    first, second, spare = page_path(tmp_path, 0), page_path(tmp_path, 1), tmp_path / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    assert get_pages(storage)[0] == [FOREIGN, SKIPPED, SKIPPED, SKIPPED]
    assert set_pages(storage) == [OK, OK, PRESENT, PRESENT]


def test_a_file_of_another_namespace_under_our_name_is_replaced_by_a_write(
    storage: FileStorage, tmp_path: Path
) -> None:
    set_pages(storage)
    content = bytearray(page_path(tmp_path, 0).read_bytes())
    content[24:56] = bytes(32)
    page_path(tmp_path, 0).write_bytes(content)
    assert set_pages(storage) == [OK, PRESENT, PRESENT, PRESENT]
    assert get_pages(storage) == ([OK] * 4, PAYLOADS)


def test_a_fifo_in_place_of_a_page_does_not_hang(storage: FileStorage, tmp_path: Path) -> None:
    """Case C048."""
    set_pages(storage)
    for attempt in (get_pages, set_pages):
        page_path(tmp_path, 1).unlink()
        os.mkfifo(page_path(tmp_path, 1))
        assert storage.batch_exists(KEYS) == 1
        attempt(storage)
        assert set_pages(storage)[1].good
        assert get_pages(storage) == ([OK] * 4, PAYLOADS)


def test_a_directory_in_place_of_a_page_is_a_failure_and_no_more(
    storage: FileStorage, tmp_path: Path
) -> None:
    page_path(tmp_path, 0).mkdir(parents=True)
    assert set_pages(storage) == [FAILED, SKIPPED, SKIPPED, SKIPPED]
    assert get_pages(storage)[0] == [FOREIGN, SKIPPED, SKIPPED, SKIPPED]
    assert "IsADirectoryError" in str(storage.stats().last_error)
    assert temporary_files(tmp_path) == []


def test_a_damaged_page_replaced_meanwhile_is_left_alone(
    storage: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C027: a reader of the old file must not remove the new one."""
    set_pages(storage)
    os.truncate(page_path(tmp_path, 0), 5000)
    fstat = os.fstat

    def repair_then_fstat(fd: int) -> os.stat_result:
        monkeypatch.setattr(os, "fstat", fstat)
        set_pages(storage)
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", repair_then_fstat)
    assert get_pages(storage)[0][0] is TRUNCATED
    assert get_pages(storage) == ([OK] * 4, PAYLOADS)


def fail_after_half(error: int) -> Callable[[int, Sequence[memoryview]], int]:
    """Return a `writev` that writes one buffer and then fails, over and over."""
    writev = os.writev
    num_calls = 0

    def writes_half(fd: int, buffers: Sequence[memoryview]) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 2 == 0:
            raise OSError(error, os.strerror(error))
        return writev(fd, buffers[:1])

    return writes_half


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(errno.ENOSPC, NO_SPACE), (errno.EDQUOT, NO_SPACE), (errno.EIO, FAILED)],
)
def test_a_write_that_fails_half_way_leaves_nothing(
    storage: FileStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: int,
    outcome: PageOutcome,
) -> None:
    """Case C018: fewer bytes taken than given, then no space."""
    set_pages(storage, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fail_after_half(error))
        assert set_pages(storage) == [PRESENT, outcome, SKIPPED, SKIPPED]
    assert temporary_files(tmp_path) == []
    assert os.strerror(error) in str(storage.stats().last_error)
    assert storage.batch_exists(KEYS) == 1
    assert set_pages(storage) == [PRESENT, OK, OK, OK]


def test_a_disk_that_is_full_can_still_be_opened_and_read(
    storage: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pages(storage)
    monkeypatch.setattr(os, "writev", fail_after_half(errno.ENOSPC))
    assert get_pages(FileStorage(make_config(path=str(tmp_path)))) == ([OK] * 4, PAYLOADS)


def test_a_read_error_is_a_failure_and_keeps_the_page(
    storage: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pages(storage)

    def fails(fd: int, buffers: Sequence[memoryview]) -> int:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", fails)
        assert get_pages(storage)[0] == [FAILED, SKIPPED, SKIPPED, SKIPPED]
    assert get_pages(storage) == ([OK] * 4, PAYLOADS)


def test_no_descriptor_stays_open(
    storage: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_before = len(os.listdir("/proc/self/fd"))
    for serial in range(500):
        set_pages(storage, 2)
        get_pages(storage, 3)
        os.truncate(page_path(tmp_path, 0), serial)
        get_pages(storage, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", fail_after_half(errno.ENOSPC))
            set_pages(storage, 1)
    assert len(os.listdir("/proc/self/fd")) == num_before


def test_clear_removes_pages_and_nothing_else(storage: FileStorage, tmp_path: Path) -> None:
    """Cases C077 and C079."""
    set_pages(storage)
    (directory,) = tmp_path.glob("model-*")
    shard = page_path(tmp_path, 0).parent
    name = KEYS[0].hex()
    foreign = [
        tmp_path / "notes.txt",
        directory / "notes.txt",
        directory / f"{name}.kv",
        directory / "not-a-shard" / f"{name}.kv",
        shard / "notes.txt",
        shard / f"{name}.kv.bak",
        shard / f"{KEYS[1].hex()}.kv",
        shard / f"{name.upper().replace('0', 'A')}.kv",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{'ff' * 32}.kv").write_bytes(b"mine")
    (directory / "ff").symlink_to(outside)

    assert storage.clear() == 4
    assert storage.clear() == 0
    assert get_pages(storage)[0][0] is MISS
    assert all(path.read_bytes() == b"mine" for path in foreign)
    assert (outside / f"{'ff' * 32}.kv").exists()
    assert (directory / "namespace.json").exists()


def test_a_store_whose_directories_were_removed_under_it_misses_and_fails_without_raising(
    storage: FileStorage, tmp_path: Path
) -> None:
    set_pages(storage)
    (directory,) = tmp_path.glob("model-*")
    directory.rename(tmp_path / "elsewhere")
    assert storage.batch_exists(KEYS) == 0
    assert get_pages(storage)[0][0] is MISS
    assert set_pages(storage)[0] is FAILED


@pytest.mark.parametrize(
    ("fsync", "expected"),
    [(False, ["replace"]), (True, ["fsync file", "replace", "fsync directory", "fsync directory"])],
)
def test_with_fsync_a_page_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool, expected: list[str]
) -> None:
    storage = FileStorage(make_config(path=str(tmp_path), fsync=fsync))
    set_pages(storage, 1)
    storage.clear()
    calls: list[str] = []
    replace = os.replace

    def note_fsync(fd: int) -> None:
        is_directory = os.path.isdir(f"/proc/self/fd/{fd}")
        calls.append("fsync directory" if is_directory else "fsync file")

    def note_replace(source: str, target: str) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    assert set_pages(storage, 1) == [OK]
    assert calls == expected


@pytest.mark.parametrize("options", [{}, {"path": ""}, {"fsync": True}])
def test_the_directory_must_be_given(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="needs the option 'path'"):
        FileStorage(make_config(**options))


@pytest.mark.parametrize("option", ["Path", "max_size", "file_storage_path"])
def test_an_unknown_option_is_named_and_so_are_the_known(tmp_path: Path, option: str) -> None:
    """Case C098."""
    with pytest.raises(ConfigError, match=f"no option '{option}'.*known options: fsync, path"):
        FileStorage(make_config(path=str(tmp_path), **{option: "value"}))
