"""One process of the demo: serves turns with the cache and, beside it, without.

Run as `python -m hicache.engine.demo_phase FOLDER before|after`: reads the options from the folder,
takes up the conversations where the phase before left them, and leaves its report and the
conversations there. What it finds of the earlier phase's KV it finds in storage alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hicache.device import create_device
from hicache.engine.conversations import code_assistant_conversations, interleave
from hicache.engine.demo_options import DemoOptions
from hicache.engine.engine import CacheHandle, Engine
from hicache.engine.llama import LlamaModel
from hicache.engine.machine import machine_facts
from hicache.engine.model_config import tiny_config
from hicache.engine.report import (
    AnswerDifference,
    DemoReport,
    MovementReport,
    Movements,
    TurnReport,
)
from hicache.engine.request import Request
from hicache.engine.tokenizer import BpeTokenizer, ByteTokenizer
from hicache.engine.weights import load_smollm2, random_weights
from hicache.errors import HiCacheError
from hicache.hiradix_cache import create_hiradix_cache
from hicache.layout import KVGeometry
from hicache.pools import DeviceKVPool, PageAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.engine.conversations import Conversation
    from hicache.engine.tokenizer import Tokenizer

__all__ = ["compare_answers", "load_model", "serve_phase"]

_NEAR_TIE = 1e-3
"""Logits closer than this can be swapped by rounding alone."""


class _Turn(NamedTuple):
    user: int
    turn: int
    request: Request


def load_model(options: DemoOptions, device: torch.device) -> tuple[LlamaModel, Tokenizer]:
    """Return the model that the options name, on `device`, and its tokeniser."""
    dtype = getattr(torch, options.dtype)
    if options.model == "random":
        # Its layers are too small for two threads, which would wait for each other on busy cores.
        torch.set_num_threads(1)
        config, weights = tiny_config(), random_weights(tiny_config(), options.seed)
        return LlamaModel(config, weights, dtype=dtype, device=device), ByteTokenizer()
    loaded = load_smollm2()
    model = LlamaModel(loaded.config, loaded.weights, dtype=dtype, device=device)
    return model, BpeTokenizer(loaded.tokenizer)


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
    """The two engines of a process and what they have served."""

    def __init__(self, options: DemoOptions, *, after_restart: bool) -> None:
        self._options = options
        self._after_restart = after_restart
        self._device = create_device("cuda" if torch.cuda.is_available() else "cpu")
        self._model, self._tokenizer = load_model(options, self._device.torch_device)
        size, config = options.size, self._model.config
        self.conversations = code_assistant_conversations(
            self._tokenizer,
            num_users=size.num_users,
            num_turns=size.num_turns,
            source_tokens=size.source_tokens,
            seed=options.seed,
        )
        self._geometry = KVGeometry(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=options.dtype,
            page_size=options.cache.page_size,
        )
        self._cached = self._engine(with_cache=True)
        self._plain = self._engine(with_cache=False)
        # The first forward passes of a process pay for thread pools, kernels and fresh memory; the
        # engine without a cache keeps nothing of them.
        warm_up = Request("warm-up", self.conversations[0].first_prompt(), max_new_tokens=2)
        self._plain.run(warm_up)
        self._turns: list[TurnReport] = []
        self._differences: list[AnswerDifference] = []

    def _engine(self, *, with_cache: bool) -> Engine:
        num_pages = self._options.size.device_tokens // self._geometry.page_size
        pool = DeviceKVPool(
            self._geometry, num_pages=num_pages, torch_device=self._device.torch_device
        )
        allocator = PageAllocator(num_pages)
        handle = None
        if with_cache:
            handle = CacheHandle(
                *create_hiradix_cache(
                    self._options.cache,
                    device=self._device,
                    device_pool=pool,
                    device_allocator=allocator,
                )
            )
        chunk_tokens = self._options.size.chunk_tokens
        return Engine(self._model, pool, allocator, cache=handle, chunk_tokens=chunk_tokens)

    def serve(self, batch: Sequence[tuple[int, int, list[int]]]) -> list[tuple[int, list[int]]]:
        """Answer a batch of (user, turn, prompt) together; then each prompt alone, uncached."""
        answer_tokens = self._options.size.answer_tokens
        turns = [
            _Turn(user, turn, Request(f"{user}/{turn}", prompt, max_new_tokens=answer_tokens))
            for user, turn, prompt in batch
        ]
        self._cached.run(*(turn.request for turn in turns))
        for user, turn, cached in turns:
            plain = Request("plain", cached.prompt_ids, max_new_tokens=answer_tokens)
            self._plain.run(plain)
            difference = compare_answers(turn, user, cached, plain)
            if difference is not None:
                self._differences.append(difference)
            self._turns.append(self._turn_report(user, turn, cached, plain, difference is None))
        return [(turn.user, turn.request.output_ids) for turn in turns]

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
            text=self._tokenizer.decode(cached.output_ids),
        )

    def close(self) -> DemoReport:
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
            model=self._model.config.name,
            config=self._options.to_mapping(),
            machine=machine_facts(str(self._device.torch_device)),
            turns=tuple(self._turns),
            movements=Movements(**moved),
            differences=tuple(self._differences),
            counters={**cache.counters, **outcomes},
        )


def serve_phase(
    options: DemoOptions,
    *,
    after_restart: bool,
    history: dict[int, list[int]],
    progress: Callable[[int], object],
) -> DemoReport:
    """Serve all turns of one phase.

    Args:
        options: the run.
        after_restart: which phase.
        history: tokens of each conversation so far by user; brought up to date.
        progress: told the number of turns just served.
    """
    phase = _Phase(options, after_restart=after_restart)
    size = options.size
    order = interleave(num_users=size.num_users, num_turns=size.num_turns, seed=options.seed)
    cut = size.num_users * size.turns_before_restart
    order = order[cut:] if after_restart else order[:cut]
    for first in range(0, len(order), 2):
        batch = [
            (user, turn, _prompt(phase.conversations[user], turn, history, size.answer_tokens))
            for user, turn in order[first : first + 2]
        ]
        answers = phase.serve(batch)
        for (user, _, prompt), (_, answer) in zip(batch, answers, strict=True):
            history[user] = prompt + answer
        progress(len(batch))
    return phase.close()


def _prompt(
    conversation: Conversation, turn: int, history: dict[int, list[int]], answer_tokens: int
) -> list[int]:
    if turn == 0:
        return conversation.first_prompt()
    tokens = history[conversation.user]
    previous, answer = tokens[:-answer_tokens], tokens[-answer_tokens:]
    return conversation.next_prompt(turn, previous_prompt=previous, answer=answer)


def main(folder: Path, phase: str) -> None:
    """Run one phase in this process; see the module's docstring."""
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
    with tqdm(total=turns * size.num_users, desc=label, unit="turn", disable=None) as bar:
        report = serve_phase(
            options, after_restart=after_restart, history=history, progress=bar.update
        )
    history_file.write_text(json.dumps(history))
    report.write_json(folder / f"{phase}.json")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except HiCacheError as error:
        sys.exit(f"hicache: {error}")
