"""What a page store can be told in `extra_config`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.storage.page_store.eviction_policies import DEFAULT_POLICY, POLICY_NAMES
from hicache.storage.page_store.limits import Limits, default_min_free_bytes

if TYPE_CHECKING:
    from hicache.storage.base import HiCacheStorageConfig

__all__ = ["PageStoreOptions"]

_TYPES = {
    "path": str,
    "max_bytes": int,
    "min_free_bytes": int,
    "eviction_policy": str,
    "direct_io": bool,
    "mapped_reads": bool,
    "fsync": bool,
}
_SMALLEST_BYTES = 1 << 19


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageStoreOptions:
    """The options, checked; see `PageStore` for what they mean.

    Attributes:
        path: the directory.
        max_bytes: None for no bound.
        min_free_bytes: None for the default of the file system.
        eviction_policy: name of the order of eviction; see `create_policy`.
        direct_io, mapped_reads, fsync: see `PageStore`.
    """

    path: str
    max_bytes: int | None = None
    min_free_bytes: int | None = None
    eviction_policy: str = DEFAULT_POLICY
    direct_io: bool = False
    mapped_reads: bool = True
    fsync: bool = False

    @classmethod
    def from_config(cls, config: HiCacheStorageConfig) -> PageStoreOptions:
        """Read the options of a config.

        Raises:
            ConfigError: one is unknown, missing or cannot work.
        """
        chosen = config.checked_extra_config("file", _TYPES)
        options = cls(**{"path": "", "eviction_policy": _policy_of(config), **chosen})
        if not options.path:
            raise ConfigError(
                "storage backend 'file' needs the option 'path': the directory for its pages"
            )
        if options.min_free_bytes is not None and options.min_free_bytes < 0:
            raise ConfigError(f"min_free_bytes must not be negative, got {options.min_free_bytes}")
        smallest = _SMALLEST_BYTES + 2 * config.page_bytes
        if options.max_bytes is not None and options.max_bytes < smallest:
            raise ConfigError(
                f"max_bytes={options.max_bytes} is too little for an index and pages of "
                f"{config.page_bytes} bytes; give at least {smallest}"
            )
        return options

    def limits(self, directory: str) -> Limits:
        """Return the limits for a store in an existing directory.

        Raises:
            OSError: its file system cannot be asked.
        """
        min_free_bytes = self.min_free_bytes
        if min_free_bytes is None:
            min_free_bytes = default_min_free_bytes(directory)
        if self.max_bytes is None:
            return Limits(min_free_bytes=min_free_bytes)
        return Limits(self.max_bytes, min_free_bytes)


def _policy_of(config: HiCacheStorageConfig) -> str:
    """Return the order of eviction of the cache, if pages in a store can be put into it."""
    name = config.eviction_policy
    return name if name in POLICY_NAMES else DEFAULT_POLICY
