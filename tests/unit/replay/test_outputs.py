"""What answers put into a cache. A block has 4 tokens."""

from __future__ import annotations

from small_traces import BLOCK_TOKENS, make_request

from hicache.replay import CacheOptions, TimeModel, TraceRequest, replay
from hicache.replay.outputs import fill_outputs


def cached(requests: list[TraceRequest]) -> list[list[int] | None]:
    filled = fill_outputs(requests, BLOCK_TOKENS)
    return [None if one.cached_blocks is None else one.cached_blocks.tolist() for one in filled]


def test_an_answer_has_the_blocks_that_it_has_in_the_next_turn() -> None:
    # 9 tokens and an answer of 8: 4 full blocks. Block 2 holds one token, block 3 is it filled up.
    first = make_request([0, 1, 2], tokens=9, answer=8)
    second = make_request([0, 1, 3, 4, 5], tokens=20)
    assert cached([first, second]) == [[0, 1, 3, 4], None]


def test_an_answer_that_nobody_goes_on_with_takes_room_only() -> None:
    alone = make_request([0, 1, 2], tokens=9, answer=8)
    assert cached([alone, make_request([7])]) == [[0, 1, 2, -1, -2], None]


def test_no_two_answers_share_blocks() -> None:
    requests = [make_request([block], answer=4) for block in range(3)]
    own = [blocks[-1] for blocks in cached(requests) if blocks is not None]
    assert len(set(own)) == 3


def test_a_shared_beginning_is_no_next_turn() -> None:
    """The second prompt is the system's alone; the third has it too, but is no answer to it."""
    system = make_request([0], answer=4)
    asked = [make_request([0, 1]), system, make_request([0, 5, 6], tokens=12)]
    assert cached(asked)[1] == [0, -1]


def test_a_prompt_that_is_shorter_than_the_answer_is_no_next_turn() -> None:
    first = make_request([0, 1], answer=40)
    assert cached([first, make_request([0, 1, 2])])[0] == [0, 1, *range(-1, -11, -1)]


def test_answers_that_are_put_in_are_hit_by_the_next_turn() -> None:
    requests = fill_outputs(
        [make_request([0, 1], answer=4), make_request([0, 1, 2, 3])], BLOCK_TOKENS
    )
    hits = [
        replay(
            requests,
            [CacheOptions()],
            block_tokens=BLOCK_TOKENS,
            model=TimeModel(),
            insert_output=inserted,
        )[0].hit_blocks
        for inserted in (False, True)
    ]
    assert hits == [2, 3]


def test_without_requests_nothing_is_filled() -> None:
    assert fill_outputs([], BLOCK_TOKENS) == []
