"""A cache over HTTP: attach, status, detach and clear of the store; pins; health and metrics.

| module | holds |
|---|---|
| `mailbox` | what goes from the event loop to the scheduler's thread and back |
| `admin` | what is done there |
| `attach_request`, `pin_request` | what a person asks for |
| `access` | who may ask |
| `masking` | what nobody gets to see |
| `app`, `http_server` | the routes; uvicorn in a thread |
| `serving_demo` | the demo beside it |

A process that owns a cache makes a `Mailbox` and a `CacheAdmin`, serves `create_app` of both with
`HttpServer`, and calls `Mailbox.serve` between the steps of its scheduler. Needs the
extra `server`.
"""

from hicache.server.access import AdminKey
from hicache.server.admin import CacheAdmin
from hicache.server.app import create_app
from hicache.server.http_server import HttpServer
from hicache.server.mailbox import Mailbox

__all__ = ["AdminKey", "CacheAdmin", "HttpServer", "Mailbox", "create_app"]
