"""KV that tells where it belongs, so that any mix-up of pages shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from hicache.errors import ConfigError
from hicache.hashing import hash_pages

if TYPE_CHECKING:
    from hicache.layout import KVGeometry
    from hicache.radix import RadixKey
    from hicache.types import IntArray

__all__ = ["KVPages", "fill_pages", "read_pages", "stamp_of", "write_stamps"]

_NUM_ELEMENTS = 8
_EXACT_BITS = 24
"""Integers of so many bits are exact in float32."""


class KVPages(Protocol):
    """A device pool or a host pool."""

    @property
    def geometry(self) -> KVGeometry:
        """What one page is."""

    def key_pages(self, layer: int) -> torch.Tensor:
        """Return the K of a layer as a view `[num_pages, page_size, num_kv_heads, head_dim]`."""

    def value_pages(self, layer: int) -> torch.Tensor:
        """Return the V of a layer; else as `key_pages`."""


def stamp_of(key: RadixKey, geometry: KVGeometry, *, first_page: int = 0) -> torch.Tensor:
    """Return the only right KV of the full pages of `key` from `first_page` on.

    The elements of a head are, repeated up to `head_dim`: names of the key, position, token, all
    tokens up to the end of the page, layer, K or V, head, 1. The names and the tokens are told by
    24 bits of their hashes.

    Returns:
        float32 `[2, num_layers, num_pages, page_size, num_kv_heads, head_dim]`.

    Raises:
        ConfigError: elements are not float32, or fewer than 8 make a head.
    """
    if geometry.dtype != "float32" or geometry.head_dim < _NUM_ELEMENTS:
        raise ConfigError(
            f"stamps need float32 and a head_dim of at least {_NUM_ELEMENTS}, not "
            f"{geometry.dtype} and {geometry.head_dim}"
        )
    page_size, heads, layers = geometry.page_size, geometry.num_kv_heads, geometry.num_layers
    hashes = hash_pages(key.data, page_size, key.namespace)[first_page:]
    first, last = first_page * page_size, (first_page + len(hashes)) * page_size
    shape = (2, layers, len(hashes), page_size, heads)
    stamp = np.empty((*shape, _NUM_ELEMENTS), dtype=np.float32)
    kv, layer, _, _, head = np.ogrid[:2, :layers, : len(hashes), :page_size, :heads]
    tokens_shape = (len(hashes), page_size, 1)
    stamp[..., 0] = _number(key.namespace)
    stamp[..., 1] = np.arange(first, last).reshape(tokens_shape)
    stamp[..., 2] = key.tokens()[first:last].reshape(tokens_shape)
    stamp[..., 3] = np.array([_number(one) for one in hashes]).reshape(-1, 1, 1)
    stamp[..., 4], stamp[..., 5], stamp[..., 6], stamp[..., 7] = layer, kv, head, 1
    return torch.from_numpy(stamp[..., np.arange(geometry.head_dim) % _NUM_ELEMENTS])


def write_stamps(pool: KVPages, key: RadixKey, pages: IntArray, *, first_page: int = 0) -> None:
    """Put the stamps of `key` from `first_page` on into `pages`, at most as many as there are."""
    stamp = stamp_of(key, pool.geometry, first_page=first_page)[:, :, : len(pages)]
    index = torch.from_numpy(pages[: stamp.shape[2]])
    for layer in range(pool.geometry.num_layers):
        pool.key_pages(layer)[index] = stamp[0, layer]
        pool.value_pages(layer)[index] = stamp[1, layer]


def read_pages(pool: KVPages, pages: IntArray) -> torch.Tensor:
    """Return a copy of what `pages` hold now, in the shape of `stamp_of`; waits for nothing."""
    index = torch.from_numpy(pages)
    layers = range(pool.geometry.num_layers)
    return torch.stack(
        [
            torch.stack([pages_of(layer)[index] for layer in layers])
            for pages_of in (pool.key_pages, pool.value_pages)
        ]
    )


def fill_pages(pool: KVPages, pages: IntArray, value: float) -> None:
    """Set every element of `pages` to `value`, which is no stamp when it is negative."""
    index = torch.from_numpy(pages)
    for layer in range(pool.geometry.num_layers):
        pool.key_pages(layer)[index] = value
        pool.value_pages(layer)[index] = value


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[: _EXACT_BITS // 8], "little")
