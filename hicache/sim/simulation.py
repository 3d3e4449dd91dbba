"""A run over many episodes, until something is wrong or all steps are done."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.sim.coverage import Coverage
from hicache.sim.episode import Episode
from hicache.sim.shrinking import FailingRun, shrink

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.sim.episode import Decision

__all__ = ["COVERING_STEPS", "Failure", "Report", "simulate"]

COVERING_STEPS = 20_000
"""A run of so many steps for each rank has to see every declared meeting."""

_EPISODE_STEPS = 500
_SHRINK_STEPS = 60_000
_PROGRESS_STEPS = 100


@dataclasses.dataclass(frozen=True)
class Failure:
    """What went wrong first.

    Attributes:
        step: number of the first step after which something was wrong, the first being 1.
        run: its episode up to there.
        shortest: the same failure with as few steps as could be found.
    """

    step: int
    run: FailingRun
    shortest: FailingRun


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run has found.

    Attributes:
        num_steps: steps done, fewer than asked for when one of them failed.
        coverage: what was met and done, by how many ranks.
        digest: of all that happened; the same for the same seed and number of steps.
    """

    seed: int
    num_steps: int
    num_episodes: int
    coverage: Coverage
    digest: str
    failure: Failure | None

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong and the run saw what a run of its length has to see."""
        covering_steps = COVERING_STEPS * self.coverage.num_ranks
        covers = self.num_steps < covering_steps or not self.coverage.unmet
        return self.failure is None and covers


def simulate(
    seed: int,
    num_steps: int,
    *,
    num_ranks: int = 1,
    shrink_steps: int = _SHRINK_STEPS,
    progress: Callable[[int], object] | None = None,
) -> Report:
    """Simulate `num_steps` steps, with every invariant checked after each.

    Args:
        seed: everything follows from it.
        num_steps: at least 1.
        num_ranks: that hold equal trees, at least 1.
        shrink_steps: that may be repeated to find a shorter run that fails.
        progress: is told now and then how many further steps have been done.

    Raises:
        ConfigError: `num_steps` or `num_ranks` is below 1.
    """
    if num_steps < 1 or num_ranks < 1:
        few = f"{num_steps} of {num_ranks}"
        raise ConfigError(f"a simulation takes at least 1 step of at least 1 rank, not {few}")
    coverage, digest = Coverage(num_ranks), hashlib.sha256()
    done = num_episodes = 0
    failure: Failure | None = None
    while done < num_steps and failure is None:
        episode_seed = f"{seed}.{num_episodes}"
        # In turns: what looks for rare meetings interrupts much, and what does not goes deep.
        seeks = num_episodes % 2 == 1
        num_episodes += 1
        count = min(_EPISODE_STEPS, num_steps - done)
        episode = Episode(episode_seed, coverage, seeks=seeks)
        try:
            decisions, violations = _live(episode, count, progress)
        finally:
            episode.abandon()
        done += len(decisions)
        digest.update("\n".join(episode.log).encode())
        if violations:
            run = FailingRun(
                episode_seed, num_ranks, tuple(decisions), tuple(violations), tuple(episode.log)
            )
            # What made no progress once would cost as much time in every repetition.
            shortest = run if episode.is_stuck else shrink(run, max_steps=shrink_steps)
            failure = Failure(done, run, shortest)
    return Report(seed, done, num_episodes, coverage, digest.hexdigest(), failure)


def _live(
    episode: Episode, num_steps: int, progress: Callable[[int], object] | None
) -> tuple[list[Decision], list[str]]:
    """Return the decisions of an episode and what was wrong at its end, if anything was."""
    decisions: list[Decision] = []
    for number in range(1, num_steps + 1):
        decision, violations = episode.next_step()
        decisions.append(decision)
        if violations:
            return decisions, violations
        if progress is not None and number % _PROGRESS_STEPS == 0:
            progress(_PROGRESS_STEPS)
        if episode.is_spent:
            break
    return decisions, episode.finish()
