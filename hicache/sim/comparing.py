"""What must be equal on all ranks, though what has happened to them is not."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, TypeAlias

from hicache.sim.request import NO_PRODUCER

if TYPE_CHECKING:
    from hicache.controller import AttachmentState, PrefetchOperation
    from hicache.radix import RadixNode, Ticket
    from hicache.sim.ranks import Rank
    from hicache.sim.request import Request

__all__ = ["differences"]

_View: TypeAlias = "dict[str, object]"


def differences(ranks: list[Rank]) -> list[str]:
    """Return in what ranks differ from the first; O(nodes).

    Everything that a later decision depends on: the trees with tiers, locks, counts of hits and the
    order of use, free pages that can be had, what is in flight, counters, whether there is a store,
    and what the scheduler believes of its requests. Bytes, measured times and how far a copy or a
    call has come are each rank's own, and so are page ids unless ranks share the pages.
    """
    first, *others = ranks
    expected = _view(first)
    return [
        f"ranks {first.number} and {other.number} differ in {what}: {here} and {there}"
        for other in others
        for what, here, there in _unequal(expected, _view(other))
    ]


def _unequal(expected: _View, found: _View) -> list[tuple[str, object, object]]:
    unequal = []
    for what, here in expected.items():
        there = found[what]
        if isinstance(here, list) and isinstance(there, list):
            pairs = zip_longest(here, there)
            unequal += [(what, one, other) for one, other in pairs if one != other][:1]
        elif here != there:
            unequal.append((what, here, there))
    return unequal


def _view(rank: Rank) -> _View:
    cache, scheduler = rank.system.cache, rank.scheduler
    controller, counters = cache.controller, dict(cache.counters)
    shares = rank.system.options.shares_pages
    state: AttachmentState | None = controller.storage_state
    if cache.ranks_lost:
        # Each closes its own store, when no call hangs there any more.
        state = None
        counters.pop("prefetch_store_detaching", None)
    return {
        "their trees": [_node_view(node) for node in cache.tree.nodes()],
        "shared pages": [_pages_view(node) for node in cache.tree.nodes()] if shares else [],
        "free device pages": controller.device_allocator.num_available,
        "free host pages": controller.host_allocator.num_available,
        "what is in flight": controller.in_flight,
        "prefetches": [_prefetch_view(one) for one in controller.store_queue.prefetches.values()],
        "counters": counters,
        "what reads are worth": dict(controller.costs.verdicts),
        "their stores": state,
        "requests": [_request_view(request) for request in scheduler.requests],
        "the pass": _pass_view(rank),
    }


def _node_view(node: RadixNode) -> tuple[object, ...]:
    return (
        node.id,
        node.parent and node.parent.id,
        node.key,
        node.namespace,
        node.device_pages is not None,
        node.host_pages is not None,
        node.lock_ref,
        node.host_lock_ref,
        node.hit_count,
        node.last_access,
        node.evict_tick,
        node.persisted,
        _pages(node.write_ticket),
        _pages(node.load_ticket),
        _pages(node.persist_ticket),
    )


def _pages_view(node: RadixNode) -> list[list[int] | None]:
    return [
        None if pages is None else pages.tolist() for pages in (node.device_pages, node.host_pages)
    ]


def _pages(ticket: Ticket | None) -> tuple[int, int] | None:
    return ticket and (ticket.first_page, ticket.num_pages)


def _prefetch_view(prefetch: PrefetchOperation) -> tuple[object, ...]:
    return (
        prefetch.operation_id,
        prefetch.request_id,
        prefetch.host_pages is not None and len(prefetch.host_pages),
        prefetch.request_wait,
        prefetch.terminated,
        prefetch.closed,
    )


def _request_view(request: Request) -> tuple[object, ...]:
    return (
        request.request_id,
        request.node and request.node.id,
        len(request.pages),
        request.num_tree_pages,
        request.num_computed_pages,
        request.load_first_page,
        request.producer != NO_PRODUCER,
        request.reserved_id is not None,
        request.computes,
    )


def _pass_view(rank: Rank) -> object:
    forward = rank.scheduler.forward
    if forward is None:
        return None
    chunks = [(one.request.request_id, one.first_page, one.last_page) for one in forward.chunks]
    return forward.num_layers_done, chunks
