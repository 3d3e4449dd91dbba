"""Results of a replay as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from hicache.replay.replay import BELADY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.replay.replay import ReplayResult

__all__ = ["MODEL_NOTE", "format_results", "format_seconds", "format_size", "result_to_json"]

MODEL_NOTE: Final = (
    "The real radix tree with one symbol per block and a page size of 1; no bytes are moved."
)

_HEADERS: Final = (
    "policy", "L1", "L2", "L3", "write policy", "block hits", "token hits", "by L1", "by L2",
    "by L3", "written", "TTFT p50", "p99", "load",
)  # fmt: skip
_NUM_TEXTS: Final = 5
"""Leading columns that are not figures."""


def format_results(results: Sequence[ReplayResult]) -> str:
    """Return a table with a line for each result and a legend."""
    rows = [_HEADERS, *map(_row, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADERS))]
    lines = [
        "  ".join(
            text.ljust(width) if column in (0, _NUM_TEXTS - 1) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    legend = (
        "hits: of all blocks or tokens; by tier: of all blocks; written: blocks to L2 for each "
        "block asked for;\nload: work of the engine by the time of the trace"
    )
    if any(result.times.utilisation >= 1 for result in results):
        legend += (
            "\nA load of 1 or more: requests come faster than one engine can take them, and the "
            "times are those of a\nqueue that grows. --speed gives one engine its share."
        )
    return "\n".join([*lines, legend, MODEL_NOTE])


def format_size(num_blocks: int | None) -> str:
    """Return a size in blocks for people."""
    return "inf" if num_blocks is None else f"{num_blocks:,}"


def result_to_json(result: ReplayResult) -> dict[str, Any]:
    """Return a result as an object of the command's JSON; a size without bound is "inf"."""
    options = result.options
    return {
        "policy": options.policy,
        "capacity_blocks": _json_size(options.device_blocks),
        "host_blocks": _json_size(options.host_blocks),
        "storage_blocks": _json_size(options.storage_blocks),
        "write_policy": options.write_policy.value,
        "storage_admission": options.storage_admission.value,
        "prefetch_policy": options.prefetch_policy.value,
        "load": options.load.value,
        "requests": result.num_requests,
        "blocks": result.num_blocks,
        "tokens": result.num_tokens,
        "hit_blocks": result.hit_blocks,
        "block_hit_ratio": result.block_hit_ratio,
        "token_hit_ratio": result.token_hit_ratio,
        "hits_by_tier": {
            "device": result.device_hits,
            "host": result.host_hits,
            "storage": result.storage_hits,
        },
        "written_blocks_per_requested": result.written_blocks_per_requested,
        "written_blocks": result.num_written,
        "unwritten_blocks": result.num_unwritten,
        "stored_blocks": result.num_stored,
        "recomputed_blocks": result.num_recomputed,
        **dataclasses.asdict(result.times),
    }


def _row(result: ReplayResult) -> tuple[str, ...]:
    options, times = result.options, result.times
    has_host = options.host_blocks != 0 and options.policy != BELADY
    shares = (result.device_hits, result.host_hits, result.storage_hits)
    return (
        options.policy,
        format_size(options.device_blocks),
        format_size(options.host_blocks),
        format_size(options.storage_blocks),
        options.write_policy.value if has_host else "-",
        f"{result.block_hit_ratio:.4f}",
        f"{result.token_hit_ratio:.4f}",
        *(f"{share / max(1, result.num_blocks):.4f}" for share in shares),
        f"{result.written_blocks_per_requested:.3f}" if has_host else "-",
        format_seconds(times.ttft_seconds_p50),
        format_seconds(times.ttft_seconds_p99),
        f"{times.utilisation:.2f}",
    )


def format_seconds(seconds: float) -> str:
    """Return a time for people."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _json_size(num_blocks: int | None) -> int | str:
    return "inf" if num_blocks is None else num_blocks
