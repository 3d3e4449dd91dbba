"""Acceptance case C120: a pickle in any place that takes data from outside is only bytes."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from typing import TYPE_CHECKING

import lmdb
import pytest
from http_rig import STORAGE, HttpRig
from page_store_tools import (
    CORRUPT,
    LATER,
    MISS,
    OK,
    PAGE_BYTES,
    SKIPPED,
    chain,
    open_store,
    read,
    write,
)

from hicache.config import load_config
from hicache.errors import ConfigError
from hicache.storage.page_store import list_pages
from hicache.testing.page_buffer import PageBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEYS = chain(1, 3)


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that leaves a trace where it is loaded; none may be there at the end."""
    trace = tmp_path / "it ran"
    data = pickle.dumps(Trap(trace))
    pickle.loads(data)
    trace.rmdir()
    yield data
    assert not trace.exists()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The directory of a closed store that holds `KEYS`."""
    path = tmp_path / "store"
    storage = open_store(path)
    assert write(storage, KEYS) == [OK] * 3
    storage.close()
    return path


def overwrite(path: Path | str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_pickle_in_the_place_of_a_page_is_damage(stored: Path, trap: bytes) -> None:
    """C120."""
    page = list(list_pages(str(stored)))[1]
    overwrite(page.file, page.offset, trap)
    storage = open_store(stored)
    assert read(storage, KEYS) == [OK, CORRUPT, SKIPPED]
    storage.close()


def test_a_pickle_that_is_stored_as_a_page_comes_back_as_its_bytes(
    tmp_path: Path, trap: bytes
) -> None:
    """C120."""
    payload = trap.ljust(PAGE_BYTES, b"\0")
    source, target = PageBuffer.holding(payload), PageBuffer(PAGE_BYTES)
    storage = open_store(tmp_path / "store")
    for call, buffer in ((storage.batch_set, source), (storage.batch_get, target)):
        assert call(KEYS[:1], [b""], [buffer.page], deadline=LATER) == [OK]
    assert target.read() == payload
    storage.close()


def test_a_pickle_in_the_place_of_a_header_is_no_header(stored: Path, trap: bytes) -> None:
    """C120: where the index is made anew from the headers."""
    (headers,) = (stored / "data").glob("*.headers")
    for offset in range(0, headers.stat().st_size, 4096):
        overwrite(headers, offset, trap)
    shutil.rmtree(stored / "index")
    storage = open_store(stored)
    assert read(storage, KEYS) == [MISS, SKIPPED, SKIPPED]
    assert write(storage, KEYS) == [OK] * 3
    storage.close()


def test_a_pickle_in_the_place_of_what_the_index_knows_is_a_miss(stored: Path, trap: bytes) -> None:
    """C120."""
    with lmdb.open(str(stored / "index"), max_dbs=16) as env:
        groups = env.open_db(b"groups")
        with env.begin(write=True, db=groups) as txn:
            keys = [bytes(key) for key, _ in txn.cursor()]
            assert len(keys) == 1
            for key in keys:
                txn.put(key, trap)
    storage = open_store(stored)
    assert OK not in read(storage, KEYS)
    assert all(outcome.good for outcome in write(storage, KEYS))
    assert read(storage, KEYS) == [OK] * 3
    storage.close()


def test_a_pickle_in_the_place_of_the_format_is_refused(stored: Path, trap: bytes) -> None:
    """C120."""
    (stored / "FORMAT").write_bytes(trap)
    with pytest.raises(ConfigError):
        open_store(stored)


@pytest.mark.parametrize("kind", ["json", "toml", "yaml"])
@pytest.mark.parametrize("place", ["configuration", "options of the store", "environment"])
def test_a_pickle_in_the_place_of_a_configuration_is_refused(
    tmp_path: Path, trap: bytes, kind: str, place: str
) -> None:
    """C120."""
    path = tmp_path / f"options.{kind}"
    path.write_bytes(trap)
    source, environ = f"@{path}", {}
    if place != "configuration":
        store = {"backend": "memory", "model_name": "model", "weights_revision": "1"}
        options = {"extra_config": source} if place == "options of the store" else {}
        source = json.dumps({"storage": store | options})
        environ = {} if options else {"HICACHE_STORAGE_EXTRA_CONFIG": f"@{path}"}
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load_config(source, environ=environ)


def test_a_tag_of_yaml_that_makes_objects_is_refused(tmp_path: Path) -> None:
    """C120."""
    trace, path = tmp_path / "it ran", tmp_path / "options.yaml"
    path.write_text(f"page_size: !!python/object/apply:os.mkdir ['{trace}']\n")
    with pytest.raises(ConfigError, match="no YAML"):
        load_config(f"@{path}")
    assert not trace.exists()


def test_a_pickle_in_the_place_of_a_request_is_refused(trap: bytes) -> None:
    """C120: as a body, and as an option in one."""
    backend = {"hicache_storage_backend": "memory"}
    extra = {"hicache_storage_backend_extra_config_json": trap.decode("latin-1")}
    types = ("application/json", "application/octet-stream", "application/x-pickle")
    with HttpRig() as rig:
        for kind in types:
            answer = rig.call("PUT", STORAGE, trap, {"Content-Type": kind})
            assert 400 <= answer.status < 500, answer
        assert 400 <= rig.call("PUT", STORAGE, backend | extra).status < 500
        assert rig.call("GET", STORAGE).json["state"] == "detached"
