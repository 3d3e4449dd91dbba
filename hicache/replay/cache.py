"""One cache of a replay: the real tree, with policies and sizes, and nothing that moves bytes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from hicache.radix import Admission, Duplicates, RadixKey, RadixTree, create_policy, write_rule_for
from hicache.replay.time_model import LoadRule
from hicache.types import PrefetchPolicy, StorageAdmission, WritePolicy

if TYPE_CHECKING:
    from hicache.radix import MatchResult, RadixNode, Ticket
    from hicache.types import IntArray

__all__ = ["CacheOptions", "Found", "ReplayedCache"]

_NO_PAGES: Final = np.empty(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Sizes and policies of one cache. Sizes are in blocks; None stands for no bound.

    Attributes:
        policy: order of eviction in every tier, see `hicache.radix.policies.create_policy`.
        device_blocks: of L1.
        host_blocks: of L2; 0 for none.
        storage_blocks: of L3, which needs an L2; 0 for none.
        write_policy: when L1 goes to L2.
        storage_admission: what of L2 goes to L3.
        prefetch_policy: how long a request waits for L3.
        load: what becomes of hits in L2 and L3; the counts do not depend on it, the times do.
    """

    policy: str = "lru"
    device_blocks: int | None = None
    host_blocks: int | None = 0
    storage_blocks: int | None = 0
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    storage_admission: StorageAdmission = StorageAdmission.ALL
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE
    load: LoadRule = LoadRule.AUTO


class Found(NamedTuple):
    """What a look-up found, in leading blocks: on the device, then on the host, then in storage."""

    device: int
    host: int
    storage: int


class ReplayedCache:
    """The real tree, driven as `HiRadixCache` drives it, with copies that end at once.

    A block is a page of one token, its number. Page ids mean nothing here: no bytes are moved. A
    request is looked up, then inserted; then L1 is brought to its size. An L3 is a tree of its own
    whose leaves go first, like those of the page store.

    Attributes:
        tree: that of L1 and L2.
        num_written: blocks written from L1 to L2.
        num_unwritten: blocks that L2 had no room for.
        num_stored: blocks written to L3.
    """

    def __init__(self, options: CacheOptions) -> None:
        """Make an empty cache; a `ConfigError` when there is no such policy."""
        self._options = options
        policy = create_policy(options.policy)
        has_store = options.storage_blocks != 0
        admission = options.storage_admission if has_store else None
        self._rule = write_rule_for(options.write_policy, admission)
        self.tree = RadixTree(1, create_policy=policy, cut_victims=True)
        if options.host_blocks != 0 and options.write_policy is WritePolicy.ADAPTIVE:
            self.tree.keep_history()
        self._store: RadixTree | None = None
        if options.storage_blocks != 0:
            self._store = RadixTree(1, create_policy=policy, cut_victims=True)
        self._pages: IntArray = _NO_PAGES
        self._match: MatchResult | None = None
        self.num_written = 0
        self.num_unwritten = 0
        self.num_stored = 0

    def look_up(self, key: RadixKey) -> Found:
        """Return what the tiers have of a request's blocks; `insert` has to follow."""
        self._match = match = self.tree.split_at(self.tree.match(key))
        num_stored = 0
        present = match.num_device_pages + match.num_host_pages
        if self._store is not None and present < len(key):
            num_stored = max(0, self._store.match(key).num_device_pages - present)
        return Found(match.num_device_pages, match.num_host_pages, num_stored)

    def fetch(self, key: RadixKey, num_blocks: int) -> int:
        """Bring blocks that the look-up found in storage to the host; return how many have room.

        They go below the deepest node of the match, which is written first if only the device has
        it, because host pages form prefixes.
        """
        assert self._match is not None
        tree, anchor = self.tree, self._match.last_host_node
        if num_blocks and not anchor.backed_or_in_flight:
            self._write(anchor)
        ticket = tree.begin_prefetch(anchor, num_blocks) if num_blocks else None
        if ticket is None:
            return 0
        num_good = min(num_blocks, self._room(num_blocks, Duplicates.FIRST))
        tree.commit_prefetch(ticket, key, self._page_ids(num_good), num_good)
        return num_good

    def insert(self, key: RadixKey) -> None:
        """Put the blocks of a request in, write what the policy says, bring L1 to its size."""
        node = self.tree.insert(key, self._page_ids(len(key))).node
        if self._options.host_blocks != 0:
            self._write_after_insert(node)
        self._evict_device()

    def _write_after_insert(self, node: RadixNode) -> None:
        due = self._rule.due(node)
        if self._options.write_policy is WritePolicy.WRITE_BEHIND:
            # Behind means at once here: between two requests the stream is idle.
            due = node
        if due is not None:
            node = due
            self._write(node)
        if node.host_pages is not None:
            self._persist(node)

    def _evict_device(self) -> None:
        capacity = self._options.device_blocks
        if capacity is None:
            return
        tree = self.tree
        while (excess := tree.residency.num_device_pages - capacity) > 0:
            result = tree.evict(
                excess,
                write_back=self._rule.on_eviction and self._options.host_blocks != 0,
                admission=self._rule.admission,
                # Each of them ends before the next victim is looked for.
                max_writes=1,
            )
            for ticket in result.writes:
                self._commit_write(ticket)
            if not result.writes and not len(result.freed):
                break

    def _write(self, node: RadixNode) -> None:
        """Write a node and what the host lacks above it."""
        ticket = self.tree.begin_write(node)
        if ticket is not None:
            self._commit_write(ticket)

    def _commit_write(self, ticket: Ticket) -> None:
        """Let a write end: all of it has arrived, or nothing when the host has no room for all."""
        num_pages = ticket.num_pages
        if self._room(num_pages, self._rule.duplicates) < num_pages:
            self.num_unwritten += num_pages
            self.tree.commit_write(ticket, _NO_PAGES, 0)
            return
        commit = self.tree.commit_write(ticket, self._page_ids(num_pages), num_pages)
        self.num_written += num_pages - len(commit.untaken_host)
        if commit.node is not None:
            self._persist(commit.node)

    def _room(self, num_pages: int, duplicates: Duplicates) -> int:
        """Evict host pages for `num_pages` if that many can be had at all; return what is free."""
        capacity = self._options.host_blocks
        if capacity is None:
            return num_pages
        residency = self.tree.residency
        missing = residency.num_host_pages + num_pages - capacity
        if missing > 0 and num_pages <= capacity:
            self.tree.evict_host(missing, duplicates=duplicates)
        return capacity - residency.num_host_pages

    def _persist(self, node: RadixNode) -> None:
        """Store a node, or what of its prefix may pass, and what storage lacks above it."""
        store = self._store
        if store is None or node.persisted:
            return
        takes_some = self._options.storage_admission is StorageAdmission.ADAPTIVE
        if takes_some and self._rule.admission is Admission.ALL:
            node = self.tree.keep_history().admit_to_storage(node)
        ticket = self.tree.begin_persist(node)
        if ticket is None:
            return
        self.tree.commit_persist(ticket, ticket.num_pages)
        path = b"".join(member.key for member in self.tree.path(node))
        key = RadixKey(np.frombuffer(path, dtype=np.int32))
        result = store.insert(key, self._page_ids(len(key)))
        self.num_stored += len(key) - result.already_present_pages
        capacity = self._options.storage_blocks
        if capacity is not None:
            excess = store.residency.num_device_pages - capacity
            if excess > 0:
                store.evict(excess)

    def _page_ids(self, num_pages: int) -> IntArray:
        if len(self._pages) < num_pages:
            self._pages = np.arange(2 * num_pages, dtype=np.int64)
        return self._pages[:num_pages]
