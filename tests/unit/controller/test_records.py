"""What became of a batch, in few words."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hicache.controller.records import encode_outcomes, leading_good
from hicache.types import PageOutcome

batches = st.lists(st.sampled_from(PageOutcome), max_size=20) | st.builds(
    lambda outcome, count: [outcome] * count, st.sampled_from(PageOutcome), st.integers(0, 20)
)


@given(batches)
def test_runs_say_what_became_of_every_page_and_neighbours_differ(
    outcomes: list[PageOutcome],
) -> None:
    runs = encode_outcomes(outcomes)
    assert [outcome for outcome, count in runs for _ in range(count)] == outcomes
    assert all(one is not other for (one, _), (other, _) in pairwise(runs))


@given(batches)
def test_good_pages_count_up_to_the_first_that_is_not(outcomes: list[PageOutcome]) -> None:
    bad = [index for index, outcome in enumerate(outcomes) if not outcome.good]
    assert leading_good(encode_outcomes(outcomes)) == (bad[0] if bad else len(outcomes))
