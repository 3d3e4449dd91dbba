"""Bugs to be put into production code, each by one change at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.controller import LocalMover
from hicache.hiradix_cache.prefetching import Prefetcher
from hicache.radix import RadixTree

if TYPE_CHECKING:
    import pytest

    from hicache.controller.agreement import Finished
    from hicache.controller.records import WriteJob
    from hicache.radix import CopyKind, RadixNode, Ticket
    from hicache.types import IntArray


def ack_writes_before_they_ran(patch: pytest.MonkeyPatch) -> None:
    submit_write = LocalMover.submit_write

    def mutated(mover: LocalMover, job: WriteJob) -> None:
        submit_write(mover, job)
        too_early = mover._device.create_event()
        mover._device.compute_stream().record(too_early)
        mover._writes[-1].finished = too_early

    patch.setattr(LocalMover, "submit_write", mutated)


def forget_memory_of_ended_prefetches(patch: pytest.MonkeyPatch) -> None:
    advance = Prefetcher.advance

    def mutated(prefetcher: Prefetcher, finished: Finished, *, now: float) -> None:
        released = [one for one in finished.released if not one.terminated]
        advance(prefetcher, finished._replace(released=released), now=now)

    patch.setattr(Prefetcher, "advance", mutated)


def split_one_page_too_late(patch: pytest.MonkeyPatch) -> None:
    split = RadixTree._split

    def mutated(tree: RadixTree, node: RadixNode, num_pages: int) -> RadixNode:
        pages = node.device_pages
        upper = split(tree, node, num_pages)
        if pages is not None:
            upper.device_pages = pages[1 : num_pages + 1].copy()
            node.device_pages = np.concatenate([pages[:1], pages[num_pages + 1 :]])
        return upper

    patch.setattr(RadixTree, "_split", mutated)


def publish_results_from_before_a_reset(patch: pytest.MonkeyPatch) -> None:
    begin = RadixTree._open
    node_of: dict[Ticket, RadixNode] = {}

    def remember(
        tree: RadixTree, kind: CopyKind, node: RadixNode, first_page: int, last_page: int
    ) -> Ticket:
        ticket = begin(tree, kind, node, first_page, last_page)
        node_of[ticket] = node
        return ticket

    def mutated(tree: RadixTree, ticket: Ticket) -> RadixNode | None:
        tree._ticketed.pop(ticket, None)
        return node_of[ticket]

    patch.setattr(RadixTree, "_open", remember)
    patch.setattr(RadixTree, "_close", mutated)


def keep_the_lock_of_failed_loads(patch: pytest.MonkeyPatch) -> None:
    commit_load = RadixTree.commit_load

    def mutated(tree: RadixTree, ticket: Ticket, device_pages: IntArray, num_good: int) -> IntArray:
        node = tree._ticketed.get(ticket)
        untaken = commit_load(tree, ticket, device_pages, num_good)
        if node is not None and not num_good:
            tree.residency.lock(node)
        return untaken

    patch.setattr(RadixTree, "commit_load", mutated)
