"""Opens a trace, whatever its format."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.replay.agentic import read_agentic
from hicache.replay.files import read_entries
from hicache.replay.mooncake import MOONCAKE_BLOCK_TOKENS, read_mooncake
from hicache.replay.prompt_log import (
    LOG_BLOCK_TOKENS,
    load_tokenizer,
    read_prompt_log,
    words_as_tokens,
)
from hicache.replay.request import TraceError, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Trace", "TraceError", "TraceFormat", "TraceRequest", "open_trace"]


class TraceFormat(str, Enum):
    """What a trace file holds."""

    MOONCAKE = "mooncake"
    AGENTIC = "agentic"
    LOG = "log"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """A trace file that can be read again and again.

    Attributes:
        path: the file.
        format: what it holds.
        block_tokens: tokens in a block.
        tokenizer: a tokenizer file for the prompts of a log; None takes words for tokens.
    """

    path: Path
    format: TraceFormat
    block_tokens: int
    tokenizer: Path | None = None

    @property
    def name(self) -> str:
        """Of the file."""
        return self.path.name

    def __iter__(self) -> Iterator[TraceRequest]:
        """Return the requests in the order in which they arrive, read as they are asked for.

        Raises:
            TraceError: the file cannot be read, with the place where.
        """
        if self.format is TraceFormat.MOONCAKE:
            return read_mooncake(self.path, block_tokens=self.block_tokens)
        if self.format is TraceFormat.AGENTIC:
            return iter(read_agentic(self.path, block_tokens=self.block_tokens))
        tokenize = words_as_tokens if self.tokenizer is None else load_tokenizer(self.tokenizer)
        return read_prompt_log(self.path, block_tokens=self.block_tokens, tokenize=tokenize)


_BLOCK_TOKENS = {
    TraceFormat.MOONCAKE: MOONCAKE_BLOCK_TOKENS,
    TraceFormat.AGENTIC: MOONCAKE_BLOCK_TOKENS,
    TraceFormat.LOG: LOG_BLOCK_TOKENS,
}


def open_trace(
    path: Path,
    *,
    trace_format: TraceFormat | None = None,
    block_tokens: int | None = None,
    tokenizer: Path | None = None,
) -> Trace:
    """Return the trace in a file; of the file only the first line is read now.

    Args:
        path: `.jsonl`, also `.xz` or `.gz`, or a tar archive of sessions.
        trace_format: None looks at the name and at the first line.
        block_tokens: tokens in a block; None takes what is usual for the format: 512, or 64 for a
            log.
        tokenizer: a tokenizer file for the prompts of a log; None takes words for tokens.

    Raises:
        TraceError: there is no such file, or nothing known is in it.
        ConfigError: `block_tokens` is less than 1.
    """
    if not path.is_file():
        raise TraceError(f"there is no trace {path}")
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(f"a block has at least 1 token, not {block_tokens}")
    found = trace_format or _recognise(path)
    return Trace(
        path=path,
        format=found,
        block_tokens=block_tokens or _BLOCK_TOKENS[found],
        tokenizer=tokenizer,
    )


def _recognise(path: Path) -> TraceFormat:
    if ".tar" in path.suffixes or path.suffix == ".tgz":
        return TraceFormat.AGENTIC
    entry = next(read_entries(path), None)
    if entry is None:
        raise TraceError(f"{path} is empty")
    if "hash_ids" in entry.fields:
        return TraceFormat.MOONCAKE
    if "tokens" in entry.fields or "prompt" in entry.fields:
        return TraceFormat.LOG
    raise entry.error("none of 'hash_ids', 'tokens', 'prompt' is in it; is this a request trace?")
