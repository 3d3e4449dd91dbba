"""Where pages lie that are put one after the other over some extents."""

from __future__ import annotations

import dataclasses

from hicache.storage.page_store.blocks import BLOCK_BYTES, Extent, blocks_for, cut

__all__ = ["PageLayout"]


@dataclasses.dataclass(slots=True)
class PageLayout:
    """Pages of one length over extents, each on a block boundary. Not to be changed.

    Attributes:
        page_bytes: payload of each page.
        extents: one after the other; a page may go on in the next.
        page_blocks: blocks of each page.
        stride_bytes: from one page to the next.
        gap_bytes: between two pages.
    """

    page_bytes: int
    extents: tuple[Extent, ...]
    page_blocks: int = dataclasses.field(init=False)
    stride_bytes: int = dataclasses.field(init=False)
    gap_bytes: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.page_blocks = blocks_for(self.page_bytes)
        self.stride_bytes = self.page_blocks * BLOCK_BYTES
        self.gap_bytes = self.stride_bytes - self.page_bytes

    def extents_of(self, first: int, num_pages: int) -> list[Extent]:
        """Return where neighbouring pages lie."""
        return cut(self.extents, first * self.page_blocks, num_pages * self.page_blocks)
