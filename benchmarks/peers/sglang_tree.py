"""Drives a prefix tree of SGLang for a benchmark that runs in another process.

Run by the interpreter of SGLang's own environment:

    python -m benchmarks.peers.sglang_tree CORE [SOURCE]

`CORE` is `radix`, `hiradix`, `unified-rust` or `hash`; `SOURCE` is a folder with another release to
import instead of the one installed. Answers calls as `worker.serve` says. A tree gets page ids and
gives page ids back; SGLang itself works with the token slots of those pages. Keys are kept under
the last page of their path. All times are of single calls in us, and everything that is not the
call (keys, slots, checks) is made before or after it.
"""

from __future__ import annotations

import base64
import importlib
import json
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers.sglang_packages import prepare_sglang, sglang_version, srt
from benchmarks.peers.worker import serve

if TYPE_CHECKING:
    from benchmarks.peers.worker import Worker


class _Slots:
    """Stands in for the allocator of token slots and keeps what the tree frees."""

    device = "cpu"

    def __init__(self, pool: object = None) -> None:
        self._pool = pool
        self.freed: list[Any] = []

    def get_kvcache(self) -> object:
        return self._pool

    def free(self, indices: Any) -> None:
        self.freed.append(indices)

    def free_segment(self, indices: Any, *, start_pos: int = 0) -> None:
        self.freed.append(indices)

    def free_segments(self, segments: Any) -> None:
        self.freed += [indices for indices, _ in segments]

    free_full, free_full_segment, free_full_segments = free, free_segment, free_segments


class Tree:
    """One tree and the keys that were put into it; each method answers one kind of line."""

    def __init__(self, core: str) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        self._calls = srt("mem_cache.base_prefix_cache")
        self._create_key = srt("mem_cache.radix_cache").RadixKey
        self._core = core
        self._hiradix: Any = None

    def version(self) -> str:
        """Return SGLang's version."""
        return sglang_version()

    def reset(self, *, page_size: int, eviction_policy: str = "lru") -> bool:
        """Begin with an empty tree; return whether a match gives slots without being asked."""
        self._page_size = page_size
        self._eviction_policy = eviction_policy
        self._keys: dict[int, tuple[Any, Any]] = {}
        self._slots = _Slots()
        self._cache = getattr(self, "_create_" + self._core.partition("-")[0])()
        # Of the newer release a match gives only nodes; the slots are another call.
        return not hasattr(self._cache, "path_device_indices")

    def insert(self, *, tokens: str, lengths: list[int], paths: list[list[int]]) -> None:
        """Insert keys of `lengths` tokens, which follow each other in `tokens`."""
        data, start = _unpack(tokens), 0
        for length, path in zip(lengths, paths, strict=True):
            key, value = self._prepare(data[start : start + length], path)
            self._cache.insert(self._calls.InsertParams(key=key, value=value))
            start += length

    def match(self, *, page: int, start: str, slots: bool, samples: int) -> dict[str, Any]:
        """Time matches of a kept key, or of one made from a list of tokens each time."""
        key, params = self._keys[page][0], self._calls.MatchPrefixParams
        tokens = list(key.token_ids)
        cache, create_key = self._cache, self._create_key
        collect = slots and hasattr(cache, "path_device_indices")

        def once() -> Any:
            if start == "list":
                found = cache.match_prefix(params(key=create_key(array("q", tokens), None)))
            else:
                found = cache.match_prefix(params(key=key))
            if collect:
                return cache.path_device_indices(found.last_device_node)
            return found

        times = _time(once, samples)
        return {"times": times, "path": self._path(cache.match_prefix(params(key=key)))}

    def replay(self, *, path: str, size: int) -> int:
        """Return how many blocks the requests of a trace find in `size` pages of one token.

        The file at `path` has `blocks` of all requests and the `lengths` of each. A request is
        matched, then inserted, then the tree is brought to its size.
        """
        cache, calls = self._cache, self._calls
        match, insert, evict = calls.MatchPrefixParams, calls.InsertParams, calls.EvictParams
        trace = np.load(path)
        all_blocks = trace["blocks"]
        hits = start = 0
        for length in trace["lengths"].tolist():
            blocks = all_blocks[start : start + length]
            start += length
            key = self._create_key(array("q", blocks.tolist()), None)
            hits += sum(map(len, self._slots_of(cache.match_prefix(match(key=key)))))
            value = self._torch.from_numpy(blocks.astype(np.int64))
            cache.insert(insert(key=key, value=value))
            excess = cache.evictable_size() - size
            if excess > 0:
                cache.evict(evict(num_tokens=excess))
            self._slots.freed = []
        return hits

    def lock_unlock(self, *, page: int, samples: int) -> dict[str, Any]:
        """Time a lock and unlock of the node at which a kept key ends."""
        cache, params = self._cache, self._calls.MatchPrefixParams
        node = cache.match_prefix(params(key=self._keys[page][0])).last_device_node

        def once() -> None:
            receipt = cache.inc_lock_ref(node)
            cache.dec_lock_ref(node, receipt.to_dec_params())

        receipt = cache.inc_lock_ref(node)
        protected = cache.protected_size()
        cache.dec_lock_ref(node, receipt.to_dec_params())
        times = _time(once, samples)
        return {"times": times, "protected": [protected, cache.protected_size()]}

    def cycles(
        self, *, tokens: str, length: int, cycles: list[tuple[list[int], list[int]]]
    ) -> list[dict[str, Any]]:
        """Run cycles of pages to match and path to insert, whose keys are rows of `tokens`."""
        data = _unpack(tokens).reshape(len(cycles), length)
        return [
            self._cycle(chosen, row, path) for row, (chosen, path) in zip(data, cycles, strict=True)
        ]

    def _cycle(self, chosen: list[int], tokens: Any, path: list[int]) -> dict[str, Any]:
        cache, calls, clock = self._cache, self._calls, time.perf_counter_ns
        params, evict = calls.MatchPrefixParams, calls.EvictParams(num_tokens=self._page_size)
        keys = [self._keys[page][0] for page in chosen]
        key, value = self._prepare(tokens, path)
        matches = []
        begin = clock()
        for used in keys:
            found = cache.match_prefix(params(key=used))
            receipt = cache.inc_lock_ref(found.last_device_node)
            cache.dec_lock_ref(found.last_device_node, receipt.to_dec_params())
            matches.append(found)
        before_insert = clock()
        inserted = cache.insert(calls.InsertParams(key=key, value=value))
        # Some trees free what they did not take of an insert.
        self._slots.freed = []
        before_evict = clock()
        cache.evict(evict)
        end = clock()
        return {
            "matched": [self._path(found) for found in matches],
            "present": inserted.prefix_len // self._page_size,
            "freed": self._pages(self._slots.freed),
            "insert_us": (before_evict - before_insert) / 1e3,
            "evict_us": (end - before_evict) / 1e3,
            "cycle_us": (end - begin) / 1e3,
        }

    def _prepare(self, tokens: Any, path: list[int]) -> tuple[Any, Any]:
        """Return the key of `tokens` and the slots of `path`, and keep them under its last page."""
        key = self._create_key(array("q", tokens.tolist()), None)
        offsets = np.arange(self._page_size)
        slots = (np.array(path)[:, np.newaxis] * self._page_size + offsets).reshape(-1)
        kept = (key, self._torch.from_numpy(slots))
        self._keys[path[-1]] = kept
        return kept

    def _path(self, found: Any) -> list[int]:
        """Return the pages that a match has found, in order."""
        return self._pages(self._slots_of(found))

    def _slots_of(self, found: Any) -> list[Any]:
        if hasattr(self._cache, "path_device_indices"):
            return [self._cache.path_device_indices(found.last_device_node)]
        return [found.device_indices]

    def _pages(self, slots: list[Any]) -> list[int]:
        if not slots:
            return []
        flat = self._torch.cat(list(slots)).numpy().reshape(-1, self._page_size)
        pages = flat[:, 0] // self._page_size
        whole = flat == pages[:, np.newaxis] * self._page_size + np.arange(self._page_size)
        return pages.tolist() if whole.all() else []

    def _create_radix(self) -> Any:
        return srt("mem_cache.radix_cache").RadixCache(self._params())

    def _create_unified(self) -> Any:
        components = srt("mem_cache.unified_cache.component_type").ComponentType
        params = self._params(tree_components=(components.FULL,))
        return srt("mem_cache.unified_radix_cache").UnifiedRadixCache(params)

    def _params(self, **others: Any) -> Any:
        return srt("mem_cache.cache_init_params").CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self._slots,
            page_size=self._page_size,
            eviction_policy=self._eviction_policy,
            **others,
        )

    def _create_hiradix(self) -> Any:
        # Its process group can be made once per process.
        if self._hiradix is None:
            self._hiradix = _create_hiradix(self._page_size)
        self._hiradix.reset()
        self._hiradix.cache_controller.mem_pool_device_allocator = self._slots
        return self._hiradix


def _create_hiradix(page_size: int) -> Any:
    """Return a HiRadixCache over the smallest pools, which never writes to its host pool."""
    torch, distributed = importlib.import_module("torch"), srt("distributed")
    # There is no CUDA to pin memory with.
    srt("mem_cache.pool_host.base").HostKVCache.pin_memory = property(
        lambda _: False, lambda _, value: None
    )
    with tempfile.TemporaryDirectory() as folder:
        model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
                 "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1,
                 "num_key_value_heads": 1, "vocab_size": 1024, "max_position_embeddings": 2048,
                 "torch_dtype": "bfloat16"}  # fmt: skip
        Path(folder, "config.json").write_text(json.dumps(model), encoding="utf-8")
        server_args = srt("server_args").ServerArgs(
            model_path=folder, device="cpu", page_size=page_size, attention_backend="torch_native",
            enable_hierarchical_cache=True, hicache_ratio=1.5, hicache_io_backend="direct",
            hicache_mem_layout="layer_first", hicache_write_policy="write_through_selective",
        )  # fmt: skip
        srt("runtime_context").publish(server_args, role="scheduler")
        distributed.init_distributed_environment(
            backend="gloo", world_size=1, rank=0, local_rank=0,
            distributed_init_method=f"file://{folder}/group",
        )  # fmt: skip
        distributed.initialize_model_parallel()
    pool = srt("mem_cache.memory_pool").MHATokenToKVPool(
        size=64 * page_size, page_size=page_size, dtype=torch.bfloat16, head_num=1, head_dim=8,
        layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    world = torch.distributed.group.WORLD
    params = srt("mem_cache.cache_init_params").CacheInitParams(
        disable=False, token_to_kv_pool_allocator=_Slots(pool), page_size=page_size,
        req_to_token_pool=None, tp_cache_group=world, attn_tp_cache_group=world,
    )  # fmt: skip
    cache = srt("mem_cache.hiradix_cache").HiRadixCache(params, server_args)
    cache.write_through_threshold = 1 << 30
    return cache


class Hash:
    """SGLang's page hashes, by its extension in C++, which is built on first use."""

    def __init__(self) -> None:
        self._hash = srt("mem_cache.utils").get_hash_str

    def version(self) -> str:
        """Return SGLang's version."""
        return sglang_version()

    def hash(self, *, tokens: str, page_size: int, samples: int) -> dict[str, Any]:
        """Time the chained hashes of all pages of `tokens`."""
        ids = array("q", _unpack(tokens).tolist())
        hashes = self._hash(ids, None, page_size=page_size)
        times = _time(lambda: self._hash(ids, None, page_size=page_size), samples)
        return {"times": times, "hashes": hashes}


def _time(call: Any, samples: int) -> list[float]:
    call()
    clock, times = time.perf_counter_ns, [0] * samples
    for index in range(samples):
        begin = clock()
        call()
        times[index] = clock() - begin
    return [nanoseconds / 1e3 for nanoseconds in times]


def _unpack(tokens: str) -> Any:
    """Return the token ids in a text: int32, in base64."""
    return np.frombuffer(base64.b64decode(tokens), dtype=np.int32)


def main(core: str, source: str | None = None) -> None:
    """Answer lines until there are no more."""

    def create() -> Worker:
        prepare_sglang(source)
        return Hash() if core == "hash" else Tree(core)

    serve(create)


if __name__ == "__main__":
    main(*sys.argv[1:])
