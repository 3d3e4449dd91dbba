"""Plain logs: a line per request with its tokens or its prompt."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from hicache.errors import ConfigError
from hicache.replay.files import read_entries
from hicache.replay.request import BlockNumbers, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hicache.replay.files import Entry

    Tokenize = Callable[[str], Sequence[int]]

__all__ = ["LOG_BLOCK_TOKENS", "load_tokenizer", "read_prompt_log", "words_as_tokens"]

LOG_BLOCK_TOKENS: Final = 64


def read_prompt_log(path: Path, *, block_tokens: int, tokenize: Tokenize) -> Iterator[TraceRequest]:
    """Return the requests of a file in the order of their lines.

    A line holds `tokens` (a list of ids) or `prompt` (text, which goes to `tokenize`). It may hold
    `timestamp` (seconds, of any beginning) and what was answered: `output_tokens` (a list of ids)
    or `output` (text), or only how much: `output_length`, or `output_tokens` as a number.

    Raises:
        TraceError: a line is not so, or its time is before that of the line before it.
    """
    numbers = BlockNumbers()
    first: float | None = None
    newest = 0.0
    for entry in read_entries(path):
        time = entry.number("timestamp", newest + (first or 0.0))
        first = time if first is None else first
        if time - first < newest:
            raise entry.error("its timestamp is before that of the line before; sort the file")
        newest = time - first
        prompt = _tokens(entry, "tokens", "prompt", tokenize)
        if not prompt:
            raise entry.error("give 'tokens', a list of ids, or 'prompt', a text; it is empty")
        answer, num_answered = _answer(entry, tokenize)
        complete = [*prompt, *answer] if answer else None
        yield TraceRequest(
            arrival_seconds=newest,
            input_tokens=len(prompt),
            output_tokens=num_answered,
            blocks=numbers.number(_blocks(prompt, block_tokens)),
            cached_blocks=numbers.number(_blocks(complete, block_tokens)) if complete else None,
        )


def words_as_tokens(text: str) -> list[int]:
    """Return a number for each word between white space: the same word, the same number."""
    return [
        int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        for word in text.split()
    ]


def load_tokenizer(path: Path) -> Tokenize:
    """Return what a tokenizer file (`tokenizer.json`) makes of a text.

    Raises:
        ConfigError: `tokenizers` is not installed, or the file is no tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError("--tokenizer needs tokenizers: pip install 'hicache[demo]'") from error
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {path} cannot be read: {error}") from error

    def tokenize(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text).ids
        return ids

    return tokenize


def _tokens(entry: Entry, ids_name: str, text_name: str, tokenize: Tokenize) -> Sequence[int]:
    if ids_name in entry.fields:
        return entry.integers(ids_name)
    text = entry.fields.get(text_name, "")
    if not isinstance(text, str):
        raise entry.error(f"{text_name!r} must be a text, not {text!r:.40}")
    return tokenize(text)


def _answer(entry: Entry, tokenize: Tokenize) -> tuple[Sequence[int], int]:
    """Return the tokens of the answer, if they are known, and how many there are."""
    if isinstance(entry.fields.get("output_tokens"), int):
        return (), entry.count("output_tokens")
    answer = _tokens(entry, "output_tokens", "output", tokenize)
    return answer, len(answer) or entry.count("output_length", 0)


def _blocks(tokens: Sequence[int], block_tokens: int) -> Iterator[tuple[int, ...]]:
    return (tuple(tokens[k : k + block_tokens]) for k in range(0, len(tokens), block_tokens))
