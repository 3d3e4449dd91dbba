"""One request in the reference engine."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from hicache.radix import RadixKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.radix import RadixNode
    from hicache.types import IntArray, RequestId

__all__ = ["FinishReason", "Request", "Standing", "TokenChoice"]


class FinishReason(str, Enum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORTED = "aborted"


@dataclasses.dataclass(frozen=True)
class TokenChoice:
    """The two most likely tokens at one position, with their logits; the first was chosen."""

    token_ids: tuple[int, int]
    logits: tuple[float, float]


@dataclasses.dataclass
class Standing:
    """What a cache-aware scheduler remembers of a request that waits.

    Attributes:
        num_passes: younger requests that were admitted before it.
        num_known: leading tokens that were in memory when it was submitted, or admitted last.
        num_in_memory, num_on_device: those that were in the newest step, and that the device had.
        num_awaited: leading tokens for which it was held back, or still is.
        leader: the request whose prefetch it waits for, as that brings a part of its prompt.
        num_shared: leading tokens that it has in common with `leader`.
    """

    num_passes: int = 0
    num_known: int = 0
    num_in_memory: int = 0
    num_on_device: int = 0
    num_awaited: int = 0
    leader: Request | None = None
    num_shared: int = 0


class Request:
    """A prompt and what has become of it.

    | pages of `pages` | owner |
    |---|---|
    | `[0, num_tree_pages)` | the tree (or the load that brings them), kept by the lock on `node` |
    | `[num_tree_pages, ...)` | the request |

    Args:
        request_id: unique among the requests of an engine.
        prompt_ids: tokens of the prompt, at least one.
        max_new_tokens: tokens to generate at most.
        stop_ids: tokens that end the answer; the token itself is part of the output.
        extra_key, cache_salt: see `RadixKey`.
        cacheable: whether the cache may keep what is computed for it; what the cache has already,
            it uses all the same.
        priority: larger is more important: under the eviction policy `priority` its pages stay
            longer. The order in which requests run does not depend on it.

    Attributes:
        output_ids: tokens generated so far.
        choices: one per output token.
        num_computed: leading tokens whose K/V is in the request's pages.
        num_host_pages: leading pages that need no write, as the host had them at admission.
        device_hit_tokens, host_hit_tokens, storage_hit_tokens: prompt tokens found in each tier.
        delayed_hit_tokens: of these, those that no memory had when it was submitted, and that
            another request's prefetch or computation has brought while it was held back for them.
        standing: of the request in the queue.
        submitted_at, first_token_at: seconds on the engine's clock.
    """

    def __init__(
        self,
        request_id: RequestId,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        extra_key: str | None = None,
        cache_salt: str | None = None,
        cacheable: bool = True,
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.prompt_key = RadixKey(prompt_ids, extra_key=extra_key, cache_salt=cache_salt)
        self.prompt_ids = list(prompt_ids)
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(stop_ids)
        self.cacheable = cacheable
        self.priority = priority
        self.output_ids: list[int] = []
        self.choices: list[TokenChoice] = []
        self.finish_reason: FinishReason | None = None
        self.submitted_at = 0.0
        self.first_token_at = 0.0
        self.device_hit_tokens = 0
        self.host_hit_tokens = 0
        self.storage_hit_tokens = 0
        self.delayed_hit_tokens = 0
        self.standing = Standing()
        self.num_failed_loads = 0
        self.producer = -1
        self.release()

    def release(self) -> None:
        """Forget pages and progress; the caller has given back what the request owned."""
        self.pages: IntArray = np.empty(0, dtype=np.int64)
        self.num_tree_pages = 0
        self.num_computed = 0
        self.num_host_pages = 0
        self.node: RadixNode | None = None
        self.producer = -1

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_to_compute(self) -> int:
        """Known tokens whose K/V is not there yet; the last of them gives the next token."""
        return self.num_tokens - self.num_computed

    @property
    def num_left(self) -> int:
        """Tokens that the answer can still have."""
        return self.max_new_tokens - len(self.output_ids)

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that no tier had."""
        found = self.device_hit_tokens + self.host_hit_tokens + self.storage_hit_tokens
        return self.num_prompt_tokens - found

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the tokens `[start, end)` of prompt and answer."""
        split = len(self.prompt_ids)
        prompt = self.prompt_ids[start : min(end, split)]
        return prompt + self.output_ids[max(0, start - split) : max(0, end - split)]

    def computed_key(self) -> RadixKey:
        """Return the key of the tokens whose K/V is in the pages."""
        missing = self.num_computed - self.num_prompt_tokens
        if missing <= 0:
            return self.prompt_key.prefix(self.num_computed)
        return self.prompt_key.extend(self.output_ids[:missing])

    def full_key(self) -> RadixKey:
        """Return the key of all tokens so far."""
        return self.prompt_key.extend(self.output_ids) if self.output_ids else self.prompt_key

    def matchable_key(self) -> RadixKey:
        """Return the key without its last token, which has to be computed to give the next one."""
        key = self.full_key()
        return key.prefix(len(key) - 1)

    def take(self, choices: Sequence[TokenChoice]) -> int:
        """Append chosen tokens up to the one that ends the answer; return how many."""
        for count, choice in enumerate(choices, start=1):
            token = choice.token_ids[0]
            self.output_ids.append(token)
            self.choices.append(choice)
            if token in self.stop_ids:
                self.finish_reason = FinishReason.STOP
            elif not self.num_left:
                self.finish_reason = FinishReason.LENGTH
            if self.finished:
                return count
        return len(choices)
