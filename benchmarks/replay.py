"""Replay of request traces: blocks found by each policy, beside Belady's bound and SGLang's trees.

The real tree and policies are driven, as by `hicache replay`. What LRU and Belady's rule find is
compared with counts that others have made of the public traces; where those traces are not, one is
made up, and LRU is counted again block by block, without a tree. No policy may find more than
Belady's rule. SGLang's LRU has to find what the tree finds when it is told to do the two things
that SGLang does in another way.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

from benchmarks.bars import bars_of
from benchmarks.harness import Bar, Result, Step, summarise
from benchmarks.peers.sglang_replay import steps_beside_sglang
from benchmarks.replay_counts import BOUND, POLICIES, ReplayCounts
from benchmarks.replay_traces import find_traces, made_up_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.replay_traces import ReplayTrace

__all__ = ["steps"]

_CLOSE_POINTS: Final = 5.0
"""Belady's rule leads by more than that: then the policy has to be ahead of LRU and SLRU."""


def steps(
    *,
    quick: bool,
    peers: frozenset[str] = frozenset(),
    traces: Sequence[ReplayTrace] | None = None,
) -> list[Step]:
    """Return the parts of the benchmark.

    Args:
        quick: without the longest trace.
        peers: systems to run beside.
        traces: instead of those that are found.
    """
    found = find_traces(quick=quick) if traces is None else traces
    if not found:
        print("there are no public traces; one is made up, without bars", file=sys.stderr)
        found = [made_up_trace()]
    counts = [ReplayCounts(trace) for trace in found]
    parts = [Step(one.trace.name, partial(_rows, one)) for one in counts]
    if "sglang" in peers:
        parts += steps_beside_sglang(counts)
    return parts


def _rows(counts: ReplayCounts) -> list[Result]:
    """Return what each policy finds at each size, and how fast that was replayed."""
    trace = counts.trace
    rows = [row for size in trace.sizes for row in _ratios(counts, size)]
    for policy, speed in counts.speeds.items():
        row = summarise(
            "requests", [speed],
            params={"trace": trace.name, "policy": policy, "caches": len(trace.sizes)},
            unit="requests/s", better="higher",
        )  # fmt: skip
        rows.append(row)
    return rows


def _ratios(counts: ReplayCounts, size: int) -> list[Result]:
    """Return the ratio of the adaptive policy, beside each of the others too, and its lead."""
    trace = counts.trace
    judged, *others = [*POLICIES, BOUND]
    ratios = {policy: counts.ratio(policy, size) for policy in others}
    if ("slru20", size) in trace.known:
        ratios["slru20"] = trace.known["slru20", size] / counts.num_blocks
    params: dict[str, str | int | float | bool] = {
        "trace": trace.name,
        "blocks": size,
        "policy": judged,
    }
    found = summarise(
        "block_hit_ratio", [counts.ratio(judged, size)], params=params, unit="ratio",
        better="higher", bars=bars_of("replay", "block_hit_ratio", params),
    )  # fmt: skip
    fixed = max(ratios[policy] for policy in ("lru", "slru", "slru20") if policy in ratios)
    bars = bars_of("replay", "lead", params) if trace.known else ()
    if bars and 100 * (ratios[BOUND] - fixed) > _CLOSE_POINTS:
        bars = (Bar(0),)
    lead = summarise(
        "lead", [100 * (found.median - fixed)], params=params, unit="points", better="higher",
        bars=bars,
    )  # fmt: skip
    beside = dataclasses.replace(found, bars=())
    return [found, lead, *(beside.beside(policy, [ratio]) for policy, ratio in ratios.items())]
