"""Arithmetic of page geometry and host layouts: what is how large, and where a page's bytes are.

For each layer and token a page holds one row of each part. Multi-head attention has two parts, K
and V, latent attention (MLA) has one, and so have the rows that a model keeps beside its KV.

A host layout is the order of six axes in memory, and everything else follows from that order. All
layouts are dense: no padding between rows, tokens, layers or pages. An axis of extent 1 takes no
room: MLA is stored as if it had neither parts nor heads.

    layer_first         part, layer, page, token, head, dim    parts * layers pieces a page
    page_first          page, part, token, layer, head, dim    1 piece a page
    page_first_direct   page, part, layer, token, head, dim    1 piece a page
    page_head           page, head, part, layer, token, dim    1 piece a page, and 1 a head of it
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from enum import Enum
from typing import ClassVar, NamedTuple

from hicache.errors import ConfigError, OwnershipError

__all__ = [
    "DTYPE_BYTES",
    "Axis",
    "HeadRange",
    "HostLayout",
    "KVGeometry",
    "MlaGeometry",
    "PageGeometry",
    "RowGeometry",
    "host_shape",
    "pieces",
]

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes in one element, by the name of its type; torch uses the same names."""


class Axis(Enum):
    """One dimension of a pool. The order here is the one in which code indexes a pool."""

    PART = "part"
    """Of multi-head attention, K is 0 and V is 1."""
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
    PAGE_FIRST_DIRECT = "page_first_direct"
    """A page is one piece, layer by layer: for storage too, and a layer of a page copies as one."""
    LAYER_FIRST = "layer_first"
    """The device pool's own order: runs of pages copy as one block, a page is many pieces."""
    PAGE_HEAD = "page_head"
    """A page is one piece, head by head, so that neighbouring heads of it are one piece as well:
    ranks with other shares of the heads can read what was stored by head. Inside a head it is
    layer by layer, because a layer's tokens of a head then copy as one block."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes from the slowest to the fastest."""
        return _AXES[self]

    @classmethod
    def _missing_(cls, value: object) -> HostLayout:
        known = ", ".join(layout.value for layout in cls)
        raise ConfigError(f"unknown host layout {value!r}; use one of: {known}")


_AXES = {
    HostLayout.PAGE_FIRST: (Axis.PAGE, Axis.PART, Axis.TOKEN, Axis.LAYER, Axis.HEAD, Axis.DIM),
    HostLayout.PAGE_FIRST_DIRECT: (
        Axis.PAGE,
        Axis.PART,
        Axis.LAYER,
        Axis.TOKEN,
        Axis.HEAD,
        Axis.DIM,
    ),
    HostLayout.LAYER_FIRST: (Axis.PART, Axis.LAYER, Axis.PAGE, Axis.TOKEN, Axis.HEAD, Axis.DIM),
    HostLayout.PAGE_HEAD: (Axis.PAGE, Axis.HEAD, Axis.PART, Axis.LAYER, Axis.TOKEN, Axis.DIM),
}


class HeadRange(NamedTuple):
    """KV heads `first` up to `last`, exclusive, of the `total` that a layer of the model has."""

    first: int
    last: int
    total: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageGeometry(ABC):
    """What one page of a pool is, on every tier. Pools of one model may differ in all but pages.

    Attributes:
        num_parts: rows that a token has in one layer.
        has_heads: whether tensor-parallel ranks split a row by heads; else each has all of it.
        num_layers: layers of the model that this rank holds.
        dtype: name of the element type, a key of `DTYPE_BYTES`.
        page_size: tokens in a page.
        first_layer: the model's number for the first of these layers. Pipeline stages may be of
            unequal length, so with more than one a store has to be told; else it is 0.

    Raises:
        ConfigError: a field that cannot be; the message names it.
    """

    num_parts: ClassVar[int]
    has_heads: ClassVar[bool] = False

    num_layers: int
    dtype: str
    page_size: int
    first_layer: int | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (type(value) is not int or value < 1):
                raise ConfigError(
                    f"{owner}.{field.name} must be an int of at least 1, not {value!r}"
                )
        first = self.first_layer
        if first is not None and (type(first) is not int or first < 0):
            raise ConfigError(f"{owner}.first_layer must be an int of at least 0, not {first!r}")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ConfigError(f"{owner}.dtype {self.dtype!r} is not known; use one of: {known}")

    @property
    @abstractmethod
    def row_shape(self) -> tuple[int, int]:
        """Heads of a row, and elements of a head."""

    @property
    @abstractmethod
    def kv_shape(self) -> str:
        """What the bytes of a page are, as `hicache.hashing.StorageNamespace` names it."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer, one part alone."""
        return math.prod(self.row_shape) * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: all layers, all parts."""
        return self.num_parts * self.num_layers * self.row_bytes

    @property
    def page_layer_bytes(self) -> int:
        """Bytes of one page in one layer, one part alone."""
        return self.page_size * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all layers, all parts."""
        return self.page_size * self.token_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGeometry(PageGeometry):
    """Multi-head attention (MHA, GQA): K and V of equal shape.

    Attributes:
        num_kv_heads: heads of K (and of V) in one layer that this rank holds.
        head_dim: elements in one head of one token.
        kv_heads: which heads of the model those are, where tensor-parallel ranks do not simply hold
            equal shares one after the other: in an unequal split, or with more ranks than heads.
    """

    num_parts: ClassVar[int] = 2
    has_heads: ClassVar[bool] = True

    num_kv_heads: int
    head_dim: int
    kv_heads: HeadRange | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads is None:
            return
        first, last, total = self.kv_heads
        if not (0 <= first < last <= total and last - first == self.num_kv_heads):
            raise ConfigError(
                f"KVGeometry.kv_heads must be num_kv_heads = {self.num_kv_heads} heads within the "
                f"total, not {first} to {last} of {total}"
            )

    @property
    def row_shape(self) -> tuple[int, int]:
        """See `PageGeometry.row_shape`."""
        return (self.num_kv_heads, self.head_dim)

    @property
    def kv_shape(self) -> str:
        """See `PageGeometry.kv_shape`."""
        return f"mha:layers={self.num_layers},heads={self.num_kv_heads},head_dim={self.head_dim}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaGeometry(PageGeometry):
    """Multi-head latent attention: all heads share one row, from which K and V are made.

    Attributes:
        kv_lora_rank: elements of the latent, which come first in the row.
        qk_rope_head_dim: elements of the rotated key, which follow.
    """

    num_parts: ClassVar[int] = 1

    kv_lora_rank: int
    qk_rope_head_dim: int

    @property
    def row_shape(self) -> tuple[int, int]:
        """See `PageGeometry.row_shape`."""
        return (1, self.kv_lora_rank + self.qk_rope_head_dim)

    @property
    def kv_shape(self) -> str:
        """See `PageGeometry.kv_shape`."""
        return (
            f"mla:layers={self.num_layers},latent={self.kv_lora_rank},rope={self.qk_rope_head_dim}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGeometry(PageGeometry):
    """What a model keeps beside its KV: a row for each layer and token, such as an indexer's key.

    Where tensor-parallel ranks have the KV whole, they have such rows whole and alike, too.

    Attributes:
        name: what the rows are, an identifier.
        width: elements in a row.
    """

    num_parts: ClassVar[int] = 1

    name: str
    width: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.isidentifier():
            raise ConfigError(f"RowGeometry.name {self.name!r} must be an identifier")

    @property
    def row_shape(self) -> tuple[int, int]:
        """See `PageGeometry.row_shape`."""
        return (1, self.width)

    @property
    def kv_shape(self) -> str:
        """See `PageGeometry.kv_shape`."""
        return f"{self.name}:layers={self.num_layers},width={self.width}"


def host_shape(geometry: PageGeometry, layout: HostLayout, num_pages: int) -> tuple[int, ...]:
    """Return the extents of a host pool of `num_pages`, in the order of `layout.axes`."""
    num_heads, head_dim = geometry.row_shape
    extents = {
        Axis.PART: geometry.num_parts,
        Axis.LAYER: geometry.num_layers,
        Axis.PAGE: num_pages,
        Axis.TOKEN: geometry.page_size,
        Axis.HEAD: num_heads,
        Axis.DIM: head_dim,
    }
    return tuple(extents[axis] for axis in layout.axes)


def pieces(
    geometry: PageGeometry, layout: HostLayout, page: int, num_pages: int
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
