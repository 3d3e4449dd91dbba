"""Every rank gives at most what all can give, and keeps what it has promised."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import OwnershipError
from hicache.pools import PageAllocator
from hicache.pools.agreed_allocator import AgreedAllocator

if TYPE_CHECKING:
    from hicache.types import IntArray


def agreed(*inner: PageAllocator) -> list[AgreedAllocator]:
    """One allocator per rank, as after the agreement at construction."""
    ranks = [AgreedAllocator(one) for one in inner]
    fewest = min(one.num_pages for one in inner)
    least = min(one.offer() for one in ranks)
    for one in ranks:
        one.accept(least, num_pages=fewest)
    return ranks


def agree(ranks: list[AgreedAllocator]) -> None:
    least = min(one.offer() for one in ranks)
    for one in ranks:
        one.accept(least)


def test_a_pool_of_fewer_pages_bounds_them_all() -> None:
    ranks = agreed(PageAllocator(16), PageAllocator(15))
    assert [one.num_pages for one in ranks] == [15, 15]
    assert [one.num_available for one in ranks] == [15, 15]
    assert [one.alloc(16) for one in ranks] == [None, None]
    assert all(one.alloc(15) is not None for one in ranks)
    assert [one.alloc(1) for one in ranks] == [None, None]


def test_a_page_that_somebody_holds_on_one_rank_bounds_them_all() -> None:
    held = PageAllocator(16)
    page = held.alloc(1)
    assert page is not None
    ranks = agreed(PageAllocator(16), held)
    assert [one.num_available for one in ranks] == [15, 15]
    held.free(page)
    assert [one.num_available for one in ranks] == [15, 15]
    agree(ranks)
    assert [one.num_available for one in ranks] == [16, 16]


def test_nobody_can_take_what_was_promised() -> None:
    inner = PageAllocator(4)
    (one,) = agreed(inner)
    assert inner.num_available == 0
    pages = one.alloc(4)
    assert pages is not None
    assert sorted(pages.tolist()) == [0, 1, 2, 3]
    one.free(pages)
    with pytest.raises(OwnershipError, match="free already"):
        one.free(pages)


def test_at_the_end_every_free_page_is_back_and_so_is_what_is_freed_later() -> None:
    inner = PageAllocator(4)
    (one,) = agreed(inner)
    pages = one.alloc(1)
    assert pages is not None
    one.give_back()
    assert (inner.num_available, one.num_available) == (3, 0)
    assert one.alloc(1) is None
    one.free(pages)
    assert inner.num_available == 4


class Owners:
    """Three ranks that call alike, and somebody else who takes pages of one of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.inner = [PageAllocator(rng.randint(4, 8)) for _ in range(3)]
        self.ranks = agreed(*self.inner)
        self.owned: list[list[IntArray]] = []
        self.stolen: list[tuple[int, IntArray]] = []

    def alloc(self) -> None:
        count = self.rng.randint(0, 4)
        given = [one.alloc(count) for one in self.ranks]
        chunks = [pages for pages in given if pages is not None]
        assert len(chunks) in (0, len(given))
        if chunks:
            self.owned.append(chunks)

    def free(self) -> None:
        if self.owned:
            for one, pages in zip(self.ranks, self.owned.pop(), strict=True):
                one.free(pages)

    def agree(self) -> None:
        agree(self.ranks)

    def steal(self) -> None:
        number = self.rng.randrange(3)
        pages = self.inner[number].alloc(1)
        if pages is not None:
            self.stolen.append((number, pages))

    def bring_back(self) -> None:
        if self.stolen:
            number, pages = self.stolen.pop()
            self.inner[number].free(pages)

    def check(self) -> None:
        assert len({one.num_available for one in self.ranks}) == 1
        for number, (one, inner) in enumerate(zip(self.ranks, self.inner, strict=True)):
            chunks = [one.free_pages(), inner.free_pages()]
            chunks += [chunk[number] for chunk in self.owned]
            chunks += [pages for rank, pages in self.stolen if rank == number]
            assert sorted(np.concatenate(chunks).tolist()) == list(range(inner.num_pages))


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_ranks_that_call_alike_get_alike_and_no_page_has_two_owners(seed: int) -> None:
    """Pools differ, and somebody else takes and gives back pages of one rank at any time."""
    owners = Owners(random.Random(seed))
    for _ in range(40):
        action = owners.rng.choice(["alloc", "alloc", "free", "agree", "steal", "bring_back"])
        getattr(owners, action)()
        owners.check()
