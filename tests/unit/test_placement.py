"""Where a rank stands: what is no position is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.config import RankPlacement
from hicache.errors import ConfigError

KINDS = pytest.mark.parametrize("kind", ["tp", "pp", "cp", "dp"])


def test_a_rank_is_alone_by_default() -> None:
    assert RankPlacement() == RankPlacement(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)


@KINDS
@given(size=st.integers(1, 9), data=st.data())
def test_every_position_within_its_size_is_taken(kind: str, size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    placement = RankPlacement(**{f"{kind}_rank": rank, f"{kind}_size": size})
    assert (getattr(placement, f"{kind}_rank"), getattr(placement, f"{kind}_size")) == (rank, size)


@KINDS
@pytest.mark.parametrize("rank", [-1, 2, 1.0, True, "0", None])
def test_a_rank_outside_its_size_is_refused_by_name(kind: str, rank: object) -> None:
    fields: dict[str, Any] = {f"{kind}_rank": rank, f"{kind}_size": 2}
    with pytest.raises(ConfigError, match=f"{kind}_rank must be an int from 0 to .* = 1"):
        RankPlacement(**fields)


@KINDS
@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None])
def test_a_size_that_holds_no_rank_is_refused_by_name(kind: str, size: object) -> None:
    fields: dict[str, Any] = {f"{kind}_size": size}
    with pytest.raises(ConfigError, match=f"{kind}_size must be an int of at least 1"):
        RankPlacement(**fields)
