"""Cache and controller against a book-keeper, with operations that Hypothesis chooses and shrinks.

A failure is printed as the shortest list of calls that shows it, with a line that repeats it.
"""

from __future__ import annotations

import random
import re
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from cache_model import CacheModel
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from machine_choices import (
    MANY_PAGES,
    choices,
    counts,
    faults,
    few_keys,
    few_layers,
    keys,
    mostly,
    options,
    picked,
    rarely,
    stages,
)
from mutations import (
    ack_writes_before_they_ran,
    forget_memory_of_ended_prefetches,
    keep_the_lock_of_failed_loads,
    publish_results_from_before_a_reset,
    split_one_page_too_late,
)
from sim_builders import rank

from hicache.errors import HiCacheError, InvariantViolation
from hicache.radix import CopyKind
from hicache.sim.checking import check_bytes, check_ids
from hicache.sim.ending import close, settle
from hicache.sim.executor import CallPlan
from hicache.sim.options import CALL_TIMEOUT_SECONDS, GEOMETRY
from hicache.sim.time_limit import time_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.hiradix_cache import PrefixMatch
    from hicache.radix import RadixKey, RadixNode
    from hicache.testing.faulty_storage import Fault

PAGE = GEOMETRY.page_size
MAX_REQUESTS = 3
MAX_RESETS = 2
LIFE_SECONDS = 10.0
"""Of processor time; a life takes less than a tenth of a second."""


class CacheMachine(RuleBasedStateMachine):
    """Every operation of a cache, on pools that are always nearly full.

    Nothing that moves goes on before a rule says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ends = ExitStack()
        self.submitted: list[str] = []
        self.num_resets = 0

    @initialize(options=options, stored=few_keys, on_host=few_keys)
    def build(
        self, options: dict[str, object], stored: list[RadixKey], on_host: list[RadixKey]
    ) -> None:
        self.ends.enter_context(time_limit(LIFE_SECONDS))
        self.system, self.scheduler = rank(**options)
        self.ends.callback(self.system.abandon)
        self.cache = self.system.cache
        self.model = CacheModel(self.system)
        for key in stored:
            self.system.store.fill(key)
            self.model.compute(key)
        for key in on_host:
            self.insert(key, chunked=False)
        self.system.run_all()
        self.cache.evict(MANY_PAGES)
        self.system.run_all()

    # -- without a request -------------------------------------------------------------------

    @rule(key=keys, chunked=rarely)
    def insert(self, key: RadixKey, chunked: bool) -> None:
        """Insert pages that were computed without a look at what is there."""
        rows, allocator = self.system.stamps.rows(key), self.system.device_allocator
        if allocator.num_available < len(rows):
            self.cache.evict(len(rows) - allocator.num_available)
        pages = allocator.alloc(len(rows))
        if pages is None:
            return
        self.system.device_bytes.put(pages, rows)
        result = self.cache.insert(key, pages, request_id="nobody", chunked=chunked)
        allocator.free(pages[: result.already_present_pages])
        allocator.free(pages[result.end_page :])
        self.model.insert(key)
        assert self.found(key).match.num_device_pages >= result.end_page

    @precondition(lambda self: self.nodes())
    @rule(key=keys, lock=rarely)
    def match(self, key: RadixKey, lock: bool) -> None:
        found = self.found(key)
        if lock:
            self.cache.inc_lock_ref(found.last_device_node)
            self.model.lock(found.last_device_node)

    @precondition(lambda self: self.model.locks)
    @rule(choice=choices)
    def unlock(self, choice: int) -> None:
        locks = self.model.locks
        self.cache.dec_lock_ref(locks.pop(choice % len(locks)).node)

    @precondition(lambda self: self.unwritten())
    @rule(choice=choices)
    def write(self, choice: int) -> None:
        self.cache.write_backup(picked(self.unwritten(), choice))

    @precondition(lambda self: self.evicted())
    @rule(choice=choices, start=st.booleans())
    def load(self, choice: int, start: bool) -> None:
        """Load for nobody."""
        found = self.found(self.model.key_of(picked(self.evicted(), choice)))
        self.cache.init_load_back(found)
        if start:
            self.scheduler.start_loads()

    @precondition(lambda self: self.cache.controller.loads.queued)
    @rule()
    def start_loads(self) -> None:
        self.scheduler.start_loads()

    @precondition(lambda self: self.cache.evictable_size)
    @rule(count=counts)
    def evict(self, count: int) -> None:
        self.cache.evict(count)

    @precondition(lambda self: self.cache.tree.host_size)
    @rule(count=counts)
    def evict_host(self, count: int) -> None:
        self.cache.evict_host(count)

    @precondition(lambda self: self.num_resets < MAX_RESETS and self.cache.num_in_flight)
    @rule(seed=choices)
    def reset(self, seed: int) -> None:
        self.num_resets += 1
        if self.model.locks:
            with pytest.raises(HiCacheError, match="request lock"):
                self.cache.reset()
            self.unlock_all()
        self.scheduler.reset(self.leaving(seed))
        self.model.inserted.clear()
        assert self.nodes() == []

    def leaving(self, seed: int) -> list[str]:
        rng = random.Random(seed)
        return [one.request_id for one in self.scheduler.requests if rng.random() < 0.5]

    # -- requests ----------------------------------------------------------------------------

    @precondition(lambda self: len(self.scheduler.requests) < MAX_REQUESTS)
    @rule(key=keys, prefetch=mostly)
    def submit(self, key: RadixKey, prefetch: bool) -> None:
        self.submitted.append(f"r{len(self.submitted)}")
        self.scheduler.submit(self.submitted[-1], key, prefetch=prefetch)

    @precondition(lambda self: self.scheduler.waiting)
    @rule(choice=choices, mem_quota=st.sampled_from([None, 4]))
    def admit(self, choice: int, mem_quota: int | None) -> None:
        """Ask how a prefetch goes, and run when it need not be waited for."""
        request = picked(self.scheduler.ready or self.scheduler.waiting, choice)
        self.scheduler.admit(request, mem_quota=mem_quota)

    @precondition(lambda self: self.can_compute())
    @rule(choice=choices, num_pages=counts)
    def compute(self, choice: int, num_pages: int) -> None:
        request = picked(self.scheduler.computable, choice)
        self.scheduler.compute(request, num_pages)
        is_going_on = request in self.scheduler.requests
        num_tokens = request.num_computed_pages * PAGE if is_going_on else len(request.key)
        self.model.insert(request.key.prefix(num_tokens))

    @precondition(lambda self: self.can_compute())
    @rule(num_pages=counts, reserves=mostly, silent_layers=few_layers, num_stages=stages)
    def begin_pass(
        self, num_pages: int, reserves: bool, silent_layers: set[int], num_stages: int
    ) -> None:
        """Begin to compute for all who can, and stand still somewhere in it."""
        self.scheduler.begin_pass(
            [(request, num_pages) for request in self.scheduler.computable],
            reserves=reserves,
            silent_layers=silent_layers,
        )
        self.go_on_computing(num_stages)

    @precondition(lambda self: self.scheduler.forward)
    @rule(num_stages=stages)
    def go_on_computing(self, num_stages: int) -> None:
        assert self.scheduler.forward is not None
        chunks = self.scheduler.forward.chunks
        self.scheduler.go_on(num_stages)
        for request, _, last in chunks:
            if request not in self.scheduler.requests or request.num_computed_pages >= last:
                self.model.insert(request.key.prefix(last * PAGE))

    @precondition(lambda self: self.scheduler.forward)
    @rule()
    def fail_pass(self) -> None:
        self.scheduler.fail_pass()

    @precondition(lambda self: self.scheduler.running)
    @rule(choice=choices)
    def retract(self, choice: int) -> None:
        request = picked(self.scheduler.running, choice)
        if request.load_first_page is None:
            self.model.insert(request.key.prefix(request.num_computed_pages * PAGE))
        self.scheduler.retract(request)

    @precondition(lambda self: self.scheduler.requests)
    @rule(choice=choices)
    def abort(self, choice: int) -> None:
        self.scheduler.abort(picked(self.scheduler.requests, choice))

    # -- what moves --------------------------------------------------------------------------

    @precondition(lambda self: self.cache.num_in_flight)
    @rule()
    def go_on(self) -> None:
        """Let all that moves go on soundly."""
        self.system.run_all()

    @precondition(lambda self: self.cache.num_in_flight or self.nodes())
    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0]))
    def take_results(self, seconds: float) -> None:
        self.system.clock.advance(seconds * CALL_TIMEOUT_SECONDS)
        self.cache.check_hicache_events()

    @precondition(lambda self: self.runnable())
    @rule(choice=choices, count=counts, breaks=st.booleans())
    def run_stream(self, choice: int, count: int, breaks: bool) -> None:
        """Run pieces of work of a stream; with `breaks`, the first layer among them fails."""
        kind, breaking = picked(self.runnable(), choice), self.system.breaking
        if breaks:
            breaking.add(kind)
        for _ in range(count):
            self.system.device.streams[kind.value].run_one()
        breaking.discard(kind)

    @precondition(lambda self: self.system.executor.can_begin)
    @rule(choice=choices, fault=faults, pause_at=st.sampled_from([None, None, None, 0, 1]))
    def begin_call(self, choice: int, fault: Fault | None, pause_at: int | None) -> None:
        executor = self.system.executor
        executor.begin(picked(executor.queued, choice), CallPlan(fault, pause_at))

    @precondition(lambda self: self.system.executor.under_way)
    @rule(choice=choices)
    def return_call(self, choice: int) -> None:
        executor = self.system.executor
        executor.resume(picked(executor.under_way, choice))

    @precondition(lambda self: self.system.store.keys and self.scheduler.moving)
    @rule(choice=choices, how=st.sampled_from(["lose", "damage", "truncate"]))
    def spoil_page(self, choice: int, how: str) -> None:
        store = self.system.store
        page_hash = picked(store.keys, choice)
        if how == "lose":
            store.lose(page_hash)
        else:
            store.damage(page_hash, truncate=how == "truncate")

    # -- laws --------------------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self) -> None:
        system, scheduler, model = self.system, self.scheduler, self.model
        violations = check_ids(system, scheduler, num_other_locks=len(model.locks))
        violations += check_bytes(system, scheduler)
        if violations:
            raise InvariantViolation(violations)
        model.gone = set(self.submitted) - {one.request_id for one in scheduler.requests}
        model.check()

    def teardown(self) -> None:
        """End everything, unless something is wrong already, which must not be hidden by this."""
        with self.ends:
            if sys.exc_info()[0] is None:
                self.finish()

    def finish(self) -> None:
        """Without further faults all ends in a few rounds, and nothing is left."""
        system = self.system
        self.unlock_all()
        for request in self.scheduler.requests:
            self.model.insert(request.key)
        settle(system, self.scheduler)
        self.nothing_is_wrong()
        self.cache.reset()
        for allocator in (system.device_allocator, system.host_allocator):
            assert allocator.num_available == allocator.num_pages
        close(system, self.scheduler)
        assert system.is_closed
        assert self.cache.num_in_flight == 0

    # -- tools -------------------------------------------------------------------------------

    def found(self, key: RadixKey) -> PrefixMatch:
        """Return what the cache finds, which must be right."""
        found = self.cache.match_prefix(key)
        self.model.check_match(key, found)
        return found

    def nodes(self) -> list[RadixNode]:
        return list(self.cache.tree.nodes())

    def evicted(self) -> list[RadixNode]:
        return [node for node in self.nodes() if node.evicted and node.load_ticket is None]

    def unwritten(self) -> list[RadixNode]:
        return [node for node in self.nodes() if not node.backed_or_in_flight]

    def runnable(self) -> list[CopyKind]:
        device = self.system.device
        return [kind for kind in (CopyKind.WRITE, CopyKind.LOAD) if device.can_run(kind.value)]

    def can_compute(self) -> bool:
        return self.scheduler.forward is None and bool(self.scheduler.computable)

    def unlock_all(self) -> None:
        while self.model.locks:
            self.cache.dec_lock_ref(self.model.locks.pop().node)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, print_blob=True
)

# The same lives every time, so that luck does not decide whether a bug is found.
PROOF = settings(
    TestCacheMachine.settings,
    max_examples=4000,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)


@pytest.mark.parametrize(
    "mutate",
    [
        ack_writes_before_they_ran,
        forget_memory_of_ended_prefetches,
        split_one_page_too_late,
        publish_results_from_before_a_reset,
        keep_the_lock_of_failed_loads,
    ],
)
def test_the_machine_finds_a_bug_that_is_put_in(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, HiCacheError)):
        run_state_machine_as_test(CacheMachine, settings=PROOF)


def test_a_failure_is_told_in_a_few_calls_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split_one_page_too_late(monkeypatch)
    phases = [Phase.generate, Phase.shrink]
    shrinking = settings(PROOF, stateful_step_count=4, phases=phases)
    with pytest.raises((AssertionError, HiCacheError)) as caught:
        run_state_machine_as_test(CacheMachine, settings=shrinking)
    told = "\n".join(caught.value.__notes__)
    calls = re.findall(r"^state\.(\w+)\(", told, re.MULTILINE)
    assert len(set(calls) - {"build", "nothing_is_wrong", "teardown"}) <= 4, told
    assert "@reproduce_failure" in told
