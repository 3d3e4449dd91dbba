"""Processes that write to a page store, to be killed: forks of one that has imported all it needs.

Run as a program it forks on demand; `Nursery` is the other side. So a process costs milliseconds,
and two hundred can be killed in a test.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING, Any

from page_store_tools import OK, chain, open_store, read, write

from hicache.storage import native_io

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Nursery", "WriterProcess"]


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


def hang_in_a_write(pipe: IO[bytes], path: str, seed: int, **options: Any) -> None:
    """Begin to write pages, and stop when the first bytes are on their way."""
    native_io.HAS_NATIVE_IO = False
    storage = open_store(path, **options)

    def hang(*_: object) -> int:
        pipe.write(b"started\n")
        time.sleep(600)
        return 0

    os.pwritev = hang
    write(storage, chain(seed, 3))


def write_chains(pipe: IO[bytes], path: str, seed: int, **options: Any) -> None:
    """Write `seed` chains that other processes write as well; report the outcomes of all pages."""
    storage = open_store(path, **options)
    pipe.write(b"started\n")
    for name in range(seed):
        keys = chain(name, 5)
        for wrote, got in zip(write(storage, keys), read(storage, keys), strict=True):
            pipe.write(f"{wrote.value} {got.value}\n".encode())
    storage.close()


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
        target.__name__: target for target in (write_until_killed, hang_in_a_write, write_chains)
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
