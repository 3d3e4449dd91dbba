"""Bugs of ranks, each by one change at run time.

Most let a rank decide by what only it knows; the last ones forget whose pages are whose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.controller import LocalMover, StorageTier, controller
from hicache.controller.agreed_numbers import AgreedNumbers
from hicache.controller.agreement import WINDOW, OperationWindow
from hicache.controller.storage_attachment import StorageAttachment
from hicache.pools import CpLayouts
from hicache.pools.agreed_allocator import AgreedAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from hicache.controller.agreement import Finished
    from hicache.controller.records import LoadJob
    from hicache.pools import Allocator
    from hicache.storage import Page
    from hicache.types import IntArray

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
    closed_everywhere = StorageAttachment._closed_everywhere

    def mutated(attachment: StorageAttachment, close: Callable[[], bool]) -> bool:
        closed: list[bool] = []

        def noted() -> bool:
            closed.append(close())
            return closed[0]

        closed_everywhere(attachment, noted)
        return closed[0]

    patch.setattr(StorageAttachment, "_closed_everywhere", mutated)


def copy_the_pages_of_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    def mutated(
        layouts: CpLayouts, device_pages: IntArray, host_pages: IntArray
    ) -> tuple[IntArray, IntArray]:
        num_ranks = layouts.device.cp_size
        of_first = device_pages % num_ranks == 0
        return device_pages[of_first] // num_ranks, host_pages[of_first] // num_ranks

    patch.setattr(CpLayouts, "owned_pairs", mutated)


def copy_to_whoever_has_room(patch: pytest.MonkeyPatch) -> None:
    def mutated(allocator: Allocator, pages: IntArray, other: Allocator) -> IntArray | None:
        return allocator.alloc(len(pages))

    patch.setattr(controller, "alloc_like", mutated)


def store_pages_whoever_has_them(patch: pytest.MonkeyPatch) -> None:
    def mutated(tier: StorageTier, host_pages: IntArray) -> Sequence[Page | None]:
        layout = tier._cp_host_layout
        return tier._places_of(host_pages // (1 if layout is None else layout.cp_size))

    patch.setattr(StorageTier, "_pages_of", mutated)


def forget_a_copy_of_nothing(patch: pytest.MonkeyPatch) -> None:
    """A rank that has none of the pages begins nothing, and so never says that it has ended."""
    submit_load = LocalMover.submit_load

    def mutated(mover: LocalMover, job: LoadJob) -> int:
        cp = mover._cp
        if cp is None or len(cp.owned_pairs(job.device_pages, job.host_pages)[0]):
            return submit_load(mover, job)
        return -1

    patch.setattr(LocalMover, "submit_load", mutated)
