"""A backend that hangs while it is opened, cleared or closed keeps nobody for long."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
from controller_fakes import until

from hicache.clock import MonotonicClock
from hicache.config import StorageConfig
from hicache.controller import StorageTier
from hicache.controller.lone_call import LoneCall
from hicache.controller.records import QueryJob
from hicache.errors import ConfigError, StorageTimeout
from hicache.layout import HostLayout, KVGeometry
from hicache.pools import create_host_pool
from hicache.storage import StorageBackendFactory
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.types import OperationId, PageHash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.storage import HiCacheStorage, HiCacheStorageConfig

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32", page_size=4)
MOMENT = 0.05
LONG = 30.0


class HangingFactory(StorageBackendFactory):
    """Its backends hang in the calls that are named, until let go, and note how they end."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = MemoryPages()
        self.hangs: set[str] = set()
        self.let_go = threading.Event()
        self.closed = threading.Event()
        self.close_error: Exception | None = None

    def reach(self, call: str) -> None:
        if call in self.hangs:
            assert self.let_go.wait(LONG)

    def create_backend(self, name: str, config: HiCacheStorageConfig) -> HiCacheStorage:
        self.reach("open")
        factory = self

        class Hanging(MemoryStorage):
            def clear(self) -> int:
                factory.reach("clear")
                return super().clear()

            def close(self) -> None:
                factory.reach("close")
                super().close()
                factory.closed.set()
                if factory.close_error is not None:
                    raise factory.close_error

        if name == "bad":
            raise ConfigError("there is no such thing")
        return Hanging(config, store=self.pages)


class Rig:
    def __init__(self) -> None:
        self.factory = HangingFactory()
        self.pool = create_host_pool(
            GEOMETRY, num_pages=4, layout=HostLayout.PAGE_FIRST, pinned=False, huge_pages=False
        )
        self.tier = StorageTier(
            host_pools=[self.pool], factory=self.factory, clock=MonotonicClock()
        )

    def attach(self, backend: str = "good") -> None:
        self.tier.attach(
            StorageConfig(
                backend=backend, model_name="m", weights_revision="1", open_timeout_seconds=MOMENT
            )
        )

    def query(self) -> str:
        """Return what went wrong with a query; nothing if nothing."""
        job = QueryJob(operation_id=OperationId(1), generation=0, hashes=(PageHash(b"a" * 32),))
        self.tier.submit(job)
        results: list[Any] = []

        def ended() -> bool:
            results.extend(self.tier.poll())
            return bool(results)

        until(ended)
        error: str = results[0].error
        return error


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.factory.let_go.set()
    assert rig.tier.close(LONG)
    rig.pool.close()


def test_a_store_that_does_not_open_is_as_if_nobody_had_asked_for_it(rig: Rig) -> None:
    rig.factory.hangs = {"open"}
    with pytest.raises(StorageTimeout, match=r"'good' has not opened within 0\.05 s.*open_timeout"):
        rig.attach()
    assert rig.tier.backend is None
    assert not rig.tier.close(MOMENT), "what it opens may still be given host memory"
    rig.factory.hangs = set()
    rig.attach()
    assert rig.query() == ""
    rig.factory.let_go.set()
    assert rig.factory.closed.wait(LONG), "what was opened too late is closed"
    assert rig.query() == ""


def test_what_goes_wrong_when_a_store_opens_is_raised_as_it_is(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="no such thing"):
        rig.attach("bad")
    assert rig.tier.backend is None


def test_while_a_clear_that_was_not_waited_for_goes_on_work_ends_with_nothing(rig: Rig) -> None:
    rig.attach()
    rig.factory.hangs = {"clear"}
    with pytest.raises(StorageTimeout, match="goes on; clear again"):
        rig.tier.clear()
    assert rig.query() == "the storage backend is being cleared"
    with pytest.raises(StorageTimeout):
        rig.tier.clear()
    assert not rig.tier.detach(MOMENT)
    rig.factory.let_go.set()
    assert rig.tier.detach(LONG)
    rig.attach()
    assert rig.query() == ""


def test_a_clear_is_waited_for_again_and_work_goes_on_behind_it(rig: Rig) -> None:
    rig.attach()
    rig.factory.hangs = {"clear"}
    with pytest.raises(StorageTimeout):
        rig.tier.clear()
    rig.factory.let_go.set()
    until(lambda: rig.query() == "")
    assert rig.tier.clear() == 0


def test_a_store_that_does_not_close_is_detaching_until_it_does(rig: Rig) -> None:
    rig.attach()
    rig.factory.hangs = {"close"}
    assert not rig.tier.detach(MOMENT)
    assert rig.query() == "no storage backend is attached"
    assert not rig.tier.close(MOMENT)
    rig.factory.let_go.set()
    assert rig.tier.detach(LONG)
    assert rig.tier.backend is None
    rig.attach()
    assert rig.query() == ""


def test_what_closing_raises_is_raised_and_the_store_is_detached(rig: Rig) -> None:
    rig.attach()
    rig.factory.close_error = OSError("no route to host")
    with pytest.raises(OSError, match="no route"):
        rig.tier.detach(LONG)
    assert rig.tier.backend is None
    assert rig.tier.detach(LONG)


def test_a_store_that_is_discarded_and_does_not_close_is_left_to_itself(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.controller.storage_tier._UNDO_SECONDS", MOMENT)
    rig.attach()
    rig.factory.hangs = {"close"}
    rig.tier.discard()
    assert rig.tier.backend is None
    assert not rig.tier.close(MOMENT)


@pytest.mark.parametrize("gives_up_first", [True, False])
def test_what_a_call_that_was_given_up_brings_is_undone_once(gives_up_first: bool) -> None:
    gate = threading.Event()
    undone: list[bool] = []
    call = LoneCall(lambda: gate.wait(LONG), "test")
    if not gives_up_first:
        gate.set()
        assert call.returned(LONG)
    call.give_up(undone.append)
    gate.set()
    assert call.returned(LONG)
    assert undone == [True]


def test_what_goes_wrong_in_a_call_that_was_given_up_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()

    def fail() -> None:
        gate.wait(LONG)
        raise OSError("the disk is gone")

    def refuse(_answer: bool) -> None:
        raise OSError("cannot be closed")

    with caplog.at_level(logging.WARNING):
        failing, refusing = LoneCall(fail, "test"), LoneCall(lambda: gate.wait(LONG), "test")
        failing.give_up()
        refusing.give_up(refuse)
        gate.set()
        assert failing.returned(LONG)
        assert refusing.returned(LONG)
    assert "the disk is gone" in caplog.text
    assert "cannot be closed" in caplog.text
