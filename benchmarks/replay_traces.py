"""Traces to replay: the public ones where they are, or one that is made up on the spot."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache.replay import TraceRequest, open_trace
from hicache.replay.request import BlockNumbers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Known = Mapping[tuple[str, int], int]

__all__ = ["BLOCK_TOKENS", "ReplayTrace", "find_traces", "made_up_trace"]

BLOCK_TOKENS: Final = 512

_SIZES: Final[Mapping[str, tuple[int, ...]]] = {
    "conversation": (1_000, 5_859, 10_000, 30_000),
    "synthetic": (5_859,),
    "agentic-even": (977, 2_930, 9_766),
}
"""Blocks of the caches, by trace; the last one takes most of the time."""

_KNOWN_POLICIES: Final[Mapping[str, str]] = {"LRU": "lru", "Belady": "belady", "SLRU20": "slru20"}


@dataclasses.dataclass(frozen=True)
class ReplayTrace:
    """A trace, and what is known about it.

    Attributes:
        name: in results.
        sizes: blocks of the caches it is replayed on.
        read: returns its requests, which takes a while.
        known: hits that others have counted, by policy (`lru`, `belady`, `slru20`) and size; none
            of a trace that is made up.
    """

    name: str
    sizes: tuple[int, ...]
    read: Callable[[], Sequence[TraceRequest]]
    known: Known = dataclasses.field(default_factory=dict)

    @cached_property
    def requests(self) -> Sequence[TraceRequest]:
        """Its requests, read once."""
        return self.read()


def find_traces(*, quick: bool) -> list[ReplayTrace]:
    """Return the public traces; none where they are not.

    They lie where `HICACHE_TRACES` says, or in `shared/traces` beside the repository.

    Args:
        quick: leave out the long one and large sizes.
    """
    beside = Path(__file__).parents[2] / "shared" / "traces"
    folder = Path(os.environ.get("HICACHE_TRACES") or beside)
    try:
        document = json.loads((folder / "reference.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    traces = []
    for name in list(_SIZES)[: -1 if quick else None]:
        entry = document["traces"][name]
        trace = open_trace(folder / entry["file"])
        known = {
            (_KNOWN_POLICIES[row["policy"]], row["capacity_blocks"]): row["hit_blocks"]
            for row in entry["one_tier"]
            if row["policy"] in _KNOWN_POLICIES
        }
        sizes = _SIZES[name][: 2 if quick else None]
        traces.append(ReplayTrace(name, sizes, partial(list, trace), known))
    return traces


def made_up_trace(
    num_requests: int = 4_000, *, sizes: tuple[int, ...] = (1_000, 4_000), seed: int = 0
) -> ReplayTrace:
    """Return a trace of conversations that come and go, drawn from `seed`."""
    return ReplayTrace(f"made up from seed {seed}", sizes, lambda: _converse(num_requests, seed))


def _converse(num_requests: int, seed: int) -> list[TraceRequest]:
    """Return requests of conversations below a few common beginnings; recent ones go on most."""
    rng, numbers, new_block = random.Random(seed), BlockNumbers(), itertools.count()
    openings = [[next(new_block) for _ in range(rng.randint(1, 12))] for _ in range(8)]
    talks: list[list[int]] = []
    requests, now = [], 0.0
    for _ in range(num_requests):
        if not talks or rng.random() < 0.3:
            opening = min(len(openings) - 1, int(rng.expovariate(0.7)))
            talk, most = list(openings[opening]), 40
        else:
            talk, most = talks.pop(-1 - min(len(talks) - 1, int(rng.expovariate(0.02)))), 8
        talk += [next(new_block) for _ in range(rng.randint(1, most))]
        talks.append(talk)
        now += rng.expovariate(3.0)
        requests.append(
            TraceRequest(
                arrival_seconds=now,
                input_tokens=len(talk) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS),
                output_tokens=0,
                blocks=numbers.number(talk),
            )
        )
    return requests
