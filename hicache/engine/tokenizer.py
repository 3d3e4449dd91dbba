"""Text to token ids and back, and the ChatML framing of messages.

Text never becomes a control token: no tokeniser here knows the control tokens as text, so a user
who writes `<|im_end|>` gets ids of those ten characters. Only `encode_message` and its neighbours
place control tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "BpeTokenizer",
    "ByteTokenizer",
    "Tokenizer",
    "TokenizerSource",
    "encode_answer_start",
    "encode_message",
    "encode_message_end",
]

MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def message_start_id(self) -> int:
        """The control token that opens a message."""

    @property
    def eos_id(self) -> int:
        """The control token that closes a message; a model that produces it has ended."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, never a control token among them."""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of `token_ids`, control tokens left out, broken UTF-8 as U+FFFD."""


def encode_message(tokenizer: Tokenizer, role: str, text: str) -> list[int]:
    """Return one whole ChatML message: `<|im_start|>role`, a line end, `text`, and its end."""
    return [
        tokenizer.message_start_id,
        *tokenizer.encode(f"{role}\n{text}"),
        *encode_message_end(tokenizer),
    ]


def encode_answer_start(tokenizer: Tokenizer) -> list[int]:
    """Return what makes the model answer: an assistant's message without text and end."""
    return [tokenizer.message_start_id, *tokenizer.encode("assistant\n")]


def encode_message_end(tokenizer: Tokenizer) -> list[int]:
    """Return what closes a message: `<|im_end|>` and a line end."""
    return [tokenizer.eos_id, *tokenizer.encode("\n")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerSource:
    """What a model's file says about its tokeniser.

    Attributes:
        scheme: how text is split before merging; `smollm` is the one supported.
        tokens: text of each id, in the printable alphabet of byte-level BPE.
        merges: pairs joined by a space, the most urgent first.
        control_ids: the ids that are no text.
    """

    scheme: str
    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    control_ids: frozenset[int]


class BpeTokenizer:
    """Byte-level BPE as SmolLM2 uses it: GPT-2's, each digit a token of its own.

    Bytes for which the vocabulary has no token (in SmolLM2 a few ASCII control characters and bytes
    that occur in no assigned character) are dropped by `encode`; all other text round-trips.

    Raises:
        ConfigError: `tokenizers` is not installed, or the source is not a ChatML model's of the
            supported scheme.
    """

    def __init__(self, source: TokenizerSource) -> None:
        try:
            from tokenizers import Tokenizer as Pipeline
            from tokenizers import decoders, models, pre_tokenizers
        except ImportError as error:
            raise ConfigError(
                "this tokeniser needs the package tokenizers: pip install 'hicache[demo]'"
            ) from error
        if source.scheme != "smollm":
            raise ConfigError(f"tokeniser scheme {source.scheme!r}; only 'smollm' is supported")
        ids = {token: index for index, token in enumerate(source.tokens)}
        for token in (MESSAGE_START, MESSAGE_END):
            if ids.get(token) not in source.control_ids:
                raise ConfigError(f"no control token {token} in the vocabulary; use a ChatML model")
        self._message_start_id, self._eos_id = ids[MESSAGE_START], ids[MESSAGE_END]
        text_ids = {token: index for token, index in ids.items() if index not in source.control_ids}
        merges = []
        for merge in source.merges:
            left, right = merge.split(" ")
            merges.append((left, right))
        self._pipeline = Pipeline(models.BPE(vocab=text_ids, merges=merges))
        self._pipeline.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._pipeline.decoder = decoders.ByteLevel()

    @property
    def message_start_id(self) -> int:
        """See `Tokenizer.message_start_id`."""
        return self._message_start_id

    @property
    def eos_id(self) -> int:
        """See `Tokenizer.eos_id`."""
        return self._eos_id

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return list(self._pipeline.encode(text).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        return str(self._pipeline.decode(list(token_ids)))


class ByteTokenizer:
    """One token a byte of UTF-8, for models with random weights.

    Ids 256 and 257 open and close a message. Ids above mean nothing and are decoded as U+FFFD.
    """

    message_start_id = 256
    eos_id = 257

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return list(text.encode())

    def decode(self, token_ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        raw = bytearray()
        for token in token_ids:
            if token < 256:
                raw.append(token)
            elif token > self.eos_id:
                raw.extend("\N{REPLACEMENT CHARACTER}".encode())
        return raw.decode(errors="replace")
