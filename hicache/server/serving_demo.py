"""The demo beside its HTTP app: conversations in the main thread, HTTP in another."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from typing import TYPE_CHECKING

from hicache.engine.demo import prepared_demo
from hicache.engine.demo_rounds import ConversationRounds
from hicache.errors import ConfigError
from hicache.server.access import AdminKey, require_safe_address
from hicache.server.admin import CacheAdmin
from hicache.server.app import create_app
from hicache.server.http_server import HttpServer
from hicache.server.mailbox import Mailbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hicache.engine.demo import DemoArguments
    from hicache.engine.demo_options import DemoOptions

__all__ = ["ServeArguments", "run_serving_demo"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """What a person may choose beside what they may choose of the demo.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        admin_key_file: holds the key that changes need; None needs none, on this machine alone.
        num_rounds: after which to stop; None goes on until Ctrl-C.
        pause_seconds: between two rounds, when a store can come and go.
    """

    host: str = "127.0.0.1"
    port: int = 0
    admin_key_file: Path | None = None
    num_rounds: int | None = None
    pause_seconds: float = 2.0

    def __post_init__(self) -> None:
        if self.num_rounds is not None and self.num_rounds < 1:
            raise ConfigError(f"rounds must be at least 1, not {self.num_rounds}")
        if not 0 <= self.pause_seconds <= 3600:
            raise ConfigError(f"pause must be 0 to 3600 seconds, not {self.pause_seconds}")


def run_serving_demo(
    demo: DemoArguments, serve: ServeArguments, *, say: Callable[[str], None]
) -> int:
    """Serve conversations and HTTP until the last round or Ctrl-C; returns the exit status.

    Raises:
        ConfigError: an argument cannot work.
    """
    key = None if serve.admin_key_file is None else AdminKey.read(serve.admin_key_file)
    # Before the model is fetched.
    require_safe_address(serve.host, key)
    with prepared_demo(demo, say=say) as (options, folder):
        rounds = ConversationRounds(options)
        try:
            _serve(rounds, options, serve, key, say)
        finally:
            rounds.close()
        folder.remove()
    return 0


def _serve(
    rounds: ConversationRounds,
    options: DemoOptions,
    serve: ServeArguments,
    key: AdminKey | None,
    say: Callable[[str], None],
) -> None:
    store = options.cache.storage
    assert store is not None
    mailbox = Mailbox()
    admin = CacheAdmin(
        rounds.cache, started_with=store, busy=rounds.busy, encode=rounds.tokenizer.encode
    )
    app = create_app(mailbox, admin, admin_key=key)

    def attend(seconds: float) -> None:
        mailbox.serve(wait_seconds=seconds)

    with HttpServer(app, host=serve.host, port=serve.port, admin_key=key) as server:
        say(_welcome(server.url, options, serve))
        try:
            for number in itertools.count(1):
                report = rounds.serve(attend)
                say(f"{report}; L3 {rounds.cache.controller.storage_state.value}")
                if number == serve.num_rounds:
                    break
                rounds.rest(serve.pause_seconds, attend)
        except KeyboardInterrupt:
            say("stopping")
        finally:
            mailbox.close()


def _welcome(url: str, options: DemoOptions, serve: ServeArguments) -> str:
    """Return what to try; every line can be pasted into a shell."""
    curl, storage = "curl", f"{url}/hicache/storage-backend"
    if serve.admin_key_file is not None:
        path = shlex.quote(str(serve.admin_key_file))
        curl = f'curl -H "Authorization: Bearer $(cat {path})"'
    end = "Ctrl-C" if serve.num_rounds is None else f"{serve.num_rounds} round(s)"
    return "\n".join(
        [
            f"serving {options.size.num_users} conversations with {options.model} until {end}, and "
            f"{url}",
            f"between two rounds there are {serve.pause_seconds:g} s in which L3 can come and go; "
            "try from another terminal:",
            f"  curl {url}/health",
            f"  curl {url}/metrics",
            f"  {curl} {storage}",
            f"  {curl} -X DELETE {storage}",
            f"""  {curl} -X PUT {storage} -d '{{"hicache_storage_backend": "file"}}'""",
            f"  {curl} -X POST {storage}/clear",
            f"  {curl} {url}/hicache/pins",
        ]
    )
