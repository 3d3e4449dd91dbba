"""The laws of the free list, by example and against a set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache.errors import ConfigError, OwnershipError
from hicache.pools.allocator import PageAllocator

if TYPE_CHECKING:
    from hicache.pools.base import Allocator
    from hicache.types import IntArray


def pages(*ids: int) -> IntArray:
    return np.array(ids, dtype=np.int64)


def alloc(allocator: Allocator, count: int) -> IntArray:
    given = allocator.alloc(count)
    assert given is not None
    return given


def state(allocator: PageAllocator) -> tuple[int, list[int]]:
    return allocator.num_available, allocator.free_pages().tolist()


@pytest.mark.parametrize("num_pages", [0, -3])
def test_a_pool_has_a_page(num_pages: int) -> None:
    with pytest.raises(ConfigError, match="num_pages must be at least 1"):
        PageAllocator(num_pages)


def test_a_new_pool_is_handed_out_as_one_ascending_run() -> None:
    allocator = PageAllocator(10)
    assert alloc(allocator, 4).tolist() == [0, 1, 2, 3]
    assert alloc(allocator, 6).tolist() == [4, 5, 6, 7, 8, 9]


def test_pages_come_in_ascending_order_whatever_the_order_of_their_return() -> None:
    allocator = PageAllocator(8)
    for page in alloc(allocator, 8)[[3, 0, 7, 5, 1, 6, 2, 4]]:
        allocator.free(pages(page))
    assert alloc(allocator, 8).tolist() == list(range(8))


def test_pages_freed_together_come_back_together_lowest_first() -> None:
    allocator = PageAllocator(100)
    alloc(allocator, 50)
    allocator.free(pages(33, 31, 32))
    assert alloc(allocator, 2).tolist() == [31, 32]
    assert alloc(allocator, 1).tolist() == [33]


def test_too_few_pages_give_none_and_stay_free() -> None:
    allocator = PageAllocator(4)
    alloc(allocator, 1)
    before = state(allocator)
    assert allocator.alloc(4) is None
    assert state(allocator) == before
    assert alloc(allocator, 3).tolist() == [1, 2, 3]
    assert allocator.alloc(1) is None


def test_no_pages_can_be_allocated_and_freed_at_any_time() -> None:
    allocator = PageAllocator(1)
    alloc(allocator, 1)
    nothing = alloc(allocator, 0)
    assert nothing.dtype == np.int64
    assert len(nothing) == 0
    allocator.free(nothing)
    assert state(allocator) == (0, [])


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        PageAllocator(4).alloc(-1)


def test_an_array_given_out_shares_memory_with_nothing() -> None:
    allocator = PageAllocator(1000)
    given = alloc(allocator, 3)
    assert given.base is None
    given[:] = 999
    allocator.free(pages(0, 1, 2))
    assert alloc(allocator, 3).tolist() == [0, 1, 2]


def test_an_array_given_back_is_the_callers_again() -> None:
    allocator = PageAllocator(4)
    given = alloc(allocator, 2)
    allocator.free(given)
    given[:] = 3
    assert sorted(allocator.free_pages().tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (pages(1, 5), "page 5 free already"),
        (pages(5, 5), "page 5 free already; page 5 named more than once"),
        (pages(2, 1, 2), "page 2 named more than once"),
        (pages(0, 8), "page 8 not in this pool of 8"),
        (pages(-1, 0), "page -1 not in this pool of 8"),
        (pages(-1, 8, 6, 7, 1, 1), "pages -1, 8 not in .*; pages 6, 7 free .*; page 1 named more"),
    ],
    ids=["double", "double twice", "duplicate", "above", "negative", "all faults"],
)
def test_a_wrong_free_names_the_pages_and_changes_nothing(wrong: IntArray, message: str) -> None:
    allocator = PageAllocator(8)
    alloc(allocator, 4)
    before = state(allocator)
    with pytest.raises(OwnershipError, match=message):
        allocator.free(wrong)
    assert state(allocator) == before
    assert allocator.is_free(np.arange(8)).tolist() == [False] * 4 + [True] * 4


def test_an_error_names_no_more_than_a_few_pages() -> None:
    with pytest.raises(OwnershipError, match="pages 0, 1, 2, 3, 4, 5, 6, 7 and 9992 more free"):
        PageAllocator(10_000).free(np.arange(10_000))


@pytest.mark.parametrize("page", [-1, 4])
def test_whether_a_foreign_page_is_free_is_not_a_question(page: int) -> None:
    with pytest.raises(OwnershipError, match=f"page {page} not in this pool of 4"):
        PageAllocator(4).is_free(pages(0, page))


class AllocatorMachine(RuleBasedStateMachine):
    """`PageAllocator` against a set of free pages."""

    @initialize(num_pages=st.integers(1, 12))
    def build(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.free = set(range(num_pages))

    @rule(count=st.integers(0, 13))
    def alloc(self, count: int) -> None:
        given = self.allocator.alloc(count)
        if given is None:
            assert count > len(self.free)
            return
        assert len(given) == count
        assert given.tolist() == sorted(set(given.tolist()))
        assert self.free.issuperset(given.tolist())
        self.free.difference_update(given.tolist())

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        taken = sorted(set(range(self.allocator.num_pages)) - self.free)
        chosen = data.draw(st.lists(st.sampled_from(taken), unique=True)) if taken else []
        self.allocator.free(pages(*chosen))
        self.free.update(chosen)

    @rule(ids=st.lists(st.integers(-3, 15), max_size=5))
    def give_back_anything(self, ids: list[int]) -> None:
        taken = set(range(self.allocator.num_pages)) - self.free
        if len(set(ids)) == len(ids) and taken.issuperset(ids):
            self.allocator.free(pages(*ids))
            self.free.update(ids)
        else:
            with pytest.raises(OwnershipError):
                self.allocator.free(pages(*ids))

    @invariant()
    def agrees_with_the_set(self) -> None:
        every = np.arange(self.allocator.num_pages)
        assert self.allocator.num_available == len(self.free)
        assert sorted(self.allocator.free_pages().tolist()) == sorted(self.free)
        assert set(every[self.allocator.is_free(every)].tolist()) == self.free


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(deadline=None, max_examples=30, stateful_step_count=30)
