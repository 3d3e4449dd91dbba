"""Arithmetic of KV geometry and host layouts: what is how large, and where a page's bytes are.

A host layout is the order of six axes in memory, and everything else follows from that order. All
layouts are dense: no padding between rows, tokens, layers or pages.

    layer_first   kv, layer, page, token, head, dim    2 * layers pieces a page
    page_first    page, kv, token, layer, head, dim    1 piece a page
"""

from __future__ import annotations

import dataclasses
import math
from enum import Enum

from hicache.errors import ConfigError, OwnershipError

__all__ = ["DTYPE_BYTES", "Axis", "HostLayout", "KVGeometry", "host_shape", "pieces"]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes in one element, by the name of its type; torch uses the same names."""


class Axis(Enum):
    """One dimension of a KV pool. The order here is the one in which code indexes a pool."""

    KV = "kv"
    """K is 0, V is 1."""
    LAYER = "layer"
    PAGE = "page"
    TOKEN = "token"
    """Position inside the page."""
    HEAD = "head"
    DIM = "dim"


class HostLayout(str, Enum):
    """The order of the bytes in a host pool; an unknown name is a `ConfigError`."""

    PAGE_FIRST = "page_first"
    """A page is one piece, token by token, each with all its layers: made for storage."""
    LAYER_FIRST = "layer_first"
    """The device pool's own order: runs of pages copy as one block, a page is many pieces."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes from the slowest to the fastest."""
        return _AXES[self]

    @classmethod
    def _missing_(cls, value: object) -> HostLayout:
        known = ", ".join(layout.value for layout in cls)
        raise ConfigError(f"unknown host layout {value!r}; use one of: {known}")


_AXES = {
    HostLayout.PAGE_FIRST: (Axis.PAGE, Axis.KV, Axis.TOKEN, Axis.LAYER, Axis.HEAD, Axis.DIM),
    HostLayout.LAYER_FIRST: (Axis.KV, Axis.LAYER, Axis.PAGE, Axis.TOKEN, Axis.HEAD, Axis.DIM),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """What one page of KV is, on every tier: multi-head attention, K and V of equal shape.

    Attributes:
        num_layers: layers of the model that this rank holds.
        num_kv_heads: heads of K (and of V) in one layer that this rank holds.
        head_dim: elements in one head of one token.
        dtype: name of the element type, a key of `DTYPE_BYTES`.
        page_size: tokens in a page.

    Raises:
        ConfigError: a field that cannot be; the message names it.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    page_size: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"KVGeometry.{name} must be an int of at least 1, not {value!r}")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ConfigError(f"KVGeometry.dtype {self.dtype!r} is not known; use one of: {known}")

    @property
    def row_elements(self) -> int:
        """Elements of one token in one layer, K or V alone."""
        return self.num_kv_heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer, K or V alone."""
        return self.row_elements * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: all layers, K and V."""
        return 2 * self.num_layers * self.row_bytes

    @property
    def page_layer_bytes(self) -> int:
        """Bytes of one page in one layer, K or V alone."""
        return self.page_size * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all layers, K and V."""
        return self.page_size * self.token_bytes

    @property
    def kv_shape(self) -> str:
        """What the bytes of a page are, as `hicache.hashing.StorageNamespace` names it."""
        return f"mha:layers={self.num_layers},heads={self.num_kv_heads},head_dim={self.head_dim}"


def host_shape(geometry: KVGeometry, layout: HostLayout, num_pages: int) -> tuple[int, ...]:
    """Return the extents of a host pool of `num_pages`, in the order of `layout.axes`."""
    extents = {
        Axis.KV: 2,
        Axis.LAYER: geometry.num_layers,
        Axis.PAGE: num_pages,
        Axis.TOKEN: geometry.page_size,
        Axis.HEAD: geometry.num_kv_heads,
        Axis.DIM: geometry.head_dim,
    }
    return tuple(extents[axis] for axis in layout.axes)


def pieces(
    geometry: KVGeometry, layout: HostLayout, page: int, num_pages: int
) -> tuple[tuple[int, int], ...]:
    """Return where the bytes of `page` are in a host pool of `num_pages`.

    Returns:
        The contiguous pieces in the order of memory, each `(offset, bytes)`: byte offsets from the
        start of the pool. All are of one size; together they are `geometry.page_bytes`.

    Raises:
        OwnershipError: the pool has no such page.
    """
    if not 0 <= page < num_pages:
        raise OwnershipError(f"page {page} is not in a pool of {num_pages}; pages count from 0")
    outer = layout.axes.index(Axis.PAGE)
    num_pieces = math.prod(host_shape(geometry, layout, num_pages)[:outer])
    piece_bytes = geometry.page_bytes // num_pieces
    return tuple(
        ((block * num_pages + page) * piece_bytes, piece_bytes) for block in range(num_pieces)
    )
