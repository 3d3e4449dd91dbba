"""The storage contract as a test suite that every backend runs.

A backend's test subclasses `StorageContract`, and `DamageContract` as well where it can reach the
stored bytes behind the backend's back; `bounded_contract` is for one that may have little room:

    class TestMyStorage(StorageContract):
        def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
            return MyStorage(dataclasses.replace(config, extra_config={"url": self.url}))

For assertions that show values, put `pytest.register_assert_rewrite("hicache.testing")` into a
`conftest.py`.
"""

from __future__ import annotations

import dataclasses
import threading
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from hicache.errors import ClosedError, StorageError
from hicache.hashing import StorageNamespace
from hicache.testing.backend_rig import LATER, NAMESPACE, BackendRig, prompt_keys
from hicache.testing.page_buffer import PageBuffer
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.clock import ManualClock
    from hicache.storage.base import HiCacheStorage, HiCacheStorageConfig

__all__ = ["DamageContract", "StorageContract"]

_THREADS = 4

OK, PRESENT, MISS = PageOutcome.OK, PageOutcome.PRESENT, PageOutcome.MISS
SKIPPED, TIMEOUT = PageOutcome.SKIPPED, PageOutcome.TIMEOUT

_OTHER_NAMESPACES = {
    "model": dataclasses.replace(NAMESPACE, model="organisation/mode1"),
    "weights_revision": dataclasses.replace(NAMESPACE, weights_revision="2"),
    # As many bytes as float16: no look at a length tells them apart.
    "dtype": dataclasses.replace(NAMESPACE, dtype="bfloat16"),
    "layout": dataclasses.replace(NAMESPACE, layout="layer_first"),
    "page_size": dataclasses.replace(NAMESPACE, page_size=32),
    "kv_shape": dataclasses.replace(NAMESPACE, kv_shape="mla:layers=2,rank=32"),
    "shard": dataclasses.replace(NAMESPACE, shard="tp1of2"),
    "format_version": dataclasses.replace(NAMESPACE, format_version=2),
}

_each_namespace_field = pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(StorageNamespace)]
)


class StorageContract(BackendRig):
    """What every backend keeps to."""

    def test_what_was_set_is_what_get_returns(self, backend: HiCacheStorage) -> None:
        """Pages come back byte by byte, and nothing around their memory changes."""
        keys = prompt_keys(5)
        assert self._set(backend, keys) == [OK] * 5
        outcomes, payloads = self._get(backend, keys)
        assert outcomes == [OK] * 5
        assert payloads == [self._payload(key) for key in keys]

    def test_a_page_stored_already_is_present_and_stays_as_it_is(
        self, backend: HiCacheStorage
    ) -> None:
        """The second write of a key changes nothing."""
        keys = prompt_keys(1)
        self._set(backend, keys)
        other = PageBuffer.holding(bytes(self.page_bytes))
        assert backend.batch_set(keys, [b""], [other.page], deadline=LATER) == [PRESENT]
        assert self._get(backend, keys) == ([OK], [self._payload(keys[0])])

    def test_a_page_never_set_is_a_miss(self, backend: HiCacheStorage) -> None:
        """A fresh store has nothing."""
        assert backend.batch_exists(prompt_keys(2)) == 0
        assert self._get(backend, prompt_keys(2))[0] == [MISS, SKIPPED]

    @pytest.mark.parametrize("hole", range(4))
    def test_exists_and_get_end_at_the_first_hole(self, backend: HiCacheStorage, hole: int) -> None:
        """Only leading pages count."""
        keys = prompt_keys(4)
        for index in {0, 1, 2, 3} - {hole}:
            self._set(backend, [keys[index]])
        assert backend.batch_exists(keys) == hole
        outcomes, payloads = self._get(backend, keys)
        assert outcomes == [OK] * hole + [MISS] + [SKIPPED] * (3 - hole)
        assert payloads[:hole] == [self._payload(key) for key in keys[:hole]]

    def test_what_a_page_is_chained_from_changes_nothing_of_what_is_read(
        self, backend: HiCacheStorage
    ) -> None:
        """A read is told for the sake of copies elsewhere; a key alone names the bytes."""
        keys = prompt_keys(3)
        self._set(backend, keys)
        for parent_keys in ([b"", *keys[:2]], [b""] * 3, keys[::-1], [bytes(32)] * 3):
            found = self._get(backend, keys, parent_keys=parent_keys)
            assert found == ([OK] * 3, [self._payload(key) for key in keys])

    def test_an_empty_batch_is_answered_by_nothing(self, backend: HiCacheStorage) -> None:
        """No keys, no outcomes, no error."""
        assert backend.batch_exists([]) == 0
        assert backend.batch_get([], [], [], deadline=LATER) == []
        assert backend.batch_set([], [], [], deadline=LATER) == []

    def test_a_key_twice_in_a_batch_is_one_page(self, backend: HiCacheStorage) -> None:
        """Duplicates have an outcome each and are stored once."""
        key = prompt_keys(1)[0]
        assert self._set(backend, [key, key], parent_keys=[b"", b""]) == [OK, PRESENT]
        assert backend.batch_exists([key, key]) == 2
        assert self._get(backend, [key, key]) == ([OK, OK], [self._payload(key)] * 2)
        assert backend.clear() == 1

    def test_how_a_page_is_cut_into_pieces_does_not_matter(self, backend: HiCacheStorage) -> None:
        """Only the order of the bytes counts, also with more pieces than one system call takes."""
        half = self.page_bytes // 2
        odd = (1, 7, half, self.page_bytes - half - 8)
        single_bytes = (1,) * self.page_bytes
        for key, sizes in zip(prompt_keys(2), (odd, single_bytes), strict=True):
            source = PageBuffer.holding(self._payload(key), *sizes)
            assert backend.batch_set([key], [b""], [source.page], deadline=LATER) == [OK]
            for other_sizes in (odd, odd[::-1], (self.page_bytes,), single_bytes):
                target = PageBuffer(*other_sizes)
                assert backend.batch_get([key], [b""], [target.page], deadline=LATER) == [OK]
                assert target.read() == self._payload(key)

    def test_a_deadline_in_the_past_moves_nothing(
        self, backend: HiCacheStorage, clock: ManualClock
    ) -> None:
        """Nothing is published and nothing is delivered."""
        keys = prompt_keys(3)
        clock.advance(10.0)
        assert self._set(backend, keys, deadline=9.9) == [TIMEOUT] * 3
        assert backend.batch_exists(keys) == 0
        self._set(backend, keys)
        assert self._get(backend, keys, deadline=10.0)[0] == [TIMEOUT] * 3

    @_each_namespace_field
    def test_namespaces_never_meet(
        self, backend: HiCacheStorage, config: HiCacheStorageConfig, field: str
    ) -> None:
        """A key of another namespace is another page, whichever field differs."""
        keys = prompt_keys(2)
        self._set(backend, keys)
        other = self.make_backend(dataclasses.replace(config, namespace=_OTHER_NAMESPACES[field]))
        assert other.batch_exists(keys) == 0
        assert self._get(other, keys)[0] == [MISS, SKIPPED]
        assert self._set(other, keys) == [OK, OK]
        other.close()

    @_each_namespace_field
    def test_clear_removes_the_own_namespace_only(
        self, backend: HiCacheStorage, config: HiCacheStorageConfig, field: str
    ) -> None:
        """It says how many pages those were, and the store takes new ones afterwards."""
        keys = prompt_keys(3)
        other = self.make_backend(dataclasses.replace(config, namespace=_OTHER_NAMESPACES[field]))
        self._set(backend, keys)
        self._set(other, keys[:2])
        assert backend.clear() == 3
        assert backend.clear() == 0
        assert backend.batch_exists(keys) == 0
        assert other.batch_exists(keys) == 2
        assert self._set(backend, keys) == [OK] * 3
        other.close()

    def test_what_is_durable_is_found_after_a_restart(
        self, backend: HiCacheStorage, config: HiCacheStorageConfig
    ) -> None:
        """A durable store gives a later instance the pages of an earlier one."""
        keys = prompt_keys(4)
        self._set(backend, keys)
        backend.close()
        later = self.make_backend(config)
        if later.capabilities.durable:
            assert later.batch_exists(keys) == 4
            assert self._get(later, keys) == ([OK] * 4, [self._payload(key) for key in keys])
        later.close()

    def test_what_is_shared_is_seen_by_instances_open_at_once(
        self, backend: HiCacheStorage, config: HiCacheStorageConfig
    ) -> None:
        """A shared store shows an instance what another one has written."""
        keys = prompt_keys(2)
        other = self.make_backend(config)
        self._set(backend, keys)
        if other.capabilities.shared_between_processes:
            assert self._get(other, keys) == ([OK] * 2, [self._payload(key) for key in keys])
            assert self._set(other, keys) == [PRESENT] * 2
        other.close()

    def test_threads_that_write_one_key_leave_one_whole_page(self, backend: HiCacheStorage) -> None:
        """Whoever wins, no reader ever sees a mixture."""
        keys = prompt_keys(20)
        versions = {bytes([fill]) * self.page_bytes for fill in range(_THREADS)}
        barrier = threading.Barrier(_THREADS)

        def write_and_read(fill: int) -> None:
            for key in keys:
                source = PageBuffer.holding(bytes([fill]) * self.page_bytes)
                target = PageBuffer(self.page_bytes)
                barrier.wait(timeout=60)
                (written,) = backend.batch_set([key], [b""], [source.page], deadline=LATER)
                (read,) = backend.batch_get([key], [b""], [target.page], deadline=LATER)
                assert written in (OK, PRESENT)
                assert read is OK
                assert target.read() in versions

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(write_and_read, range(_THREADS)))

    def test_batches_whose_lengths_disagree_are_refused(self, backend: HiCacheStorage) -> None:
        """That is a bug of the caller, so it raises instead of moving anything."""
        keys = prompt_keys(2)
        buffer = PageBuffer(self.page_bytes)
        pages = [buffer.page] * 2
        calls: list[Callable[[], object]] = [
            lambda: backend.batch_get(keys, [b""], pages, deadline=LATER),
            lambda: backend.batch_get(keys, [b"", keys[0]], pages[:1], deadline=LATER),
            lambda: backend.batch_set(keys, [b""], pages, deadline=LATER),
            lambda: backend.batch_set(keys, [b"", keys[0]], pages[:1], deadline=LATER),
        ]
        for call in calls:
            with pytest.raises(StorageError):
                call()
        assert backend.batch_exists(keys) == 0

    def test_keys_and_pages_of_the_wrong_size_are_refused(self, backend: HiCacheStorage) -> None:
        """Keys are hashes and pages are whole."""
        keys = prompt_keys(1)
        buffer = PageBuffer(self.page_bytes)
        page = buffer.page
        short_key = PageHash(keys[0][:-1])
        calls: list[Callable[[], object]] = [
            lambda: backend.batch_exists([short_key]),
            lambda: backend.batch_get([short_key], [b""], [page], deadline=LATER),
            lambda: backend.batch_get(keys, [b"parent"], [page], deadline=LATER),
            lambda: backend.batch_set([short_key], [b""], [page], deadline=LATER),
            lambda: backend.batch_set(keys, [b"parent"], [page], deadline=LATER),
            lambda: backend.batch_get(keys, [b""], [()], deadline=LATER),
            lambda: backend.batch_get(keys, [b""], [page * 2], deadline=LATER),
            lambda: backend.batch_set(keys, [b""], [page * 2], deadline=LATER),
        ]
        for call in calls:
            with pytest.raises(StorageError):
                call()
        assert backend.batch_exists(keys) == 0

    def test_stats_count_every_page_once(self, backend: HiCacheStorage) -> None:
        """The outcomes in the counters are the outcomes that were answered."""
        keys = prompt_keys(3)
        self._set(backend, keys[:2])
        self._set(backend, keys[:2])
        self._get(backend, keys)
        stats = backend.stats()
        assert stats.set_outcomes == {OK: 2, PRESENT: 2}
        assert stats.get_outcomes == {OK: 2, MISS: 1}
        assert (stats.written_bytes, stats.read_bytes) == (2 * self.page_bytes,) * 2

    def test_memory_can_be_registered(self, backend: HiCacheStorage) -> None:
        """Also where a backend makes no use of it."""
        buffer = PageBuffer(self.page_bytes, self.page_bytes)
        backend.register_memory([(piece.address, piece.num_bytes) for piece in buffer.page])

    def test_close_can_be_repeated_and_ends_everything_but_stats(
        self, backend: HiCacheStorage
    ) -> None:
        """After it, calls raise `ClosedError`."""
        keys = prompt_keys(1)
        buffer = PageBuffer(self.page_bytes)
        self._set(backend, keys)
        backend.close()
        backend.close()
        calls: list[Callable[[], object]] = [
            lambda: backend.batch_exists(keys),
            lambda: backend.batch_get(keys, [b""], [buffer.page], deadline=LATER),
            lambda: backend.batch_set(keys, [b""], [buffer.page], deadline=LATER),
            lambda: backend.register_memory([]),
            backend.clear,
        ]
        for call in calls:
            with pytest.raises(ClosedError):
                call()
        assert backend.stats().set_outcomes == {OK: 1}


class DamageContract(StorageContract):
    """What a backend does about stored bytes that changed behind its back."""

    @abstractmethod
    def corrupt(self, key: PageHash) -> None:
        """Change one byte of the stored page's payload."""

    @abstractmethod
    def truncate(self, key: PageHash) -> None:
        """Cut the last byte off the stored page."""

    def test_a_changed_byte_ends_the_read_and_the_next_set_repairs(
        self, backend: HiCacheStorage
    ) -> None:
        """A corrupt page is a miss, is forgotten, and can be stored again."""
        keys = prompt_keys(3)
        self._set(backend, keys)
        self.corrupt(keys[1])
        assert self._get(backend, keys)[0] == [OK, PageOutcome.CORRUPT, SKIPPED]
        assert backend.batch_exists(keys) == 1
        assert self._set(backend, keys) == [PRESENT, OK, PRESENT]
        assert self._get(backend, keys) == ([OK] * 3, [self._payload(key) for key in keys])

    def test_a_page_cut_short_ends_the_read_and_the_next_set_repairs(
        self, backend: HiCacheStorage
    ) -> None:
        """A truncated page is not even believed to be there."""
        keys = prompt_keys(3)
        self._set(backend, keys)
        self.truncate(keys[1])
        assert backend.batch_exists(keys) == 1
        assert self._get(backend, keys)[0] == [OK, PageOutcome.TRUNCATED, SKIPPED]
        assert self._set(backend, keys) == [PRESENT, OK, PRESENT]
        assert self._get(backend, keys) == ([OK] * 3, [self._payload(key) for key in keys])

    def test_a_page_cut_short_is_repaired_by_a_set_that_comes_first(
        self, backend: HiCacheStorage
    ) -> None:
        """No read is needed to notice."""
        keys = prompt_keys(1)
        self._set(backend, keys)
        self.truncate(keys[0])
        assert self._set(backend, keys) == [OK]
        assert self._get(backend, keys) == ([OK], [self._payload(keys[0])])
