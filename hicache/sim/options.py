"""Sizes and policies of a simulated rank, drawn at random."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hicache.config import HiCacheConfig, HostPoolConfig, PrefetchConfig, StorageConfig
from hicache.layout import HostLayout, KVGeometry, RowGeometry
from hicache.types import PrefetchPolicy, StorageAdmission, WritePolicy

if TYPE_CHECKING:
    import random

    from hicache.layout import PageGeometry

__all__ = ["CALL_TIMEOUT_SECONDS", "GEOMETRY", "SIDE_GEOMETRIES", "SystemOptions"]

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", page_size=2)

SIDE_GEOMETRIES: dict[str, PageGeometry] = {
    "draft": KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=2),
    "indexer": RowGeometry(num_layers=2, name="indexer", width=8, dtype="float32", page_size=2),
}
"""What a model can keep beside its KV under the same page ids, by name."""

CALL_TIMEOUT_SECONDS = 1.0

_SHARING_RATE = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemOptions:
    """Sizes and policies of one rank; so small that everything collides.

    Attributes:
        side_pools: names in `SIDE_GEOMETRIES`.
        num_withheld: pages of the device and of the host that somebody else has at first.
        max_store_pages: bound of the store; None for no bound.
        max_abandoned: see `SimulatedExecutor`.
        shares_pages: whether ranks are context parallel: each has a part of the pages, and all
            reach one store. Then the numbers of pages are those of all ranks together.
    """

    write_policy: WritePolicy
    write_by_layer: bool
    write_watermark: float
    prefetch_policy: PrefetchPolicy
    load_cost_estimate: bool
    prefetch_cost_estimate: bool
    layout: HostLayout
    side_pools: tuple[str, ...]
    num_device_pages: int
    num_host_pages: int
    num_load_slots: int
    load_back_threshold_pages: int
    prefetch_threshold_pages: int
    max_inflight_prefetch_pages: int | None
    max_inflight_persist_operations: int
    batch_pages: int
    num_workers: int
    max_abandoned: int
    max_store_pages: int | None
    num_withheld: tuple[int, int] = (0, 0)
    eviction_policy: str = "lru"
    storage_admission: StorageAdmission = StorageAdmission.ALL
    shares_pages: bool = False
    refresh_seconds: float = 60.0

    @classmethod
    def draw(cls, rng: random.Random, *, num_ranks: int = 1) -> SystemOptions:
        """Return random options."""
        return cls(
            write_policy=rng.choice([*WritePolicy, *[WritePolicy.WRITE_THROUGH] * 3]),
            write_by_layer=rng.random() < 0.9,
            write_watermark=rng.choice([0.0, 0.1, 0.3]),
            prefetch_policy=rng.choice(list(PrefetchPolicy)),
            load_cost_estimate=rng.random() < 0.25,
            prefetch_cost_estimate=rng.random() < 0.25,
            layout=rng.choice(list(HostLayout)),
            side_pools=rng.choice([(), (), ("draft",), ("indexer",), ("draft", "indexer")]),
            num_device_pages=rng.randint(6, 16),
            num_host_pages=rng.choice([5, 8, 12, 18, 24]),
            num_load_slots=rng.choice([1, 2, 3, 5]),
            load_back_threshold_pages=rng.choice([0, 1, 1, 2]),
            prefetch_threshold_pages=rng.choice([0, 1, 1, 2]),
            max_inflight_prefetch_pages=rng.choice([None, 1, 2, 4]),
            max_inflight_persist_operations=rng.choice([1, 2, 64]),
            batch_pages=rng.choice([1, 2, 3]),
            num_workers=rng.choice([1, 1, 1, 2, 3]),
            max_abandoned=rng.choice([0, 0, 0, 1, 8]),
            max_store_pages=rng.choice([None, 6]),
            eviction_policy=rng.choice(["adaptive", "lru"]),
            # Whatever is not stored, or not worth a read, meets no fault there.
            storage_admission=rng.choice([*StorageAdmission, *[StorageAdmission.ALL] * 3]),
            shares_pages=num_ranks > 1 and rng.random() < _SHARING_RATE,
            refresh_seconds=rng.choice([0.05, 60.0]),
        )

    @property
    def geometries(self) -> tuple[PageGeometry, ...]:
        """Of the KV pool and the side pools."""
        return (GEOMETRY, *(SIDE_GEOMETRIES[name] for name in self.side_pools))

    @property
    def page_bytes(self) -> int:
        """Of one page id in all pools."""
        return sum(geometry.page_bytes for geometry in self.geometries)

    def storage_config(self) -> StorageConfig:
        """Return those of the store as the configuration of a store."""
        limits = (
            {}
            if self.max_store_pages is None
            else {"max_bytes": self.max_store_pages * self.page_bytes}
        )
        return StorageConfig.from_mapping(
            {
                "backend": "simulated",
                "extra_config": limits,
                "admission": self.storage_admission,
                "model_name": "simulated",
                "weights_revision": "1",
                "num_workers": self.num_workers,
                "batch_pages": self.batch_pages,
                "refresh_seconds": self.refresh_seconds,
                "call_timeout_seconds": CALL_TIMEOUT_SECONDS,
                "max_inflight_persist_operations": self.max_inflight_persist_operations,
            }
        )

    def prefetch_config(self) -> PrefetchConfig:
        """Return those of prefetches as their configuration."""
        return PrefetchConfig(
            threshold_tokens=self.prefetch_threshold_pages * GEOMETRY.page_size,
            max_inflight_pages=self.max_inflight_prefetch_pages,
            cost_estimate=self.prefetch_cost_estimate,
        )

    def config(self) -> HiCacheConfig:
        """Return them as the configuration of the cache."""
        page_size = GEOMETRY.page_size
        return HiCacheConfig(
            page_size=page_size,
            write_policy=self.write_policy,
            eviction_policy=self.eviction_policy,
            write_by_layer=self.write_by_layer,
            write_watermark=self.write_watermark,
            prefetch_policy=self.prefetch_policy,
            load_cost_estimate=self.load_cost_estimate,
            load_back_threshold_tokens=self.load_back_threshold_pages * page_size,
            num_load_slots=self.num_load_slots,
            host=HostPoolConfig(
                layout=self.layout,
                size_bytes=self.num_host_pages * self.page_bytes,
                huge_pages=False,
            ),
            storage=self.storage_config(),
            prefetch=self.prefetch_config(),
        )
