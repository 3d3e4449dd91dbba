"""The checks after each step find each kind of wrong that they are there for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from sim_builders import key_of, rank, serve

from hicache.sim.checking import check_bytes, check_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.sim.scheduler import Scheduler
    from hicache.sim.system import System

KEY = key_of(1, 2, 3)


@pytest.fixture
def served() -> Iterator[tuple[System, Scheduler]]:
    """A rank that has served a request and holds its pages in both memories."""
    system, scheduler = rank()
    serve(scheduler, KEY)
    system.run_all()
    system.run_all()
    assert (check_ids(system, scheduler), check_bytes(system, scheduler)) == ([], [])
    yield system, scheduler
    system.abandon()


def test_a_lock_without_a_holder_is_found(served: tuple[System, Scheduler]) -> None:
    system, scheduler = served
    node = system.cache.match_prefix(KEY).last_device_node
    system.cache.inc_lock_ref(node)
    assert check_ids(system, scheduler) == ["1 request lock(s) are held for 0 running request(s)"]


def test_a_host_lock_without_a_copy_is_found(served: tuple[System, Scheduler]) -> None:
    system, scheduler = served
    system.cache.tree.residency.host_lock(system.cache.match_prefix(KEY).last_host_node)
    assert check_ids(system, scheduler) == ["1 host lock(s) are held for 0 copies"]


@pytest.mark.parametrize("place", ["device", "host"])
def test_wrong_bytes_of_the_tree_are_found(served: tuple[System, Scheduler], place: str) -> None:
    system, scheduler = served
    node = system.cache.match_prefix(KEY).last_host_node
    pages = node.device_pages if place == "device" else node.host_pages
    assert pages is not None
    pool = system.device_bytes if place == "device" else system.host_bytes
    pool.scribble(pages[1:2], 0)
    assert check_bytes(system, scheduler) == [
        f"{place} page {pages[1]} is in use and holds the bytes of something else"
    ]


def test_bytes_written_to_a_free_page_are_found(served: tuple[System, Scheduler]) -> None:
    system, scheduler = served
    page = int(system.host_allocator.free_pages()[0])
    system.host_bytes.scribble(np.array([page]), 1)
    assert check_bytes(system, scheduler) == [
        f"host page {page} is free and holds the bytes of something else"
    ]


def test_wrong_bytes_under_a_running_request_are_found(
    served: tuple[System, Scheduler],
) -> None:
    system, scheduler = served
    scheduler.submit("r", key_of(1, 2, 9, 8), prefetch=False)
    request = scheduler.requests[-1]
    scheduler.admit(request, mem_quota=None)
    scheduler.compute(request, 1)
    assert check_bytes(system, scheduler) == []
    untouched = request.pages[-1:]
    system.device_bytes.scribble(untouched, 0)
    assert [text.split(" is ")[0] for text in check_bytes(system, scheduler)] == [
        f"device page {untouched[0]}"
    ]


def test_tokens_that_nobody_asked_for_are_found(served: tuple[System, Scheduler]) -> None:
    system, scheduler = served
    pages = system.device_allocator.alloc(1)
    assert pages is not None
    system.cache.tree.insert(key_of(7), pages)
    assert len(check_bytes(system, scheduler)) == 1
    assert "tokens that no request has" in check_bytes(system, scheduler)[0]
