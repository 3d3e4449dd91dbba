"""Storage jobs call by call: whatever a backend answers, the job ends and says what is good."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest
from controller_fakes import ScriptedStorage

from hicache.clock import ManualClock
from hicache.controller.records import (
    PagesResult,
    PersistJob,
    Phase,
    PrefetchJob,
    QueryJob,
    QueryResult,
)
from hicache.controller.storage_work import StorageContext, create_work
from hicache.storage import Piece
from hicache.types import OperationId, PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.controller.records import Result, StorageJob
    from hicache.storage import Page
    from hicache.types import IntArray

OK, PRESENT, MISS = PageOutcome.OK, PageOutcome.PRESENT, PageOutcome.MISS
FAILED, CORRUPT, SKIPPED = PageOutcome.FAILED, PageOutcome.CORRUPT, PageOutcome.SKIPPED
HASHES = tuple(PageHash(bytes([index]) * 32) for index in range(5))
PAGES = np.array([7, 3, 9, 1, 5])
SEED = b"s" * 32
PAGE_BYTES, BATCH, START, TIMEOUT = 100, 2, 100.0, 5.0


class Mischief:
    """An answer that cannot even be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("not even a repr")


class MischievousError(Exception):
    """An error that cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("not even a text")


NONSENSE = [
    OSError("gone"),
    SystemExit(3),
    MischievousError(),
    Mischief(),
    None,
    "text",
    2.0,
    {},
    [],
    [OK],
    [OK, OK, OK],
    [OK, "ok"],
    [None, OK],
    [Mischief(), OK],
]


class Bench:
    """One job against a scripted backend; `results` is what it has reported."""

    def __init__(self, job: StorageJob, *answers: object) -> None:
        self.clock = ManualClock(START)
        self.backend = ScriptedStorage(*answers)
        self.results: list[Result] = []
        self.asked_pages: list[list[int]] = []
        context = StorageContext(
            backend=self.backend,
            clock=self.clock,
            call_timeout_seconds=TIMEOUT,
            query_pages=BATCH,
            batch_pages=BATCH,
            page_bytes=PAGE_BYTES,
            pages_of=self._pages_of,
            emit=self.results.append,
        )
        self.work = create_work(context, job)

    def run(self) -> None:
        while self.work.step():
            pass

    @property
    def num_pages(self) -> int:
        """The answer of a query, which comes once."""
        (result,) = self.results
        assert isinstance(result, QueryResult)
        return result.num_pages

    @property
    def batches(self) -> list[PagesResult]:
        results = [result for result in self.results if isinstance(result, PagesResult)]
        assert len(results) == len(self.results)
        return results

    @property
    def phases(self) -> list[Phase]:
        return [batch.phase for batch in self.batches]

    @property
    def outcomes(self) -> list[PageOutcome]:
        runs = [run for batch in self.batches for run in batch.outcomes]
        return [outcome for outcome, count in runs for _ in range(count)]

    def _pages_of(self, host_pages: IntArray) -> list[Page]:
        self.asked_pages.append(host_pages.tolist())
        return [(Piece(1 + page, PAGE_BYTES),) for page in host_pages.tolist()]


def query(*answers: object) -> Bench:
    return Bench(QueryJob(operation_id=OperationId(1), generation=4, hashes=HASHES), *answers)


def prefetch(*answers: object) -> Bench:
    job = PrefetchJob(
        operation_id=OperationId(2),
        generation=4,
        hashes=HASHES,
        parent_hash=SEED,
        host_pages=PAGES,
    )
    return Bench(job, *answers)


def persist(*answers: object) -> Bench:
    job = PersistJob(
        operation_id=OperationId(3),
        generation=4,
        hashes=HASHES,
        parent_hash=SEED,
        host_pages=PAGES,
    )
    return Bench(job, *answers)


Make: TypeAlias = "Callable[..., Bench]"
of_pages = pytest.mark.parametrize("make", [prefetch, persist])


def type_name(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize(
    ("answers", "num_pages"), [((2, 2, 1), 5), ((2, 1), 3), ((0,), 0), ((2, 2, 0), 4)]
)
def test_a_query_counts_leading_pages_in_batches_until_the_first_miss(
    answers: tuple[int, ...], num_pages: int
) -> None:
    bench = query(*answers)
    bench.run()
    assert bench.num_pages == num_pages
    assert bench.results[0].error == ""
    assert bench.backend.calls == [HASHES[:2], HASHES[2:4], HASHES[4:]][: len(answers)]


@pytest.mark.parametrize("answer", [*NONSENSE, -1, 3, 2**70, True, np.int64(1)], ids=type_name)
def test_a_query_answered_with_nonsense_ends_with_what_is_sure(answer: object) -> None:
    bench = query(2, answer)
    bench.run()
    assert bench.num_pages == 2
    assert bench.results[0].error


@of_pages
@pytest.mark.parametrize("answer", [*NONSENSE, (OK, OK)], ids=type_name)
def test_a_batch_answered_with_nonsense_has_failed_as_a_whole_and_ends_the_job(
    make: Make, answer: object
) -> None:
    bench = make([OK, OK], answer)
    bench.run()
    assert bench.phases == [Phase.RUNNING, Phase.ENDED]
    assert bench.outcomes == [OK, OK, FAILED, FAILED]
    last = bench.batches[-1]
    assert (last.num_good, last.num_bytes) == (2, 0)
    assert last.error


def test_pages_are_read_in_batches_into_the_pages_that_were_named() -> None:
    bench = prefetch([OK, OK], [OK, OK], [OK])
    bench.run()
    assert [batch.num_good for batch in bench.batches] == [2, 4, 5]
    assert [batch.num_bytes for batch in bench.batches] == [200, 200, 100]
    assert bench.phases == [Phase.RUNNING, Phase.RUNNING, Phase.ENDED]
    assert bench.asked_pages == [[7, 3], [9, 1], [5]]
    assert {(batch.operation_id, batch.generation) for batch in bench.batches} == {(2, 4)}


@of_pages
def test_the_parent_of_every_page_is_named(make: Make) -> None:
    bench = make([OK, OK], [OK, OK], [OK])
    bench.run()
    assert bench.backend.calls == [HASHES[:2], HASHES[2:4], HASHES[4:]]
    assert bench.backend.parents == [(SEED, HASHES[0]), HASHES[1:3], HASHES[3:4]]


def test_a_page_that_was_stored_already_is_good_and_moves_no_byte() -> None:
    bench = persist([OK, PRESENT], [PRESENT, OK], [OK])
    bench.run()
    assert [batch.num_good for batch in bench.batches] == [2, 4, 5]
    assert sum(batch.num_bytes for batch in bench.batches) == 3 * PAGE_BYTES


@of_pages
@pytest.mark.parametrize(
    ("outcomes", "num_good"),
    [([MISS, OK], 0), ([OK, CORRUPT], 1), ([SKIPPED, SKIPPED], 0), ([FAILED, PRESENT], 0)],
)
def test_only_the_leading_good_pages_count_and_a_bad_one_ends_the_job(
    make: Make, outcomes: list[PageOutcome], num_good: int
) -> None:
    bench = make([OK, OK], outcomes)
    bench.run()
    assert bench.outcomes == [OK, OK, *outcomes]
    assert bench.batches[-1].num_good == 2 + num_good
    assert bench.phases == [Phase.RUNNING, Phase.ENDED]


@of_pages
def test_a_call_gets_a_deadline_of_its_own(make: Make) -> None:
    bench = make([OK, OK], [OK, MISS])
    bench.work.step()
    bench.clock.advance(1.0)
    bench.work.step()
    assert bench.backend.deadlines == [START + TIMEOUT, START + 1.0 + TIMEOUT]


@of_pages
def test_a_job_that_is_stopped_ends_before_its_next_call_with_what_it_has(make: Make) -> None:
    bench = make([OK, OK], [OK, OK])
    assert bench.work.step()
    bench.work.stop()
    assert not bench.work.step()
    assert bench.phases == [Phase.RUNNING, Phase.ENDED]
    assert (bench.batches[-1].num_good, len(bench.backend.calls)) == (2, 1)


@of_pages
@pytest.mark.parametrize("late", [[OK, OK], [OK, MISS], OSError("late"), None], ids=type_name)
def test_what_an_overdue_call_brings_is_not_counted(make: Make, late: object) -> None:
    def return_late() -> object:
        bench.work.overdue()
        return late

    bench = make([OK, OK], return_late)
    bench.run()
    assert bench.phases == [Phase.RUNNING, Phase.OVERDUE, Phase.ENDED]
    assert [batch.num_good for batch in bench.batches] == [2, 2, 2]
    assert bench.outcomes == [OK, OK]
    assert len(bench.backend.calls) == 2


@pytest.mark.parametrize("make", [query, prefetch, persist])
def test_a_job_that_has_ended_reports_nothing_more(make: Make) -> None:
    bench = make(*([0] if make is query else [[MISS, MISS]]))
    bench.run()
    num_results = len(bench.results)
    bench.work.overdue()
    assert len(bench.results) == num_results


@pytest.mark.parametrize("make", [query, prefetch, persist])
@pytest.mark.parametrize("how", ["refused", "stopped"])
def test_a_job_that_was_refused_or_stopped_is_not_overdue_afterwards(make: Make, how: str) -> None:
    bench = make()
    if how == "refused":
        bench.work.refuse("no worker is left")
    else:
        bench.work.stop()
        assert not bench.work.step()
    bench.work.overdue()
    assert [getattr(result, "phase", None) for result in bench.results] == [Phase.ENDED]
    assert bench.backend.calls == []
