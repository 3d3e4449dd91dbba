"""What a scheduler does with requests: decided once, done by every rank."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from hicache.sim.action import Action
from hicache.sim.options import GEOMETRY
from hicache.sim.prospects import Prospects

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.sim.choices import Choices
    from hicache.sim.coverage import Meeting
    from hicache.sim.ranks import Ranks
    from hicache.sim.request import Request
    from hicache.sim.scheduler import Scheduler

__all__ = ["RequestActions"]

_MAX_REQUESTS = 5
_MAX_CHUNKS = 3
_ALL_STAGES = 10**6
_PAGE_SECONDS = (0.001, 0.1, 1.0, 100.0)
"""Of a page that is computed, or loaded; reads and loads take up to some seconds when they stand
still, and none otherwise."""


class RequestActions:
    """Decides by what all ranks have in common, and names requests, as each rank has its own.

    Args:
        ranks: what is decided for.
        choices: what the decisions are made of.
    """

    def __init__(self, ranks: Ranks, choices: Choices) -> None:
        self._ranks = ranks
        self._choices = choices
        self._num_requests = 0

    def table(self) -> dict[str, Action]:
        """Return the actions by name."""
        return {
            "submit": Action(5, lambda: len(self._first.requests) < _MAX_REQUESTS, self._submit),
            "admit": Action(8, self._ready, self._admit),
            "ask": Action(0.8, lambda: self._first.waiting, self._ask),
            "start_loads": Action(4, self._is_load_queued, self._start_loads),
            "begin_pass": Action(
                14, self._can_begin_pass, self._begin_pass, self._meets(Prospects.of_begin_pass)
            ),
            "go_on": Action(4, self._is_in_pass, self._go_on, self._meets(Prospects.of_going_on)),
            "fail_pass": Action(
                0.5, self._is_in_pass, self._fail_pass, self._meets(Prospects.of_failing_pass)
            ),
            "note_prefill": Action(0.3, lambda: True, self._note_prefill),
            "note_load": Action(0.3, lambda: True, self._note_load),
            "retract": Action(0.5, lambda: self._first.running, self._retract),
            "abort": Action(
                0.2, lambda: self._first.requests, self._abort, self._meets(Prospects.of_abort), 5
            ),
            "abort_moving": Action(
                0.5, self._moving, self._abort_moving, self._meets(Prospects.of_abort), 5
            ),
            "reset": Action(0.1, lambda: True, self._reset, self._meets(Prospects.of_reset), 2),
            "take_results": Action(
                5, lambda: True, self._ranks.take_results, self._meets(Prospects.of_polling)
            ),
        }

    @property
    def _first(self) -> Scheduler:
        return self._ranks.first.scheduler

    def _meets(self, of_one: Callable[[Prospects], set[Meeting]]) -> Callable[[], set[Meeting]]:
        """Return what may be met on any rank."""
        return lambda: set(chain.from_iterable(of_one(one.prospects) for one in self._ranks.live))

    def _for_each(self, do: Callable[[Scheduler], str]) -> str:
        return self._ranks.alike(lambda rank: do(rank.scheduler))

    def _for_request(
        self, requests: Sequence[Request], do: Callable[[Scheduler, Request], str]
    ) -> str:
        """Choose a request and let every rank do something with its own of that name."""
        request_id = self._choices.dice.choice(requests).request_id
        return self._for_each(lambda scheduler: do(scheduler, scheduler.request(request_id)))

    # -- before a request runs ---------------------------------------------------------------

    def _submit(self) -> str:
        dice, requests = self._choices.dice, self._first.requests
        live = {request.request_id for request in requests}
        while (request_id := f"r{self._num_requests % (2 * _MAX_REQUESTS)}") in live:
            self._num_requests += 1
        self._num_requests += 1
        key = self._choices.next_key([request.key for request in requests])
        prefetch = dice.random() < 0.8
        return self._for_each(lambda one: one.submit(request_id, key, prefetch=prefetch))

    def _moving(self) -> list[Request]:
        """Return the requests of which something moves on some rank."""
        names = {one.request_id for rank in self._ranks.live for one in rank.scheduler.moving}
        return [request for request in self._first.requests if request.request_id in names]

    def _ready(self) -> list[Request]:
        """Return waiting requests of which nothing moves on any rank."""
        moving = self._moving()
        return [request for request in self._first.waiting if request not in moving]

    def _admit(self) -> str:
        return self._try_to_run(self._ready())

    def _ask(self) -> str:
        """Ask for what still moves: under some policies, to ask is to end the prefetch."""
        return self._try_to_run(self._first.waiting)

    def _try_to_run(self, requests: list[Request]) -> str:
        mem_quota = self._choices.dice.choice([None, None, None, 2 * GEOMETRY.page_size])
        return self._for_request(requests, partial(_admit, mem_quota=mem_quota))

    def _is_load_queued(self) -> bool:
        return bool(self._ranks.first.system.cache.controller.loads.queued)

    def _start_loads(self) -> str:
        return self._for_each(lambda one: one.start_loads())

    # -- the forward pass --------------------------------------------------------------------

    def _is_in_pass(self) -> bool:
        return self._first.forward is not None

    def _can_begin_pass(self) -> bool:
        return self._first.forward is None and bool(self._first.computable)

    def _begin_pass(self) -> str:
        """Begin a pass, and most often go on to somewhere in it or to its end."""
        dice, computable = self._choices.dice, self._first.computable
        num_chunks = min(dice.randint(1, _MAX_CHUNKS), len(computable))
        wanted = [
            (one.request_id, dice.randint(1, 3)) for one in dice.sample(computable, num_chunks)
        ]
        reserves = dice.random() < 0.9
        silent_layers = dice.choice([(), (), (), (), (0,), (1,), (0, 1)])
        num_stages = self._draw_stages()

        def do(scheduler: Scheduler) -> str:
            text = scheduler.begin_pass(
                [(scheduler.request(request_id), num_pages) for request_id, num_pages in wanted],
                reserves=reserves,
                silent_layers=silent_layers,
            )
            return f"{text}; {scheduler.go_on(num_stages)}"

        return self._for_each(do)

    def _go_on(self) -> str:
        num_stages = self._draw_stages()
        return self._for_each(lambda one: one.go_on(num_stages))

    def _draw_stages(self) -> int:
        return self._choices.dice.choice([0, 1, 1, 2, 2, 2, 3, _ALL_STAGES])

    def _fail_pass(self) -> str:
        return self._for_each(lambda one: one.fail_pass())

    def _note_prefill(self) -> str:
        """Tell the cache what computing costs, which every rank measures by itself."""
        seconds = self._choices.dice.choice(_PAGE_SECONDS)
        for rank in self._ranks.live:
            rank.system.cache.note_prefill(GEOMETRY.page_size, self._own(seconds))
        return f"{seconds} s a page"

    def _note_load(self) -> str:
        """Let loads have taken as long as they would over a link that others use as well."""
        seconds = self._choices.dice.choice(_PAGE_SECONDS)
        for rank in self._ranks.live:
            rank.system.cache.controller.costs.note_load(1, self._own(seconds))
        return f"{seconds} s a page"

    def _own(self, seconds: float) -> float:
        """Return what one rank measures of what takes `seconds` on average."""
        return seconds * self._choices.dice.choice([0.5, 1.0, 2.0])

    # -- the end of a request ----------------------------------------------------------------

    def _retract(self) -> str:
        return self._for_request(self._first.running, lambda one, request: one.retract(request))

    def _abort(self) -> str:
        return self._for_request(self._first.requests, lambda one, request: one.abort(request))

    def _abort_moving(self) -> str:
        return self._for_request(self._moving(), lambda one, request: one.abort(request))

    def _reset(self) -> str:
        dice = self._choices.dice
        leaving = [one.request_id for one in self._first.requests if dice.random() < 0.5]
        return self._for_each(lambda one: one.reset(leaving))


def _admit(scheduler: Scheduler, request: Request, *, mem_quota: int | None) -> str:
    return scheduler.admit(request, mem_quota=mem_quota)
