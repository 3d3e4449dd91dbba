"""What a backend with little room keeps to, as a test suite.

A backend's test subclasses `BoundedContract`, beside `StorageContract` in a class of its own:

    class TestMyStorageWithLittleRoom(BoundedContract):
        def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
            return MyStorage(dataclasses.replace(config, extra_config={"max_pages": 100}))
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from hicache.testing.backend_rig import BackendRig, prompt_keys
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.storage.base import HiCacheStorage
    from hicache.types import PageHash

__all__ = ["BoundedContract"]

_NUM_PROMPTS = 30
_MAX_PROMPT_PAGES = 30


class BoundedContract(BackendRig):
    """What a backend keeps of prompts that do not all fit.

    `make_backend` gives it room for 50 to 300 pages of `page_bytes`. Whether it makes room for new
    pages or refuses them is up to it.
    """

    @pytest.mark.parametrize("seed", range(3))
    def test_what_is_kept_of_every_prompt_is_its_beginning(
        self, backend: HiCacheStorage, seed: int
    ) -> None:
        """No page stays without those before it, however many calls brought them."""
        rng = random.Random(seed)
        prompts = [
            prompt_keys(rng.randint(1, _MAX_PROMPT_PAGES), first_token=_MAX_PROMPT_PAGES * number)
            for number in range(_NUM_PROMPTS)
        ]
        for number, keys in enumerate(prompts):
            self._set_in_batches(backend, keys, rng.randint(1, _MAX_PROMPT_PAGES))
            self._read_again(backend, rng.choice(prompts[: number + 1]))
            for earlier in prompts[: number + 1]:
                kept = [backend.batch_exists([key]) for key in earlier]
                assert kept == sorted(kept, reverse=True), f"seed {seed}, prompt {number}"
        num_kept = sum(backend.batch_exists(keys) for keys in prompts)
        assert 50 <= num_kept <= 300, "make_backend gives another room than it is asked for"

    def _set_in_batches(
        self, backend: HiCacheStorage, keys: Sequence[PageHash], batch_pages: int
    ) -> None:
        """Store a prompt up to the first page that is not good, as the cache does."""
        parents = [b"", *keys]
        for first in range(0, len(keys), batch_pages):
            last = min(first + batch_pages, len(keys))
            outcomes = self._set(backend, keys[first:last], parent_keys=parents[first:last])
            if not all(outcome.good for outcome in outcomes):
                break

    def _read_again(self, backend: HiCacheStorage, keys: Sequence[PageHash]) -> None:
        """Read what there is of a prompt, and verify it."""
        found = keys[: backend.batch_exists(keys)]
        outcomes, payloads = self._get(backend, found)
        assert outcomes == [PageOutcome.OK] * len(found)
        assert payloads == [self._payload(key) for key in found]
