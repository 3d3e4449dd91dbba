"""The only right bytes of every page, and what the pools really hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicache.hashing import TOKEN_BYTES, hash_pages
from hicache.layout import Axis
from hicache.testing.stamped_kv import stamp_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hicache.layout import HostLayout, PageGeometry
    from hicache.pools import CpLayout
    from hicache.radix import RadixKey
    from hicache.testing.stamped_kv import KVPages
    from hicache.types import IntArray, PageHash

__all__ = ["POISON_ROW", "PoolBytes", "Stamps"]

POISON_ROW = 0
"""The row of what free pages and pages that nobody has computed hold."""

_FIRST_ROWS = 64
_PLACE_OF_ONE = 7
"""Where a stamp says nothing: see `stamp_of`; heads have 8 elements here."""

_MAX_POOLS = 8
_POISON = -7.0
_SCRIBBLE = -3.0


class Stamps:
    """Growing tables of stamps, one for each pool: a row for each prefix that a key has named.

    Args:
        geometries: of the pools that a page id names a page in.
        layout: of the host pools.
        shard: which part of the KV; no two have a stamp in common.

    Attributes:
        tables: `[num_rows, num_parts, num_layers, page_size, num_heads, dim]`, with spare rows.
    """

    def __init__(
        self, geometries: Sequence[PageGeometry], layout: HostLayout, *, shard: int = 0
    ) -> None:
        self._geometries = geometries
        self._page_size = geometries[0].page_size
        self._page_bytes = self._page_size * TOKEN_BYTES
        self._shard = shard
        self._storage_axes = _axes_of_stored_bytes(layout)
        self._rows: dict[tuple[bytes, bytes], list[int]] = {}
        self._row_of_hash: dict[PageHash, int] = {}
        self.tables = [
            np.full((_FIRST_ROWS, *_page_shape(one)), _POISON, dtype=np.float32)
            for one in geometries
        ]
        self._num_rows = POISON_ROW + 1

    def rows(self, key: RadixKey) -> list[int]:
        """Return the row of each full page of `key`; new ones are stamped."""
        data = key.data[: len(key.data) - len(key.data) % self._page_bytes]
        if data and (key.namespace, data) not in self._rows:
            self._add(key, data)
        return self._rows.get((key.namespace, data), [])

    def hashes(self, key: RadixKey) -> list[PageHash]:
        """Return the hash of each full page of `key`."""
        return hash_pages(key.data, self._page_size, key.namespace)

    def known_rows(self, namespace: bytes, data: bytes) -> list[int] | None:
        """Return the rows of a prefix in whole pages; None when no key has ever named it."""
        return self._rows.get((namespace, data))

    def stored_bytes(self, page_hash: PageHash) -> bytes | None:
        """Return what storage has to hold under a hash; None when no key has that page."""
        row = self._row_of_hash.get(page_hash)
        if row is None:
            return None
        pages = (table[row].transpose(self._storage_axes) for table in self.tables)
        return b"".join(page.tobytes() for page in pages)

    def _add(self, key: RadixKey, data: bytes) -> None:
        stamps = [self._stamp(key, pool) for pool in range(len(self.tables))]
        rows: list[int] = []
        for page, page_hash in enumerate(self.hashes(key)):
            row = self._row_of_hash.get(page_hash)
            if row is None:
                row = self._row_of_hash[page_hash] = self._new_row()
                for table, stamp in zip(self.tables, stamps, strict=True):
                    table[row] = stamp[page]
            rows.append(row)
            prefix = data[: (page + 1) * self._page_bytes]
            self._rows.setdefault((key.namespace, prefix), rows.copy())

    def _stamp(self, key: RadixKey, pool: int) -> npt.NDArray[np.float32]:
        """Return the stamps of `key` in a pool, page by page, which tell pool and shard too."""
        stamp: npt.NDArray[np.float32] = stamp_of(key, self._geometries[pool]).numpy()
        stamp[..., _PLACE_OF_ONE] += pool + self._shard * _MAX_POOLS
        return np.moveaxis(stamp, 2, 0)

    def _new_row(self) -> int:
        row = self._num_rows
        if row == len(self.tables[0]):
            self.tables = [
                np.concatenate([table, np.full_like(table, _POISON)]) for table in self.tables
            ]
        self._num_rows = row + 1
        return row


class _View(NamedTuple):
    """One part of a layer of a pool."""

    pool: int
    part: int
    layer: int
    pages: npt.NDArray[np.float32]


class PoolBytes:
    """The pages of pools, read and written without waiting, for whoever knows what must be there.

    Args:
        pools: in the memory of a CPU; a page id names a page in each.
        stamps: what can be there.
        layout: of pages that ranks share. Page ids are logical then, and whatever is done with a
            page that another rank has, does nothing here.
    """

    def __init__(
        self, pools: Sequence[KVPages], stamps: Stamps, *, layout: CpLayout | None = None
    ) -> None:
        self._stamps = stamps
        self._layout = layout
        self._views = [
            _View(number, part, layer, rows.numpy())
            for number, pool in enumerate(pools)
            for layer in range(pool.geometry.num_layers)
            for part, rows in enumerate(pool.layer_parts(layer))
        ]

    def put(self, pages: IntArray, rows: Sequence[int], *, layer: int | None = None) -> None:
        """Put the stamps of `rows` into `pages`, one each; with `layer`, only into that."""
        places, pages = self._here(pages)
        stamps = self._stamps_of(rows, places)
        for pool, part, own_layer, view in self._views:
            if layer is None or layer == own_layer:
                view[pages] = stamps[pool][:, part, own_layer]

    def poison(self, pages: IntArray) -> None:
        """Make what free pages hold unlike any stamp."""
        _, pages = self._here(pages)
        for view in self._views:
            view.pages[pages] = _POISON

    def scribble(self, pages: IntArray, layer: int, *, pool: int = 0) -> None:
        """Leave garbage in a layer of a pool, as a copy does that breaks off.

        Args:
            pages: where they lie in the pool, as copies name them.
            layer: of the pool.
            pool: its number.
        """
        for view in self._views:
            if (view.pool, view.layer) == (pool, layer):
                view.pages[pages] = _SCRIBBLE

    def wrong(self, pages: IntArray, rows: Sequence[int], *, layer: int | None = None) -> list[int]:
        """Return which of `pages`, by place, do not hold the stamps of `rows`.

        Args:
            pages: page ids.
            rows: one for each page.
            layer: the only one to look at.
        """
        places, pages = self._here(pages)
        stamps = self._stamps_of(rows, places)
        wrong: set[int] = set()
        for pool, part, own_layer, view in self._views:
            if layer is not None and own_layer != layer:
                continue
            differs = view[pages] != stamps[pool][:, part, own_layer]
            if differs.any():
                wrong.update(np.flatnonzero(differs.reshape(len(pages), -1).any(1)).tolist())
        return places[sorted(wrong)].tolist() if wrong else []

    def _here(self, pages: IntArray) -> tuple[IntArray, IntArray]:
        """Return which of `pages`, by place, this rank has, and where they lie."""
        if self._layout is None:
            return np.arange(len(pages)), pages
        owned = self._layout.owned_by_this_rank(pages)
        return np.flatnonzero(owned), self._layout.physical_pages(pages[owned])

    def _stamps_of(self, rows: Sequence[int], places: IntArray) -> list[npt.NDArray[np.float32]]:
        chosen = np.asarray(rows, dtype=np.int64)[places]
        return [table[chosen] for table in self._stamps.tables]


def _page_shape(geometry: PageGeometry) -> tuple[int, ...]:
    shape = (geometry.num_parts, geometry.num_layers, geometry.page_size)
    return (*shape, *geometry.row_shape)


def _axes_of_stored_bytes(layout: HostLayout) -> list[int]:
    """Return how a row of the table is turned into the order in which storage gets a page."""
    row_axes = [axis for axis in Axis if axis is not Axis.PAGE]
    return [row_axes.index(axis) for axis in layout.axes if axis is not Axis.PAGE]
