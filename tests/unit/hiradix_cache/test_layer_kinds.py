"""Which kinds of layers a prefix can be restored for, and that all others are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from builders import GEOMETRY, config_for

from hicache.device import create_device
from hicache.errors import ConfigError
from hicache.hiradix_cache import LayerKind, create_hiradix_cache, require_restorable
from hicache.pools import DeviceKVPool, PageAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

ATTENTION = ["full_attention", "sliding_attention", "chunked_attention"]
STATES = ["linear_attention", "mamba", "recurrent"]


def test_a_kind_is_either_restored_or_refused() -> None:
    assert sorted(kind.value for kind in LayerKind) == sorted([*ATTENTION, *STATES])


@pytest.mark.parametrize("kinds", [[], ATTENTION, [LayerKind.FULL_ATTENTION], ATTENTION[:1] * 30])
def test_layers_that_keep_the_kv_of_every_token_can_be_restored(
    kinds: Sequence[LayerKind | str],
) -> None:
    require_restorable(kinds)


@pytest.mark.parametrize("kind", STATES)
def test_layers_that_keep_a_state_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"of kind {kind} keep one state .* full_attention, "):
        require_restorable([*ATTENTION, kind])


def test_all_that_is_refused_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="of kind linear_attention, mamba, recurrent keep"):
        require_restorable(STATES * 2)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown kind of layer 'rwkv'; .*full_attention"):
        require_restorable(["full_attention", "rwkv"])


def test_a_cache_for_such_a_model_is_refused_before_anything_is_allocated() -> None:
    pool = DeviceKVPool(GEOMETRY, num_pages=2, torch_device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="of kind mamba keep"):
        create_hiradix_cache(
            config_for(),
            device=create_device("cpu"),
            device_pool=pool,
            device_allocator=PageAllocator(2),
            layer_kinds=["full_attention", "mamba"],
        )
