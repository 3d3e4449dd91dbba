"""What was hashed to be looked up in storage is not hashed again, and never hashed wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from hicache.hashing import hash_pages
from hicache.radix import known_hashes
from hicache.radix.known_hashes import KnownHashes

if TYPE_CHECKING:
    import pytest

    from hicache.types import PageHash

PAGE_SIZE = 2
PAGE_BYTES = 8
# Few different pages, so that runs share beginnings.
PAGES = st.lists(st.sampled_from([b"a" * PAGE_BYTES, b"b" * PAGE_BYTES]), max_size=6)
PRIORS = st.sampled_from([b"", b"p" * 32, b"q" * 32])


class Counting:
    """Counts the pages that are hashed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_pages = 0
        patch.setattr(known_hashes, "hash_pages", self)

    def __call__(self, tokens: bytes, page_size: int, prior: bytes = b"") -> list[PageHash]:
        hashes = hash_pages(tokens, page_size, prior)
        self.num_pages += len(hashes)
        return hashes


def noted(known: KnownHashes, tokens: bytes, prior: bytes = b"") -> list[PageHash]:
    hashes = hash_pages(tokens, PAGE_SIZE, prior)
    known.note(prior, tokens, hashes)
    return hashes


@given(st.lists(st.tuples(st.booleans(), PRIORS, PAGES, st.binary(max_size=PAGE_BYTES - 1))))
def test_hashes_are_those_of_the_tokens_whatever_is_remembered(
    calls: list[tuple[bool, bytes, list[bytes], bytes]],
) -> None:
    known = KnownHashes(PAGE_SIZE)
    for is_noted, prior, pages, tail in calls:
        run = b"".join(pages)
        if is_noted:
            noted(known, run + tail, prior)
        else:
            assert known.hash_run(prior, run) == hash_pages(run, PAGE_SIZE, prior)


def test_a_prompt_that_comes_in_several_runs_is_not_hashed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting, known = Counting(monkeypatch), KnownHashes(PAGE_SIZE)
    tokens = bytes(range(5 * PAGE_BYTES + 3))
    hashes = noted(known, tokens)
    first = known.hash_run(b"", tokens[: 2 * PAGE_BYTES])
    second = known.hash_run(first[-1], tokens[2 * PAGE_BYTES : 3 * PAGE_BYTES])
    # The last run goes on beyond the prompt.
    third = known.hash_run(second[-1], tokens[3 * PAGE_BYTES : 5 * PAGE_BYTES] + b"z" * PAGE_BYTES)
    assert first + second + third[:2] == hashes
    assert counting.num_pages == 1


def test_at_most_64_prompts_are_remembered_the_newest_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting, known = Counting(monkeypatch), KnownHashes(PAGE_SIZE)
    prompts = [bytes([number] * PAGE_BYTES) for number in range(66)]
    for prompt in prompts:
        noted(known, prompt)
    for prompt in prompts:
        known.hash_run(b"", prompt)
    assert counting.num_pages == 2
