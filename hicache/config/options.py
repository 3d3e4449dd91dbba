"""Every option of the cache, with its unit, its default and the values it takes."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Final

from hicache.config.plain import FrozenMapping, PlainMapping
from hicache.config.section import Section, about
from hicache.errors import ConfigError
from hicache.layout import HostLayout
from hicache.types import IoBackend, PrefetchPolicy, StorageAdmission, WritePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["HiCacheConfig", "HostPoolConfig", "PrefetchConfig", "StorageConfig"]

_DEFAULT_RATIO: Final = 2.0
_MAX_WORKERS: Final = 32
_TP_LCM_SIZE: Final = "tp_lcm_size"

_COPYABLE_LAYOUTS: Final[Mapping[IoBackend, frozenset[HostLayout]]] = {
    IoBackend.DIRECT: frozenset(
        {
            HostLayout.PAGE_FIRST,
            HostLayout.PAGE_FIRST_DIRECT,
            HostLayout.LAYER_FIRST,
            HostLayout.PAGE_HEAD,
        }
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostPoolConfig(Section):
    """The host pool (L2). After construction exactly one of `ratio` and `size_bytes` is set."""

    section: ClassVar[str] = "host"

    layout: HostLayout = field(
        default=HostLayout.PAGE_FIRST_DIRECT, metadata=about("order of the bytes in the host pool")
    )
    ratio: float | None = field(
        default=None,
        metadata=about(
            f"size of the host pool; {_DEFAULT_RATIO} when size_bytes is not given either",
            unit="host bytes per byte of the device pool",
            above=0,
        ),
    )
    size_bytes: int | None = field(
        default=None,
        metadata=about("size of the host pool, instead of ratio", unit="bytes", at_least=1),
    )
    huge_pages: bool = field(
        default=True, metadata=about("ask the kernel for 2 MiB pages; small ones where it has none")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio is not None and self.size_bytes is not None:
            raise ConfigError(
                f"host.ratio ({self.ratio}) and host.size_bytes ({self.size_bytes}) both give the "
                "size of the host pool; give one of them and none for the other"
            )
        if self.ratio is None and self.size_bytes is None:
            object.__setattr__(self, "ratio", _DEFAULT_RATIO)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageConfig(Section):
    """A store (L3), and how many calls may wait for it how long."""

    section: ClassVar[str] = "storage"

    backend: str = field(metadata=about("registered name of the storage backend"))
    extra_config: PlainMapping = field(
        default_factory=FrozenMapping,
        # Equal configurations have equal hashes without it, and a mapping has none.
        hash=False,
        metadata=about("the backend's own options; copied and read-only all the way down"),
    )
    model_name: str = field(metadata=about("name of the model; pages of another are never read"))
    weights_revision: str = field(
        metadata=about("any text that changes when the weights do; pages of others are never read")
    )
    admission: StorageAdmission = field(
        default=StorageAdmission.ALL,
        metadata=about("what is stored: all that the host gets, or what may well be used again"),
    )
    tp_lcm_size: int | None = field(
        default=None,
        metadata=about(
            "store each page in so many groups of KV heads, a multiple of every tensor-parallel "
            "size in use, so that engines of different sizes read each other's pages; needs "
            "host.layout page_head; may stand in extra_config instead",
            unit="groups",
            at_least=1,
        ),
    )
    num_workers: int = field(
        default=2, metadata=about("calls in progress at a time", unit="threads", at_least=1)
    )
    batch_pages: int | None = field(
        default=None,
        metadata=about(
            "largest batch of one call; by default as many as make 32 MiB, or what the backend "
            "says, 1,024 at most",
            unit="pages",
            at_least=1,
        ),
    )
    call_timeout_seconds: float = field(
        default=30.0,
        metadata=about(
            "a call that takes longer is given up and counts as a miss", unit="seconds", above=0
        ),
    )
    open_timeout_seconds: float = field(
        default=120.0,
        metadata=about(
            "how long the scheduler waits for the store to open, or to be cleared",
            unit="seconds",
            above=0,
        ),
    )
    refresh_seconds: float = field(
        default=60.0,
        metadata=about(
            "what is used again, and was last found in the store so long ago, is offered again: "
            "the store learns that it is in use, or gets back what it has lost",
            unit="seconds",
            above=0,
        ),
    )
    max_inflight_persist_operations: int = field(
        default=1024,
        metadata=about("beyond these, new nodes are not persisted", unit="operations", at_least=1),
    )
    retry_attempts: int = field(
        default=2,
        metadata=about(
            "how often a call tries pages again that the backend says have failed",
            unit="attempts",
            at_least=0,
        ),
    )
    breaker_failures: int = field(
        default=5,
        metadata=about(
            "so many failing calls in a row, and the backend is left alone; 0 for never",
            unit="calls",
            at_least=0,
        ),
    )
    breaker_cooldown_seconds: float = field(
        default=10.0,
        metadata=about(
            "how long the backend is left alone before one call tries it", unit="seconds", above=0
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers > _MAX_WORKERS:
            raise ConfigError(
                f"storage.num_workers must be at most {_MAX_WORKERS}, not {self.num_workers}; for "
                "more, use a backend with threads of its own"
            )
        if _TP_LCM_SIZE in self.extra_config:
            self._take_tp_lcm_size(dict(self.extra_config))

    def _take_tp_lcm_size(self, extra_config: dict[str, object]) -> None:
        """Move the option from where SGLang's users write it: no backend knows it."""
        value = extra_config.pop(_TP_LCM_SIZE)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(
                f"storage.extra_config.{_TP_LCM_SIZE} must be an int of at least 1, not {value!r}"
            )
        if None not in (value, self.tp_lcm_size) and value != self.tp_lcm_size:
            raise ConfigError(
                f"{_TP_LCM_SIZE} is {self.tp_lcm_size} in storage and {value} in its extra_config; "
                "give it once"
            )
        object.__setattr__(self, "tp_lcm_size", self.tp_lcm_size if value is None else value)
        object.__setattr__(self, "extra_config", FrozenMapping(extra_config))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefetchConfig(Section):
    """Which prefetches (L3 -> L2) are worth it, and how much memory they may hold."""

    section: ClassVar[str] = "prefetch"

    threshold_tokens: int = field(
        default=256,
        metadata=about("a shorter hit in storage is not fetched", unit="tokens", at_least=0),
    )
    max_inflight_pages: int | None = field(
        default=None,
        metadata=about(
            "host pages that prefetches may hold together; with none the controller derives it "
            "from the size of the host pool",
            unit="pages",
            at_least=1,
        ),
    )
    cost_estimate: bool = field(
        default=True,
        metadata=about(
            "do not fetch what would take longer than computing it, by what both took lately; "
            "prefetch_policy adaptive decides when the request could run; without effect until the "
            "engine has reported what it computes"
        ),
    )
    timeout_base_seconds: float = field(
        default=1.0,
        metadata=about(
            "under prefetch_policy timeout, how long a request waits whatever its length",
            unit="seconds",
            at_least=0,
        ),
    )
    timeout_per_ki_token_seconds: float = field(
        default=0.25,
        metadata=about(
            "and how much longer for every 1024 tokens of it", unit="seconds", at_least=0
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiCacheConfig(Section):
    """The whole configuration of one cache.

    Raises:
        ConfigError: at construction, when an option or a combination of options cannot work.
    """

    page_size: int = field(
        default=64,
        metadata=about("the unit of caching, hashing and storage", unit="tokens", at_least=1),
    )
    write_policy: WritePolicy = field(
        default=WritePolicy.WRITE_THROUGH,
        metadata=about("when device pages are copied to the host (L1 -> L2)"),
    )
    eviction_policy: str = field(
        default="lru",
        metadata=about(
            "which pages go first, from device, host and page store: adaptive, fifo, lfu, lru, "
            "mru, priority, slru, or module.path:ClassName"
        ),
    )
    pinned_share: float = field(
        default=0.5,
        metadata=about(
            "how much may be pinned at a time; pins beyond are refused",
            unit="part of the device pool",
            at_least=0,
        ),
    )
    write_watermark: float = field(
        default=0.1,
        metadata=about(
            "write_back and write_behind begin to write victims when fewer device pages are free",
            unit="part of the device pool",
            at_least=0,
        ),
    )
    write_by_layer: bool = field(
        default=True,
        metadata=about(
            "with write_through, copy each layer when the forward pass has ended it, not when all "
            "have ended; needs an engine that reserves writes"
        ),
    )
    prefetch_policy: PrefetchPolicy = field(
        default=PrefetchPolicy.BEST_EFFORT,
        metadata=about("how long a request waits for pages that storage is still delivering"),
    )
    io_backend: IoBackend = field(
        default=IoBackend.DIRECT, metadata=about("how pages are addressed in a copy")
    )
    load_back_threshold_tokens: int = field(
        default=10,
        metadata=about("a shorter hit on the host is not loaded", unit="tokens", at_least=0),
    )
    load_cost_estimate: bool = field(
        default=True,
        metadata=about(
            "load only the leading part of a host hit where the rest is computed sooner, by what "
            "both took lately; without effect until both were measured"
        ),
    )
    num_load_slots: int = field(
        default=5,
        metadata=about("loads that run ahead of the model at a time", unit="loads", at_least=1),
    )
    host: HostPoolConfig = field(
        default_factory=HostPoolConfig, metadata=about("the host pool (L2)")
    )
    storage: StorageConfig | None = field(
        default=None, metadata=about("the store (L3); none for two tiers")
    )
    prefetch: PrefetchConfig = field(
        default_factory=PrefetchConfig, metadata=about("prefetches (L3 -> L2)")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("pinned_share", "write_watermark"):
            if (share := getattr(self, name)) > 1:
                raise ConfigError(f"{name} is a part of the device pool, 0 to 1, not {share}")
        copyable = _COPYABLE_LAYOUTS[self.io_backend]
        if self.host.layout not in copyable:
            raise ConfigError(
                f"io_backend {self.io_backend.value} cannot copy host.layout "
                f"{self.host.layout.value}; it copies "
                f"{', '.join(sorted(layout.value for layout in copyable))}"
            )
