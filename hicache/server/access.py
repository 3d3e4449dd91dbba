"""Who may change a cache over HTTP."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request

__all__ = ["AdminKey", "require_admin", "require_safe_address"]

_SHORTEST_KEY = 16
_SCHEME = "bearer"


class AdminKey:
    """A secret of whoever may change a cache; shown by nothing.

    Args:
        key: at least 16 characters.

    Raises:
        ConfigError: the key is too short.
    """

    def __init__(self, key: str) -> None:
        if len(key) < _SHORTEST_KEY:
            raise ConfigError(
                f"an admin key needs at least {_SHORTEST_KEY} characters, this one has {len(key)}; "
                "make one with `openssl rand -hex 32`"
            )
        self._digest = _digest(key)

    @classmethod
    def read(cls, path: Path) -> AdminKey:
        """Read a key from a file, without the white space around it.

        Raises:
            ConfigError: the file cannot be read, or the key is too short.
        """
        try:
            return cls(path.read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the admin key from {path}: {error}") from error

    def matches(self, key: str) -> bool:
        """Whether `key` is the same, in a time that does not depend on how much of it is."""
        return hmac.compare_digest(self._digest, _digest(key))


def require_safe_address(host: str, key: AdminKey | None) -> None:
    """Raise `ConfigError` when others than this machine could reach `host` and need no key."""
    if key is None and not _is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, which could attach and clear storage; "
            "give an admin key, or listen on 127.0.0.1"
        )


def require_admin(request: Request, key: AdminKey | None) -> None:
    """Let a request pass that may change the cache.

    Without a key, everybody on this machine may, but not the pages that a browser on it shows: a
    browser names the page in `Origin`, and no other client does.

    Raises:
        HTTPException: 401 without credentials, 403 with wrong ones or from a page.
    """
    if key is None:
        if "origin" in request.headers:
            raise HTTPException(403, "pages in a browser may not do this without an admin key")
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != _SCHEME or not given:
        raise HTTPException(
            401,
            "this needs the admin key: send 'Authorization: Bearer KEY'",
            headers={"WWW-Authenticate": 'Bearer realm="hicache"'},
        )
    if not key.matches(given.strip()):
        raise HTTPException(403, "the admin key is wrong")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
