"""One request of a trace, whatever file it came from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from hicache.errors import ConfigError, HiCacheError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    import numpy.typing as npt

__all__ = ["BlockNumbers", "TraceError", "TraceRequest"]

_MAX_BLOCKS = 2**31 - 1


class TraceError(HiCacheError):
    """A trace file that cannot be read, with the place in it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TraceRequest:
    """One request.

    Attributes:
        arrival_seconds: since the start of the trace.
        input_tokens: of the prompt.
        output_tokens: generated, 0 when the trace does not tell.
        blocks: a number for each block of the prompt, the last of which may be partly filled.
            A number names the block with all before it: equal numbers are equal prefixes.
        cached_blocks: those of prompt and answer together; None when the trace does not know what
            was answered.
    """

    arrival_seconds: float
    input_tokens: int
    output_tokens: int
    blocks: npt.NDArray[np.int32]
    cached_blocks: npt.NDArray[np.int32] | None = None

    def prefix_tokens(self, num_blocks: int, block_tokens: int) -> int:
        """Return the tokens of the prompt that its first `num_blocks` blocks hold."""
        return min(num_blocks * block_tokens, self.input_tokens)


class BlockNumbers:
    """Numbers blocks by their whole prefix: nodes of a trie, counted as they are first seen."""

    def __init__(self) -> None:
        self._trie: dict[tuple[int, Hashable], int] = {}
        self._next = 0

    def __len__(self) -> int:
        """Return how many numbers there are."""
        return self._next

    def number(self, symbols: Iterable[Hashable]) -> npt.NDArray[np.int32]:
        """Return the numbers of the blocks with these contents, from the start of a prompt."""
        trie, node = self._trie, -1
        numbers = []
        for symbol in symbols:
            step = (node, symbol)
            child = trie.get(step)
            if child is None:
                trie[step] = child = self._next
                self._next += 1
            node = child
            numbers.append(node)
        if self._next > _MAX_BLOCKS:
            raise ConfigError("more than 2^31 distinct blocks; replay a shorter part of the trace")
        return np.array(numbers, dtype=np.int32)
