"""Laws of the tree under random operations, checked by an outside book-keeper after each step."""

from __future__ import annotations

import pytest
from tree_driver import TreeDriver


@pytest.mark.parametrize("seed", range(40))
def test_every_page_has_one_owner_and_its_own_bytes_after_every_step(seed: int) -> None:
    driver = TreeDriver(seed)
    for _ in range(400):
        driver.step()
    driver.drain()


def test_the_driver_meets_every_kind_of_event() -> None:
    seen: set[str] = set()
    for seed in range(100, 112):
        driver = TreeDriver(seed)
        for _ in range(400):
            driver.step()
        seen |= driver.seen
    moves = {
        f"{k} {o}" for k in ("write", "load", "persist", "prefetch") for o in ("good", "failed")
    }
    assert moves <= seen
    assert {
        "insert",
        "adopt",
        "evict",
        "write_back",
        "write ahead",
        "no host page",
        "reset",
    } <= seen
    assert "reset with held pages" in seen
