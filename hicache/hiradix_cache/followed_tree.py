"""A tree that sums up in one number what it has gone through."""

from __future__ import annotations

import math
import struct
from enum import IntEnum, auto
from typing import TYPE_CHECKING

import xxhash

from hicache.radix import Admission, Duplicates, LearningPolicy, LruPolicy, RadixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache.radix import (
        EvictionPolicy,
        EvictResult,
        HostInsertResult,
        InsertResult,
        MatchResult,
        RadixKey,
        RadixNode,
        ResetResult,
        Ticket,
        WriteCommit,
    )
    from hicache.types import IntArray

__all__ = ["FollowedTree"]

_NONE = -1


class _Call(IntEnum):
    MATCH = auto()
    INSERT = auto()
    LOCK = auto()
    UNLOCK = auto()
    EVICT = auto()
    EVICT_HOST = auto()
    RESET = auto()
    FORGET_PERSISTED = auto()
    BEGIN = auto()
    COMMIT_WRITE = auto()
    COMMIT_LOAD = auto()
    COMMIT_PERSIST = auto()
    COMMIT_PREFETCH = auto()
    VICTIM = auto()
    PIN = auto()


class FollowedTree(RadixTree):
    """The tree of one of several ranks; `digest` is equal while the trees are.

    Every call that changes the tree, or in which order it evicts, is hashed with its arguments and
    its outcome into a running number: tokens of new runs, which nodes lose pages, tickets begun and
    ended, locks, and how many pages each tier has. Page ids are left out: those are a rank's own.
    Costs in proportion to what a call changes; nothing walks over the tree.

    Attributes:
        digest: of all calls so far; not negative.
    """

    def __init__(
        self, page_size: int, *, create_policy: Callable[[], EvictionPolicy] = LruPolicy
    ) -> None:
        self.digest = 0
        super().__init__(
            page_size, create_policy=lambda: _FollowedPolicy(create_policy(), self._follow)
        )

    def _create_duplicates(self) -> EvictionPolicy:
        return _FollowedPolicy(super()._create_duplicates(), self._follow)

    def match(self, key: RadixKey) -> MatchResult:
        """See `PrefixTree.match`."""
        found = super().match(key)
        self._follow(
            _Call.MATCH, found.last_host_node.id, found.num_device_pages, found.num_host_pages
        )
        return found

    def insert(
        self, key: RadixKey, device_pages: IntArray, *, count_from_page: int = 0
    ) -> InsertResult:
        """See `PrefixTree.insert`."""
        result = super().insert(key, device_pages, count_from_page=count_from_page)
        node = result.node
        # What is new of `key` ends with this node and begins after the runs that were found.
        step = len(node.key) // max(node.num_pages, 1)
        new = key.data[result.already_present_pages * step : result.end_page * step]
        run = xxhash.xxh3_64_intdigest(node.namespace + new) >> 1
        self._follow(_Call.INSERT, node.id, result.end_page, result.already_present_pages, run)
        return result

    def lock(self, node: RadixNode) -> None:
        """See `RadixTree.lock`."""
        super().lock(node)
        self._follow(_Call.LOCK, node.id, node.lock_ref)

    def unlock(self, node: RadixNode) -> None:
        """See `RadixTree.unlock`."""
        super().unlock(node)
        self._follow(_Call.UNLOCK, node.id, node.lock_ref)

    def pin(self, node: RadixNode, until: float) -> None:
        """See `RadixTree.pin`."""
        super().pin(node, until)
        self._follow(_Call.PIN, node.id, round(until * 10**6))

    def unpin(self, node: RadixNode) -> None:
        """See `RadixTree.unpin`."""
        super().unpin(node)
        self._follow(_Call.PIN, node.id, _NONE)

    def evict(
        self,
        num_pages: int,
        *,
        write_back: bool = False,
        admission: Admission = Admission.ALL,
        max_writes: int | None = None,
    ) -> EvictResult:
        """See `RadixTree.evict`."""
        result = super().evict(
            num_pages, write_back=write_back, admission=admission, max_writes=max_writes
        )
        self._follow(_Call.EVICT, len(result.freed), result.num_pending, len(result.writes))
        return result

    def evict_host(self, num_pages: int, *, duplicates: Duplicates = Duplicates.FIRST) -> IntArray:
        """See `RadixTree.evict_host`."""
        freed = super().evict_host(num_pages, duplicates=duplicates)
        self._follow(_Call.EVICT_HOST, len(freed))
        return freed

    def reset(self) -> ResetResult:
        """See `RadixTree.reset`."""
        result = super().reset()
        self._follow(_Call.RESET, self.generation, len(result.held))
        return result

    def forget_persisted(self) -> None:
        """See `RadixTree.forget_persisted`."""
        super().forget_persisted()
        self._follow(_Call.FORGET_PERSISTED)

    def begin_write(self, node: RadixNode) -> Ticket | None:
        """See `CopyingTree.begin_write`."""
        return self._begun(super().begin_write(node))

    def begin_load(self, node: RadixNode) -> Ticket | None:
        """See `CopyingTree.begin_load`."""
        return self._begun(super().begin_load(node))

    def begin_persist(self, node: RadixNode, *, since: float = -math.inf) -> Ticket | None:
        """See `CopyingTree.begin_persist`."""
        return self._begun(super().begin_persist(node, since=since))

    def begin_prefetch(self, anchor: RadixNode, num_pages: int) -> Ticket | None:
        """See `CopyingTree.begin_prefetch`."""
        return self._begun(super().begin_prefetch(anchor, num_pages))

    def commit_write(self, ticket: Ticket, host_pages: IntArray, num_good: int) -> WriteCommit:
        """See `CopyingTree.commit_write`."""
        commit = super().commit_write(ticket, host_pages, num_good)
        self._follow(_Call.COMMIT_WRITE, ticket.serial, num_good, len(commit.untaken_host))
        return commit

    def commit_load(self, ticket: Ticket, device_pages: IntArray, num_good: int) -> IntArray:
        """See `CopyingTree.commit_load`."""
        untaken = super().commit_load(ticket, device_pages, num_good)
        self._follow(_Call.COMMIT_LOAD, ticket.serial, num_good, len(untaken))
        return untaken

    def commit_persist(self, ticket: Ticket, num_good: int, *, now: float = 0.0) -> None:
        """See `CopyingTree.commit_persist`."""
        super().commit_persist(ticket, num_good, now=now)
        self._follow(_Call.COMMIT_PERSIST, ticket.serial, num_good)

    def commit_prefetch(
        self,
        ticket: Ticket,
        key: RadixKey,
        host_pages: IntArray,
        num_good: int,
        *,
        now: float = 0.0,
    ) -> HostInsertResult:
        """See `CopyingTree.commit_prefetch`."""
        result = super().commit_prefetch(ticket, key, host_pages, num_good, now=now)
        self._follow(
            _Call.COMMIT_PREFETCH, ticket.serial, num_good, len(result.untaken), result.node.id
        )
        return result

    def _begun(self, ticket: Ticket | None) -> Ticket | None:
        if ticket is None:
            self._follow(_Call.BEGIN, _NONE)
        else:
            self._follow(
                _Call.BEGIN, ticket.serial, ticket.node_id, ticket.first_page, ticket.last_page
            )
        return ticket

    def _follow(self, call: _Call, *outcome: int) -> None:
        held = self.residency
        words = (
            self.digest,
            call,
            held.num_device_pages,
            held.num_host_pages,
            held.num_locked_pages,
            *outcome,
        )
        packed = struct.pack(f"<{len(words)}q", *words)
        self.digest = xxhash.xxh3_64_intdigest(packed) >> 1


class _FollowedPolicy:
    """An eviction policy whose victims are followed."""

    def __init__(self, policy: EvictionPolicy, follow: Callable[..., None]) -> None:
        self._policy = policy
        self._follow = follow
        self.add, self.discard, self.touch = policy.add, policy.discard, policy.touch
        if isinstance(policy, LearningPolicy):
            self.learn_from = policy.learn_from

    def pop(self) -> RadixNode | None:
        """See `EvictionPolicy.pop`."""
        node = self._policy.pop()
        self._follow(_Call.VICTIM, _NONE if node is None else node.id)
        return node

    def __len__(self) -> int:
        return len(self._policy)

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._policy)
