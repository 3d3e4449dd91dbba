"""Where stores are measured, and what the file system gives without one."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from benchmarks.harness import CheckFailed, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.page_set import Bytes, Part, Turn
    from benchmarks.store_sides import Memory

    _Call = tuple[int, list[memoryview], int]

__all__ = [
    "CheckedReads",
    "PackedFile",
    "conditions",
    "drop_page_cache",
    "file_system",
    "huge_page_choices",
    "scratch_folder",
]

_CHUNK_BYTES = 512 << 10

_IN_MEMORY = ("tmpfs", "ramfs")

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Provide an empty folder on a disk where there is one, and remove it with all that is in it.

    It is in the folder for temporary files (`$TMPDIR`), or, when that is in memory, in `/var/tmp`.
    """
    parent = Path(tempfile.gettempdir())
    if file_system(parent) in _IN_MEMORY and os.access("/var/tmp", os.W_OK):
        parent = Path("/var/tmp")
    with tempfile.TemporaryDirectory(prefix="hicache-store-", dir=parent) as folder:
        yield Path(folder)


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the type of the file system that `path` is on, such as `ext4`."""
    types = {}
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, point, kind, *_ = line.split(" ")
        # What is mounted later covers what was there.
        types[Path(point.encode().decode("unicode_escape"))] = kind
    resolved = path.resolve()
    return next(
        (types[point] for point in (resolved, *resolved.parents) if point in types), "unknown"
    )


def huge_page_choices(setting: Path = _HUGE_PAGES) -> tuple[bool, ...]:
    """Return whether memory can have 2 MiB pages here, whether it can be without, or both."""
    try:
        text = setting.read_text(encoding="utf-8")
    except OSError:
        return (False,)
    if "[always]" in text:
        return (True,)
    return (True, False) if "[madvise]" in text else (False,)


def conditions(
    folder: Path,
    *,
    page_bytes: int,
    threads: int,
    order: str,
    huge_pages: bool,
    layout: str = "page_first",
    direct: bool = False,
) -> dict[str, str | int | float | bool]:
    """Return what every result about a store says of how it came about.

    Args:
        folder: where the store is.
        page_bytes: length of a page.
        threads: that call the store.
        order: of the pages that are asked for.
        huge_pages: whether the pages' memory lies in 2 MiB pages.
        layout: order of a page's bytes; in the first two of `HostLayout` it is one piece.
        direct: whether the store goes past the page cache.
    """
    return {
        "page_bytes": page_bytes,
        "threads": threads,
        "order": order,
        "file_system": file_system(folder),
        "huge_pages": huge_pages,
        "layout": layout,
        "direct": direct,
    }


def drop_page_cache(folder: Path) -> None:
    """Write back all files below `folder` and let the page cache forget them."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


class PackedFile:
    """A file with all pages one after the other, read and written with one system call a batch.

    It knows nothing but where a page is: no header, no checksum, no index.

    Args:
        memory: of the pages.
        folder: for the files; made if it is not there.
        name: how results name it.
        direct: past the page cache.

    Attributes:
        name: as given.
        path: of the file that is read.

    Raises:
        OSError: the file system cannot do without its page cache.
    """

    def __init__(self, memory: Memory, folder: Path, *, name: str, direct: bool = False) -> None:
        self.name = name
        self._memory = memory
        self._folder = folder
        self._direct = direct
        self._flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        folder.mkdir()
        self.path = folder / "kept"
        self._kept = os.open(self.path, self._flags)

    def keep(self) -> None:
        """Write all pages to the file that is read."""
        _run(os.pwritev, self._calls(self._kept, self._memory.source, [self._memory.home])[0])

    def read(self, turn: Turn) -> float:
        """See `Side.read`."""
        if self._direct:
            drop_page_cache(self._folder)
        return self._read(self._kept, self._memory.pages.deal(turn))

    def write(self, turn: Turn) -> float:
        """See `Side.write`."""
        memory, shares = self._memory, self._memory.pages.deal(turn)
        fresh = self._folder / "fresh"
        fd = os.open(fresh, self._flags)
        try:
            calls = self._calls(fd, memory.source, memory.home_of(shares))
            seconds = memory.threads.time([partial(_run, os.pwritev, share) for share in calls])
            self._read(fd, shares)
        finally:
            os.close(fd)
            fresh.unlink()
        return seconds

    def close(self) -> None:
        """Close the file that is read."""
        os.close(self._kept)

    def checked(self) -> CheckedReads:
        """Return the same reads with a checksum over every page."""
        return CheckedReads(self, self._memory)

    def read_kept(self, turn: Turn, run: Callable[[list[_Call]], None], name: str) -> float:
        """Return how long `run` took for the calls of each thread, which read the file."""
        return self._read(self._kept, self._memory.pages.deal(turn), run, name)

    def _read(
        self,
        fd: int,
        shares: Sequence[Sequence[Part]],
        run: Callable[[list[_Call]], None] | None = None,
        name: str | None = None,
    ) -> float:
        memory = self._memory
        memory.spoil(shares)
        calls = self._calls(fd, memory.target, shares)
        run = run or partial(_run, os.preadv)
        seconds = memory.threads.time([partial(run, share) for share in calls])
        memory.check(shares, name or self.name)
        return seconds

    def _calls(self, fd: int, memory: Bytes, shares: Sequence[Sequence[Part]]) -> list[list[_Call]]:
        """Return file, buffers and offset of each call of each thread.

        The file of all pages has them in order, one of a few batches has these without gaps.
        """
        batches = sorted(part.pages.start for share in shares for part in share)
        if fd == self._kept:
            batches = [pages.start for pages, _ in self._memory.home]
        batch_bytes = self._memory.pages.batch_pages * self._memory.pages.page_bytes
        offsets = {batch: position * batch_bytes for position, batch in enumerate(batches)}
        return [
            [
                (fd, [memoryview(memory[row]) for row in part.rows], offsets[part.pages.start])
                for part in share
            ]
            for share in shares
        ]


class CheckedReads:
    """Reads a `PackedFile` as a store must that trusts no disk: with a checksum over every page.

    It reads as much at a time as a processor's cache holds, so that the checksum finds it there.
    What a store takes longer than this, it takes for more than bytes and checksums.
    """

    name = "preadv_xxh3"

    def __init__(self, file: PackedFile, memory: Memory) -> None:
        self._file = file
        self._step = max(1, _CHUNK_BYTES // memory.pages.page_bytes)
        source = memory.source
        self._expected = {
            b"".join(xxhash.xxh3_128_digest(source[row]) for row in part.rows)
            for part in memory.home
        }

    def read(self, turn: Turn) -> float:
        """See `Side.read`."""
        return self._file.read_kept(turn, self._run, self.name)

    def write(self, turn: Turn) -> float:
        """Refuse: there is nothing to check before it is written."""
        raise CheckFailed(f"{self.name} does not write {turn.num_batches} batches")

    def _run(self, calls: list[_Call]) -> None:
        for fd, buffers, offset in calls:
            digests: list[bytes] = []
            for start in range(0, len(buffers), self._step):
                part = buffers[start : start + self._step]
                offset += os.preadv(fd, part, offset)
                digests += map(xxhash.xxh3_128_digest, part)
            check(b"".join(digests) in self._expected, f"{self.name} reads other bytes")


def _run(move: Callable[[int, list[memoryview], int], int], calls: list[_Call]) -> None:
    for fd, buffers, offset in calls:
        num_bytes = move(fd, buffers, offset)
        check(num_bytes == sum(map(len, buffers)), f"{move.__name__} moves {num_bytes} bytes")
