"""Whether loaded bytes are the written ones, told by a record that they do not pass through."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from hicache.pools import create_host_pool
from hicache.storage import StorageBackendFactory
from hicache.storage.page_store import PageStore
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.engine.engine import Engine
    from hicache.pools import DevicePool, HostKVPool
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig, Page
    from hicache.transfer import TransferEngine, TransferPlan
    from hicache.types import IntArray, PageHash


class Shadow(StorageBackendFactory):
    """A second host pool that is told of every movement, and what every load is compared with.

    A write puts the device's bytes into it, a persist puts its bytes on record under the page's
    key, a prefetch puts the recorded bytes into it, whatever the real movement did. Give it to
    `make_engine` as the factory, then `watch` the engine; a record may outlive engines.

    Attributes:
        num_bytes: compared so far.
        faults: what a load brought that was never written.
    """

    def __init__(self, record: dict[PageHash, bytes]) -> None:
        super().__init__()
        self.record = record
        self.num_bytes = 0
        self.faults: list[str] = []
        self._host_pool: HostKVPool | None = None
        self._offset = 0

    def create_backend(self, name: str, config: HiCacheStorageConfig) -> HiCacheStorage:
        assert name == "file"
        return ShadowedStorage(config, self)

    def watch(self, engine: Engine) -> HostKVPool:
        """Begin, before the engine's first step; return the real host pool."""
        assert engine.cache is not None
        mover = engine.cache.controller._mover
        (pair,) = mover._pairs  # type: ignore[attr-defined]
        real: HostKVPool = pair.host_pool
        self._host_pool = create_host_pool(
            real.geometry,
            num_pages=real.num_pages,
            layout=real.layout,
            pinned=False,
            huge_pages=False,
        )
        self._offset = self._host_pool.regions()[0][0] - real.regions()[0][0]
        watched = ShadowedEngine(pair.engine, engine._pool, self)  # type: ignore[arg-type]
        mover._pairs = (pair._replace(engine=watched),)  # type: ignore[attr-defined]
        mover._layer_writes._engines = [watched]  # type: ignore[attr-defined]
        return real

    def parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        assert self._host_pool is not None
        return self._host_pool.layer_parts(layer)

    def read(self, page: Page) -> bytes:
        """Return what the shadow of `page` holds."""
        return b"".join(ctypes.string_at(p.address + self._offset, p.num_bytes) for p in page)

    def write(self, page: Page, content: bytes) -> None:
        """Let the shadow of `page` hold `content`."""
        done = 0
        for address, num_bytes in page:
            ctypes.memmove(address + self._offset, content[done : done + num_bytes], num_bytes)
            done += num_bytes

    def close(self) -> None:
        assert self._host_pool is not None
        self._host_pool.close()


class ShadowedEngine:
    """A copy engine with a shadow."""

    def __init__(self, engine: TransferEngine, device_pool: DevicePool, shadow: Shadow) -> None:
        self.num_layers = engine.num_layers
        self._engine = engine
        self._device_pool = device_pool
        self._shadow = shadow

    def plan(self, device_pages: IntArray, host_pages: IntArray) -> TransferPlan:
        return self._engine.plan(device_pages, host_pages)

    def layer_bytes(self, plan: TransferPlan) -> int:
        return self._engine.layer_bytes(plan)

    def write_layer(self, plan: TransferPlan, layer: int) -> None:
        self._engine.write_layer(plan, layer)
        device_pages, host_pages = torch.tensor(plan.device_pages), torch.tensor(plan.host_pages)
        both = zip(self._device_pool.layer_parts(layer), self._shadow.parts(layer), strict=True)
        for source, target in both:
            target[host_pages] = source[device_pages]

    def load_layer(self, plan: TransferPlan, layer: int) -> None:
        self._engine.load_layer(plan, layer)
        device_pages, host_pages = torch.tensor(plan.device_pages), torch.tensor(plan.host_pages)
        both = zip(self._device_pool.layer_parts(layer), self._shadow.parts(layer), strict=True)
        for target, source in both:
            found = target[device_pages].view(torch.uint8)
            expected = source[host_pages].view(torch.uint8)
            self._shadow.num_bytes += expected.numel()
            if not torch.equal(found, expected):
                self._shadow.faults.append(f"layer {layer}: device pages {plan.device_pages}")


class ShadowedStorage(PageStore):
    """A store with a shadow."""

    def __init__(self, config: HiCacheStorageConfig, shadow: Shadow) -> None:
        super().__init__(config)
        self._shadow = shadow

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        outcomes = super().batch_get(keys, parent_keys, pages, deadline=deadline)
        for key, page, outcome in zip(keys, pages, outcomes, strict=True):
            if outcome is PageOutcome.OK:
                self._shadow.write(page, self._shadow.record[key])
        return outcomes

    def batch_set(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        outcomes = super().batch_set(keys, parent_keys, pages, deadline=deadline)
        for key, page, outcome in zip(keys, pages, outcomes, strict=True):
            if outcome is PageOutcome.OK:
                self._shadow.record[key] = self._shadow.read(page)
        return outcomes
