"""The shape of a Llama model."""

from __future__ import annotations

import dataclasses

from hicache.errors import ConfigError

__all__ = ["LlamaConfig", "tiny_config"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shape of a Llama model and the constants of its arithmetic.

    Attributes:
        name: name of the model, for people and for the storage namespace.
        weights_revision: which weights of that model; a string that changes when they do.
        num_layers: transformer layers.
        hidden_size: elements of the vector that stands for a token between layers.
        num_heads: query heads; a multiple of `num_kv_heads`.
        num_kv_heads: heads of the keys and values that are cached.
        head_dim: elements of one head; even, because rotary embedding turns pairs.
        ffn_size: elements between the two halves of a feed-forward layer.
        vocab_size: token ids are `0 <= id < vocab_size`.
        rope_theta: base of the rotary embedding's wavelengths.
        rms_eps: added to the mean square in RMSNorm.
        max_positions: tokens that a sequence may have.
        tied_embeddings: whether the token embedding is also the output projection.
    """

    name: str
    weights_revision: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    rope_theta: float
    rms_eps: float
    max_positions: int
    tied_embeddings: bool

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"LlamaConfig.{field.name} is {value}; it must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly; "
                "make num_heads a multiple of num_kv_heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"LlamaConfig.head_dim is {self.head_dim}; it must be even")


def tiny_config() -> LlamaConfig:
    """Return the shape of a model small enough for tests: 4 layers, 2 KV heads, 512 tokens."""
    return LlamaConfig(
        name="tiny-llama",
        weights_revision="random",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=160,
        vocab_size=512,
        rope_theta=10_000.0,
        rms_eps=1e-5,
        max_positions=4096,
        tied_embeddings=False,
    )
