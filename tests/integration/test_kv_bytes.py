"""The model's KV through every tier, for each kind, element type, layout and page size: exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from pairwise import pairwise
from serving import Variant, finish, make_engine

from hicache.engine.request import Request
from hicache.layout import HostLayout

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.engine.engine import Engine

# The cache finds all but the last token, and all page sizes divide what it finds.
CACHED_TOKENS = 192
PROMPT = [(11 * n + n // 7) % 250 for n in range(CACHED_TOKENS + 1)]
VARIANTS = [
    Variant(**row, chunk_tokens=CACHED_TOKENS)
    for row in pairwise(
        {
            "attention": ["mha", "mla"],
            "dtype": ["float32", "bfloat16", "float16"],
            "layout": [layout.value for layout in HostLayout],
            "page_size": [1, 16, 64],
        }
    )
]


def serve(engine: Engine, name: str) -> Request:
    request = Request(name, PROMPT, max_new_tokens=24)
    engine.run(request)
    return request


def cached_bytes(engine: Engine) -> torch.Tensor:
    """Return the KV of the prompt as bytes `[num_layers, num_parts, num_pages, page bytes]`."""
    assert engine.cache is not None
    found = engine.cache.match_prefix(Request("look", PROMPT, max_new_tokens=1).prompt_key)
    pages = torch.tensor(found.device_pages[: CACHED_TOKENS // engine.cache.config.page_size])
    assert found.device_hit_tokens >= CACHED_TOKENS
    layers = []
    for layer in range(engine._pool.geometry.num_layers):
        parts = engine._pool.layer_parts(layer)  # type: ignore[attr-defined]
        layers.append(torch.stack([part[pages].view(torch.uint8).flatten(1) for part in parts]))
    return torch.stack(layers)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_kv_comes_back_bit_by_bit_and_gives_the_answer_of_equal_batches(
    variant: Variant, tmp_path: Path
) -> None:
    """Every engine computes the last token and the answer alone, so rounding is the same too."""
    engine = make_engine(variant, tmp_path)
    computed = serve(engine, "computed")
    assert computed.computed_tokens == len(PROMPT)
    written = cached_bytes(engine)
    assert written.any()

    assert engine.settle()
    assert engine.cache is not None
    engine.cache.evict(10_000)
    from_host = serve(engine, "from host")
    assert from_host.host_hit_tokens == CACHED_TOKENS
    assert torch.equal(cached_bytes(engine), written)
    finish(engine)

    restarted = make_engine(variant, tmp_path)
    from_storage = serve(restarted, "from storage")
    assert from_storage.storage_hit_tokens == CACHED_TOKENS
    assert torch.equal(cached_bytes(restarted), written)
    finish(restarted)

    uncached = serve(make_engine(variant, None), "uncached")
    for request in (computed, from_host, from_storage):
        assert request.choices == uncached.choices


@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_float16_and_bfloat16_never_find_each_other_in_storage(
    attention: str, tmp_path: Path
) -> None:
    """The pages have the same keys and sizes; only their namespaces tell them apart."""
    first: dict[str, Request] = {}
    for dtype in ("float16", "bfloat16"):
        engine = make_engine(Variant(attention=attention, dtype=dtype), tmp_path)
        first[dtype] = serve(engine, "first")
        assert first[dtype].storage_hit_tokens == 0
        finish(engine)
    for dtype in ("float16", "bfloat16"):
        engine = make_engine(Variant(attention=attention, dtype=dtype), tmp_path)
        assert serve(engine, "again").storage_hit_tokens == CACHED_TOKENS
        finish(engine)
