"""What happens to the storage calls of one rank, and to what its store holds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hicache.sim.action import Action
from hicache.sim.coverage import Fault, Operation
from hicache.sim.executor import CallPlan
from hicache.testing.faulty_storage import Fault as StorageFault

if TYPE_CHECKING:
    from hicache.sim.choices import Choices
    from hicache.sim.executor import StorageCall
    from hicache.sim.ranks import Rank

__all__ = ["CallActions"]

_PAGE_FAULTS = (Fault.MISSING, Fault.TRUNCATED, Fault.CORRUPT)
_CALL_FAULTS = tuple(fault for fault in StorageFault if fault is not StorageFault.DELAY)
_READ_PAUSE_RATE = 0.6
"""Reads are fewer than the other calls, and the ones that requests wait for."""


class CallActions:
    """Lets calls begin, stand still, return and fail.

    Args:
        rank: whose calls.
        choices: what decisions are made of.
        fault_rate: how often calls fail.
        pause_rate: how often they stand still.
    """

    def __init__(
        self, rank: Rank, choices: Choices, *, fault_rate: float, pause_rate: float
    ) -> None:
        self._executor = rank.system.executor
        self._store = rank.system.store
        self._mover = rank.system.mover
        self._prospects = rank.prospects
        self._choices = choices
        self._fault_rate = fault_rate
        self._pause_rate = pause_rate

    def table(self) -> dict[str, Action]:
        """Return the actions by name."""
        executor, store, prospects = self._executor, self._store, self._prospects
        table = {
            "begin_call": Action(
                8, lambda: executor.can_begin, partial(self._begin_call, None), prospects.of_hang
            ),
            "return_call": Action(
                6, lambda: executor.delayed, self._return_call, prospects.of_return
            ),
            "return_late": Action(1.5, lambda: executor.hanging, self._return_late),
        }
        for fault in _CALL_FAULTS:
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
        dice, executor = self._choices.dice, self._executor
        call = dice.choice(executor.queued)
        plan = CallPlan(fault)
        is_read = call.operation is Operation.PREFETCH
        if dice.random() < (_READ_PAUSE_RATE if is_read else self._pause_rate):
            plan = CallPlan(fault, dice.choice([0, 0, 1, 2]), hangs=dice.random() < 0.4)
        executor.begin(call, plan)
        return f"{_name(call)} {_plan_text(plan)}: {call.state.value}"

    def _return_call(self) -> str:
        return self._resume(self._choices.dice.choice(self._executor.delayed))

    def _return_late(self) -> str:
        return self._resume(self._choices.dice.choice(self._executor.hanging))

    def _resume(self, call: StorageCall) -> str:
        self._executor.resume(call)
        return f"{_name(call)}: {call.state.value}"

    def _spoil_page(self, fault: Fault) -> str:
        """Lose or damage a stored page, of those that are being read if there are any."""
        store = self._store
        keys = store.keys
        read = {key for job in self._mover.reading_jobs() for key in job.hashes}
        key = self._choices.dice.choice([one for one in keys if one in read] or keys)
        if fault is Fault.MISSING:
            store.lose(key)
        else:
            store.damage(key, truncate=fault is Fault.TRUNCATED)
        return key.hex()[:8]


def _plan_text(plan: CallPlan) -> str:
    fault = "soundly" if plan.fault is None else f"with fault {plan.fault.value}"
    if plan.pause_at is None:
        return fault
    return f"{fault}, pausing at {plan.pause_at}{' until it is given up' if plan.hangs else ''}"


def _name(call: StorageCall) -> str:
    return f"{call.operation.value} {call.job.operation_id}"
