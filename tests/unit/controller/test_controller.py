"""The controller against a moving side that does only what the test says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicache.config import HiCacheConfig, PrefetchConfig, StorageConfig
from hicache.controller import HiCacheController
from hicache.controller.controller import _MAX_MERGED_WRITES, _MAX_WRITES_IN_FLIGHT
from hicache.controller.records import (
    CopyResult,
    LoadJob,
    PagesResult,
    PersistJob,
    Phase,
    PrefetchJob,
    QueryJob,
    QueryResult,
    StorageReport,
    WriteJob,
)
from hicache.pools import PageAllocator
from hicache.radix import CopyKind, RadixKey, RadixTree, Ticket
from hicache.ranks import SingleRank
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from hicache.controller import PrefetchOperation, StorageOperation
    from hicache.controller.agreement import Finished
    from hicache.controller.records import Job, Result, StorageJob
    from hicache.types import IntArray, OperationId

STORAGE = StorageConfig(
    backend="any", model_name="m", weights_revision="1", max_inflight_persist_operations=2
)
HASHES = [PageHash(bytes([index]) * 32) for index in range(4)]
FAILED, OK = PageOutcome.FAILED, PageOutcome.OK


class RecordingMover:
    """Keeps jobs; `results` is what the next `poll` gives."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.ended: list[OperationId] = []
        self.finished_writes: list[tuple[OperationId, bool]] = []
        self.results: list[Result] = []
        self.next_producer = 0
        self.batch_pages = 128

    def submit_write(self, job: WriteJob) -> None:
        self.jobs.append(job)

    def finish_write(self, operation_id: OperationId, *, wanted: bool) -> None:
        self.finished_writes.append((operation_id, wanted))

    def submit_load(self, job: LoadJob) -> int:
        if self.next_producer >= 0:
            self.jobs.append(job)
        return self.next_producer

    def submit_storage(self, job: StorageJob) -> None:
        self.jobs.append(job)

    def end(self, operation_id: OperationId) -> None:
        self.ended.append(operation_id)

    def poll(self) -> list[Result]:
        results, self.results = self.results, []
        return results

    def attach_storage(self, config: StorageConfig) -> int:
        return self.batch_pages

    def detach_storage(self, timeout_seconds: float) -> bool:
        return True

    def discard_storage(self) -> None:
        pass

    def clear_storage(self) -> int:
        return 0

    def storage_report(self) -> StorageReport:
        return StorageReport()

    def close(self, timeout_seconds: float) -> bool:
        return True

    def finish(self, number: int = -1, *, good: bool = True) -> None:
        """Let a job, a copy, come to its end: by default the one submitted last."""
        job = self.jobs[number]
        self.results.append(
            CopyResult(
                operation_id=job.operation_id,
                generation=job.generation,
                good=good,
                num_pages=int(good),
                num_bytes=100,
                seconds=0.5,
            )
        )


class Bench:
    """A controller over 8 device pages and 8 host pages."""

    def __init__(self, *, prefetch: PrefetchConfig | None = None) -> None:
        self.mover = RecordingMover()
        self.device, self.host = PageAllocator(8), PageAllocator(8)
        self.tree = RadixTree(4)
        self.controller = HiCacheController(
            HiCacheConfig(page_size=4, storage=STORAGE, prefetch=prefetch or PrefetchConfig()),
            device_allocator=self.device,
            host_allocator=self.host,
            mover=self.mover,
            ranks=SingleRank(),
        )

    def ticket(self) -> Ticket:
        ticket = self.tree.begin_prefetch(self.tree.root, 4)
        assert ticket is not None
        return ticket

    def prefetch(self) -> PrefetchOperation:
        return self.controller.store_queue.prefetch(
            "r",
            key=RadixKey([]),
            anchor=self.tree.root,
            ticket=self.ticket(),
            hashes=HASHES,
            parent_hash=b"",
        )

    def persist(self) -> StorageOperation | None:
        return self.controller.store_queue.persist(
            pages(0),
            ticket=self.ticket(),
            hashes=HASHES[:1],
            parent_hash=b"",
            max_operations=STORAGE.max_inflight_persist_operations,
        )

    def collect(self) -> Finished:
        """Take all that has ended."""
        finished = self.controller.collect()
        self.controller.take(finished)
        return finished

    def pages_result(self, operation: OperationId, num_good: int, phase: Phase) -> None:
        self.mover.results.append(
            PagesResult(
                operation_id=operation,
                generation=0,
                phase=phase,
                num_good=num_good,
                outcomes=((OK, num_good), (FAILED, 1)),
                num_bytes=num_good * 10,
                seconds=0.25,
            )
        )


def pages(*ids: int) -> IntArray:
    return np.array(ids, dtype=np.int64)


def test_writes_queued_together_are_one_job_in_the_order_of_their_priorities() -> None:
    bench = Bench()
    for first, priority in ((0, None), (1, 5), (2, 3), (3, None)):
        assert bench.controller.write(pages(first), priority=priority) is not None
    bench.controller.start_writing()
    bench.controller.start_writing()
    (job,) = bench.mover.jobs
    assert isinstance(job, WriteJob)
    assert job.device_pages.tolist() == [2, 1, 0, 3]
    assert job.host_pages.tolist() == [2, 1, 0, 3]
    assert job.node_ids == (-1, -1, -1, -1)
    bench.mover.finish()
    ((ack, good),) = bench.collect().writes
    assert (len(ack.operations), good) == (4, 1)
    assert bench.controller.num_in_flight == 0


def test_a_copy_that_finds_no_pages_is_not_queued() -> None:
    bench = Bench()
    assert bench.controller.write(pages(*range(8))) is not None
    assert bench.controller.write(pages(0)) is None
    assert bench.controller.load(pages(*range(8))) is not None
    assert bench.controller.load(pages(0)) is None
    assert bench.controller.load(pages(0), device_pages=pages(3)) is not None
    assert bench.controller.num_in_flight == 3


def test_copies_own_their_target_pages_until_they_have_ended() -> None:
    bench = Bench()
    bench.controller.write(pages(7, 6))
    bench.controller.load(pages(5))
    assert [[p.tolist() for p in side] for side in bench.controller.owned_pages()] == [
        [[0]],
        [[0, 1]],
    ]
    bench.controller.start_writing()
    bench.mover.finish()
    assert len(bench.controller.owned_pages()[1]) == 1
    bench.collect()
    assert bench.controller.owned_pages()[1] == []


def test_jobs_on_the_write_stream_are_bounded_and_what_waits_is_merged() -> None:
    bench = Bench()
    bench.controller.host_allocator = PageAllocator(1000)
    for _ in range(_MAX_WRITES_IN_FLIGHT + 10):
        bench.controller.write(pages(0))
        bench.controller.start_writing()
    assert len(bench.mover.jobs) == _MAX_WRITES_IN_FLIGHT
    assert bench.controller.num_in_flight == _MAX_WRITES_IN_FLIGHT + 10
    bench.mover.results.append(
        CopyResult(operation_id=0, generation=0, good=True, num_pages=0, num_bytes=0, seconds=0.0)  # type: ignore[arg-type]
    )
    bench.collect()
    bench.controller.start_writing()
    last = bench.mover.jobs[-1]
    assert isinstance(last, WriteJob)
    assert len(last.device_pages) == 10


def test_a_job_carries_no_more_writes_than_a_step_publishes_at_once() -> None:
    bench = Bench()
    bench.controller.host_allocator = PageAllocator(1000)
    num_writes = 2 * _MAX_MERGED_WRITES + 3
    for number in range(num_writes):
        bench.controller.write(pages(number), priority=num_writes - number)
    bench.controller.start_writing()
    sources = [job.device_pages.tolist() for job in bench.mover.jobs if isinstance(job, WriteJob)]
    assert [len(one) for one in sources] == [_MAX_MERGED_WRITES, _MAX_MERGED_WRITES, 3]
    assert [page for one in sources for page in one] == list(range(num_writes))[::-1]
    for number in range(len(sources)):
        bench.mover.finish(number)
    assert sum(len(ack.operations) for ack, _ in bench.collect().writes) == num_writes
    assert bench.controller.num_in_flight == 0


def test_a_load_stays_queued_while_the_moving_side_has_no_slot() -> None:
    bench = Bench()
    assert bench.controller.start_loading() == -1
    bench.controller.load(pages(0))
    bench.mover.next_producer = -1
    assert bench.controller.start_loading() == -1
    assert bench.controller.num_in_flight == 1
    bench.mover.next_producer = 3
    assert bench.controller.start_loading() == 3
    bench.mover.finish(good=False)
    assert [good for _, good in bench.controller.collect().loads] == [0]


def test_one_slot_is_left_to_the_batch_that_runs() -> None:
    bench = Bench()
    for _ in range(4):
        assert bench.controller.can_start_loading
        bench.controller.load(pages(0))
        bench.controller.start_loading()
    assert not bench.controller.can_start_loading


def test_copies_that_no_job_carries_can_be_dropped() -> None:
    bench = Bench()
    bench.controller.write(pages(0))
    bench.controller.start_writing()
    write, load = bench.controller.write(pages(1)), bench.controller.load(pages(2))
    assert bench.controller.drop_queued() == [write, load]
    assert bench.controller.num_in_flight == 1


def test_a_prefetch_owns_its_pages_from_the_start_of_the_read_until_they_are_released() -> None:
    bench = Bench()
    operation = bench.prefetch()
    query = bench.mover.jobs[-1]
    assert isinstance(query, QueryJob)
    assert query.hashes == tuple(HASHES)
    bench.mover.results.append(
        QueryResult(
            operation_id=query.operation_id,
            generation=0,
            phase=Phase.ENDED,
            num_pages=3,
            seconds=0.0,
        )
    )
    assert bench.controller.collect().queries == [(operation, 3)]
    bench.controller.store_queue.start_prefetch(operation, pages(4, 2, 6))
    read = bench.mover.jobs[-1]
    assert isinstance(read, PrefetchJob)
    assert (read.operation_id, read.hashes) == (query.operation_id, tuple(HASHES[:3]))
    assert bench.controller.num_prefetch_pages == 3
    bench.pages_result(read.operation_id, 2, Phase.RUNNING)
    assert bench.controller.collect().prefetches == []
    bench.controller.store_queue.terminate_prefetch(operation)
    assert bench.mover.ended == [read.operation_id]
    assert bench.controller.collect().prefetches == [(operation, 2)]
    bench.controller.store_queue.close_prefetch(operation, pages(6))
    assert bench.controller.collect().released == []
    assert [p.tolist() for p in bench.controller.owned_pages()[1]] == [[6]]
    bench.pages_result(read.operation_id, 2, Phase.ENDED)
    assert bench.controller.collect().released == [operation]
    assert bench.collect().released == [operation]
    assert bench.controller.num_in_flight == 0


def test_a_reset_begins_a_new_generation_and_ends_the_prefetches_of_the_old_one() -> None:
    bench = Bench()
    old = bench.prefetch()
    bench.controller.reset()
    assert bench.mover.ended == [old.operation_id]
    assert bench.controller.collect().queries == [(old, 0)]
    bench.prefetch()
    assert [job.generation for job in bench.mover.jobs] == [0, 1]


def test_persists_beyond_the_bound_are_refused() -> None:
    bench = Bench()
    operations = [bench.persist() for _ in range(3)]
    assert operations[2] is None
    assert len(bench.mover.jobs) == 2
    first = bench.mover.jobs[0]
    assert isinstance(first, PersistJob)
    bench.pages_result(first.operation_id, 1, Phase.ENDED)
    assert bench.controller.collect().persists == [(operations[0], 1)]


@pytest.mark.parametrize("held_pages", [0, 1, 4])
@pytest.mark.parametrize("limit", [None, 1, 6])
def test_the_budget_refuses_only_beside_another_prefetch(
    held_pages: int, limit: int | None
) -> None:
    bench = Bench(prefetch=PrefetchConfig(max_inflight_pages=limit))
    if held_pages:
        bench.controller.store_queue.start_prefetch(bench.prefetch(), pages(*range(held_pages)))
    most = 4 if limit is None else limit
    for asked in range(1, 9):
        refused = held_pages > 0 and held_pages + asked > most
        assert bench.controller.prefetch_rate_limited(asked) is refused


def test_stats_only_grow_and_name_what_went_wrong() -> None:
    bench = Bench()
    for good in (True, False):
        bench.controller.write(pages(0))
        bench.controller.start_writing()
        bench.mover.finish(good=good)
    operation = bench.persist()
    assert operation is not None
    bench.pages_result(operation.operation_id, 3, Phase.ENDED)
    bench.controller.collect()
    write, persist = (bench.controller.stats[kind] for kind in (CopyKind.WRITE, CopyKind.PERSIST))
    assert (write.num_operations, write.num_bytes, write.seconds) == (2, 200, 1.0)
    assert (write.num_pages, persist.num_pages) == (1, 3)
    assert write.outcomes == {"ok": 1, "failed": 1}
    assert (persist.num_operations, persist.num_bytes) == (1, 30)
    assert persist.outcomes == {"ok": 3, "failed": 1}
