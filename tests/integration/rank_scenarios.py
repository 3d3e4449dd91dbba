"""What each of several ranks does with its cache; runs in the processes of `rank_processes`."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from builders import GUARD_SECONDS, Rig, config_for, store_with, tokens
from scripted_parts import Barrier, faulty_storage, injected
from system_driver import DEVICE_PAGES, HOST_PAGES, SystemDriver

from hicache.controller import AttachmentState
from hicache.errors import HiCacheError, RanksDivergedError, StorageTimeout
from hicache.hiradix_cache import LoadStatus
from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages
from hicache.testing.faulty_storage import Fault, Verb
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from hicache.ranks import TorchRankGroup
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig

KEY, OTHER = RadixKey(tokens(1, 2, 3, 4)), RadixKey(tokens(1, 2, 7, 8))
OVERDUE_SECONDS = 1000.0


class Trail(NamedTuple):
    """What one rank has gone through.

    Attributes:
        digests: of its whole tree and the sizes of its free lists, after each step.
        answer: of the scenario.
        num_agreements: of its cache.
        longest_seconds: that a call took.
    """

    digests: list[str]
    answer: object
    num_agreements: int
    longest_seconds: float = 0.0


def digest_of(rig: Rig) -> str:
    """Return a digest of everything that must be equal on all ranks; walks over the tree."""
    nodes = sorted(
        (
            (node.start, node.namespace, node.key, node.device_pages is None),
            (node.host_pages is None, node.lock_ref, node.host_lock_ref, node.hit_count),
            node.persisted,
        )
        for node in rig.cache.tree.nodes()
    )
    free = rig.device_pages.num_available, rig.host_pages.num_available
    return hashlib.sha256(repr((nodes, free, rig.cache.num_in_flight)).encode()).hexdigest()[:16]


class RankDriver(SystemDriver):
    """The same random calls on every rank, and on each its own faults.

    Copies and storage calls fail, stand still or come late, the store loses its pages, time passes:
    each on one rank and not on the others.
    """

    def __init__(
        self, ranks: TorchRankGroup, seed: int, *, device_pages: int, host_pages: int
    ) -> None:
        super().__init__(
            seed,
            ranks=ranks,
            faults_seed=10 * seed + ranks.rank + 1,
            device_pages=device_pages,
            host_pages=host_pages,
        )
        self.namespace = b""
        self.digests: list[str] = []
        self.longest_seconds = 0.0

    def create_storage(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        self.namespace = config.namespace.digest
        return super().create_storage(config)

    def step(self) -> None:
        began = time.monotonic()
        super().step()
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
        self.digests.append(digest_of(self.rig))

    def hang(self) -> None:
        if self.faults_rng.random() < 0.5:
            super().hang()
        if self.faults_rng.random() < 0.3:
            self.store.clear(self.namespace)

    def attach_again(self) -> None:
        if not self.cache.ranks_lost:
            super().attach_again()

    def trail(self, answer: object) -> Trail:
        meeting = self.cache.controller.meeting
        return Trail(self.digests, answer, meeting.num_agreements, self.longest_seconds)


def random_calls(
    ranks: TorchRankGroup,
    seed: int,
    steps: int,
    device_pages: int = DEVICE_PAGES,
    host_pages: int = HOST_PAGES,
    pause_seconds: float = 0.0,
) -> Trail:
    """Random calls and faults; in the middle of them this rank may pause."""
    driver = RankDriver(ranks, seed, device_pages=device_pages, host_pages=host_pages)
    with driver.rig:
        for number in range(steps):
            if number == steps // 2:
                time.sleep(pause_seconds)
            driver.step()
        driver.drain()
    return driver.trail(sorted(driver.seen))


def lose_a_rank(
    ranks: TorchRankGroup, seed: int, steps: int, victim: int, pause_seconds: float = 0.0
) -> Trail:
    """Random calls; then one rank is killed, or pauses for too long, and the others go on.

    The digests are those from the loss on.
    """
    driver = RankDriver(ranks, seed, device_pages=DEVICE_PAGES, host_pages=HOST_PAGES)
    with driver.rig:
        for _ in range(steps):
            driver.step()
        driver.digests.clear()
        if ranks.rank == victim:
            if not pause_seconds:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(pause_seconds)
        driver.rig.step()
        assert driver.cache.ranks_lost
        for _ in range(steps):
            driver.step()
        began = time.monotonic()
        for gate in driver.rig.gates:
            gate.open()
        assert driver.cache.close(GUARD_SECONDS)
        driver.longest_seconds = max(driver.longest_seconds, time.monotonic() - began)
    return driver.trail(dict(driver.cache.counters))


class Scripted:
    """A rank whose steps are noted; `create` may break its store."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.digests: list[str] = []

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.rig.step()
            self.digests.append(digest_of(self.rig))
            time.sleep(0.0005)

    def trail(self, answer: object) -> Trail:
        return Trail(self.digests, answer, self.rig.cache.controller.meeting.num_agreements)


def hit(ranks: TorchRankGroup, missing_pages: int = 0, *, raises: bool = False) -> Trail:
    """Prefetch what not every rank's store holds whole; return what was brought, and the hit."""
    store = store_with(KEY.prefix(len(KEY) - missing_pages * 4))
    faults = {Verb.GET: [None, Fault.RAISE]} if raises else None
    config = config_for(
        storage=injected(batch_pages=2), prefetch_policy=PrefetchPolicy.WAIT_COMPLETE
    )
    with Rig(config, create_storage=faulty_storage(store, faults=faults), ranks=ranks) as rig:
        rank = Scripted(rig)
        rig.begin_prefetch(KEY)
        rank.step(100)
        assert rig.cache.check_prefetch_progress("p")
        return rank.trail((rig.cache.pop_prefetch_loaded_tokens("p"), rig.hit(KEY)))


def near_the_limit(ranks: TorchRankGroup, host_pages: int, device_pages: int) -> Trail:
    """Back up and load where one rank has a page less: C067."""
    with Rig(config_for(host_pages), device_pages=device_pages, ranks=ranks) as rig:
        rank = Scripted(rig)
        answers: list[object] = []
        for first in range(0, 40, 4):
            key = RadixKey(tokens(*range(first, first + 4)))
            rig.insert(key)
            rank.step(4)
            rig.cache.evict(4)
            load = rig.begin_load(RadixKey(tokens(*range(first // 2, first // 2 + 4))))
            rig.cache.ready_to_load_host_cache()
            answers.append(load.status.value)
            rank.step(4)
        assert LoadStatus.QUEUED.value in answers
        return rank.trail((answers, rig.host_pages.num_pages, rig.device_pages.num_pages))


def diverge(ranks: TorchRankGroup) -> tuple[int, str]:
    """Insert other tokens on one rank; return in which step that was found, and how it is told."""
    with Rig(config_for(), ranks=ranks) as rig:
        rig.step(3)
        rig.insert(OTHER if ranks.rank else KEY)
        with pytest.raises(RanksDivergedError) as raised:
            rig.step(5)
        with pytest.raises(RanksDivergedError):
            rig.cache.check_hicache_events()
        assert rig.cache.close(GUARD_SECONDS)
        return rig.cache.controller.meeting.num_agreements, str(raised.value)


def attach_and_detach(ranks: TorchRankGroup) -> list[object]:
    """A backend that cannot be had on one rank, other options there, and a call that hangs."""
    store, barrier = MemoryPages(), Barrier()
    create = faulty_storage(store, gates={Verb.SET: barrier} if ranks.rank == 1 else None)
    seen: list[object] = []
    with Rig(config_for(), create_storage=create, ranks=ranks) as rig:
        cache = rig.cache
        rig.gates.append(barrier)

        def attempt(storage: object) -> None:
            try:
                cache.attach_storage_backend(storage)  # type: ignore[arg-type]
            except HiCacheError as error:
                seen.append("unequal" if "unequal storage.num_workers" in str(error) else "refused")
            seen.append(cache.storage_status.state)

        attempt(injected(extra_config={"max_bytes": 0} if ranks.rank == 1 else {}))
        attempt(injected(num_workers=1 + ranks.rank))
        attempt(injected())
        barrier.shut()
        rig.insert(KEY)
        rig.step(50)
        rig.step_until(lambda: cache.num_in_flight == 1)
        rig.clock.advance(OVERDUE_SECONDS)
        rig.step_until(lambda: cache.controller.num_in_flight == 1)
        time.sleep(0.05)
        rig.step(5)
        for _ in range(2):
            try:
                cache.detach_storage_backend(0.05)
            except StorageTimeout:
                seen.append("hangs")
            seen.append(cache.storage_status.state)
            barrier.open()
            rig.settle()
        assert cache.storage_status.state is AttachmentState.DETACHED
        attempt(injected())
        cache.clear_storage_backend()
        seen.append(cache.clear_storage_backend())
    return seen


def idle_pumps(ranks: TorchRankGroup, count: int, pause_seconds: float) -> tuple[int, int, float]:
    """Pump an idle cache; return agreements, how much memory has grown in bytes, and seconds.

    Every thousand pumps this rank pauses.
    """
    with Rig(config_for(storage=injected()), ranks=ranks) as rig:
        cache = rig.cache
        rig.step(1000)
        agreements, resident = cache.controller.meeting.num_agreements, resident_bytes()
        began = time.monotonic()
        for number in range(count):
            if number % 1000 == 999:
                time.sleep(pause_seconds)
            cache.check_hicache_events()
        agreements = cache.controller.meeting.num_agreements - agreements
        return agreements, resident_bytes() - resident, time.monotonic() - began


def resident_bytes() -> int:
    """Return how much memory this process has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
