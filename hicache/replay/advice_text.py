"""Advice in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache.replay.report import MODEL_NOTE, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache.replay.advice import Advice, Curve, Prices, Workload
    from hicache.replay.replay import ReplayResult
    from hicache.replay.time_model import TimeSummary

__all__ = ["advice_text"]

_GIB: Final = 1 << 30

_EASY_LOAD: Final = 0.8
"""Of an engine whose queue does not say everything."""


def advice_text(
    advice: Advice, workload: Workload, prices: Prices, *, uncached: TimeSummary
) -> str:
    """Return what to do and why, for the person who runs the engine."""
    expected = advice.expected
    options = expected.options
    has_prices = prices.engine_hour is not None
    lines = [
        "Advice",
        f"  L1 {_memory(options.device_blocks or 0, workload)} is given.",
        f"  L2 {_worth(advice.host, workload)}.",
    ]
    if advice.host.size:
        lines.append(f"  L3 {_worth(advice.storage, workload)}.")
    lines += [
        f"  Evict by {options.policy}, write by {options.write_policy.value}."
        if advice.host.size
        else f"  Evict by {options.policy}.",
        "Expected",
        f"  {expected.token_hit_ratio:.1%} of prompt tokens are not computed (L1 "
        f"{_share(expected.device_hits, expected)}, L2 {_share(expected.host_hits, expected)}, L3 "
        f"{_share(expected.storage_hits, expected)} of the blocks); "
        f"{expected.written_blocks_per_requested:.2f} blocks are written to L2 for each asked for.",
        f"  A cache of that size that knew the future would reach "
        f"{advice.bound.token_hit_ratio:.1%}.",
        f"  Time to first token: median {_change(uncached, expected, 'ttft_seconds_p50')}, 99th "
        f"percentile {_change(uncached, expected, 'ttft_seconds_p99')}.",
        f"  Load of one engine: {uncached.utilisation:.2f} without a cache, "
        f"{expected.times.utilisation:.2f} with it.",
    ]
    if expected.times.utilisation >= 1:
        num_engines = int(expected.times.utilisation) + 1
        share = _EASY_LOAD / expected.times.utilisation * workload.model.speed
        lines.append(
            f"  One engine cannot keep up, so these times are those of a queue that grows. It "
            f"takes {num_engines} or more;\n  look at one engine's share with --speed "
            f"{share:.2g}, or give its real speed."
        )
    lines += ["Why", f"  {_speeds(workload)}"]
    lines += [f"  {line}" for line in _curve_lines("L2", advice.host, workload, has_prices)]
    lines += [f"  {line}" for line in _curve_lines("L3", advice.storage, workload, has_prices)]
    lines += [
        f"  eviction: {_ratios(advice.policies, [one.options.policy for one in advice.policies])}"
    ]
    if advice.write_policies:
        names = [
            f"{one.options.write_policy.value} ({one.written_blocks_per_requested:.2f} written)"
            for one in advice.write_policies
        ]
        lines.append(f"  writing: {_ratios(advice.write_policies, names)}")
    return "\n".join([*lines, MODEL_NOTE])


def _memory(num_blocks: int, workload: Workload) -> str:
    gib = num_blocks * workload.block_bytes / _GIB
    return f"of {num_blocks:,} blocks ({gib:,.0f} GiB)"


def _worth(curve: Curve, workload: Workload) -> str:
    if not curve.size:
        return "is not worth having"
    ratio = curve.results[curve.chosen].token_hit_ratio
    return (
        f"{_memory(curve.size, workload)}: prompt tokens that hit rise from "
        f"{curve.results[0].token_hit_ratio:.1%} to {ratio:.1%}"
    )


def _speeds(workload: Workload) -> str:
    """Compare a block that is computed with one that is loaded."""
    model, tokens = workload.model, workload.block_tokens
    computed = model.compute_seconds(0, tokens)
    loaded = model.load_seconds(tokens)
    stored = model.storage_seconds(tokens)
    text = (
        f"A block of {tokens} tokens takes {format_seconds(computed)} to compute, "
        f"{loaded * 1e3:.1f} ms from L2, {stored * 1e3:.1f} ms from L3."
    )
    if loaded > computed:
        text += " Loading takes longer than computing: only leading parts of hits are loaded."
    elif stored > computed:
        text += " Reading L3 takes longer than computing; it helps only while requests wait."
    return text


def _curve_lines(tier: str, curve: Curve, workload: Workload, has_prices: bool) -> Iterator[str]:
    if len(curve.sizes) < 2:
        return
    gain = "saves per hour" if has_prices else "engine time saved"
    yield f"{tier} in blocks       GiB  token hits  TTFT p50  {gain}"
    for index, (size, result) in enumerate(zip(curve.sizes, curve.results, strict=True)):
        saved = curve.gains[index]
        text = f"{round(saved, 2) + 0.0:,.2f}" if has_prices else format_seconds(saved)
        mark = "  <-" if index == curve.chosen else ""
        yield (
            f"{size:12,}  {size * workload.block_bytes / _GIB:8,.0f}  "
            f"{result.token_hit_ratio:10.4f}  {format_seconds(result.times.ttft_seconds_p50):>8}  "
            f"{text:>{len(gain)}}{mark}"
        )


def _ratios(results: Sequence[ReplayResult], names: Sequence[str]) -> str:
    pairs = zip(names, results, strict=True)
    return ", ".join(f"{name} {result.token_hit_ratio:.4f}" for name, result in pairs)


def _share(num_blocks: int, result: ReplayResult) -> str:
    return f"{num_blocks / max(1, result.num_blocks):.1%}"


def _change(uncached: TimeSummary, expected: ReplayResult, name: str) -> str:
    before, after = getattr(uncached, name), getattr(expected.times, name)
    return f"{format_seconds(after)} (without a cache {format_seconds(before)})"
