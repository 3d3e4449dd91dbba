"""What a token of a prompt takes to compute, out of whole forward passes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.controller.affine_fit import Line, is_fit_due

__all__ = ["PrefillFit"]

_WINDOW = 32
"""Passes that count."""

_SIZES_APART = 2.0
_CONTEXTS_APART = 1.25
"""They tell something when the largest is so many times the smallest."""

_LEAST_SHARE = 0.25
"""Of the least that a token took in any pass, that it takes at least: small passes take hardly
less than larger ones, which does not go on for ever."""

_NUM_ROUNDS = 4
_LEAST_RESIDUAL = 0.01
"""Passes that differ by less from what is estimated count the same."""


class _Pass(NamedTuple):
    num_tokens: int
    context_tokens: float
    seconds: float


class PrefillFit:
    """Passes that take a fixed part, a part by tokens, and one by tokens times what is before them.

    The newest 32 count. Passes that differ from the others bend the estimate little, as it makes
    the sum of relative differences small, not that of their squares. Fitting takes some 100 us: it
    is done when asked for, once a quarter of them is new.
    """

    def __init__(self) -> None:
        self._passes: deque[_Pass] = deque(maxlen=_WINDOW)
        self._line: Line | None = None
        self._num_new = 0

    def note(self, num_tokens: int, seconds: float, *, context_tokens: float) -> None:
        """Take note of a pass; one that computed nothing or took no time says nothing.

        Args:
            num_tokens: that it computed.
            seconds: that it took.
            context_tokens: how many tokens were before each of them, on average.
        """
        if num_tokens > 0 and seconds > 0:
            self._passes.append(_Pass(num_tokens, context_tokens, seconds))
            self._num_new += 1

    def line(self) -> Line | None:
        """Return the seconds of one more token by the tokens before it; None before any pass.

        It may lack the newest passes, up to a quarter of those that count.
        """
        if is_fit_due(self._num_new, len(self._passes)):
            self._line, self._num_new = self._fit(), 0
        return self._line

    def _fit(self) -> Line:
        tokens, contexts, seconds = (
            np.asarray(column, dtype=np.float64) for column in zip(*self._passes, strict=True)
        )
        parts = {"token": tokens / seconds}
        if _are_apart(tokens, _SIZES_APART):
            parts["pass"] = 1 / seconds
        if _are_apart(contexts, _CONTEXTS_APART):
            parts["context"] = tokens * contexts / seconds
        found = _least_differences(parts)
        least = _LEAST_SHARE * float(np.min(seconds / tokens))
        return Line(max(least, found["token"]), found.get("context", 0.0))


def _are_apart(values: npt.NDArray[np.float64], times: float) -> bool:
    return bool(values.max() > 0 and values.max() >= times * values.min())


def _least_differences(parts: dict[str, npt.NDArray[np.float64]]) -> dict[str, float]:
    """Return how much of each part there is, none negative, so that all rows come near 1."""
    names = list(parts)
    scales = {name: float(np.max(parts[name])) for name in names}
    weights: npt.NDArray[np.float64] = np.ones(len(parts[names[0]]))
    amounts: npt.NDArray[np.float64] = np.zeros(len(names))
    for _ in range(_NUM_ROUNDS):
        columns = np.stack([parts[name] / scales[name] for name in names], axis=1)
        amounts = np.asarray(np.linalg.lstsq(columns * weights[:, None], weights, rcond=None)[0])
        if amounts.min() < 0 and len(names) > 1:
            del names[int(np.argmin(amounts))]
            continue
        residuals = np.abs(columns @ amounts - 1)
        weights = np.asarray(1 / np.sqrt(np.maximum(residuals, _LEAST_RESIDUAL)))
    found = {
        name: max(0.0, float(amount)) / scales[name]
        for name, amount in zip(names, amounts, strict=False)
    }
    return {name: found.get(name, 0.0) for name in parts}
