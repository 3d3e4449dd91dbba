"""What `docs/writing-a-backend.md` shows is the plugin that the tests use, and it is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hicache.clock import ManualClock
from hicache.config import StorageConfig
from hicache.config.section import options_of
from hicache.hashing import StorageNamespace
from hicache.storage import HiCacheStorageConfig, StorageBackendFactory
from hicache.types import PageOutcome

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
DISTRIBUTION = ROOT / "tests" / "plugin_distribution"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("language", "name"),
    [("python", "hicache_dict.py"), ("py", "test_hicache_dict.py"), ("toml", "pyproject.toml")],
)
def test_the_backend_its_test_and_its_project_are_those_that_are_tested(
    language: str, name: str
) -> None:
    """They run from there: the suite directly, and by name in `contract/test_plugins.py`."""
    assert blocks(language) == [(DISTRIBUTION / name).read_text(encoding="utf-8")]


def test_the_backend_has_some_twenty_lines() -> None:
    (code,) = blocks("python")
    body = code.partition("class DictStorage")[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 25


@pytest.mark.parametrize("text", blocks("json"))
def test_configurations_open_the_backend_that_they_name(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DISTRIBUTION)
    storage = StorageConfig.from_mapping(json.loads(text))
    namespace = StorageNamespace(
        model=storage.model_name,
        weights_revision=storage.weights_revision,
        dtype="float16",
        layout="page_first",
        page_size=16,
        kv_shape="mha:layers=2,heads=2,head_dim=8",
    )
    config = HiCacheStorageConfig(
        namespace=namespace,
        page_bytes=100,
        extra_config=storage.extra_config,
        clock=ManualClock(),
    )
    factory = StorageBackendFactory.default()
    factory.register_backend("dict", "hicache_dict", "DictStorage")
    factory.create_backend(storage.backend, config).close()


def test_every_outcome_is_explained_and_every_option_exists() -> None:
    explained = re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE)
    assert explained == [outcome.name for outcome in PageOutcome]
    named = set(re.findall(r"`storage\.([a-z_]+)`", PAGE))
    assert named <= set(options_of(StorageConfig))
    assert {"retry_attempts", "breaker_failures", "breaker_cooldown_seconds"} <= named


def test_every_name_of_hicache_exists() -> None:
    for dotted in set(re.findall(r"`(hicache(?:\.\w+)+)`", PAGE)):
        module_path, _, name = dotted.rpartition(".")
        try:
            __import__(dotted)
        except ModuleNotFoundError:
            assert hasattr(__import__(module_path, fromlist=[name]), name), dotted
