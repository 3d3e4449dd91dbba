"""What decisions depend on besides operations, as every rank sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from hicache.config.section import Section, options_of
from hicache.controller.rank_meeting import Call
from hicache.controller.speeds import NUM_AGREED_SPEEDS
from hicache.pools import KnowsOwners
from hicache.pools.agreed_allocator import AgreedAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.config import HiCacheConfig
    from hicache.controller.cost_model import CostModel
    from hicache.controller.rank_meeting import RankMeeting
    from hicache.pools import Allocator

__all__ = ["AgreedNumbers", "option_digests"]

_MICROSECONDS = 10**6

_OWN_OPTIONS = {"host.ratio", "host.size_bytes", "host.huge_pages", "storage.extra_config"}
"""A rank's own affair: what follows from them is agreed on, or concerns its own store."""


class AgreedNumbers:
    """Time, costs and free pages: each the least, or the slowest, of all ranks.

    | number | a rank says | used for |
    |---|---|---|
    | time | microseconds since its first step | deadlines of prefetches |
    | speeds | picoseconds of a read, a load, a token | load or recompute |
    | free pages | what it can promise, device and host | every allocation until the next step |

    The least time since the first step, and not the sum of the least times since the last step:
    each clock only goes forward, so their minimum does too, and a pause of one rank now and of
    another later is not lost.

    With one rank it is that rank's own numbers, at no cost.

    Args:
        meeting: with whom.
        device_allocator, host_allocator: this rank's own.
        costs: what this rank has measured.

    Attributes:
        now: seconds, by which alone deadlines are decided.
        device_allocator, host_allocator: what is to be allocated from.
    """

    def __init__(
        self,
        meeting: RankMeeting,
        *,
        device_allocator: Allocator,
        host_allocator: Allocator,
        costs: CostModel,
    ) -> None:
        self.now = 0.0
        self.device_allocator = device_allocator
        self.host_allocator = host_allocator
        self._costs = costs
        self._began: float | None = None
        self._agreed_allocators: list[AgreedAllocator] = []
        # Pages that ranks share have the same ids on all of them, and are as free.
        self._is_shared = isinstance(device_allocator, KnowsOwners)
        if not meeting.alone and not self._is_shared:
            device, host = AgreedAllocator(device_allocator), AgreedAllocator(host_allocator)
            self.device_allocator, self.host_allocator = device, host
            self._agreed_allocators = [device, host]

    def construct(self, meeting: RankMeeting, config: HiCacheConfig) -> None:
        """Agree on the sizes of the pools, and that all ranks have the same options.

        Raises:
            RanksLostError: a rank does not construct its cache.
            RanksDivergedError: options differ; names them, on every rank.
        """
        if meeting.alone:
            return
        allocators = self._agreed_allocators
        values = [one.num_pages for one in allocators] + [one.offer() for one in allocators]
        equal = option_digests(config)
        if self._is_shared:
            equal["the pages of the device pool"] = self.device_allocator.num_pages
            equal["the pages of the host pool"] = self.host_allocator.num_pages
        try:
            agreed = meeting.agree(Call.CONSTRUCT, values, equal=equal)
        except BaseException:
            self.close()
            raise
        for index, allocator in enumerate(allocators):
            free = agreed[len(allocators) + index]
            allocator.accept(free, num_pages=agreed[index])

    def values(self, now: float) -> list[int]:
        """Return what this rank says in a step that begins at `now`, in seconds."""
        if self._began is None:
            self._began = now
        elapsed = int((now - self._began) * _MICROSECONDS)
        return [elapsed, *self._costs.measured(), *(one.offer() for one in self._agreed_allocators)]

    def take(self, agreed: Sequence[int]) -> None:
        """Let the minimum of `values` over all ranks be in force."""
        self.now = agreed[0] / _MICROSECONDS
        free_from = 1 + NUM_AGREED_SPEEDS
        self._costs.take_agreed(agreed[1:free_from])
        for allocator, num_free in zip(self._agreed_allocators, agreed[free_from:], strict=True):
            allocator.accept(num_free)

    def close(self) -> None:
        """Give free pages back to those whose they were."""
        for allocator in self._agreed_allocators:
            allocator.give_back()


def option_digests(section: Section) -> dict[str, int]:
    """Return a number for each option of `section` that has to be the same on every rank."""
    return _digests(type(section), section)


def _digests(kind: type[Section], section: Section | None) -> dict[str, int]:
    """Of an absent section, that each option is absent: every rank has the same names."""
    digests: dict[str, int] = {}
    for name, option in options_of(kind).items():
        value = None if section is None else getattr(section, name)
        path = f"{kind.section}.{name}" if kind.section else name
        if issubclass(option.kind, Section):
            digests |= _digests(option.kind, value)
        elif path not in _OWN_OPTIONS:
            digests[path] = xxhash.xxh3_64_intdigest(repr(value).encode()) >> 1
    return digests
