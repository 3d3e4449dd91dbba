"""The rows of `replay` beside SGLang: its real trees, driven with the same blocks.

SGLang takes whole runs when it evicts, and a request that leaves a run in the middle refreshes the
rest of that run too. That is all the difference between its LRU and hicache's in a replay: the tree
that does these two things finds, block for block, as much as SGLang's.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.harness import Result, Step, check, summarise
from benchmarks.peers.process import peers_home
from benchmarks.peers.sglang_process import find_sglang
from benchmarks.peers.sglang_rows import run_beside
from hicache.radix import RadixKey, RadixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers.sglang_process import SglangProcess
    from benchmarks.replay_counts import ReplayCounts
    from hicache.replay import TraceRequest

__all__ = ["hits_as_sglang_counts", "rows_beside", "steps_beside_sglang"]

_POLICIES: Final = ("lru", "slru", "lfu")
"""Those of SGLang that hicache has too."""


def steps_beside_sglang(counts: Sequence[ReplayCounts]) -> list[Step]:
    """Return a step beside the newest of SGLang's trees, if one is installed."""
    trees = [core for core in find_sglang(peers_home()) if core.core == "unified-rust"]

    def rows(peer: SglangProcess) -> list[Result]:
        return [row for one in counts for row in rows_beside(one, peer)]

    return [
        Step(f"beside SGLang's {core.core}", partial(run_beside, core, rows)) for core in trees[-1:]
    ]


def rows_beside(counts: ReplayCounts, peer: SglangProcess) -> list[Result]:
    """Return the adaptive policy beside each of SGLang's, and LRU beside LRU in blocks."""
    trace, rows = counts.trace, []
    for size in trace.sizes:
        theirs = _replay_theirs(trace.requests, size, peer)
        expected = hits_as_sglang_counts(trace.requests, size)
        check(
            theirs["lru"] == expected,
            f"{peer.name} finds {theirs['lru']} blocks of {trace.name} in {size} by LRU; a tree "
            f"that evicts whole runs and refreshes them whole finds {expected}",
        )
        found = summarise(
            "block_hit_ratio", [counts.ratio("adaptive", size)],
            params={"trace": trace.name, "blocks": size, "policy": "adaptive"},
            unit="ratio", better="higher",
        )  # fmt: skip
        rows += [
            found.beside(f"{peer.name}-{policy}", [theirs[policy] / counts.num_blocks])
            for policy in _POLICIES
        ]
        by_lru = summarise(
            "hit_blocks", [counts.hits["lru", size]],
            params={"trace": trace.name, "blocks": size, "policy": "lru"},
            unit="blocks", better="higher",
        )  # fmt: skip
        rows.append(by_lru.beside(f"{peer.name}-lru", [theirs["lru"]]))
    return rows


def _replay_theirs(
    requests: Sequence[TraceRequest], size: int, peer: SglangProcess
) -> dict[str, int]:
    """Return the blocks that the peer finds with `size` blocks of memory, by its policy."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        np.savez(
            path,
            blocks=np.concatenate([request.blocks for request in requests]),
            lengths=[len(request.blocks) for request in requests],
        )
        hits = {}
        for policy in _POLICIES:
            peer.call("reset", page_size=1, eviction_policy=policy)
            hits[policy] = int(peer.call("replay", path=str(path), size=size))
        return hits


def hits_as_sglang_counts(requests: Sequence[TraceRequest], size: int) -> int:
    """Return the blocks that LRU on hicache's tree finds when it is used as SGLang uses its own."""
    tree, hits = RadixTree(1), 0
    pages = np.arange(max(len(request.blocks) for request in requests))
    for request in requests:
        key = RadixKey(request.blocks)
        found = tree.match(key)
        node = found.last_device_node
        if node.end > found.num_device_pages:
            # All of the run that the request leaves in the middle counts as used just now.
            run = np.frombuffer(node.key, dtype=np.int32)
            tree.match(RadixKey(np.concatenate([request.blocks[: node.start], run])))
        hits += tree.split_at(tree.match(key)).num_device_pages
        tree.insert(key, pages[: len(key)])
        excess = tree.residency.num_device_pages - size
        if excess > 0:
            tree.evict(excess)
    return hits
