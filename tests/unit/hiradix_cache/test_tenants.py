"""Equal tokens under different names never meet, in no tier."""

from __future__ import annotations

import itertools

import pytest
from builders import PAGE, Rig, config_for, store_with, tokens
from scripted_parts import injected, memory_storage

from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages

TOKENS = tokens(1, 2, 3)
KEYS = {
    "nobody": RadixKey(TOKENS),
    "salt": RadixKey(TOKENS, cache_salt="a"),
    "other salt": RadixKey(TOKENS, cache_salt="b"),
    "adapter": RadixKey(TOKENS, extra_key="a"),
    "both": RadixKey(TOKENS, extra_key="a", cache_salt="a"),
    "empty salt": RadixKey(TOKENS, cache_salt=""),
}
pairs = pytest.mark.parametrize(("mine", "other"), list(itertools.permutations(KEYS, 2)))


@pairs
def test_no_name_hits_what_another_has_put_into_any_tier(mine: str, other: str) -> None:
    """C115, C117: device, host and storage, one after the other."""
    create = memory_storage(MemoryPages())
    with Rig(config_for(storage=injected()), create_storage=create) as rig:
        rig.insert(KEYS[mine])
        rig.settle()
        assert (rig.hit(KEYS[mine]), rig.hit(KEYS[other])) == ((3, 0), (0, 0))
        rig.evict_device()
        assert (rig.hit(KEYS[mine]), rig.hit(KEYS[other])) == ((0, 3), (0, 0))
        rig.drop_memory()
        assert rig.prefetch(KEYS[other]) == 0
        assert rig.prefetch(KEYS[mine]) == 3 * PAGE


def test_all_names_live_side_by_side_each_with_its_own_bytes() -> None:
    """C117."""
    store = store_with(*KEYS.values(), host_pages=18)
    assert len(store._pages) == 3 * len(KEYS)
    config = config_for(18, storage=injected())
    with Rig(config, device_pages=18, create_storage=memory_storage(store)) as rig:
        for key in KEYS.values():
            assert rig.prefetch(key) == 3 * PAGE
        for key in KEYS.values():
            rig.load(key)
        assert [rig.hit(key) for key in KEYS.values()] == [(3, 0)] * len(KEYS)


def test_a_prefetch_into_an_empty_tree_keeps_the_name_of_its_request() -> None:
    """C036."""
    key = KEYS["salt"]
    create = memory_storage(store_with(key))
    with Rig(config_for(storage=injected()), create_storage=create) as rig:
        assert rig.prefetch(key) == len(key)
        rig.insert(key)
        rig.settle()
        assert rig.hit(KEYS["nobody"]) == (0, 0)
        rig.drop_memory()
