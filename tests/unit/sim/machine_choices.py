"""What Hypothesis chooses from when it makes up the lives of a cache."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import strategies as st
from sim_builders import key_of

from hicache.testing.faulty_storage import Fault
from hicache.types import PrefetchPolicy, WritePolicy

T = TypeVar("T")

MANY_PAGES = 99

keys = st.builds(
    lambda pages, salt: key_of(*pages, cache_salt=salt),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
    st.sampled_from([None, None, None, None, "tenant"]),
)
few_keys = st.lists(keys, max_size=4)
choices = st.integers(0, 5)
counts = st.sampled_from([MANY_PAGES, 1, 2])
rarely = st.sampled_from([False, False, False, True])
mostly = st.sampled_from([True, True, True, False])
few_layers = st.sampled_from([set(), set(), {0}, {1}])
stages = st.integers(0, 4)
faults = st.sampled_from([*[None] * 6, *(one for one in Fault if one is not Fault.DELAY)])
options = st.fixed_dictionaries(
    {
        "write_policy": st.sampled_from(WritePolicy),
        "write_watermark": st.sampled_from([0.0, 0.5]),
        "prefetch_policy": st.sampled_from(PrefetchPolicy),
        "num_device_pages": st.integers(4, 8),
        "num_host_pages": st.integers(3, 8),
        "num_load_slots": st.integers(1, 3),
        "max_inflight_persist_operations": st.sampled_from([64, 1]),
        "max_inflight_prefetch_pages": st.sampled_from([None, 2]),
        "max_abandoned": st.sampled_from([8, 0]),
    }
)


def picked(of: list[T], choice: int) -> T:
    return of[choice % len(of)]
