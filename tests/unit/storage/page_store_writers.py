"""Processes that write to a page store, to be killed: forks of one that has imported all it needs.

Run as a program it forks on demand; `Nursery` is the other side. So a process costs milliseconds,
and two hundred can be killed in a test.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING, Any

from page_store_tools import BLOCK_BYTES, LATER, OK, chain, open_store, payload_of, read, write

from hicache.storage import native_io
from hicache.storage.base import Piece
from hicache.storage.page_store import group_writer, native_transfer
from hicache.storage.page_store.publisher import Publication, Publisher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hicache.storage.page_store.publisher import Draft

__all__ = ["OVERLAPPED_PAGES", "PUBLISHED", "Nursery", "WriterProcess"]

OVERLAPPED_PAGES = 100
"""Of a batch; three quarters are published while the disk has the rest."""
PUBLISHED = bytes(32)
"""Reported like a key, and none."""


def write_until_killed(pipe: IO[bytes], path: str, seed: int, **options: Any) -> None:
    """Write and read branching chains for ever; report keys as soon as their pages are `OK`."""
    rng = random.Random(seed)
    storage = open_store(path, **options)
    pipe.write(b"started\n")
    chains = [chain(rng.getrandbits(31), 1)]
    while True:
        stem = rng.choice(chains)
        stem = stem[: rng.randrange(len(stem) + 1)]
        tail = chain(rng.getrandbits(31), rng.choice([1, 3, 20]), stem[-1] if stem else b"")
        chains = [*chains, stem + tail][-8:]
        outcomes = write(storage, stem + tail)
        keys = zip(stem + tail, outcomes, strict=True)
        pipe.write(b"".join(key for key, outcome in keys if outcome is OK))
        read(storage, rng.choice(chains))


def write_overlapped_until_killed(pipe: IO[bytes], path: str, seed: int) -> None:
    """Write batches past the page cache for ever, each published in two parts.

    Reports `PUBLISHED` when a part can be found, and keys as soon as their pages are `OK`.
    """
    group_writer._MIN_OVERLAPPED_BYTES = OVERLAPPED_PAGES * BLOCK_BYTES
    native_transfer._DIRECT_WRITE_BYTES = 4 * BLOCK_BYTES
    publish = Publisher.publish

    def reports(self: Publisher, drafts: Sequence[Draft]) -> Publication:
        publication = publish(self, drafts)
        pipe.write(PUBLISHED)
        return publication

    Publisher.publish = reports  # type: ignore[method-assign]
    num_bytes = OVERLAPPED_PAGES * BLOCK_BYTES
    memory = mmap.mmap(-1, num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pages = [(Piece(address + start, BLOCK_BYTES),) for start in range(0, num_bytes, BLOCK_BYTES)]
    rng = random.Random(seed)
    storage = open_store(path, page_bytes=BLOCK_BYTES, direct_io=True)
    pipe.write(b"started\n")
    while True:
        keys = chain(rng.getrandbits(31), OVERLAPPED_PAGES)
        memory[:] = b"".join(payload_of(key, BLOCK_BYTES) for key in keys)
        assert storage.batch_set(keys, [b"", *keys[:-1]], pages, deadline=LATER)[-1] is OK
        pipe.write(b"".join(keys))


def hang_in_a_write(pipe: IO[bytes], path: str, seed: int, *, native: bool, **options: Any) -> None:
    """Begin to write pages, and stop when the first bytes are on their way, in C or in Python."""
    native_io.HAS_NATIVE_IO = native
    storage = open_store(path, **options)

    def hang(*_: object) -> Any:
        pipe.write(b"started\n")
        time.sleep(600)

    if native:
        native_io.page_io.write_pages = hang
    os.pwritev = hang
    write(storage, chain(seed, 3))


def write_chains(pipe: IO[bytes], path: str, seed: int, *, first: int = 0, **options: Any) -> None:
    """Write `seed` chains from the `first` on, and report the outcomes of all pages.

    Other processes that begin with the same one write the same pages.
    """
    storage = open_store(path, **options)
    pipe.write(b"started\n")
    for name in range(first, first + seed):
        keys = chain(name, 5)
        for wrote, got in zip(write(storage, keys), read(storage, keys), strict=True):
            pipe.write(f"{wrote.value} {got.value}\n".encode())
    storage.close()


def keep_open(pipe: IO[bytes], path: str, seed: int, **options: Any) -> None:
    """Open a store and never write to it; close it when the file `path`.stop is there."""
    storage = open_store(path, **options)
    pipe.write(b"started\n")
    while not os.path.exists(f"{path}.stop"):
        time.sleep(0.01)
    storage.close()


def read_slowly(pipe: IO[bytes], path: str, seed: int, **options: Any) -> None:
    """Read from the index of a store for ever, for `seed` milliseconds at a time."""
    storage = open_store(path, **options)
    with storage._access.use() as access:
        pipe.write(b"started\n")
        while True:
            with access.store.index.read() as txn:
                txn.stat(access.store.index.dbs.pages)
                pipe.write(b"reads\n")
                time.sleep(seed / 1000)
            time.sleep(0.001)


class WriterProcess:
    """A process that was started.

    Attributes:
        pipe: what it reports.
    """

    def __init__(self, nursery: Nursery, pid: int, pipe: IO[bytes]) -> None:
        self._nursery = nursery
        self._pid = pid
        self.pipe = pipe

    def wait_until_started(self) -> None:
        assert self.pipe.readline() == b"started\n"

    def kill(self) -> bytes:
        """Kill it, and return what it had reported when it is dead."""
        os.kill(self._pid, signal.SIGKILL)
        self._nursery.ask({"wait": self._pid})
        return self.pipe.read()

    def wait(self) -> bytes:
        """Return what it has reported when it has ended by itself."""
        report = self.pipe.read()
        assert self._nursery.ask({"wait": self._pid}) == 0
        return report


class Nursery:
    """Starts processes."""

    def __init__(self, folder: Path) -> None:
        """Begin; `folder` is for pipes."""
        self._folder = folder
        self._num_pipes = 0
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @contextlib.contextmanager
    def start(
        self, name: str, path: Path, seed: int = 0, **options: object
    ) -> Iterator[WriterProcess]:
        """Run one of the functions of this module; what is not dead by the end is killed."""
        self._num_pipes += 1
        fifo = self._folder / f"pipe-{self._num_pipes}"
        os.mkfifo(fifo)
        job = {"name": name, "fifo": str(fifo), "path": str(path), "seed": seed, **options}
        pid = self.ask(job)
        with fifo.open("rb") as pipe:
            fifo.unlink()
            try:
                yield WriterProcess(self, pid, pipe)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def ask(self, command: dict[str, object]) -> int:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()
        return int(stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


def answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def main() -> None:
    """Obey commands until there are no more."""
    targets = {
        target.__name__: target
        for target in (
            write_until_killed,
            write_overlapped_until_killed,
            hang_in_a_write,
            write_chains,
            keep_open,
            read_slowly,
        )
    }
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            with contextlib.suppress(ChildProcessError):
                answer(os.waitstatus_to_exitcode(os.waitpid(command["wait"], 0)[1]))
            continue
        pid = os.fork()
        if pid:
            answer(pid)
            continue
        with open(command.pop("fifo"), "wb", buffering=0) as pipe:
            targets[command.pop("name")](pipe, **command)
        os._exit(0)


if __name__ == "__main__":
    main()
