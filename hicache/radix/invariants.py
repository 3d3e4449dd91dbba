"""What must always be true of a tree, checked by looking at every node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.hashing import TOKEN_BYTES, hash_pages
from hicache.radix.node import Queue
from hicache.radix.records import CopyKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.radix.node import RadixNode
    from hicache.radix.tree import RadixTree

__all__ = ["check_tree"]


def check_tree(tree: RadixTree) -> list[str]:
    """Return every contradiction in `tree`, one sentence each; an empty list means none.

    Reads everything and changes nothing; O(nodes + pages).
    """
    violations = list(_root(tree))
    owners: tuple[dict[int, RadixNode], dict[int, RadixNode]] = ({}, {})
    violations += [f"root: {text}" for text in _counters(tree, tree.root)]
    nodes = list(tree.nodes())
    for node in nodes:
        for check in (_shape, _tiers, _counters, _locks, _copies):
            violations += [f"{node}: {text}" for text in check(tree, node)]
        violations += [f"{node}: {text}" for text in _ownership(node, owners)]
    violations += _totals(tree, nodes)
    return violations


def _root(tree: RadixTree) -> Iterator[str]:
    if tree.root.lock_ref < 1:
        yield "the root is not locked"
    if tree.root.host_lock_ref < 0:
        yield "the root has a negative host lock"
    if tree.root.queued or tree.root.device_pages is not None or tree.root.host_pages is not None:
        yield "the root has pages or stands in an eviction queue"


def _shape(tree: RadixTree, node: RadixNode) -> Iterator[str]:
    page_bytes = tree.page_size * TOKEN_BYTES
    parent = node.parent
    if parent is None or parent.children is None:
        yield "has no parent that files it"
        return
    page = node.key[:page_bytes]
    slot = node.namespace + page if parent.parent is None else page
    if parent.children.get(slot) is not node:
        yield "is not filed under its first page"
    if node.start != parent.end or node.num_pages < 1:
        yield f"does not continue its parent, which ends at page {parent.end}"
    if len(node.key) != node.num_pages * page_bytes:
        yield f"has {len(node.key)} key bytes for {node.num_pages} pages"
    if parent.parent is not None and parent.namespace != node.namespace:
        yield "has another namespace than its parent"
    if node.children is not None and not node.children:
        yield "keeps an empty dictionary of children"
    if node.page_hashes is not None:
        prior = tree.prior_hash(node)
        if node.page_hashes != hash_pages(node.key, tree.page_size, prior):
            yield "has page hashes of other tokens"


def _tiers(tree: RadixTree, node: RadixNode) -> Iterator[str]:
    parent = node.parent
    assert parent is not None
    for name, pages in (("device", node.device_pages), ("host", node.host_pages)):
        if pages is not None and len(pages) != node.num_pages:
            yield f"has {len(pages)} {name} pages"
    if node.device_pages is None and node.host_pages is None:
        yield "has pages in no tier"
    if node.device_pages is not None and parent.evicted:
        yield "has device pages below an evicted parent"
    if node.host_pages is not None and not parent.backed:
        yield "has host pages below a parent without a finished host copy"
    if node.backed_or_in_flight and not parent.backed_or_in_flight:
        yield "is written below a parent that is not"
    if node.persisted and not parent.persisted:
        yield "is persisted below a parent that is not"


def _counters(tree: RadixTree, node: RadixNode) -> Iterator[str]:
    children = list((node.children or {}).values())
    if node.device_children != sum(child.device_pages is not None for child in children):
        yield f"counts {node.device_children} children with device pages"
    if node.host_children != sum(child.backed_or_in_flight for child in children):
        yield f"counts {node.host_children} children with host pages"
    if node.queued != tree.residency.wanted_queues(node):
        yield f"stands in queues {node.queued:03b} instead of its own"


def _locks(tree: RadixTree, node: RadixNode) -> Iterator[str]:
    parent = node.parent
    assert parent is not None
    if node.lock_ref < 0 or node.host_lock_ref < 0:
        yield f"has a negative lock ({node.lock_ref}, host {node.host_lock_ref})"
    if node.lock_ref and not parent.lock_ref:
        yield "is locked below an unlocked parent"
    locked_children = sum(child.lock_ref > 0 for child in (node.children or {}).values())
    own = [ticket for ticket in tree.open_tickets if ticket.node_id == node.id]
    copies = sum(ticket.kind in (CopyKind.WRITE, CopyKind.LOAD) for ticket in own)
    if node.lock_ref < locked_children + copies:
        yield f"has {node.lock_ref} locks for {locked_children} locked children + {copies} copies"
    reads = sum(ticket.kind != CopyKind.WRITE for ticket in own)
    if node.host_lock_ref < reads:
        yield f"has {node.host_lock_ref} host locks for {reads} copies that need it"


def _copies(tree: RadixTree, node: RadixNode) -> Iterator[str]:
    for ticket in node.tickets:
        if ticket not in tree.open_tickets:
            yield f"carries a ticket that is not open: {ticket}"
        if not ticket.first_page <= node.start < node.end <= ticket.last_page:
            yield f"lies outside the pages of its ticket: {ticket}"
    if node.write_ticket is not None and (node.device_pages is None or node.host_pages is not None):
        yield "is being written without device pages, or again"
    if node.load_ticket is not None and (node.device_pages is not None or node.host_pages is None):
        yield "is being loaded without host pages, or again"
    if node.persist_ticket is not None and node.host_pages is None:
        yield "is being persisted without host pages"
    if node.evict_tick and not any(ticket.node_id == node.id for ticket in tree.open_tickets):
        yield "waits to be evicted for a write that is not there"


def _ownership(
    node: RadixNode, owners: tuple[dict[int, RadixNode], dict[int, RadixNode]]
) -> Iterator[str]:
    for name, pages, owner_of in zip(
        ("device", "host"), (node.device_pages, node.host_pages), owners, strict=True
    ):
        for page in [] if pages is None else pages.tolist():
            other = owner_of.setdefault(page, node)
            if other is not node:
                yield f"shares {name} page {page} with {other}"


def _totals(tree: RadixTree, nodes: list[RadixNode]) -> Iterator[str]:
    residency = tree.residency
    resident = [node for node in nodes if node.device_pages is not None]
    expected = {
        "num_device_pages": sum(node.num_pages for node in resident),
        "num_locked_pages": sum(node.num_pages for node in resident if node.lock_ref),
        "num_host_pages": sum(node.num_pages for node in nodes if node.host_pages is not None),
    }
    for name, value in expected.items():
        if getattr(residency, name) != value:
            yield f"residency.{name} is {getattr(residency, name)}, the nodes have {value}"
    pending = sum(node.num_pages for node in nodes if node.evict_tick)
    if tree.num_pending_evict_pages != pending:
        yield f"{tree.num_pending_evict_pages} pages wait to be evicted, the nodes have {pending}"
    queues = {
        Queue.DEVICE: residency.device,
        Queue.DUPLICATE: residency.duplicates,
        Queue.SOLE: residency.soles,
    }
    for bit, queue in queues.items():
        if set(queue) != {node for node in nodes if node.queued & bit}:
            yield f"eviction queue {bit:03b} holds other nodes than those marked for it"
