"""Under which names the pages of one rank are stored, and which of several ranks stores them.

Two engines read each other's pages exactly where their namespaces are equal, so the name of a shard
says what its bytes are (which layers, which KV heads) and not which rank of how many holds them:
engines that split a model differently share what they happen to hold alike.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.hashing import StorageNamespace
from hicache.layout import HeadRange, HostLayout, KVGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.config import RankPlacement, StorageConfig
    from hicache.layout import PageGeometry

__all__ = ["StoredShard", "is_replicated", "stored_shards", "stores_pages"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredShard:
    """What storage keeps of each page under one name.

    Attributes:
        namespace: the name.
        pool_bytes: bytes of it in each pool, in the order of pools. A rank's shards of one page
            follow each other in every pool, and fill its page there.
    """

    namespace: StorageNamespace
    pool_bytes: tuple[int, ...]


def is_replicated(geometries: Sequence[PageGeometry]) -> bool:
    """Return whether all tensor-parallel ranks hold the same bytes, as with latent attention."""
    return not any(geometry.has_heads for geometry in geometries)


def stores_pages(geometries: Sequence[PageGeometry], placement: RankPlacement) -> bool:
    """Return whether this rank stores its pages, because none before it holds the same.

    The others read what it has stored.

    Args:
        geometries: of the rank's pools, the model's KV first.
        placement: of the rank.
    """
    if is_replicated(geometries):
        return placement.tp_rank == 0
    # With more ranks than heads, neighbours hold the same head; they differ if they do in any pool.
    return any(
        placement.tp_rank % max(1, placement.tp_size // _heads(one, placement).total) == 0
        for one in geometries
        if isinstance(one, KVGeometry)
    )


def stored_shards(
    config: StorageConfig,
    geometries: Sequence[PageGeometry],
    layout: HostLayout,
    placement: RankPlacement,
) -> list[StoredShard]:
    """Return what a rank's pages are stored as: one shard, or as many as it has groups of heads.

    Args:
        config: of the store; `tp_lcm_size` says how many groups all heads of the model make.
        geometries: of the rank's pools, the model's KV first.
        layout: of the host pools.
        placement: of the rank.

    Raises:
        ConfigError: which part of the model the rank holds is not known, or its pages cannot be
            split into such groups; the message says why.
    """
    groups = [list(geometries)]
    if config.tp_lcm_size is not None:
        groups = _groups(config.tp_lcm_size, geometries, layout, placement)
    return [
        StoredShard(
            namespace=StorageNamespace(
                model=config.model_name,
                weights_revision=config.weights_revision,
                dtype="+".join(one.dtype for one in group),
                layout=layout.value,
                page_size=group[0].page_size,
                kv_shape="+".join(one.kv_shape for one in group),
                shard=_shard(group, placement),
            ),
            pool_bytes=tuple(one.page_bytes for one in group),
        )
        for group in groups
    ]


def _shard(geometries: Sequence[PageGeometry], placement: RankPlacement) -> str:
    """Say which part of the model the bytes are."""
    parts = ["layers=" + "+".join(_layers(one, placement) for one in geometries)]
    if is_replicated(geometries):
        parts.append("replicated")
    else:
        parts.append("heads=" + "+".join(_heads_text(one, placement) for one in geometries))
    if placement.cp_size > 1:
        parts.append(f"cp={placement.cp_rank}of{placement.cp_size}")
    return " ".join(parts)


def _layers(geometry: PageGeometry, placement: RankPlacement) -> str:
    first = geometry.first_layer
    if first is None and placement.pp_size > 1:
        raise ConfigError(
            f"stage {placement.pp_rank} of {placement.pp_size} cannot store pages before it says "
            f"which layers it holds; give {geometry.kv_shape!r} its first_layer"
        )
    first = first or 0
    return f"{first}-{first + geometry.num_layers}"


def _heads_text(geometry: PageGeometry, placement: RankPlacement) -> str:
    if not isinstance(geometry, KVGeometry):
        return "all"
    first, last, total = _heads(geometry, placement)
    return f"{first}-{last}of{total}"


def _heads(geometry: KVGeometry, placement: RankPlacement) -> HeadRange:
    if geometry.kv_heads is None:
        count = geometry.num_kv_heads
        first = placement.tp_rank * count
        return HeadRange(first, first + count, placement.tp_size * count)
    first, last, total = geometry.kv_heads
    if placement.tp_size <= total:
        return geometry.kv_heads
    head = placement.tp_rank * total // placement.tp_size
    if placement.tp_size % total or (first, last) != (head, head + 1):
        raise ConfigError(
            f"{placement.tp_size} TP ranks can share {total} KV heads only when that many ranks "
            f"have each, one after the other; rank {placement.tp_rank} has {first} to {last}"
        )
    return geometry.kv_heads


def _groups(
    num_groups: int,
    geometries: Sequence[PageGeometry],
    layout: HostLayout,
    placement: RankPlacement,
) -> list[list[PageGeometry]]:
    """Return the pools of each group of heads that the rank holds, as if it held no other."""
    if layout is not HostLayout.PAGE_HEAD:
        raise ConfigError(
            f"tp_lcm_size splits pages by head, which are apart only in host.layout page_head, not "
            f"in {layout.value}; use that layout, or leave tp_lcm_size out"
        )
    columns = [_groups_of_pool(num_groups, one, placement) for one in geometries]
    if len({len(column) for column in columns}) > 1:
        raise ConfigError(
            f"tp_lcm_size={num_groups} gives the pools of this rank different numbers of groups; "
            "split the heads of all pools alike"
        )
    return [list(group) for group in zip(*columns, strict=True)]


def _groups_of_pool(
    num_groups: int, geometry: PageGeometry, placement: RankPlacement
) -> list[PageGeometry]:
    if not isinstance(geometry, KVGeometry):
        raise ConfigError(
            f"tp_lcm_size splits pages by head, and {geometry.kv_shape!r} has no heads to split; "
            "leave it out: ranks share latent KV as it is"
        )
    first, last, total = _heads(geometry, placement)
    if total % num_groups:
        raise ConfigError(
            f"the {total} KV heads of {geometry.kv_shape!r} over {placement.tp_size} TP ranks do "
            f"not make {num_groups} equal groups; tp_lcm_size must divide {total}"
        )
    size = total // num_groups
    if first % size or last % size:
        raise ConfigError(
            f"TP rank {placement.tp_rank} of {placement.tp_size} holds KV heads {first} to {last}, "
            f"which are no whole groups of {size}; tp_lcm_size={num_groups} must be a multiple of "
            "every TP size in use"
        )
    return [
        dataclasses.replace(
            geometry, num_kv_heads=size, kv_heads=HeadRange(head, head + size, total)
        )
        for head in range(first, last, size)
    ]
