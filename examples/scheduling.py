"""What a cache-aware scheduler saves: bursts of questions about the same documents, and a stream.

Half of the documents are in storage from an engine that has ended. For the order of arrival and for
the cache-aware order, prints the steps, the prompt tokens that were computed, those read from
storage, those found late, and times to the first token: on a clock on which a step takes 5 ms, a
token in it 0.1 ms more, and a copy nothing, so that they hardly depend on the machine. The answers
must be equal.
"""

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence

import torch

from hicache.clock import ManualClock
from hicache.config import HiCacheConfig
from hicache.device import create_device
from hicache.engine.engine import CacheHandle, Engine
from hicache.engine.llama import LlamaModel
from hicache.engine.model import KVPool, SequenceChunk
from hicache.engine.model_config import tiny_config
from hicache.engine.request import Request
from hicache.engine.weights import random_weights
from hicache.engine.workloads import Arrival, document_bursts, document_stream, documents
from hicache.hiradix_cache import create_hiradix_cache
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.radix import CopyKind

PAGE_SIZE = 16
DEVICE_TOKENS = 6144
CONFIG = dataclasses.replace(tiny_config(), num_layers=1)
VOCAB_SIZE = 256  # bytes
TEXTS = documents(num_documents=12, max_tokens=512, vocab_size=VOCAB_SIZE, seed=0)
WORKLOADS = {
    "bursts": document_bursts(
        TEXTS, num_bursts=10, burst_size=8, gap_seconds=0.5, vocab_size=VOCAB_SIZE, seed=0
    ),
    "stream": document_stream(
        TEXTS,
        num_prompts=120,
        mean_gap_seconds=0.04,
        new_share=0.3,
        new_tokens=900,
        vocab_size=VOCAB_SIZE,
        seed=0,
    ),
}
TITLES = (
    "workload", "chunk", "order      ", "steps", "computed", "read from L3", "delayed hits",
    "mean TTFT ms", "p95",
)  # fmt: skip


class TimedModel:
    """A model whose clock goes on with what it computes."""

    config = CONFIG

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._model = LlamaModel(CONFIG, random_weights(CONFIG, 0))

    def forward(self, chunks: Sequence[SequenceChunk], pool: KVPool) -> torch.Tensor:
        """See `Model`."""
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        self._clock.advance(0.005 + 0.0001 * num_tokens)
        return self._model.forward(chunks, pool)


def create_engine(
    clock: ManualClock, directory: str, *, cache_aware: bool, chunk_tokens: int
) -> Engine:
    """Return an engine whose storage is `directory`."""
    num_pages = DEVICE_TOKENS // PAGE_SIZE
    geometry = CONFIG.geometry(dtype="float32", page_size=PAGE_SIZE)
    pool = DeviceKVPool(geometry, num_pages=num_pages, torch_device=torch.device("cpu"))
    allocator = PageAllocator(num_pages)
    config = HiCacheConfig.from_mapping(
        {
            "page_size": PAGE_SIZE,
            "prefetch_policy": "wait_complete",
            "prefetch": {"threshold_tokens": 64, "cost_estimate": False},
            "host": {"ratio": 1.5},
            "storage": {
                "backend": "file",
                "extra_config": {"path": directory},
                "model_name": CONFIG.name,
                "weights_revision": CONFIG.weights_revision,
            },
        }
    )
    handle = CacheHandle(
        *create_hiradix_cache(
            config, device=create_device("cpu"), device_pool=pool, device_allocator=allocator
        )
    )
    return Engine(
        TimedModel(clock),
        pool,
        allocator,
        cache=handle,
        cache_aware=cache_aware,
        chunk_tokens=chunk_tokens,
        clock=clock,
    )


def serve(
    engine: Engine, clock: ManualClock, arrivals: Sequence[Arrival]
) -> tuple[list[Request], int]:
    """Serve prompts as they come; return their requests and how many steps that took."""
    requests = [Request(str(n), one.prompt, max_new_tokens=6) for n, one in enumerate(arrivals)]
    num_steps, num_submitted, begin = 0, 0, clock.now()
    while num_submitted < len(requests) or engine.waiting or engine.running:
        if not engine.waiting and not engine.running:
            clock.advance(max(0.0, begin + arrivals[num_submitted].seconds - clock.now()))
        while num_submitted < len(requests):
            if begin + arrivals[num_submitted].seconds > clock.now():
                break
            engine.submit(requests[num_submitted])
            num_submitted += 1
        num_steps += bool(engine.step())
    return requests, num_steps


def close(engine: Engine) -> None:
    """Let all that was computed reach storage, and stop."""
    assert engine.cache is not None
    assert engine.settle()
    assert engine.cache.close()


def measure(name: str, *, cache_aware: bool, chunk_tokens: int) -> list[list[int]]:
    """Serve a workload, print a row of figures and return the answers."""
    clock = ManualClock()
    with tempfile.TemporaryDirectory() as directory:
        before = create_engine(clock, directory, cache_aware=True, chunk_tokens=chunk_tokens)
        serve(before, clock, [Arrival(0.0, text) for text in TEXTS[::2]])
        close(before)
        engine = create_engine(clock, directory, cache_aware=cache_aware, chunk_tokens=chunk_tokens)
        requests, num_steps = serve(engine, clock, WORKLOADS[name])
        close(engine)
    assert engine.cache is not None
    waits = sorted(one.first_token_at - one.submitted_at for one in requests)
    print_row(
        name,
        chunk_tokens,
        "cache-aware" if cache_aware else "arrival",
        num_steps,
        sum(one.computed_tokens for one in requests),
        engine.cache.controller.stats[CopyKind.PREFETCH].num_pages * PAGE_SIZE,
        sum(one.delayed_hit_tokens for one in requests),
        f"{1e3 * statistics.mean(waits):.0f}",
        f"{1e3 * waits[int(0.95 * len(waits))]:.0f}",
    )
    return [one.output_ids for one in requests]


def print_row(*cells: object) -> None:
    """Print cells in columns as wide as their titles."""
    pairs = zip(cells, TITLES, strict=True)
    print("  ".join(f"{cell!s:>{max(5, len(title))}}" for cell, title in pairs))


def main() -> None:
    """Measure both orders with chunks that hold one prompt and with chunks that hold many."""
    print_row(*TITLES)
    for name in WORKLOADS:
        for chunk_tokens in (512, 2048):
            plain = measure(name, cache_aware=False, chunk_tokens=chunk_tokens)
            assert measure(name, cache_aware=True, chunk_tokens=chunk_tokens) == plain


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
