"""The shape of the tree: look-up, insertion, splitting, page hashes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.hashing import TOKEN_BYTES
from hicache.radix.eviction import LearningPolicy, LruPolicy
from hicache.radix.keyed_policies import MruPolicy
from hicache.radix.known_hashes import KnownHashes
from hicache.radix.node import RadixNode
from hicache.radix.records import InsertResult, MatchResult
from hicache.radix.residency import Residency
from hicache.radix.run_history import RunHistory
from hicache.types import NodeId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache.radix.eviction import EvictionPolicy
    from hicache.radix.key import RadixKey
    from hicache.types import IntArray, PageHash

__all__ = ["PrefixTree"]


class PrefixTree:
    """A radix tree over pages of tokens.

    Not thread-safe: one thread owns it. Costs: match is proportional to the bytes compared and the
    nodes passed, insert likewise plus the new pages.

    Args:
        page_size: tokens in a page.
        create_policy: makes an eviction queue; called for that of device pages and for that of sole
            copies.
        cut_victims: whether an eviction cuts the last run it takes, so that no more pages go than
            were asked for. Otherwise runs go whole, which keeps nodes few.

    Attributes:
        page_size: tokens in a page.
        root: has no bytes, is always locked and never evicted.
        residency: which tiers hold a node, locks, eviction queues.
        history: uses of runs, also of evicted ones; None when no policy learns from it, unless
            `keep_history` has asked for it.
        generation: counts resets; what belongs to an older one is void.
        known_hashes: saves hashing pages again that were hashed to be looked up in storage.
    """

    def __init__(
        self,
        page_size: int,
        *,
        create_policy: Callable[[], EvictionPolicy] = LruPolicy,
        cut_victims: bool = False,
    ) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1 token, not {page_size}")
        self.page_size = page_size
        self.generation = 0
        self.known_hashes = KnownHashes(page_size)
        self._page_bytes = page_size * TOKEN_BYTES
        self._create_policy = create_policy
        self._cut_victims = cut_victims
        self._keeps_history = False
        self._next_node_id = 0
        self._clear()

    def _clear(self) -> None:
        self._tick = 0
        self.residency = Residency(self._create_policy, self._create_duplicates)
        self.history = self._begin_history()
        self.root = self._new_node(None, b"", b"", 0, 0)
        self.root.lock_ref = 1
        self.root.persisted, self.root.stored_at = True, math.inf

    def _create_duplicates(self) -> EvictionPolicy:
        """Make the queue of duplicates: what was used last stays on the device longest."""
        return MruPolicy()

    def _begin_history(self) -> RunHistory | None:
        learners = [queue for queue in self.residency.queues if isinstance(queue, LearningPolicy)]
        history = RunHistory() if learners or self._keeps_history else None
        for queue in learners:
            assert history is not None
            queue.learn_from(history)
        return history

    def keep_history(self) -> RunHistory:
        """Keep `history` from now on, after a `reset` as well, whatever the order of eviction.

        What is known of runs that are in the tree already is how often they were used.
        """
        self._keeps_history = True
        self.history = self.history or RunHistory()
        return self.history

    def match(self, key: RadixKey) -> MatchResult:
        """Return the longest cached prefix of `key` in whole pages.

        Changes nothing but recency, and that of whole runs: `split_at` makes one of a used part.
        Pages of an unfinished copy count as absent.
        """
        self._tick = tick = self._tick + 1
        data, step = key.data, self._page_bytes
        end = len(data) - len(data) % step
        root = node = device_node = self.root
        children = root.children
        page = key.namespace + data[:step] if key.namespace else data[:step]
        chunks: list[IntArray] = []
        position = device_end = 0
        loading = False
        while children is not None and position < end:
            child = children.get(page)
            if child is None:
                break
            node = child
            run = node.key
            length = len(run)
            # A run of one page was compared by the look-up itself.
            whole = length == step or data.startswith(run, position)
            position += length if whole else self._common_bytes(run, data, position)
            if node.device_pages is not None:
                chunks.append(node.device_pages)
                device_node, device_end = node, position
            elif node.load_ticket is not None:
                loading = True
            if not whole:
                break
            node.last_access = tick
            children = node.children
            page = data[position : position + step]
        if node.queued and node.last_access == tick:
            self.residency.touch(node)
        pages = device_end // step
        return MatchResult(device_node, node, pages, position // step - pages, loading, chunks)

    def split_at(self, match: MatchResult) -> MatchResult:
        """Split where `match` ends inside a node, so that its last node can be locked alone.

        `match` must be the newest result of this tree.
        """
        node = match.last_host_node
        end = match.num_device_pages + match.num_host_pages
        if node.end == end or node.parent is None:
            return match
        upper = self._split(node, end - node.start)
        upper.last_access = self._tick
        if match.last_device_node is node:
            return match._replace(last_device_node=upper, last_host_node=upper)
        return match._replace(last_host_node=upper)

    def node_ending_at(self, node: RadixNode, page: int) -> RadixNode:
        """Return the node on the path of `node` that ends at `page`, cut there if need be.

        Args:
            node: whose run ends at `page` or behind it.
            page: counted from the root, at least 1.
        """
        while node.start >= page:
            assert node.parent is not None
            node = node.parent
        return node if node.end == page else self._split(node, page - node.start)

    def insert(
        self, key: RadixKey, device_pages: IntArray, *, count_from_page: int = 0
    ) -> InsertResult:
        """Give the tree the caller's device pages for the full pages of `key`.

        `InsertResult` says who owns which page afterwards. Evicted nodes on the path adopt the
        caller's pages; insertion stops before a node whose load is in flight, because the pages
        being loaded are in somebody's page table.

        Args:
            key: tokens; a tail below a page is ignored.
            device_pages: page ids, at least one per full page; copied.
            count_from_page: runs that start at or after this page get a hit; the others were
                counted for the same request already.
        """
        self._tick = tick = self._tick + 1
        data, step = key.data, self._page_bytes
        end = len(data) - len(data) % step
        if len(device_pages) * step < end:
            raise ConfigError(f"{key!r} has {end // step} pages, got {len(device_pages)} page ids")
        self._begin_request(end // step - count_from_page)
        node, present, position = self.root, [], 0
        page = key.namespace + data[:step] if key.namespace else data[:step]
        adopted = False
        while position < end:
            child = node.children.get(page) if node.children is not None else None
            if child is None:
                run = data[position:end]
                node = self._add_runs(node, page, key.namespace, run, device_pages)
                break
            if child.load_ticket is not None:
                break
            if len(child.key) != step and not data.startswith(child.key, position):
                common = self._common_bytes(child.key, data[:end], position)
                child = self._split(child, common // step)
            child.last_access = tick
            if child.start >= count_from_page:
                self._count_use(child)
            if child.device_pages is None:
                adopted = True
                self.residency.gain_device(child, device_pages[child.start : child.end].copy())
            elif not adopted:
                present.append(child.device_pages)
            node = child
            position += len(child.key)
            page = data[position : position + step]
        if node.queued:
            self.residency.touch(node)
        return InsertResult(sum(map(len, present)), node.end, node, present)

    def path(self, node: RadixNode, first_page: int = 0) -> list[RadixNode]:
        """Return the nodes from `first_page` (a node's start) to `node`, without the root."""
        nodes = []
        current: RadixNode | None = node
        while current is not None and current.parent is not None and current.start >= first_page:
            nodes.append(current)
            current = current.parent
        nodes.reverse()
        return nodes

    def page_hashes(self, node: RadixNode) -> list[PageHash]:
        """Return the chained hash of each page of `node`; computed once, where first needed."""
        missing = []
        current = node
        while current.page_hashes is None and current.parent is not None:
            missing.append(current)
            current = current.parent
        for current in reversed(missing):
            prior = self.prior_hash(current)
            current.page_hashes = self.known_hashes.hash_run(prior, current.key)
        return node.page_hashes or []

    def prior_hash(self, node: RadixNode) -> bytes:
        """Return the hash of the page before `node`, or its namespace's seed at the start."""
        parent = node.parent
        if parent is None or parent.parent is None:
            return node.namespace
        return self.page_hashes(parent)[-1]

    def nodes(self) -> Iterator[RadixNode]:
        """Return every node but the root, parents first."""
        stack = list((self.root.children or {}).values())
        while stack:
            node = stack.pop()
            yield node
            if node.children:
                stack.extend(node.children.values())

    def _new_node(
        self, parent: RadixNode | None, key: bytes, namespace: bytes, start: int, end: int
    ) -> RadixNode:
        node = RadixNode(NodeId(self._next_node_id), parent, key, namespace, start, end)
        self._next_node_id += 1
        return node

    def _begin_request(self, num_pages: int) -> None:
        if self.history is not None:
            self.history.statistics.begin_request(num_pages)

    def _count_use(self, node: RadixNode) -> None:
        if self.history is not None:
            self.history.use(node)
        node.hit_count += 1

    def _add_runs(
        self, node: RadixNode, page: bytes, namespace: bytes, run: bytes, device_pages: IntArray
    ) -> RadixNode:
        """Add all of `run` below `node`, with its device pages; return the last new node."""
        while run:
            node = self._add_child(node, page, namespace, run)
            self._count_use(node)
            self.residency.gain_device(node, device_pages[node.start : node.end].copy())
            run = run[len(node.key) :]
            page = run[: self._page_bytes]
        return node

    def _add_child(self, parent: RadixNode, page: bytes, namespace: bytes, run: bytes) -> RadixNode:
        """Add a node for `run`, or for its beginning when a part of it has a past of its own."""
        end = parent.end + len(run) // self._page_bytes
        node = self._new_node(parent, run, namespace, parent.end, end)
        node.created = node.last_access = self._tick
        past_pages = self.history and self.history.recall(node, parent, page)
        if past_pages and past_pages < node.num_pages:
            node.key = run = run[: past_pages * self._page_bytes]
            node.end = parent.end + past_pages
        if parent.children is None:
            parent.children = {}
        # A run of one page serves as its own dictionary key: one object instead of two.
        parent.children[run if page == run else page] = node
        return node

    def _child_key(self, node: RadixNode) -> bytes:
        """Return the bytes under which the parent files `node`."""
        page = node.key[: self._page_bytes]
        return node.namespace + page if node.start == 0 else page

    def _remove(self, node: RadixNode) -> None:
        """Take `node`, which has no bytes, children, locks or tickets, out of the tree."""
        assert not node.children
        assert not node.lock_ref
        assert not node.host_lock_ref
        assert not node.tickets
        parent, slot = node.parent, self._child_key(node)
        assert parent is not None
        assert parent.children is not None
        if self.history is not None:
            self.history.remember(node, parent, slot)
        del parent.children[slot]
        if not parent.children:
            parent.children = None
        node.parent = None

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Cut `node` after `num_pages` pages and return the new upper half.

        The lower half keeps the identity, so locks, tickets and queue entries stay where they are.
        """
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        assert 0 < num_pages < node.num_pages
        cut = num_pages * self._page_bytes
        middle = node.start + num_pages
        slot = self._child_key(node)
        upper = self._new_node(parent, node.key[:cut], node.namespace, node.start, middle)
        parent.children[slot] = upper
        node.key, node.start, node.parent = node.key[cut:], middle, upper
        upper.children = {node.key[: self._page_bytes]: node}
        # Copies, because views would keep the whole run's array alive when one half goes.
        if node.device_pages is not None:
            upper.device_pages = node.device_pages[:num_pages].copy()
            node.device_pages = node.device_pages[num_pages:].copy()
            upper.device_children = 1
        if node.host_pages is not None:
            upper.host_pages = node.host_pages[:num_pages].copy()
            node.host_pages = node.host_pages[num_pages:].copy()
        if node.backed_or_in_flight:
            upper.host_children = 1
        if node.page_hashes is not None:
            upper.page_hashes = node.page_hashes[:num_pages]
            node.page_hashes = node.page_hashes[num_pages:]
        upper.lock_ref = 1 if node.lock_ref else 0
        upper.created, upper.last_access = node.created, node.last_access
        upper.hit_count, upper.past_hits = node.hit_count, node.past_hits
        upper.last_use = node.last_use
        upper.priority, upper.pinned_until = node.priority, node.pinned_until
        upper.persisted, upper.stored_at = node.persisted, node.stored_at
        upper.write_ticket, upper.load_ticket = node.write_ticket, node.load_ticket
        upper.persist_ticket = node.persist_ticket
        return upper

    def _common_bytes(self, run: bytes, data: bytes, position: int) -> int:
        """Return how many bytes of whole pages `run` and `data` from `position` on share.

        Bisects with compares of halves, so the bytes looked at are proportional to the answer.
        """
        step = self._page_bytes
        low, high = 0, min(len(run), len(data) - position) // step
        while low < high:
            middle = (low + high + 1) // 2
            if data.startswith(run[low * step : middle * step], position + low * step):
                low = middle
            else:
                high = middle - 1
        return low * step
