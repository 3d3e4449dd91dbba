"""What has to be equal on all ranks is compared, and what is a rank's own is not."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from sim_builders import group, key_of

from hicache.radix import CopyKind
from hicache.sim.comparing import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache.sim.ranks import Rank, Ranks

KEY = key_of(1, 2, 3)


@contextmanager
def served(**options: object) -> Iterator[Ranks]:
    """Ranks that have served a request and hold its pages in both memories."""
    with group(3, **options) as ranks:
        ranks.alike(serve)
        for _ in range(2):
            ranks.each(lambda rank: rank.system.run_all())
        yield ranks


def admit(rank: Rank) -> str:
    rank.scheduler.submit("r", KEY, prefetch=False)
    return rank.scheduler.admit(rank.scheduler.request("r"), mem_quota=None)


def serve(rank: Rank) -> str:
    return admit(rank) + rank.scheduler.compute(rank.scheduler.request("r"), 9)


def lock(rank: Rank) -> None:
    rank.system.cache.inc_lock_ref(rank.system.cache.match_prefix(KEY).last_device_node)


def look_up(rank: Rank) -> None:
    rank.system.cache.match_prefix(KEY.prefix(2))


def test_ranks_that_did_the_same_do_not_differ() -> None:
    with served() as ranks:
        assert differences(ranks.all) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lock, "their trees"),
        (look_up, "their trees"),
        (lambda rank: rank.system.cache.evict(1), "free device pages"),
        (lambda rank: rank.system.cache.evict_host(1), "counters"),
        (lambda rank: rank.scheduler.submit("s", KEY, prefetch=False), "requests"),
        (lambda rank: rank.scheduler.submit("s", key_of(7, 8), prefetch=True), "in flight"),
    ],
)
def test_a_rank_that_does_something_alone_differs(
    change: Callable[[Rank], object], what: str
) -> None:
    with served() as ranks:
        ranks.group.run({1: lambda: change(ranks.all[1])})
        found = differences(ranks.all)
        assert found
        assert all(text.startswith("ranks 0 and 1 differ in ") for text in found)
        assert any(what in text for text in found)


def test_how_far_a_copy_is_and_which_pages_it_has_is_a_ranks_own() -> None:
    with served() as ranks:
        ranks.all[2].system.store.fill(key_of(9))
        ranks.alike(lambda rank: str(rank.system.cache.evict(99)))
        ranks.alike(admit)
        ranks.alike(lambda rank: rank.scheduler.start_loads())
        assert ranks.all[0].system.device.streams[CopyKind.LOAD.value].run_one()
        assert differences(ranks.all) == []


def test_ranks_that_tell_different_things_are_found() -> None:
    with served() as ranks, pytest.raises(Exception, match="ranks do different things"):
        ranks.alike(lambda rank: str(rank.number // 2))


def test_each_rank_has_stamps_of_its_own() -> None:
    with served(side_pools=("draft", "indexer")) as ranks:
        first, second, _ = (rank.system for rank in ranks.all)
        rows = first.stamps.rows(KEY)
        node = first.cache.tree.match(KEY).last_device_node
        assert node.device_pages is not None
        assert first.device_bytes.wrong(node.device_pages, rows) == []
        for number, table in enumerate(first.stamps.tables):
            others = [second.stamps.tables[number], *first.stamps.tables[number + 1 :]]
            shapes = [other for other in others if other.shape == table.shape]
            assert shapes
            assert not any((other[rows] == table[rows]).all() for other in shapes)


def test_a_hit_is_what_all_stores_hold() -> None:
    with served() as ranks:
        for rank in ranks.all:
            rank.system.store.fill(key_of(4, 5, 6))
        store = ranks.all[1].system.store
        store.lose(ranks.all[1].system.stamps.hashes(key_of(4, 5, 6))[1])
        ranks.alike(lambda rank: rank.scheduler.submit("s", key_of(4, 5, 6), prefetch=True))
        for _ in range(4):
            ranks.each(lambda rank: rank.system.run_all())
        assert ranks.each(lambda rank: rank.system.cache.pop_prefetch_loaded_tokens("s") // 2) == [
            1,
            1,
            1,
        ]
