"""One copy between device and host on its stream, from its submission to its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.controller.records import CopyResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.controller.records import LoadJob, WriteJob
    from hicache.device import Event

__all__ = ["RunningCopy"]


class RunningCopy:
    """What the moving side remembers of a job until it has ended.

    Args:
        job: what is copied.
        num_bytes: of all layers and pools.
        finished: to be recorded behind all of its work.
        now: reads the clock.

    Attributes:
        checked: events that carry the errors of its work, the first ones first.
        abandoned: the deciding side does not want it any more.
    """

    def __init__(
        self,
        job: WriteJob | LoadJob,
        *,
        num_bytes: int,
        finished: Event,
        now: Callable[[], float],
    ) -> None:
        self.job = job
        self.finished = finished
        self.checked: list[Event] = [finished]
        self.abandoned = False
        self._num_bytes = num_bytes
        self._now = now
        # When work began and ended, in turns.
        self._stamps: list[float] = []

    @property
    def done(self) -> bool:
        """Whether all of its work has run."""
        return self.finished.query()

    def stamp(self) -> None:
        """Note on the stream that a stretch of work begins or ends here."""
        self._stamps.append(self._now())

    def result(self, *, launched_only: bool) -> CopyResult:
        """Return what became of it, once it is done.

        Args:
            launched_only: stamps tell when work was launched, not when it ran; what is reported
                then is an upper bound.
        """
        error = None
        for event in self.checked:
            error = event.error
            if error is not None:
                break
        good = error is None and not self.abandoned
        seconds = sum(self._stamps[1::2]) - sum(self._stamps[::2])
        if launched_only and self._stamps:
            seconds = self._now() - self._stamps[0]
        return CopyResult(
            operation_id=self.job.operation_id,
            generation=self.job.generation,
            good=good,
            num_pages=len(self.job.host_pages) if good else 0,
            num_bytes=self._num_bytes if good else 0,
            seconds=seconds,
            error="" if error is None else f"{type(error).__name__}: {error}",
            abandoned=self.abandoned,
            is_timed=not launched_only,
        )
