"""Keys take what fits into int32, whatever it comes in, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.radix import RadixKey

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32))
def test_lists_and_arrays_give_the_same_bytes(tokens: list[int]) -> None:
    expected = np.array(tokens, dtype=np.int32).tobytes()
    assert RadixKey(tokens).data == expected
    assert RadixKey(tuple(tokens)).data == expected
    assert RadixKey(np.array(tokens, dtype=np.int64)).data == expected
    assert RadixKey(tokens).tokens().tolist() == tokens


@given(st.lists(INT32), st.lists(INT32), st.integers(0, 9))
def test_extension_and_prefix_are_those_of_lists(a: list[int], b: list[int], n: int) -> None:
    key = RadixKey(a, cache_salt="s").extend(b)
    assert key.data == RadixKey(a + b).data
    assert key.prefix(n).data == RadixKey((a + b)[:n]).data
    assert key.prefix(n).namespace == key.namespace == RadixKey([], cache_salt="s").namespace


@pytest.mark.parametrize(
    "tokens",
    [[2**31], [1, 2**32], [-(2**31) - 1], [-1, 2**31], ["a"], [1.5], np.array([2**31])],
)
def test_what_is_no_int32_is_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="int32"):
        RadixKey(tokens)
