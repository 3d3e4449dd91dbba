"""The shapes of the models that the reference engine computes."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

from hicache.errors import ConfigError
from hicache.layout import HeadRange, KVGeometry, MlaGeometry, PageGeometry

__all__ = ["LlamaConfig", "MlaConfig", "ModelConfig", "tiny_config", "tiny_mla_config"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The shape of a decoder but its attention's, and the constants of its arithmetic.

    Attributes:
        name: name of the model, for people and for the storage namespace.
        weights_revision: which weights of that model; a string that changes when they do.
        num_layers: transformer layers.
        hidden_size: elements of the vector that stands for a token between layers.
        num_heads: query heads.
        ffn_size: elements between the two halves of a feed-forward layer.
        vocab_size: token ids are `0 <= id < vocab_size`.
        rope_theta: base of the rotary embedding's wavelengths.
        rms_eps: added to the mean square in RMSNorm.
        max_positions: tokens that a sequence may have.
        tied_embeddings: whether the token embedding is also the output projection.
        first_layer: of a part of a model (`hicache.engine.model_shards`), the whole one's number
            for its first layer; None for a whole model.

    Raises:
        ConfigError: a field that cannot be; the message names it.
    """

    name: str
    weights_revision: str
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    rope_theta: float
    rms_eps: float
    max_positions: int
    tied_embeddings: bool
    first_layer: int | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and value <= 0:
                raise ConfigError(f"{owner}.{field.name} is {value}; it must be positive")
        if self.rope_dim % 2:
            raise ConfigError(f"rotary embedding turns {self.rope_dim} elements; make it even")

    @property
    @abstractmethod
    def rope_dim(self) -> int:
        """Elements of a head that rotary embedding turns; even, because it turns pairs."""

    @abstractmethod
    def geometry(self, *, dtype: str, page_size: int) -> PageGeometry:
        """Return what one page of this model's KV is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The shape of a Llama model.

    Attributes:
        num_kv_heads: heads of the keys and values that are cached; divides `num_heads`.
        head_dim: elements of one head.
        kv_heads: of a part of a model, which KV heads of the whole one it has; None for a whole
            model.
    """

    num_kv_heads: int
    head_dim: int
    kv_heads: HeadRange | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly; "
                "make num_heads a multiple of num_kv_heads"
            )

    @property
    def rope_dim(self) -> int:
        """See `ModelConfig.rope_dim`."""
        return self.head_dim

    def geometry(self, *, dtype: str, page_size: int) -> KVGeometry:
        """See `ModelConfig.geometry`."""
        return KVGeometry(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            kv_heads=self.kv_heads,
            first_layer=self.first_layer,
            dtype=dtype,
            page_size=page_size,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaConfig(ModelConfig):
    """The shape of a model with multi-head latent attention; names as in DeepSeek's own.

    Attributes:
        kv_lora_rank: elements of the latent from which keys and values are made.
        qk_nope_head_dim: elements of a query or key head that know no position.
        qk_rope_head_dim: elements that are rotated; all heads share those of the key.
        v_head_dim: elements of a value head.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def rope_dim(self) -> int:
        """See `ModelConfig.rope_dim`."""
        return self.qk_rope_head_dim

    def geometry(self, *, dtype: str, page_size: int) -> MlaGeometry:
        """See `ModelConfig.geometry`."""
        return MlaGeometry(
            num_layers=self.num_layers,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            first_layer=self.first_layer,
            dtype=dtype,
            page_size=page_size,
        )


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


def tiny_mla_config() -> MlaConfig:
    """Return the shape of a model as small with latent attention: 40 elements a row."""
    return MlaConfig(
        name="tiny-mla",
        weights_revision="random",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        ffn_size=160,
        vocab_size=512,
        rope_theta=10_000.0,
        rms_eps=1e-5,
        max_positions=4096,
        tied_embeddings=False,
    )
