"""Whether to read pages from storage or to compute them, by what both have cost lately."""

from __future__ import annotations

from collections import Counter, deque
from enum import Enum
from typing import TYPE_CHECKING

from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.controller.records import PagesResult

__all__ = ["CostVerdict", "PrefetchCostModel"]

_WINDOW = 8
"""Observations that count: loads change within seconds, and a store that was slow recovers."""

_PROBE_EVERY = 16
"""Of the reads that do not seem worth it, one in so many is done all the same: a store that was
slow for a while would else be called slow for ever."""


_PICOSECONDS = 10**12
_UNKNOWN = 1 << 62
"""Picoseconds a token of what nobody has measured; longer than anything that was."""


class CostVerdict(str, Enum):
    """What the estimate says of one hit."""

    UNKNOWN = "unknown"
    """Reads or computation have not been measured yet: read."""
    WORTH = "worth"
    NOT_WORTH = "not_worth"
    PROBE = "probe"
    """Not worth it, but read to see whether that is still so."""

    @property
    def reads(self) -> bool:
        """Whether the pages are read."""
        return self is not CostVerdict.NOT_WORTH


class _Rate:
    """Seconds a token, over what was observed last."""

    def __init__(self) -> None:
        self._observed: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def note(self, num_tokens: int, seconds: float) -> None:
        if num_tokens > 0 and seconds >= 0:
            self._observed.append((num_tokens, seconds))

    @property
    def seconds_per_token(self) -> float | None:
        if not self._observed:
            return None
        tokens, seconds = zip(*self._observed, strict=True)
        return float(sum(seconds) / sum(tokens))


class PrefetchCostModel:
    """Compares reading a token's KV from storage with computing it.

    Both are measured: reads by their calls, as long as they took beside others; computation by what
    the engine reports. Belongs to one thread, never reads a clock. Ranks measure different times
    and go by the slowest of them (`take_agreed`): a hit is there when the last rank has read it.

    Args:
        page_size: tokens in a page.
        enabled: whether verdicts have an effect; costs are measured in any case.

    Attributes:
        verdicts: how often each was given.
    """

    def __init__(self, *, page_size: int, enabled: bool) -> None:
        self.verdicts: Counter[CostVerdict] = Counter()
        self._page_size = page_size
        self._enabled = enabled
        self._reading = _Rate()
        self._computing = _Rate()
        self._agreed: Sequence[int] | None = None

    @property
    def read_seconds_per_token(self) -> float | None:
        """What a token from storage costs; None before the first read."""
        return self._reading.seconds_per_token

    @property
    def compute_seconds_per_token(self) -> float | None:
        """What a computed token costs; None before the engine reported any."""
        return self._computing.seconds_per_token

    def note_pages(self, result: PagesResult) -> None:
        """Take note of one batch of a read."""
        num_pages = sum(count for outcome, count in result.outcomes if outcome is PageOutcome.OK)
        self.note_read(num_pages * self._page_size, result.seconds)

    def note_read(self, num_tokens: int, seconds: float) -> None:
        """Take note of a call that brought `num_tokens`; one that brought none says nothing."""
        self._reading.note(num_tokens, seconds)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Take note of a forward pass over `num_tokens` prompt tokens that waited for no load."""
        self._computing.note(num_tokens, seconds)

    def measured(self) -> list[int]:
        """Return, as integers, what reading and what computing costs here; the smaller, the more.

        So that the minimum over ranks is that of the slowest, or of one that has measured nothing.
        """
        return [
            -_UNKNOWN if cost is None else -min(round(cost * _PICOSECONDS), _UNKNOWN - 1)
            for cost in (self.read_seconds_per_token, self.compute_seconds_per_token)
        ]

    def take_agreed(self, costs: Sequence[int]) -> None:
        """Let verdicts go by `costs`, the minimum of `measured` over all ranks, from now on."""
        self._agreed = costs

    def admits_read(self) -> bool:
        """Return whether a hit is to be read now, and count the verdict if it has an effect."""
        return not self._enabled or self.judge().reads

    def judge(self) -> CostVerdict:
        """Return whether a hit is worth reading now, and count the verdict."""
        verdict = self._verdict()
        self.verdicts[verdict] += 1
        return verdict

    def _verdict(self) -> CostVerdict:
        reading, computing = self._agreed or self.measured()
        if -_UNKNOWN in (reading, computing):
            return CostVerdict.UNKNOWN
        if reading > computing:
            return CostVerdict.WORTH
        num_refused = self.verdicts[CostVerdict.NOT_WORTH] + self.verdicts[CostVerdict.PROBE]
        is_probe = num_refused % _PROBE_EVERY == _PROBE_EVERY - 1
        return CostVerdict.PROBE if is_probe else CostVerdict.NOT_WORTH
