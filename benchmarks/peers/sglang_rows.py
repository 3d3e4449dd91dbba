"""The rows of `tree` and `hash` that SGLang does beside hicache: the same keys, in turn."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import sys
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.forest import Forest, Outcome, run_cycle
from benchmarks.harness import Bar, Result, Step, alternate, check, summarise, time_calls
from benchmarks.peers.process import PeerFailed, peers_home
from benchmarks.peers.sglang_process import SglangProcess, find_sglang, pack
from benchmarks.prompt import Prompt, cache_of, one_torch_thread
from hicache.radix import RadixKey, RadixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from benchmarks.peers.sglang_process import SglangCore
    from hicache.hiradix_cache import HiRadixCache

    Rows = Callable[[SglangProcess], list[Result]]

__all__ = ["TreeRows", "run_beside", "steps_beside"]

_TURN_SECONDS = 0.25
"""About how long a slow peer's turn takes; hicache gets as few cycles then."""

_NUM_TURNS = 10


def steps_beside(cores: Collection[str], rows: Rows) -> list[Step]:
    """Return a step for each thing of SGLang's that is installed.

    Args:
        cores: which of them, see `SglangCore`.
        rows: measures beside a process that is started for it.
    """
    return [
        Step(f"beside SGLang's {core.core}", partial(run_beside, core, rows))
        for core in find_sglang(peers_home())
        if core.core in cores
    ]


def run_beside(core: SglangCore, rows: Rows) -> list[Result]:
    """Return the rows beside `core`, or none, saying so, when it does not run here."""
    try:
        with closing(SglangProcess(core)) as peer:
            return rows(peer)
    except PeerFailed as error:
        message = f"skipped SGLang's {core.core}, which does not run here: {error.reason}"
        print(message, file=sys.stderr)
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeRows:
    """The rows of `tree` beside one of SGLang's trees.

    Attributes:
        prompts: what is matched; the last one is locked too.
        leaves: sizes of the trees that are evicted from.
        insert_leaves: leaves of the tree that is inserted into.
        matches_per_cycle: leaves used before an eviction.
        samples: values of each side.
    """

    prompts: tuple[Prompt, ...]
    leaves: tuple[int, ...]
    insert_leaves: int
    matches_per_cycle: int
    samples: int

    def __call__(self, peer: SglangProcess) -> list[Result]:
        """Measure them all."""
        rows: list[Result] = []
        with one_torch_thread():
            for prompt in self.prompts:
                answers = (True,) if _plant_prompt(peer, prompt) else (True, False)
                with cache_of(prompt) as cache:
                    rows += [
                        self._match(peer, prompt, cache, start=start, slots=slots)
                        for slots in answers
                        for start in ("key", "list")
                    ]
            rows.append(self._lock_unlock(peer, self.prompts[-1]))
            rows.append(self._cycles(peer, self.insert_leaves, shared_parent=False, insert=True))
            rows += [
                self._cycles(peer, leaves, shared_parent=shared_parent, insert=False)
                for shared_parent in (False, True)
                for leaves in self.leaves
            ]
        return rows

    def _match(
        self, peer: SglangProcess, prompt: Prompt, cache: HiRadixCache, *, start: str, slots: bool
    ) -> Result:
        key, tokens, last_page = prompt.key, prompt.tokens, int(prompt.pages[-1])
        found = cache.match_prefix(key).device_indices
        check(found.tolist() == prompt.slots, "match_prefix gives other slots than were inserted")

        def once() -> object:
            match = cache.match_prefix(RadixKey(tokens) if start == "list" else key)
            return match.device_indices if slots else match.device_hit_tokens

        def theirs(samples: int) -> list[float]:
            answer = peer.call("match", page=last_page, start=start, slots=slots, samples=samples)
            right = answer["path"] == prompt.pages.tolist()
            check(right, f"match of {peer.name} gives other pages than were inserted")
            return list(answer["times"])

        mine, others = alternate(
            lambda samples: time_calls(once, samples=samples), theirs, samples=self.samples
        )
        params = {**prompt.params, "answer": "slots" if slots else "length", "start": start}
        # From a list, making the key is what costs; it must not cost more than the peer's.
        bars = (Bar(1.0, "ratio"),)
        return summarise("match", mine, params=params, bars=bars).beside(peer.name, others)

    def _lock_unlock(self, peer: SglangProcess, prompt: Prompt) -> Result:
        _plant_prompt(peer, prompt)
        tree, last_page = RadixTree(prompt.page_size), int(prompt.pages[-1])
        prompt.insert_into(tree.insert)
        node = tree.match(prompt.key).last_device_node

        def once() -> None:
            tree.lock(node)
            tree.unlock(node)

        def theirs(samples: int) -> list[float]:
            answer = peer.call("lock_unlock", page=last_page, samples=samples)
            right = answer["protected"] == [len(prompt.tokens), 0]
            check(right, f"lock and unlock of {peer.name} protect {answer['protected']} tokens")
            return list(answer["times"])

        mine, others = alternate(
            lambda samples: time_calls(once, samples=samples), theirs, samples=self.samples
        )
        params = {"nodes": prompt.num_nodes, "page_size": prompt.page_size}
        return summarise("lock_unlock", mine, params=params, bars=(Bar(1.0, "ratio"),)).beside(
            peer.name, others
        )

    def _cycles(
        self, peer: SglangProcess, num_leaves: int, *, shared_parent: bool, insert: bool
    ) -> Result:
        """Take both trees through the same cycles; time the insert or the eviction in them."""
        page_size = self.prompts[0].page_size
        duel = _Duel(peer, num_leaves, page_size, shared_parent=shared_parent)
        num_matches = 0 if insert else self.matches_per_cycle
        num_cycles = math.ceil(self.samples / _NUM_TURNS)
        # A first turn, which does not count, shows how slow the peer is.
        _, theirs = duel.turn(3, num_matches=num_matches)
        cycle_seconds = statistics.median(outcome.cycle_us for outcome in theirs) / 1e6
        num_cycles = max(3, min(num_cycles, int(_TURN_SECONDS / cycle_seconds)))
        ours: list[Outcome] = []
        theirs = []
        for _ in range(_NUM_TURNS):
            mine, others = duel.turn(num_cycles, num_matches=num_matches)
            ours += mine
            theirs += others
        params: dict[str, str | int | float | bool] = {"leaves": num_leaves, "page_size": page_size}
        params |= {"tokens": page_size} if insert else {"shared_parent": shared_parent}
        name, field = ("insert", "insert_us") if insert else ("evict", "evict_us")
        values = [getattr(outcome, field) for outcome in ours]
        return summarise(name, values, params=params, bars=(Bar(1.0, "ratio"),)).beside(
            peer.name, [getattr(outcome, field) for outcome in theirs]
        )


class _Duel:
    """A tree of hicache and one of the peer, with the same leaves."""

    def __init__(
        self, peer: SglangProcess, num_leaves: int, page_size: int, *, shared_parent: bool
    ) -> None:
        self._peer = peer
        self._forest = Forest(num_leaves, page_size, shared_parent=shared_parent)
        self._rng = random.Random(num_leaves)
        self._tree = RadixTree(page_size)
        leaves = list(self._forest.leaves())
        for key, path in leaves:
            self._tree.insert(key, np.array(path, dtype=np.int64))
        keys, paths = zip(*leaves, strict=True)
        _plant(peer, page_size, keys, paths)

    def turn(self, num_cycles: int, *, num_matches: int) -> tuple[list[Outcome], list[Outcome]]:
        """Take both through the next cycles and return what came of them, which was right."""
        forest = self._forest
        cycles = [forest.next_cycle(self._rng, num_matches=num_matches) for _ in range(num_cycles)]
        ours = [run_cycle(self._tree, cycle) for cycle in cycles]
        keys = [cycle.new_key for cycle in cycles]
        answers = self._peer.call(
            "cycles",
            tokens=pack(np.concatenate([key.tokens() for key in keys])),
            length=len(keys[0]),
            cycles=[(cycle.chosen, cycle.new_path) for cycle in cycles],
        )
        theirs = [Outcome(**answer) for answer in answers]
        for outcomes in (ours, theirs):
            for cycle, outcome in zip(cycles, outcomes, strict=True):
                forest.confirm(cycle, outcome)
        return ours, theirs


def _plant_prompt(peer: SglangProcess, prompt: Prompt) -> bool:
    keys, paths = zip(*prompt.growth(), strict=True)
    return _plant(peer, prompt.page_size, keys, [pages.tolist() for pages in paths])


def _plant(
    peer: SglangProcess, page_size: int, keys: Sequence[RadixKey], paths: Sequence[Sequence[int]]
) -> bool:
    """Let the peer begin anew with `keys`; return whether its match gives slots in any case."""
    gives_slots = bool(peer.call("reset", page_size=page_size))
    peer.call(
        "insert",
        tokens=pack(np.concatenate([key.tokens() for key in keys])),
        lengths=[len(key) for key in keys],
        paths=list(paths),
    )
    return gives_slots
