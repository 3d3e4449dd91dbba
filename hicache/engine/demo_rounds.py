"""The demo's conversations without an end: round after round, with a rest in between."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hicache.clock import MonotonicClock
from hicache.engine.demo_parts import DemoParts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.clock import Clock
    from hicache.engine.demo_options import DemoOptions
    from hicache.engine.request import Request
    from hicache.engine.tokenizer import Tokenizer
    from hicache.hiradix_cache import HiRadixCache

__all__ = ["ConversationRounds", "RoundReport"]

_GLANCE_SECONDS = 0.02
"""How long a rest attends to others before it looks after the cache again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundReport:
    """Where the prompts of one round were found.

    Attributes:
        number: of the round, from 1.
        prompt_tokens: of its prompts; the others add up to it.
        device_hit_tokens, host_hit_tokens, storage_hit_tokens: found in L1, L2 and L3.
        computed_tokens: found nowhere.
        seconds: that it took.
    """

    number: int
    prompt_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    storage_hit_tokens: int
    computed_tokens: int
    seconds: float

    def __str__(self) -> str:
        """In a line, for people."""
        parts = {
            "L1": self.device_hit_tokens,
            "L2": self.host_hit_tokens,
            "L3": self.storage_hit_tokens,
            "computed": self.computed_tokens,
        }
        shares = ", ".join(
            f"{name} {tokens / self.prompt_tokens:.0%}" for name, tokens in parts.items()
        )
        return (
            f"round {self.number}: {self.prompt_tokens:,} prompt tokens: {shares}; "
            f"{self.seconds:.1f} s"
        )


class ConversationRounds:
    """Serves the conversations of a demo; belongs to the thread that made it.

    A round is one turn of every conversation, two at a time. After the last turn all conversations
    begin anew, with the same questions.

    Whoever wants something of the cache gets a turn of the thread after each step: `attend` is
    called with the seconds that it may take.

    Args:
        options: of the demo; they name a store.
        clock: for durations.

    Attributes:
        cache: of the engine.
        tokenizer: of the model.
    """

    def __init__(self, options: DemoOptions, *, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._parts = DemoParts(options)
        self.tokenizer: Tokenizer = self._parts.tokenizer
        self._engine = self._parts.create_engine(with_cache=True)
        self._history: dict[int, list[int]] = {}
        self._num_rounds = 0
        self._serving = False
        cache = self._engine.cache
        assert cache is not None
        self.cache: HiRadixCache = cache

    def busy(self) -> str:
        """Return what keeps the cache from being changed, in words; empty during a rest."""
        if not self._serving:
            return ""
        engine = self._engine
        return (
            f"conversations are served ({len(engine.running)} request(s) run, "
            f"{len(engine.waiting)} wait)"
        )

    def serve(self, attend: Callable[[float], object]) -> RoundReport:
        """Serve the next round."""
        size, begin = self._parts.options.size, self._clock.now()
        turn = self._num_rounds % size.num_turns
        requests = [
            self._parts.request(user, turn, self._history) for user in range(size.num_users)
        ]
        self._serving = True
        try:
            for first in range(0, len(requests), 2):
                self._run(requests[first : first + 2], attend)
        finally:
            self._serving = False
        for user, request in enumerate(requests):
            self._history[user] = request.prompt_ids + request.output_ids
        self._num_rounds += 1
        return RoundReport(
            number=self._num_rounds,
            prompt_tokens=sum(one.num_prompt_tokens for one in requests),
            device_hit_tokens=sum(one.device_hit_tokens for one in requests),
            host_hit_tokens=sum(one.host_hit_tokens for one in requests),
            storage_hit_tokens=sum(one.storage_hit_tokens for one in requests),
            computed_tokens=sum(one.computed_tokens for one in requests),
            seconds=self._clock.now() - begin,
        )

    def rest(self, seconds: float, attend: Callable[[float], object]) -> None:
        """Serve nothing for a while; copies under way end."""
        end = self._clock.now() + seconds
        while (left := end - self._clock.now()) > 0:
            self.cache.check_hicache_events()
            attend(min(left, _GLANCE_SECONDS))

    def close(self, timeout_seconds: float = 10.0) -> bool:
        """Stop the cache; False when a call to its store still runs."""
        return self.cache.close(timeout_seconds)

    def _run(self, requests: Sequence[Request], attend: Callable[[float], object]) -> None:
        for request in requests:
            self._engine.submit(request)
        while self._engine.waiting or self._engine.running:
            self._engine.step()
            attend(0.0)
