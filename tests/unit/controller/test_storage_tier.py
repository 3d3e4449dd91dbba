"""What a rank's store is opened with, and what a rank leaves to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from controller_fakes import until

from hicache.clock import ManualClock
from hicache.config import RankPlacement, StorageConfig
from hicache.controller import StorageTier
from hicache.controller.records import PagesResult, PersistJob, Phase, QueryJob
from hicache.errors import ConfigError
from hicache.layout import HostLayout, KVGeometry, MlaGeometry, PageGeometry
from hicache.pools import create_host_pool
from hicache.storage import StorageBackendFactory
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.types import OperationId, PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache.pools import HostKVPool
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig

PAGE: dict[str, Any] = {"num_layers": 2, "dtype": "float32", "page_size": 4}
MHA = KVGeometry(num_kv_heads=2, head_dim=4, **PAGE)
MLA = MlaGeometry(kv_lora_rank=4, qk_rope_head_dim=2, **PAGE)
SECOND_OF_TWO = RankPlacement(tp_rank=1, tp_size=2)


class SharedMemory(StorageBackendFactory):
    """Answers every name with a backend over one store, and keeps what each was made from."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryPages()
        self.configs: list[HiCacheStorageConfig] = []
        self.closed: list[int] = []
        self.num_openable = 99

    def create_backend(self, name: str, config: HiCacheStorageConfig) -> HiCacheStorage:
        number = len(self.configs)
        if number == self.num_openable:
            raise ConfigError("cannot be opened")
        self.configs.append(config)
        factory = self

        class Counted(MemoryStorage):
            def close(self) -> None:
                factory.closed.append(number)
                super().close()

        return Counted(config, store=self.store)


class Bench:
    def __init__(self, geometry: PageGeometry, placement: RankPlacement) -> None:
        self.factory = SharedMemory()
        self.pool: HostKVPool = create_host_pool(
            geometry, num_pages=4, layout=HostLayout.PAGE_HEAD, pinned=False, huge_pages=False
        )
        self.tier = StorageTier(
            host_pools=[self.pool],
            factory=self.factory,
            clock=ManualClock(),
            placement=placement,
        )

    def attach(self, **options: Any) -> None:
        fields = {"backend": "any", "model_name": "m", "weights_revision": "1", **options}
        self.tier.attach(StorageConfig(**fields))

    def persist(self) -> list[PagesResult]:
        self.tier.submit(
            PersistJob(
                operation_id=OperationId(1),
                generation=7,
                hashes=(PageHash(b"a" * 32), PageHash(b"b" * 32)),
                parent_hash=b"",
                host_pages=np.array([2, 0]),
            )
        )
        results: list[PagesResult] = []

        def ended() -> bool:
            for result in self.tier.poll():
                assert isinstance(result, PagesResult)
                results.append(result)
            return bool(results) and results[-1].phase is Phase.ENDED

        until(ended)
        return results


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(geometry: PageGeometry, placement: RankPlacement | None = None) -> Bench:
        benches.append(Bench(geometry, placement or RankPlacement()))
        return benches[-1]

    yield make
    for bench in benches:
        assert bench.tier.detach(timeout_seconds=10.0)
        bench.pool.close()


def test_a_backend_is_told_all_about_its_rank(make_bench: Callable[..., Bench]) -> None:
    placement = RankPlacement(tp_rank=1, tp_size=2, dp_rank=2, dp_size=3)
    bench = make_bench(MLA, placement)
    bench.attach(extra_config={"max_bytes": 1 << 20})
    [config] = bench.factory.configs
    assert config.placement == placement
    assert config.is_mla_model
    assert config.tp_lcm_size is None
    assert config.extra_config == {"max_bytes": 1 << 20}
    assert config.page_bytes == MLA.page_bytes


def test_each_group_of_heads_has_a_backend_that_does_not_see_the_option(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(MHA, SECOND_OF_TWO)
    bench.attach(extra_config={"tp_lcm_size": 4, "max_bytes": 1 << 20})
    assert [config.namespace.shard for config in bench.factory.configs] == [
        "layers=0-2 heads=2-3of4",
        "layers=0-2 heads=3-4of4",
    ]
    for config in bench.factory.configs:
        assert (config.tp_lcm_size, config.page_bytes) == (4, MHA.page_bytes // 2)
        assert config.extra_config == {"max_bytes": 1 << 20}
        assert not config.is_mla_model
    assert bench.tier.detach(timeout_seconds=10.0)
    assert sorted(bench.factory.closed) == [0, 1]


def test_a_rank_with_one_group_has_its_backend_alone(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(MHA, SECOND_OF_TWO)
    bench.attach(tp_lcm_size=2)
    [config] = bench.factory.configs
    assert config.namespace.shard == "layers=0-2 heads=2-4of4"
    assert [one.num_good for one in bench.persist()] == [2]
    assert bench.factory.store.clear(config.namespace.digest) == 2


def test_when_one_of_the_groups_cannot_be_opened_the_others_are_closed_and_none_is_attached(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(MHA)
    bench.factory.num_openable = 1
    with pytest.raises(ConfigError, match="cannot be opened"):
        bench.attach(tp_lcm_size=2)
    assert bench.factory.closed == [0]
    assert bench.tier.backend is None
    bench.factory.num_openable = 99
    bench.attach(tp_lcm_size=2)
    assert [one.num_good for one in bench.persist()] == [2]


def test_a_rank_whose_pages_another_stores_says_at_once_that_all_are_present(
    make_bench: Callable[..., Bench],
) -> None:
    """So the minimum over ranks is what the first rank has really stored."""
    bench = make_bench(MLA, SECOND_OF_TWO)
    bench.attach()
    [result] = bench.persist()
    assert (result.num_good, result.num_bytes, result.error) == (2, 0, "")
    assert result.outcomes == ((PageOutcome.PRESENT, 2),)
    assert (result.operation_id, result.generation) == (1, 7)
    [config] = bench.factory.configs
    assert bench.factory.store.clear(config.namespace.digest) == 0


def test_without_a_store_no_page_is_present_on_any_rank(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(MLA, SECOND_OF_TWO)
    [result] = bench.persist()
    assert (result.num_good, result.error) == (0, "no storage backend is attached")


def test_every_rank_asks_the_store_for_itself(make_bench: Callable[..., Bench]) -> None:
    """What the first has stored, the others find under the same name."""
    first, second = make_bench(MLA, RankPlacement(tp_size=2)), make_bench(MLA, SECOND_OF_TWO)
    second.factory.store = first.factory.store
    for bench in (first, second):
        bench.attach()
        bench.persist()
    hashes = (PageHash(b"a" * 32), PageHash(b"b" * 32), PageHash(b"c" * 32))
    second.tier.submit(QueryJob(operation_id=OperationId(2), generation=7, hashes=hashes))
    found: list[int] = []

    def answered() -> bool:
        found.extend(result.num_pages for result in second.tier.poll())  # type: ignore[union-attr]
        return bool(found)

    until(answered)
    assert found == [2]
