"""Bugs that let a rank decide by what only it knows, each by one change at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.controller.agreed_numbers import AgreedNumbers
from hicache.controller.agreement import WINDOW, OperationWindow
from hicache.controller.storage_attachment import StorageAttachment
from hicache.pools.agreed_allocator import AgreedAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from hicache.controller.agreement import Finished
    from hicache.controller.rank_meeting import Call

_WRITES, _LOADS, _PREFETCHES, _PERSISTS = (slice(at * WINDOW, (at + 1) * WINDOW) for at in range(4))


def _decide_alone(patch: pytest.MonkeyPatch, part: slice) -> None:
    finished = OperationWindow.finished

    def mutated(window: OperationWindow, agreed: Sequence[int]) -> Finished:
        values = list(agreed)
        values[part] = window.values()[part]
        return finished(window, values)

    patch.setattr(OperationWindow, "finished", mutated)


def end_writes_that_others_still_make(patch: pytest.MonkeyPatch) -> None:
    _decide_alone(patch, _WRITES)


def end_loads_that_others_still_make(patch: pytest.MonkeyPatch) -> None:
    _decide_alone(patch, _LOADS)


def end_persists_that_others_still_make(patch: pytest.MonkeyPatch) -> None:
    _decide_alone(patch, _PERSISTS)


def hit_what_only_the_own_store_has(patch: pytest.MonkeyPatch) -> None:
    finished = OperationWindow.finished

    def mutated(window: OperationWindow, agreed: Sequence[int]) -> Finished:
        found = finished(window, agreed)
        own = [(one, min(one.num_hits or 0, 9)) for one, _ in found.queries]
        return found._replace(queries=own)

    patch.setattr(OperationWindow, "finished", mutated)


def release_memory_that_others_still_use(patch: pytest.MonkeyPatch) -> None:
    finished = OperationWindow.finished

    def mutated(window: OperationWindow, agreed: Sequence[int]) -> Finished:
        own = finished(window, window.values()).released
        return finished(window, agreed)._replace(released=own)

    patch.setattr(OperationWindow, "finished", mutated)


def end_prefetches_by_the_own_clock(patch: pytest.MonkeyPatch) -> None:
    values, take = AgreedNumbers.values, AgreedNumbers.take

    def remember(numbers: AgreedNumbers, now: float) -> list[int]:
        numbers.own_now = now  # type: ignore[attr-defined]
        return values(numbers, now)

    def mutated(numbers: AgreedNumbers, agreed: Sequence[int]) -> None:
        take(numbers, agreed)
        numbers.now = numbers.own_now  # type: ignore[attr-defined]

    patch.setattr(AgreedNumbers, "values", remember)
    patch.setattr(AgreedNumbers, "take", mutated)


def give_pages_that_only_the_own_pool_has(patch: pytest.MonkeyPatch) -> None:
    accept = AgreedAllocator.accept

    def mutated(allocator: AgreedAllocator, num_free: int, *, num_pages: int | None = None) -> None:
        accept(allocator, max(num_free, allocator.offer()), num_pages=num_pages)

    patch.setattr(AgreedAllocator, "accept", mutated)


def believe_the_own_store_alone(patch: pytest.MonkeyPatch) -> None:
    agreed = StorageAttachment._agreed

    def mutated(attachment: StorageAttachment, call: Call, value: bool) -> bool:
        agreed(attachment, call, value)
        return value

    patch.setattr(StorageAttachment, "_agreed", mutated)
