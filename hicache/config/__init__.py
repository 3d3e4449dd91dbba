"""Configuration: frozen records, checked at construction, from JSON, TOML, YAML, environment.

    config = HiCacheConfig(page_size=32, host=HostPoolConfig(ratio=4.0))
    config = load_config("@hicache.toml", environ=os.environ)

Every option says its meaning, unit, default and bounds where it is declared
(`hicache.config.options`); `describe_options` prints them. Where a rank stands among others is no
option but a fact of the engine: `RankPlacement`.
"""

from __future__ import annotations

from hicache.config.loading import describe_options, load_config, load_mapping
from hicache.config.options import HiCacheConfig, HostPoolConfig, PrefetchConfig, StorageConfig
from hicache.config.placement import RankPlacement

__all__ = [
    "HiCacheConfig",
    "HostPoolConfig",
    "PrefetchConfig",
    "RankPlacement",
    "StorageConfig",
    "describe_options",
    "load_config",
    "load_mapping",
]
