"""What a cache may hold and has to keep, known from outside: dictionaries of what was put there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from hicache.hashing import TOKEN_BYTES
from hicache.sim.options import GEOMETRY
from hicache.testing.stamped_kv import read_pages, stamp_of

if TYPE_CHECKING:
    import torch

    from hicache.hiradix_cache import PrefixMatch
    from hicache.radix import RadixKey, RadixNode
    from hicache.sim.system import System
    from hicache.types import IntArray, PageHash

Prefix: TypeAlias = "tuple[bytes, bytes]"
"""A namespace, and tokens in whole pages."""

PAGE_BYTES = GEOMETRY.page_size * TOKEN_BYTES


class Lock(NamedTuple):
    """A lock that somebody holds, and the device pages that it protects."""

    node: RadixNode
    pages: IntArray


class CacheModel:
    """The book-keeper of one cache.

    Attributes:
        inserted: the KV of the last page of each prefix that was inserted since the last reset.
        stored: likewise of each that the store has held; a reset forgets nothing of it.
        locks: that are held by no request.
        gone: requests that have ended or were aborted.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        self._keys: dict[Prefix, RadixKey] = {}
        self._computed: dict[PageHash, tuple[Prefix, torch.Tensor]] = {}
        self.inserted: dict[Prefix, torch.Tensor] = {}
        self.stored: dict[Prefix, torch.Tensor] = {}
        self.locks: list[Lock] = []
        self.gone: set[str] = set()

    def insert(self, key: RadixKey) -> None:
        """Note that the full pages of `key` were inserted."""
        self.inserted |= self.compute(key)

    def key_of(self, node: RadixNode) -> RadixKey:
        """Return the key that ends where `node` does."""
        path = self._system.cache.tree.path(node)
        return self._keys[node.namespace, b"".join(one.key for one in path)]

    def lock(self, node: RadixNode) -> None:
        """Note that somebody has locked `node`."""
        self.locks.append(Lock(node, self._device_pages(node)))

    def check_match(self, key: RadixKey, found: PrefixMatch) -> None:
        """What is found begins `key`, was put there, and holds the bytes that were put there."""
        prefixes = prefixes_of(key)[: found.match.num_device_pages + found.match.num_host_pages]
        assert len(prefixes) == found.last_host_node.end
        known = self.stored | self.inserted
        assert [prefix for prefix in prefixes if prefix not in known] == []
        held = read_pages(self._system.pools[0], found.device_pages)
        for page, prefix in enumerate(prefixes[: found.match.num_device_pages]):
            assert held[:, :, page].equal(known[prefix])

    def check(self) -> None:
        """Nothing is stored that nobody computed, no lock is broken, nobody gone is remembered."""
        cache = self._system.cache
        for page_hash in self._system.store.keys:
            assert page_hash in self._computed, "a page is stored that nobody has computed"
            prefix, kv = self._computed[page_hash]
            self.stored[prefix] = kv
        for lock in self.locks:
            assert np.array_equal(self._device_pages(lock.node), lock.pages)
        for request_id in self.gone:
            assert cache.check_prefetch_progress(request_id)
            assert cache.pop_prefetch_loaded_tokens(request_id) == 0

    def compute(self, key: RadixKey) -> dict[Prefix, torch.Tensor]:
        """Note that somebody, perhaps elsewhere, has computed the full pages of `key`."""
        stamp = stamp_of(key, GEOMETRY)
        kv = {prefix: stamp[:, :, page] for page, prefix in enumerate(prefixes_of(key))}
        self._keys |= {prefix: key.prefix(len(prefix[1]) // TOKEN_BYTES) for prefix in kv}
        self._computed |= dict(zip(self._system.stamps.hashes(key), kv.items(), strict=True))
        return kv

    def _device_pages(self, node: RadixNode) -> IntArray:
        chunks = [one.device_pages for one in self._system.cache.tree.path(node)]
        return np.concatenate([np.empty(0, np.int64), *[one for one in chunks if one is not None]])


def prefixes_of(key: RadixKey) -> list[Prefix]:
    """Return every prefix of `key` in whole pages, the shortest first."""
    ends = range(PAGE_BYTES, len(key.data) + 1, PAGE_BYTES)
    return [(key.namespace, key.data[:end]) for end in ends]
