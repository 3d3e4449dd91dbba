"""Commands reach the scheduler's thread once, in order, in time, or not at all."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

import pytest

from hicache.errors import ConfigError
from hicache.server.mailbox import CommandFailed, Mailbox, NoAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
GUARD_SECONDS = 10.0


def in_loop(coroutine: Coroutine[None, None, T], serve: Callable[[], object]) -> T:
    """Run `coroutine` in an event loop of another thread and `serve` in this one, until it ends."""
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(coroutine))
        except (NoAnswer, CommandFailed, ConfigError) as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        serve()
        thread.join(0.001)
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result


def test_commands_are_carried_out_in_order_on_the_thread_that_serves() -> None:
    mailbox, log = Mailbox(), list[tuple[int, int]]()

    def command(number: int) -> int:
        log.append((number, threading.get_ident()))
        return number * number

    async def ask() -> list[int]:
        questions = [mailbox.ask(lambda number=number: command(number)) for number in range(5)]  # type: ignore[misc]
        return await asyncio.gather(*questions)

    assert in_loop(ask(), mailbox.serve) == [0, 1, 4, 9, 16]
    assert log == [(number, threading.get_ident()) for number in range(5)]


def test_an_error_of_a_command_is_the_asker_s() -> None:
    def refuse() -> None:
        raise ConfigError("give another")

    def break_down() -> None:
        raise ZeroDivisionError("a secret")

    mailbox = Mailbox()
    with pytest.raises(ConfigError, match="give another"):
        in_loop(mailbox.ask(refuse), mailbox.serve)
    with pytest.raises(CommandFailed, match=r"^failed with ZeroDivisionError; the log says where$"):
        in_loop(mailbox.ask(break_down), mailbox.serve)


def test_a_command_that_nobody_took_in_time_is_never_carried_out() -> None:
    mailbox, done = Mailbox(deadline_seconds=0.02), list[int]()
    with pytest.raises(NoAnswer, match=r"within 0.02 s; nothing was done"):
        in_loop(mailbox.ask(lambda: done.append(1)), lambda: None)
    assert mailbox.serve() == 1
    assert done == []


def test_a_command_that_is_still_carried_out_at_the_deadline_is_not_undone() -> None:
    mailbox, done = Mailbox(deadline_seconds=0.02), list[int]()
    asked_in_vain = threading.Event()

    async def ask() -> None:
        try:
            await mailbox.ask(lambda: done.append(asked_in_vain.wait(GUARD_SECONDS)))
        finally:
            asked_in_vain.set()

    with pytest.raises(NoAnswer, match="is still at it; ask later"):
        in_loop(ask(), mailbox.serve)
    assert done == [True]


def test_a_mailbox_that_is_full_refuses_at_once() -> None:
    mailbox = Mailbox(max_commands=1, deadline_seconds=0.02)

    async def ask() -> list[BaseException | None]:
        questions = (mailbox.ask(lambda: None) for _ in range(2))
        return await asyncio.gather(*questions, return_exceptions=True)

    first, second = in_loop(ask(), lambda: None)
    assert "within 0.02 s" in str(first)
    assert "1 commands wait for the scheduler already; nothing was done" in str(second)


def test_a_closed_mailbox_refuses_what_waits_and_what_comes() -> None:
    mailbox, done = Mailbox(), list[int]()
    for _ in range(2):
        with pytest.raises(NoAnswer, match="the scheduler has ended"):
            in_loop(mailbox.ask(lambda: done.append(1)), mailbox.close)
    assert mailbox.serve() == 0
    assert done == []


def test_who_keeps_asking_does_not_keep_the_scheduler() -> None:
    mailbox = Mailbox(max_commands=3)
    counts = []

    async def ask() -> None:
        await asyncio.gather(*(mailbox.ask(lambda: None) for _ in range(3)))

    in_loop(ask(), lambda: counts.append(mailbox.serve(wait_seconds=0.01)))
    assert max(counts) <= 3
    assert sum(counts) == 3
