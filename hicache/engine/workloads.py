"""Workloads for schedulers: prompts about documents that several people ask about."""

from __future__ import annotations

import random
from typing import NamedTuple

from hicache.errors import ConfigError

__all__ = ["Arrival", "document_bursts", "document_stream", "documents"]

_QUESTION_TOKENS = (16, 64)
_ASKED_ABOUT = 4
"""Prompts of a burst that begin with the same document."""


class Arrival(NamedTuple):
    """A prompt and when it comes, in seconds from the beginning."""

    seconds: float
    prompt: tuple[int, ...]


def documents(
    *, num_documents: int, max_tokens: int, vocab_size: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Return documents of random tokens, half as long as `max_tokens` or more.

    Equal arguments give equal documents.

    Raises:
        ConfigError: a number is below 1.
    """
    _require_positive(num_documents=num_documents, max_tokens=max_tokens, vocab_size=vocab_size)
    rng = random.Random(f"documents {seed}")
    least = -(-max_tokens // 2)
    return tuple(
        _tokens(rng, rng.randint(least, max_tokens), vocab_size) for _ in range(num_documents)
    )


def document_bursts(
    texts: tuple[tuple[int, ...], ...],
    *,
    num_bursts: int,
    burst_size: int,
    gap_seconds: float,
    vocab_size: int,
    seed: int,
) -> tuple[Arrival, ...]:
    """Return prompts that come in bursts, four about each document of a burst, in any order.

    Each is a document with a question of its own. A burst is about the documents that are next in
    turn, and about the last one of the burst before. Equal arguments give equal prompts.

    Args:
        texts: the documents, at least one.
        num_bursts: at least 1.
        burst_size: prompts in a burst, at least 1.
        gap_seconds: from one burst to the next.
        vocab_size: of the questions.
        seed: of questions and order.

    Raises:
        ConfigError: a number is below 1, or there is no document.
    """
    _require_positive(
        documents=len(texts), num_bursts=num_bursts, burst_size=burst_size, vocab_size=vocab_size
    )
    rng = random.Random(f"bursts {seed}")
    num_asked = -(-burst_size // _ASKED_ABOUT)
    arrivals = []
    for burst in range(num_bursts):
        first = burst * max(1, num_asked - 1)
        chosen = [texts[(first + n // _ASKED_ABOUT) % len(texts)] for n in range(burst_size)]
        rng.shuffle(chosen)
        arrivals += [
            Arrival(burst * gap_seconds, text + _question(rng, vocab_size)) for text in chosen
        ]
    return tuple(arrivals)


def document_stream(
    texts: tuple[tuple[int, ...], ...],
    *,
    num_prompts: int,
    mean_gap_seconds: float,
    new_share: float,
    new_tokens: int,
    vocab_size: int,
    seed: int,
) -> tuple[Arrival, ...]:
    """Return prompts that come one by one at random moments; popular documents come often.

    The document at position `n` is asked about in proportion to `1 / (n + 1)`. Equal arguments give
    equal prompts.

    Args:
        texts: the documents, at least one.
        num_prompts: at least 1.
        mean_gap_seconds: from one prompt to the next.
        new_share: part of the prompts, 0 to 1, that are about nothing seen before.
        new_tokens: of those, `new_tokens // 2` or more.
        vocab_size: of questions and new prompts.
        seed: of everything.

    Raises:
        ConfigError: a number is below 1, or there is no document.
    """
    _require_positive(
        documents=len(texts), num_prompts=num_prompts, new_tokens=new_tokens, vocab_size=vocab_size
    )
    rng = random.Random(f"stream {seed}")
    weights = [1 / (position + 1) for position in range(len(texts))]
    arrivals, now = [], 0.0
    for _ in range(num_prompts):
        now += rng.expovariate(1 / mean_gap_seconds)
        if rng.random() < new_share:
            text = _tokens(rng, rng.randint(-(-new_tokens // 2), new_tokens), vocab_size)
        else:
            (text,) = rng.choices(texts, weights)
        arrivals.append(Arrival(now, text + _question(rng, vocab_size)))
    return tuple(arrivals)


def _question(rng: random.Random, vocab_size: int) -> tuple[int, ...]:
    return _tokens(rng, rng.randint(*_QUESTION_TOKENS), vocab_size)


def _tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(count))


def _require_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{name} must be at least 1, not {number}")
