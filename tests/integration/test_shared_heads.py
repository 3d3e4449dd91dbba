"""Engines that split a model differently read from storage what they hold alike, byte by byte."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pool_systems import CPU, NUM_CACHED, NUM_PAGES, System, kv_pool, make_system, side_pool

from hicache.config import RankPlacement
from hicache.errors import ConfigError
from hicache.layout import HeadRange, KVGeometry
from hicache.pools import DeviceKVPool
from hicache.storage.page_store import list_pages, summarize
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from hicache.pools import DevicePool

LAYERS, DRAFT_LAYERS, PAGE_SIZE = 3, 1, 4
EQUAL = {1: [(0, 4)], 2: [(0, 2), (2, 4)], 4: [(0, 1), (1, 2), (2, 3), (3, 4)]}
"""Which of 4 KV heads each rank holds, by the number of ranks."""


def head_pool(first: int, last: int, total: int, *, num_layers: int, dtype: str) -> DeviceKVPool:
    geometry = KVGeometry(
        num_layers=num_layers,
        num_kv_heads=last - first,
        head_dim=8,
        dtype=dtype,
        page_size=PAGE_SIZE,
        kv_heads=HeadRange(first, last, total),
    )
    return DeviceKVPool(geometry, num_pages=NUM_PAGES, torch_device=CPU)


def kv_of_model(total: int, num_layers: int, seed: int) -> torch.Tensor:
    """The KV of the cached pages: `[layers, 2, pages, page_size, heads, 8]`, small integers."""
    rng = np.random.default_rng(seed)
    shape = (num_layers, 2, NUM_CACHED, PAGE_SIZE, total, 8)
    return torch.from_numpy(rng.integers(-8, 8, shape).astype(np.float32))


class Engine:
    """The ranks of one engine, a cache each; none of them sees another but through storage."""

    def __init__(
        self,
        storage: Path,
        heads: Iterable[tuple[int, int]],
        *,
        total: int = 4,
        draft: bool = False,
        dtype: str = "float32",
        num_groups: int | None = 4,
    ) -> None:
        self.heads = list(heads)
        self.models = [kv_of_model(total, LAYERS, seed=1)]
        if draft:
            self.models.append(kv_of_model(total, DRAFT_LAYERS, seed=2))
        self.systems: list[System] = []
        for rank, (first, last) in enumerate(self.heads):
            pools: list[DevicePool] = [
                head_pool(first, last, total, num_layers=len(model), dtype=dtype)
                for model in self.models
            ]
            placement = RankPlacement(tp_rank=rank, tp_size=len(self.heads))
            self.systems.append(
                make_system(
                    storage,
                    pools,
                    layout="page_head",
                    placement=placement,
                    tp_lcm_size=num_groups,
                )
            )

    def insert(self) -> None:
        """Let every rank compute its heads, and bring them to storage."""
        for system, heads in zip(self.systems, self.heads, strict=True):
            pages = system.allocator.alloc(NUM_CACHED)
            assert pages is not None
            for pool, model in zip(system.pools, self.models, strict=True):
                for layer in range(len(model)):
                    for part, rows in zip(pool.layer_parts(layer), model[layer], strict=True):
                        part[torch.from_numpy(pages)] = rows[:, :, slice(*heads)].to(part.dtype)
            system.cache.insert(system.key, pages, request_id="first", chunked=False)
            system.settle()

    def prefetch(self) -> list[int]:
        """Return how many pages came to each rank."""
        return [system.prefetch() for system in self.systems]

    def verify(self) -> None:
        """Load what was prefetched, and compare each rank's heads with the model's."""
        for system, heads in zip(self.systems, self.heads, strict=True):
            pages = torch.from_numpy(system.load())
            for pool, model in zip(system.pools, self.models, strict=True):
                for layer in range(len(model)):
                    for part, rows in zip(pool.layer_parts(layer), model[layer], strict=True):
                        expected = rows[: len(pages), :, slice(*heads)].to(part.dtype)
                        assert torch.equal(
                            part[pages].view(torch.uint8), expected.contiguous().view(torch.uint8)
                        )

    def close(self) -> None:
        for system in self.systems:
            system.close()


@pytest.mark.parametrize(
    ("writers", "readers", "draft", "dtype"),
    [
        (4, 2, False, "float32"),
        (4, 1, True, "float8_e4m3fn"),
        (2, 4, True, "float32"),
        (1, 4, False, "bfloat16"),
        (1, 2, True, "float32"),
        (2, 1, False, "float8_e5m2"),
    ],
)
def test_what_one_number_of_ranks_wrote_another_reads(
    writers: int, readers: int, draft: bool, dtype: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"draft": draft, "dtype": dtype}
    writer = Engine(tmp_path, EQUAL[writers], **options)
    writer.insert()
    writer.close()
    reader = Engine(tmp_path, EQUAL[readers], **options)
    assert reader.prefetch() == [NUM_CACHED] * readers
    reader.verify()
    reader.close()


def test_heads_that_do_not_divide_are_shared_one_by_one(tmp_path: Path) -> None:
    """3 heads on 2 ranks, and on one."""
    writer = Engine(tmp_path, [(0, 1), (1, 3)], total=3, num_groups=3)
    writer.insert()
    writer.close()
    reader = Engine(tmp_path, [(0, 3)], total=3, num_groups=3)
    assert reader.prefetch() == [NUM_CACHED]
    reader.verify()
    reader.close()


def test_a_page_is_a_hit_only_where_every_rank_has_written_its_heads(tmp_path: Path) -> None:
    writer = Engine(tmp_path, EQUAL[4])
    writer.insert()
    assert writer.systems[2].cache.clear_storage_backend() == NUM_CACHED
    writer.close()
    reader = Engine(tmp_path, EQUAL[2])
    assert reader.prefetch() == [NUM_CACHED, 0]
    reader.close()
    repairer = Engine(tmp_path, EQUAL[1])
    repairer.insert()
    repairer.close()
    again = Engine(tmp_path, EQUAL[2])
    assert again.prefetch() == [NUM_CACHED] * 2
    again.verify()
    again.close()


def test_without_tp_lcm_size_ranks_of_another_number_share_nothing(tmp_path: Path) -> None:
    writer = Engine(tmp_path, EQUAL[4], num_groups=None)
    writer.insert()
    writer.close()
    assert {one.num_pages for one in summarize(str(tmp_path)).namespaces} == {NUM_CACHED}
    reader = Engine(tmp_path, EQUAL[2], num_groups=None)
    assert reader.prefetch() == [0, 0]
    reader.close()


def test_ranks_that_hold_the_same_head_store_it_once_and_all_read_it(tmp_path: Path) -> None:
    """4 ranks on 2 heads."""
    shared = [(0, 1), (0, 1), (1, 2), (1, 2)]
    writer = Engine(tmp_path, shared, total=2, num_groups=2)
    writer.insert()
    assert [written(system) for system in writer.systems] == [NUM_CACHED, 0, NUM_CACHED, 0]
    writer.close()
    for heads in (shared, [(0, 2)]):
        reader = Engine(tmp_path, heads, total=2, num_groups=2)
        assert reader.prefetch() == [NUM_CACHED] * len(heads)
        reader.verify()
        reader.close()


def written(system: System) -> int:
    """How many pages a rank has brought to storage itself."""
    backend = system.cache.controller._mover._storage.backend  # type: ignore[attr-defined]
    return sum(backend.stats().set_outcomes.values())


@pytest.mark.parametrize("indexer", [False, True])
def test_latent_kv_is_stored_by_the_first_rank_and_read_by_any_number(
    indexer: bool, tmp_path: Path
) -> None:
    def ranks(tp_size: int) -> list[System]:
        systems = []
        for rank in range(tp_size):
            pools: list[DevicePool] = [kv_pool("mla", dtype="bfloat16", page_size=4)]
            if indexer:
                pools.append(side_pool(dtype="float16", page_size=4))
            placement = RankPlacement(tp_rank=rank, tp_size=tp_size)
            systems.append(make_system(tmp_path, pools, placement=placement))
        return systems

    writers = ranks(2)
    written_kv = [system.insert() for system in writers]
    assert [written(system) for system in writers] == [NUM_CACHED, 0]
    for system in writers:
        assert system.cache.tree.match(system.key).last_host_node.persisted
    assert len(list(list_pages(str(tmp_path)))) == NUM_CACHED
    for system in writers:
        system.close()
    for system in [*ranks(4), *ranks(1)]:
        assert system.prefetch() == NUM_CACHED
        for layers, expected in zip(system.content(system.load()), written_kv[0], strict=True):
            assert all(map(torch.equal, layers, expected))
        system.close()


class OneOfTwo:
    """A rank in a thread of its own, which meets the other once a step."""

    size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, vectors: list[list[int]]) -> None:
        self.rank = rank
        self._barrier = barrier
        self._vectors = vectors

    def agree(self, values: Sequence[int]) -> list[int]:
        self._vectors[self.rank] = list(values)
        self._barrier.wait()
        agreed = [min(pair) for pair in zip(*self._vectors, strict=True)]
        self._barrier.wait()
        return agreed


@pytest.mark.parametrize("num_stored", [0, 2, NUM_CACHED])
def test_what_the_first_rank_could_not_store_is_stored_for_none(
    num_stored: int, tmp_path: Path
) -> None:
    barrier, vectors = threading.Barrier(2, timeout=30.0), [[0], [0]]

    def serve(rank: int) -> bool:
        system = make_system(
            tmp_path,
            [kv_pool("mla", dtype="float32", page_size=4)],
            placement=RankPlacement(tp_rank=rank, tp_size=2),
            ranks=OneOfTwo(rank, barrier, vectors),
        )
        if rank == 0:
            outcomes = [PageOutcome.OK] * num_stored + [PageOutcome.NO_SPACE] * NUM_CACHED
            backend = system.cache.controller._mover._storage.backend  # type: ignore[attr-defined]
            backend.batch_set = lambda keys, parents, pages, *, deadline: outcomes[:NUM_CACHED]
        system.insert()
        persisted = system.cache.tree.match(system.key).last_host_node.persisted
        system.close()
        return persisted

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(serve, range(2))) == [num_stored == NUM_CACHED] * 2


@pytest.mark.parametrize(
    ("layout", "kind", "num_groups", "reason"),
    [
        ("page_first_direct", "mha", 2, "host.layout page_head, not in page_first_direct"),
        ("page_head", "mla", 2, "has no heads to split"),
        ("page_head", "mha", 3, "tp_lcm_size must divide 2"),
    ],
)
def test_a_cache_that_cannot_split_its_pages_is_refused_at_construction(
    layout: str, kind: str, num_groups: int, reason: str, tmp_path: Path
) -> None:
    pool = kv_pool(kind, dtype="float32", page_size=4)
    with pytest.raises(ConfigError, match=reason):
        make_system(tmp_path, [pool], layout=layout, tp_lcm_size=num_groups)
