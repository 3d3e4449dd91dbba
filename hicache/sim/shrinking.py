"""From a run that fails to a short one that fails in the same way."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from hicache.sim.coverage import Coverage
from hicache.sim.episode import Decision, Episode

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FailingRun", "replay", "shrink"]


class FailingRun(NamedTuple):
    """Decisions after the last of which, or when all is to end, invariants are broken.

    Attributes:
        seed: of the episode.
        num_ranks: that it has.
        log: what each step did, in words.
    """

    seed: str
    num_ranks: int
    decisions: tuple[Decision, ...]
    violations: tuple[str, ...]
    log: tuple[str, ...]

    @property
    def kind(self) -> str:
        """What went wrong, without the numbers and the step in which it showed."""
        return re.sub(r"\d+", "#", self.violations[0].partition(": ")[2])


def replay(seed: str, num_ranks: int, decisions: Sequence[Decision]) -> FailingRun | None:
    """Repeat an episode; None when nothing goes wrong, its end included."""
    episode = Episode(seed, Coverage(num_ranks))
    try:
        violations: list[str] = []
        count = 0
        while not violations and count < len(decisions):
            violations = episode.repeat(decisions[count])
            count += 1
        violations = violations or episode.finish()
    finally:
        episode.abandon()
    if not violations:
        return None
    return FailingRun(
        seed, num_ranks, tuple(decisions[:count]), tuple(violations), tuple(episode.log)
    )


def shrink(run: FailingRun, *, max_steps: int) -> FailingRun:
    """Leave out decisions, long stretches first, as long as the run fails in the same way.

    Args:
        run: what to begin with.
        max_steps: to be repeated in all; what has been found by then is returned.
    """
    size = len(run.decisions) // 2
    num_repeated = 0
    while size:
        start = 0
        while start < len(run.decisions) and num_repeated < max_steps:
            rest = run.decisions[:start] + run.decisions[start + size :]
            num_repeated += len(rest)
            shorter = replay(run.seed, run.num_ranks, rest)
            if shorter is not None and shorter.kind == run.kind:
                run = shorter
            else:
                start += size
        size //= 2
    return run
