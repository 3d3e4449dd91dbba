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
    seen: set[str] = set()
    outcomes: set[str] = set()
    counted: set[str] = set()
    for seed in range(100, 112):
        driver = SystemDriver(seed)
        with driver.rig:
            for _ in range(300):
                driver.step()
            driver.drain()
        seen |= driver.seen
        counted |= set(driver.cache.counters)
        for kind, stats in driver.cache.controller.stats.items():
            outcomes |= {f"{kind.value} {outcome}" for outcome in stats.outcomes}
    assert {"abort", "attach again", "reset", "reset in flight", "no device memory"} <= seen
    assert {"load queued", "load nothing", "load busy", "load broken"} <= seen
    assert {"prefetch hit", "prefetch miss"} <= seen
    moves = {f"{kind.value} {o}" for kind in CopyKind for o in ("ok", "failed")}
    assert moves | {"persist present"} <= outcomes
    assert {"evicted_host_pages", "prefetch_revoked"} <= counted
