"""Bytecodes of the tree's operations and a scheduler's calls: exact where time is too noisy.

A count is the same on every machine and at every load for one minor version of Python, so a change
of a few per cent shows. It does not see how long a bytecode takes: functions in C count as one.
What a call has to answer is checked as in `tree` and `controller`.
"""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from benchmarks.bytecodes import count_bytecodes
from benchmarks.forest import VOCABULARY
from benchmarks.harness import Result, Step, check, summarise
from benchmarks.prompt import Prompt
from benchmarks.stepwise import open_stepwise_cache
from hicache.hiradix_cache import LoadStatus
from hicache.radix import RadixKey, RadixTree, check_tree, create_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.stepwise import StepwiseCache

    T = TypeVar("T")

__all__ = ["Sizes", "steps"]

_PAGE_SIZE = 64

_USES_PER_CYCLE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is counted.

    Attributes:
        nodes: of the prompts that are matched and locked; a page each.
        leaves: of the trees that are inserted into and evicted from.
        cycles: insertions and evictions for each; the count is their mean.
        policies: orders of eviction.
        request_pages: pages of the request that goes through a whole cache.
    """

    nodes: tuple[int, ...] = (1, 512)
    leaves: tuple[int, ...] = (1_000, 10_000)
    cycles: int = 256
    policies: tuple[str, ...] = ("lru", "adaptive")
    request_pages: tuple[int, ...] = (1, 64)


def steps(
    *, quick: bool, peers: frozenset[str] = frozenset(), sizes: Sizes | None = None
) -> list[Step]:
    """Return the parts of the benchmark.

    Args:
        quick: changes nothing, so that counts of all runs can be compared.
        peers: there are none.
        sizes: instead of the usual ones.
    """
    sizes = sizes or Sizes()
    parts = [Step(f"prompt of {nodes} nodes", partial(_prompt, nodes)) for nodes in sizes.nodes]
    parts += [
        Step(f"{leaves} leaves, {policy}", partial(_leaves, sizes.cycles, leaves, policy))
        for policy in sizes.policies
        for leaves in sizes.leaves
    ]
    parts += [
        Step(f"a request of {num_pages} pages", partial(_request, num_pages))
        for num_pages in sizes.request_pages
    ]
    return parts


def _row(name: str, counts: list[int], **params: str | int) -> Result:
    """Return the mean of `counts`: some calls do now what others have left for later."""
    mean = sum(counts) / len(counts)
    row = summarise(name, counts, params=params, unit="bytecodes")
    return dataclasses.replace(row, median=round(mean, 1))


def _prompt(num_nodes: int) -> list[Result]:
    """Count a match of a cached prompt, and a lock and unlock of its end."""
    num_tokens = num_nodes * _PAGE_SIZE
    prompt = Prompt.create(num_tokens=num_tokens, num_nodes=num_nodes, page_size=_PAGE_SIZE)
    tree = RadixTree(_PAGE_SIZE)
    prompt.insert_into(tree.insert)
    match, match_count = count_bytecodes(lambda: tree.match(prompt.key))
    found = match.device_pages
    check(np.array_equal(found, prompt.pages), "match gives other pages than were inserted")
    node = match.last_device_node
    _, lock_count = count_bytecodes(lambda: tree.lock(node))
    check(tree.protected_size == num_tokens, "lock does not protect the whole prompt")
    _, unlock_count = count_bytecodes(lambda: tree.unlock(node))
    check(tree.protected_size == 0, "unlock leaves pages protected")
    return [
        _row("match", [match_count], nodes=num_nodes),
        _row("lock", [lock_count], nodes=num_nodes),
        _row("unlock", [unlock_count], nodes=num_nodes),
    ]


def _leaves(num_cycles: int, num_leaves: int, policy: str) -> list[Result]:
    """Count insertions and evictions of one page, each after 16 uses of other leaves."""
    tokens, rng = np.random.default_rng(0), random.Random(num_leaves)
    tree = RadixTree(_PAGE_SIZE, create_policy=create_policy(policy))
    keys: list[RadixKey] = []
    inserts, evicts = [], []
    # The page of a leaf is its place in the list; the last one is always spare.
    for page in range(num_leaves):
        keys.append(RadixKey(tokens.integers(VOCABULARY, size=_PAGE_SIZE)))
        tree.insert(keys[page], np.array([page]))
    spare = num_leaves
    keys.append(keys[0])
    for _ in range(num_cycles):
        for _ in range(_USES_PER_CYCLE):
            page = rng.randrange(num_leaves)
            page = num_leaves if page == spare else page
            found = tree.match(keys[page]).device_pages.tolist()
            check(found == [page], f"match of page {page} gives {found}")
        keys[spare] = RadixKey(tokens.integers(VOCABULARY, size=_PAGE_SIZE))
        insert = partial(tree.insert, keys[spare], np.array([spare]))
        inserted, count = count_bytecodes(insert)
        inserts.append(count)
        check(not inserted.already_present_pages, "insert of a new leaf found it present")
        freed, count = count_bytecodes(lambda: tree.evict(1).freed.tolist())
        evicts.append(count)
        check(len(freed) == 1, f"evict(1) freed {freed}")
        (spare,) = freed
        check(not tree.match(keys[spare]).num_device_pages, f"page {spare} is freed and found")
    violations = check_tree(tree)
    check(not violations, f"the tree contradicts itself: {violations[:1]}")
    return [
        _row("insert", inserts, leaves=num_leaves, policy=policy),
        _row("evict", evicts, leaves=num_leaves, policy=policy),
    ]


def _request(num_pages: int) -> list[Result]:
    """Count the calls that take a prompt into all tiers, off the device, back, and from L3."""
    rows: list[Result] = []
    # The first time pays for what is made once per process.
    for _ in range(2):
        with open_stepwise_cache(2 * num_pages) as stepwise:
            rows = _Journey(stepwise, num_pages).rows()
    return rows


class _Journey:
    """One prompt on its way through a cache; every call of the scheduler is a row."""

    def __init__(self, stepwise: StepwiseCache, num_pages: int) -> None:
        self._stepwise = stepwise
        self._cache = stepwise.cache
        self._num_pages = num_pages
        tokens = np.random.default_rng(0).integers(VOCABULARY, size=num_pages * _PAGE_SIZE)
        self._key = RadixKey(tokens)
        self._rows: list[Result] = []

    def rows(self) -> list[Result]:
        """Go all the way and return what each call has run."""
        self._step("idle")
        self._put_in()
        self._load_back()
        self._from_storage()
        return self._rows

    def _put_in(self) -> None:
        """Insert the prompt; it is written to the host, and from there to storage."""
        cache, key = self._cache, self._key
        found = self._count("match_prefix", lambda: cache.match_prefix(key), found="nothing")
        check(not found.device_hit_tokens, "an empty cache has the prompt")
        pages = self._stepwise.allocator.alloc(self._num_pages)
        assert pages is not None
        node = self._count(
            "insert", lambda: cache.insert(key, pages, request_id="first", chunked=False)
        ).node
        self._step("writing")
        self._stepwise.move()
        self._step("written")
        check(node.backed, "the prompt was not written to the host")
        self._stepwise.move()
        self._step("persisted")
        check(node.persisted, "the prompt was not stored")

    def _load_back(self) -> None:
        """Drop the device's pages and load the host's."""
        cache, key = self._cache, self._key
        freed = self._count("evict", lambda: cache.evict(self._num_pages)).num_freed
        check(freed == self._num_pages, f"evict freed {freed} pages")
        found = self._count("match_prefix", lambda: cache.match_prefix(key), found="host")
        check(found.host_hit_tokens == len(key), "the host does not have the prompt")
        load = self._count("init_load_back", lambda: cache.init_load_back(found))
        check(load.status is LoadStatus.QUEUED, f"the load is {load.status}")
        self._count("inc_lock_ref", lambda: cache.inc_lock_ref(load.node))
        self._count("ready_to_load_host_cache", cache.ready_to_load_host_cache)
        self._stepwise.move()
        self._step("loaded")
        found = self._count("match_prefix", lambda: cache.match_prefix(key), found="device")
        check(found.device_hit_tokens == len(key), "the load has not brought the prompt")
        self._count("dec_lock_ref", lambda: cache.dec_lock_ref(load.node))

    def _from_storage(self) -> None:
        """Forget the prompt in both memories and fetch it from storage."""
        cache, key = self._cache, self._key
        cache.reset()
        begun = self._count(
            "prefetch_from_storage", lambda: cache.prefetch_from_storage("second", key)
        )
        check(begun, "no prefetch begins")
        for state in ("asked", "fetching", "fetched"):
            self._stepwise.move()
            self._step(state)
        done = self._count(
            "check_prefetch_progress", lambda: cache.check_prefetch_progress("second")
        )
        check(done, "the prefetch has not ended")
        num_tokens = cache.pop_prefetch_loaded_tokens("second")
        check(num_tokens == len(key), f"storage gave {num_tokens} tokens")

    def _step(self, state: str) -> None:
        self._count("check_hicache_events", self._cache.check_hicache_events, state=state)

    def _count(self, name: str, call: Callable[[], T], **params: str | int) -> T:
        result, count = count_bytecodes(call)
        self._rows.append(_row(name, [count], pages=self._num_pages, **params))
        return result
