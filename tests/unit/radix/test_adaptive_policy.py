"""The adaptive policy: what it learns and remembers, and that no policy's cost grows."""

from __future__ import annotations

import math
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from policy_models import make_node

from hicache.radix import RadixKey, RadixTree, create_policy
from hicache.radix.adaptive_policy import AdaptivePolicy
from hicache.radix.reuse_statistics import NUM_AGES, NUM_CELLS, ReuseStatistics, cell_of

if TYPE_CHECKING:
    from collections.abc import Callable

PAGES = np.arange(4096, dtype=np.int64)


def request(tree: RadixTree, tokens: list[int], capacity: int) -> int:
    """Look up and insert a request, evict down to `capacity`; return the pages it hit."""
    key = RadixKey(tokens)
    found = tree.split_at(tree.match(key))
    tree.insert(key, PAGES)
    tree.evict(tree.residency.num_device_pages - capacity)
    return found.num_device_pages


def make_tree(policy: str = "adaptive") -> RadixTree:
    return RadixTree(1, create_policy=create_policy(policy), cut_victims=True)


def hits(policy: str, requests: list[list[int]], capacity: int) -> int:
    tree = make_tree(policy)
    return sum(request(tree, tokens, capacity) for tokens in requests)


def hot_between_scans(seed: int) -> list[list[int]]:
    """Twenty prompts come again and again, among ten times as many that come once."""
    rng = random.Random(seed)
    requests = []
    for number in range(3000):
        once = 10_000 + number
        start = rng.randrange(20) if number % 10 == 0 else once
        requests.append([start * 8 + page for page in range(8)])
    return requests


@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_come_again_stay_among_ten_times_as_many_that_do_not(seed: int) -> None:
    requests = hot_between_scans(seed)
    assert hits("lru", requests, 200) < 0.2 * 8 * 300
    assert hits("adaptive", requests, 200) > 0.7 * 8 * 300


def test_what_was_learnt_is_given_up_when_the_workload_changes() -> None:
    """Afterwards a scan in a circle that fits the memory: all that LRU needs is recency."""
    circle = [[50_000 + 8 * (number % 20) + page for page in range(8)] for number in range(3000)]
    requests = hot_between_scans(0) + circle
    tree = make_tree()
    found = [request(tree, tokens, 200) for tokens in requests]
    assert sum(found[-2000:]) == 8 * 2000


def test_with_nothing_learnt_the_oldest_go_first() -> None:
    policy = AdaptivePolicy()
    nodes = [make_node(number, tick=number) for number in range(1, 40)]
    for node in nodes:
        policy.add(node)
    assert [policy.pop() for _ in nodes] == nodes
    assert policy.pop() is None


@pytest.mark.parametrize(("length", "capacity"), [(1, 100), (8, 24), (8, 200), (8, 2000)])
def test_without_any_reuse_the_newest_stay(length: int, capacity: int) -> None:
    """However many came and went meanwhile; that nobody wanted them says nothing of the newest."""
    num_requests = max(1000, 3 * capacity // length)
    requests = [
        [length * number + page for page in range(length)] for number in range(num_requests)
    ]
    tree = make_tree()
    for tokens in requests:
        request(tree, tokens, capacity)
    stored = [tree.match(RadixKey(tokens)).num_device_pages for tokens in requests]
    num_kept = capacity // length
    assert sum(stored[-num_kept:]) >= 0.9 * length * num_kept
    assert stored[-num_kept // 4 :] == [length] * (num_requests - len(stored[: -num_kept // 4]))


def test_equal_requests_give_equal_victims() -> None:
    """Nothing is random, and nothing depends on page ids or addresses."""
    trees = [make_tree(), make_tree()]
    for tokens in hot_between_scans(1)[:1500]:
        for tree in trees:
            request(tree, tokens, 100)
    shapes = [[(node.key, node.last_use) for node in tree.nodes()] for tree in trees]
    assert shapes[0] == shapes[1]


def test_a_run_that_comes_back_has_its_past_and_is_cut_where_it_was() -> None:
    tree = make_tree()
    for tokens in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]):
        request(tree, tokens, 100)
    uses = [(node.start, node.end, node.hit_count) for node in tree.path(_end_of(tree, 6))]
    assert uses == [(0, 3, 3), (3, 5, 2), (5, 6, 1)]
    for _ in range(6):
        tree.evict(1)
    assert list(tree.nodes()) == []
    request(tree, [1, 2, 3, 4, 5, 6, 7], 100)
    path = tree.path(_end_of(tree, 7))
    assert [(node.start, node.end) for node in path] == [(0, 3), (3, 5), (5, 6), (6, 7)]
    assert [node.hit_count + node.past_hits for node in path] == [4, 3, 2, 1]


def _end_of(tree: RadixTree, length: int) -> Any:
    return tree.match(RadixKey(list(range(1, length + 1)))).last_device_node


def test_evicted_runs_that_are_remembered_are_bounded() -> None:
    tree = make_tree()
    for number in range(5000):
        request(tree, [number, 1], 2)
    history = tree.history
    assert history is not None
    assert len(history._evicted) == 2048
    assert len(history._below) <= 2048


def test_no_other_policy_pays_for_a_history() -> None:
    assert RadixTree(1).history is None


@pytest.mark.parametrize("seed", range(3))
def test_worth_finds_the_hazard_of_each_class(seed: int) -> None:
    """Pages used once come again with 1/4 after 8 requests, pages used twice with 3/4."""
    rng, statistics = random.Random(seed), ReuseStatistics()
    due: dict[int, list[int]] = {}
    for now in range(1, 2000):
        statistics.begin_request(2)
        for uses in due.pop(now, []):
            statistics.end_wait(uses, now - 8, 1, reused=True)
        for uses, chance in ((1, 0.25), (2, 0.75)):
            statistics.wait(uses, 1)
            if rng.random() < chance:
                due.setdefault(now + 8, []).append(uses)
    worth = statistics.worth
    once, twice = worth[cell_of(1, 4)], worth[cell_of(2, 4)]
    # Until age 8 to 15 a page is kept for some 8 requests from age 4 on.
    assert 2 < twice / once < 4
    assert 0.25 / 12 < once < 0.25 / 4
    assert worth[cell_of(2, 32)] < 0.2 * twice


def test_pages_whose_wait_is_not_over_count_against_their_age() -> None:
    """Only one page in fifty has come again yet, and it was quick."""
    statistics = ReuseStatistics()
    for now in range(1, 33):
        statistics.begin_request(50)
        if now > 4:
            statistics.end_wait(1, now - 4, 1, reused=True)
        statistics.wait(1, 50)
    assert statistics.worth[cell_of(1, 4)] < 0.02


def test_there_is_a_cell_for_every_use_and_age() -> None:
    cells = [cell_of(uses, age) for uses in range(40) for age in range(20_000)]
    assert (min(cells), max(cells)) == (0, NUM_CELLS - 1)
    assert len(set(cells)) == NUM_CELLS
    assert cell_of(1, 1 << 30) == NUM_AGES - 1


def num_lines(call: Callable[[], object]) -> int:
    """Return how many lines of Python `call` runs."""
    count = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("policy", ["adaptive", "lfu", "slru", "priority", "fifo", "mru"])
def test_the_cost_of_an_eviction_does_not_grow_with_the_number_of_runs(policy: str) -> None:
    """Counted in lines of Python, for a hundred evictions and the insertions between them."""
    costs = {}
    for num_runs in (300, 2_000, 10_000):
        tree = make_tree(policy)
        rng = random.Random(num_runs)
        for number in range(num_runs):
            request(tree, [number, 1], 2 * num_runs)
        for _ in range(num_runs // 10):
            request(tree, [rng.randrange(num_runs), 1], 2 * num_runs)

        def work(tree: RadixTree = tree, first: int = num_runs) -> None:
            for number in range(first, first + 100):
                request(tree, [number, 1], 2 * first)

        costs[num_runs] = num_lines(work)
    for num_runs, cost in costs.items():
        assert cost <= 1.3 * costs[300] * math.log(num_runs) / math.log(300), costs
