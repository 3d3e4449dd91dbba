"""What a process of the demo puts together: model, conversations, engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache.device import create_device
from hicache.engine.conversations import code_assistant_conversations
from hicache.engine.engine import CacheHandle, Engine
from hicache.engine.llama import LlamaModel
from hicache.engine.model_config import tiny_config
from hicache.engine.request import Request
from hicache.engine.tokenizer import BpeTokenizer, ByteTokenizer
from hicache.engine.weights import load_smollm2, random_weights
from hicache.hiradix_cache import create_hiradix_cache
from hicache.layout import KVGeometry
from hicache.pools import DeviceKVPool, PageAllocator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache.engine.demo_options import DemoOptions
    from hicache.engine.tokenizer import Tokenizer

__all__ = ["DemoParts", "load_model"]


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


class DemoParts:
    """The model and the conversations of one run, and engines that serve them.

    Attributes:
        options: of the run.
        device: where everything is computed.
        model, tokenizer: see `load_model`.
        conversations: by user.
    """

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self.device = create_device("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.tokenizer = load_model(options, self.device.torch_device)
        self.conversations = code_assistant_conversations(
            self.tokenizer,
            num_users=options.size.num_users,
            num_turns=options.size.num_turns,
            source_tokens=options.size.source_tokens,
            seed=options.seed,
        )
        config = self.model.config
        self._geometry = KVGeometry(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=options.dtype,
            page_size=options.cache.page_size,
        )

    def create_engine(self, *, with_cache: bool) -> Engine:
        """Return an engine with a device pool of its own."""
        num_pages = self.options.size.device_tokens // self._geometry.page_size
        pool = DeviceKVPool(
            self._geometry, num_pages=num_pages, torch_device=self.device.torch_device
        )
        allocator = PageAllocator(num_pages)
        handle = None
        if with_cache:
            handle = CacheHandle(
                *create_hiradix_cache(
                    self.options.cache,
                    device=self.device,
                    device_pool=pool,
                    device_allocator=allocator,
                )
            )
        chunk_tokens = self.options.size.chunk_tokens
        return Engine(self.model, pool, allocator, cache=handle, chunk_tokens=chunk_tokens)

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
