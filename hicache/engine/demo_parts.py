"""What a process of the demo puts together: model, conversations, engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache.device import create_device
from hicache.engine.conversations import code_assistant_conversations
from hicache.engine.engine import CacheHandle, Engine
from hicache.engine.llama import LlamaModel
from hicache.engine.model import SequenceChunk
from hicache.engine.model_config import tiny_config
from hicache.engine.model_shards import llama_shard
from hicache.engine.peers import EngineRank
from hicache.engine.request import Request
from hicache.engine.tokenizer import BpeTokenizer, ByteTokenizer
from hicache.engine.weights import load_smollm2, random_weights
from hicache.hiradix_cache import create_hiradix_cache
from hicache.pools import DeviceKVPool, PageAllocator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache.engine.demo_options import DemoOptions
    from hicache.engine.tokenizer import Tokenizer

__all__ = ["DemoParts", "load_model"]


def load_model(
    options: DemoOptions, device: torch.device, rank: EngineRank
) -> tuple[LlamaModel, Tokenizer]:
    """Return the rank's part of the model that the options name, on `device`, and its tokeniser."""
    tokenizer: Tokenizer
    if options.model == "random":
        # Its layers are too small for two threads, which would wait for each other on busy cores.
        torch.set_num_threads(1)
        config, weights = tiny_config(), random_weights(tiny_config(), options.seed)
        tokenizer = ByteTokenizer()
    else:
        config, weights, source = load_smollm2()
        tokenizer = BpeTokenizer(source)
    if rank.peers.size > 1:
        config, weights = llama_shard(config, weights, rank.placement)
    dtype = getattr(torch, options.dtype)
    model = LlamaModel(config, weights, dtype=dtype, device=device, peers=rank.peers)
    return model, tokenizer


class DemoParts:
    """The model and the conversations of one run, and engines that serve them.

    Args:
        options: of the run.
        rank: which part of the model this process computes, and with whom; by default all of it.

    Attributes:
        options: of the run.
        device: where everything is computed.
        model, tokenizer: see `load_model`.
        conversations: by user.
    """

    def __init__(self, options: DemoOptions, rank: EngineRank | None = None) -> None:
        self.options = options
        self._rank = rank or EngineRank()
        self.device = create_device("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.tokenizer = load_model(options, self.device.torch_device, self._rank)
        self.conversations = code_assistant_conversations(
            self.tokenizer,
            num_users=options.size.num_users,
            num_turns=options.size.num_turns,
            source_tokens=options.size.source_tokens,
            seed=options.seed,
        )
        self._geometry = self.model.config.geometry(
            dtype=options.dtype, page_size=options.cache.page_size
        )

    def create_engine(self, *, with_cache: bool) -> Engine:
        """Return an engine with a device pool of its own."""
        num_pages = self.options.size.device_tokens // self._geometry.page_size
        pool = self._create_pool(num_pages)
        allocator = PageAllocator(num_pages)
        handle = None
        if with_cache:
            handle = CacheHandle(
                *create_hiradix_cache(
                    self.options.cache,
                    device=self.device,
                    device_pool=pool,
                    device_allocator=allocator,
                    ranks=self._rank.group,
                    placement=self._rank.placement,
                )
            )
        chunk_tokens = self.options.size.chunk_tokens
        return Engine(self.model, pool, allocator, cache=handle, chunk_tokens=chunk_tokens)

    def first_logits(self) -> torch.Tensor:
        """Return the logits `[vocab_size]` after the first prompt, computed in one pass."""
        prompt = self.conversations[0].first_prompt()
        num_pages = -(-len(prompt) // self._geometry.page_size)
        chunk = SequenceChunk(prompt, 0, np.arange(num_pages))
        return self.model.forward([chunk], self._create_pool(num_pages))[0]

    def _create_pool(self, num_pages: int) -> DeviceKVPool:
        return DeviceKVPool(
            self._geometry, num_pages=num_pages, torch_device=self.device.torch_device
        )

    def request(self, user: int, turn: int, history: Mapping[int, Sequence[int]]) -> Request:
        """Return what a user asks in a turn.

        Args:
            user: whose conversation it is.
            turn: of the conversation, from 0.
            history: tokens of each conversation so far by user, prompts and answers.
        """
        conversation, answer_tokens = self.conversations[user], self.options.size.answer_tokens
        if turn == 0:
            prompt = conversation.first_prompt()
        else:
            tokens = history[user]
            previous, answer = tokens[:-answer_tokens], tokens[-answer_tokens:]
            prompt = conversation.next_prompt(turn, previous_prompt=previous, answer=answer)
        return Request(f"{user}/{turn}", prompt, max_new_tokens=answer_tokens)
