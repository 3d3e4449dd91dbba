"""Several requests in a disk's queue: the same bytes, and nothing is left under way or behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import random
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import xxhash

from hicache.storage.native_io import HAS_NATIVE_IO

if HAS_NATIVE_IO:
    from hicache.storage import _page_io

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not HAS_NATIVE_IO, reason="the native module was not built")

PAGE_BYTES = 64 << 10
NUM_PAGES = 40
TOTAL_BYTES = NUM_PAGES * PAGE_BYTES
CHUNK_BYTES = 3 * PAGE_BYTES
NUM_REQUESTS = 4
DEADLOCK_SECONDS = 30


class Pages:
    """Aligned pages in memory in a random order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.memory = mmap.mmap(-1, TOTAL_BYTES)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        rows = self.rng.sample(range(NUM_PAGES), NUM_PAGES)
        self.pages = [((self.base + row * PAGE_BYTES, PAGE_BYTES),) for row in rows]

    def fill(self) -> bytes:
        """Fill all with random bytes and return their checksums."""
        self.memory[:] = self.rng.randbytes(TOTAL_BYTES)
        return self.checksums()

    def checksums(self) -> bytes:
        pages = (ctypes.string_at(*page[0]) for page in self.pages)
        return b"".join(map(xxhash.xxh3_128_digest, pages))

    def read(self, fd: int, num_requests: int = NUM_REQUESTS) -> bytes:
        places = [(fd, 0, TOTAL_BYTES)]
        return _page_io.read_pages(places, self.pages, 0, NUM_PAGES, 0, CHUNK_BYTES, num_requests)

    def write(self, fd: int, num_requests: int = NUM_REQUESTS, *mark: Any) -> bytes:
        places = [(fd, 0, TOTAL_BYTES)]
        return _page_io.write_pages(
            places, self.pages, 0, NUM_PAGES, 0, CHUNK_BYTES, num_requests, *mark
        )


@pytest.fixture
def direct_fd(tmp_path: Path) -> Iterator[int]:
    try:
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        pytest.skip("the file system knows no direct I/O")
    yield fd
    os.close(fd)


def num_queues() -> int:
    """Return how many queues this process has: the kernel maps each into its memory."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("/[aio]")


@contextlib.contextmanager
def new_threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Lend threads whose queues must have gone soon after they have ended."""
    before = num_queues()
    with ThreadPoolExecutor(number) as threads:
        yield threads
    deadline = time.monotonic() + DEADLOCK_SECONDS
    while num_queues() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert num_queues() == before


@pytest.mark.parametrize("seed", range(6))
def test_with_requests_in_the_queue_the_same_bytes_move_with_the_same_checksums(
    direct_fd: int, seed: int
) -> None:
    pages = Pages(seed)
    checksums = pages.fill()
    content = bytes(pages.memory)
    for num_writes, num_reads in ((1, 4), (4, 1), (16, 16)):
        os.ftruncate(direct_fd, 0)
        pages.memory[:] = content
        assert pages.write(direct_fd, num_writes) == checksums
        pages.memory[:] = bytes(TOTAL_BYTES)
        assert pages.read(direct_fd, num_reads) == checksums
        assert bytes(pages.memory) == content


@pytest.mark.parametrize("seed", range(6))
def test_at_the_end_of_a_file_the_pages_before_it_are_read(direct_fd: int, seed: int) -> None:
    pages = Pages(seed)
    checksums = pages.fill()
    pages.write(direct_fd)
    left = pages.rng.randrange(TOTAL_BYTES)
    os.ftruncate(direct_fd, left)
    pages.memory[:] = bytes(TOTAL_BYTES)
    whole = left // PAGE_BYTES
    assert pages.read(direct_fd) == checksums[: 16 * whole]
    assert pages.checksums()[: 16 * whole] == checksums[: 16 * whole]


@pytest.mark.parametrize("position", [0, 1, 13, NUM_PAGES - 1])
@pytest.mark.parametrize("writes", [False, True])
def test_after_an_error_half_way_nothing_is_under_way(
    direct_fd: int, position: int, writes: bool
) -> None:
    """Neither into memory nor in the thread's queue, which the next calls use."""
    pages = Pages(position)
    checksums = pages.fill()
    assert pages.write(direct_fd) == checksums
    good = pages.pages[position]
    unaligned = ((good[0][0] + 8, PAGE_BYTES - 8), errno.EINVAL)
    # What is written is looked at too, so that must be memory.
    no_memory = ((1 << 12, PAGE_BYTES), errno.EFAULT)
    for bad, number in [unaligned] if writes else [unaligned, no_memory]:
        pages.pages[position] = (bad,)
        with pytest.raises(OSError, match=r"Invalid argument|Bad address") as caught:
            (pages.write if writes else pages.read)(direct_fd)
        assert caught.value.errno == number
        pages.memory[:] = bytes(TOTAL_BYTES)
        pages.pages[position] = good
        assert pages.read(direct_fd) == checksums
        assert pages.checksums() == checksums


@pytest.mark.parametrize("mark", [0, 1, 7, 20, NUM_PAGES - 1, NUM_PAGES])
def test_when_a_mark_is_reached_all_before_it_is_on_the_disk(direct_fd: int, mark: int) -> None:
    pages, found = Pages(mark), Pages(mark)
    checksums = pages.fill()
    reached: list[bytes] = []

    def reach(so_far: bytes) -> None:
        """Look at the file, which the thread can do while its own requests are under way."""
        size = os.fstat(direct_fd).st_size
        assert size >= mark * PAGE_BYTES
        found.read(direct_fd)
        assert found.checksums()[: 16 * mark] == checksums[: 16 * mark]
        reached.append(so_far)

    for num_requests in (2, NUM_REQUESTS, 16):
        os.ftruncate(direct_fd, 0)
        assert pages.write(direct_fd, num_requests, mark, reach) == checksums
        assert reached == [checksums[: 16 * mark]]
        reached.clear()


def test_without_requests_in_a_queue_nobody_is_told_of_a_mark(direct_fd: int) -> None:
    pages = Pages(1)
    checksums = pages.fill()
    assert pages.write(direct_fd, 1, 7, pytest.fail) == checksums


class Refused(Exception):
    pass


@pytest.mark.parametrize("mark", [0, 5, NUM_PAGES])
def test_what_is_raised_at_a_mark_breaks_the_write_off_and_nothing_is_under_way(
    direct_fd: int, mark: int
) -> None:
    pages = Pages(2)
    checksums = pages.fill()

    def refuse(_: bytes) -> NoReturn:
        raise Refused

    with pytest.raises(Refused):
        pages.write(direct_fd, NUM_REQUESTS, mark, refuse)
    assert pages.write(direct_fd) == checksums
    pages.memory[:] = bytes(TOTAL_BYTES)
    assert pages.read(direct_fd) == checksums


@pytest.mark.parametrize("mark", [-1, NUM_PAGES + 1])
def test_a_mark_behind_the_pages_is_refused(direct_fd: int, mark: int) -> None:
    with pytest.raises(ValueError, match="no mark behind"):
        Pages(0).write(direct_fd, NUM_REQUESTS, mark, print)


def test_a_thread_has_one_queue_until_it_ends(direct_fd: int) -> None:
    before = num_queues()

    def work() -> None:
        pages = Pages(1)
        checksums = pages.fill()
        pages.write(direct_fd)
        for _ in range(3):
            assert pages.read(direct_fd) == checksums
        assert num_queues() == before + 1

    for _ in range(3):
        with new_threads(1) as threads:
            threads.submit(work).result(DEADLOCK_SECONDS)


def test_threads_do_not_take_each_others_answers(direct_fd: int) -> None:
    source = Pages(0)
    checksums = source.fill()
    source.write(direct_fd)
    with new_threads(3) as threads:
        found = threads.map(lambda _: Pages(0).read(direct_fd), range(30))
        assert list(found) == [checksums] * 30


IO_SETUP = {"x86_64": (0xC000003E, 206), "aarch64": (0xC00000B7, 0)}


def refuse_io_setup() -> None:
    """Let the kernel refuse queues to this thread from now on, as containers do (seccomp)."""
    audit_arch, number = IO_SETUP[platform.machine()]
    load, jump_equal, answer = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    program = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (load, 0, 0, 4),
            (jump_equal, 0, 3, audit_arch),
            (load, 0, 0, 0),
            (jump_equal, 0, 1, number),
            (answer, 0, 0, refuse),
            (answer, 0, 0, allow),
        )
    )
    memory = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, filter_mode = 38, 22, 2
    refused = libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(
        seccomp, filter_mode, ctypes.c_char_p(header), 0, 0
    )
    if refused:
        pytest.skip("this process may not filter its system calls")


@pytest.mark.skipif(platform.machine() not in IO_SETUP, reason="no number of io_setup is known")
def test_where_the_kernel_gives_no_queue_one_request_follows_the_other(direct_fd: int) -> None:
    before = num_queues()

    def work() -> None:
        refuse_io_setup()
        pages = Pages(7)
        checksums = pages.fill()
        assert pages.write(direct_fd) == checksums
        pages.memory[:] = bytes(TOTAL_BYTES)
        assert pages.read(direct_fd) == checksums
        assert pages.checksums() == checksums
        assert num_queues() == before

    with new_threads(1) as threads:
        threads.submit(work).result(DEADLOCK_SECONDS)


FORKING = """
import ctypes, mmap, os, sys
from hicache.storage import _page_io

fd = os.open(sys.argv[1], os.O_RDWR | os.O_DIRECT)
memory = mmap.mmap(-1, 1 << 20)
page = ((ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1 << 20),)
read = lambda: _page_io.read_pages([(fd, 0, 1 << 20)], [page], 0, 1, 0, 1 << 18, 4)
before = read()
pid = os.fork()
if not pid:
    os._exit(0 if read() == before else 1)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status) or (0 if read() == before else 2))
"""


def test_a_forked_process_has_a_queue_of_its_own(direct_fd: int, tmp_path: Path) -> None:
    Pages(2).write(direct_fd)
    command = [sys.executable, "-c", FORKING, str(tmp_path / "file")]
    subprocess.run(command, check=True, timeout=DEADLOCK_SECONDS)
