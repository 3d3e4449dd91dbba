"""What must be true of a whole cache between any two calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.pools import CpPageAllocator, PageAllocator
from hicache.pools.agreed_allocator import AgreedAllocator
from hicache.radix import check_tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache.hiradix_cache import HiRadixCache
    from hicache.pools import Allocator
    from hicache.types import IntArray

__all__ = ["check_system"]

_NUM_NAMED = 8
"""How many pages without an owner a sentence names."""


def check_system(
    cache: HiRadixCache, *, request_device_pages: Sequence[IntArray] = ()
) -> list[str]:
    """Return every contradiction in `cache`, one sentence each; an empty list means none.

    The tree agrees with itself (`check_tree`), and in each pool every page has exactly one owner:
    the free list, a node, an operation in flight, a copy that outlived a reset, or a request.

    For the cache's own thread. Reads everything and changes nothing; O(nodes + pages).

    Args:
        cache: with `PageAllocator` or `CpPageAllocator` as its free lists.
        request_device_pages: device pages that requests own, without those of the tree that they
            only hold locks on.

    Raises:
        ConfigError: a free list of another kind, which cannot be looked into.
    """
    controller, nodes = cache.controller, list(cache.tree.nodes())
    operation_device, operation_host = controller.owned_pages()
    held_device, held_host = cache.held_pages()
    violations = check_tree(cache.tree)
    violations += _check_pool(
        "device",
        controller.device_allocator,
        {
            "the tree": [node.device_pages for node in nodes if node.device_pages is not None],
            "an operation": operation_device,
            "a copy from before a reset": held_device,
            "a request": request_device_pages,
        },
    )
    violations += _check_pool(
        "host",
        controller.host_allocator,
        {
            "the tree": [node.host_pages for node in nodes if node.host_pages is not None],
            "an operation": operation_host,
            "a copy from before a reset": held_host,
        },
    )
    return violations


def _check_pool(
    pool: str, allocator: Allocator, owners: Mapping[str, Sequence[IntArray]]
) -> Iterator[str]:
    free = []
    if isinstance(allocator, AgreedAllocator):
        free, allocator = allocator.free_pages().tolist(), allocator.inner
    if not isinstance(allocator, (PageAllocator, CpPageAllocator)):
        raise ConfigError(
            f"the free list of the {pool} pool is a {type(allocator).__name__}; build the cache "
            "on a PageAllocator or a CpPageAllocator to check it"
        )
    owner_of = dict.fromkeys(free + allocator.free_pages().tolist(), "the free list")
    for owner, chunks in owners.items():
        for page in (page for chunk in chunks for page in chunk.tolist()):
            if not 0 <= page < allocator.num_pages:
                yield f"{pool} page {page} of {owner} is not in the pool"
            elif page in owner_of:
                yield f"{pool} page {page} belongs to {owner_of[page]} and to {owner}"
            else:
                owner_of[page] = owner
    lost = [page for page in range(allocator.num_pages) if page not in owner_of]
    if lost:
        named = ", ".join(map(str, lost[:_NUM_NAMED]))
        yield f"{len(lost)} {pool} page(s) have no owner: {named}"
