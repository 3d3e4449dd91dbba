"""Pins: last to go, for their time, and no longer."""

from __future__ import annotations

import itertools
import random
from functools import partial

import numpy as np
import pytest
from policy_models import make_node

from hicache.radix import (
    LearningPolicy,
    PinningPolicy,
    RadixKey,
    RadixTree,
    check_tree,
    create_policy,
)


def seconds(now: list[float]) -> float:
    return now[0]


@pytest.mark.parametrize("seed", range(10))
def test_the_oldest_without_a_pin_goes_first_then_the_pin_that_ends_first(seed: int) -> None:
    rng, now, ids = random.Random(seed), [0.0], itertools.count(1)
    policy = PinningPolicy(create_policy("lru"), clock=partial(seconds, now))
    queued = []
    for _ in range(600):
        now[0] += rng.randrange(2)
        action = rng.randrange(4)
        if action < 2:
            node = make_node(next(ids), tick=int(now[0]))
            node.pinned_until = now[0] + rng.choice([0, 0, 5, 50])
            policy.add(node)
            queued.append(node)
        elif queued and action == 2:
            node = rng.choice(queued)
            node.pinned_until = max(node.pinned_until, now[0] + rng.choice([0, 9, 99]))
            node.last_access = int(now[0])
            policy.touch(node)
        elif queued:
            popped = policy.pop()
            assert popped is not None
            free = [node for node in queued if node.pinned_until <= now[0]]
            if free:
                assert popped.last_access == min(node.last_access for node in free)
                assert popped in free
            else:
                assert popped.pinned_until == min(node.pinned_until for node in queued)
            queued.remove(popped)
        assert set(policy) == set(queued)
        assert len(policy) == len(queued)


@pytest.mark.parametrize("name", ["lru", "adaptive"])
def test_pins_work_over_every_policy_and_make_only_a_learner_learn(name: str) -> None:
    tree = RadixTree(1, create_policy=lambda: PinningPolicy(create_policy(name), clock=float))
    assert (tree.history is not None) == isinstance(create_policy(name)(), LearningPolicy)
    tree.pin(tree.insert(RadixKey([1]), np.arange(1)).node, until=1.0)
    tree.insert(RadixKey([2]), np.arange(1, 2))
    assert [tree.evict(1).freed.tolist() for _ in range(3)] == [[1], [0], []]


def test_a_pinned_prompt_outlives_a_scan_and_goes_when_its_time_is_over() -> None:
    now = [0.0]
    clock = partial(seconds, now)
    tree = RadixTree(1, create_policy=lambda: PinningPolicy(create_policy("lru"), clock=clock))
    pinned = RadixKey([1, 2, 3])
    tree.pin(tree.insert(pinned, np.arange(3)).node, until=100.0)
    for page in range(3, 50):
        tree.insert(RadixKey([1000 + page]), np.array([page]))
        tree.evict(tree.residency.num_device_pages - 10)
    assert tree.match(pinned).num_device_pages == 3

    now[0] = 100.0
    for page in range(50, 100):
        tree.insert(RadixKey([1000 + page]), np.array([page]))
        tree.evict(tree.residency.num_device_pages - 10)
    assert tree.match(pinned).num_device_pages == 0


def test_pinned_pages_are_given_when_nothing_else_is_left() -> None:
    tree = RadixTree(1, create_policy=lambda: PinningPolicy(create_policy("lru"), clock=float))
    tree.pin(tree.insert(RadixKey([1, 2, 3]), np.arange(3)).node, until=100.0)
    assert len(tree.evict(3).freed) == 3


def test_priority_is_of_the_whole_path_and_survives_a_split() -> None:
    tree = RadixTree(1, create_policy=create_policy("priority"))
    important = tree.insert(RadixKey([1, 2, 3]), np.arange(3)).node
    tree.prioritize(important, 5)
    tree.insert(RadixKey([1, 2, 9]), np.array([0, 1, 3]))
    for page in range(4, 8):
        tree.insert(RadixKey([page]), np.array([page]))
    assert tree.evict(5).freed.tolist() == [3, 4, 5, 6, 7]
    assert tree.match(RadixKey([1, 2, 3])).num_device_pages == 3


def test_a_priority_below_that_of_all_others_is_found_in_the_queue() -> None:
    tree = RadixTree(1, create_policy=create_policy("priority"))
    for page, priority in enumerate((0, 7, -7)):
        tree.prioritize(tree.insert(RadixKey([page]), np.array([page])).node, priority)
    assert tree.evict(3).freed.tolist() == [2, 0, 1]


@pytest.mark.parametrize("name", ["lru", "adaptive", "slru", "lfu", "fifo", "priority"])
def test_a_tree_can_begin_to_pin_at_any_time(name: str) -> None:
    tree = RadixTree(1, create_policy=create_policy(name))
    nodes = [tree.insert(RadixKey([page]), np.array([page])).node for page in range(9)]
    tree.pin_by(lambda: 1.0)
    tree.pin(nodes[4], until=2.0)
    assert check_tree(tree) == []
    freed = [tree.evict(1).freed.tolist() for _ in range(9)]
    assert sorted(freed) == [[page] for page in range(9)]
    assert freed[-1] == [4]


def test_an_unpinned_run_has_its_old_place_again() -> None:
    tree = RadixTree(1)
    nodes = [tree.insert(RadixKey([page]), np.array([page])).node for page in range(6)]
    tree.pin_by(lambda: 1.0)
    for node in nodes:
        tree.pin(node, until=2.0)
    for node in (nodes[3], nodes[1], nodes[5], nodes[1]):
        tree.unpin(node)
    assert [tree.evict(1).freed.tolist() for _ in range(6)] == [[1], [3], [5], [0], [2], [4]]


@pytest.mark.parametrize("seed", range(20))
def test_pages_held_are_those_that_a_look_up_finds_in_whole_runs(seed: int) -> None:
    rng, pages = random.Random(seed), itertools.count()
    tree = RadixTree(1)
    for _ in range(60):
        key = RadixKey([rng.randrange(2) for _ in range(rng.randrange(1, 6))])
        result = tree.insert(key, np.array([next(pages) for _ in range(len(key))]))
        ticket = tree.begin_write(result.node) if rng.randrange(2) else None
        if ticket is not None:
            copies = np.array([next(pages) for _ in range(ticket.num_pages)])
            tree.commit_write(ticket, copies, ticket.num_pages)
        tree.evict(rng.randrange(3))
        key = RadixKey([rng.randrange(2) for _ in range(rng.randrange(1, 6))])
        before = [(node.id, node.last_access) for node in tree.nodes()]
        held = tree.num_held_pages(key)
        assert [(node.id, node.last_access) for node in tree.nodes()] == before
        found = tree.split_at(tree.match(key))
        assert held <= (found.num_device_pages, found.num_device_pages + found.num_host_pages)
        # Where the look-up has cut them, runs are whole.
        found = tree.match(key)
        total = found.num_device_pages + found.num_host_pages
        assert tree.num_held_pages(key) == (found.num_device_pages, total)
