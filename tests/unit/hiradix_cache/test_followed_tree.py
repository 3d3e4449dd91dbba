"""Trees that differ in anything but page ids have gone through calls of different digests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import PAGE, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.hiradix_cache.followed_tree import FollowedTree
from hicache.radix import CopyKind, RadixKey, RadixTree, check_tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.radix import RadixNode, Ticket


def state(tree: RadixTree) -> list[tuple[object, ...]]:
    """Everything of a tree but its page ids."""
    return sorted(
        (
            (node.start, node.namespace, node.key, node.device_pages is None),
            (node.host_pages is None, node.lock_ref, node.host_lock_ref, node.persisted),
            node.pinned_until,
        )
        for node in tree.nodes()
    )


class Driver:
    """Random calls; page ids count from `first_page`."""

    def __init__(self, tree: RadixTree, seed: int, first_page: int = 0) -> None:
        self.tree = tree
        self.rng = random.Random(seed)
        self.next_page = first_page
        self.locked: list[RadixNode] = []
        self.open: list[Ticket] = []
        tree.pin_by(lambda: 2.0)

    def pages(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        self.next_page += count
        return np.arange(self.next_page - count, self.next_page)

    def step(self) -> None:
        calls = ["insert", "match", "lock", "unlock", "begin", "end", "evict", "pin", "unpin"]
        getattr(self, self.rng.choice(calls))()

    def key(self) -> RadixKey:
        pages = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 5))]
        return RadixKey(tokens(*pages), cache_salt=self.rng.choice([None, "a"]))

    def insert(self) -> None:
        key = self.key()
        self.tree.insert(key, self.pages(len(key) // PAGE))

    def match(self) -> RadixNode:
        return self.tree.split_at(self.tree.match(self.key())).last_host_node

    def pin(self) -> None:
        self.tree.pin(self.match(), float(self.rng.randrange(5)))

    def unpin(self) -> None:
        self.tree.unpin(self.match())

    def lock(self) -> None:
        node = self.match()
        self.tree.lock(node)
        self.locked.append(node)

    def unlock(self) -> None:
        if self.locked:
            self.tree.unlock(self.locked.pop())

    def begin(self) -> None:
        tree, node = self.tree, self.match()
        begin = self.rng.choice([tree.begin_write, tree.begin_load, tree.begin_persist])
        ticket = begin(node)
        if ticket is not None:
            self.open.append(ticket)

    def end(self) -> None:
        if self.open:
            ticket = self.open.pop(0)
            good = self.rng.choice([0, ticket.num_pages])
            if ticket.kind is CopyKind.PERSIST:
                self.tree.commit_persist(ticket, good)
            elif ticket.kind is CopyKind.LOAD:
                self.tree.commit_load(ticket, self.pages(ticket.num_pages), good)
            else:
                self.tree.commit_write(ticket, self.pages(ticket.num_pages), good)

    def evict(self) -> None:
        if self.rng.random() < 0.5:
            self.tree.evict(self.rng.randrange(3))
        else:
            self.tree.evict_host(self.rng.randrange(3))


def run(tree: RadixTree, seed: int, num_steps: int, first_page: int = 0) -> None:
    driver = Driver(tree, seed, first_page)
    for _ in range(num_steps):
        driver.step()
    assert check_tree(tree) == []


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60))
def test_the_same_calls_give_the_same_digest_whatever_the_page_ids(seed: int, steps: int) -> None:
    one, other, plain = FollowedTree(PAGE), FollowedTree(PAGE), RadixTree(PAGE)
    run(one, seed, steps)
    run(other, seed, steps, first_page=1000)
    run(plain, seed, steps)
    assert one.digest == other.digest
    assert state(one) == state(other) == state(plain)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.integers(1, 60))
def test_trees_that_differ_have_different_digests(seed: int, another: int, steps: int) -> None:
    one, other = FollowedTree(PAGE), FollowedTree(PAGE)
    run(one, seed, steps)
    run(other, another, steps)
    if state(one) != state(other):
        assert one.digest != other.digest


KEY, SAME_LENGTH = RadixKey(tokens(1, 2)), RadixKey(tokens(1, 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda tree: tree.insert(SAME_LENGTH, np.arange(2)),
        lambda tree: tree.match(KEY),
        lambda tree: tree.lock(tree.root),
        lambda tree: tree.pin(tree.root, 1.0),
        lambda tree: tree.unpin(tree.root),
        lambda tree: tree.evict(1),
        lambda tree: tree.evict_host(1),
        lambda tree: tree.begin_prefetch(tree.root, 2),
        lambda tree: tree.forget_persisted(),
        lambda tree: tree.reset(),
    ],
)
def test_a_call_that_one_rank_makes_and_another_does_not_shows(
    call: Callable[[FollowedTree], object],
) -> None:
    one, other = FollowedTree(PAGE), FollowedTree(PAGE)
    for tree in (one, other):
        tree.insert(KEY, np.arange(2))
    call(one)
    assert one.digest != other.digest


def test_tokens_show_where_nothing_else_differs() -> None:
    one, other = FollowedTree(PAGE), FollowedTree(PAGE)
    one.insert(KEY, np.arange(2))
    other.insert(SAME_LENGTH, np.arange(2))
    assert one.digest != other.digest
