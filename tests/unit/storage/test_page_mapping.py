"""Reads out of the page cache itself, and a file that fails in the middle of one.

What may end in a bus error has a process of its own: handlers of signals belong to a process, and a
bus error that nobody handles ends it.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from page_store_tools import OK, chain, open_store, read, write

from hicache.storage.native_io import HAS_NATIVE_IO

if TYPE_CHECKING:
    from pathlib import Path

LARGE = 200_000

pytestmark = pytest.mark.skipif(not HAS_NATIVE_IO, reason="the native module was not built")

PREAMBLE = """
import os, signal, sys, threading
import numpy as np
import xxhash
from hicache.storage import _page_io

PAGE_BYTES, NUM_PAGES = 100_000, 60
TOTAL_BYTES = PAGE_BYTES * NUM_PAGES
payload = np.random.default_rng(7).bytes(TOTAL_BYTES)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.pwrite(fd, payload, 0)
mapping = _page_io.map_file(fd, 1 << 30)
memory = np.zeros(TOTAL_BYTES, dtype=np.uint8)
pages = [((memory.ctypes.data + n * PAGE_BYTES, PAGE_BYTES),) for n in range(NUM_PAGES)]

def checksums_of(data):
    cuts = range(0, len(data), PAGE_BYTES)
    return b"".join(xxhash.xxh3_128_digest(data[at : at + PAGE_BYTES]) for at in cuts)

def read():
    places = [(fd, 0, TOTAL_BYTES, mapping)]
    return _page_io.read_pages(places, pages, 0, NUM_PAGES, 0, 512 << 10, 1)

def check_read():
    memory[:] = 0
    assert read() == checksums_of(payload)
    assert memory.tobytes() == payload
"""


def run(program: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PREAMBLE + program, str(tmp_path / "file")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_file_that_is_cut_short_in_the_middle_is_an_error_or_fewer_pages(tmp_path: Path) -> None:
    """Whatever is answered: the checksums are those of the bytes in memory."""
    done = run(
        """
stop = threading.Event()
def cut():
    while not stop.is_set():
        os.ftruncate(fd, TOTAL_BYTES // 2)
        os.pwrite(fd, payload[TOTAL_BYTES // 2 :], TOTAL_BYTES // 2)
cutter = threading.Thread(target=cut)
cutter.start()
num_failed = num_whole = 0
try:
    for _ in range(20_000):
        try:
            found = read()
        except OSError as error:
            assert error.errno == 5, error
            num_failed += 1
        else:
            assert checksums_of(memory.tobytes()).startswith(found)
            num_whole += len(found) == 16 * NUM_PAGES
        if num_failed >= 3 and num_whole >= 3:
            break
finally:
    stop.set()
    cutter.join()
assert num_failed >= 3 and num_whole >= 3, (num_failed, num_whole)
os.pwrite(fd, payload, 0)
check_read()
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_bus_error_of_somebody_else_ends_the_process_as_before(tmp_path: Path) -> None:
    done = run("check_read(); os.kill(os.getpid(), signal.SIGBUS)", tmp_path)
    assert done.returncode == -signal.SIGBUS, done.stderr


def test_who_handled_bus_errors_before_still_gets_the_others(tmp_path: Path) -> None:
    done = run(
        """
seen = []
signal.signal(signal.SIGBUS, lambda number, frame: seen.append(number))
check_read()
os.kill(os.getpid(), signal.SIGBUS)
check_read()
assert seen == [signal.SIGBUS]
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_who_handles_bus_errors_later_gets_them_all_and_pages_are_read_otherwise(
    tmp_path: Path,
) -> None:
    done = run(
        """
check_read()
seen = []
signal.signal(signal.SIGBUS, lambda number, frame: seen.append(number))
check_read()
os.kill(os.getpid(), signal.SIGBUS)
check_read()
assert seen == [signal.SIGBUS]
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_traceback_of_a_bus_error_is_still_written(tmp_path: Path) -> None:
    done = run(
        "import faulthandler; faulthandler.enable(); check_read(); "
        "os.kill(os.getpid(), signal.SIGBUS)",
        tmp_path,
    )
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr


def is_mapped(path: Path) -> bool:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return any(str(path) in line for line in maps)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("mapped_reads", [True, False])
def test_segments_are_mapped_from_the_first_read_until_the_store_is_closed_if_they_may_be(
    fast_path: Path, mapped_reads: bool
) -> None:
    storage = open_store(fast_path, page_bytes=LARGE, mapped_reads=mapped_reads)
    keys = chain(1, 3)
    assert write(storage, keys, page_bytes=LARGE) == [OK] * 3
    assert not is_mapped(fast_path / "data")
    assert read(storage, keys, page_bytes=LARGE) == [OK] * 3
    assert is_mapped(fast_path / "data") == mapped_reads
    storage.close()
    assert not is_mapped(fast_path / "data")


def test_a_segment_that_was_deleted_and_made_again_is_not_read_where_it_was(
    fast_path: Path,
) -> None:
    storage = open_store(fast_path, page_bytes=LARGE)
    for name in range(3):
        keys = chain(name, 2)
        assert write(storage, keys, page_bytes=LARGE) == [OK] * 2
        assert read(storage, keys, page_bytes=LARGE) == [OK] * 2
        shutil.rmtree(fast_path / "data")
        assert storage.batch_exists(keys) == 0
        assert write(storage, keys, page_bytes=LARGE) == [OK] * 2
        assert read(storage, keys, page_bytes=LARGE) == [OK] * 2
    storage.close()
