"""What a backend answered: whether it is an answer at all, and what it says in sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.types import PageHash

__all__ = [
    "count_outcomes",
    "error_text",
    "is_answer",
    "is_page_count",
    "num_leading_ok",
    "read_failed",
    "write_failed",
]

_MAX_TEXT = 200
"""Characters of a backend's own error that a message repeats."""


def error_text(error: BaseException) -> str:
    """Return the kind and the start of the message of an error, which may refuse to be printed."""
    try:
        return f"{type(error).__name__}: {error}"[:_MAX_TEXT]
    except Exception:  # noqa: BLE001  # reported as what it is
        return f"a {type(error).__name__} that cannot be printed"


def is_page_count(answer: object, num_keys: int) -> bool:
    """Return whether `answer` is one that `batch_exists` may give for `num_keys` keys."""
    return type(answer) is int and 0 <= answer <= num_keys


def is_answer(answer: list[object], num_pages: int) -> TypeGuard[list[PageOutcome]]:
    """Return whether `answer` is one that a backend may give for `num_pages` pages."""
    return len(answer) == num_pages and {*map(type, answer)} <= {PageOutcome}


def count_outcomes(answer: object, num_pages: int) -> dict[PageOutcome, int] | None:
    """Return how many pages have each outcome, or `None` if that is no answer for `num_pages`."""
    if not isinstance(answer, list) or not is_answer(answer, num_pages):
        return None
    counts: dict[PageOutcome, int] = {}
    # `list.count` compares identities first; to hash each member would take ten times as long.
    for outcome in PageOutcome:
        if not num_pages:
            break
        if count := answer.count(outcome):
            counts[outcome] = count
            num_pages -= count
    return counts


def num_leading_ok(outcomes: Sequence[PageOutcome]) -> int:
    """Return how many pages a read brought before the first that it did not."""
    for index, outcome in enumerate(outcomes):
        if outcome is not PageOutcome.OK:
            return index
    return len(outcomes)


def read_failed(num_pages: int) -> list[PageOutcome]:
    """Return the outcomes of a read that brought nothing."""
    return [PageOutcome.FAILED, *[PageOutcome.SKIPPED] * (num_pages - 1)][:num_pages]


def write_failed(keys: Sequence[PageHash], parent_keys: Sequence[bytes]) -> list[PageOutcome]:
    """Return the outcomes of a write that stored nothing: pages behind one of it are skipped."""
    outcomes: list[PageOutcome] = []
    before: set[bytes] = set()
    for key, parent_key in zip(keys, parent_keys, strict=True):
        outcomes.append(PageOutcome.SKIPPED if parent_key in before else PageOutcome.FAILED)
        before.add(key)
    return outcomes
