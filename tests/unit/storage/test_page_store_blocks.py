"""Sets of blocks, in memory and in the index, against sets of numbers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.storage.page_store.blocks import Extent, count_blocks, cut, join, merge
from hicache.storage.page_store.extent_map import ExtentMap
from hicache.storage.page_store.free_list import FreeList

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

NUM_SEGMENTS, NUM_BLOCKS = 2, 24

Blocks = set[tuple[int, int]]
block_sets = st.sets(
    st.tuples(st.integers(0, NUM_SEGMENTS - 1), st.integers(0, NUM_BLOCKS - 1)), max_size=40
)


def blocks_in(extents: Iterable[Extent]) -> Blocks:
    blocks = [(e.segment, block) for e in extents for block in range(e.block, e.end)]
    assert len(blocks) == len(set(blocks)), "a block is there twice"
    return set(blocks)


def singles(blocks: Blocks) -> list[Extent]:
    return [Extent(segment, block, 1) for segment, block in blocks]


def verify_joined(extents: list[Extent]) -> None:
    assert extents == merge(extents)


@given(blocks=block_sets)
def test_merged_extents_are_as_few_as_can_be_and_the_same_blocks(blocks: Blocks) -> None:
    merged = merge(singles(blocks))
    assert blocks_in(merged) == blocks
    assert merged == sorted(merged)
    starts = [b for b in blocks if (b[0], b[1] - 1) not in blocks]
    assert len(merged) == len(starts)


@given(blocks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=12))
def test_joined_extents_are_the_same_blocks_in_the_same_order(
    blocks: list[tuple[int, int]],
) -> None:
    joined = join(Extent(segment, block, 1) for segment, block in blocks)
    assert [(e.segment, block) for e in joined for block in range(e.block, e.end)] == blocks
    followed = [right == (left[0], left[1] + 1) for left, right in itertools.pairwise(blocks)]
    assert len(joined) == len(blocks) - sum(followed)


@given(lengths=st.lists(st.integers(1, 6), max_size=8), data=st.data())
def test_a_cut_is_a_slice_of_all_blocks(lengths: list[int], data: st.DataObject) -> None:
    extents = [Extent(number, 10, length) for number, length in enumerate(lengths)]
    every = [(e.segment, block) for e in extents for block in range(e.block, e.end)]
    first = data.draw(st.integers(0, len(every)))
    num_blocks = data.draw(st.integers(0, len(every) - first))
    parts = cut(extents, first, num_blocks)
    found = [(e.segment, block) for e in parts for block in range(e.block, e.end)]
    assert found == every[first : first + num_blocks]


@given(blocks=block_sets, num_units=st.integers(1, 10), unit_blocks=st.integers(1, 6))
def test_units_are_taken_whole_as_long_as_there_are_such_and_then_from_pieces(
    blocks: Blocks, num_units: int, unit_blocks: int
) -> None:
    free_list = FreeList()
    free_list.add(singles(blocks))
    whole = sum(extent.num_blocks // unit_blocks for extent in merge(singles(blocks)))
    taken = free_list.take_units(num_units, unit_blocks)
    assert count_blocks(taken) == min(num_units, len(blocks) // unit_blocks) * unit_blocks
    assert blocks_in(taken) | blocks_in(free_list.take_all()) == blocks
    assert free_list.num_blocks == 0
    for number in range(min(num_units, whole)):
        assert len(cut(taken, number * unit_blocks, unit_blocks)) == 1


@given(blocks=block_sets, num_units=st.integers(1, 10))
def test_what_is_taken_and_given_back_is_there_again(blocks: Blocks, num_units: int) -> None:
    free_list = FreeList()
    free_list.add(singles(blocks))
    taken = free_list.take_units(num_units, 2)
    assert free_list.num_blocks == len(blocks) - count_blocks(taken)
    free_list.add(taken)
    assert free_list.num_blocks == len(blocks)
    assert free_list.take_all() == merge(singles(blocks))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lmdb.Environment]:
    path: Path = tmp_path_factory.mktemp("lmdb")
    with lmdb.open(str(path), max_dbs=1, sync=False) as environment:
        yield environment


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "take"]),
            st.integers(0, NUM_SEGMENTS - 1),
            st.integers(0, NUM_BLOCKS - 1),
            st.integers(1, 8),
        ),
        max_size=40,
    )
)
def test_a_map_in_the_index_is_a_set_whose_neighbours_are_joined(
    environment: lmdb.Environment, steps: list[tuple[str, int, int, int]]
) -> None:
    database = environment.open_db(b"space")
    others = [(b"a", Extent(0, 0, NUM_BLOCKS)), (b"c", Extent(1, 0, NUM_BLOCKS))]
    extents = ExtentMap(database, b"b")
    expected: Blocks = set()
    with environment.begin(write=True) as txn:
        txn.drop(database, delete=False)
        for prefix, extent in others:
            ExtentMap(database, prefix).add(txn, extent)
        for step, segment, block, length in steps:
            extent = Extent(segment, block, length)
            blocks = blocks_in([extent])
            assert extents.contains(txn, extent) == (blocks <= expected)
            if step == "add" and not blocks & expected:
                extents.add(txn, extent)
                expected |= blocks
            elif step == "remove" and blocks <= expected:
                extents.remove(txn, extent)
                expected -= blocks
            elif step == "take":
                taken = extents.take(txn, length, max_extents=3)
                assert blocks_in(taken) <= expected
                assert count_blocks(taken) <= length
                assert len(taken) <= 3
                assert len(taken) == 3 or count_blocks(taken) == min(length, len(expected))
                expected -= blocks_in(taken)
            found = list(extents.extents(txn))
            verify_joined(found)
            assert blocks_in(found) == expected
            assert extents.num_blocks(txn) == len(expected)
        for prefix, extent in others:
            assert list(ExtentMap(database, prefix).extents(txn)) == [extent]
