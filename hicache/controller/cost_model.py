"""Whether to read or load pages or to compute them, by what all of this has cost lately."""

from __future__ import annotations

import dataclasses
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

from hicache.controller.affine_fit import AffineFit
from hicache.controller.prefill_fit import PrefillFit
from hicache.controller.speeds import Speeds
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.controller.affine_fit import Line
    from hicache.controller.records import CopyResult, PagesResult

__all__ = ["CostModel", "CostVerdict", "StorageWait", "StoredHit"]

_PROBE_EVERY = 16
"""Of what does not seem worth it, one in so many is tried all the same: a store that was slow for a
while would else be called slow for ever."""

_NUM_PROBE_SIZES = 4
"""Probes double in size so many times, because reads of one size do not tell what a call costs."""


class CostVerdict(str, Enum):
    """What the estimate says of one hit in storage."""

    UNKNOWN = "unknown"
    """Reads or computation have not been measured yet: read."""
    WORTH = "worth"
    PARTLY = "partly"
    """A leading part is: the rest is computed before the link could bring it."""
    NOT_WORTH = "not_worth"
    PROBE = "probe"
    """Not worth it, but some pages are read to see whether that is still so."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredHit:
    """Pages of a request that storage has.

    Attributes:
        num_pages: that storage has.
        num_host_pages: right before them, that only the host has.
        first_token: of the first of all these pages.
        num_tokens: of the request.
        num_pages_ahead: that storage reads before.
        num_calls: that the read takes.
        least_pages: that are worth a read at all.
    """

    num_pages: int
    num_host_pages: int
    first_token: int
    num_tokens: int
    num_pages_ahead: int = 0
    num_calls: int = 1
    least_pages: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageWait:
    """Pages of a request that could run, which storage still delivers.

    Attributes:
        first_token: of those that have not come.
        last_token: behind the last of them.
        awaited_from_token: of those that had not come when it could run.
        waited_seconds: since then.
        quiet_seconds: since the read began or the last page came.
        num_calls: that bring them.
        num_pages_ahead: that storage reads before.
        is_probe: whether the read is to begin, whatever it takes, to be measured.
    """

    first_token: int
    last_token: int
    awaited_from_token: int
    waited_seconds: float
    quiet_seconds: float = 0.0
    num_calls: int = 1
    num_pages_ahead: int = 0
    is_probe: bool = False


class _Refusals:
    """Counts what does not seem worth it, and tries some of it all the same."""

    def __init__(self) -> None:
        self._count = 0

    def is_probe(self) -> bool:
        """Count one more; whether it is to be tried."""
        self._count += 1
        return self._count % _PROBE_EVERY == 0

    def size(self, least_pages: int) -> int:
        """Return how many pages the last one tries: more and more, then `least_pages` again."""
        num_tried = self._count // _PROBE_EVERY
        return least_pages << (num_tried % _NUM_PROBE_SIZES)


class CostModel:
    """Compares reading from storage and loading from the host with computing.

    All are measured: reads by their calls and loads by their copies, as long as they took beside
    others; computation by what the engine reports. Belongs to one thread, never reads a clock.
    Ranks measure different times and go by the slowest of them (`take_agreed`): a hit is there
    when the last rank has it.

    Args:
        page_size: tokens in a page.

    Attributes:
        verdicts: how often each was given on hits in storage.
    """

    def __init__(self, *, page_size: int) -> None:
        self.verdicts: Counter[CostVerdict] = Counter()
        self._page_size = page_size
        self._reads = AffineFit()
        self._loads = AffineFit()
        self._passes = PrefillFit()
        self._lines: tuple[Line | None, ...] = (None, None, None)
        self._speeds = Speeds()
        self._agreed: Speeds | None = None
        self._refused_reads, self._refused_loads = _Refusals(), _Refusals()
        self._refused_waits = _Refusals()

    # -- measuring ---------------------------------------------------------------------------

    def note_pages(self, result: PagesResult) -> None:
        """Take note of one batch of a read."""
        num_pages = sum(count for outcome, count in result.outcomes if outcome is PageOutcome.OK)
        self.note_read(num_pages, result.seconds)

    def note_copy(self, result: CopyResult) -> None:
        """Take note of a load that went well and was timed as it ran."""
        if result.good and result.is_timed:
            self.note_load(result.num_pages, result.seconds)

    def note_read(self, num_pages: int, seconds: float) -> None:
        """Take note of a call that brought `num_pages`; one that brought none says nothing."""
        self._reads.note(num_pages, seconds)

    def note_load(self, num_pages: int, seconds: float) -> None:
        """Take note of a load of `num_pages` from the host."""
        self._loads.note(num_pages, seconds)

    def note_prefill(self, num_tokens: int, seconds: float, *, context_tokens: float = 0.0) -> None:
        """Take note of a forward pass over prompt tokens that waited for no load.

        Args:
            num_tokens: that it computed.
            seconds: that it took.
            context_tokens: how many tokens were before each of them, on average.
        """
        self._passes.note(num_tokens, seconds, context_tokens=context_tokens)

    def measured(self) -> list[int]:
        """Return this rank's speeds as integers, of which the minimum over ranks is agreed."""
        return self._own_speeds().to_integers()

    def take_agreed(self, speeds: Sequence[int]) -> None:
        """Go by `speeds`, the minimum of `measured` over all ranks, from now on."""
        self._agreed = Speeds.from_integers(speeds)

    @property
    def speeds(self) -> Speeds:
        """What decisions go by."""
        return self._own_speeds() if self._agreed is None else self._agreed

    # -- deciding ----------------------------------------------------------------------------

    def leading_pages_to_load(
        self,
        num_pages: int,
        *,
        first_token: int,
        num_tokens: int,
        chunk_tokens: int | None = None,
        num_pages_ahead: int = 0,
        least_pages: int = 1,
    ) -> int:
        """Return how many leading pages from the host to load; see `Speeds`.

        Where less than `least_pages` are worth it, which no load is begun for, some pages are
        loaded now and then, so that the link is measured.
        """
        if not num_pages:
            return 0
        num_loaded = self.speeds.leading_pages_to_load(
            num_pages,
            page_size=self._page_size,
            first_token=first_token,
            num_tokens=num_tokens,
            chunk_tokens=chunk_tokens,
            num_pages_ahead=num_pages_ahead,
        )
        if num_loaded < least_pages <= num_pages and self._refused_loads.is_probe():
            return min(num_pages, self._refused_loads.size(least_pages))
        return num_loaded

    def leading_pages_to_read(self, hit: StoredHit, *, may_refuse: bool, loads_partly: bool) -> int:
        """Return how many leading pages of a hit to read, and count the verdict.

        Args:
            hit: what storage has.
            may_refuse: whether what takes longer to read than to compute stays in storage.
            loads_partly: whether only what is worth it goes from the host to the device.
        """
        num_pages, speeds = hit.num_pages, self.speeds
        if loads_partly:
            num_loaded = speeds.leading_pages_to_load(
                hit.num_host_pages + num_pages,
                page_size=self._page_size,
                first_token=hit.first_token,
                num_tokens=hit.num_tokens,
            )
            num_pages = max(0, num_loaded - hit.num_host_pages)
        verdict = self._verdict(hit, num_pages, speeds, may_refuse=may_refuse)
        self.verdicts[verdict] += 1
        if verdict is CostVerdict.NOT_WORTH:
            return 0
        if verdict is CostVerdict.PROBE:
            return min(hit.num_pages, self._refused_reads.size(hit.least_pages))
        return num_pages

    def is_worth_waiting(self, wait: StorageWait) -> bool:
        """Return whether a request that could run waits for pages that storage still delivers.

        It does while they are there sooner than they could be computed, and in all no longer than
        computing would have taken from the start: so at most twice as long goes by as was
        necessary, whatever the estimate was worth. Not before computation has been measured.
        """
        speeds, last_token = self.speeds, wait.last_token
        computing = speeds.compute_seconds(wait.first_token, last_token)
        patience = speeds.compute_seconds(wait.awaited_from_token, last_token)
        if computing is None or patience is None or wait.waited_seconds >= patience:
            return False
        if wait.is_probe:
            return True
        reading = speeds.read_seconds(
            (last_token - wait.first_token) // self._page_size,
            num_calls=wait.num_calls,
            num_pages_ahead=wait.num_pages_ahead,
        )
        return reading is None or reading - wait.quiet_seconds < computing

    def begins_useless_read(self) -> bool:
        """Whether a read that is not worth waiting for is begun all the same, to be measured."""
        return self._refused_waits.is_probe()

    def _verdict(
        self, hit: StoredHit, num_pages: int, speeds: Speeds, *, may_refuse: bool
    ) -> CostVerdict:
        first_token = hit.first_token + hit.num_host_pages * self._page_size
        computing = speeds.compute_seconds(first_token, first_token + num_pages * self._page_size)
        reading = speeds.read_seconds(
            num_pages, num_calls=hit.num_calls, num_pages_ahead=hit.num_pages_ahead
        )
        if reading is None or computing is None:
            return CostVerdict.UNKNOWN
        if num_pages and not (may_refuse and reading >= computing):
            return CostVerdict.WORTH if num_pages == hit.num_pages else CostVerdict.PARTLY
        is_probe = self._refused_reads.is_probe()
        return CostVerdict.PROBE if is_probe else CostVerdict.NOT_WORTH

    def _own_speeds(self) -> Speeds:
        lines = self._reads.line(), self._loads.line(), self._passes.line()
        if lines != self._lines:
            self._lines = lines
            read, load, compute = lines
            own = Speeds(read=read, load=load, compute=compute)
            # As ranks exchange them, so that one rank decides as several do.
            self._speeds = Speeds.from_integers(own.to_integers())
        return self._speeds
