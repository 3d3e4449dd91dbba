"""Prompts about documents, in bursts and in a stream."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hicache.engine.workloads import document_bursts, document_stream, documents
from hicache.errors import ConfigError

SIZES: dict[str, Any] = {"num_documents": 5, "max_tokens": 40, "vocab_size": 100, "seed": 1}
TEXTS = documents(**SIZES)
BURSTS: dict[str, Any] = {
    "num_bursts": 4, "burst_size": 8, "gap_seconds": 2.0, "vocab_size": 100, "seed": 1
}  # fmt: skip
STREAM: dict[str, Any] = {
    "num_prompts": 400, "mean_gap_seconds": 0.5, "new_share": 0.25, "new_tokens": 30,
    "vocab_size": 100, "seed": 1,
}  # fmt: skip


def document_of(prompt: tuple[int, ...]) -> int | None:
    """Return the number of the document that a prompt begins with; checks the rest."""
    for number, text in enumerate(TEXTS):
        if prompt[: len(text)] == text:
            assert 16 <= len(prompt) - len(text) <= 64
            return number
    return None


def test_documents_differ_and_are_as_long_as_was_said() -> None:
    assert len(set(TEXTS)) == 5
    assert all(20 <= len(text) <= 40 for text in TEXTS)
    assert all(0 <= token < 100 for text in TEXTS for token in text)


def test_a_burst_asks_four_times_about_each_document_and_one_comes_again() -> None:
    arrivals = document_bursts(TEXTS, **BURSTS)
    assert len({arrival.prompt for arrival in arrivals}) == 32
    assert [arrival.seconds for arrival in arrivals] == [0.0] * 8 + [2.0] * 8 + [4.0] * 8 + [
        6.0
    ] * 8
    asked = [document_of(arrival.prompt) for arrival in arrivals]
    bursts = [Counter(asked[first : first + 8]) for first in range(0, 32, 8)]
    assert bursts == [{0: 4, 1: 4}, {1: 4, 2: 4}, {2: 4, 3: 4}, {3: 4, 4: 4}]


def test_a_stream_has_popular_documents_new_prompts_and_the_gaps_that_were_said() -> None:
    arrivals = document_stream(TEXTS, **STREAM)
    times = [arrival.seconds for arrival in arrivals]
    assert times == sorted(times)
    assert 0.4 < times[-1] / len(times) < 0.6
    asked = Counter(document_of(arrival.prompt) for arrival in arrivals)
    assert 80 < asked.pop(None) < 120
    assert [number for number, _ in asked.most_common()][:2] == [0, 1]


def test_equal_arguments_give_equal_prompts_and_another_seed_gives_others() -> None:
    for make, options in ((document_bursts, BURSTS), (document_stream, STREAM)):
        assert make(TEXTS, **options) == make(TEXTS, **options)
        assert make(TEXTS, **options) != make(TEXTS, **{**options, "seed": 2})


@pytest.mark.parametrize("name", ["num_bursts", "burst_size", "vocab_size"])
def test_sizes_that_make_no_burst_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        document_bursts(TEXTS, **{**BURSTS, name: 0})


@pytest.mark.parametrize("name", ["num_prompts", "new_tokens", "vocab_size"])
def test_sizes_that_make_no_stream_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not -1"):
        document_stream(TEXTS, **{**STREAM, name: -1})


def test_no_documents_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_documents must be"):
        documents(**{**SIZES, "num_documents": 0})
    with pytest.raises(ConfigError, match="documents must be"):
        document_bursts((), **BURSTS)
