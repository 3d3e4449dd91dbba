"""Pages on their way back to the free lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.pools import Allocator
    from hicache.radix import HeldPages, ResetResult, Ticket
    from hicache.types import IntArray

__all__ = ["PageReturns"]


class PageReturns:
    """Gives pages back; those that outlived a reset only when the last copy of them has ended."""

    def __init__(self, device_allocator: Allocator, host_allocator: Allocator) -> None:
        self._device_allocator = device_allocator
        self._host_allocator = host_allocator
        self._held: list[tuple[set[Ticket], HeldPages]] = []
        self._kept: list[int] = []

    def device(self, pages: IntArray) -> int:
        """Free device pages and return how many."""
        self._device_allocator.free(pages)
        return len(pages)

    def host(self, pages: IntArray) -> int:
        """Free host pages and return how many."""
        self._host_allocator.free(pages)
        return len(pages)

    def take_reset(self, result: ResetResult) -> None:
        """Free what a reset has given up, and hold what copies in flight still use."""
        self.device(result.device_pages)
        self.host(result.host_pages)
        self._held += [(set(held.tickets), held) for held in result.held]

    def copy_ended(self, ticket: Ticket) -> None:
        """Free the pages that were held for the copy of `ticket` and for no other."""
        if not self._held:
            return
        keep = []
        for tickets, held in self._held:
            tickets.discard(ticket)
            if tickets:
                keep.append((tickets, held))
            else:
                self.device(held.device_pages)
                self.host(held.host_pages)
        self._held = keep

    def keep(self, device_pages: IntArray) -> None:
        """Let device pages that may be in a request's page table be nobody's until `end`."""
        self._kept += device_pages.tolist()

    def adopted(self, chunks: Sequence[IntArray]) -> None:
        """Note that the tree has these device pages now, some of which may have been kept."""
        if self._kept:
            taken = {page for chunk in chunks for page in chunk.tolist()}
            self._kept = [page for page in self._kept if page not in taken]

    def end(self) -> None:
        """Free what was kept: no request goes on, and no copy runs any more."""
        kept, self._kept = self._kept, []
        self.device(np.array(kept, dtype=np.int64))

    def held_pages(self) -> tuple[list[IntArray], list[IntArray]]:
        """Return the device pages and the host pages that are held."""
        held = [pages for _, pages in self._held]
        device = [one.device_pages for one in held]
        if self._kept:
            device.append(np.array(self._kept, dtype=np.int64))
        return device, [one.host_pages for one in held]
