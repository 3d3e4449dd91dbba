"""An app served by uvicorn in a thread, beside whatever the main thread does."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import uvicorn

from hicache.errors import ConfigError, HiCacheError
from hicache.server.access import require_safe_address

if TYPE_CHECKING:
    from types import TracebackType

    from starlette.applications import Starlette

    from hicache.server.access import AdminKey

__all__ = ["HttpServer"]

_MAX_CONNECTIONS = 64
_LAST_PORT = 65535
_START_SECONDS = 10.0
_STOP_SECONDS = 5.0
_GRACE_SECONDS = 1
"""For requests that are being answered when the server stops."""


class HttpServer:
    """Serves `app` from `__enter__` to `__exit__`.

    Args:
        app: what is served; takes no more than 64 connections.
        host: name or address to listen on.
        port: 0 takes one that is free.
        admin_key: as for the app; without one only this machine can be listened to.

    Attributes:
        url: where it listens, without a path; known when it does.

    Raises:
        ConfigError: others could connect and there is no key, or there is no such port.
    """

    def __init__(self, app: Starlette, *, host: str, port: int, admin_key: AdminKey | None) -> None:
        require_safe_address(host, admin_key)
        if not 0 <= port <= _LAST_PORT:
            raise ConfigError(f"a port is 0 to {_LAST_PORT}, not {port}")
        self._host = host
        self._port = port
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="off",
                # What is logged, and where, is the process's own matter.
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=_MAX_CONNECTIONS,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._thread: threading.Thread | None = None
        self.url = ""

    def __enter__(self) -> HttpServer:
        """Listen, so that whoever connects from now on is served.

        Raises:
            ConfigError: the address cannot be had.
        """
        try:
            address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address[4][:2], family=address[0])
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error}") from error
        port = listener.getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{port}"
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name="hicache-http", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop; requests that are being answered get a second.

        Raises:
            HiCacheError: the thread does not end.
        """
        assert self._thread is not None
        self._server.should_exit = True
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise HiCacheError("the HTTP server does not stop")
