"""What the ranks of a spread engine are asked to do, and what they say to it; both as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Scenario", "Served"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """Conversations with some options of cache and engine.

    Attributes:
        name: for people.
        tp_size, pp_size: how the model is spread.
        attention: `mha` or `mla`.
        write_policy, prefetch_policy, layout: of the cache.
        storage: a directory; None for two tiers.
        runtime: what becomes of the store before each turn, while the engine is idle: `attach`,
            `detach` or nothing. With any it is not attached from the beginning.
        page_size: of all pools, in tokens.
        num_turns: of every conversation.
        num_aborts: further requests a turn that are aborted at any moment.
        device_tokens: size of L1 by rank; the last is that of all further ranks.
        host_ratios: size of L2 in those of L1, likewise.
        draft: None, `small` or `same`: guesses of a draft model.
        fault: what is wrong with the copies of the last rank: `late`, or `failing` for some loads.
        alone: whether every conversation is served by itself, and all that it prefetches comes.
        seed: of the conversations.
    """

    name: str
    tp_size: int = 2
    pp_size: int = 1
    attention: str = "mha"
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    layout: str = "page_first_direct"
    storage: str | None = None
    runtime: tuple[str, ...] = ()
    page_size: int = 16
    num_turns: int = 2
    num_aborts: int = 0
    device_tokens: tuple[int, ...] = (448,)
    host_ratios: tuple[float, ...] = (1.25,)
    draft: str | None = None
    fault: str | None = None
    alone: bool = False
    seed: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What one rank says when it has served a scenario.

    Attributes:
        answers: tokens of every answer with the cache.
        plain_answers: of the same prompts on the same ranks without a cache.
        hits: tokens found on device, host and in storage, by request.
        scheduling: by request, how many others passed it and how many tokens it found late; and
            the engine's counters.
        trees: after every turn, each run of the tree: its tokens, tiers and locks.
        faults: broken invariants, and what the engine or the cache left behind.
        failed_loads: how often requests were computed because a load had failed.
        moved: pages moved by kind.
        num_steps: steps of the cache.
        num_agreements: collectives of the cache.
        counters: of the cache.
    """

    answers: list[list[int]]
    plain_answers: list[list[int]]
    hits: list[list[int]]
    scheduling: list[list[int]]
    trees: list[list[list[Any]]]
    faults: list[str]
    failed_loads: int
    moved: dict[str, int]
    num_steps: int
    num_agreements: int
    counters: dict[str, int]
