"""A page store that is too small against a model, whatever is asked in whatever order."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from page_store_tools import (
    CORRUPT,
    MISS,
    NO_SPACE,
    OK,
    PRESENT,
    SKIPPED,
    disk_bytes,
    flip,
    num_stored,
    open_store,
    read,
    verify_index,
    write,
)

from conftest import MEMORY
from hicache.hashing import hash_pages
from hicache.storage.page_store import list_pages
from hicache.storage.page_store.eviction_policies import POLICY_NAMES

if TYPE_CHECKING:
    from hicache.storage.page_store import PageStore
    from hicache.types import PageHash

MAX_BYTES, PAGE_BYTES = 700_000, 20_000

# A binary tree of prefixes, in which each node is a page.
paths = st.lists(st.booleans(), min_size=3, max_size=14)


def keys_of(path: list[bool]) -> list[PageHash]:
    return hash_pages(b"".join(bytes([turn, 0, 0, 0]) for turn in path), page_size=1)


class PageStoreMachine(RuleBasedStateMachine):
    """Knows which pages can be stored, and from what each is chained.

    `stored` has every page that was stored and not seen to be gone; `orphans` those whose parent
    was absent when they were stored, or was removed by damage.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        place = MEMORY if os.access(MEMORY, os.W_OK) else None
        folder = tempfile.TemporaryDirectory(prefix="hicache-test-", dir=place)
        self.path = self._stack.enter_context(folder)
        self.policy = "adaptive"
        self.storage = self._open()
        self.parents: dict[PageHash, bytes] = {}
        self.stored: set[PageHash] = set()
        self.orphans: set[PageHash] = set()

    def teardown(self) -> None:
        self.storage.close()
        self._stack.close()

    def _open(self) -> PageStore:
        return open_store(
            self.path, page_bytes=PAGE_BYTES, max_bytes=MAX_BYTES, eviction_policy=self.policy
        )

    @rule(path=paths, start=st.integers(0, 13))
    def write_pages(self, path: list[bool], start: int) -> None:
        keys = keys_of(path)
        start = min(start, len(keys) - 1)
        parent = keys[start - 1] if start else b""
        outcomes = write(self.storage, keys[start:], parent=parent, page_bytes=PAGE_BYTES)
        parents = [parent, *keys[start:-1]]
        for key, parent_key, outcome in zip(keys[start:], parents, outcomes, strict=True):
            assert outcome in (OK, PRESENT, NO_SPACE, SKIPPED)
            assert outcome is not PRESENT or key in self.stored
            if outcome is OK:
                self.stored.add(key)
                self.orphans.discard(key)
                self.parents[key] = parent_key
                if parent_key and parent_key not in self.stored:
                    self.orphans.add(key)
        num_good = sum(outcome.good for outcome in outcomes)
        assert num_stored(self.storage, keys[start:]) == num_good
        assert num_good == len(outcomes) or outcomes[num_good] is NO_SPACE

    @rule(path=paths)
    def read_pages(self, path: list[bool]) -> None:
        keys = keys_of(path)
        found = self.storage.batch_exists(keys)
        outcomes = read(self.storage, keys, page_bytes=PAGE_BYTES)
        assert outcomes[:found] == [OK] * found
        assert outcomes[found:] == ([MISS] + [SKIPPED] * len(keys))[: len(keys) - found]
        assert set(keys[:found]) <= self.stored

    @precondition(lambda self: self.stored)
    @rule(choice=st.integers(0, 1 << 30), position=st.integers(0, 4095))
    def damage_a_page(self, choice: int, position: int) -> None:
        pages = [page for page in list_pages(self.path) if page.key in self.stored]
        page = pages[choice % len(pages)]
        flip(page, position)
        assert read(self.storage, [page.key], page_bytes=PAGE_BYTES) == [CORRUPT]
        assert self.storage.batch_exists([page.key]) == 0
        self.stored.discard(page.key)
        self.orphans |= {key for key, parent in self.parents.items() if parent == page.key}

    @rule()
    def clear(self) -> None:
        assert self.storage.clear() == len(list(self.stored))
        self.stored.clear()
        self.orphans.clear()

    @rule(policy=st.sampled_from(POLICY_NAMES))
    def open_again(self, policy: str) -> None:
        self.storage.close()
        self.policy = policy
        self.storage = self._open()

    @rule()
    def open_beside(self) -> None:
        other = self._open()
        assert num_stored(other, sorted(self.stored)) == num_stored(
            self.storage, sorted(self.stored)
        )
        other.close()

    @invariant()
    def what_is_stored_can_be_reached(self) -> None:
        """Nothing was given up that a stored page is chained from."""
        found = {page.key for page in list_pages(self.path)}
        assert found <= self.stored
        for key in found - self.orphans:
            parent = self.parents[key]
            assert not parent or parent in found
        self.stored = found

    @invariant()
    def limit_and_index_are_sound(self) -> None:
        assert disk_bytes(self.path) <= MAX_BYTES
        verify_index(self.path)


PageStoreMachine.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPageStoreMachine = PageStoreMachine.TestCase
