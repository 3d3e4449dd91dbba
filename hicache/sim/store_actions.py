"""The store comes, goes and is emptied while the ranks run."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

from hicache.controller import AttachmentState, StoragePolicies
from hicache.errors import HiCacheError, InvariantViolation, StorageTimeout
from hicache.sim.action import Action
from hicache.sim.coverage import Fault, Meeting, Operation, State
from hicache.types import PrefetchPolicy, WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.hiradix_cache import HiRadixCache
    from hicache.sim.choices import Choices
    from hicache.sim.coverage import Coverage
    from hicache.sim.ranks import Rank, Ranks

__all__ = ["StoreActions"]

_TIMEOUT_SECONDS = 1.0


class StoreActions:
    """Attaches, detaches and clears on all ranks, knowing what has to come of it.

    Args:
        ranks: whose stores.
        choices: what decisions are made of.
        coverage: is told of what stands in the way.
    """

    def __init__(self, ranks: Ranks, choices: Choices, coverage: Coverage) -> None:
        self._ranks = ranks
        self._choices = choices
        self._coverage = coverage

    def table(self) -> dict[str, Action]:
        """Return the actions by name."""
        return {
            "attach": Action(5, self._is_attachable, self._attach, self._of_opening),
            "attach_again": Action(0.3, lambda: True, self._attach_again, self._of_attach, 3),
            "detach": Action(0.5, self._is_idle, self._detach, self._of_detach, 3),
            "finish_detach": Action(3, self._can_finish, self._detach, self._of_detach, 3),
            "detach_busy": Action(0.1, lambda: True, self._detach, self._of_detach, 3),
            "clear": Action(0.3, self._is_idle, self._clear, self._of_clear, 3),
            "clear_busy": Action(0.1, lambda: True, self._clear, self._of_clear, 3),
        }

    # -- what is so on all ranks -------------------------------------------------------------

    @property
    def _cache(self) -> HiRadixCache:
        return self._ranks.first.system.cache

    @property
    def _state(self) -> AttachmentState:
        return self._cache.controller.storage_state

    def _is_attachable(self) -> bool:
        is_detached = self._state is AttachmentState.DETACHED
        return is_detached and self._is_idle() and not self._ranks.group.is_broken

    def _can_finish(self) -> bool:
        return self._state is AttachmentState.DETACHING and not self._calls_hang()

    def _is_idle(self, *, but_spent: bool = True) -> bool:
        """Whether nothing is in flight on any rank, but for calls that hang."""
        controllers = [rank.system.cache.controller for rank in self._ranks.live]
        return all(one.num_in_flight == (one.num_spent if but_spent else 0) for one in controllers)

    def _calls_hang(self) -> bool:
        return any(rank.system.executor.under_way for rank in self._ranks.live)

    def _obstacle(self, *, but_spent: bool) -> Fault | None:
        if self._state is AttachmentState.DETACHING:
            return Fault.HANG
        return None if self._is_idle(but_spent=but_spent) else Fault.BUSY

    # -- attach ------------------------------------------------------------------------------

    def _of_opening(self) -> set[Meeting]:
        return {Meeting(Operation.ATTACH, State.START, Fault.RAISE)}

    def _of_attach(self) -> set[Meeting]:
        return _prevented(Operation.ATTACH, self._obstacle(but_spent=False))

    def _attach(self) -> str:
        """Open the stores again; sometimes one of them refuses."""
        refusing = self._choices.dice.choice([None, None, *self._ranks.live])
        return self._change(refusing)

    def _attach_again(self) -> str:
        """Attach what is attached, perhaps, with other policies."""
        return self._change(None)

    def _change(self, refusing: Rank | None) -> str:
        dice = self._choices.dice
        state, obstacle = self._state, self._obstacle(but_spent=False)
        if obstacle is None and refusing is not None and state is AttachmentState.DETACHED:
            obstacle = Fault.RAISE
        options = self._ranks.first.system.options
        policies = StoragePolicies(
            write_policy=dice.choice([options.write_policy, dice.choice(list(WritePolicy))]),
            prefetch_policy=dice.choice(list(PrefetchPolicy)),
            prefetch=dataclasses.replace(
                options.prefetch_config(), threshold_tokens=dice.choice([0, 2, 4])
            ),
        )

        def attach(rank: Rank) -> None:
            system = rank.system
            system.factory.refuses = rank is refusing
            try:
                system.cache.attach_storage_backend(
                    system.options.storage_config(), policies=policies
                )
            finally:
                system.factory.refuses = False

        before = StoragePolicies.of(self._cache.config)
        told = self._try(Operation.ATTACH, attach, obstacle)
        if self._ranks.group.is_broken:
            return told
        done = told == "done"
        self._require(AttachmentState.ATTACHED if done else state)
        for rank in self._ranks.live:
            now = StoragePolicies.of(rank.system.cache.config)
            if now != (policies if done else before):
                raise InvariantViolation([f"attach is {told} and policies are {now}"])
        return f"{policies.write_policy.value}, {policies.prefetch_policy.value}: {told}"

    # -- detach and clear --------------------------------------------------------------------

    def _of_detach(self) -> set[Meeting]:
        return _prevented(Operation.DETACH, self._detach_obstacle())

    def _detach_obstacle(self) -> Fault | None:
        """Return why a detach is not done at once, or that it was begun by one before."""
        state = self._state
        if state is AttachmentState.DETACHED:
            return None
        if state is AttachmentState.ATTACHED and not self._is_idle():
            return Fault.BUSY
        if self._calls_hang():
            return Fault.HANG
        return Fault.LATE if state is AttachmentState.DETACHING else None

    def _detach(self) -> str:
        state, obstacle = self._state, self._detach_obstacle()

        def detach(rank: Rank) -> None:
            rank.system.cache.detach_storage_backend(_TIMEOUT_SECONDS)

        told = self._try(Operation.DETACH, detach, obstacle)
        if told == "done":
            state = AttachmentState.DETACHED
        elif obstacle is Fault.HANG:
            state = AttachmentState.DETACHING
        self._require(state)
        return told

    def _of_clear(self) -> set[Meeting]:
        return _prevented(Operation.CLEAR, self._obstacle(but_spent=False))

    def _clear(self) -> str:
        state, obstacle = self._state, self._obstacle(but_spent=False)
        if state is AttachmentState.DETACHED:
            obstacle = obstacle or Fault.MISSING

        def clear(rank: Rank) -> None:
            rank.system.cache.clear_storage_backend()

        told = self._try(Operation.CLEAR, clear, obstacle)
        self._require(state)
        if told == "done" and not self._ranks.group.is_broken:
            for rank in self._ranks.live:
                if rank.system.store.keys:
                    raise InvariantViolation([f"rank {rank.number} has pages after a clear"])
        return told

    # -- what has to come of it --------------------------------------------------------------

    def _try(self, operation: Operation, do: Callable[[Rank], None], obstacle: Fault | None) -> str:
        """Let all ranks do something, which has to be done unless there is an obstacle."""
        if obstacle is not None and obstacle is not Fault.MISSING:
            self._coverage.note(operation, State.START, obstacle)
        was_broken = self._ranks.group.is_broken
        if was_broken:
            # Nobody has a store to agree on any more, and each rank closes its own.
            return ", ".join(self._ranks.each(partial(_outcome, do=do)))
        told = self._ranks.alike(partial(_outcome, do=do))
        if obstacle is None or obstacle is Fault.LATE:
            expected = "done"
        elif operation is Operation.DETACH and obstacle is Fault.HANG:
            expected = "hanging"
        else:
            expected = "refused"
        # Where a rank was found to be lost, the answer is about that.
        if told != expected and not self._ranks.group.is_broken:
            raise InvariantViolation([f"{operation.value} is {told}, not {expected}"])
        return told

    def _require(self, state: AttachmentState) -> None:
        if self._ranks.group.is_broken:
            return
        for rank in self._ranks.live:
            found = rank.system.cache.controller.storage_state
            if found is not state:
                raise InvariantViolation(
                    [f"the store of rank {rank.number} is {found.value}, not {state.value}"]
                )


def _outcome(rank: Rank, *, do: Callable[[Rank], None]) -> str:
    try:
        do(rank)
    except StorageTimeout:
        return "hanging"
    except HiCacheError:
        return "refused"
    return "done"


def _prevented(operation: Operation, obstacle: Fault | None) -> set[Meeting]:
    return set() if obstacle is None else {Meeting(operation, State.START, obstacle)}
