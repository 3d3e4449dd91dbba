"""HiRadixCache: what a scheduler talks to."""

from hicache.hiradix_cache.build import create_hiradix_cache
from hicache.hiradix_cache.cache import HiRadixCache
from hicache.hiradix_cache.layer_kinds import LayerKind, require_restorable
from hicache.hiradix_cache.results import (
    EvictOutcome,
    LoadBack,
    LoadStatus,
    PinnedPrefix,
    PrefixMatch,
)
from hicache.hiradix_cache.snapshot import snapshot_of

__all__ = [
    "EvictOutcome",
    "HiRadixCache",
    "LayerKind",
    "LoadBack",
    "LoadStatus",
    "PinnedPrefix",
    "PrefixMatch",
    "create_hiradix_cache",
    "require_restorable",
    "snapshot_of",
]
