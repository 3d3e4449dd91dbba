"""Stores of other systems, each driven in a process of its own, and where they are."""

from __future__ import annotations

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from benchmarks.harness import check
from benchmarks.peers.process import PeerFailed, PeerProcess, peers_home
from benchmarks.peers.sglang_process import find_sglang

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.page_set import PageSet, Turn

    T = TypeVar("T")

__all__ = ["PeerStore", "PeerStores", "StoreCommand", "find_lmcache", "left_out_on_failure"]


@dataclasses.dataclass(frozen=True)
class StoreCommand:
    """What starts the process of one store.

    Attributes:
        system: `sglang` or `lmcache`.
        store: how that system calls it.
        python: interpreter of the system's environment.
        arguments: command line of the system's worker.
    """

    system: str
    store: str
    python: Path
    arguments: tuple[str, ...] = ()


def find_lmcache(home: Path) -> list[Path]:
    """Return the interpreter of LMCache's environment below `home`, if it is there."""
    python = home / "venv-lmcache" / "bin" / "python"
    return [python] if python.exists() else []


def find_stores(home: Path, names: frozenset[str]) -> list[StoreCommand]:
    """Return the stores of the systems in `names` that are installed below `home`."""
    found = []
    if "sglang" in names:
        # The newest release alone: the backend has hardly changed.
        for core in find_sglang(home)[-1:]:
            source = () if core.source is None else (str(core.source),)
            found.append(StoreCommand("sglang", "file", core.python, source))
    if "lmcache" in names:
        found += [StoreCommand("lmcache", "fs_native", python) for python in find_lmcache(home)]
    return found


class PeerStore:
    """One store of another system, which moves a set of pages as `store_sides.Side` says.

    Starting takes some seconds; `close` ends its process.

    Attributes:
        name: how results name it, such as `sglang-0.5.23-file`.

    Raises:
        PeerFailed: it does not start, and later from any call.
    """

    def __init__(self, command: StoreCommand) -> None:
        self._process = PeerProcess(command.python, f"{command.system}_store", *command.arguments)
        self.name = f"{command.system}-{self._process.version}-{command.store}"

    def open(self, pages: PageSet, folder: Path, *, huge_pages: bool) -> None:
        """Give the process memory for `pages`, and `folder` for its stores, which it may make."""
        self._batch_pages = pages.batch_pages
        self._process.call(
            "open",
            folder=str(folder),
            page_bytes=pages.page_bytes,
            num_batches=pages.num_batches,
            batch_pages=pages.batch_pages,
            huge_pages=huge_pages,
        )

    def keep(self, num_threads: int) -> None:
        """Write all pages to the store that is read."""
        self._process.call("keep", num_threads=num_threads)

    def read(self, turn: Turn) -> float:
        """Return how long the reads of `turn` took, in seconds."""
        return self._move("read", turn)

    def write(self, turn: Turn) -> float:
        """Return how long the writes of `turn` into an empty store took, in seconds."""
        return self._move("write", turn)

    def exists(self, batches: list[int], samples: int) -> list[float]:
        """Return how long looks for all pages of one batch after the other took, in us."""
        answer = self._process.call("exists", batches=batches, samples=samples)
        found, wanted = answer["found"], self._batch_pages
        check(found == wanted, f"{self.name} finds {found} of {wanted} pages")
        return list(answer["times"])

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _move(self, direction: str, turn: Turn) -> float:
        answer = self._process.call(direction, batches=turn.batches, seed=turn.seed)
        page = answer["wrong"]
        check(page is None, f"page {page} is not what {self.name} was given ({direction})")
        return float(answer["seconds"])


class PeerStores:
    """The stores beside which figures are taken; one that fails is named and left out from then on.

    Args:
        names: systems to look for.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._commands = find_stores(peers_home(), names)

    @contextmanager
    def started(self, *systems: str) -> Iterator[list[PeerStore]]:
        """Provide those of `systems` that run here, and end them."""
        commands = [command for command in self._commands if command.system in systems]
        with ExitStack() as stack:
            # Side by side, because each spends seconds with imports.
            with ThreadPoolExecutor() as threads:
                starts = [threads.submit(PeerStore, command) for command in commands]
            stores = []
            for command, start in zip(commands, starts, strict=True):
                name = f"{command.system}'s {command.store}"
                with left_out_on_failure(name, command, self._commands):
                    stores.append(start.result())
                    stack.callback(stores[-1].close)
            yield stores


@contextmanager
def left_out_on_failure(name: str, member: T, members: list[T]) -> Iterator[None]:
    """Go on without `member` of `members`, saying why, when its system fails in the block."""
    try:
        yield
    except PeerFailed as error:
        members.remove(member)
        print(f"skipped {name}, which does not run here: {error.reason}", file=sys.stderr)
