"""The only right bytes of every page, and what the pools really hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.hashing import TOKEN_BYTES, hash_pages
from hicache.layout import Axis
from hicache.testing.stamped_kv import stamp_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hicache.layout import HostLayout, PageGeometry
    from hicache.radix import RadixKey
    from hicache.testing.stamped_kv import KVPages
    from hicache.types import IntArray, PageHash

__all__ = ["POISON_ROW", "PoolBytes", "Stamps"]

POISON_ROW = 0
"""The row of what free pages and pages that nobody has computed hold."""

_FIRST_ROWS = 64
_POISON = -7.0
_SCRIBBLE = -3.0


class Stamps:
    """A growing table of stamps: one row for each prefix that a key has named.

    Attributes:
        table: `[num_rows, num_parts, num_layers, page_size, num_heads, dim]`, with spare rows.
    """

    def __init__(self, geometry: PageGeometry, layout: HostLayout) -> None:
        self._geometry = geometry
        self._page_bytes = geometry.page_size * TOKEN_BYTES
        self._storage_axes = _axes_of_stored_bytes(layout)
        self._rows: dict[tuple[bytes, bytes], list[int]] = {}
        self._row_of_hash: dict[PageHash, int] = {}
        shape = (geometry.num_parts, geometry.num_layers, geometry.page_size, *geometry.row_shape)
        self.table = np.full((_FIRST_ROWS, *shape), _POISON, dtype=np.float32)
        self._num_rows = POISON_ROW + 1

    def rows(self, key: RadixKey) -> list[int]:
        """Return the row of each full page of `key`; new ones are stamped."""
        data = key.data[: len(key.data) - len(key.data) % self._page_bytes]
        if data and (key.namespace, data) not in self._rows:
            self._add(key, data)
        return self._rows.get((key.namespace, data), [])

    def hashes(self, key: RadixKey) -> list[PageHash]:
        """Return the hash of each full page of `key`."""
        return hash_pages(key.data, self._geometry.page_size, key.namespace)

    def known_rows(self, namespace: bytes, data: bytes) -> list[int] | None:
        """Return the rows of a prefix in whole pages; None when no key has ever named it."""
        return self._rows.get((namespace, data))

    def stored_bytes(self, page_hash: PageHash) -> bytes | None:
        """Return what storage has to hold under a hash; None when no key has that page."""
        row = self._row_of_hash.get(page_hash)
        return None if row is None else self.table[row].transpose(self._storage_axes).tobytes()

    def _add(self, key: RadixKey, data: bytes) -> None:
        stamp = np.moveaxis(stamp_of(key, self._geometry).numpy(), 2, 0)
        rows: list[int] = []
        for page, page_hash in enumerate(self.hashes(key)):
            row = self._row_of_hash.get(page_hash)
            if row is None:
                row = self._row_of_hash[page_hash] = self._new_row()
                self.table[row] = stamp[page]
            rows.append(row)
            prefix = data[: (page + 1) * self._page_bytes]
            self._rows.setdefault((key.namespace, prefix), rows.copy())

    def _new_row(self) -> int:
        row = self._num_rows
        if row == len(self.table):
            self.table = np.concatenate([self.table, np.full_like(self.table, _POISON)])
        self._num_rows = row + 1
        return row


class PoolBytes:
    """One pool's pages, read and written without waiting, for whoever knows what must be there.

    Args:
        pool: in the memory of a CPU.
        stamps: what can be there.
    """

    def __init__(self, pool: KVPages, stamps: Stamps) -> None:
        self._stamps = stamps
        self._views: list[tuple[int, int, npt.NDArray[np.float32]]] = []
        for layer in range(pool.geometry.num_layers):
            for part, rows in enumerate(pool.layer_parts(layer)):
                self._views.append((part, layer, rows.numpy()))

    def put(self, pages: IntArray, rows: Sequence[int], *, layer: int | None = None) -> None:
        """Put the stamps of `rows` into `pages`, one each; with `layer`, only into that."""
        stamps = self._stamps.table[rows]
        for part, own_layer, view in self._views:
            if layer is None or layer == own_layer:
                view[pages] = stamps[:, part, own_layer]

    def poison(self, pages: IntArray) -> None:
        """Make what free pages hold unlike any stamp."""
        for _, _, view in self._views:
            view[pages] = _POISON

    def scribble(self, pages: IntArray, layer: int) -> None:
        """Leave garbage in a layer, as a copy does that breaks off."""
        for _, own_layer, view in self._views:
            if own_layer == layer:
                view[pages] = _SCRIBBLE

    def wrong(self, pages: IntArray, rows: Sequence[int], *, layer: int | None = None) -> list[int]:
        """Return which of `pages`, by place, do not hold the stamps of `rows`.

        Args:
            pages: page ids.
            rows: one for each page.
            layer: the only one to look at.
        """
        stamps = self._stamps.table[rows]
        wrong: set[int] = set()
        for part, own_layer, view in self._views:
            if layer is not None and own_layer != layer:
                continue
            differs = view[pages] != stamps[:, part, own_layer]
            if differs.any():
                wrong.update(np.flatnonzero(differs.reshape(len(pages), -1).any(1)).tolist())
        return sorted(wrong)


def _axes_of_stored_bytes(layout: HostLayout) -> list[int]:
    """Return how a row of the table is turned into the order in which storage gets a page."""
    row_axes = [axis for axis in Axis if axis is not Axis.PAGE]
    return [row_axes.index(axis) for axis in layout.axes if axis is not Axis.PAGE]
