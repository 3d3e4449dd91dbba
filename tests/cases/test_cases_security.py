"""Acceptance cases: tenants and names that stay apart, and outside data that is only data."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
from builders import PAGE, Rig, config_for, store_with, tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted_parts import injected, memory_storage

import hicache
from hicache.hashing import hash_pages, namespace_seed
from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages

TOKENS = [*tokens(1, 2, 3), 99]
"""Three pages and one more token."""
NAMES: dict[str, dict[str, str]] = {
    "nothing": {},
    "salt": {"cache_salt": "a"},
    "adapter": {"extra_key": "lora:x"},
    "media": {"extra_key": "image:5f"},
    "embeddings": {"extra_key": "embeds:5f"},
    "adapter and media": {"extra_key": "lora:x image:5f"},
}


@pytest.mark.parametrize(("mine", "other"), list(itertools.permutations(NAMES, 2)))
def test_prompts_that_differ_in_a_name_alone_share_nothing(mine: str, other: str) -> None:
    """C116: of kP+1 tokens k pages are stored, and k are found again."""
    key, stranger = RadixKey(TOKENS, **NAMES[mine]), RadixKey(TOKENS, **NAMES[other])
    create = memory_storage(MemoryPages())
    with Rig(config_for(storage=injected()), create_storage=create) as rig:
        rig.insert(key)
        rig.settle()
        assert rig.hit(stranger) == (0, 0)
        assert rig.hit(key) == rig.hit(key.prefix(len(key) - 1)) == (3, 0)
        rig.drop_memory()
        assert rig.prefetch(stranger) == 0
        assert rig.prefetch(key) == 3 * PAGE
        assert rig.hit(key) == (0, 3)
        assert rig.prefetch(key) == 0


names = st.one_of(st.none(), st.text(max_size=6))


@settings(deadline=None)
@given(first=st.tuples(names, names), second=st.tuples(names, names))
@example(first=(None, "L1"), second=("L1", None))
@example(first=("a", "bc"), second=("ab", "c"))
@example(first=(None, None), second=("", None))
@example(first=("", None), second=(None, ""))
@example(first=("\x00", None), second=("", "\x00"))
def test_two_names_are_the_same_only_if_both_parts_are(
    first: tuple[str | None, str | None], second: tuple[str | None, str | None]
) -> None:
    """C118."""
    assert (namespace_seed(*first) == namespace_seed(*second)) == (first == second)
    data = RadixKey(TOKENS).data
    pages = [set(hash_pages(data, PAGE, namespace_seed(*one))) for one in (first, second)]
    assert pages[0].isdisjoint(pages[1]) == (first != second)


@pytest.mark.parametrize("same_store", [False, True])
def test_a_tenant_sees_nothing_of_another(same_store: bool) -> None:
    """C122: hits, calls, counters and pages of B are alike with and without A's content."""
    seen = []
    for with_other in (False, True):
        store = store_with(*([RadixKey(TOKENS, cache_salt="a")] if same_store else []))
        create = memory_storage(store if with_other else MemoryPages())
        config = config_for(storage=injected())
        with Rig(config, create_storage=create) as rig:
            if with_other and not same_store:
                rig.insert(RadixKey(TOKENS, cache_salt="a"))
                rig.settle()
            seen.append(what_b_sees(rig))
    assert seen[0] == seen[1]


def what_b_sees(rig: Rig) -> list[object]:
    key = RadixKey(TOKENS, cache_salt="b")
    stats = rig.cache.controller.stats
    before = {kind: one.num_operations for kind, one in stats.items()}
    counters = dict(rig.cache.counters)
    seen: list[object] = [rig.prefetch(key), rig.hit(key)]
    rig.insert(key)
    rig.settle()
    seen += [rig.hit(key), rig.prefetch(key), rig.load(key).status]
    seen += [{kind: one.num_operations - before[kind] for kind, one in stats.items()}]
    seen += [{k: v - counters.get(k, 0) for k, v in rig.cache.counters.items() if v}]
    return seen


UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "torch.load", "np.load", "numpy.load"}


@pytest.mark.parametrize(
    "path",
    sorted(Path(hicache.__file__).parent.rglob("*.py")),
    ids=lambda path: "/".join(path.parts[-2:]),
)
def test_the_package_has_no_loader_that_runs_what_it_reads(path: Path) -> None:
    """C120."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom):
            assert node.module not in UNSAFE_MODULES
        elif isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in UNSAFE_CALLS, f"line {node.lineno}"
