"""How far everything is that moves for the requests of a simulated rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.sim.coverage import Operation, State
from hicache.sim.request import NO_PRODUCER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache.sim.request import Request
    from hicache.sim.system import System

__all__ = ["Progress"]


class Progress:
    """Looks at movements and changes nothing.

    Args:
        system: the rank.
        requests: those of its scheduler, which go on changing.
    """

    def __init__(self, system: System, requests: Sequence[Request]) -> None:
        self._mover = system.mover
        self._controller = system.cache.controller
        self._requests = requests

    def of_all(self) -> Iterator[tuple[Operation, State]]:
        """Return how far everything in flight is."""
        mover, controller = self._mover, self._controller
        yield from mover.states()
        reserved = (request.reserved_id for request in self._requests)
        taken = [one for one in reserved if one is not None and mover.state(one) is None]
        yield from [(Operation.RESERVED, State.ENDED)] * len(taken)
        yield from [(Operation.WRITE, State.QUEUED)] * len(controller.writes.queued)
        yield from [(Operation.LOAD, State.QUEUED)] * len(controller.loads.queued)

    def of(self, request: Request) -> list[tuple[Operation, State]]:
        """Return how far a request's prefetch, load and reserved write are, if in flight."""
        found = [self._mover.state(request.query_id), self._mover.state(request.load_id)]
        if request.load_first_page is not None and request.producer == NO_PRODUCER:
            found.append((Operation.LOAD, State.QUEUED))
        found.append(self.of_reservation(request))
        return [one for one in found if one is not None]

    def of_reservation(self, request: Request) -> tuple[Operation, State] | None:
        """Return how far the write is that is reserved for a request, if there is one."""
        if request.reserved_id is None:
            return None
        return self._mover.state(request.reserved_id) or (Operation.RESERVED, State.ENDED)

    def met_by_abort(self, request: Request) -> list[tuple[Operation, State]]:
        """Return how far is what an abort of `request` meets: also every write and persist."""
        others = (Operation.WRITE, Operation.PERSIST)
        return self.of(request) + [one for one in self.of_all() if one[0] in others]
