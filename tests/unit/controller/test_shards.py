"""Names of stored pages: equal exactly where the bytes are, and one rank stores each of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hicache.config import RankPlacement, StorageConfig
from hicache.controller.shards import is_replicated, stored_shards, stores_pages
from hicache.errors import ConfigError
from hicache.layout import (
    DTYPE_BYTES,
    HeadRange,
    HostLayout,
    KVGeometry,
    MlaGeometry,
    PageGeometry,
    RowGeometry,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE: dict[str, Any] = {"num_layers": 4, "dtype": "float16", "page_size": 16}
KV = KVGeometry(num_kv_heads=8, head_dim=4, **PAGE)
MLA = MlaGeometry(kv_lora_rank=8, qk_rope_head_dim=4, **PAGE)
INDEXER = RowGeometry(name="indexer", width=8, **PAGE)
PAGE_HEAD = HostLayout.PAGE_HEAD


def config(**options: Any) -> StorageConfig:
    return StorageConfig(
        **{"backend": "memory", "model_name": "model", "weights_revision": "1", **options}
    )


def names(
    geometries: Sequence[PageGeometry],
    placement: RankPlacement | None = None,
    *,
    layout: HostLayout = PAGE_HEAD,
    **options: Any,
) -> list[bytes]:
    shards = stored_shards(config(**options), geometries, layout, placement or RankPlacement())
    return [shard.namespace.digest for shard in shards]


def tp(rank: int, size: int, **others: int) -> RankPlacement:
    return RankPlacement(tp_rank=rank, tp_size=size, **others)


def share(geometry: KVGeometry, tp_size: int) -> KVGeometry:
    """What each of `tp_size` ranks has of a pool of all heads."""
    return dataclasses.replace(geometry, num_kv_heads=geometry.num_kv_heads // tp_size)


# -- what depends on what --------------------------------------------------------------------


def test_a_rank_alone_stores_its_pages_as_one_shard_that_says_what_it_is() -> None:
    [shard] = stored_shards(config(), [KV], HostLayout.PAGE_FIRST, RankPlacement())
    assert shard.pool_bytes == (KV.page_bytes,)
    assert shard.namespace.describe() == {
        "model": "model",
        "weights_revision": "1",
        "dtype": "float16",
        "layout": "page_first",
        "page_size": 16,
        "kv_shape": "mha:layers=4,heads=8,head_dim=4",
        "shard": "layers=0-4 heads=0-8of8",
        "format_version": 1,
    }


def test_pools_are_named_one_after_the_other() -> None:
    [shard] = stored_shards(config(), [MLA, INDEXER], HostLayout.PAGE_FIRST, RankPlacement())
    assert shard.namespace.kv_shape == "mla:layers=4,latent=8,rope=4+indexer:layers=4,width=8"
    assert shard.namespace.dtype == "float16+float16"
    assert shard.namespace.shard == "layers=0-4+0-4 replicated"
    assert shard.pool_bytes == (MLA.page_bytes, INDEXER.page_bytes)


small = st.integers(1, 2)
page_fields = {
    "num_layers": small,
    "dtype": st.sampled_from(sorted(DTYPE_BYTES)),
    "page_size": small,
    "first_layer": st.integers(0, 2),
}
geometries = st.lists(
    st.one_of(
        st.builds(KVGeometry, num_kv_heads=small, head_dim=small, **page_fields),
        st.builds(MlaGeometry, kv_lora_rank=small, qk_rope_head_dim=small, **page_fields),
        st.builds(RowGeometry, name=st.sampled_from(["indexer", "scale"]), width=small,
                  **page_fields),
    ),
    min_size=1,
    max_size=2,
)  # fmt: skip
placements = st.builds(
    lambda tp, pp, cp, dp: RankPlacement(
        tp_rank=tp[0], tp_size=tp[1], pp_rank=pp[0], pp_size=pp[1],
        cp_rank=cp[0], cp_size=cp[1], dp_rank=dp[0], dp_size=dp[1],
    ),
    *[st.sampled_from([(0, 1), (0, 2), (1, 2)])] * 4,
)  # fmt: skip
engines = st.fixed_dictionaries(
    {
        "geometries": geometries,
        "placement": placements,
        "layout": st.sampled_from(HostLayout),
        "model_name": st.sampled_from(["one", "other"]),
        "weights_revision": st.sampled_from(["1", "2"]),
    }
)


def bytes_of(engine: dict[str, Any]) -> object:
    """Everything that the bytes of a page depend on, said without the code under test."""
    placement: RankPlacement = engine["placement"]
    heads = any(isinstance(one, KVGeometry) for one in engine["geometries"])
    return (
        engine["model_name"],
        engine["weights_revision"],
        engine["layout"],
        [(type(one), one) for one in engine["geometries"]],
        # Shares are equal: TP rank and size say which heads, unless there are none to share.
        (placement.tp_rank, placement.tp_size) if heads else None,
        (placement.cp_rank, placement.cp_size),
    )


@given(one=engines, other=engines, data=st.data())
@settings(deadline=None, max_examples=150)
def test_two_ranks_share_pages_exactly_where_all_that_their_bytes_depend_on_is_equal(
    one: dict[str, Any], other: dict[str, Any], data: st.DataObject
) -> None:
    # Two engines drawn apart nearly always differ: let them differ in a few things at most.
    for thing in data.draw(st.sets(st.sampled_from(sorted(one)), min_size=3)):
        other = {**other, thing: one[thing]}
    for engine in (one, other):
        assume(len({geometry.page_size for geometry in engine["geometries"]}) == 1)
    found = [
        names(
            engine["geometries"],
            engine["placement"],
            layout=engine["layout"],
            model_name=engine["model_name"],
            weights_revision=engine["weights_revision"],
        )
        for engine in (one, other)
    ]
    assert (found[0] == found[1]) == (bytes_of(one) == bytes_of(other))


@pytest.mark.parametrize("dp", [(0, 2), (1, 2), (3, 4)])
def test_data_parallel_replicas_share_everything(dp: tuple[int, int]) -> None:
    replica = RankPlacement(dp_rank=dp[0], dp_size=dp[1])
    assert names([KV], replica) == names([KV])
    assert stores_pages([KV], replica)


def test_context_parallel_ranks_have_names_of_their_own() -> None:
    found = {
        names([MLA], RankPlacement(cp_rank=rank, cp_size=size))[0]
        for size in (1, 2, 3)
        for rank in range(size)
    }
    assert len(found) == 6


# -- layers ----------------------------------------------------------------------------------


def test_stages_of_unequal_length_never_meet_though_rank_and_length_agree() -> None:
    """10 layers as 4 + 3 + 3 and as 3 + 3 + 4: the middle stages hold other layers."""
    middle = RankPlacement(pp_rank=1, pp_size=3)
    one, other = (
        dataclasses.replace(KV, num_layers=3, first_layer=first_layer) for first_layer in (4, 3)
    )
    assert names([one], middle) != names([other], middle)


def test_stages_that_hold_the_same_layers_share_them_whatever_their_number() -> None:
    stage = dataclasses.replace(KV, first_layer=4)
    found = [
        names([stage], RankPlacement(pp_rank=rank, pp_size=size)) for rank, size in ((1, 2), (1, 5))
    ]
    assert found[0] == found[1]


def test_a_stage_that_does_not_say_which_layers_it_holds_cannot_store_any() -> None:
    with pytest.raises(ConfigError, match=r"stage 1 of 2 cannot store .* give .* its first_layer"):
        names([KV], RankPlacement(pp_rank=1, pp_size=2))
    stage = dataclasses.replace(KV, first_layer=4)
    with pytest.raises(ConfigError, match=r"give 'indexer:layers=4,width=8' its first_layer"):
        names([stage, INDEXER], RankPlacement(pp_rank=1, pp_size=2))


# -- heads -----------------------------------------------------------------------------------


@given(
    heads=st.integers(1, 4).flatmap(
        lambda per_group: st.sampled_from([2, 4, 8]).map(lambda n: per_group * n)
    ),
    data=st.data(),
)
def test_every_engine_names_the_groups_of_heads_alike_and_holds_each_once(
    heads: int, data: st.DataObject
) -> None:
    """The ranks of an engine hold, in order, the groups that one rank alone holds."""
    num_groups = data.draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    tp_size = data.draw(
        st.sampled_from([n for n in range(1, num_groups + 1) if num_groups % n == 0])
    )
    whole = dataclasses.replace(KV, num_kv_heads=heads)
    alone = names([whole], tp_lcm_size=num_groups)
    assert len(set(alone)) == num_groups
    by_rank = [
        names([share(whole, tp_size)], tp(rank, tp_size), tp_lcm_size=num_groups)
        for rank in range(tp_size)
    ]
    assert [name for found in by_rank for name in found] == alone


@pytest.mark.parametrize("side_heads", [2, 4])
def test_target_and_draft_are_split_alike_and_fill_their_pages(side_heads: int) -> None:
    draft = dataclasses.replace(KV, num_layers=1, num_kv_heads=side_heads)
    shards = stored_shards(config(tp_lcm_size=2), [KV, draft], PAGE_HEAD, RankPlacement())
    assert [shard.pool_bytes for shard in shards] == [
        (KV.page_bytes // 2, draft.page_bytes // 2)
    ] * 2
    assert shards[1].namespace.shard == f"layers=0-4+0-1 heads=4-8of8+{side_heads // 2}-" + (
        f"{side_heads}of{side_heads}"
    )


def test_a_rank_that_holds_one_group_shares_it_with_engines_that_are_not_split() -> None:
    """A head range is the same bytes, whoever says how it came about."""
    two = share(KV, 2)
    assert names([KV], tp_lcm_size=2) == [
        names([two], tp(0, 2))[0],
        names([two], tp(1, 2), tp_lcm_size=2)[0],
    ]


def test_heads_that_do_not_divide_can_be_split_where_ranks_say_which_they_hold() -> None:
    """3 KV heads on 2 ranks as 1 + 2, shared head by head with one rank alone."""
    three = dataclasses.replace(KV, num_kv_heads=3)
    unequal = [
        dataclasses.replace(KV, num_kv_heads=last - first, kv_heads=HeadRange(first, last, 3))
        for first, last in ((0, 1), (1, 3))
    ]
    by_rank = [names([one], tp(rank, 2), tp_lcm_size=3) for rank, one in enumerate(unequal)]
    assert [len(found) for found in by_rank] == [1, 2]
    assert [*by_rank[0], *by_rank[1]] == names([three], tp_lcm_size=3)


REFUSED: dict[str, tuple[list[PageGeometry], RankPlacement, HostLayout, int, str]] = {
    "a layout that is not by head": (
        [KV],
        tp(0, 1),
        HostLayout.PAGE_FIRST_DIRECT,
        4,
        r"apart only in host.layout page_head, not in page_first_direct",
    ),
    "latent attention": ([MLA], tp(0, 4), PAGE_HEAD, 4, r"'mla:.*' has no heads to split"),
    "rows beside heads": ([KV, INDEXER], tp(0, 1), PAGE_HEAD, 4, r"'indexer:.*' has no heads"),
    "heads that do not divide": ([KV], tp(0, 1), PAGE_HEAD, 3, r"8 KV heads .* 3 equal groups"),
    "more groups than heads": ([KV], tp(0, 1), PAGE_HEAD, 16, r"tp_lcm_size must divide 8"),
    "no multiple of the TP size": (
        [share(KV, 4)],
        tp(1, 4),
        PAGE_HEAD,
        2,
        r"TP rank 1 of 4 holds KV heads 2 to 4, .* multiple of every TP size in use",
    ),
    "pools that are split differently": (
        [
            dataclasses.replace(KV, num_kv_heads=2, kv_heads=HeadRange(0, 2, 4)),
            dataclasses.replace(KV, num_kv_heads=1, kv_heads=HeadRange(0, 1, 4)),
        ],
        tp(0, 2),
        PAGE_HEAD,
        4,
        r"different numbers of groups",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused_with_the_reason(case: str) -> None:
    pools, placement, layout, num_groups, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason):
        names(pools, placement, layout=layout, tp_lcm_size=num_groups)


# -- who stores ------------------------------------------------------------------------------


def heads_of(rank: int, tp_size: int, total: int) -> KVGeometry:
    """One head of `total` on each of more ranks."""
    head = rank * total // tp_size
    return dataclasses.replace(KV, num_kv_heads=1, kv_heads=HeadRange(head, head + 1, total))


def pools_of(kind: str, rank: int, tp_size: int) -> list[PageGeometry]:
    draft = dataclasses.replace(KV, num_layers=1, num_kv_heads=1)
    kinds: dict[str, list[PageGeometry]] = {
        "mla": [MLA],
        "dsa": [MLA, INDEXER],
        "mha": [share(KV, tp_size)],
        "shared heads": [heads_of(rank, tp_size, 2)],
        "shared heads, own draft": [heads_of(rank, tp_size, 2), draft],
        "mla with a draft of heads": [MLA, draft],
    }
    return kinds[kind]


@pytest.mark.parametrize(
    ("kind", "num_names"),
    [
        ("mla", 1),
        ("dsa", 1),
        ("mha", 8),
        ("shared heads", 2),
        ("shared heads, own draft", 8),
        ("mla with a draft of heads", 8),
    ],
)
def test_of_the_ranks_that_share_a_name_exactly_the_first_stores(kind: str, num_names: int) -> None:
    stored: Counter[bytes] = Counter()
    seen: set[bytes] = set()
    for rank in range(8):
        pools = pools_of(kind, rank, 8)
        [name] = names(pools, tp(rank, 8))
        assert stores_pages(pools, tp(rank, 8)) == (name not in seen)
        seen.add(name)
        stored[name] += stores_pages(pools, tp(rank, 8))
    assert len(stored) == num_names
    assert set(stored.values()) == {1}


def test_latent_kv_is_the_same_for_every_tp_size_and_stored_by_each_stage() -> None:
    stage = dataclasses.replace(MLA, first_layer=4)
    alone = names([stage])
    for tp_size in (1, 2, 8):
        for rank in range(tp_size):
            placement = tp(rank, tp_size, pp_rank=1, pp_size=2)
            assert names([stage], placement) == alone
            assert stores_pages([stage], placement) == (rank == 0)


def test_pools_are_replicated_when_none_has_heads() -> None:
    assert is_replicated([MLA])
    assert is_replicated([MLA, INDEXER])
    assert not is_replicated([KV])
    assert not is_replicated([MLA, KV])


@pytest.mark.parametrize(
    ("rank", "tp_size", "heads"), [(0, 3, (0, 1, 2)), (1, 4, (1, 2, 2)), (2, 4, (0, 1, 2))]
)
def test_more_ranks_than_heads_must_share_them_evenly_and_next_to_each_other(
    rank: int, tp_size: int, heads: tuple[int, int, int]
) -> None:
    pool = dataclasses.replace(KV, num_kv_heads=1, kv_heads=HeadRange(*heads))
    with pytest.raises(ConfigError, match=r"can share 2 KV heads only when"):
        stores_pages([pool], tp(rank, tp_size))
