"""Which context-parallel (CP) rank holds which pages of a pool that the ranks share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from hicache.errors import ConfigError, OwnershipError

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicache.types import IntArray

__all__ = ["CpLayout", "CpLayouts", "CpSharedKVLayout"]


class CpLayout(Protocol):
    """The pages of one pool as CP ranks share them; every rank has an equal one but for its rank.

    Page ids that trees and free lists use are *logical*: they name a page of the sequence, and one
    rank, its owner, has the bytes. There they lie in a *physical* page of its own pool. Methods are
    pure, and cost in proportion to the pages they are asked about.
    """

    @property
    def cp_size(self) -> int:
        """Number of ranks."""

    @property
    def num_pages(self) -> int:
        """Logical pages."""

    @property
    def num_physical_pages(self) -> int:
        """Pages of this rank's own pool."""

    def owner_for_logical_pages(self, pages: IntArray) -> IntArray:
        """Return the rank that has each page; the same answer on every rank."""

    def owned_by_this_rank(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Return for each page whether this rank has it."""

    def physical_pages(self, pages: IntArray) -> IntArray:
        """Return where this rank has `pages`, all of which it owns.

        Raises:
            OwnershipError: another rank owns one of them.
        """


class CpLayouts(NamedTuple):
    """The pages of both tiers of one cache, shared by the same ranks.

    A page and its copy are on the same rank, so bytes never go from one rank to another.
    """

    device: CpLayout
    host: CpLayout

    def owned_pairs(
        self, device_pages: IntArray, host_pages: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return this rank's own pages for those of pages and their copies that it has."""
        owned = self.device.owned_by_this_rank(device_pages)
        return (
            self.device.physical_pages(device_pages[owned]),
            self.host.physical_pages(host_pages[owned]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpSharedKVLayout:
    """Pages dealt to the ranks in turn: logical page p is in page p // cp_size of rank p % cp_size.

    So a sequence in neighbouring pages is spread evenly, and every rank's pool is as large.

    Attributes:
        cp_rank: of this process.
        cp_size: number of ranks.
        num_physical_pages: pages of each rank's pool.
        page_size: tokens in a page, for the methods that speak of token slots.

    Raises:
        ConfigError: a rank that is not there, or nothing to share.
    """

    cp_rank: int
    cp_size: int
    num_physical_pages: int
    page_size: int

    def __post_init__(self) -> None:
        if self.cp_size < 1 or not 0 <= self.cp_rank < self.cp_size:
            raise ConfigError(
                f"cp_rank {self.cp_rank} is not one of {self.cp_size} ranks; they count from 0"
            )
        if self.num_physical_pages < 1 or self.page_size < 1:
            raise ConfigError(
                f"a pool needs at least 1 page of at least 1 token, not {self.num_physical_pages} "
                f"pages of {self.page_size}"
            )

    @property
    def num_pages(self) -> int:
        """See `CpLayout.num_pages`."""
        return self.num_physical_pages * self.cp_size

    def owner_for_logical_pages(self, pages: IntArray) -> IntArray:
        """See `CpLayout.owner_for_logical_pages`."""
        return pages % self.cp_size

    def owned_by_this_rank(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """See `CpLayout.owned_by_this_rank`."""
        owned: npt.NDArray[np.bool_] = pages % self.cp_size == self.cp_rank
        return owned

    def physical_pages(self, pages: IntArray) -> IntArray:
        """See `CpLayout.physical_pages`."""
        foreign = pages[pages % self.cp_size != self.cp_rank]
        if len(foreign):
            raise OwnershipError(
                f"page {foreign[0]} is rank {foreign[0] % self.cp_size}'s, not that of CP rank "
                f"{self.cp_rank}; leave out what `owned_by_this_rank` does not name"
            )
        return pages // self.cp_size

    def owned_slots(self, device_indices: IntArray) -> npt.NDArray[np.bool_]:
        """Return for each logical token slot whether this rank has it."""
        return self.owned_by_this_rank(device_indices // self.page_size)

    def logical_locs_to_physical(self, locs: IntArray) -> IntArray:
        """Return the slots of this rank's pool for logical token slots, all of which it owns.

        Raises:
            OwnershipError: another rank owns one of them.
        """
        pages, offsets = np.divmod(locs, self.page_size)
        return self.physical_pages(pages) * self.page_size + offsets
