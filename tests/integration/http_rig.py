"""A cache of the tiny model behind real HTTP on the loopback interface."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from serving import MODEL, make_pool

from hicache.config import HiCacheConfig, HostPoolConfig, PrefetchConfig, StorageConfig
from hicache.device import create_device
from hicache.engine.engine import CacheHandle, Engine
from hicache.engine.request import Request
from hicache.hiradix_cache import create_hiradix_cache
from hicache.pools import PageAllocator
from hicache.server import CacheAdmin, HttpServer, Mailbox, create_app
from hicache.storage import StorageBackendFactory
from hicache.testing.invariants import check_system
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from hicache.server import AdminKey
    from hicache.testing.faulty_storage import Gate

PAGE = 16
STORAGE = "/hicache/storage-backend"
GUARD_SECONDS = 20.0
STARTED_WITH = StorageConfig(
    backend="memory", model_name="tiny", weights_revision="0", call_timeout_seconds=0.05
)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class HttpRig:
    """The test's thread is the scheduler's; requests over HTTP are made in another.

    Attributes:
        engine: with a cache and no store, until one is attached.
        gates: opened at the end.
    """

    def __init__(
        self,
        *,
        admin_key: AdminKey | None = None,
        factory: StorageBackendFactory | None = None,
        started_with: StorageConfig = STARTED_WITH,
        deadline_seconds: float = GUARD_SECONDS,
        max_commands: int = 32,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        geometry = MODEL.config.geometry(dtype="float32", page_size=PAGE)
        pool, allocator = make_pool(geometry, 32), PageAllocator(32)
        config = HiCacheConfig(
            page_size=PAGE,
            prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
            host=HostPoolConfig(ratio=2, huge_pages=False),
            prefetch=PrefetchConfig(threshold_tokens=PAGE),
        )
        cache, counter = create_hiradix_cache(
            config,
            device=create_device("cpu"),
            device_pool=pool,
            device_allocator=allocator,
            factory=factory or StorageBackendFactory.default(),
        )
        self.cache = cache
        self.engine = Engine(MODEL, pool, allocator, cache=CacheHandle(cache, counter))
        self.mailbox = Mailbox(max_commands=max_commands, deadline_seconds=deadline_seconds)
        self.admin = CacheAdmin(cache, started_with=started_with, busy=self._busy, encode=encode)
        app = create_app(self.mailbox, self.admin, admin_key=admin_key)
        self.server = HttpServer(app, host="127.0.0.1", port=0, admin_key=admin_key)
        self.gates: list[Gate] = []
        self._clients = ThreadPoolExecutor(4)
        self._open = ExitStack()

    def __enter__(self) -> HttpRig:
        self._open.enter_context(self.server)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for gate in self.gates:
            gate.open()
        self.mailbox.close()
        self._open.close()
        self._clients.shutdown()
        settled = self.engine.settle(GUARD_SECONDS)
        violations = check_system(self.cache, request_device_pages=self.engine.owned_pages())
        closed = self.cache.close(GUARD_SECONDS)
        if error is None:
            assert settled
            assert violations == []
            assert closed
            assert not [one for one in threading.enumerate() if one.name.startswith("hicache")]

    def _busy(self) -> str:
        running = len(self.engine.running) + len(self.engine.waiting)
        return f"{running} request(s) run" if running else ""

    # -- over HTTP ---------------------------------------------------------------------------

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
    ) -> Future[Answer]:
        """Begin a request; bytes are sent as they are, everything else as JSON."""
        return self._clients.submit(self._send, method, path, body, headers or {})

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Make a request and serve the mailbox until it is answered."""
        return self.serve(self.send(method, path, body, headers))

    def serve(self, pending: Future[Answer]) -> Answer:
        """Be the scheduler until a request is answered."""
        end = time.monotonic() + GUARD_SECONDS
        while not pending.done():
            assert time.monotonic() < end, "no answer"
            self.mailbox.serve(wait_seconds=0.002)
        return pending.result()

    def _send(self, method: str, path: str, body: object, headers: dict[str, str]) -> Answer:
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        address = urlsplit(self.server.url)
        assert address.hostname is not None
        connection = http.client.HTTPConnection(
            address.hostname, address.port, timeout=GUARD_SECONDS
        )
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            fields = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, fields, response.read())
        finally:
            connection.close()

    # -- on the engine -----------------------------------------------------------------------

    def run(self, seed: int, *, num_tokens: int = 100) -> Request:
        """Serve a request whose prompt depends on `seed`, and let everything reach its tier."""
        request = self.request(seed, num_tokens=num_tokens)
        self.engine.submit(request)
        self.finish()
        return request

    def finish(self) -> None:
        """Serve all requests to their end, and let everything reach its tier."""
        end = time.monotonic() + GUARD_SECONDS
        while self.engine.waiting or self.engine.running:
            assert time.monotonic() < end, "a request does not end"
            self.engine.step()
        self.settle()

    def request(self, seed: int, *, num_tokens: int = 100) -> Request:
        prompt = [(seed * 31 + index * 7) % 200 for index in range(num_tokens)]
        return Request(f"request {time.monotonic_ns()}", prompt, max_new_tokens=4)

    def settle(self) -> None:
        """Let everything end but what waits for a call that hangs."""
        controller, end = self.cache.controller, time.monotonic() + GUARD_SECONDS
        while controller.num_in_flight > controller.num_spent:
            assert time.monotonic() < end, f"{controller.in_flight} operations do not end"
            self.cache.check_hicache_events()
            time.sleep(0.0005)

    def drop_memory(self) -> None:
        """Evict everything from L1 and L2."""
        self.settle()
        allocator = self.cache.controller.device_allocator
        self.cache.evict(allocator.num_pages)
        self.cache.evict_host(self.cache.controller.host_allocator.num_pages)
