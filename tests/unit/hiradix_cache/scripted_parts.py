"""Engines, stores and gates that hold or break any movement when a test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.config import StorageConfig
from hicache.storage import StorageBackendFactory
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.testing.faulty_storage import FaultyStorage, Gate
from hicache.transfer import TorchTransferEngine, TransferPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hicache.pools import DeviceKVPool, HostKVPool
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig
    from hicache.testing.faulty_storage import Fault, Verb


class InjectedCopyError(Exception):
    """What a broken copy raises."""


class ScriptedEngine(TorchTransferEngine):
    """Copies, unless the test holds or breaks the copy of a layer.

    Attributes:
        write_gates, load_gates: by layer, passed before the copy.
        broken_writes, broken_loads: layers whose next copy raises, each once.
    """

    def __init__(self, device_pool: DeviceKVPool, host_pool: HostKVPool) -> None:
        super().__init__(device_pool, host_pool)
        self.write_gates: dict[int, Gate] = {}
        self.load_gates: dict[int, Gate] = {}
        self.broken_writes: set[int] = set()
        self.broken_loads: set[int] = set()

    def write_layer(self, plan: TransferPlan, layer: int) -> None:
        _meet("write", layer, self.write_gates, self.broken_writes)
        super().write_layer(plan, layer)

    def load_layer(self, plan: TransferPlan, layer: int) -> None:
        _meet("load", layer, self.load_gates, self.broken_loads)
        super().load_layer(plan, layer)


def _meet(verb: str, layer: int, gates: dict[int, Gate], broken: set[int]) -> None:
    if layer in gates:
        gates[layer].pass_through()
    if layer in broken:
        broken.discard(layer)
        raise InjectedCopyError(f"the {verb} of layer {layer} was broken")


class Barrier(Gate):
    """A gate that can be shut again; open at first."""

    def __init__(self) -> None:
        super().__init__()
        self.open()

    def shut(self) -> None:
        self.entered.clear()
        self._opened.clear()


class GateAt(Gate):
    """Holds one call, the first being 0, and lets the others pass."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def pass_through(self) -> None:
        self._left -= 1
        if self._left == -1:
            super().pass_through()


class InjectedFactory(StorageBackendFactory):
    """A factory that also knows a backend `injected`, which the test makes."""

    def __init__(self, create: Callable[[HiCacheStorageConfig], HiCacheStorage]) -> None:
        super().__init__()
        self.register_backend("file", "hicache.storage.page_store", "PageStore")
        self._create = create

    def create_backend(self, name: str, config: HiCacheStorageConfig) -> HiCacheStorage:
        if name == "injected":
            return self._create(config)
        return super().create_backend(name, config)


def memory_storage(store: MemoryPages) -> Callable[[HiCacheStorageConfig], HiCacheStorage]:
    """Return what makes a backend over `store`, which outlives it."""
    return lambda config: MemoryStorage(config, store=store)


def faulty_storage(
    store: MemoryPages,
    *,
    faults: Mapping[Verb, Iterable[Fault | None]] | None = None,
    gates: Mapping[Verb, Gate] | None = None,
) -> Callable[[HiCacheStorageConfig], HiCacheStorage]:
    """Return what makes a backend over `store` that fails and stops as it is told."""
    return lambda config: FaultyStorage(
        MemoryStorage(config, store=store), faults=faults, gates=gates
    )


def injected(**options: object) -> StorageConfig:
    """The storage configuration of the test's own backend."""
    return StorageConfig.from_mapping(
        {"backend": "injected", "model_name": "model", "weights_revision": "1", **options}
    )
