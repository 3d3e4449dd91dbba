"""Processes that write to a page store at once keep the limit that they all have."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from page_store_tools import (
    MISS,
    OK,
    chain,
    disk_bytes,
    open_store,
    read,
    verify_index,
    watched,
)
from page_store_writers import Nursery

from hicache.storage.page_store import list_pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_PROCESSES = 3
NUM_CHAINS = 150
LIMITS = [1_000_000, 2_500_000]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("pipes"))
    yield nursery
    nursery.close()


@pytest.mark.parametrize("max_bytes", LIMITS)
@pytest.mark.parametrize("same_pages", [False, True])
def test_a_store_that_three_processes_write_to_is_at_no_moment_larger_than_their_limit(
    nursery: Nursery, fast_path: Path, max_bytes: int, same_pages: bool
) -> None:
    """C080: each has room of its own in reserve, and all together write far more than fits."""
    firsts = [0 if same_pages else NUM_CHAINS * number for number in range(NUM_PROCESSES)]
    with watched(fast_path, max_bytes), contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                nursery.start(
                    "write_chains", fast_path, NUM_CHAINS, first=first, max_bytes=max_bytes
                )
            )
            for first in firsts
        ]
        reports = [writer.wait().split()[1:] for writer in writers]
    # Others may make room by the head of a prompt again and again; what hangs below is not stored.
    outcomes = {b"ok", b"present", b"skipped"} if same_pages else {b"ok"}
    for report in reports:
        assert len(report) == 2 * 5 * NUM_CHAINS
        assert {*report[::2]} <= outcomes
    # It is full, and what it says it has is there.
    assert disk_bytes(fast_path) > max_bytes // 2
    verify_index(fast_path)
    storage = open_store(fast_path, max_bytes=max_bytes)
    num_found = 0
    for name in sorted({first + number for first in firsts for number in range(NUM_CHAINS)}):
        keys = chain(name, 5)
        num_stored = storage.batch_exists(keys)
        assert read(storage, keys)[: num_stored + 1] == ([OK] * num_stored + [MISS])[:5]
        num_found += num_stored
    assert num_found == len(list(list_pages(str(fast_path))))
    storage.close()
