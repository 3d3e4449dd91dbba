"""KV that tells where it belongs, so that any mix-up of pages shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from hicache.errors import ConfigError
from hicache.hashing import hash_pages

if TYPE_CHECKING:
    from hicache.layout import PageGeometry
    from hicache.radix import RadixKey
    from hicache.types import IntArray

__all__ = ["KVPages", "fill_pages", "read_pages", "stamp_of", "write_stamps"]

_NUM_ELEMENTS = 8
_EXACT_BITS = 24
"""Integers of so many bits are exact in float32."""


class KVPages(Protocol):
    """A device pool or a host pool."""

    @property
    def geometry(self) -> PageGeometry:
        """What one page is."""

    def layer_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return each part of a layer as a view `[num_pages, page_size, num_heads, dim]`."""


def stamp_of(key: RadixKey, geometry: PageGeometry, *, first_page: int = 0) -> torch.Tensor:
    """Return the only right KV of the full pages of `key` from `first_page` on.

    The elements of a head are, repeated up to its size: names of the key, position, token, all
    tokens up to the end of the page, layer, part, head, 1. The names and the tokens are told by
    24 bits of their hashes.

    Returns:
        float32 `[num_parts, num_layers, num_pages, page_size, num_heads, dim]`.

    Raises:
        ConfigError: elements are not float32, or fewer than 8 make a head.
    """
    heads, head_dim = geometry.row_shape
    if geometry.dtype != "float32" or head_dim < _NUM_ELEMENTS:
        raise ConfigError(
            f"stamps need float32 and heads of at least {_NUM_ELEMENTS} elements, not "
            f"{geometry.dtype} and {head_dim}"
        )
    page_size, layers, parts = geometry.page_size, geometry.num_layers, geometry.num_parts
    hashes = hash_pages(key.data, page_size, key.namespace)[first_page:]
    first, last = first_page * page_size, (first_page + len(hashes)) * page_size
    shape = (parts, layers, len(hashes), page_size, heads)
    stamp = np.empty((*shape, _NUM_ELEMENTS), dtype=np.float32)
    part, layer, _, _, head = np.ogrid[:parts, :layers, : len(hashes), :page_size, :heads]
    tokens_shape = (len(hashes), page_size, 1)
    stamp[..., 0] = _number(key.namespace)
    stamp[..., 1] = np.arange(first, last).reshape(tokens_shape)
    stamp[..., 2] = key.tokens()[first:last].reshape(tokens_shape)
    stamp[..., 3] = np.array([_number(one) for one in hashes]).reshape(-1, 1, 1)
    stamp[..., 4], stamp[..., 5], stamp[..., 6], stamp[..., 7] = layer, part, head, 1
    return torch.from_numpy(stamp[..., np.arange(head_dim) % _NUM_ELEMENTS])


def write_stamps(pool: KVPages, key: RadixKey, pages: IntArray, *, first_page: int = 0) -> None:
    """Put the stamps of `key` from `first_page` on into `pages`, at most as many as there are."""
    stamp = stamp_of(key, pool.geometry, first_page=first_page)[:, :, : len(pages)]
    index = torch.from_numpy(pages[: stamp.shape[2]])
    for layer in range(pool.geometry.num_layers):
        for part, rows in zip(pool.layer_parts(layer), stamp[:, layer], strict=True):
            part[index] = rows


def read_pages(pool: KVPages, pages: IntArray) -> torch.Tensor:
    """Return a copy of what `pages` hold now, in the shape of `stamp_of`; waits for nothing."""
    index = torch.from_numpy(pages)
    layers = [pool.layer_parts(layer) for layer in range(pool.geometry.num_layers)]
    return torch.stack(
        [torch.stack([part[index] for part in parts]) for parts in zip(*layers, strict=True)]
    )


def fill_pages(pool: KVPages, pages: IntArray, value: float) -> None:
    """Set every element of `pages` to `value`, which is no stamp when it is negative."""
    index = torch.from_numpy(pages)
    for layer in range(pool.geometry.num_layers):
        for part in pool.layer_parts(layer):
            part[index] = value


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[: _EXACT_BITS // 8], "little")
