"""Laws of a whole rank under random calls, real streams and a store that fails at random."""

from __future__ import annotations

import pytest
from system_driver import SystemDriver

from hicache.radix import CopyKind


@pytest.mark.parametrize("seed", range(20))
def test_every_page_has_one_owner_and_its_own_bytes_whatever_happens(seed: int) -> None:
    driver = SystemDriver(seed)
    with driver.rig:
        for _ in range(150):
            driver.step()
        driver.drain()


def test_the_driver_meets_every_kind_of_event() -> None:
    """What is met depends on threads too, so it goes on for a while until all is."""
    moves = {f"{kind.value} {outcome}" for kind in CopyKind for outcome in ("ok", "failed")}
    missing = {"abort", "attach again", "reset", "reset in flight", "no device memory"}
    missing |= {"load queued", "load nothing", "load busy", "load broken"}
    missing |= {"prefetch hit", "prefetch miss", "evicted_host_pages", "prefetch_revoked"}
    missing |= moves | {"persist present"}
    for seed in range(100, 160):
        driver = SystemDriver(seed)
        with driver.rig:
            for _ in range(300):
                driver.step()
            driver.drain()
        missing -= driver.seen | set(driver.cache.counters)
        for kind, stats in driver.cache.controller.stats.items():
            missing -= {f"{kind.value} {outcome}" for outcome in stats.outcomes}
        if not missing:
            return
    assert not missing
