"""The routes: paths and fields as SGLang's users know them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hicache.errors import HiCacheError
from hicache.metrics.prometheus import exposition
from hicache.server.access import require_admin
from hicache.server.attach_request import AttachRequest
from hicache.server.mailbox import CommandFailed, NoAnswer
from hicache.server.pin_request import PinRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from hicache.server.access import AdminKey
    from hicache.server.admin import CacheAdmin, Done
    from hicache.server.mailbox import Mailbox

__all__ = ["create_app"]

_AnswerT = TypeVar("_AnswerT")

_STORAGE = "/hicache/storage-backend"
_PINS = "/hicache/pins"
_MAX_BODY_BYTES = 64 * 1024
_MAX_PIN_BYTES = 1024 * 1024
"""Of a body with the tokens of a long prefix."""

_BODY_SECONDS = 10.0


def create_app(mailbox: Mailbox, admin: CacheAdmin, *, admin_key: AdminKey | None) -> Starlette:
    """Return an ASGI app over the cache of `admin`, whose thread serves `mailbox`.

    | request | does |
    |---|---|
    | `PUT /hicache/storage-backend` | attach |
    | `GET /hicache/storage-backend` | status |
    | `DELETE /hicache/storage-backend` | detach; 202 when a call that hangs keeps it from its end |
    | `POST /hicache/storage-backend/clear` | remove this model's pages from the store |
    | `POST /hicache/pins` | pin a prefix; the body is a `PinRequest` |
    | `GET /hicache/pins` | what is pinned |
    | `DELETE /hicache/pins/ID` | unpin; 404 when there is no such pin |
    | `GET /health` | 200 while requests are served, also without L3, and 503 otherwise |
    | `GET /metrics` | everything that is counted, for Prometheus |

    Answers are JSON but for the metrics. What is refused is a 400 with the reason, and nothing has
    changed; no answer of the scheduler in time is a 503. All but the last two need the admin key,
    if there is one. Nothing blocks the event loop.
    """
    api = _Api(mailbox, admin, admin_key)
    return Starlette(
        routes=[
            Route(_STORAGE, api.attach, methods=["PUT"]),
            Route(_STORAGE, api.status, methods=["GET"]),
            Route(_STORAGE, api.detach, methods=["DELETE"]),
            Route(f"{_STORAGE}/clear", api.clear, methods=["POST"]),
            Route(_PINS, api.pin, methods=["POST"]),
            Route(_PINS, api.pins, methods=["GET"]),
            Route(f"{_PINS}/{{pin_id}}", api.unpin, methods=["DELETE"]),
            Route("/health", api.health, methods=["GET"]),
            Route("/metrics", api.metrics, methods=["GET"]),
        ],
        exception_handlers={
            HTTPException: _http_error,
            NoAnswer: _no_answer,
            CommandFailed: _failed,
            HiCacheError: _refused,
        },
    )


class _Api:
    def __init__(self, mailbox: Mailbox, admin: CacheAdmin, admin_key: AdminKey | None) -> None:
        self._mailbox = mailbox
        self._admin = admin
        self._admin_key = admin_key

    async def attach(self, request: Request) -> Response:
        require_admin(request, self._admin_key)
        wanted = AttachRequest.from_json(await _read_body(request))
        if wanted.runs_code and self._admin_key is None:
            raise HTTPException(
                403,
                "the request names code to be run, by the backend 'dynamic' or a text of the form "
                "module:Class: it needs an admin key",
            )
        return await self._do(lambda: self._admin.attach(wanted))

    async def detach(self, request: Request) -> Response:
        require_admin(request, self._admin_key)
        return await self._do(self._admin.detach)

    async def clear(self, request: Request) -> Response:
        require_admin(request, self._admin_key)
        return await self._do(self._admin.clear)

    async def status(self, request: Request) -> Response:
        require_admin(request, self._admin_key)
        return JSONResponse(await self._mailbox.ask(self._admin.status))

    async def pin(self, request: Request) -> Response:
        require_admin(request, self._admin_key)
        wanted = PinRequest.from_json(await _read_body(request, max_bytes=_MAX_PIN_BYTES))
        return JSONResponse(await self._mailbox.ask(lambda: self._admin.pin(wanted)))

    async def pins(self, request: Request) -> Response:
        require_admin(request, self._admin_key)
        return JSONResponse({"pins": await self._mailbox.ask(self._admin.pins)})

    async def unpin(self, request: Request) -> Response:
        require_admin(request, self._admin_key)
        pin_id = request.path_params["pin_id"]
        if not await self._mailbox.ask(lambda: self._admin.unpin(pin_id)):
            raise HTTPException(404, "there is no such pin; it may have ended")
        return JSONResponse({"done": "unpinned"})

    async def health(self, _request: Request) -> Response:
        try:
            complaints = await self._mailbox.ask(self._admin.complaints)
        except NoAnswer as error:
            return JSONResponse({"status": "unavailable", "reasons": [str(error)]}, 503)
        return JSONResponse({"status": "degraded" if complaints else "ok", "reasons": complaints})

    async def metrics(self, request: Request) -> Response:
        snapshot = await self._mailbox.ask(self._admin.snapshot)
        text, content_type = exposition(snapshot, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    async def _do(self, command: Callable[[], Done]) -> Response:
        done, complete, status = await self._mailbox.ask(command)
        return JSONResponse({"done": done, **status}, status_code=200 if complete else 202)


async def _read_body(request: Request, *, max_bytes: int = _MAX_BODY_BYTES) -> bytes:
    """Return the body; refuse one that is too large, before it is read, or too slow."""

    async def read() -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise HTTPException(413, f"the body may have {max_bytes} bytes at most")
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), _BODY_SECONDS)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the body did not come within {_BODY_SECONDS:g} s") from None


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _no_answer(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 503)


async def _refused(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


async def _failed(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 500)
