"""What the design asks for: every bar, and the row of a benchmark that has to reach it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from benchmarks.harness import Bar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from benchmarks.harness import Result

    Value = str | int | float | bool
    Params = Mapping[str, Value | None]

__all__ = ["BARS", "Asked", "Found", "bars_of"]

_KIB, _MIB = 1 << 10, 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What came of one bar.

    Attributes:
        row: the figure that is farthest from reaching it; None where it was not measured.
        num_rows: how many had to.
        is_met: whether all of them do; False where there is none.
    """

    row: Result | None
    num_rows: int
    is_met: bool


@dataclasses.dataclass(frozen=True)
class Asked:
    """One bar.

    Attributes:
        what: in words.
        benchmark: whose row it is.
        row: its name.
        bar: what it has to reach.
        params: what it must have among its parameters; None stands for one it must not have.
        peer: the system beside it; `sglang-` stands for any whose name begins so, None for any and
            for none.
    """

    what: str
    benchmark: str
    row: str
    bar: Bar
    params: Params = dataclasses.field(default_factory=dict)
    peer: str | None = None

    def concerns(self, row: Result) -> bool:
        """Whether `row`, of the right benchmark, is one that has to reach the bar."""
        return (
            row.name == self.row
            and all(row.params.get(name) == value for name, value in self.params.items())
            and self._is_beside(row.peer)
            and row.reached(self.bar) is not None
        )

    def _is_beside(self, peer: str | None) -> bool:
        if self.peer is None or self.peer == peer:
            return True
        return self.peer.endswith("-") and (peer or "").startswith(self.peer)

    def find(self, rows: Iterable[Result]) -> Found:
        """Return what came of the bar in the rows of its benchmark.

        A row says itself what it has to reach: one that was taken anew beside a peer, which leaves
        little of hicache in the processor's caches, need not reach what the one alone does.
        """
        concerned = [row for row in rows if self.concerns(row)]
        concerned = [row for row in concerned if self.bar in row.bars] or concerned
        if not concerned:
            return Found(row=None, num_rows=0, is_met=False)
        worst = min(concerned, key=self._height)
        return Found(row=worst, num_rows=len(concerned), is_met=worst.meets(self.bar))

    def _height(self, row: Result) -> float:
        reached = row.reached(self.bar)
        assert reached is not None, f"{row.name} has no {self.bar.statistic}"
        return reached if self.bar.asks_for_more(row) else -reached


def bars_of(benchmark: str, row: str, params: Mapping[str, Value]) -> tuple[Bar, ...]:
    """Return what a row without a peer has to reach."""
    return tuple(
        asked.bar
        for asked in BARS
        if (asked.benchmark, asked.row, asked.peer) == (benchmark, row, None)
        and all(params.get(name) == value for name, value in asked.params.items())
    )


def _tree() -> Iterator[Asked]:
    yield Asked("evict one page, us", "tree", "evict", Bar(10))
    yield Asked("evict one page, us", "tree", "evict", Bar(100, "p99"))
    yield Asked("evict: largest tree by smallest", "tree", "evict_flatness", Bar(4))
    yield Asked("memory of a leaf, bytes", "tree", "bytes_per_leaf", Bar(1_500))
    for nodes, limit in ((1, 15), (512, 200)):
        cached: Params = {"nodes": nodes, "start": "key"}
        yield Asked(f"match a prompt of nodes: {nodes}, us", "tree", "match", Bar(limit), cached)
    listed: Params = {"start": "list"}
    yield Asked("match from a list, of SGLang", "tree", "match", Bar(1, "ratio"), listed, "sglang-")
    yield Asked("lock and unlock 512 nodes, us", "tree", "lock_unlock", Bar(44), {"nodes": 512})
    yield Asked("insert 64 tokens, us", "tree", "insert", Bar(8))
    yield Asked("hash 32,768 tokens, us", "hash", "hash_pages", Bar(320), {"tokens": 32_768})


def _scheduler() -> Iterator[Asked]:
    alone = {"state": "idle", "ranks": None}
    yield Asked("idle step, us", "controller", "check_hicache_events", Bar(10), alone)
    yield Asked("agreements of an idle step", "controller", "agreements_per_step", Bar(1))
    for call in ("reset", "detach", "close"):
        yield Asked(f"{call} when idle, us", "controller", call, Bar(50_000))


def _copies() -> Iterator[Asked]:
    for pages, limit in (("contiguous", 0.8), ("random", 0.2)):
        for row in ("write", "load"):
            what = f"{row} {pages} pages, of memcpy"
            yield Asked(what, "copy", row, Bar(limit, "ratio"), {"pages": pages}, "memcpy")
    yield Asked(
        "load on a GPU, of nvbandwidth", "copy", "load", Bar(0.95, "ratio"), {}, "nvbandwidth"
    )


def _store() -> Iterator[Asked]:
    for peer, page_bytes, limit in (
        ("memcpy", 128 * _KIB, 0.75),
        ("memcpy", _MIB, 0.75),
        ("preadv", 16 * _KIB, 0.6),
        ("sglang-", 128 * _KIB, 4.0),
        ("sglang-", _MIB, 3.0),
        ("lmcache-", 128 * _KIB, 1.0),
        ("lmcache-", 3 * _MIB, 0.8),
    ):
        what = f"warm reads of {page_bytes // _KIB:,} KiB, of {peer.rstrip('-')}"
        params = {"page_bytes": page_bytes, "huge_pages": True}
        yield Asked(what, "store", "read_warm", Bar(limit, "ratio"), params, peer)
    small: Params = {"huge_pages": False}
    what = "warm reads without huge pages, of preadv"
    yield Asked(what, "store", "read_warm", Bar(0.85, "ratio"), small, "preadv")
    for row in ("read_cold", "write_cold"):
        yield Asked(f"{row}, of the disk", "store", row, Bar(0.9, "ratio"), {}, "disk")
    yield Asked("look for 128 keys, us", "store", "exists_128", Bar(50))
    million: Params = {"pages": 7813 * 128}
    yield Asked("open a store of a million pages, s", "store", "open", Bar(2), million)
    for bar in (Bar(100), Bar(500, "p99")):
        yield Asked("step beside busy storage, us", "store", "check_hicache_events", bar)


def _replay() -> Iterator[Asked]:
    for trace, blocks, limit in (
        ("conversation", 1_000, 0.075),
        ("conversation", 5_859, 0.170),
        ("conversation", 10_000, 0.219),
        ("conversation", 30_000, 0.328),
        ("synthetic", 5_859, 0.324),
        ("agentic-even", 977, 0.521),
        ("agentic-even", 2_930, 0.8739),
        ("agentic-even", 9_766, 0.9526),
    ):
        params: Params = {"trace": trace, "blocks": blocks, "policy": "adaptive"}
        what = f"blocks found, {trace}, {blocks:,} blocks"
        yield Asked(what, "replay", "block_hit_ratio", Bar(limit), params)
    what = "more blocks found than by LRU or SLRU, points"
    yield Asked(what, "replay", "lead", Bar(-0.1))


def _whole() -> Iterator[Asked]:
    real = {"tier": "L2", "model": "SmolLM2-135M-Instruct"}
    yield Asked("first token from L2, times sooner", "e2e", "ttft", Bar(5, "ratio"), real)
    lookup = {"tokens": 4_096}
    yield Asked("look-up by the client, 4,096 tokens, us", "client", "lookup", Bar(20), lookup)
    yield Asked("look-up by a node server, us", "server", "lookup", Bar(200), lookup)
    for row, gib in (("store", 5), ("retrieve", 8)):
        limit = round(gib * (1 << 30) / 1e9, 2)
        yield Asked(f"{row} by a node server, GB/s", "server", row, Bar(limit), lookup)


BARS: Final = (*_tree(), *_scheduler(), *_copies(), *_store(), *_replay(), *_whole())
