"""A cached prompt to match and lock, and the smallest cache that holds it."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.forest import VOCABULARY
from hicache.config import HiCacheConfig, HostPoolConfig
from hicache.device import create_device
from hicache.hiradix_cache import HiRadixCache, create_hiradix_cache
from hicache.layout import KVGeometry
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.radix import RadixKey
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache.types import IntArray

__all__ = ["Prompt", "cache_of", "one_torch_thread"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt and the pages it is cached in, as one run or as a conversation has grown.

    Attributes:
        tokens: its tokens, whole pages.
        key: the key of all of them.
        pages: in shuffled order, so that a wrong order shows.
        num_nodes: in how many nodes of equal size it is.
        page_size: tokens in a page.
    """

    tokens: list[int]
    key: RadixKey
    pages: IntArray
    num_nodes: int
    page_size: int

    @classmethod
    def create(cls, *, num_tokens: int, num_nodes: int, page_size: int) -> Prompt:
        """Return a prompt of random tokens, the same each time."""
        rng = np.random.default_rng(0)
        tokens = rng.integers(VOCABULARY, size=num_tokens)
        return cls(
            tokens=tokens.tolist(),
            key=RadixKey(tokens),
            pages=rng.permutation(num_tokens // page_size),
            num_nodes=num_nodes,
            page_size=page_size,
        )

    @property
    def params(self) -> dict[str, str | int | float | bool]:
        """What results say about it."""
        num_tokens = len(self.tokens)
        return {"tokens": num_tokens, "nodes": self.num_nodes, "page_size": self.page_size}

    @property
    def slots(self) -> list[int]:
        """The token slots it is cached in."""
        return [
            page * self.page_size + offset
            for page in self.pages.tolist()
            for offset in range(self.page_size)
        ]

    def growth(self) -> Iterator[tuple[RadixKey, IntArray]]:
        """Yield key and pages as they grow node by node."""
        step = len(self.pages) // self.num_nodes
        for num_pages in range(step, len(self.pages) + 1, step):
            yield self.key.prefix(num_pages * self.page_size), self.pages[:num_pages]

    def insert_into(self, insert: Callable[[RadixKey, IntArray], object]) -> None:
        """Let the prompt grow node by node."""
        for key, pages in self.growth():
            insert(key, pages)


@contextmanager
def cache_of(prompt: Prompt) -> Iterator[HiRadixCache]:
    """Provide a cache that holds `prompt`, which fills its device pool; a page has few bytes."""
    geometry = KVGeometry(
        num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16", page_size=prompt.page_size
    )
    num_pages = len(prompt.pages)
    allocator = PageAllocator(num_pages)
    allocator.alloc(num_pages)
    cache, _ = create_hiradix_cache(
        HiCacheConfig(
            page_size=prompt.page_size,
            write_policy=WritePolicy.WRITE_BACK,
            host=HostPoolConfig(ratio=1.0, huge_pages=False),
        ),
        device=create_device("cpu"),
        device_pool=DeviceKVPool(geometry, num_pages=num_pages, torch_device=torch.device("cpu")),
        device_allocator=allocator,
    )
    try:
        prompt.insert_into(
            lambda key, pages: cache.insert(key, pages, request_id="prompt", chunked=True)
        )
        yield cache
    finally:
        cache.close()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch work in the calling thread alone."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
