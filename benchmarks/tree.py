"""The prefix tree: match, insert, lock, evict from small and large trees, bytes per leaf.

Page ids are shuffled, so that pages in a wrong order show, and what must come out is known from
bookkeeping of the benchmark's own. Every tree is checked for broken invariants at the end.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.forest import Forest, grown_bytes, run_cycle
from benchmarks.harness import Bar, CheckFailed, Result, Step, check, summarise, time_calls
from benchmarks.peers.sglang_rows import TreeRows, steps_beside
from benchmarks.prompt import Prompt, cache_of, one_torch_thread
from hicache.radix import RadixKey, RadixTree, check_tree

if TYPE_CHECKING:
    from collections.abc import Callable

    CreateTree = Callable[[int], RadixTree]

__all__ = ["Sizes", "steps"]

_MATCHES_PER_CYCLE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        tokens: length of the prompt that is matched; whole pages.
        page_size: tokens in a page.
        samples: timed calls of match, lock and insert.
        insert_leaves: leaves of the tree that is inserted into.
        evict_leaves: sizes of the trees that are evicted from, smallest first.
        evict_cycles: timed evictions for each of them.
        memory_leaves: leaves of the tree whose memory is measured.
        peer_leaves: sizes of the trees that peers evict from beside hicache.
        peer_samples: values that each of a pair gives.
    """

    tokens: int = 32_768
    page_size: int = 64
    samples: int = 4_000
    insert_leaves: int = 10_000
    evict_leaves: tuple[int, ...] = (1_000, 10_000, 50_000, 100_000, 1_000_000)
    evict_cycles: int = 10_000
    memory_leaves: int = 200_000
    peer_leaves: tuple[int, ...] = (1_000, 10_000, 50_000)
    peer_samples: int = 1_000

    def prompts(self) -> tuple[Prompt, Prompt]:
        """Return the prompt as one run, and page by page, as a conversation grows."""
        num_tokens, page_size = self.tokens, self.page_size
        run, chain = (
            Prompt.create(num_tokens=num_tokens, num_nodes=num_nodes, page_size=page_size)
            for num_nodes in (1, num_tokens // page_size)
        )
        return run, chain

    @classmethod
    def quick(cls) -> Sizes:
        """Return sizes for a first look: without the tree of a million leaves."""
        return cls(
            samples=500,
            evict_leaves=(1_000, 10_000, 50_000, 100_000),
            evict_cycles=2_000,
            memory_leaves=50_000,
            peer_leaves=(1_000, 10_000),
            peer_samples=100,
        )


def steps(
    *,
    quick: bool,
    peers: frozenset[str] = frozenset(),
    sizes: Sizes | None = None,
    create_tree: CreateTree = RadixTree,
) -> list[Step]:
    """Return the parts of the benchmark.

    Args:
        quick: smaller sizes and fewer samples.
        peers: systems to run beside.
        sizes: instead of those that `quick` means.
        create_tree: from a page size, the tree that all parts but the slots' and the memory's use.
    """
    sizes = sizes or (Sizes.quick() if quick else Sizes())
    run, chain = sizes.prompts()
    parts = []
    for prompt, bar in ((run, Bar(15)), (chain, Bar(200))):
        where = f"match {prompt.num_nodes} nodes"
        parts += [
            Step(where, partial(_match_pages, sizes, prompt, bar, create_tree)),
            Step(f"{where}, slots", partial(_match_slots, sizes, prompt, bar)),
        ]
    parts += [
        Step(f"lock {chain.num_nodes} nodes", partial(_lock_unlock, sizes, chain, create_tree)),
        Step("insert", partial(_insert, sizes, create_tree)),
    ]
    for shared_parent in (False, True):
        series = _EvictSeries(sizes, shared_parent=shared_parent, create_tree=create_tree)
        where = "below one parent" if shared_parent else "apart"
        parts += [
            Step(f"evict from {leaves} leaves {where}", partial(series.measure, leaves))
            for leaves in sizes.evict_leaves
        ]
        parts.append(Step("evict flatness", series.flatness))
    parts.append(Step("bytes per leaf", partial(_bytes_per_leaf, sizes)))
    if "sglang" in peers:
        rows = TreeRows(
            prompts=(run, chain),
            leaves=sizes.peer_leaves,
            insert_leaves=sizes.insert_leaves,
            matches_per_cycle=_MATCHES_PER_CYCLE,
            samples=sizes.peer_samples,
        )
        parts += steps_beside(("radix", "hiradix", "unified-rust"), rows)
    return parts


# -- a cached prompt ------------------------------------------------------------------------------


def _match_pages(sizes: Sizes, prompt: Prompt, bar: Bar, create_tree: CreateTree) -> list[Result]:
    tree = create_tree(prompt.page_size)
    prompt.insert_into(tree.insert)
    found = tree.match(prompt.key).device_pages
    check(np.array_equal(found, prompt.pages), "match gives other pages than were inserted")
    check(len(list(tree.nodes())) == prompt.num_nodes, "the prompt is not in as many nodes")
    results = _time_matches(sizes, prompt, lambda key: tree.match(key).device_pages, "pages", bar)
    _check_invariants(tree)
    return results


def _match_slots(sizes: Sizes, prompt: Prompt, bar: Bar) -> list[Result]:
    with one_torch_thread(), cache_of(prompt) as cache:
        found = cache.match_prefix(prompt.key).device_indices
        check(found.tolist() == prompt.slots, "match_prefix gives other slots than were inserted")
        results = _time_matches(
            sizes, prompt, lambda key: cache.match_prefix(key).device_indices, "slots", bar
        )
        _check_invariants(cache.tree)
    return results


def _time_matches(
    sizes: Sizes, prompt: Prompt, match: Callable[[RadixKey], object], answer: str, bar: Bar
) -> list[Result]:
    """Time `match` of a prepared key, and of a key made from the list of tokens each time."""
    key, tokens = prompt.key, prompt.tokens
    prepared = time_calls(lambda: match(key), samples=sizes.samples)
    listed = time_calls(lambda: match(RadixKey(tokens)), samples=sizes.samples)
    params = {**prompt.params, "answer": answer}
    return [
        summarise("match", prepared, params={**params, "start": "key"}, bars=(bar,)),
        summarise("match", listed, params={**params, "start": "list"}),
    ]


def _lock_unlock(sizes: Sizes, prompt: Prompt, create_tree: CreateTree) -> list[Result]:
    tree = create_tree(prompt.page_size)
    prompt.insert_into(tree.insert)
    node = tree.match(prompt.key).last_device_node
    tree.lock(node)
    check(tree.protected_size == len(prompt.tokens), "lock does not protect the whole prompt")
    check(len(tree.evict(1).freed) == 0, "evict takes a locked page")
    tree.unlock(node)

    def lock_unlock() -> None:
        tree.lock(node)
        tree.unlock(node)

    times = time_calls(lock_unlock, samples=sizes.samples)
    check(tree.protected_size == 0, "unlock leaves pages protected")
    _check_invariants(tree)
    params = {"nodes": prompt.num_nodes, "page_size": prompt.page_size}
    return [summarise("lock_unlock", times, params=params, bars=(Bar(44),))]


# -- many leaves ----------------------------------------------------------------------------------


def _plant(forest: Forest, page_size: int, create_tree: CreateTree) -> RadixTree:
    tree = create_tree(page_size)
    for key, path in forest.leaves():
        tree.insert(key, np.array(path, dtype=np.int64))
    return tree


def _insert(sizes: Sizes, create_tree: CreateTree) -> list[Result]:
    """Time inserts of one page; the tree is brought back to its size after each."""
    forest = Forest(sizes.insert_leaves, sizes.page_size, shared_parent=False)
    tree, times, rng = _plant(forest, sizes.page_size, create_tree), [], random.Random(0)
    for _ in range(sizes.samples):
        cycle = forest.next_cycle(rng, num_matches=0)
        outcome = run_cycle(tree, cycle)
        forest.confirm(cycle, outcome)
        times.append(outcome.insert_us)
    _check_invariants(tree)
    params = {"tokens": sizes.page_size, "leaves": sizes.insert_leaves}
    return [
        summarise("insert", times, params={**params, "page_size": sizes.page_size}, bars=(Bar(8),))
    ]


class _EvictSeries:
    """Evictions of one page from trees of growing size, and how they grow with it."""

    def __init__(self, sizes: Sizes, *, shared_parent: bool, create_tree: CreateTree) -> None:
        self._sizes = sizes
        self._shared_parent = shared_parent
        self._create_tree = create_tree
        self._medians: dict[int, float] = {}

    def measure(self, num_leaves: int) -> list[Result]:
        """Return the figures for a tree of `num_leaves` and check it as a whole."""
        sizes, rng = self._sizes, random.Random(num_leaves)
        forest = Forest(num_leaves, sizes.page_size, shared_parent=self._shared_parent)
        tree = _plant(forest, sizes.page_size, self._create_tree)
        evicts, cycles = [], []
        for _ in range(sizes.evict_cycles):
            cycle = forest.next_cycle(rng, num_matches=_MATCHES_PER_CYCLE)
            outcome = run_cycle(tree, cycle)
            forest.confirm(cycle, outcome)
            evicts.append(outcome.evict_us)
            cycles.append(outcome.cycle_us)
        _check_invariants(tree)
        params = {
            "leaves": num_leaves,
            "page_size": sizes.page_size,
            "shared_parent": self._shared_parent,
        }
        evict = summarise("evict", evicts, params=params, bars=(Bar(10), Bar(100, "p99")))
        self._medians[num_leaves] = evict.median
        return [evict, summarise("evict_cycle", cycles, params=params)]

    def flatness(self) -> list[Result]:
        """Return how many times slower the largest tree is than the smallest."""
        base, largest = self._sizes.evict_leaves[0], self._sizes.evict_leaves[-1]
        params = {"leaves": largest, "base_leaves": base, "shared_parent": self._shared_parent}
        ratio = self._medians[largest] / self._medians[base]
        return [summarise("evict_flatness", [ratio], params=params, unit="x", bars=(Bar(4),))]


# -- memory and invariants ------------------------------------------------------------------------


def _bytes_per_leaf(sizes: Sizes) -> list[Result]:
    """Measure in a process of its own, whose memory nobody has used and freed before."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as processes:
        grown = processes.submit(grown_bytes, sizes.memory_leaves, sizes.page_size).result()
    params = {"leaves": sizes.memory_leaves, "page_size": sizes.page_size}
    per_leaf = grown / sizes.memory_leaves
    return [summarise("bytes_per_leaf", [per_leaf], params=params, unit="B", bars=(Bar(1_500),))]


def _check_invariants(tree: RadixTree) -> None:
    violations = check_tree(tree)
    if violations:
        raise CheckFailed(f"the tree contradicts itself: {violations[0]}")
