"""Ranks build their controllers together: with equal options and pools of the smallest size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from controller_fakes import TwoRanks
from test_controller import STORAGE, RecordingMover

from hicache.config import HiCacheConfig
from hicache.controller import HiCacheController
from hicache.errors import RanksDivergedError, RanksLostError
from hicache.pools import CpPageAllocator, CpSharedKVLayout, PageAllocator
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.pools import Allocator
    from hicache.ranks import RankGroup

CONFIG = HiCacheConfig(page_size=4, storage=STORAGE)


class NobodyThere:
    """Two ranks, of which the other never answers."""

    size = 2

    def agree(self, values: Sequence[int]) -> list[int]:
        raise RanksLostError(f"no answer to {len(values)} values")


def build(
    ranks: RankGroup,
    config: HiCacheConfig,
    device: Allocator,
    host: Allocator,
    *,
    batch_pages: int = 128,
) -> HiCacheController:
    mover = RecordingMover()
    mover.batch_pages = batch_pages
    return HiCacheController(
        config, device_allocator=device, host_allocator=host, mover=mover, ranks=ranks
    )


def in_two_threads(run: Callable[[int], HiCacheController | None]) -> list[HiCacheController]:
    with ThreadPoolExecutor(2) as threads:
        return [one for one in threads.map(run, range(2)) if one is not None]


def test_pools_are_as_large_as_the_smallest_of_all_ranks() -> None:
    group, device, host = TwoRanks(), (8, 7), (15, 16)
    controllers = in_two_threads(
        lambda rank: build(group, CONFIG, PageAllocator(device[rank]), PageAllocator(host[rank]))
    )
    for controller in controllers:
        sizes = controller.device_allocator, controller.host_allocator
        assert [(one.num_pages, one.num_available) for one in sizes] == [(7, 7), (15, 15)]
        assert controller.meeting.num_agreements == 2
    assert [one.num_device_page_ids for one in controllers] == [8, 7]


def test_every_rank_reckons_with_the_smallest_calls_to_a_store_of_all_ranks() -> None:
    """Whose pages can be of different sizes; what a read costs has to be the same on all."""
    group = TwoRanks()
    controllers = in_two_threads(
        lambda rank: build(
            group, CONFIG, PageAllocator(8), PageAllocator(8), batch_pages=(32, 24)[rank]
        )
    )
    assert [one.storage_batch_pages for one in controllers] == [24, 24]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (HiCacheConfig(page_size=8, storage=STORAGE), "page_size"),
        (
            HiCacheConfig(page_size=4, storage=STORAGE, write_policy=WritePolicy.WRITE_BACK),
            "differ in write_policy;",
        ),
        (HiCacheConfig(page_size=4), "storage.backend"),
    ],
)
def test_ranks_with_other_options_are_refused_on_both_by_name(
    other: HiCacheConfig, named: str
) -> None:
    group, configs = TwoRanks(), (CONFIG, other)
    allocators = [PageAllocator(8) for _ in range(4)]

    def run(rank: int) -> None:
        with pytest.raises(RanksDivergedError, match=named):
            build(group, configs[rank], *allocators[2 * rank : 2 * rank + 2])

    in_two_threads(run)
    assert [one.num_available for one in allocators] == [8] * 4


def shared(num_pages: int, rank: int) -> CpPageAllocator:
    layout = CpSharedKVLayout(cp_rank=rank, cp_size=2, num_physical_pages=num_pages, page_size=4)
    return CpPageAllocator(layout)


def test_pages_that_ranks_share_keep_their_owners_in_every_copy() -> None:
    group = TwoRanks()
    controllers = in_two_threads(
        lambda rank: build(group, CONFIG, shared(4, rank), shared(6, rank))
    )
    for controller in controllers:
        device_pages = np.array([0, 2, 4, 1])
        write = controller.write(device_pages)
        assert write is not None
        assert (write.host_pages % 2 == device_pages % 2).all()
        load = controller.load(write.host_pages)
        assert load is not None
        assert (load.device_pages % 2 == device_pages % 2).all()
        assert controller.reserve_write("r", np.array([6, 2, 0]))
        # Rank 0 has no host page left.
        assert controller.write(np.array([0])) is None
        assert controller.write(np.array([1])) is not None


def test_shared_pools_of_unequal_size_are_refused_on_both() -> None:
    group = TwoRanks()

    def run(rank: int) -> None:
        with pytest.raises(RanksDivergedError, match="the pages of the host pool"):
            build(group, CONFIG, shared(4, rank), shared(6 + rank, rank))

    in_two_threads(run)


def test_a_rank_that_does_not_come_leaves_nothing_behind() -> None:
    device, host = PageAllocator(8), PageAllocator(8)
    with pytest.raises(RanksLostError, match="no answer"):
        build(NobodyThere(), CONFIG, device, host)
    assert (device.num_available, host.num_available) == (8, 8)
