"""How much each movement has moved, and what went wrong."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Final

from hicache.controller.records import Phase
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from hicache.controller.records import CopyResult, PagesResult, QueryResult

__all__ = ["MovementStats"]

_NAMES: Final = {outcome: outcome.value for outcome in PageOutcome}
"""Looked up for every batch: to ask a member for its value is a call, in code of its own."""


@dataclasses.dataclass
class MovementStats:
    """What one kind of movement has done so far; no number ever decreases.

    Attributes:
        num_operations: jobs that ended, well or not.
        num_pages, num_bytes: that arrived.
        seconds: that copies or backend calls took, summed over those that run side by side.
        outcomes: pages by outcome, for storage; jobs as `ok`, `failed` and `abandoned`, for copies.
        last_error: for people.
    """

    num_operations: int = 0
    num_pages: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    last_error: str = ""

    def note_copy(self, result: CopyResult) -> None:
        """Add a copy that has ended."""
        self.last_error = result.error or self.last_error
        self.num_operations += 1
        self.num_pages += result.num_pages
        self.num_bytes += result.num_bytes
        self.seconds += result.seconds
        self.outcomes[result.outcome] += 1

    def note_query(self, result: QueryResult) -> None:
        """Add an answer of storage, which moves nothing."""
        self.last_error = result.error or self.last_error

    def note_pages(self, result: PagesResult) -> None:
        """Add a batch of a read or of a persist."""
        self.last_error = result.error or self.last_error
        self.num_operations += result.phase is Phase.ENDED
        self.num_bytes += result.num_bytes
        self.seconds += result.seconds
        for outcome, count in result.outcomes:
            self.outcomes[_NAMES[outcome]] += count
            self.num_pages += count if outcome is PageOutcome.OK else 0
