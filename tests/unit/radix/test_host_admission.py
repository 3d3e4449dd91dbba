"""Which victims of the device are worth host pages."""

from __future__ import annotations

import random

import numpy as np

from hicache.radix import RadixKey, RadixTree, Ticket, create_policy

PAGES = np.arange(4096, dtype=np.int64)


class TwoTiers:
    """A tree over two small tiers; what is evicted from the device is written if it is worth it."""

    def __init__(self, policy: str, *, worth_only: bool) -> None:
        self.tree = RadixTree(1, create_policy=create_policy(policy), cut_victims=True)
        self.worth_only = worth_only
        self.num_hits = self.num_written = 0

    def request(self, tokens: list[int]) -> None:
        tree = self.tree
        found = tree.split_at(tree.match(RadixKey(tokens)))
        self.num_hits += found.num_device_pages + found.num_host_pages
        tree.insert(RadixKey(tokens), PAGES)
        while (excess := tree.residency.num_device_pages - 80) > 0:
            result = tree.evict(excess, write_back=True, worth_only=self.worth_only)
            for ticket in result.writes:
                self._write(ticket)

    def _write(self, ticket: Ticket) -> None:
        excess = self.tree.residency.num_host_pages + ticket.num_pages - 160
        self.tree.evict_host(excess)
        self.tree.commit_write(ticket, PAGES[: ticket.num_pages], ticket.num_pages)
        self.num_written += ticket.num_pages


def scan_with_hot_prompts() -> list[list[int]]:
    rng = random.Random(7)
    starts = [rng.randrange(20) if n % 8 == 0 else 1000 + n for n in range(4000)]
    return [[start * 8 + page for page in range(8)] for start in starts]


def replay(policy: str, *, worth_only: bool) -> TwoTiers:
    tiers = TwoTiers(policy, worth_only=worth_only)
    for tokens in scan_with_hot_prompts():
        tiers.request(tokens)
    return tiers


def test_what_is_used_once_is_not_written_and_no_hit_is_lost() -> None:
    everything, worthy = (replay("adaptive", worth_only=worth_only) for worth_only in (False, True))
    assert worthy.num_written < 0.5 * everything.num_written
    assert worthy.num_hits >= 0.98 * everything.num_hits


def test_without_a_policy_that_learns_everything_is_worth_it() -> None:
    everything, worthy = (replay("lru", worth_only=worth_only) for worth_only in (False, True))
    assert worthy.num_written == everything.num_written
    assert worthy.num_hits == everything.num_hits


def test_a_host_that_holds_what_nobody_wants_any_more_takes_new_runs_in_the_end() -> None:
    tiers = replay("adaptive", worth_only=True)
    circle = [[100_000 + 8 * (n % 25) + page for page in range(8)] for n in range(6000)]
    for tokens in circle:
        tiers.request(tokens)
    before = tiers.num_hits
    for tokens in circle[:500]:
        tiers.request(tokens)
    assert tiers.num_hits - before > 0.8 * 500 * 8
