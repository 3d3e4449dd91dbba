"""A call to a store moves about as many bytes, whatever the pages are."""

from __future__ import annotations

import pytest

from hicache.config import StorageConfig
from hicache.controller.call_size import pages_per_call, pages_per_query
from hicache.errors import ConfigError
from hicache.storage import StorageCapabilities

KIB, MIB = 1 << 10, 1 << 20


def config(**options: int) -> StorageConfig:
    return StorageConfig(backend="file", model_name="m", weights_revision="1", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("page_bytes", "num_pages"),
    [
        (1, 1024),
        (16 * KIB, 1024),
        (32 * KIB, 1024),
        (33 * KIB, 992),
        (128 * KIB, 256),
        (MIB, 32),
        (20 * MIB, 1),
        (32 * MIB, 1),
        (500 * MIB, 1),
    ],
)
def test_a_call_is_32_mib_but_a_page_at_least_and_not_too_many(
    page_bytes: int, num_pages: int
) -> None:
    assert pages_per_call(page_bytes) == pages_per_call(page_bytes, config()) == num_pages


def test_what_the_operator_says_counts() -> None:
    assert pages_per_call(500 * MIB, config(batch_pages=7)) == 7
    assert pages_per_call(KIB, config(batch_pages=5000)) == 5000
    assert pages_per_query(config(batch_pages=7)) == 7


def test_what_the_store_says_counts_where_the_operator_says_nothing() -> None:
    assert pages_per_call(MIB, call_bytes=64 * MIB) == 64
    assert pages_per_call(MIB, config(), call_bytes=64 * MIB) == 64
    assert pages_per_call(MIB, config(batch_pages=7), call_bytes=64 * MIB) == 7
    assert pages_per_call(MIB, call_bytes=1) == 1
    assert pages_per_call(KIB, call_bytes=1 << 40) == 1024


@pytest.mark.parametrize("call_bytes", [0, -1])
def test_a_store_that_wants_calls_of_nothing_is_refused(call_bytes: int) -> None:
    with pytest.raises(ConfigError, match="call_bytes of a backend must be at least 1"):
        StorageCapabilities(durable=True, shared_between_processes=True, call_bytes=call_bytes)


def test_a_question_is_about_as_many_pages_whatever_they_are() -> None:
    assert pages_per_query(config()) == 128
