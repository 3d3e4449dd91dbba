"""The host's pool (L2): pages in host memory, in a layout of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache.device.host_memory import HostMemory
from hicache.errors import CapacityError, ClosedError, ConfigError, OwnershipError
from hicache.layout import Axis, host_shape, pieces

if TYPE_CHECKING:
    from hicache.layout import HostLayout, PageGeometry
    from hicache.types import IntArray

__all__ = ["HostKVPool", "create_host_pool", "host_pool_pages"]


class HostKVPool:
    """`num_pages` pages in host memory. Owns `memory`: `close` closes it.

    Storage sees a page as pieces of memory, copy engines see a layer of all pages as a tensor; both
    are the same bytes. Who may touch which page is the `PageAllocator`'s matter.

    Args:
        geometry: what one page is, the same as in the device pool.
        num_pages: size of the pool.
        layout: order of the bytes.
        memory: where they are; at least `num_pages * geometry.page_bytes`.

    Raises:
        ConfigError: `num_pages` is below 1.
        CapacityError: `memory` is too small.
    """

    def __init__(
        self, geometry: PageGeometry, *, num_pages: int, layout: HostLayout, memory: HostMemory
    ) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages must be at least 1, not {num_pages}")
        num_bytes = num_pages * geometry.page_bytes
        if memory.num_bytes < num_bytes:
            raise CapacityError(
                f"{num_pages} pages need {num_bytes} bytes and the memory has {memory.num_bytes}; "
                "use fewer pages or a larger memory"
            )
        self.geometry = geometry
        self.num_pages = num_pages
        self.layout = layout
        self._memory = memory
        self._region = (memory.address, num_bytes)
        # Page p has its pieces where page 0 has them, each p times its own size further on.
        self._first_page_pieces = [
            (memory.address + offset, size)
            for offset, size in pieces(geometry, layout, 0, num_pages)
        ]
        elements = memory.tensor[:num_bytes].view(getattr(torch, geometry.dtype))
        stored = elements.view(host_shape(geometry, layout, num_pages))
        parts = stored.permute([layout.axes.index(axis) for axis in Axis])
        self._layer_parts = [layer.unbind(0) for layer in parts.unbind(1)]
        self._is_closed = False

    def layer_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return each part of `layer` as a view `[num_pages, page_size, num_heads, dim]`.

        Strided where the layout is not `layer_first`; the elements of a head are always contiguous,
        and so are the heads of a token where the layout is not `page_head`.

        Raises:
            ClosedError: the pool is closed.
        """
        self._require_open()
        return self._layer_parts[layer]

    def page_pieces(self, page: int) -> tuple[tuple[int, int], ...]:
        """Return where the bytes of `page` are: `(address, bytes)`, in the order of memory.

        Raises:
            OwnershipError: the pool has no such page.
            ClosedError: the pool is closed.
        """
        self._require_open()
        if not 0 <= page < self.num_pages:
            raise OwnershipError(
                f"page {page} is not in this host pool of {self.num_pages}; pages count from 0"
            )
        return tuple([(start + page * size, size) for start, size in self._first_page_pieces])

    def pieces_by_page(self, pages: IntArray) -> list[tuple[IntArray, int]]:
        """Return where the bytes of many pages are: `page_pieces` without Python for each page.

        Args:
            pages: page ids, at least one.

        Returns:
            For each piece of a page, in the order of memory: where it begins in each of `pages`,
            and its bytes.

        Raises:
            OwnershipError: the pool has no such page.
            ClosedError: the pool is closed.
        """
        self._require_open()
        lowest, highest = int(pages.min()), int(pages.max())
        if lowest < 0 or highest >= self.num_pages:
            raise OwnershipError(
                f"pages {lowest} to {highest} are not all in this host pool of {self.num_pages}; "
                "pages count from 0"
            )
        return [(start + pages * size, size) for start, size in self._first_page_pieces]

    def regions(self) -> list[tuple[int, int]]:
        """Return the memory that all pieces lie in, `(address, bytes)`, to be registered.

        Raises:
            ClosedError: the pool is closed.
        """
        self._require_open()
        return [self._region]

    def close(self) -> None:
        """Give the memory back. Idempotent.

        Only when no copy and no storage call is under way any more: addresses and views from
        before mean nothing afterwards.
        """
        self._is_closed = True
        self._layer_parts = []
        self._memory.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this host pool is closed; create a new one")


def host_pool_pages(
    page_bytes: int,
    *,
    device_pages: int,
    ratio: float | None = None,
    size_bytes: int | None = None,
) -> int:
    """Return how many pages the host gets, at least 1; rounds down.

    Args:
        page_bytes: bytes of one page, in all host pools together.
        device_pages: pages of the device.
        ratio: pages of the host as a multiple of those, or
        size_bytes: bytes of the host's pools together. Exactly one of the two.

    Raises:
        ConfigError: not exactly one is given, or it does not hold a page.
    """
    if ratio is not None and size_bytes is None:
        if not 0 < ratio < float("inf"):
            raise ConfigError(f"ratio must be a finite number above 0, not {ratio}")
        num_pages = int(device_pages * ratio)
        given = f"ratio={ratio} of {device_pages} device pages"
    elif size_bytes is not None and ratio is None:
        num_pages = size_bytes // page_bytes
        given = f"size_bytes={size_bytes}"
    else:
        raise ConfigError(
            "give the size of the host pool as ratio or as size_bytes, one of them, "
            f"not ratio={ratio} and size_bytes={size_bytes}"
        )
    if num_pages < 1:
        raise ConfigError(
            f"a host pool of {given} does not hold one page of {page_bytes} bytes; "
            "make it larger, or use a smaller page_size"
        )
    return num_pages


def create_host_pool(
    geometry: PageGeometry, *, num_pages: int, layout: HostLayout, pinned: bool, huge_pages: bool
) -> HostKVPool:
    """Allocate host memory and return a pool over all of it.

    Args:
        geometry: what one page is.
        num_pages: size of the pool.
        layout: order of the bytes.
        pinned: register the memory with the device, so that copies run asynchronously.
        huge_pages: ask the kernel for 2 MiB pages.

    Raises:
        ConfigError: `num_pages` is below 1, or pinned memory cannot be had here at all.
        CapacityError: the machine cannot give that much memory.
    """
    memory = HostMemory(num_pages * geometry.page_bytes, pinned=pinned, huge_pages=huge_pages)
    return HostKVPool(geometry, num_pages=num_pages, layout=layout, memory=memory)
