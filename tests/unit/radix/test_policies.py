"""Laws of the eviction policies, each against a naive model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from policy_models import QueueDriver, make_node
from tree_driver import TreeDriver

from hicache.errors import ConfigError
from hicache.radix import (
    POLICY_NAMES,
    EvictionPolicy,
    LruPolicy,
    RadixKey,
    RadixNode,
    RadixTree,
    create_policy,
)
from hicache.radix.keyed_policies import FifoPolicy
from hicache.radix.slru_policy import SlruPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

ORDERS: dict[str, Callable[[RadixNode], tuple[int, ...]]] = {
    "lru": lambda node: (node.last_access,),
    "lfu": lambda node: (node.hit_count, node.last_access),
    "fifo": lambda node: (node.created,),
    "mru": lambda node: (-node.last_access,),
    "priority": lambda node: (node.priority, node.last_access),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seed", range(10))
def test_the_victim_is_the_smallest_by_the_order_of_the_policy(name: str, seed: int) -> None:
    driver = QueueDriver(create_policy(name)(), seed)
    for _ in range(600):
        driver.step()
        for node in driver.queued[-1:]:
            node.priority = node.id % 3
        if driver.rng.random() < 0.2:
            driver.pop(ORDERS[name])
    while driver.queued:
        driver.pop(ORDERS[name])
    driver.pop(ORDERS[name])


@pytest.mark.parametrize("name", ["lru", "lfu"])
@pytest.mark.parametrize("seed", range(5))
def test_a_use_that_nobody_reported_counts(name: str, seed: int) -> None:
    """A node deeper on the path was used."""
    driver = QueueDriver(create_policy(name)(), seed)
    for _ in range(400):
        driver.step()
        if driver.queued:
            node = driver.rng.choice(driver.queued)
            node.last_access = driver.tick
            node.hit_count += driver.rng.randrange(2)
        if driver.rng.random() < 0.3:
            driver.pop(ORDERS[name])


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("cut_victims", [False, True])
def test_the_tree_keeps_its_laws_under_every_policy(name: str, cut_victims: bool) -> None:
    for seed in range(2):
        driver = TreeDriver(seed)
        driver.tree = RadixTree(
            driver.page_size, create_policy=create_policy(name), cut_victims=cut_victims
        )
        for _ in range(250):
            driver.step()
        driver.drain()


@pytest.mark.parametrize("num_pages", [1, 2, 3, 5, 9])
def test_cut_victims_give_exactly_what_was_asked_for_and_leave_the_beginning(
    num_pages: int,
) -> None:
    tree = RadixTree(1, cut_victims=True)
    tree.insert(RadixKey([1, 2, 3, 4]), np.arange(4))
    tree.insert(RadixKey([5, 6, 7, 8, 9]), np.arange(4, 9))
    freed = tree.evict(num_pages).freed
    assert len(freed) == num_pages
    kept = max(4 - num_pages, 0)
    assert tree.match(RadixKey([1, 2, 3, 4])).num_device_pages == kept


def test_the_unused_part_of_a_run_does_not_become_recent_with_the_used_part() -> None:
    tree = RadixTree(1)
    tree.insert(RadixKey([1, 2, 3]), np.arange(3))
    tree.insert(RadixKey([7]), np.array([3]))
    tree.split_at(tree.match(RadixKey([1, 2, 9])))
    assert tree.evict(1).freed.tolist() == [2]
    assert tree.evict(1).freed.tolist() == [3]


def test_slru_protects_runs_used_again_but_only_a_share_of_the_pages() -> None:
    policy = SlruPolicy(protected_share=0.25)
    nodes = [make_node(number, tick=number) for number in range(1, 9)]
    for node in nodes:
        policy.add(node)
    for tick, node in enumerate(nodes[:2], start=9):
        node.last_access, node.hit_count = tick, 2
        policy.touch(node)
    for number in range(9, 13):
        policy.add(make_node(number, tick=number + 2))
    popped = [policy.pop() for _ in range(12)]
    # One page is protected while there are four, two while there are eight.
    assert [node.id for node in popped if node] == [3, 4, 5, 6, 7, 8, 1, 9, 10, 2, 11, 12]
    assert policy.pop() is None


def test_slru_without_a_share_is_lru() -> None:
    driver = QueueDriver(SlruPolicy(protected_share=0), 3)
    for _ in range(500):
        driver.step()
        if driver.rng.random() < 0.3:
            driver.pop(ORDERS["lru"])


def test_slru_refuses_a_share_that_is_none() -> None:
    with pytest.raises(ConfigError, match="protected_share"):
        SlruPolicy(protected_share=1.5)


def test_a_policy_is_found_by_module_path_and_class() -> None:
    assert create_policy("lru") is LruPolicy
    assert create_policy("hicache.radix.keyed_policies:FifoPolicy") is FifoPolicy


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lruu", "give one of"),
        ("no_such_module_at_all:Policy", "cannot be imported"),
        ("hicache.radix:NoSuchPolicy", "cannot be imported"),
        ("hicache.radix:RadixKey", "has no add, discard"),
    ],
)
def test_what_is_no_policy_is_refused_with_a_reason(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        create_policy(name)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_each_queue_has_a_policy_of_its_own(name: str) -> None:
    create: Callable[[], EvictionPolicy] = create_policy(name)
    first, second = create(), create()
    first.add(make_node(1))
    assert (len(first), len(second)) == (1, 0)
