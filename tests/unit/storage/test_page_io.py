"""The native module against Python's own files and checksums."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import sysconfig
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import xxhash

from hicache.storage.native_io import HAS_NATIVE_IO

if HAS_NATIVE_IO:
    from hicache.storage import _page_io

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_native = pytest.mark.skipif(not HAS_NATIVE_IO, reason="the native module was not built")

LENGTHS = [1, 7, 300, 4096, 65_536, 200_000]
Pages = list[tuple[tuple[int, int], ...]]


class Sample(NamedTuple):
    """Pages in memory, of one piece or more, with gaps between them on the disk."""

    memory: np.ndarray[tuple[int], np.dtype[np.uint8]]
    pages: Pages
    gap_bytes: int

    def payloads(self) -> list[bytes]:
        base = self.memory.ctypes.data
        return [
            b"".join(bytes(self.memory[at - base : at - base + length]) for at, length in page)
            for page in self.pages
        ]

    def checksums(self) -> bytes:
        return b"".join(map(xxhash.xxh3_128_digest, self.payloads()))


def draw(rng: random.Random) -> Sample:
    num_pages, num_pieces = rng.randrange(1, 20), rng.randrange(1, 4)
    memory = np.frombuffer(bytearray(rng.randbytes(12 << 20)), dtype=np.uint8)
    pages: Pages = []
    at = memory.ctypes.data
    for _ in range(num_pages):
        page = []
        for _ in range(num_pieces):
            at += rng.choice([0, 0, 13])
            length = rng.choice(LENGTHS)
            page.append((at, length))
            at += length
        pages.append(tuple(page))
    return Sample(memory, pages, rng.choice([0, 0, 100, 4095]))


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@contextlib.contextmanager
def mapped(places: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int, int]]]:
    """Give places of one file with its mapping."""
    fd, num_bytes = places[0][0], 1 << 30
    mapping = _page_io.map_file(fd, num_bytes)
    yield [(*place, mapping) for place in places]
    _page_io.unmap(mapping, num_bytes)


@needs_native
@pytest.mark.parametrize("seed", range(12))
def test_what_is_written_from_pages_is_read_into_others_with_the_checksums_of_both(
    fd: int, seed: int
) -> None:
    rng = random.Random(seed)
    sample = draw(rng)
    num_pages, gap = len(sample.pages), sample.gap_bytes
    payloads, checksums = sample.payloads(), sample.checksums()
    on_disk = bytes(gap).join(payloads)
    cut = rng.randrange(len(on_disk) + 1)
    places = [(fd, 5000, cut), (fd, 50 << 20, len(on_disk) - cut)]
    for num_requests in (1, rng.randrange(2, 17)):
        arguments = (gap, rng.choice([1000, 65_536, 1 << 20]), num_requests)
        os.ftruncate(fd, 0)
        assert _page_io.write_pages(places, sample.pages, 0, num_pages, *arguments) == checksums
        assert os.pread(fd, cut, 5000) + os.pread(fd, len(on_disk) - cut, 50 << 20) == on_disk
        sample.memory[:] = 0
        assert _page_io.read_pages(places, sample.pages, 0, num_pages, *arguments) == checksums
        assert sample.payloads() == payloads
        sample.memory[:] = 0
        with mapped(places) as there:
            assert _page_io.read_pages(there, sample.pages, 0, num_pages, *arguments) == checksums
        assert sample.payloads() == payloads
        first = rng.randrange(num_pages)
        place = (fd, 5000, len(payloads[first]))
        found = _page_io.write_pages([place], sample.pages, first, 1, *arguments)
        assert found == xxhash.xxh3_128_digest(payloads[first])


@pytest.fixture
def direct_fd(tmp_path: Path) -> Iterator[int]:
    try:
        fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        block = mmap.mmap(-1, 512)
        os.pwrite(fd, block, 0)
    except OSError as error:
        pytest.skip(f"the file system knows no direct I/O of 512 bytes ({error})")
    yield fd
    os.close(fd)


@needs_native
@pytest.mark.parametrize("num_requests", [2, 3, 16])
@pytest.mark.parametrize("gap_bytes", [0, 3584])
def test_what_comes_before_a_mark_is_on_the_disk_when_it_is_reached(
    direct_fd: int, tmp_path: Path, num_requests: int, gap_bytes: int
) -> None:
    """With direct I/O, which takes whole sectors only: wherever requests end."""
    page_bytes, num_pages = 4608, 12
    memory = mmap.mmap(-1, page_bytes * num_pages)
    memory[:] = random.Random(num_requests).randbytes(len(memory))
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    pages = [((address + n * page_bytes, page_bytes),) for n in range(num_pages)]
    payloads = [memory[n * page_bytes : (n + 1) * page_bytes] for n in range(num_pages)]
    on_disk = bytes(gap_bytes).join(payloads)
    checksums = b"".join(map(xxhash.xxh3_128_digest, payloads))
    for mark in range(1, num_pages):
        os.ftruncate(direct_fd, 0)
        seen: list[tuple[bytes, bytes]] = []

        def reach(found: bytes, seen: list[tuple[bytes, bytes]] = seen) -> None:
            seen.append((found, (tmp_path / "direct").read_bytes()))

        places = [(direct_fd, 0, len(on_disk))]
        arguments = (pages, 0, num_pages, gap_bytes, 8192, num_requests, mark, reach)
        assert _page_io.write_pages(places, *arguments) == checksums
        ((found, content),) = seen
        assert found == checksums[: 16 * mark]
        before = bytes(gap_bytes).join(payloads[:mark])
        assert content[: len(before)] == before
        assert (tmp_path / "direct").read_bytes() == on_disk


@needs_native
@pytest.mark.parametrize("seed", range(12))
def test_places_that_are_too_small_are_filled_and_that_is_an_error(fd: int, seed: int) -> None:
    rng = random.Random(seed)
    sample = draw(rng)
    on_disk = bytes(sample.gap_bytes).join(sample.payloads())
    room = rng.randrange(len(on_disk))
    for num_requests in (1, 4):
        os.ftruncate(fd, 0)
        arguments = (sample.pages, 0, len(sample.pages), sample.gap_bytes, 65_536, num_requests)
        with pytest.raises(OSError, match="Invalid argument"):
            _page_io.write_pages([(fd, 0, room)], *arguments)
        assert os.pread(fd, len(on_disk), 0) == on_disk[:room]


@needs_native
@pytest.mark.parametrize("seed", range(12))
def test_at_the_end_of_a_file_the_pages_before_it_are_read(fd: int, seed: int) -> None:
    rng = random.Random(seed)
    sample = draw(rng)
    payloads = sample.payloads()
    on_disk = bytes(sample.gap_bytes).join(payloads)
    left = rng.randrange(len(on_disk))
    os.pwrite(fd, on_disk[:left], 0)
    ends = np.cumsum([len(payload) + sample.gap_bytes for payload in payloads]) - sample.gap_bytes
    whole = int(np.searchsorted(ends, left, side="right"))
    checksums = sample.checksums()
    arguments = (sample.pages, 0, len(payloads), sample.gap_bytes, 65_536)
    places = [(fd, 0, len(on_disk))]
    with mapped(places) as there:
        for how in ((places, 1), (places, 4), (there, 1)):
            sample.memory[:] = 0
            found = _page_io.read_pages(how[0], *arguments, how[1])
            assert found == checksums[: 16 * whole]
            assert sample.payloads()[:whole] == payloads[:whole]


@needs_native
@pytest.mark.parametrize("requests", [1, 4])
def test_errors_of_the_kernel_are_raised(fd: int, tmp_path: Path, requests: int) -> None:
    page = PAGE
    read_only = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _page_io.write_pages([(read_only, 0, 100)], [page], 0, 1, 0, 100, requests)
    os.close(read_only)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _page_io.read_pages([(read_only, 0, 100)], [page], 0, 1, 0, 100, requests)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _page_io.read_pages([(read_only, 0, 100, 4096)], [page], 0, 1, 0, 100, requests)
    with pytest.raises(OSError, match="Invalid argument"):
        _page_io.write_pages([(fd, 0, 99)], [page], 0, 1, 0, 100, requests)


@needs_native
@pytest.mark.parametrize(
    "bad", [None, (), [1], ((1, 5),), ((1, 3), (2, 0)), ((1, 3), (9, 2)), ((1,),)]
)
def test_pages_have_a_length_or_one_of_them_has_not(bad: object) -> None:
    pages: list[Any] = [((1, 4),), ((1, 1), (9, 3))] * 20
    assert _page_io.have_length(pages, 4)
    assert _page_io.have_length([], 4)
    for position in (0, 7, 39):
        changed = [*pages]
        changed[position] = bad
        assert not _page_io.have_length(changed, 4)
    with pytest.raises(TypeError):
        _page_io.have_length(7, 4)  # type: ignore[arg-type]


MEMORY = np.zeros(100, dtype=np.uint8)
PAGE = ((MEMORY.ctypes.data, 100),)


@needs_native
@pytest.mark.parametrize(
    ("pages", "first", "num_pages", "error"),
    [
        ([PAGE], 0, 2, ValueError),
        ([PAGE], 1, 1, ValueError),
        ([PAGE], -1, 1, ValueError),
        ([PAGE], 0, -1, ValueError),
        ([()], 0, 1, TypeError),
        ([[PAGE[0]]], 0, 1, TypeError),
        ([((1, 2, 3),)], 0, 1, TypeError),
        ([(("a", 2),)], 0, 1, TypeError),
        ([((0, 2),)], 0, 1, ValueError),
        ([((1, 0),)], 0, 1, ValueError),
        ([((1, -1),)], 0, 1, OverflowError),
        (7, 0, 1, TypeError),
    ],
)
def test_what_cannot_be_pages_is_refused(
    pages: Pages, first: int, num_pages: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        _page_io.read_pages([], pages, first, num_pages, 0, 1, 1)


@needs_native
@pytest.mark.parametrize(
    ("places", "numbers", "error"),
    [
        ([(0, 0)], (0, 1, 1), TypeError),
        ([(0, 0, 1, 1, 1)], (0, 1, 1), TypeError),
        ([(0, 0, 1, "a")], (0, 1, 1), TypeError),
        ([("a", 0, 1)], (0, 1, 1), TypeError),
        ([(0, -1, 1)], (0, 1, 1), OverflowError),
        (7, (0, 1, 1), TypeError),
        ([], (-1, 1, 1), ValueError),
        ([], (5000, 1, 1), ValueError),
        ([], (0, 0, 1), ValueError),
        ([], (0, 1, 0), ValueError),
        ([], (0, 1, 17), ValueError),
    ],
)
def test_what_cannot_be_places_or_cuts_is_refused(
    places: list[tuple[int, int, int]], numbers: tuple[int, int, int], error: type[Exception]
) -> None:
    with pytest.raises(error):
        _page_io.read_pages(places, [PAGE], 0, 1, *numbers)


@needs_native
def test_no_pages_are_no_checksums() -> None:
    for num_requests in (1, 4):
        assert _page_io.read_pages([], [], 0, 0, 0, 1, num_requests) == b""


def test_where_it_can_be_compiled_the_native_module_was_built() -> None:
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    assert HAS_NATIVE_IO or shutil.which("gcc") is None or not os.path.exists(header)
