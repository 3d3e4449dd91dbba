"""The offline bound against a search through everything that a cache could keep."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
from small_traces import make_request, random_requests

from hicache.replay import TraceRequest, belady_hits


def best_by_search(requests: list[TraceRequest], capacity: int) -> int:
    """Try every set of blocks that is closed under prefixes, after every request."""
    paths = [tuple(request.blocks.tolist()) for request in requests]
    parent = {
        block: above for path in paths for above, block in zip((-1, *path), path, strict=False)
    }

    def closed(blocks: tuple[int, ...]) -> bool:
        return all(parent[block] == -1 or parent[block] in blocks for block in blocks)

    @functools.cache
    def best(index: int, kept: frozenset[int]) -> int:
        if index == len(paths):
            return 0
        hits = sum(1 for _ in itertools.takewhile(kept.__contains__, paths[index]))
        known = sorted(kept | set(paths[index]))
        choices = [
            frozenset(chosen)
            for size in range(min(capacity, len(known)) + 1)
            for chosen in itertools.combinations(known, size)
            if closed(chosen)
        ]
        # More never hurts: only the largest choices are worth looking at.
        most = max(map(len, choices))
        return hits + max(best(index + 1, choice) for choice in choices if len(choice) == most)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_blocks_to_keep_hits_more(seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 8, max_blocks=3)
    capacities = [1, 2, 4]
    found = belady_hits(requests, capacities)
    assert [sum(hits) for hits in found] == [best_by_search(requests, one) for one in capacities]


def test_a_block_that_is_not_used_again_takes_no_room() -> None:
    requests = [make_request([0, 1]), make_request([2]), make_request([0, 1])]
    assert belady_hits(requests, [2]) == [[0, 0, 2]]


def test_of_one_path_its_head_is_kept() -> None:
    requests = [make_request([0, 1, 2]), make_request([3]), make_request([0, 1, 2])]
    assert belady_hits(requests, [0, 1, 2]) == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]


def test_without_requests_there_are_no_hits() -> None:
    assert belady_hits([], [5]) == [[]]
