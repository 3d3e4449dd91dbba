"""Small traces for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.replay import TraceRequest
from hicache.replay.request import BlockNumbers

if TYPE_CHECKING:
    import random

BLOCK_TOKENS = 4


def make_request(
    blocks: list[int], *, arrival: float = 0.0, tokens: int | None = None, answer: int = 0
) -> TraceRequest:
    """A request for numbered blocks, all of them full if not said otherwise."""
    return TraceRequest(
        arrival_seconds=arrival,
        input_tokens=len(blocks) * BLOCK_TOKENS if tokens is None else tokens,
        output_tokens=answer,
        blocks=np.array(blocks, dtype=np.int32),
    )


def random_requests(
    rng: random.Random, num_requests: int = 120, *, max_blocks: int = 7
) -> list[TraceRequest]:
    """Requests that go on with each other's prompts, leave them halfway, or are new."""
    numbers = BlockNumbers()
    prompts: list[list[int]] = []
    requests = []
    for index in range(num_requests):
        prompt: list[int] = []
        if prompts and rng.random() < 0.8:
            old = rng.choice(prompts[-12:])
            prompt = old[: rng.randint(0, len(old))]
        prompt = prompt + [rng.randrange(3) for _ in range(rng.randint(1, 3))]
        prompt = prompt[:max_blocks]
        prompts.append(prompt)
        blocks = numbers.number(prompt).tolist()
        requests.append(make_request(blocks, arrival=float(index)))
    return requests
