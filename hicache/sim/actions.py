"""All that can happen to a simulated rank in one step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hicache.radix import CopyKind, RadixKey
from hicache.sim.coverage import Fault, Meeting, Operation, State
from hicache.sim.executor import CallPlan
from hicache.sim.prospects import Prospects
from hicache.sim.system import CALL_TIMEOUT_SECONDS, GEOMETRY
from hicache.testing.faulty_storage import Fault as StorageFault

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from hicache.sim.coverage import Coverage
    from hicache.sim.executor import StorageCall
    from hicache.sim.request import Request
    from hicache.sim.scheduler import Scheduler
    from hicache.sim.system import System

__all__ = ["Action", "Actions"]

_MAX_REQUESTS = 5
_MAX_KEYS = 14
_MAX_KEY_PAGES = 5
_NUM_PIECES = (1, 2, 3, 6, 9, 14, 30)
_MAX_CHUNKS = 3
_ALL_STAGES = 10**6
_MANY_PAGES = 10**6
_NUM_STORED_KEYS = 4
_PAGE_FAULTS = (Fault.MISSING, Fault.TRUNCATED, Fault.CORRUPT)
_STORAGE_FAULTS = tuple(fault for fault in StorageFault if fault is not StorageFault.DELAY)
_PASSING_SECONDS = tuple(share * CALL_TIMEOUT_SECONDS for share in (0.2, 1.1, 1.1, 2.0))


class Action(NamedTuple):
    """Something that can happen.

    Attributes:
        weight: how often it does, beside the others.
        is_possible: whether it can happen now; changes nothing.
        do: makes it happen and says in words what that was.
        meets: what it would perhaps bring about now.
    """

    weight: float
    is_possible: Callable[[], object]
    do: Callable[[], str]
    meets: Callable[[], Iterable[Meeting]] = tuple


class Actions:
    """What can happen to one rank; choices within an action follow from its `dice`.

    Args:
        system: the rank.
        scheduler: its requests.
        coverage: is told of faults.
        habits: decides how often what happens in this episode.

    Attributes:
        dice: to be set before each action.
        table: the actions by name.
    """

    def __init__(
        self, system: System, scheduler: Scheduler, coverage: Coverage, habits: random.Random
    ) -> None:
        self._system = system
        self._scheduler = scheduler
        self._coverage = coverage
        self._prospects = Prospects(system, scheduler)
        self._alphabet = habits.choice([2, 2, 3])
        self._fault_rate = habits.choice([0.1, 0.2, 0.4])
        self._pause_rate = habits.choice([0.2, 0.4, 0.7])
        self._keys: list[RadixKey] = []
        self._num_requests = 0
        self.dice = habits
        for _ in range(_NUM_STORED_KEYS):
            system.store.fill(self._new_key())
        self.table = self._table()
        for name in habits.sample(sorted(self.table), 6):
            action = self.table[name]
            self.table[name] = action._replace(weight=action.weight * habits.choice([0.25, 3.0]))

    def _table(self) -> dict[str, Action]:
        return {
            **self._request_actions(),
            **self._memory_actions(),
            **self._copy_actions(CopyKind.WRITE, weight=12),
            **self._copy_actions(CopyKind.LOAD, weight=6),
            **self._storage_actions(),
        }

    # -- requests ----------------------------------------------------------------------------

    def _request_actions(self) -> dict[str, Action]:
        scheduler, prospects = self._scheduler, self._prospects
        loads = self._system.cache.controller.loads
        return {
            "submit": Action(5, lambda: len(scheduler.requests) < _MAX_REQUESTS, self._submit),
            "admit": Action(8, lambda: scheduler.ready, self._admit),
            "ask": Action(0.8, lambda: scheduler.waiting, self._ask),
            "start_loads": Action(4, lambda: loads.queued, scheduler.start_loads),
            "begin_pass": Action(
                14, self._can_begin_pass, self._begin_pass, prospects.of_begin_pass
            ),
            "go_on": Action(4, self._is_in_pass, self._go_on_computing, prospects.of_going_on),
            "fail_pass": Action(
                0.5, self._is_in_pass, scheduler.fail_pass, prospects.of_failing_pass
            ),
            "retract": Action(0.5, lambda: scheduler.running, self._retract),
            "abort": Action(0.2, lambda: scheduler.requests, self._abort, prospects.of_abort),
            "abort_moving": Action(
                0.5, lambda: scheduler.moving, self._abort_moving, prospects.of_abort
            ),
            "reset": Action(0.1, _always, self._reset, prospects.of_reset),
            "take_results": Action(5, _always, self._take_results, prospects.of_polling),
        }

    def _submit(self) -> str:
        dice, requests = self.dice, self._scheduler.requests
        live = {request.request_id for request in requests}
        while (request_id := f"r{self._num_requests % (2 * _MAX_REQUESTS)}") in live:
            self._num_requests += 1
        self._num_requests += 1
        key = self._next_key([request.key for request in requests])
        return self._scheduler.submit(request_id, key, prefetch=dice.random() < 0.8)

    def _next_key(self, live: list[RadixKey]) -> RadixKey:
        """Return a key, most often one that another request has or has had, or that was stored."""
        dice = self.dice
        if len(self._keys) < _MAX_KEYS and dice.random() < 0.3:
            return self._new_key()
        return dice.choice(
            dice.choice([live, self._keys, self._keys[:_NUM_STORED_KEYS]]) or self._keys
        )

    def _new_key(self) -> RadixKey:
        """Return a key of few different pages: new, or what another begins with, or more of it."""
        dice, page_size = self.dice, GEOMETRY.page_size
        key = RadixKey([], cache_salt=dice.choice([None, None, "tenant"]))
        if self._keys and dice.random() < 0.6:
            key = dice.choice(self._keys)
            key = key.prefix(dice.randint(1, len(key) // page_size) * page_size)
        num_more = _MAX_KEY_PAGES - len(key) // page_size
        pages = dice.choices(range(self._alphabet), k=dice.randint(not len(key), num_more))
        key = key.extend(
            [page * page_size + offset for page in pages for offset in range(page_size)]
        )
        # A tail below a page is nobody's.
        key = key.extend([0] * dice.randrange(page_size))
        self._keys.append(key)
        return key

    def _admit(self) -> str:
        return self._try_to_run(self._scheduler.ready)

    def _ask(self) -> str:
        """Ask for what still moves: under some policies, to ask is to end the prefetch."""
        return self._try_to_run(self._scheduler.waiting)

    def _try_to_run(self, requests: list[Request]) -> str:
        mem_quota = self.dice.choice([None, None, None, 2 * GEOMETRY.page_size])
        return self._scheduler.admit(self.dice.choice(requests), mem_quota=mem_quota)

    def _is_in_pass(self) -> bool:
        return self._scheduler.forward is not None

    def _can_begin_pass(self) -> bool:
        return self._scheduler.forward is None and bool(self._scheduler.computable)

    def _begin_pass(self) -> str:
        """Begin a pass, and most often go on to somewhere in it or to its end."""
        dice, computable = self.dice, self._scheduler.computable
        num_chunks = min(dice.randint(1, _MAX_CHUNKS), len(computable))
        text = self._scheduler.begin_pass(
            [(request, dice.randint(1, 3)) for request in dice.sample(computable, num_chunks)],
            reserves=dice.random() < 0.9,
            silent_layers=dice.choice([(), (), (), (), (0,), (1,), (0, 1)]),
        )
        return f"{text}; {self._go_on_computing()}"

    def _go_on_computing(self) -> str:
        num_stages = self.dice.choice([0, 1, 1, 2, 2, 2, 3, _ALL_STAGES])
        return self._scheduler.go_on(num_stages)

    def _retract(self) -> str:
        return self._scheduler.retract(self.dice.choice(self._scheduler.running))

    def _abort(self) -> str:
        return self._scheduler.abort(self.dice.choice(self._scheduler.requests))

    def _abort_moving(self) -> str:
        return self._scheduler.abort(self.dice.choice(self._scheduler.moving))

    def _reset(self) -> str:
        return self._scheduler.reset(self.dice)

    def _take_results(self) -> str:
        self._system.cache.check_hicache_events()
        return f"{self._system.cache.num_in_flight} in flight"

    # -- memory ------------------------------------------------------------------------------

    def _memory_actions(self) -> dict[str, Action]:
        tree, prospects = self._system.cache.tree, self._prospects
        return {
            "back_up": Action(0.5, _always, self._back_up, prospects.of_back_up),
            "evict": Action(3, lambda: tree.evictable_size, self._evict),
            "evict_host": Action(0.7, lambda: tree.host_size, self._evict_host),
            "flush": Action(1, lambda: tree.host_size, self._flush),
            "withhold": Action(0.3, _always, self._withhold),
            "give_way": Action(2, self._is_withheld, self._give_way),
        }

    def _back_up(self) -> str:
        return self._scheduler.back_up(self.dice.choice(self._keys))

    def _evict(self) -> str:
        return self._scheduler.evict(self.dice.choice([1, 2, _MANY_PAGES]))

    def _evict_host(self) -> str:
        return self._scheduler.evict_host(self.dice.choice([1, 2, _MANY_PAGES]))

    def _flush(self) -> str:
        """Make both pools forget what nothing protects, so that storage is asked again."""
        freed = self._scheduler.evict(_MANY_PAGES)
        return f"{freed}, {self._scheduler.evict_host(_MANY_PAGES)}"

    def _withhold(self) -> str:
        allocator = self.dice.choice([self._system.device_allocator, self._system.host_allocator])
        allocator.num_withheld = self.dice.randint(1, allocator.num_pages)
        return f"{allocator.num_withheld} of {allocator.num_pages} pages"

    def _is_withheld(self) -> bool:
        system = self._system
        return bool(system.device_allocator.num_withheld or system.host_allocator.num_withheld)

    def _give_way(self) -> str:
        self._system.device_allocator.num_withheld = 0
        self._system.host_allocator.num_withheld = 0
        return "all pages"

    # -- copies ------------------------------------------------------------------------------

    def _copy_actions(self, kind: CopyKind, weight: float) -> dict[str, Action]:
        device, prospects, operation = self._system.device, self._prospects, Operation(kind.value)
        can_run = partial(device.can_run, kind.value)

        def meets(fault: Fault) -> Callable[[], set[Meeting]]:
            return partial(prospects.of_copy, operation, fault)

        name = kind.value
        return {
            f"run_{name}": Action(
                weight, can_run, partial(self._run, kind), partial(prospects.of_end, operation)
            ),
            f"break_{name}": Action(
                5 * self._fault_rate, can_run, partial(self._break, kind), meets(Fault.RAISE)
            ),
            f"stall_{name}": Action(
                0.15, can_run, partial(self._stall, operation), meets(Fault.DELAY)
            ),
            f"resume_{name}": Action(
                2, lambda: name in device.stalled, partial(self._go_on, operation)
            ),
        }

    def _run(self, kind: CopyKind) -> str:
        """Run some pieces of work of a stream."""
        stream = self._system.device.streams[kind.value]
        count = sum(stream.run_one() for _ in range(self.dice.choice(_NUM_PIECES)))
        return f"{count} pieces, {stream.pending} left"

    def _break(self, kind: CopyKind) -> str:
        """Run some pieces; the first copy of a layer among them, if there is one, breaks."""
        breaking = self._system.engine.breaking
        breaking.add(kind)
        text = self._run(kind)
        breaking.discard(kind)
        return text

    def _stall(self, operation: Operation) -> str:
        self._system.device.stalled.add(operation.value)
        if (operation, State.RUNNING) in self._system.mover.states():
            self._coverage.note(operation, State.RUNNING, Fault.DELAY)
        return "its stream stands still"

    def _go_on(self, operation: Operation) -> str:
        self._system.device.stalled.discard(operation.value)
        return "its stream goes on"

    # -- storage -----------------------------------------------------------------------------

    def _storage_actions(self) -> dict[str, Action]:
        executor, store, prospects = self._system.executor, self._system.store, self._prospects
        table = {
            "begin_call": Action(
                8, lambda: executor.can_begin, partial(self._begin_call, None), prospects.of_hang
            ),
            "return_call": Action(
                6, lambda: executor.delayed, self._return_call, prospects.of_return
            ),
            "return_late": Action(1.5, lambda: executor.hanging, self._return_late),
            "pass_time": Action(2, self._is_time_awaited, self._pass_time, prospects.of_time),
            "fill_store": Action(0.7, _always, self._fill_store),
        }
        for fault in _STORAGE_FAULTS:
            table[f"begin_{fault.value}"] = Action(
                4 * self._fault_rate,
                lambda: executor.can_begin,
                partial(self._begin_call, fault),
                partial(prospects.of_call, Fault[fault.name]),
            )
        for page_fault in _PAGE_FAULTS:
            table[f"{page_fault.value}_page"] = Action(
                0.15,
                lambda: store.keys,
                partial(self._spoil_page, page_fault),
                partial(prospects.of_spoiling, page_fault),
            )
        return table

    def _begin_call(self, fault: StorageFault | None) -> str:
        dice, executor = self.dice, self._system.executor
        call = dice.choice(executor.queued)
        plan = CallPlan(fault)
        # Reads are fewer than the other calls, and the ones that requests wait for.
        pause_rate = 0.6 if call.operation is Operation.PREFETCH else self._pause_rate
        if dice.random() < pause_rate:
            plan = CallPlan(fault, dice.choice([0, 0, 1, 2]), hangs=dice.random() < 0.3)
        executor.begin(call, plan)
        return f"{_name(call)} {_plan_text(plan)}: {call.state.value}"

    def _return_call(self) -> str:
        return self._resume(self.dice.choice(self._system.executor.delayed))

    def _return_late(self) -> str:
        return self._resume(self.dice.choice(self._system.executor.hanging))

    def _resume(self, call: StorageCall) -> str:
        self._system.executor.resume(call)
        return f"{_name(call)}: {call.state.value}"

    def _is_time_awaited(self) -> bool:
        running = len(self._system.executor.under_way) - self._system.executor.num_abandoned
        return running > 0 or bool(self._scheduler.moving)

    def _pass_time(self) -> str:
        seconds = self.dice.choice(_PASSING_SECONDS)
        self._system.clock.advance(seconds)
        return f"{seconds} s"

    def _fill_store(self) -> str:
        """Store the pages of a key, as another process might do."""
        key = self.dice.choice(self._keys)
        self._system.store.fill(key)
        return f"{len(key)} tokens"

    def _spoil_page(self, fault: Fault) -> str:
        """Lose or damage a stored page, of those that are being read if there are any."""
        store = self._system.store
        keys = store.keys
        read = {key for job in self._system.mover.reading_jobs() for key in job.hashes}
        key = self.dice.choice([one for one in keys if one in read] or keys)
        if fault is Fault.MISSING:
            store.lose(key)
        else:
            store.damage(key, truncate=fault is Fault.TRUNCATED)
        return key.hex()[:8]


def _always() -> bool:
    return True


def _plan_text(plan: CallPlan) -> str:
    fault = "soundly" if plan.fault is None else f"with fault {plan.fault.value}"
    if plan.pause_at is None:
        return fault
    return f"{fault}, pausing at {plan.pause_at}{' until it is given up' if plan.hangs else ''}"


def _name(call: StorageCall) -> str:
    return f"{call.operation.value} {call.job.operation_id}"
