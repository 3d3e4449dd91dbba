"""What a scheduler gets from the cache."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from hicache.pools import SlotTable
    from hicache.radix import MatchResult, RadixNode
    from hicache.types import IntArray

__all__ = ["EvictOutcome", "LoadBack", "LoadStatus", "PinnedPrefix", "PrefixMatch"]


@dataclasses.dataclass(frozen=True)
class PrefixMatch:
    """The longest cached prefix of a key, cut so that its last nodes can be locked alone.

    Valid until the tree changes; lock `last_device_node` to keep its pages.
    """

    match: MatchResult
    slot_table: SlotTable

    @property
    def last_device_node(self) -> RadixNode:
        """Deepest node readable on the device (the root if none): the one to lock."""
        return self.match.last_device_node

    @property
    def last_host_node(self) -> RadixNode:
        """Deepest node of the match, where a load ends and a prefetch goes on."""
        return self.match.last_host_node

    @property
    def device_pages(self) -> IntArray:
        """Page ids on the device."""
        return self.match.device_pages

    @property
    def device_indices(self) -> torch.Tensor:
        """Token slots on the device, int64 `[device_hit_tokens]`."""
        return self.slot_table.expand(self.match.device_pages)

    @property
    def device_hit_tokens(self) -> int:
        """Leading tokens readable on the device."""
        return self.match.num_device_pages * self.slot_table.page_size

    @property
    def host_hit_tokens(self) -> int:
        """Tokens after those that only the host has: `init_load_back` can bring them."""
        return self.match.num_host_pages * self.slot_table.page_size

    @property
    def loading(self) -> bool:
        """Whether another request's load of some of the host tokens is under way."""
        return self.match.loading


class LoadStatus(str, Enum):
    """What `init_load_back` did."""

    QUEUED = "queued"
    """The load is queued; `ready_to_load_host_cache` starts it."""
    NOTHING = "nothing"
    """The host has nothing more, or too little to be worth a load."""
    BUSY = "busy"
    """A load of the same pages is under way, or every slot is taken: try again next step."""
    NO_MEMORY = "no_memory"
    """The device cannot give the pages now: compute instead, or try again later."""


class LoadBack(NamedTuple):
    """The answer of `init_load_back`.

    Attributes:
        device_pages: where the bytes arrive. They belong to the load until it has ended; the model
            may read a layer once that layer's event is done.
        node: the node to lock for the request, which covers the loaded pages.
    """

    status: LoadStatus
    device_pages: IntArray
    node: RadixNode


class EvictOutcome(NamedTuple):
    """Device pages that an eviction has freed, and that become free when writes end."""

    num_freed: int
    num_pending: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PinnedPrefix:
    """A prefix that is pinned, as it is now.

    Attributes:
        pin_id: names the pin; the hash of its last page in hexadecimal digits, the same on every
            rank and after a restart.
        num_tokens: that are pinned, in whole pages.
        device_tokens: of these, those that the device has.
        held_tokens: of these, those that the device or the host has.
        seconds_left: until the pin ends.
    """

    pin_id: str
    num_tokens: int
    device_tokens: int
    held_tokens: int
    seconds_left: float
