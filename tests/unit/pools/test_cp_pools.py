"""Laws about pools whose pages are spread over context-parallel ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError, OwnershipError
from hicache.pools import CpPageAllocator, CpSharedKVLayout, PageAllocator, alloc_like

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(1, 4))


def layouts(cp_size: int, num_pages: int, page_size: int = 1) -> list[CpSharedKVLayout]:
    return [
        CpSharedKVLayout(
            cp_rank=rank, cp_size=cp_size, num_physical_pages=num_pages, page_size=page_size
        )
        for rank in range(cp_size)
    ]


@given(sizes=SIZES)
def test_every_page_is_in_one_place_of_one_rank(sizes: tuple[int, int, int]) -> None:
    cp_size, num_pages, page_size = sizes
    ranks = layouts(*sizes)
    pages = np.arange(cp_size * num_pages)
    places = set()
    for layout in ranks:
        mine = pages[layout.owned_by_this_rank(pages)]
        assert (layout.owner_for_logical_pages(mine) == layout.cp_rank).all()
        places |= {(layout.cp_rank, page) for page in layout.physical_pages(mine).tolist()}
    assert places == {(rank, page) for rank in range(cp_size) for page in range(num_pages)}
    slots = np.arange(cp_size * num_pages * page_size)
    owned = [layout.owned_slots(slots) for layout in ranks]
    assert (np.sum(owned, axis=0) == 1).all()
    for layout, mask in zip(ranks, owned, strict=True):
        physical = layout.logical_locs_to_physical(slots[mask])
        assert sorted(physical.tolist()) == list(range(num_pages * page_size))
        # A page stays together, token by token.
        assert (physical % page_size == slots[mask] % page_size).all()


def test_what_another_rank_owns_has_no_place_here() -> None:
    with pytest.raises(OwnershipError, match="page 1 is rank 1's, not that of CP rank 0"):
        layouts(2, 4)[0].physical_pages(np.array([0, 1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cp_rank": 2}, "not one of 2 ranks"),
        ({"cp_rank": -1}, "not one of 2 ranks"),
        ({"cp_size": 0}, "not one of 0 ranks"),
        ({"num_physical_pages": 0}, "at least 1 page"),
        ({"page_size": 0}, "at least 1 token"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(arguments: dict[str, int], message: str) -> None:
    good = {"cp_rank": 0, "cp_size": 2, "num_physical_pages": 4, "page_size": 8}
    with pytest.raises(ConfigError, match=message):
        CpSharedKVLayout(**{**good, **arguments})


@given(seed=st.integers(0, 2**32), sizes=SIZES)
def test_pages_are_given_once_and_come_back(seed: int, sizes: tuple[int, int, int]) -> None:
    rng = random.Random(seed)
    ranks = layouts(*sizes)
    allocators = [CpPageAllocator(layout) for layout in ranks]
    first = allocators[0]
    held: list[np.ndarray] = []
    for _ in range(20):
        if held and rng.random() < 0.4:
            given_back = held.pop(rng.randrange(len(held)))
            for one in allocators:
                one.free(given_back)
        else:
            count = rng.randint(0, first.num_pages)
            answers = [one.alloc(count) for one in allocators]
            if answers[0] is None:
                assert count > first.num_available
                assert answers == [None] * len(answers)
                continue
            # Equal histories give equal pages on every rank.
            assert all(
                other is not None and np.array_equal(answers[0], other) for other in answers[1:]
            )
            held.append(answers[0])
        taken = np.concatenate([*held, np.empty(0, dtype=np.int64)])
        assert len(np.unique(taken)) == len(taken)
        assert first.num_available == first.num_pages - len(taken)
        assert sorted([*taken.tolist(), *first.free_pages().tolist()]) == list(
            range(first.num_pages)
        )
        assert not first.is_free(taken).any()


@given(seed=st.integers(0, 2**32), sizes=SIZES)
def test_an_allocation_keeps_the_owners_of_the_other_tier(
    seed: int, sizes: tuple[int, int, int]
) -> None:
    rng = random.Random(seed)
    cp_size, num_pages, _ = sizes
    device = CpPageAllocator(layouts(cp_size, num_pages)[0])
    host = CpPageAllocator(layouts(cp_size, rng.randint(1, 12))[0])
    pages = device.alloc(rng.randint(0, device.num_pages))
    assert pages is not None
    owners = device.owners_of(pages)
    counts = np.bincount(owners, minlength=cp_size)
    copies = alloc_like(host, pages, device)
    room = host.num_pages // cp_size
    if copies is None:
        assert counts.max() > room
        assert host.num_available == host.num_pages
    else:
        assert np.array_equal(host.owners_of(copies), owners)
        assert len(np.unique(copies)) == len(copies)


def owners_of(allocator: CpPageAllocator, count: int) -> list[int]:
    pages = allocator.alloc(count)
    assert pages is not None
    owners: list[int] = allocator.owners_of(pages).tolist()
    return owners


def test_owners_take_turns_until_one_has_nothing_left() -> None:
    allocator = CpPageAllocator(layouts(3, 4)[0])
    assert owners_of(allocator, 4) == [0, 1, 2, 0]
    assert owners_of(allocator, 2) == [1, 2]
    taken = allocator.alloc_pages_with_owners(np.array([1, 1]))
    assert taken is not None
    assert owners_of(allocator, 4) == [0, 2, 0, 2]
    assert allocator.num_available == 0
    assert allocator.alloc(1) is None
    assert owners_of(allocator, 0) == []
    allocator.free(taken)
    assert allocator.alloc_pages_with_owners(np.array([1, 0])) is None
    assert owners_of(allocator, 2) == [1, 1]


@pytest.mark.parametrize("pages", [[0], [5], [-1], [3, 3], [4, 99]])
def test_what_was_not_given_out_cannot_be_given_back(pages: list[int]) -> None:
    allocator = CpPageAllocator(layouts(2, 4)[0])
    taken = allocator.alloc_pages_with_owners(np.array([1, 1, 0, 0]))
    assert taken is not None
    allocator.free(taken[taken == 0])
    before = allocator.num_available
    with pytest.raises(OwnershipError, match="Nothing was freed"):
        allocator.free(np.array(pages))
    assert allocator.num_available == before


def test_a_tier_that_knows_no_owners_gives_any_page() -> None:
    device = CpPageAllocator(layouts(2, 4)[0])
    pages = device.alloc(3)
    assert pages is not None
    assert alloc_like(PageAllocator(4), pages, device) is not None
    assert alloc_like(PageAllocator(2), pages, device) is None


def test_less_than_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        CpPageAllocator(layouts(2, 4)[0]).alloc(-1)
