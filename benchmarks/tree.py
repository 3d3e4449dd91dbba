"""The prefix tree: match, insert, lock, evict from small and large trees, bytes per leaf.

Page ids are shuffled, so that pages in a wrong order show, and what must come out is known from
bookkeeping of the benchmark's own. Every tree is checked for broken invariants at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.forest import VOCABULARY, Forest, grown_bytes
from benchmarks.harness import Bar, CheckFailed, Result, Step, check, summarise, time_calls
from hicache.config import HiCacheConfig, HostPoolConfig
from hicache.device import create_device
from hicache.hiradix_cache import HiRadixCache, create_hiradix_cache
from hicache.layout import KVGeometry
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.radix import RadixKey, RadixTree, check_tree
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache.types import IntArray

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
    """

    tokens: int = 32_768
    page_size: int = 64
    samples: int = 4_000
    insert_leaves: int = 10_000
    evict_leaves: tuple[int, ...] = (1_000, 10_000, 50_000, 100_000, 1_000_000)
    evict_cycles: int = 10_000
    memory_leaves: int = 200_000

    @classmethod
    def quick(cls) -> Sizes:
        """Return sizes for a first look: without the tree of a million leaves."""
        return cls(
            samples=500,
            evict_leaves=(1_000, 10_000, 50_000, 100_000),
            evict_cycles=2_000,
            memory_leaves=50_000,
        )


def steps(
    *, quick: bool, sizes: Sizes | None = None, create_tree: CreateTree = RadixTree
) -> list[Step]:
    """Return the parts of the benchmark.

    Args:
        quick: smaller sizes and fewer samples.
        sizes: instead of those that `quick` means.
        create_tree: from a page size, the tree that all parts but the slots' and the memory's use.
    """
    sizes = sizes or (Sizes.quick() if quick else Sizes())
    run = _Prompt.create(sizes, 1)
    chain = _Prompt.create(sizes, sizes.tokens // sizes.page_size)
    parts = []
    for prompt, bar in ((run, Bar(15)), (chain, Bar(200))):
        where = f"match {prompt.num_nodes} nodes"
        parts += [
            Step(where, partial(_match_pages, prompt, bar, create_tree)),
            Step(f"{where}, slots", partial(_match_slots, prompt, bar)),
        ]
    parts += [
        Step(f"lock {chain.num_nodes} nodes", partial(_lock_unlock, chain, create_tree)),
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
    return parts


# -- a cached prompt ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prompt:
    """A prompt and the pages it is cached in, as one run or as a conversation has grown."""

    tokens: list[int]
    key: RadixKey
    pages: IntArray
    num_nodes: int
    page_size: int
    samples: int

    @classmethod
    def create(cls, sizes: Sizes, num_nodes: int) -> _Prompt:
        rng = np.random.default_rng(0)
        tokens = rng.integers(VOCABULARY, size=sizes.tokens)
        return cls(
            tokens=tokens.tolist(),
            key=RadixKey(tokens),
            pages=rng.permutation(sizes.tokens // sizes.page_size),
            num_nodes=num_nodes,
            page_size=sizes.page_size,
            samples=sizes.samples,
        )

    @property
    def params(self) -> dict[str, str | int | float | bool]:
        num_tokens = len(self.tokens)
        return {"tokens": num_tokens, "nodes": self.num_nodes, "page_size": self.page_size}

    def insert_into(self, insert: Callable[[RadixKey, IntArray], object]) -> None:
        """Let the prompt grow node by node."""
        step = len(self.pages) // self.num_nodes
        for num_pages in range(step, len(self.pages) + 1, step):
            insert(self.key.prefix(num_pages * self.page_size), self.pages[:num_pages])


def _match_pages(prompt: _Prompt, bar: Bar, create_tree: CreateTree) -> list[Result]:
    tree = create_tree(prompt.page_size)
    prompt.insert_into(tree.insert)
    found = tree.match(prompt.key).device_pages
    check(np.array_equal(found, prompt.pages), "match gives other pages than were inserted")
    check(len(list(tree.nodes())) == prompt.num_nodes, "the prompt is not in as many nodes")
    results = _time_matches(prompt, lambda key: tree.match(key).device_pages, "pages", bar)
    _check_invariants(tree)
    return results


def _match_slots(prompt: _Prompt, bar: Bar) -> list[Result]:
    with _one_torch_thread(), _small_cache(prompt) as cache:
        prompt.insert_into(
            lambda key, pages: cache.insert(key, pages, request_id="prompt", chunked=True)
        )
        expected = [
            page * prompt.page_size + offset
            for page in prompt.pages.tolist()
            for offset in range(prompt.page_size)
        ]
        found = cache.match_prefix(prompt.key).device_indices
        check(found.tolist() == expected, "match_prefix gives other slots than were inserted")
        results = _time_matches(
            prompt, lambda key: cache.match_prefix(key).device_indices, "slots", bar
        )
        _check_invariants(cache.tree)
    return results


def _time_matches(
    prompt: _Prompt, match: Callable[[RadixKey], object], answer: str, bar: Bar
) -> list[Result]:
    """Time `match` of a prepared key, and of a key made from the list of tokens each time."""
    key, tokens = prompt.key, prompt.tokens
    prepared = time_calls(lambda: match(key), samples=prompt.samples)
    listed = time_calls(lambda: match(RadixKey(tokens)), samples=prompt.samples)
    params = {**prompt.params, "answer": answer}
    return [
        summarise("match", prepared, params={**params, "start": "key"}, bars=(bar,)),
        summarise("match", listed, params={**params, "start": "list"}),
    ]


def _lock_unlock(prompt: _Prompt, create_tree: CreateTree) -> list[Result]:
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

    times = time_calls(lock_unlock, samples=prompt.samples)
    check(tree.protected_size == 0, "unlock leaves pages protected")
    _check_invariants(tree)
    params = {"nodes": prompt.num_nodes, "page_size": prompt.page_size}
    return [summarise("lock_unlock", times, params=params, bars=(Bar(44),))]


@contextmanager
def _small_cache(prompt: _Prompt) -> Iterator[HiRadixCache]:
    """Provide a cache whose device pool the prompt fills, with pages of the fewest bytes."""
    geometry = KVGeometry(
        num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16", page_size=prompt.page_size
    )
    num_pages = len(prompt.pages)
    allocator = PageAllocator(num_pages)
    allocator.alloc(num_pages)
    cache, _ = create_hiradix_cache(
        HiCacheConfig(
            page_size=prompt.page_size,
            write_policy=WritePolicy.WRITE_BACK,
            host=HostPoolConfig(ratio=1.0, huge_pages=False),
        ),
        device=create_device("cpu"),
        device_pool=DeviceKVPool(geometry, num_pages=num_pages, torch_device=torch.device("cpu")),
        device_allocator=allocator,
    )
    try:
        yield cache
    finally:
        cache.close()


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


# -- many leaves ----------------------------------------------------------------------------------


def _insert(sizes: Sizes, create_tree: CreateTree) -> list[Result]:
    """Time inserts of one page; the tree is brought back to its size after each."""
    forest = Forest(
        sizes.insert_leaves, sizes.page_size, shared_parent=False, create_tree=create_tree
    )
    tree, times = forest.tree, []
    for key in itertools.islice(forest.new_keys, sizes.samples):
        pages = forest.take_spare(key)
        begin = time.perf_counter_ns()
        result = tree.insert(key, pages)
        times.append((time.perf_counter_ns() - begin) / 1e3)
        forest.confirm_insert(result.already_present_pages)
        forest.confirm_match(forest.spare, tree.match(key))
        forest.confirm_evict(tree.evict(1).freed)
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
        forest = Forest(
            num_leaves,
            sizes.page_size,
            shared_parent=self._shared_parent,
            create_tree=self._create_tree,
        )
        times = [
            _evict_cycle(forest, key, rng)
            for key in itertools.islice(forest.new_keys, sizes.evict_cycles)
        ]
        _check_invariants(forest.tree)
        evicts, cycles = zip(*times, strict=True)
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


def _evict_cycle(forest: Forest, new_key: RadixKey, rng: random.Random) -> tuple[float, float]:
    """Use random leaves, insert one, evict one; return the us of the eviction and of it all."""
    tree, chosen = forest.tree, forest.choose(rng, _MATCHES_PER_CYCLE)
    keys = [forest.keys[page] for page in chosen]
    pages, matches = forest.take_spare(new_key), []
    begin = time.perf_counter_ns()
    for key in keys:
        match = tree.match(key)
        tree.lock(match.last_device_node)
        tree.unlock(match.last_device_node)
        matches.append(match)
    inserted = tree.insert(new_key, pages)
    before_evict = time.perf_counter_ns()
    freed = tree.evict(1).freed
    end = time.perf_counter_ns()
    for page, match in zip(chosen, matches, strict=True):
        forest.confirm_match(page, match)
    forest.confirm_insert(inserted.already_present_pages)
    forest.confirm_evict(freed)
    return (end - before_evict) / 1e3, (end - begin) / 1e3


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
