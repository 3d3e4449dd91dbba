"""Forward passes over a batch: which tokens follow, one at a time or several with a draft model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from hicache.engine.model import SequenceChunk
from hicache.engine.request import TokenChoice
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.engine.model import KVPool, Model
    from hicache.engine.request import Request

__all__ = ["Draft", "Passes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A small model that guesses what the large one will say.

    Attributes:
        model: of the same tokens as the large model.
        pool: its KV under the page ids of the large model's, as a side pool of the cache, so that
            both move and are found together.
        num_tokens: guesses that the large model verifies in one pass.
    """

    model: Model
    pool: KVPool
    num_tokens: int


class Passes:
    """Computes batches greedily.

    Guesses change what is computed at once, never the answer: of a guess only those leading tokens
    are kept that the model chooses itself.

    Args:
        model: chooses.
        pool: its KV.
        draft: None for one token in each pass.

    Raises:
        ConfigError: the draft model cannot guess for the model.
    """

    def __init__(self, model: Model, pool: KVPool, draft: Draft | None) -> None:
        if draft is not None:
            _check_draft(draft, model)
        self._model = model
        self._pool = pool
        self._draft = draft

    def num_guesses(self, request: Request) -> int:
        """Return for how many tokens after its last a request needs pages in the next pass.

        None while more than its last token is to be computed, and none beyond the end of its
        answer.
        """
        if self._draft is None or request.num_to_compute != 1:
            return 0
        return max(0, min(self._draft.num_tokens, request.num_left - 1))

    def compute(self, batch: Sequence[tuple[Request, int]]) -> list[tuple[TokenChoice, ...]]:
        """Compute the next tokens of each request and store their KV.

        Args:
            batch: requests, each with the number of its next tokens to compute.

        Returns:
            What follows the last of them, one or more tokens of each request. The KV of all but
            the last one of these is stored too.

        Raises:
            TransferError: see `Model.forward`.
            RanksLostError: likewise.
        """
        chunks = [
            SequenceChunk(
                request.token_ids(request.num_computed, request.num_computed + count),
                request.num_computed,
                request.pages,
            )
            for request, count in batch
        ]
        guesses: list[list[int]] = [[] for _ in chunks]
        if self._draft is not None:
            limits = [self.num_guesses(request) for request, _ in batch]
            guesses = _guess(self._draft, chunks, limits)
        chunks = [
            dataclasses.replace(
                chunk, token_ids=[*chunk.token_ids, *guess], num_logits=1 + len(guess)
            )
            for chunk, guess in zip(chunks, guesses, strict=True)
        ]
        choices = iter(_most_likely(self._model.forward(chunks, self._pool)))
        return [_verified([next(choices) for _ in (0, *guess)], guess) for guess in guesses]


def _guess(draft: Draft, chunks: Sequence[SequenceChunk], limits: Sequence[int]) -> list[list[int]]:
    """Return what the draft model believes to follow each chunk, as many tokens as its limit.

    Stores the draft's KV of the chunks and of all guesses, so that it lacks none of what is kept.
    """
    guesses: list[list[int]] = [[] for _ in chunks]
    current = dict(enumerate(chunks))
    while current:
        logits = draft.model.forward(list(current.values()), draft.pool)
        followers = zip(list(current.items()), logits.argmax(dim=-1).tolist(), strict=True)
        for (number, chunk), follower in followers:
            if len(guesses[number]) == limits[number]:
                del current[number]
                continue
            guesses[number].append(follower)
            end = chunk.start + len(chunk.token_ids)
            current[number] = SequenceChunk([follower], end, chunk.pages)
    return guesses


def _verified(choices: Sequence[TokenChoice], guess: Sequence[int]) -> tuple[TokenChoice, ...]:
    """Return the choices up to the first that is not the one guessed, and that one."""
    kept = 0
    while kept < len(guess) and choices[kept].token_ids[0] == guess[kept]:
        kept += 1
    return tuple(choices[: kept + 1])


def _most_likely(logits: torch.Tensor) -> list[TokenChoice]:
    top = torch.topk(logits, 2, dim=-1)
    both = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenChoice(tuple(ids), tuple(values)) for ids, values in both]


def _check_draft(draft: Draft, model: Model) -> None:
    small, large = draft.model.config, model.config
    if draft.num_tokens < 1:
        raise ConfigError(f"a draft model guesses at least 1 token, not {draft.num_tokens}")
    if small.vocab_size != large.vocab_size or small.max_positions < large.max_positions:
        raise ConfigError(
            f"{small.name} ({small.vocab_size} tokens, {small.max_positions} positions) cannot "
            f"guess for {large.name} ({large.vocab_size} tokens, {large.max_positions} "
            "positions); take a draft model with the same tokens and no fewer positions"
        )
