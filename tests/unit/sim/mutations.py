"""Bugs to be put into production code, each by one change at run time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hicache.controller import LocalMover, agreement, storage_tier
from hicache.controller.layer_writes import LayerWrites
from hicache.controller.reservations import WriteReservations
from hicache.hiradix_cache.prefetching import Prefetcher
from hicache.radix import RadixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from hicache.controller.operations import HiCacheAck, PrefetchOperation
    from hicache.controller.records import WriteJob
    from hicache.controller.running_copy import RunningCopy
    from hicache.radix import CopyKind, RadixNode, Ticket
    from hicache.transfer import TransferPlan
    from hicache.types import IntArray, RequestId

T = TypeVar("T")


def ack_writes_before_they_ran(patch: pytest.MonkeyPatch) -> None:
    submit_write = LocalMover.submit_write

    def mutated(mover: LocalMover, job: WriteJob) -> None:
        submit_write(mover, job)
        too_early = mover._device.create_event()
        mover._device.compute_stream().record(too_early)
        mover._writes[-1].finished = too_early

    patch.setattr(LocalMover, "submit_write", mutated)


def forget_memory_of_ended_prefetches(patch: pytest.MonkeyPatch) -> None:
    release = Prefetcher.release

    def mutated(prefetcher: Prefetcher, operations: Sequence[PrefetchOperation]) -> None:
        release(prefetcher, [one for one in operations if not one.terminated])

    patch.setattr(Prefetcher, "release", mutated)


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


def use_what_was_reserved_for_other_pages(patch: pytest.MonkeyPatch) -> None:
    use = WriteReservations.use

    def mutated(
        reservations: WriteReservations,
        request_id: RequestId,
        device_pages: IntArray,
        *,
        ticket: Ticket,
        above: Ticket | None,
    ) -> bool:
        ack = reservations._open.get(request_id)
        if ack is not None:
            device_pages = ack.operations[0].device_pages
        return use(reservations, request_id, device_pages, ticket=ticket, above=above)

    patch.setattr(WriteReservations, "use", mutated)


def end_writes_that_are_still_reserved(patch: pytest.MonkeyPatch) -> None:
    def mutated(ack: HiCacheAck) -> int:
        return agreement._NOT_YET if ack.num_good is None else ack.num_good

    patch.setattr(agreement, "_copy_value", mutated)


def copy_layers_before_they_end(patch: pytest.MonkeyPatch) -> None:
    begin = LayerWrites.begin

    def mutated(writes: LayerWrites, copy: RunningCopy, plans: Sequence[TransferPlan]) -> None:
        begin(writes, copy, plans)
        writes.finish(copy.job.operation_id, wanted=True)

    patch.setattr(LayerWrites, "begin", mutated)


def take_the_first_result_for_ever(patch: pytest.MonkeyPatch) -> None:
    """An endless loop that collects what it takes."""

    class Sticky(deque[T]):
        def popleft(self) -> T:
            return self[0]

    patch.setattr(storage_tier, "deque", Sticky)
