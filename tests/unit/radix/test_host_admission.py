"""Which victims of the device are worth host pages."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache.radix import Admission, Duplicates, RadixKey, RadixTree, Ticket, create_policy

PAGES = np.arange(4096, dtype=np.int64)
DEVICE_PAGES = 80
SCANNED = 1000
"""First of the prompts that come once."""


class TwoTiers:
    """A tree over two small tiers; what is evicted from the device is written if it may."""

    def __init__(self, policy: str, admission: Admission, *, host_pages: int = 160) -> None:
        self.tree = RadixTree(1, create_policy=create_policy(policy), cut_victims=True)
        self.tree.keep_history()
        self.admission = admission
        self.host_pages = host_pages
        self.num_hits = self.num_written = self.num_refused = self.num_freed = 0

    def request(self, tokens: list[int]) -> None:
        tree = self.tree
        found = tree.split_at(tree.match(RadixKey(tokens)))
        self.num_hits += found.num_device_pages + found.num_host_pages
        tree.insert(RadixKey(tokens), PAGES)
        while (excess := tree.residency.num_device_pages - DEVICE_PAGES) > 0:
            result = tree.evict(excess, write_back=True, admission=self.admission)
            self.num_refused += result.num_refused
            for ticket in result.writes:
                self._write(ticket)

    def _write(self, ticket: Ticket) -> None:
        excess = self.tree.residency.num_host_pages + ticket.num_pages - self.host_pages
        self.tree.evict_host(excess)
        self.tree.commit_write(ticket, PAGES[: ticket.num_pages], ticket.num_pages)
        self.num_written += ticket.num_pages


def scan_with_hot_prompts(*, hot_in_8: int = 1) -> list[list[int]]:
    rng = random.Random(7)
    starts = [rng.randrange(20) if n % 8 < hot_in_8 else SCANNED + n for n in range(4000)]
    return [[start * 8 + page for page in range(8)] for start in starts]


def replay(policy: str, admission: Admission) -> TwoTiers:
    tiers = TwoTiers(policy, admission)
    for tokens in scan_with_hot_prompts():
        tiers.request(tokens)
    return tiers


@pytest.mark.parametrize("policy", ["adaptive", "lru", "fifo"])
def test_what_is_used_once_is_not_written_and_no_hit_is_lost(policy: str) -> None:
    everything = replay(policy, Admission.ALL)
    worthy = replay(policy, Admission.WORTHY)
    assert worthy.num_written < 0.5 * everything.num_written
    assert worthy.num_hits >= 0.98 * everything.num_hits
    assert worthy.num_refused > 0
    assert everything.num_refused == 0


def test_what_never_comes_again_is_not_written_into_a_host_with_room_for_everything() -> None:
    found = {}
    for admission in Admission:
        found[admission] = tiers = TwoTiers("lru", admission, host_pages=10**6)
        for tokens in scan_with_hot_prompts(hot_in_8=6):
            tiers.request(tokens)
    everything = found[Admission.ALL]
    for admission in (Admission.HOPEFUL, Admission.WORTHY):
        assert found[admission].num_written < 0.5 * everything.num_written
        assert found[admission].num_hits >= 0.98 * everything.num_hits


def test_where_everything_comes_again_nothing_is_hopeless() -> None:
    tiers = TwoTiers("lru", Admission.HOPEFUL)
    for n in range(4000):
        tiers.request([8 * (n % 25) + page for page in range(8)])
    assert tiers.num_refused == 0


def test_without_a_history_everything_is_admitted() -> None:
    tree = RadixTree(1)
    tree.insert(RadixKey([1, 2]), PAGES)
    assert len(tree.evict(2, write_back=True, admission=Admission.WORTHY).writes) == 1


def test_a_host_that_holds_what_nobody_wants_any_more_takes_new_runs_in_the_end() -> None:
    tiers = replay("adaptive", Admission.WORTHY)
    circle = [[100_000 + 8 * (n % 25) + page for page in range(8)] for n in range(6000)]
    for tokens in circle:
        tiers.request(tokens)
    before = tiers.num_hits
    for tokens in circle[:500]:
        tiers.request(tokens)
    assert tiers.num_hits - before > 0.8 * 500 * 8


def test_writes_ahead_leave_out_what_eviction_would_not_write_and_change_no_bar() -> None:
    tiers = replay("adaptive", Admission.WORTHY)
    history = tiers.tree.history
    assert history is not None
    floor = history.host_floor
    assert floor > 0
    for _ in range(100):
        tickets = tiers.tree.begin_writes_ahead(DEVICE_PAGES, admission=Admission.WORTHY)
        first_tokens = {
            int(np.frombuffer(node.key, dtype=np.int32)[0])
            for node in tiers.tree.nodes()
            if node.write_ticket in tickets
        }
        assert all(token < 8 * SCANNED for token in first_tokens)
        for ticket in tickets:
            tiers.tree.commit_write(ticket, PAGES[:0], 0)
    assert history.host_floor == floor


def test_an_eviction_ends_after_as_many_writes_as_it_may_begin() -> None:
    tree = RadixTree(1)
    for start in range(0, 40, 4):
        tree.insert(RadixKey(range(start, start + 4)), PAGES)
    result = tree.evict(40, write_back=True, max_writes=3)
    assert (len(result.writes), result.num_pending, len(result.freed)) == (3, 12, 0)


def test_a_history_that_is_asked_for_outlives_a_reset() -> None:
    tree = RadixTree(1)
    tree.insert(RadixKey([1, 2]), PAGES)
    tree.keep_history()
    first = tree.history
    tree.keep_history()
    assert tree.history is first is not None
    tree.insert(RadixKey([1, 2]), PAGES)
    tree.reset()
    assert tree.history is not None
    assert tree.history is not first


def backed(tree: RadixTree, start: int) -> None:
    node = tree.insert(RadixKey(range(start, start + 4)), PAGES).node
    ticket = tree.begin_write(node)
    assert ticket is not None
    tree.commit_write(ticket, np.arange(start, start + 4), 4)


def two_of_each_kind() -> RadixTree:
    """Host copies of 0 and 10 alone, then of 20 and 30, which the device has too."""
    tree = RadixTree(1)
    for start in (0, 10):
        backed(tree, start)
    assert len(tree.evict(8).freed) == 8
    for start in (20, 30):
        backed(tree, start)
    return tree


@pytest.mark.parametrize(
    ("duplicates", "order"),
    [
        (Duplicates.FIRST, [30, 20, 0, 10]),
        (Duplicates.IF_WANTED, [30, 20, 0, 10]),
        (Duplicates.LAST, [0, 10, 30, 20]),
        (Duplicates.STAY, [0, 10]),
    ],
)
def test_host_victims_go_in_the_order_that_is_asked_for(
    duplicates: Duplicates, order: list[int]
) -> None:
    """Of the duplicates the newest goes first: the device will lose it last."""
    tree = two_of_each_kind()
    victims = []
    while len(pages := tree.evict_host(1, duplicates=duplicates)):
        victims.append(int(pages[0]))
    assert victims == order


def test_few_duplicates_stay_and_they_are_what_the_device_evicts_next() -> None:
    tree = two_of_each_kind()
    for start in range(100, 300, 10):
        tree.insert(RadixKey(range(start, start + 4)), PAGES)
    order = [int(tree.evict_host(1, duplicates=Duplicates.IF_WANTED)[0]) for _ in range(4)]
    assert order == [30, 0, 10, 20]
    assert len(tree.evict(1).freed) == 4
    assert tree.match(RadixKey(range(20, 24))).num_device_pages == 0
