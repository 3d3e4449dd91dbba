"""Naive models of eviction queues, and a driver that compares a policy with one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hicache.radix import RadixNode
from hicache.types import NodeId

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.radix import EvictionPolicy


def make_node(node_id: int, *, num_pages: int = 1, tick: int = 0) -> RadixNode:
    """Return a leaf that came in at `tick`, below a parent of its own."""
    root = RadixNode(NodeId(0), None, b"", b"", 0, 0)
    key = node_id.to_bytes(4, "little") * num_pages
    node = RadixNode(NodeId(node_id), root, key, b"", 0, num_pages)
    node.created = node.last_access = tick
    node.hit_count = 1
    return node


class QueueDriver:
    """Random use of a queue; the oracle sorts all of it each time a node is popped."""

    def __init__(self, policy: EvictionPolicy, seed: int) -> None:
        self.rng = random.Random(seed)
        self.policy = policy
        self.queued: list[RadixNode] = []
        self.away: list[RadixNode] = []
        self.tick = 0
        self.next_id = 1

    def step(self) -> None:
        """Do one random thing to the queue."""
        self.tick += self.rng.choice([0, 1, 1, 2])
        rng = self.rng
        rng.choice([self.add_new, self.add_new, self.take, self.put_back, self.use, self.use])()
        assert len(self.policy) == len(self.queued)
        assert set(self.policy) == set(self.queued)

    def add_new(self) -> None:
        node = make_node(self.next_id, num_pages=self.rng.randrange(1, 4), tick=self.tick)
        self.next_id += 1
        self.policy.add(node)
        self.queued.append(node)

    def take(self) -> None:
        if self.queued:
            node = self.queued.pop(self.rng.randrange(len(self.queued)))
            self.policy.discard(node)
            self.away.append(node)

    def put_back(self) -> None:
        if self.away:
            node = self.away.pop(self.rng.randrange(len(self.away)))
            self.policy.add(node)
            self.queued.append(node)

    def use(self) -> None:
        if self.queued:
            node = self.rng.choice(self.queued)
            node.last_access = self.tick
            node.hit_count += 1
            self.policy.touch(node)

    def pop(self, key: Callable[[RadixNode], tuple[int, ...]]) -> None:
        """Pop one node and compare it with the one that has the smallest `key`."""
        node = self.policy.pop()
        if not self.queued:
            assert node is None
            return
        assert node is not None
        assert key(node) == min(map(key, self.queued))
        self.queued.remove(node)
