"""One process of the demo: serves turns with the cache and, beside it, without.

Run as `python -m hicache.engine.demo_phase FOLDER before|after RANK`: reads the options from the
folder, takes up the conversations where the phase before left them, and leaves its report and the
conversations there. What it finds of the earlier phase's KV it finds in storage alone.

Where the model is spread over ranks, each is such a process, and serves the same requests.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hicache.engine.conversations import interleave
from hicache.engine.demo_options import DemoOptions
from hicache.engine.demo_parts import DemoParts
from hicache.engine.machine import machine_facts
from hicache.engine.peers import EngineRank
from hicache.engine.rank_processes import end_with_parent
from hicache.engine.report import (
    AnswerDifference,
    DemoReport,
    MovementReport,
    Movements,
    TurnReport,
)
from hicache.engine.request import Request
from hicache.engine.torch_peers import joined_ranks
from hicache.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

__all__ = ["compare_answers"]

_NEAR_TIE = 1e-3
"""Logits closer than this can be swapped by rounding alone."""

_PATIENCE_SECONDS = 60.0
"""How long a rank waits for another: ranks load their weights at different speeds."""


class _Turn(NamedTuple):
    user: int
    turn: int
    request: Request


def compare_answers(
    turn: int, user: int, cached: Request, plain: Request
) -> AnswerDifference | None:
    """Return the first position at which the two answers differ, or None."""
    pairs = zip(cached.choices, plain.choices, strict=True)
    for position, (mine, other) in enumerate(pairs):
        if mine.token_ids[0] == other.token_ids[0]:
            continue
        gap = min(mine.logits[0] - mine.logits[1], other.logits[0] - other.logits[1])
        first, second = zip(mine.token_ids, mine.logits, strict=True)
        third, fourth = zip(other.token_ids, other.logits, strict=True)
        return AnswerDifference(
            user=user,
            turn=turn,
            position=position,
            cached_top2=(first, second),
            uncached_top2=(third, fourth),
            near_tie=gap < _NEAR_TIE,
        )
    return None


class _Phase:
    """The two engines of a process and what they have served.

    Args:
        options: of the run.
        rank: of this process.
        after_restart: which phase.
    """

    def __init__(self, options: DemoOptions, rank: EngineRank, *, after_restart: bool) -> None:
        self._after_restart = after_restart
        self.parts = DemoParts(options, rank)
        self._cached = self.parts.create_engine(with_cache=True)
        self._plain = self.parts.create_engine(with_cache=False)
        # The first forward passes of a process pay for thread pools, kernels and fresh memory; the
        # engine without a cache keeps nothing of them.
        first_prompt = self.parts.conversations[0].first_prompt()
        self._plain.run(Request("warm-up", first_prompt, max_new_tokens=2))
        self._turns: list[TurnReport] = []
        self._differences: list[AnswerDifference] = []

    def serve_all(
        self, history: dict[int, list[int]], *, progress: Callable[[int], object]
    ) -> DemoReport:
        """Serve all turns of the phase, and close.

        Args:
            history: tokens of each conversation so far by user; brought up to date.
            progress: told the number of turns just served.
        """
        options = self.parts.options
        size = options.size
        order = interleave(num_users=size.num_users, num_turns=size.num_turns, seed=options.seed)
        cut = size.num_users * size.turns_before_restart
        order = order[cut:] if self._after_restart else order[:cut]
        for first in range(0, len(order), 2):
            turns = [
                _Turn(user, turn, self.parts.request(user, turn, history))
                for user, turn in order[first : first + 2]
            ]
            self._serve(turns)
            for user, _, request in turns:
                history[user] = request.prompt_ids + request.output_ids
            progress(len(turns))
        return self._close()

    def _serve(self, turns: Sequence[_Turn]) -> None:
        """Answer some prompts together; then each of them alone, uncached."""
        self._cached.run(*(turn.request for turn in turns))
        for user, turn, cached in turns:
            plain = Request("plain", cached.prompt_ids, max_new_tokens=cached.max_new_tokens)
            self._plain.run(plain)
            difference = compare_answers(turn, user, cached, plain)
            if difference is not None:
                self._differences.append(difference)
            self._turns.append(self._turn_report(user, turn, cached, plain, difference is None))

    def _turn_report(
        self, user: int, turn: int, cached: Request, plain: Request, equal: bool
    ) -> TurnReport:
        return TurnReport(
            user=user,
            turn=turn,
            after_restart=self._after_restart,
            prompt_tokens=cached.num_prompt_tokens,
            device_hit_tokens=cached.device_hit_tokens,
            host_hit_tokens=cached.host_hit_tokens,
            storage_hit_tokens=cached.storage_hit_tokens,
            computed_tokens=cached.computed_tokens,
            ttft_seconds=cached.first_token_at - cached.submitted_at,
            ttft_uncached_seconds=plain.first_token_at - plain.submitted_at,
            answer_tokens=len(cached.output_ids),
            answer_equal=equal,
            text=self.parts.tokenizer.decode(cached.output_ids),
            delayed_hit_tokens=cached.delayed_hit_tokens,
        )

    def _close(self) -> DemoReport:
        """Let everything reach storage, stop, and return the report."""
        cache = self._cached.cache
        assert cache is not None
        settled = self._cached.settle(timeout_seconds=60.0)
        stats = cache.controller.stats
        if not (cache.close(timeout_seconds=30.0) and settled):
            raise HiCacheError("the cache did not come to rest; see the counters of the report")
        moved = {
            kind.value: MovementReport(num_bytes=one.num_bytes, seconds=one.seconds)
            for kind, one in stats.items()
        }
        outcomes = {
            f"{kind.value}_{name}": count
            for kind, one in stats.items()
            for name, count in one.outcomes.items()
        }
        return DemoReport(
            model=self.parts.model.config.name,
            config=self.parts.options.to_mapping(),
            machine=machine_facts(str(self.parts.device.torch_device)),
            turns=tuple(self._turns),
            movements=Movements(**moved),
            differences=tuple(self._differences),
            counters={**cache.counters, **self._cached.counters, **outcomes},
        )


def main(folder: Path, phase: str, rank: int) -> None:
    """Run one rank of one phase in this process; see the module's docstring."""
    from tqdm import tqdm

    after_restart = phase == "after"
    options = DemoOptions.read(folder / "options.json")
    history_file = folder / "history.json"
    history: dict[int, list[int]] = {}
    if after_restart:
        history = {int(user): ids for user, ids in json.loads(history_file.read_text()).items()}
    size = options.size
    turns = size.turns_after_restart if after_restart else size.turns_before_restart
    label = "after the restart" if after_restart else "before the restart"
    hidden = True if rank else None
    with (
        _joined(options, folder, phase, rank) as engine_rank,
        tqdm(total=turns * size.num_users, desc=label, unit="turn", disable=hidden) as bar,
    ):
        served = _Phase(options, engine_rank, after_restart=after_restart)
        logits = served.parts.first_logits().cpu().numpy() if options.ranks_change else None
        report = served.serve_all(history, progress=bar.update)
    if rank == 0:
        history_file.write_text(json.dumps(history))
        if logits is not None:
            report = _compared(report, logits, folder / "logits", after_restart=after_restart)
    report.write_json(folder / f"{phase}.{rank}.json")


def _joined(
    options: DemoOptions, folder: Path, phase: str, rank: int
) -> AbstractContextManager[EngineRank]:
    """Return this process among the ranks of its phase, which share the cores."""
    tp_size = options.tp_size_of(after_restart=phase == "after")
    num_ranks = tp_size * options.pp_size
    if num_ranks == 1:
        return nullcontext(EngineRank())
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    return joined_ranks(
        rank,
        tp_size=tp_size,
        pp_size=options.pp_size,
        rendezvous=folder / f"{phase}.ranks",
        timeout_seconds=_PATIENCE_SECONDS,
    )


def _compared(
    report: DemoReport, logits: np.ndarray, file: Path, *, after_restart: bool
) -> DemoReport:
    """Note, after the restart, by how much the logits are not those from before it."""
    if not after_restart:
        logits.tofile(file)
        return report
    before = np.fromfile(file, dtype=logits.dtype).reshape(logits.shape)
    difference = float(np.abs(logits - before).max())
    return dataclasses.replace(report, restart_logit_difference=difference)


if __name__ == "__main__":
    end_with_parent()
    try:
        main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    except HiCacheError as error:
        sys.exit(f"hicache: {error}")
    except KeyboardInterrupt:
        sys.exit(1)
