"""What the answers of a trace of block ids put into a cache, as far as that can be told."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hicache.replay.request import TraceRequest

__all__ = ["fill_outputs"]


def fill_outputs(requests: Sequence[TraceRequest], block_tokens: int) -> list[TraceRequest]:
    """Return the requests with `cached_blocks`, where the trace itself does not tell them.

    Ids of an answer stand in a trace only if the conversation goes on. The next request is taken
    for the next turn if it goes through all full blocks of a prompt whose last one is new with it,
    and is at least as long as prompt and answer: the answer's full blocks are its blocks there.
    Any other answer is put in under numbers that nobody asks for.
    """
    if not requests:
        return []
    num_blocks = 1 + max((int(one.blocks.max()) for one in requests if len(one.blocks)), default=0)
    first_use = np.full(num_blocks, len(requests), dtype=np.int64)
    next_use = first_use.copy()
    for index in range(len(requests) - 1, -1, -1):
        first_use[requests[index].blocks] = index
    filled: list[TraceRequest] = []
    next_number = -1
    for index in range(len(requests) - 1, -1, -1):
        request = requests[index]
        num_full = request.input_tokens // block_tokens
        if request.cached_blocks is not None or not request.output_tokens:
            filled.append(request)
        else:
            next_turn = None
            last = request.blocks[num_full - 1] if 0 < num_full <= len(request.blocks) else None
            if last is not None and first_use[last] == index and next_use[last] < len(requests):
                next_turn = requests[next_use[last]]
            blocks = _cached(request, next_turn, block_tokens, next_number)
            next_number = min(next_number, int(blocks.min(initial=0)) - 1)
            filled.append(dataclasses.replace(request, cached_blocks=blocks))
        next_use[request.blocks] = index
    filled.reverse()
    return filled


def _cached(
    request: TraceRequest, next_turn: TraceRequest | None, block_tokens: int, next_number: int
) -> npt.NDArray[np.int32]:
    total = request.input_tokens + request.output_tokens
    if next_turn is not None and next_turn.input_tokens >= total:
        full = next_turn.blocks[: total // block_tokens]
        return full if len(full) >= len(request.blocks) else request.blocks
    num_new = max(0, -(-total // block_tokens) - len(request.blocks))
    unknown = np.arange(next_number, next_number - num_new, -1, dtype=np.int32)
    return np.concatenate([request.blocks, unknown])
