"""What must be true of a simulated rank after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.radix import CopyKind
from hicache.sim.stamps import POISON_ROW
from hicache.testing.invariants import check_system

if TYPE_CHECKING:
    from hicache.radix import RadixNode
    from hicache.sim.scheduler import Scheduler
    from hicache.sim.stamps import PoolBytes
    from hicache.sim.system import System

__all__ = ["check_bytes", "check_ids"]


def check_ids(system: System, scheduler: Scheduler, *, num_other_locks: int = 0) -> list[str]:
    """Return what is wrong with pages as numbers: owners, locks, jobs; O(nodes + pages).

    Args:
        system: the rank.
        scheduler: its requests; each that runs holds a lock.
        num_other_locks: held by somebody else.
    """
    cache = system.cache
    tree = cache.tree
    violations = check_system(cache, request_device_pages=scheduler.own_pages())
    locks, running = tree.num_request_locks() - num_other_locks, len(scheduler.running)
    if locks != running:
        violations.append(f"{locks} request lock(s) are held for {running} running request(s)")
    host_locks = tree.root.host_lock_ref + sum(node.host_lock_ref for node in tree.nodes())
    readers = sum(ticket.kind is not CopyKind.WRITE for ticket in tree.open_tickets)
    if host_locks != readers:
        violations.append(f"{host_locks} host lock(s) are held for {readers} copies")
    reserved, reserving = len(cache.controller.reservations), len(scheduler.reserving)
    if reserved != reserving:
        violations.append(f"{reserved} write(s) are reserved for {reserving} request(s)")
    if cache.counters["ranks_diverged"]:
        violations.append("this rank believes that ranks have diverged")
    violations += _disordered_writes(system)
    return violations + system.mover.violations + system.store.violations


def check_bytes(system: System, scheduler: Scheduler) -> list[str]:
    """Return which pages hold other bytes than they have to.

    Pages of the tree and computed pages of requests hold their stamps; free pages, and pages of
    requests that are not computed yet, what they were poisoned with; pages of the pass under way
    one or the other, layer by layer. What a copy in flight writes
    to is nobody's to read. The memory of the host pool must be open.

    After the loss of a rank the host is not looked at: nothing there is ever used again, and copies
    and calls under way may still write to it.
    """
    violations = _wrong_in_pass(system, scheduler)
    device_pages, device_rows = scheduler.known_pages()
    host_pages: list[int] = []
    host_rows: list[int] = []
    data_of: dict[RadixNode, bytes] = {system.cache.tree.root: b""}
    for node in system.cache.tree.nodes():
        assert node.parent is not None
        data = data_of[node] = data_of[node.parent] + node.key
        rows = system.stamps.known_rows(node.namespace, data)
        if rows is None:
            violations.append(f"{node} has tokens that no request has")
            continue
        if node.device_pages is not None:
            device_pages += node.device_pages.tolist()
            device_rows += rows[node.start :]
        if node.host_pages is not None:
            host_pages += node.host_pages.tolist()
            host_rows += rows[node.start :]
    free_on_device, free_on_host = (pages.tolist() for pages in system.free_pages)
    for name, pool, pages, all_rows, free in (
        ("device", system.device_bytes, device_pages, device_rows, free_on_device),
        ("host", system.host_bytes, host_pages, host_rows, free_on_host),
    ):
        if name == "host" and system.cache.ranks_lost:
            continue
        violations += _wrong_pages(
            name, pool, pages + free, all_rows + [POISON_ROW] * len(free), len(pages)
        )
    return violations


def _disordered_writes(system: System) -> list[str]:
    """Return which nodes are written by nobody, or in vain because before their parents."""
    cache = system.cache
    place_of = {one.ticket: place for place, one in enumerate(cache.controller.writes.operations())}
    violations = []
    for node in cache.tree.nodes():
        ticket, above = node.write_ticket, node.parent and node.parent.write_ticket
        if ticket is not None and ticket not in place_of:
            violations.append(f"{node} is written by nobody")
        elif ticket and above and place_of[ticket] < place_of.get(above, 0):
            violations.append(f"{node} is written before its parent")
    return violations


def _wrong_in_pass(system: System, scheduler: Scheduler) -> list[str]:
    if scheduler.forward is None:
        return []
    return [
        f"device page {pages[place]} is in the pass and holds other bytes in layer {layer}"
        for layer, pages, rows in scheduler.forward.known_pages()
        for place in system.device_bytes.wrong(pages, rows, layer=layer)
    ]


def _wrong_pages(
    name: str, pool: PoolBytes, pages: list[int], rows: list[int], num_used: int
) -> list[str]:
    if len(pages) != len(rows):
        return [f"{len(pages)} {name} pages stand for {len(rows)} pages of tokens"]
    return [
        f"{name} page {pages[place]} is {'in use' if place < num_used else 'free'} and holds "
        "the bytes of something else"
        for place in pool.wrong(np.array(pages, dtype=np.int64), rows)
    ]
