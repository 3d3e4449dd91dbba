"""What ranks find out where they meet: the minimum, and whether they are equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from controller_fakes import OtherRank

from hicache.config import HiCacheConfig, HostPoolConfig, StorageConfig
from hicache.controller.agreed_numbers import option_digests
from hicache.controller.rank_meeting import LENGTH, Call, RankMeeting, paired
from hicache.errors import RanksDivergedError, RanksLostError
from hicache.ranks import SingleRank

if TYPE_CHECKING:
    from collections.abc import Sequence


class LostRanks:
    """A group of two whose other rank does not answer any more."""

    size = 2

    def agree(self, values: Sequence[int]) -> Sequence[int]:
        raise RanksLostError("the other rank has died")


def beside(call: Call, values: list[int], equal: dict[str, int]) -> RankMeeting:
    """A rank whose peer makes a call of its own."""
    words = paired([call, len(values), *equal.values()]) + values
    return RankMeeting(OtherRank(lambda _: words + [0] * (LENGTH - len(words))))


def test_every_value_is_the_minimum_over_the_ranks() -> None:
    meeting = beside(Call.STEP, [3, -5], {"a": 7})
    assert meeting.agree(Call.STEP, [1, 0], equal={"a": 7}) == [1, -5]
    assert meeting.num_agreements == 1
    assert meeting.ended is None


@pytest.mark.parametrize(
    ("call", "values", "equal", "named"),
    [
        (Call.ATTACH, [3], {"a": 7}, "the call"),
        (Call.STEP, [3, 4], {"a": 7}, "its values"),
        (Call.STEP, [3], {"a": 8}, "differ in a;"),
        (Call.STEP, [3], {"a": 6}, "differ in a;"),
    ],
)
def test_ranks_that_differ_find_out_in_the_same_agreement_and_it_is_the_last(
    call: Call, values: list[int], equal: dict[str, int], named: str
) -> None:
    meeting = beside(call, values, equal)
    for _ in range(2):
        with pytest.raises(RanksDivergedError, match=named):
            meeting.agree(Call.STEP, [1], equal={"a": 7})
    assert isinstance(meeting.ended, RanksDivergedError)
    assert meeting.num_agreements == 1


def test_after_the_loss_of_a_rank_nobody_is_asked_again() -> None:
    meeting = RankMeeting(LostRanks())
    for _ in range(2):
        with pytest.raises(RanksLostError, match="has died"):
            meeting.agree(Call.STEP, [1])
    assert meeting.num_agreements == 1


def test_one_rank_meets_nobody() -> None:
    meeting = RankMeeting(SingleRank())
    assert meeting.agree(Call.STEP, [1, 2], equal={"a": 7}) == [1, 2]
    assert meeting.num_agreements == 0


STORAGE = StorageConfig(backend="file", model_name="m", weights_revision="1")


def test_only_a_ranks_own_affairs_may_differ_between_ranks() -> None:
    own = {"host.ratio", "host.size_bytes", "host.huge_pages", "storage.extra_config"}
    digests = option_digests(HiCacheConfig(storage=STORAGE))
    assert not own & digests.keys()
    assert {"page_size", "write_policy", "prefetch.threshold_tokens"} <= digests.keys()
    assert {"host.layout", "storage.weights_revision", "storage.batch_pages"} <= digests.keys()
    bigger = HiCacheConfig(storage=STORAGE, host=HostPoolConfig(ratio=3.0))
    assert option_digests(bigger) == digests


def test_every_other_option_shows_and_an_absent_store_has_the_same_names() -> None:
    digests = option_digests(HiCacheConfig(page_size=32))
    other = option_digests(HiCacheConfig(storage=STORAGE))
    assert list(digests) == list(other)
    different = {name for name in digests if digests[name] != other[name]}
    assert "page_size" in different
    assert "storage.model_name" in different
    assert "write_policy" not in different


def test_an_agreement_holds_the_options_of_a_whole_configuration() -> None:
    digests = option_digests(HiCacheConfig(storage=STORAGE))
    assert 2 * len(digests) + 8 <= LENGTH
