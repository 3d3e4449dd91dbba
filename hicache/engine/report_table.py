"""The demo's report as plain text for a terminal, and numbers in words for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.engine.report import DemoReport, TurnReport, TurnTotals

__all__ = [
    "continued_note",
    "format_bytes",
    "format_factor",
    "format_ms",
    "format_share",
    "format_table",
    "restart_note",
]

_TURN_HEADER = (
    "user", "turn", "restart", "prompt", "L1", "L2", "L3", "computed",
    "ttft ms", "uncached ms", "speed-up", "equal",
)  # fmt: skip
_TOTALS_HEADER = (
    "turns", "number", "prompt", "L1", "L2", "L3", "computed",
    "median ttft ms", "uncached ms", "speed-up",
)  # fmt: skip
_MOVEMENT_HEADER = ("movement", "bytes", "seconds", "bandwidth")


def format_table(report: DemoReport) -> str:
    """Return the report as aligned plain text without a trailing newline.

    One row per turn with tokens by origin and time to first token, then totals and medians, bytes
    moved, whether the answers are equal, `restart_note` and `continued_note`.
    """
    totals = report.totals
    moved = [
        (
            name,
            format_bytes(movement.num_bytes),
            f"{movement.seconds:.3f}",
            f"{format_bytes(movement.bytes_per_second)}/s",
        )
        for name, movement in report.movements.by_name().items()
    ]
    unequal = sum(not turn.answer_equal for turn in report.turns)
    verdict = "equal to those without a cache" if report.answers_equal else "NOT equal"
    closing = (
        f"answers: {verdict} ({unequal} of {len(report.turns)} differ)",
        restart_note(report),
        continued_note(report),
    )
    return "\n\n".join(
        [
            _align([_TURN_HEADER, *map(_turn_row, report.turns)]),
            _align(
                [
                    _TOTALS_HEADER,
                    *(_totals_row(name.replace("_", " "), totals[name]) for name in totals),
                ]
            ),
            _align([_MOVEMENT_HEADER, *moved]),
            "\n".join(filter(None, closing)),
        ]
    )


def restart_note(report: DemoReport) -> str:
    """Return how far the ranks after a restart are from those before it; empty where they are not.

    Ranks that split a model otherwise add the same numbers in another order.
    """
    difference = report.restart_logit_difference
    if not difference:
        return ""
    return (
        f"logits of the same prompt differ by {difference:.1e} at most after the restart, because "
        "the model is split over other ranks then, whose sums are rounded otherwise"
    )


def continued_note(report: DemoReport) -> str:
    """Return what L3 had when the run began; empty where it had nothing.

    Prompts of the first turns are found then, and so more than a run by itself would find.
    """
    if not report.num_pages_at_start:
        return ""
    return (
        f"L3 had {report.num_pages_at_start:,} pages of a run that did not end when this one "
        "began, so more is found than by a run from an empty L3"
    )


def format_bytes(num_bytes: float) -> str:
    """Return a size with three digits or more and a decimal unit, such as `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def format_ms(seconds: float | None) -> str:
    """Return a time in milliseconds without the unit; `-` for None."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def format_factor(factor: float | None) -> str:
    """Return how many times, such as `3.2x`; `-` for None."""
    return "-" if factor is None else f"{factor:.1f}x"


def format_share(share: float) -> str:
    """Return a part of one in percent, such as `62%`."""
    return f"{share:.0%}"


def _turn_row(turn: TurnReport) -> tuple[str, ...]:
    return (
        str(turn.user),
        str(turn.turn),
        "after" if turn.after_restart else "",
        str(turn.prompt_tokens),
        str(turn.device_hit_tokens),
        str(turn.host_hit_tokens),
        str(turn.storage_hit_tokens),
        str(turn.computed_tokens),
        format_ms(turn.ttft_seconds),
        format_ms(turn.ttft_uncached_seconds),
        format_factor(turn.speed_up),
        "yes" if turn.answer_equal else "NO",
    )


def _totals_row(name: str, totals: TurnTotals) -> tuple[str, ...]:
    by_origin = (
        totals.device_hit_tokens,
        totals.host_hit_tokens,
        totals.storage_hit_tokens,
        totals.computed_tokens,
    )
    return (
        name,
        str(totals.turns),
        str(totals.prompt_tokens),
        *(f"{tokens} ({format_share(totals.share(tokens))})" for tokens in by_origin),
        format_ms(totals.median_ttft_seconds),
        format_ms(totals.median_ttft_uncached_seconds),
        format_factor(totals.median_speed_up),
    )


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
