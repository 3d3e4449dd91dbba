"""Pages to token slots and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.pools.indices import SlotTable, expand_pages, pages_of_slots

page_lists = st.lists(st.integers(0, 1 << 40), max_size=20)
page_sizes = st.sampled_from([1, 2, 16, 64])


@given(pages=page_lists, page_size=page_sizes)
@settings(deadline=None)
def test_a_page_expands_to_its_tokens_in_order(pages: list[int], page_size: int) -> None:
    slots = expand_pages(np.array(pages, dtype=np.int64), page_size)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [
        page * page_size + token for page in pages for token in range(page_size)
    ]


@given(pages=page_lists, page_size=page_sizes, as_tensor=st.booleans())
@settings(deadline=None)
def test_pages_of_expanded_pages_are_the_pages(
    pages: list[int], page_size: int, as_tensor: bool
) -> None:
    slots = expand_pages(np.array(pages, dtype=np.int64), page_size)
    back = pages_of_slots(slots if as_tensor else slots.numpy(), page_size)
    assert back.dtype == np.int64
    assert back.tolist() == pages


def test_the_pages_do_not_alias_the_slots() -> None:
    slots = np.arange(8)
    pages = pages_of_slots(slots, 1)
    slots[:] = 0
    assert pages.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 1, 2, 3, 4], r"shape \(5,\) are not whole pages of 4"),
        ([1, 2, 3, 4], r"1 \.\. 4 at position 0"),
        ([4, 5, 6, 7, 0, 1, 3, 2], r"0 \.\. 2 at position 4"),
        ([4, 5, 6, 7, 0, 0, 0, 0], r"0 \.\. 0 at position 4"),
        ([-4, -3, -2, -1], r"-4 \.\. -1 at position 0"),
        ([[0, 1, 2, 3]], r"shape \(1, 4\)"),
    ],
    ids=["tail", "misaligned", "out of order", "repeated", "negative", "two-dimensional"],
)
def test_slots_that_are_not_whole_pages_are_refused_with_the_place(
    slots: list[Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        pages_of_slots(torch.tensor(slots), 4)


def test_a_table_of_slots_gives_what_the_computation_gives() -> None:
    pages = np.array([3, 0, 7, 7], dtype=np.int64)
    assert SlotTable(8, 16).expand(pages).equal(expand_pages(pages, 16))
