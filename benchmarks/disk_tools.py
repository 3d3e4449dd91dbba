"""`dd` and `fio` on the disk that a store lies on, as they are mostly called.

That is not all that a disk gives: `fio` with memory of 2 MiB pages (`--mem=mmaphuge`, for which an
operator has to set pages aside) gets as much as one bare call a batch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

from benchmarks.peers.process import PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.page_set import PageSet, Turn

    Direction = Literal["read", "write"]

__all__ = ["DdSide", "DiskToolSide", "FioSide", "disk_tools"]

_BLOCK_BYTES = 1 << 20
_LEAST_BLOCK_BYTES = 4 << 10
_QUEUE_DEPTH = 8

_DD_SECONDS = re.compile(r" copied, ([0-9.e+-]+) s")


class DiskToolSide(ABC):
    """A tool that moves as many bytes past the page cache as the others do, one process a thread.

    It reads from a file that is there and writes to one of its own, in blocks of 1 MiB, from and to
    memory of its own, which is of small pages. What it says of its time counts, without its start.

    Args:
        folder: for the file that is written; made if it is not there.
        kept: the file that is read, with all bytes of `pages`.
        pages: what the others move.

    Raises:
        PeerFailed: from `read` and `write`, with what the tool has said.
    """

    name: str

    def __init__(self, folder: Path, kept: Path, pages: PageSet) -> None:
        self._folder = folder
        self._kept = kept
        self._batch_bytes = pages.batch_pages * pages.page_bytes
        folder.mkdir()

    def read(self, turn: Turn) -> float:
        """See `Side.read`; nothing is checked, as the tool keeps nothing of what it reads."""
        return self._move("read", turn)

    def write(self, turn: Turn) -> float:
        """See `Side.write`; the bytes are the tool's own."""
        try:
            return self._move("write", turn)
        finally:
            for path in self._folder.iterdir():
                path.unlink()

    def _move(self, direction: Direction, turn: Turn) -> float:
        share = turn.num_batches * self._batch_bytes // len(turn.batches)
        block = _BLOCK_BYTES
        while share % block:
            block //= 2
        if block < _LEAST_BLOCK_BYTES:
            raise PeerFailed(f"{share} bytes are not whole blocks of {_LEAST_BLOCK_BYTES}")
        return self._seconds(direction, len(turn.batches), share // block, block)

    @abstractmethod
    def _seconds(
        self, direction: Direction, num_processes: int, num_blocks: int, block_bytes: int
    ) -> float:
        """Let each process move so many blocks; return how long they took."""


class DdSide(DiskToolSide):
    """`dd` of coreutils: one block after the other."""

    name = "dd"

    def _seconds(
        self, direction: Direction, num_processes: int, num_blocks: int, block_bytes: int
    ) -> float:
        sizes = [f"bs={block_bytes}", f"count={num_blocks}"]
        commands = []
        for number in range(num_processes):
            if direction == "read":
                ends = [f"if={self._kept}", "of=/dev/null", f"skip={number * num_blocks}"]
                flags = "iflag=direct"
            else:
                ends = ["if=/dev/zero", f"of={self._folder / str(number)}"]
                flags = "oflag=direct"
            commands.append(["dd", *ends, *sizes, flags])
        return max(map(_dd_seconds, _run(commands)))


class FioSide(DiskToolSide):
    """`fio` with native AIO: eight blocks under way at once."""

    name = "fio"

    def _seconds(
        self, direction: Direction, num_processes: int, num_blocks: int, block_bytes: int
    ) -> float:
        num_bytes = num_blocks * block_bytes
        where = [f"--directory={self._folder}"]
        if direction == "read":
            where = [f"--filename={self._kept}", f"--offset_increment={num_bytes}"]
        (answer,) = _run(
            [
                [
                    "fio",
                    "--name=disk",
                    *where,
                    f"--rw={direction}",
                    f"--size={num_bytes}",
                    f"--bs={block_bytes}",
                    f"--iodepth={_QUEUE_DEPTH}",
                    f"--numjobs={num_processes}",
                    "--ioengine=libaio",
                    "--direct=1",
                    "--group_reporting",
                    "--output-format=json",
                ]
            ]
        )
        return _fio_seconds(answer, direction, num_processes * num_bytes)


def disk_tools(
    folder: Path,
    kept: Path,
    pages: PageSet,
    *,
    which: Callable[[str], str | None] = shutil.which,
) -> list[DiskToolSide]:
    """Return a side for each tool that is installed; see `DiskToolSide` for the arguments."""
    return [tool(folder / tool.name, kept, pages) for tool in (DdSide, FioSide) if which(tool.name)]


def _run(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run all at once and return what each has said."""
    environment = {**os.environ, "LC_ALL": "C"}
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for command in commands
    ]
    answers = [process.communicate()[0] for process in processes]
    for process, answer in zip(processes, answers, strict=True):
        if process.returncode:
            raise PeerFailed(answer)
    return answers


def _dd_seconds(answer: str) -> float:
    found = _DD_SECONDS.search(answer)
    if found is None:
        raise PeerFailed(f"dd does not say how long it took: {answer}")
    return float(found[1])


def _fio_seconds(answer: str, direction: Direction, num_bytes: int) -> float:
    """Return how long `num_bytes` took at the speed that fio has reached."""
    try:
        # Notes can come before.
        report = json.loads(answer[answer.index("{") :])
        moved = report["jobs"][0][direction]
        num_moved, speed = moved["io_bytes"], moved["bw_bytes"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise PeerFailed(f"fio's report is not understood ({error!r})") from error
    if num_moved != num_bytes or not speed:
        raise PeerFailed(f"fio has moved {num_moved} of {num_bytes} bytes")
    return float(num_bytes / speed)
