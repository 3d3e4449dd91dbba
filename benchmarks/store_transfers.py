"""The rows of `store` that move pages: warm and cold, both ways, on one thread and on more."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final, Literal

from benchmarks.disk_tools import disk_tools
from benchmarks.harness import Bar, Result, summarise
from benchmarks.page_set import PageSet, Turn
from benchmarks.peers.store_process import left_out_on_failure
from benchmarks.store_disk import PackedFile, conditions, scratch_folder
from benchmarks.store_sides import HicacheSide, MemcpySide, Memory
from hicache.controller.call_size import pages_per_call
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from benchmarks.peers.store_process import PeerStores
    from benchmarks.store_sides import OpenStore, Side

    Direction = Literal["read", "write"]

__all__ = ["TransferRows", "TransferSizes", "bars_of"]

_KIB, _MIB = 1 << 10, 1 << 20

_READ_BARS: Final[Mapping[tuple[str, int], float]] = {
    ("memcpy", 128 * _KIB): 0.75,
    ("memcpy", _MIB): 0.75,
    ("preadv", 16 * _KIB): 0.6,
    ("sglang", 128 * _KIB): 4.0,
    ("sglang", _MIB): 3.0,
    ("lmcache", 128 * _KIB): 1.0,
    ("lmcache", 3 * _MIB): 0.8,
}
"""How many times a system a warm read has to be, by system and bytes of a page; on huge pages."""

_SMALL_PAGES_BAR: Final = 0.85
"""How much of `preadv` a warm read has to be into memory without huge pages."""

_DISK_BAR: Final = 0.9
"""How much a cold move has to be of a bare call, which gets what `fio` gets at its best."""

_MIN_TURNS: Final = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferSizes:
    """How much is moved.

    Attributes:
        warm_page_bytes: bytes of the pages that go through the page cache.
        small_page_bytes: of those that go through it into memory without huge pages.
        cold_page_bytes: of those that go past it.
        threads: on how many threads.
        batch_pages: pages of one call; by default as many as the controller's calls have.
        set_bytes: a turn is drawn from so many bytes of pages, at least.
        read_bytes, read_pages: what is read in a turn, at most; but every thread has a batch.
        write_bytes, write_pages: likewise, through the page cache.
        cold_write_bytes: likewise, past it: a disk takes a burst faster than it can go on.
        turns: how many turns count, at most.
        row_seconds: no new turn begins after so long, if there were five.
    """

    warm_page_bytes: tuple[int, ...] = (16 * _KIB, 128 * _KIB, _MIB, 3 * _MIB)
    small_page_bytes: tuple[int, ...] = (128 * _KIB, _MIB)
    cold_page_bytes: tuple[int, ...] = (128 * _KIB, _MIB)
    threads: tuple[int, ...] = (1, 2)
    batch_pages: int | None = None
    set_bytes: int = 1 << 30
    read_bytes: int = 512 * _MIB
    read_pages: int = 8192
    write_bytes: int = 128 * _MIB
    write_pages: int = 1024
    cold_write_bytes: int = 512 * _MIB
    turns: int = 10
    row_seconds: float = 6.0


@dataclasses.dataclass(frozen=True)
class TransferRows:
    """The rows of reads and writes.

    Attributes:
        sizes: how much is moved.
        open_store: what is measured.
        peers: other systems to run beside.
    """

    sizes: TransferSizes
    open_store: OpenStore
    peers: PeerStores

    def warm(self, page_bytes: int) -> list[Result]:
        """Measure both ways through the page cache, in memory with huge pages where there are."""
        with ExitStack() as stack:
            folder, memory = self._prepare(stack, page_bytes, huge_pages=True)
            store = self._store(stack, memory, folder)
            file = self._file(stack, memory, folder, "preadv")
            systems = stack.enter_context(self.peers.started("sglang", "lmcache"))
            for system in list(systems):
                with left_out_on_failure(system.name, system, systems):
                    system.open(memory.pages, folder / system.name, huge_pages=memory.huge_pages)
                    system.keep(max(self.sizes.threads))
            sides: list[Side] = [store, MemcpySide(memory), file, *systems]
            readers = [*sides[:3], file.checked(), *sides[3:]]
            rows = self._rows("read_warm", "read", readers, memory, folder)
            # The same file, named after the other call.
            file.name = "pwritev"
            return rows + self._rows("write_warm", "write", sides, memory, folder)

    def warm_on_small_pages(self, page_bytes: int) -> list[Result]:
        """Measure reads from the page cache into memory without huge pages."""
        with ExitStack() as stack:
            folder, memory = self._prepare(stack, page_bytes, huge_pages=False)
            store = self._store(stack, memory, folder)
            file = self._file(stack, memory, folder, "preadv")
            sides: list[Side] = [store, file, file.checked()]
            return self._rows("read_warm", "read", sides, memory, folder)

    def cold(self) -> list[Result]:
        """Measure both ways past the page cache; nothing, saying so, where that does not work."""
        try:
            return [
                row for page_bytes in self.sizes.cold_page_bytes for row in self._cold(page_bytes)
            ]
        except (ConfigError, OSError) as error:
            print(f"left out read_cold and write_cold: {error}", file=sys.stderr)
            return []

    def _cold(self, page_bytes: int) -> list[Result]:
        with ExitStack() as stack:
            folder, memory = self._prepare(stack, page_bytes, huge_pages=True, direct=True)
            file = self._file(stack, memory, folder, "disk", direct=True)
            store = self._store(stack, memory, folder, direct=True)
            tools = disk_tools(folder, file.path, memory.pages)
            sides: list[Side] = [store, file, *tools]
            most = self.sizes.cold_write_bytes
            sizes = dataclasses.replace(
                self.sizes, write_bytes=most, write_pages=most // page_bytes
            )
            return [
                *self._rows("read_cold", "read", list(sides), memory, folder, direct=True),
                *dataclasses.replace(self, sizes=sizes)._rows(
                    "write_cold", "write", sides, memory, folder, direct=True
                ),
            ]

    def _prepare(
        self, stack: ExitStack, page_bytes: int, *, huge_pages: bool, direct: bool = False
    ) -> tuple[Path, Memory]:
        batch_pages = self.sizes.batch_pages or self._pages_per_call(page_bytes, direct=direct)
        num_batches = max(
            -(-self.sizes.set_bytes // (page_bytes * batch_pages)), max(self.sizes.threads) + 1
        )
        pages = PageSet(page_bytes=page_bytes, num_batches=num_batches, batch_pages=batch_pages)
        folder = stack.enter_context(scratch_folder())
        memory = Memory(pages, huge_pages=huge_pages)
        stack.callback(memory.close)
        return folder, memory

    def _pages_per_call(self, page_bytes: int, *, direct: bool) -> int:
        """Return how many pages the controller's calls to the store have."""
        with (
            scratch_folder() as folder,
            closing(
                self.open_store(folder / "asked", page_bytes=page_bytes, direct=direct)
            ) as storage,
        ):
            return pages_per_call(page_bytes, call_bytes=storage.capabilities.call_bytes)

    def _store(
        self, stack: ExitStack, memory: Memory, folder: Path, *, direct: bool = False
    ) -> HicacheSide:
        store = HicacheSide(memory, folder / "hicache", self.open_store, direct=direct)
        stack.callback(store.close)
        store.keep(max(self.sizes.threads))
        return store

    def _file(
        self, stack: ExitStack, memory: Memory, folder: Path, name: str, *, direct: bool = False
    ) -> PackedFile:
        file = PackedFile(memory, folder / "packed", name=name, direct=direct)
        stack.callback(file.close)
        file.keep()
        return file

    def _rows(
        self,
        name: str,
        direction: Direction,
        sides: list[Side],
        memory: Memory,
        folder: Path,
        *,
        direct: bool = False,
    ) -> list[Result]:
        """Return a result for each side but the first, beside which they all are."""
        rows = []
        for threads in self.sizes.threads:
            speeds = self._take_turns(direction, sides, memory.pages, threads)
            params = conditions(
                folder,
                page_bytes=memory.pages.page_bytes,
                threads=threads,
                order="random",
                huge_pages=memory.huge_pages,
                direct=direct,
            )
            params["batch_pages"] = memory.pages.batch_pages
            if direct:
                params["cache_dropped_by"] = "posix_fadvise"
            values = speeds.pop(sides[0].name)
            ours = summarise(name, values, params=params, unit="GB/s", better="higher")
            for peer, values in speeds.items():
                bars = bars_of(name, peer, memory.pages.page_bytes, memory.huge_pages)
                rows.append(dataclasses.replace(ours, bars=bars).beside(peer, values))
        return rows

    def _take_turns(
        self, direction: Direction, sides: list[Side], pages: PageSet, threads: int
    ) -> dict[str, list[float]]:
        """Return the GB/s of each side in each turn but the first; drop a side that fails."""
        speeds: dict[str, list[float]] = {side.name: [] for side in sides}
        end = time.monotonic() + self.sizes.row_seconds
        turns = self.draw(direction, pages, threads)
        rng = random.Random(0)
        for number, turn in enumerate(itertools.islice(turns, self.sizes.turns + 1)):
            # Nobody always comes after the same one, which may leave caches and cores busy.
            for side in rng.sample(sides, len(sides)):
                with left_out_on_failure(side.name, side, sides):
                    seconds = side.read(turn) if direction == "read" else side.write(turn)
                    num_bytes = turn.num_batches * pages.batch_pages * pages.page_bytes
                    speeds[side.name].append(num_bytes / seconds / 1e9)
            if number >= _MIN_TURNS and time.monotonic() > end:
                break
        return {side.name: speeds[side.name][1:] for side in sides}

    def draw(self, direction: Direction, pages: PageSet, threads: int) -> Iterator[Turn]:
        """Yield turns in which every thread has as many batches."""
        sizes = self.sizes
        num_bytes, num_pages = {
            "read": (sizes.read_bytes, sizes.read_pages),
            "write": (sizes.write_bytes, sizes.write_pages),
        }[direction]
        each = min(num_pages, num_bytes // pages.page_bytes) // pages.batch_pages // threads
        count = threads * max(1, min(each, pages.num_batches // threads))
        rng = random.Random(0)
        while True:
            chosen = rng.sample(range(pages.num_batches), count)
            yield Turn([chosen[start::threads] for start in range(threads)], rng.getrandbits(32))


def bars_of(name: str, peer: str, page_bytes: int, huge_pages: bool) -> tuple[Bar, ...]:
    """Return what the row `name` has to reach beside `peer`."""
    limit = None
    if peer == "disk":
        limit = _DISK_BAR
    elif name == "read_warm" and huge_pages:
        limit = _READ_BARS.get((peer.partition("-")[0], page_bytes))
    elif name == "read_warm" and peer == "preadv":
        limit = _SMALL_PAGES_BAR
    return () if limit is None else (Bar(limit, "ratio"),)
