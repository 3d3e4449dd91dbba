"""One rank of a spread engine: serves scenarios that come as JSON, one a line, and answers so.

Run as `python engine_worker.py FOLDER RANK`; ends with its standard input.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import queue
import random
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from spread_scenarios import Scenario, Served

from hicache.config import HiCacheConfig, StorageConfig
from hicache.device import create_device
from hicache.engine.engine import CacheHandle, Engine
from hicache.engine.llama import LlamaModel
from hicache.engine.mla import MlaModel
from hicache.engine.model_config import tiny_config, tiny_mla_config
from hicache.engine.model_shards import llama_shard, mla_shard
from hicache.engine.passes import Draft
from hicache.engine.request import Request
from hicache.engine.torch_peers import joined_ranks
from hicache.engine.weights import random_mla_weights, random_weights
from hicache.hiradix_cache import create_hiradix_cache
from hicache.layout import KVGeometry, MlaGeometry
from hicache.pools import DeviceKVPool, DeviceMlaPool, PageAllocator
from hicache.testing.invariants import check_system

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache.engine.model_config import LlamaConfig
    from hicache.engine.peers import EngineRank
    from hicache.hiradix_cache import HiRadixCache
    from hicache.layout import PageGeometry
    from hicache.radix import RadixNode
    from hicache.ranks import RankGroup
    from hicache.transfer import TransferPlan

ANSWER_TOKENS = 8
NUM_USERS = 4
PLAIN_TOKENS = 512
MAX_STEPS = 5_000
PATIENCE_SECONDS = 20.0
LLAMA = dataclasses.replace(tiny_config(), num_layers=2)
MLA = dataclasses.replace(tiny_mla_config(), num_layers=2)
SMALL = dataclasses.replace(LLAMA, name="tiny-draft", ffn_size=64)


class CountingGroup:
    """A group that counts what it is asked."""

    def __init__(self, group: RankGroup) -> None:
        self.size = group.size
        self.rank = getattr(group, "rank", 0)
        self.num_calls = 0
        self._group = group

    def agree(self, values: Sequence[int]) -> Sequence[int]:
        self.num_calls += 1
        return self._group.agree(values)


class Conversations:
    """Several people who begin alike; what they say depends on seed and answers alone."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._seed, self._turn = seed, 0
        system = self._tokens(70)
        self._history = [system + self._tokens(60) for _ in range(NUM_USERS)]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(256) for _ in range(count)]

    def serve_turn(self, engine: Engine, scenario: Scenario) -> list[Request]:
        """Serve one more turn of each, among requests that are aborted; return the former."""
        self._turn += 1
        requests = []
        for user, history in enumerate(self._history):
            history += self._tokens(12)
            requests.append(Request(f"{user}/{self._turn}", history, max_new_tokens=ANSWER_TOKENS))
        storm = random.Random(f"{self._seed}/{self._turn}")
        doomed = [self._doomed(storm, number) for number in range(scenario.num_aborts)]
        queue = [*requests, *doomed]
        if not scenario.alone:
            storm.shuffle(queue)
        for arrivals in [[one] for one in queue] if scenario.alone else [queue]:
            for request in arrivals:
                engine.submit(request)
            if scenario.alone:
                assert engine.settle(PATIENCE_SECONDS)
            for _ in range(MAX_STEPS):
                if not engine.waiting and not engine.running:
                    break
                engine.step()
                if doomed and storm.random() < 0.4:
                    engine.abort(doomed.pop().request_id)
            assert not engine.waiting, "requests wait for ever"
        for history, request in zip(self._history, requests, strict=True):
            history += request.output_ids
        return requests

    def _doomed(self, storm: random.Random, number: int) -> Request:
        history = storm.choice(self._history)
        prompt = history[: storm.randrange(1, len(history))]
        prompt += [storm.randrange(256) for _ in range(30)]
        return Request(f"doomed {number}/{self._turn}", prompt, max_new_tokens=ANSWER_TOKENS)


class Rank:
    """What a process keeps from scenario to scenario."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._known: dict[tuple[Any, ...], list[int]] = {}

    def serve(self, number: int, scenario: Scenario) -> Served:
        """Serve the `number`-th scenario of this set of ranks."""
        with joined_ranks(
            self._rank,
            tp_size=scenario.tp_size,
            pp_size=scenario.pp_size,
            rendezvous=self._folder / f"ranks-{number}",
            timeout_seconds=PATIENCE_SECONDS,
        ) as engine_rank:
            return self._serve(scenario, engine_rank)

    def _serve(self, scenario: Scenario, engine_rank: EngineRank) -> Served:
        group = CountingGroup(engine_rank.group)
        model = spread_model(scenario.attention, engine_rank)
        engine = cached_engine(scenario, self._rank, model, engine_rank, group)
        cache = engine.cache
        assert cache is not None
        steps = watch_steps(cache, group)
        if scenario.fault is not None and self._rank == scenario.num_ranks - 1:
            disturb_copies(cache, scenario.fault)
        conversations, requests, trees = Conversations(scenario.seed), [], []
        faults: list[str] = []
        for turn in range(scenario.num_turns):
            if scenario.runtime:
                change_store(engine, scenario, scenario.runtime[turn])
            requests += conversations.serve_turn(engine, scenario)
            trees.append(sorted(tree_of(cache)))
            faults += check_system(cache, request_device_pages=engine.owned_pages())
        faults += finish(engine)
        stats = cache.controller.stats
        return Served(
            answers=[request.output_ids for request in requests],
            plain_answers=self._plain_answers(scenario, model, requests),
            hits=[
                [one.device_hit_tokens, one.host_hit_tokens, one.storage_hit_tokens]
                for one in requests
            ],
            scheduling=[
                *([one.standing.num_passes, one.delayed_hit_tokens] for one in requests),
                list(engine.counters.values()),
            ],
            trees=trees,
            faults=faults,
            failed_loads=sum(request.num_failed_loads for request in requests),
            moved={kind.value: one.num_pages for kind, one in stats.items()},
            num_steps=len(steps),
            num_agreements=sum(steps),
            counters=dict(cache.counters),
        )

    def _plain_answers(
        self, scenario: Scenario, model: LlamaModel | MlaModel, requests: Sequence[Request]
    ) -> list[list[int]]:
        """Return the answers without a cache; a prompt is computed once for all scenarios."""
        pool = make_pool(model, PLAIN_TOKENS, page_size=16)
        allocator = PageAllocator(pool.num_pages)
        engine = Engine(model, pool, allocator, cache=None)
        way = (scenario.tp_size, scenario.pp_size, scenario.attention)
        keys = [(*way, *request.prompt_ids) for request in requests]
        for key, request in zip(keys, requests, strict=True):
            if key not in self._known:
                plain = Request("plain", request.prompt_ids, max_new_tokens=ANSWER_TOKENS)
                engine.run(plain)
                self._known[key] = plain.output_ids
        return [self._known[key] for key in keys]


def spread_model(attention: str, rank: EngineRank) -> LlamaModel | MlaModel:
    """Return a rank's part of the tiny model with that attention."""
    if attention == "mha":
        return llama_part(LLAMA, rank, seed=0)
    config, weights = mla_shard(MLA, random_mla_weights(MLA, 0), rank.placement)
    return MlaModel(config, weights, peers=rank.peers)


def llama_part(config: LlamaConfig, rank: EngineRank, *, seed: int) -> LlamaModel:
    part, weights = llama_shard(config, random_weights(config, seed), rank.placement)
    return LlamaModel(part, weights, peers=rank.peers)


def make_pool(
    model: LlamaModel | MlaModel, num_tokens: int, *, page_size: int
) -> DeviceKVPool | DeviceMlaPool:
    geometry: PageGeometry = model.config.geometry(dtype="float32", page_size=page_size)
    cpu, num_pages = torch.device("cpu"), num_tokens // page_size
    if isinstance(geometry, KVGeometry):
        return DeviceKVPool(geometry, num_pages=num_pages, torch_device=cpu)
    assert isinstance(geometry, MlaGeometry)
    return DeviceMlaPool(geometry, num_pages=num_pages, torch_device=cpu)


def cached_engine(
    scenario: Scenario,
    rank: int,
    model: LlamaModel | MlaModel,
    engine_rank: EngineRank,
    group: RankGroup,
) -> Engine:
    device_tokens = scenario.device_tokens[min(rank, len(scenario.device_tokens) - 1)]
    pool = make_pool(model, device_tokens, page_size=scenario.page_size)
    draft = None
    if scenario.draft is not None:
        small = llama_part(SMALL, engine_rank, seed=9) if scenario.draft == "small" else model
        side_pool = make_pool(small, device_tokens, page_size=scenario.page_size)
        draft = Draft(model=small, pool=side_pool, num_tokens=3)
    allocator = PageAllocator(pool.num_pages)
    cache, counter = create_hiradix_cache(
        configuration(scenario, rank),
        device=create_device("cpu"),
        device_pool=pool,
        device_allocator=allocator,
        side_pools=[] if draft is None else [draft.pool],  # type: ignore[list-item]
        ranks=group,
        placement=engine_rank.placement,
    )
    return Engine(
        model,
        pool,
        allocator,
        cache=CacheHandle(cache, counter),
        max_batch_requests=2,
        chunk_tokens=96,
        draft=draft,
    )


def configuration(scenario: Scenario, rank: int) -> HiCacheConfig:
    ratio = scenario.host_ratios[min(rank, len(scenario.host_ratios) - 1)]
    data: dict[str, Any] = {
        "page_size": scenario.page_size,
        "write_policy": scenario.write_policy,
        "prefetch_policy": scenario.prefetch_policy,
        "host": {"layout": scenario.layout, "ratio": ratio, "huge_pages": False},
        # Which costs more depends on the machine; here all that is stored is wanted.
        "prefetch": {"threshold_tokens": 16, "cost_estimate": False},
    }
    attached = scenario.storage is not None and not scenario.runtime
    storage = store(scenario) if attached else None
    return dataclasses.replace(HiCacheConfig.from_mapping(data), storage=storage)


def store(scenario: Scenario) -> StorageConfig:
    return StorageConfig(
        backend="file",
        extra_config={"path": scenario.storage},
        model_name=scenario.attention,
        weights_revision="seed 0",
        tp_lcm_size=LLAMA.num_kv_heads if scenario.layout == "page_head" else None,
    )


def change_store(engine: Engine, scenario: Scenario, change: str) -> None:
    """Do to the store what the scenario says, while the engine is idle."""
    cache = engine.cache
    assert cache is not None
    assert engine.settle(PATIENCE_SECONDS)
    if change == "attach":
        cache.attach_storage_backend(store(scenario))
    elif change == "detach":
        cache.detach_storage_backend()


def watch_steps(cache: HiRadixCache, group: CountingGroup) -> list[int]:
    """Let every step of `cache` note in the returned list how often it has asked the group."""
    steps: list[int] = []
    step = cache.check_hicache_events

    @functools.wraps(step)
    def counted() -> None:
        before = group.num_calls
        step()
        steps.append(group.num_calls - before)

    cache.check_hicache_events = counted  # type: ignore[method-assign]
    return steps


def disturb_copies(cache: HiRadixCache, fault: str) -> None:
    """Let copies of this rank be late, or every second load fail in its last layer."""
    (pair, *_) = cache.controller._mover._pairs  # type: ignore[attr-defined]
    engine, loads = pair.engine, itertools.count()
    write_layer, load_layer, last = engine.write_layer, engine.load_layer, engine.num_layers - 1

    def write(plan: TransferPlan, layer: int) -> None:
        if fault == "late":
            time.sleep(0.01)
        write_layer(plan, layer)

    def load(plan: TransferPlan, layer: int) -> None:
        if fault == "late":
            time.sleep(0.01)
        elif layer == last and next(loads) % 2 == 0:
            raise OSError("the link is down")
        load_layer(plan, layer)

    engine.write_layer, engine.load_layer = write, load


def tree_of(cache: HiRadixCache) -> Iterator[list[Any]]:
    """Yield what every rank must have alike of each run of the tree: all but the page ids."""

    def walk(node: RadixNode) -> Iterator[list[Any]]:
        for child in (node.children or {}).values():
            key = hashlib.sha256(child.namespace + child.key).hexdigest()[:12]
            tiers = [child.device_pages is not None, child.host_pages is not None]
            yield [child.start, child.end, key, *tiers, child.lock_ref, child.hit_count]
            yield from walk(child)

    return walk(cache.tree.root)


def finish(engine: Engine) -> list[str]:
    """Settle, close, and return what is left that must not be."""
    cache = engine.cache
    assert cache is not None
    faults = []
    if not engine.settle(PATIENCE_SECONDS):
        faults.append(f"{cache.num_in_flight} operations did not end")
    faults += check_system(cache, request_device_pages=engine.owned_pages())
    if cache.protected_size:
        faults.append(f"{cache.protected_size} tokens are still locked")
    if not cache.close() or cache.num_in_flight:
        faults.append("the cache did not close")
    return faults


def take_lines(requests: queue.SimpleQueue[str]) -> None:
    """Hand over what comes; ends the process with its input, whatever it does then."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    rank = Rank(Path(sys.argv[1]), int(sys.argv[2]))
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=take_lines, args=(requests,), daemon=True).start()
    while True:
        request: dict[str, Any] = json.loads(requests.get())
        reply: dict[str, object]
        try:
            served = rank.serve(request["number"], Scenario(**request["scenario"]))
            reply = {"served": dataclasses.asdict(served)}
        except Exception:  # noqa: BLE001  # whoever asked is told
            reply = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
