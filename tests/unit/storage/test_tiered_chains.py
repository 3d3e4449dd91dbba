"""A store that `tiered` fills makes room as any other: what stays in it is beginnings of prompts.

Prompts are read in batches, as the cache does it, through a store that has room for some of them
in front of one that has all.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import pytest
from page_store_tools import (
    LATER,
    OK,
    chain,
    namespace,
    open_store,
    payload_of,
    verify_index,
    write,
)

from hicache.clock import ManualClock
from hicache.storage.base import HiCacheStorageConfig
from hicache.storage.page_store import list_pages
from hicache.storage.page_store.eviction_policies import POLICY_NAMES
from hicache.storage.tiered import BackendTier, TieredStorage
from hicache.testing.page_buffer import PageBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache.types import PageHash

PAGE_BYTES = 4096
BATCH_PAGES = 8
ROOM = 1_500_000
"""For half of the pages that are read."""

SEED = 20


class Tiers:
    """Two page stores, each with an instance for every rank of a replica.

    Args:
        path: of a directory for both.
        policy: what the store in front evicts by.
        num_ranks: the n-th of so many reads the n-th page of a prompt, and each so many further on.
    """

    def __init__(self, path: Path, policy: str, *, num_ranks: int = 1) -> None:
        self.fast = path / "fast"
        self.slow = open_store(path / "slow", page_bytes=PAGE_BYTES)
        config = HiCacheStorageConfig(
            namespace=namespace(), page_bytes=PAGE_BYTES, clock=ManualClock()
        )
        self.in_front = [
            open_store(self.fast, page_bytes=PAGE_BYTES, max_bytes=ROOM, eviction_policy=policy)
            for _ in range(num_ranks)
        ]
        self.ranks = [
            TieredStorage(
                [
                    BackendTier(name="fast", storage=fast, written=False, required=False),
                    BackendTier(name="slow", storage=self.slow),
                ],
                config=config,
            )
            for fast in self.in_front
        ]

    def read(self, keys: Sequence[PageHash]) -> None:
        """Read a prompt in batches; each page is on one rank, next to its parent on another."""
        parents = [b"", *keys]
        for first in range(0, len(keys), BATCH_PAGES):
            for rank, storage in enumerate(self.ranks):
                batch = range(len(keys))[first : first + BATCH_PAGES]
                places = [place for place in batch if place % len(self.ranks) == rank]
                targets = [PageBuffer(PAGE_BYTES) for _ in places]
                outcomes = storage.batch_get(
                    [keys[place] for place in places],
                    [parents[place] for place in places],
                    [target.page for target in targets],
                    deadline=LATER,
                )
                assert outcomes == [OK] * len(places)
                for place, target in zip(places, targets, strict=True):
                    assert target.read() == payload_of(keys[place], PAGE_BYTES)

    def filled(self, keys: Sequence[PageHash]) -> list[int]:
        """Return for each page of a prompt whether it is in the store in front."""
        return [self.in_front[0].batch_exists([key]) for key in keys]

    @property
    def num_filled(self) -> int:
        """How many pages the store in front has."""
        return sum(1 for _ in list_pages(str(self.fast)))

    def close(self) -> None:
        for storage in self.ranks:
            storage.close()
        verify_index(self.fast)


def read_and_look(tiers: Tiers, rng: random.Random, what: str) -> None:
    """Read prompts that share beginnings, some again and again, and look after each of them."""
    stems = [chain(name, 3 * BATCH_PAGES) for name in range(4)]
    prompts = [
        [*stem, *chain(10 * name + branch, 20 + name, stem[-1])]
        for name, stem in enumerate(stems)
        for branch in (1, 2)
    ]
    for keys in prompts:
        write(tiers.slow, keys, page_bytes=PAGE_BYTES)
    for _ in range(24):
        tiers.read(rng.choice(prompts))
        for keys in prompts:
            filled = tiers.filled(keys)
            assert filled == sorted(filled, reverse=True), f"{what}: {filled}"
    assert 100 < tiers.num_filled < len({key for keys in prompts for key in keys})


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_what_stays_of_every_prompt_in_a_filled_store_is_its_beginning(
    fast_path: Path, policy: str
) -> None:
    """However many reads brought it."""
    with contextlib.closing(Tiers(fast_path, policy)) as tiers:
        read_and_look(tiers, random.Random(SEED), f"seed {SEED}, {policy}")


def test_ranks_that_share_prompts_fill_one_chain(fast_path: Path) -> None:
    """The page before one is another rank's, who fills it into the same store."""
    with contextlib.closing(Tiers(fast_path, "lru", num_ranks=2)) as tiers:
        read_and_look(tiers, random.Random(SEED), f"seed {SEED}")
