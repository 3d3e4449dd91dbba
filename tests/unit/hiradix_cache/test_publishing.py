"""However much has ended, a step takes a part of it, and what is held up holds up nothing else."""

from __future__ import annotations

from builders import PAGE, Rig, config_for, store_with, tokens, until
from scripted_parts import faulty_storage, injected

from hicache.config import PrefetchConfig
from hicache.controller.records import Phase
from hicache.hiradix_cache.step_share import step_share
from hicache.radix import RadixKey
from hicache.testing.faulty_storage import Gate, Verb
from hicache.types import PrefetchPolicy

ONE_PAGE = [RadixKey(tokens(number)) for number in range(20)]
FOUR_PAGES = [RadixKey(tokens(*range(at, at + 4))) for at in range(100, 150, 10)]


def rig_with(read: Gate, *, max_inflight_pages: int | None = None) -> Rig:
    config = config_for(
        32,
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        storage=injected(),
        prefetch=PrefetchConfig(threshold_tokens=PAGE, max_inflight_pages=max_inflight_pages),
    )
    store = store_with(*ONE_PAGE, *FOUR_PAGES, host_pages=64)
    rig = Rig(config, create_storage=faulty_storage(store, gates={Verb.GET: read}))
    rig.gates.append(read)
    return rig


def answer_all(rig: Rig) -> None:
    """Wait until every query is answered, without a step."""
    controller = rig.cache.controller

    def are_answered() -> bool:
        controller.take_results()
        return all(one.phase is Phase.ENDED for one in controller.store_queue.prefetches.values())

    until(are_answered)


def num_reading(rig: Rig) -> int:
    operations = rig.cache.controller.store_queue.prefetches.values()
    return sum(one.host_pages is not None for one in operations)


def test_answers_that_come_at_once_begin_their_reads_over_some_steps_the_oldest_first() -> None:
    read = Gate()
    with rig_with(read, max_inflight_pages=32) as rig:
        for number, key in enumerate(ONE_PAGE):
            assert rig.begin_prefetch(key, request_id=str(number))
        answer_all(rig)
        num_left = len(ONE_PAGE)
        while num_left:
            rig.cache.check_hicache_events()
            num_left -= min(num_left, step_share(num_left))
            operations = list(rig.cache.controller.store_queue.prefetches.values())
            begun = [one.request_id for one in operations if one.host_pages is not None]
            assert begun == [str(number) for number in range(len(ONE_PAGE) - num_left)]
        read.open()
        rig.settle()
        assert [rig.hit(key) for key in ONE_PAGE] == [(0, 1)] * len(ONE_PAGE)


def test_reads_that_wait_for_the_budget_do_not_keep_younger_ones_from_beginning() -> None:
    read = Gate()
    with rig_with(read, max_inflight_pages=5) as rig:
        for number, key in enumerate([*FOUR_PAGES, ONE_PAGE[0]]):
            assert rig.begin_prefetch(key, request_id=str(number))
        answer_all(rig)
        rig.cache.check_hicache_events()
        assert num_reading(rig) == 2
        assert rig.cache.controller.num_prefetch_pages == 5
        read.open()
        rig.settle()
        assert [rig.hit(key) for key in FOUR_PAGES] == [(0, 4)] * len(FOUR_PAGES)
        assert rig.hit(ONE_PAGE[0]) == (0, 1)


def test_all_that_was_written_is_published_in_one_step_when_an_eviction_waits_for_its_pages() -> (
    None
):
    config = config_for(32, write_policy="write_back", storage=None)
    with Rig(config) as rig:
        for key in ONE_PAGE[:8]:
            rig.insert(key)
        # What is pending already counts: so each call begins one write, a job of its own.
        for num_pages in range(1, 9):
            rig.cache.evict(num_pages)
        writes = rig.cache.controller.writes

        def are_written() -> bool:
            rig.cache.controller.take_results()
            return all(ack.num_good is not None for ack in writes.acks)

        until(are_written)
        assert len(writes.acks) > step_share(len(writes.acks))
        rig.cache.check_hicache_events()
        assert not writes.acks
