"""Prefixes that are to stay in memory, each for its time."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hicache.errors import CapacityError, ConfigError
from hicache.hashing import hash_pages
from hicache.hiradix_cache.results import PinnedPrefix

if TYPE_CHECKING:
    from hicache.hiradix_cache.parts import CacheParts
    from hicache.radix import InsertResult, RadixKey
    from hicache.types import PageHash

__all__ = ["Pins"]

_MAX_PINS = 1024
_LONGEST_SECONDS = 366 * 86400.0


@dataclasses.dataclass
class _Pin:
    key: RadixKey
    hashes: list[PageHash]
    until: float

    @property
    def pin_id(self) -> str:
        return self.hashes[-1].hex()


class Pins:
    """The pinned prefixes of one cache.

    A pin is an order, not a property of what happens to be cached: what of its prefix is inserted
    later is pinned as well, also after a reset. Pinned runs are written to the host, whatever the
    write policy, and go last from the device and from the host. They do go when nothing else is
    left, so nobody ever waits for a pin to end.

    Time is that of the last step, so that pins end on all ranks in the same step; those of before
    the first step begin with it.

    Args:
        parts: of the cache.

    Attributes:
        now: seconds since the first pin, by which all begin and end.
    """

    def __init__(self, parts: CacheParts) -> None:
        self.now = 0.0
        self._tree = parts.tree
        self._controller = parts.controller
        self._writer = parts.writer
        self._page_size = parts.controller.config.page_size
        self._began: float | None = None
        self._pins: dict[str, _Pin] = {}
        self._by_first_page: dict[PageHash, list[_Pin]] = {}
        self._is_in_use = False

    def pin(self, key: RadixKey, *, seconds: float) -> PinnedPrefix:
        """See `HiRadixCache.pin_prefix`."""
        hashes = hash_pages(key.data, self._page_size, key.namespace)
        if not hashes:
            raise ConfigError(
                f"only whole pages of {self._page_size} tokens can be pinned, this prefix has "
                f"{len(key)} tokens"
            )
        if not 0 < seconds <= _LONGEST_SECONDS:
            raise ConfigError(
                f"a pin lasts for up to {_LONGEST_SECONDS:g} seconds, and for more than 0, not "
                f"{seconds}"
            )
        if self._controller.now:
            self._take_time()
        pin = _Pin(key.prefix(len(hashes) * self._page_size), hashes, self.now + seconds)
        known = self._pins.get(pin.pin_id)
        if known is not None:
            known.until = max(known.until, pin.until)
            pin = known
        else:
            self._require_room(hashes)
            self._pins[pin.pin_id] = pin
            self._by_first_page.setdefault(hashes[0], []).append(pin)
        if not self._is_in_use:
            self._is_in_use = True
            self._tree.pin_by(self._clock)
        self._hold(pin)
        return self._describe(pin)

    def unpin(self, pin_id: str) -> bool:
        """See `HiRadixCache.unpin_prefix`."""
        pin = self._pins.get(pin_id)
        if pin is None:
            return False
        self._forget(pin)
        self._tree.unpin(self._tree.match(pin.key).last_host_node)
        # Others may begin alike.
        for other in self._by_first_page.get(pin.hashes[0], ()):
            self._hold(other)
        return True

    def listed(self) -> tuple[PinnedPrefix, ...]:
        """See `HiRadixCache.pinned_prefixes`."""
        return tuple(map(self._describe, self._pins.values()))

    def after_insert(self, key: RadixKey, result: InsertResult) -> None:
        """Pin what an insertion has brought of pinned prefixes."""
        if not self._pins:
            return
        first = hash_pages(key.prefix(self._page_size).data, self._page_size, key.namespace)
        for pin in self._by_first_page.get(first[0], ()) if first else ():
            node = result.node
            while node.start >= len(pin.hashes) and node.parent is not None:
                node = node.parent
            # A pinned run has pinned ones before it.
            if node.pinned_until < pin.until:
                self._hold(pin)

    def step(self) -> None:
        """End the pins whose time is over; not needed while there are none."""
        self._take_time()
        for pin in [one for one in self._pins.values() if one.until <= self.now]:
            self._forget(pin)

    def reset(self) -> None:
        """Go on after a reset of the tree, with the same pins."""
        if self._is_in_use:
            self._tree.pin_by(self._clock)

    def __len__(self) -> int:
        return len(self._pins)

    def _take_time(self) -> None:
        now = self._controller.now
        if self._began is None:
            self._began = now
        self.now = now - self._began

    def _clock(self) -> float:
        return self.now

    def _hold(self, pin: _Pin) -> None:
        """Pin what memory has of a prefix, and write what only the device has."""
        found = self._tree.split_at(self._tree.match(pin.key))
        self._tree.pin(found.last_host_node, pin.until)
        if self._writer.write_backup(found.last_device_node):
            self._controller.start_writing()

    def _require_room(self, hashes: list[PageHash]) -> None:
        if len(self._pins) >= _MAX_PINS:
            raise CapacityError(f"{_MAX_PINS} prefixes are pinned already; unpin one first")
        share = self._controller.config.pinned_share
        limit = int(share * self._controller.device_allocator.num_pages)
        num_pages = len(set(hashes).union(*(pin.hashes for pin in self._pins.values())))
        if num_pages > limit:
            raise CapacityError(
                f"{num_pages * self._page_size} tokens would be pinned, and pinned_share {share} "
                f"of the device pool is {limit * self._page_size}; unpin others, or pin less"
            )

    def _forget(self, pin: _Pin) -> None:
        del self._pins[pin.pin_id]
        alike = self._by_first_page[pin.hashes[0]]
        alike.remove(pin)
        if not alike:
            del self._by_first_page[pin.hashes[0]]

    def _describe(self, pin: _Pin) -> PinnedPrefix:
        num_device, num_held = self._tree.num_held_pages(pin.key)
        return PinnedPrefix(
            pin_id=pin.pin_id,
            num_tokens=len(pin.key),
            device_tokens=num_device * self._page_size,
            held_tokens=num_held * self._page_size,
            seconds_left=pin.until - self.now,
        )
