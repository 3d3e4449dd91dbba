"""Acceptance cases: KV is only ever that of its own tokens."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from builders import PAGE, Rig, config_for, store_with, tokens
from scripted_parts import injected, memory_storage
from serving import Variant, answers_without_cache, finish, make_engine, make_pool
from storage_damage import num_stored_pages

from hicache.config import HiCacheConfig
from hicache.device import create_device
from hicache.engine.request import Request
from hicache.engine.request_pages import RequestPages
from hicache.hashing import hash_pages
from hicache.hiradix_cache import HiRadixCache, create_hiradix_cache
from hicache.layout import KVGeometry, MlaGeometry
from hicache.pools import PageAllocator
from hicache.radix import RadixKey
from hicache.testing.stamped_kv import write_stamps

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.layout import PageGeometry

KEY = RadixKey(range(64))
BASE = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float16", page_size=4)
OTHERS: dict[str, tuple[PageGeometry, str]] = {
    "element type of the same size": (dataclasses.replace(BASE, dtype="bfloat16"), "layer_first"),
    "order of bytes": (BASE, "page_first"),
    "page size": (dataclasses.replace(BASE, page_size=8), "layer_first"),
    "layers": (dataclasses.replace(BASE, num_layers=4), "layer_first"),
    "heads": (dataclasses.replace(BASE, num_kv_heads=4, head_dim=4), "layer_first"),
    "latent attention": (
        MlaGeometry(
            num_layers=2, kv_lora_rank=24, qk_rope_head_dim=8, dtype="float16", page_size=4
        ),
        "layer_first",
    ),
}


def open_cache(path: Path, geometry: PageGeometry, layout: str) -> HiRadixCache:
    config = HiCacheConfig.from_mapping(
        {
            "page_size": geometry.page_size,
            "host": {"layout": layout, "ratio": 2.0, "huge_pages": False},
            "storage": {
                "backend": "file",
                "extra_config": {"path": str(path)},
                "model_name": "model",
                "weights_revision": "1",
            },
            "prefetch": {"threshold_tokens": 0},
        }
    )
    cache, _ = create_hiradix_cache(
        config,
        device=create_device("cpu"),
        device_pool=make_pool(geometry, 16),
        device_allocator=PageAllocator(16),
    )
    return cache


def settle(cache: HiRadixCache) -> None:
    while cache.num_in_flight:
        cache.check_hicache_events()


def num_found(cache: HiRadixCache) -> int:
    """Prefetch and return the tokens that came."""
    cache.prefetch_from_storage("p", KEY)
    settle(cache)
    return cache.pop_prefetch_loaded_tokens("p")


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_else_the_bytes_depend_on_is_part_of_their_name(tmp_path: Path, what: str) -> None:
    """C037."""
    cache = open_cache(tmp_path, BASE, "layer_first")
    pages = cache.controller.device_allocator.alloc(16)
    assert pages is not None
    cache.insert(KEY, pages, request_id="r", chunked=False)
    settle(cache)
    assert cache.close()
    other = open_cache(tmp_path, *OTHERS[what])
    assert num_found(other) == 0
    assert other.close()
    same = open_cache(tmp_path, BASE, "layer_first")
    assert num_found(same) == len(KEY)
    assert same.close()


def test_two_images_never_share_a_page_however_alike_their_hashes_are() -> None:
    """C047: alike in the last 4 digits, then 10,000 at random; from the first page on."""
    seed = 47
    rng = random.Random(seed)
    data = KEY.data

    def hashes_with(image: str) -> list[bytes]:
        return list(hash_pages(data, PAGE, RadixKey([], extra_key=image).namespace))

    alike = [f"{rng.getrandbits(240):060x}beef" for _ in range(2)]
    first, second = map(hashes_with, alike)
    assert not set(first) & set(second)
    images = {f"{rng.getrandbits(256):064x}" for _ in range(10_000)}
    page = data[: 4 * PAGE]
    firsts = {hash_pages(page, PAGE, RadixKey([], extra_key=one).namespace)[0] for one in images}
    assert len(firsts) == len(images), f"{seed=}"


def test_a_request_that_is_retracted_leaves_the_pages_that_another_shares() -> None:
    """C049."""
    prompt = RadixKey(tokens(1, 2, 3, 4))
    with Rig() as rig:
        rig._empty_keys[prompt.namespace] = prompt.prefix(0)
        pages = RequestPages(rig.device_pages, rig.cache, PAGE)
        request = Request("first", prompt.tokens().tolist(), max_new_tokens=1)
        assert pages.grow(request)
        write_stamps(rig.pool, prompt, request.pages)
        request.num_computed = 2 * PAGE
        pages.insert(request, chunked=True)
        shared = rig.match(prompt).last_device_node
        rig.cache.inc_lock_ref(shared)
        pages.insert(request, chunked=True)
        pages.release(request)
        rig.settle()
        rig.cache.evict(8)
        rig.settle()
        assert rig.hit(prompt) == (2, 0)
        assert rig.device_pages.num_available == 6
        rig.cache.dec_lock_ref(shared)
        rig.cache.evict(8)
        assert rig.device_pages.num_available == 8
        assert rig.cache.protected_size == 0


@pytest.mark.parametrize("num_tail_tokens", [0, 1, 15])
def test_only_full_pages_are_stored_and_answers_are_those_of_a_cold_run(
    tmp_path: Path, num_tail_tokens: int
) -> None:
    """C052, C129: chunks of 40 tokens end inside pages of 16; one token is left to compute."""
    variant = Variant(chunk_tokens=40)
    rng = random.Random(52)
    prompt = [rng.randrange(256) for _ in range(128 + num_tail_tokens)]
    num_findable = (len(prompt) - 1) // 16 * 16
    first = make_engine(variant, tmp_path)
    first.run(Request("first", prompt, max_new_tokens=1))
    again = Request("again", prompt, max_new_tokens=1)
    first.run(again)
    assert again.device_hit_tokens == num_findable
    assert again.computed_tokens >= 1
    finish(first)
    assert num_stored_pages(tmp_path) == len(prompt) // 16

    second, plain = make_engine(variant, tmp_path), make_engine(variant, None)
    request = Request("second", prompt, max_new_tokens=32)
    second.run(request)
    assert request.storage_hit_tokens == num_findable
    assert [request.output_ids] == answers_without_cache([request], plain)
    finish(second)


def views_of(token_ids: list[int]) -> dict[str, RadixKey]:
    array: Any = torch.tensor(token_ids).numpy()
    return {
        "list": RadixKey(token_ids),
        "array": RadixKey(array),
        "narrow array": RadixKey(array.astype("uint16")),
        "range": RadixKey(range(token_ids[0], token_ids[-1] + 1)),
        "extended": RadixKey(token_ids[:5]).extend(token_ids[5:]),
        "prefix": RadixKey([*token_ids, 1, 2, 3]).prefix(len(token_ids)),
    }


@pytest.mark.parametrize("written_as", views_of(tokens(1, 2, 3)))
def test_every_way_to_make_a_key_names_the_same_pages(written_as: str) -> None:
    """C133."""
    views = views_of(tokens(1, 2, 3))
    store = store_with(views[written_as])
    for read_as in views.values():
        with Rig(config_for(storage=injected()), create_storage=memory_storage(store)) as rig:
            assert rig.prefetch(read_as) == 3 * PAGE
            assert rig.hit(read_as) == (0, 3)
