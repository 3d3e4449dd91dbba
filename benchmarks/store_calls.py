"""The rows of `store` that move no pages: looking for the pages of a prompt, and opening."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.harness import Bar, Result, alternate, check, summarise, time_calls
from benchmarks.page_set import PageSet
from benchmarks.peers.store_process import left_out_on_failure
from benchmarks.store_disk import conditions, scratch_folder
from benchmarks.store_sides import HicacheSide, Memory
from hicache.types import PageHash

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.peers.store_process import PeerStore, PeerStores
    from benchmarks.store_sides import OpenStore
    from hicache.storage.base import HiCacheStorage

__all__ = ["CallRows", "CallSizes"]

_LOOK_US = 50

_OPEN_SECONDS = 2
_OPEN_PAGES = 1_000_000


@dataclasses.dataclass(frozen=True)
class _Filled:
    """A store full of pages, open.

    Attributes:
        pages: what is in it, chain by chain.
        folder: where.
        storage: the backend.
        params: what results say about it.
    """

    pages: PageSet
    folder: Path
    storage: HiCacheStorage
    params: dict[str, str | int | float | bool]

    def chain(self, batch: int) -> list[PageHash]:
        """Return the keys of a chain."""
        return [PageHash(key) for key in self.pages.keys(self.pages.pages_of(batch))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallSizes:
    """How much is looked for and opened.

    Attributes:
        look_pages: pages of the store in which is looked beside other systems.
        large_pages: pages of the store that is opened: a million.
        page_bytes: of the pages in both; few, because nobody reads them.
        batch_pages: keys of one look, which are a chain.
        samples: looks timed.
        opens: how often the store is opened.
    """

    look_pages: int = 8192
    large_pages: int = 7813 * 128
    page_bytes: int = 64
    batch_pages: int = 128
    samples: int = 2000
    opens: int = 5


@dataclasses.dataclass(frozen=True)
class CallRows:
    """The rows of looks and of opening.

    Attributes:
        sizes: how much is looked for and opened.
        open_store: what is measured.
        peers: other systems to run beside.
    """

    sizes: CallSizes
    open_store: OpenStore
    peers: PeerStores

    def looks(self) -> list[Result]:
        """Time looks in a small store, beside other systems where there are any."""
        with scratch_folder() as folder, self._filled(folder, self.sizes.look_pages) as filled:
            _check_looks(filled)
            rows = []
            with self.peers.started("sglang") as systems:
                for system in list(systems):
                    with left_out_on_failure(system.name, system, systems):
                        rows.append(self._look_beside(system, filled))
            return rows or [self._look(filled, bars=(Bar(_LOOK_US),))]

    def large(self) -> list[Result]:
        """Time looks in a large store, and how long opening it again takes."""
        with scratch_folder() as folder:
            with self._filled(folder, self.sizes.large_pages) as filled:
                _check_looks(filled)
                looks = self._look(filled, bars=())
            return [looks, self._open(filled)]

    @contextmanager
    def _filled(self, folder: Path, num_pages: int) -> Iterator[_Filled]:
        pages = PageSet(
            page_bytes=self.sizes.page_bytes,
            num_batches=max(1, num_pages // self.sizes.batch_pages),
            batch_pages=self.sizes.batch_pages,
        )
        params = conditions(
            folder, page_bytes=self.sizes.page_bytes, threads=1, order="chain", huge_pages=False
        )
        params["pages"] = pages.num_pages
        memory = Memory(pages, huge_pages=False)
        try:
            side = HicacheSide(memory, folder / "hicache", self.open_store)
            try:
                side.keep(1)
                yield _Filled(pages, folder / "hicache" / "kept", side.storage, params)
            finally:
                side.close()
        finally:
            memory.close()

    def _look(self, filled: _Filled, *, bars: tuple[Bar, ...]) -> Result:
        times = self._time_looks(filled, self.sizes.samples)
        return summarise(f"exists_{self.sizes.batch_pages}", times, params=filled.params, bars=bars)

    def _look_beside(self, system: PeerStore, filled: _Filled) -> Result:
        folder = filled.folder.parent / system.name
        system.open(filled.pages, folder, huge_pages=False)
        system.keep(1)
        chains = list(range(filled.pages.num_batches))
        mine, others = alternate(
            lambda samples: self._time_looks(filled, samples),
            lambda samples: system.exists(chains, samples),
            samples=self.sizes.samples,
        )
        result = summarise(
            f"exists_{self.sizes.batch_pages}", mine, params=filled.params, bars=(Bar(_LOOK_US),)
        )
        return result.beside(system.name, others)

    def _time_looks(self, filled: _Filled, samples: int) -> list[float]:
        order = random.Random(0).sample(range(filled.pages.num_batches), filled.pages.num_batches)
        chains = itertools.cycle([filled.chain(batch) for batch in order])
        storage = filled.storage
        return time_calls(lambda: storage.batch_exists(next(chains)), samples=samples)

    def _open(self, filled: _Filled) -> Result:
        """Time opening until the first look is answered, which is about the last pages."""
        chain, times = filled.chain(filled.pages.num_batches - 1), []
        for _ in range(self.sizes.opens):
            begin = time.perf_counter()
            storage = self.open_store(filled.folder, page_bytes=self.sizes.page_bytes)
            found = storage.batch_exists(chain)
            times.append(time.perf_counter() - begin)
            storage.close()
            check(found == len(chain), f"{found} of {len(chain)} pages are there after opening")
        bars = (Bar(_OPEN_SECONDS),) if filled.pages.num_pages >= _OPEN_PAGES else ()
        return summarise("open", times, params=filled.params, unit="s", bars=bars)


def _check_looks(filled: _Filled) -> None:
    """Every chain has to be found to its end, and one with a hole to the hole."""
    for batch in range(filled.pages.num_batches):
        chain = filled.chain(batch)
        found = filled.storage.batch_exists(chain)
        check(found == len(chain), f"batch_exists finds {found} of {len(chain)} pages")
        hole = batch % len(chain)
        chain[hole] = PageHash(b"never stored".ljust(32))
        found = filled.storage.batch_exists(chain)
        check(found == hole, f"batch_exists finds {found} pages in front of a hole at {hole}")
