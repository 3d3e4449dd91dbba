"""Names and claims of the directories of namespaces."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.hashing import StorageNamespace
from hicache.storage.base import HiCacheStorageConfig
from hicache.storage.file import FileStorage
from hicache.storage.namespace_directory import directory_name

if TYPE_CHECKING:
    from pathlib import Path

NAMESPACE = StorageNamespace(
    model="org/model",
    weights_revision="1",
    dtype="float16",
    layout="page_first",
    page_size=16,
    kv_shape="mha:layers=2,heads=2,head_dim=8",
)


def named(model: str, shard: str = "tp0of1") -> StorageNamespace:
    return dataclasses.replace(NAMESPACE, model=model, shard=shard)


def open_storage(root: Path, namespace: StorageNamespace, page_bytes: int = 64) -> FileStorage:
    return FileStorage(
        HiCacheStorageConfig(
            namespace=namespace, page_bytes=page_bytes, extra_config={"path": str(root)}
        )
    )


namespaces = st.builds(
    StorageNamespace,
    model=st.text(min_size=1, max_size=300),
    weights_revision=st.text(max_size=8),
    dtype=st.sampled_from(["float16", "bfloat16", "fp8_e4m3"]),
    layout=st.sampled_from(["page_first", "layer_first"]),
    page_size=st.sampled_from([1, 16, 64]),
    kv_shape=st.text(min_size=1, max_size=8),
    shard=st.text(min_size=1, max_size=8),
    format_version=st.integers(1, 3),
)


@settings(deadline=None)
@given(first=namespaces, second=namespaces)
@example(first=named("org/a-SEP-b"), second=named("org/a/b"))
@example(first=named("a_1", "tp0of2"), second=named("a", "1_tp0of2"))
@example(first=named("m_0"), second=named("m", "0"))
@example(first=named("model_"), second=named("model"))
@example(first=named("Model"), second=named("model"))
@example(first=named("\u00e9"), second=named("e\u0301"))
def test_two_namespaces_have_the_same_name_only_if_they_are_equal(
    first: StorageNamespace, second: StorageNamespace
) -> None:
    """Case C040, also on file systems that ignore case."""
    names = {directory_name(first).casefold(), directory_name(second).casefold()}
    assert len(names) == len({first, second})


@settings(deadline=None)
@given(namespace=namespaces)
@example(namespace=named("../../etc"))
@example(namespace=named("..."))
@example(namespace=named("a" * 500))
def test_a_name_is_short_portable_and_not_hidden(namespace: StorageNamespace) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,72}", directory_name(namespace))


def test_the_models_name_can_be_read_in_the_directorys_name() -> None:
    assert directory_name(named("org/Model-7B.v2")).startswith("org_Model-7B.v2-")


def test_a_model_path_of_any_length_works(tmp_path: Path) -> None:
    """Case C096."""
    storage = open_storage(tmp_path, named("/models/" + "m" * 4000))
    assert storage.clear() == 0


def test_namespace_json_tells_a_person_what_the_directory_is_for(tmp_path: Path) -> None:
    open_storage(tmp_path, NAMESPACE, page_bytes=64)
    record = json.loads((tmp_path / directory_name(NAMESPACE) / "namespace.json").read_text())
    assert record["namespace"] == dataclasses.asdict(NAMESPACE)
    assert record["digest"] == NAMESPACE.digest.hex()
    assert (record["page_bytes"], record["page_file_format"]) == (64, 1)


def test_the_same_namespace_opens_again(tmp_path: Path) -> None:
    for _ in range(3):
        open_storage(tmp_path, NAMESPACE).close()


def test_another_page_length_under_the_same_namespace_is_refused(tmp_path: Path) -> None:
    open_storage(tmp_path, NAMESPACE, page_bytes=64)
    with pytest.raises(ConfigError, match=r"namespace\.json describes another"):
        open_storage(tmp_path, NAMESPACE, page_bytes=128)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04c__builtin__\neval\n", b"[" * 100_000])
def test_a_description_that_is_not_ours_is_refused(tmp_path: Path, content: bytes) -> None:
    """Case C120: nothing found in the directory is parsed or executed."""
    open_storage(tmp_path, NAMESPACE)
    (tmp_path / directory_name(NAMESPACE) / "namespace.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"namespace\.json describes another"):
        open_storage(tmp_path, NAMESPACE)


def test_a_fifo_in_place_of_the_description_does_not_hang(tmp_path: Path) -> None:
    open_storage(tmp_path, NAMESPACE)
    path = tmp_path / directory_name(NAMESPACE) / "namespace.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        open_storage(tmp_path, NAMESPACE)


@pytest.mark.parametrize("below", [".", "deeper/still"])
def test_a_path_that_is_a_file_or_lies_below_one_is_refused(tmp_path: Path, below: str) -> None:
    """Case C102: at construction, saying what to do."""
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="set option 'path' to a directory"):
        open_storage(file / below, NAMESPACE)


def test_a_directory_without_permission_to_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A test can run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="no permission to write"):
        open_storage(tmp_path, NAMESPACE)


def test_a_relative_path_means_the_directory_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = HiCacheStorageConfig(
        namespace=NAMESPACE, page_bytes=64, extra_config={"path": "store"}
    )
    storage = FileStorage(config)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert storage.clear() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "store"]
