"""Llama models as GGUF files hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hicache.engine.llama import LlamaLayerWeights, LlamaWeights
from hicache.engine.model_config import LlamaConfig
from hicache.engine.tokenizer import TokenizerSource
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LoadedModel", "read_gguf", "read_gguf_config"]

_CONTROL_TOKEN_TYPE = 3


class LoadedModel(NamedTuple):
    """What a model's file holds.

    Attributes:
        config: its shape.
        weights: its weights, dequantised to float32.
        tokenizer: what `hicache.engine.tokenizer.BpeTokenizer` is built from.
    """

    config: LlamaConfig
    weights: LlamaWeights
    tokenizer: TokenizerSource


def read_gguf(path: Path, *, name: str, revision: str) -> LoadedModel:
    """Read a Llama model from a GGUF file and dequantise it to float32.

    Args:
        path: the file.
        name: becomes `LlamaConfig.name`.
        revision: becomes `LlamaConfig.weights_revision`.

    Raises:
        ConfigError: `gguf` is not installed, or the file holds another architecture, or tensors
            (biases, rope factors) that `hicache.engine.llama` would ignore.
    """
    file = _GgufFile(path)
    config = _read_config(file, name=name, revision=revision)
    embedding = file.rows("token_embd")
    weights = LlamaWeights(
        embedding=embedding,
        layers=tuple(_read_layer(file, layer) for layer in range(config.num_layers)),
        final_norm=file.rows("output_norm"),
        lm_head=embedding if config.tied_embeddings else file.rows("output"),
    )
    if file.unread:
        raise ConfigError(f"{path} holds tensors that are not supported: {sorted(file.unread)}")
    tokens = tuple(file.value("tokenizer.ggml.tokens"))
    kinds = file.value("tokenizer.ggml.token_type")
    source = TokenizerSource(
        scheme=file.value("tokenizer.ggml.pre"),
        tokens=tokens,
        merges=tuple(file.value("tokenizer.ggml.merges")),
        control_ids=frozenset(i for i, kind in enumerate(kinds) if kind == _CONTROL_TOKEN_TYPE),
    )
    return LoadedModel(config, weights, source)


def read_gguf_config(path: Path, *, name: str, revision: str) -> LlamaConfig:
    """Read the shape of a Llama model alone; else as `read_gguf`."""
    return _read_config(_GgufFile(path), name=name, revision=revision)


class _GgufFile:
    """A GGUF file, and which of its tensors have not been read yet."""

    def __init__(self, path: Path) -> None:
        self._gguf = _import_gguf()
        self.path = path
        reader = self._gguf.GGUFReader(path)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.unread = set(self._tensors)

    def value(self, key: str) -> Any:
        """Return a field's value."""
        if key not in self._fields:
            raise ConfigError(f"{self.path} has no field {key}; it is no Llama model")
        return self._fields[key].contents()

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return f"{name}.weight" in self._tensors

    def num_rows(self, name: str) -> int:
        """Return how many rows a tensor has."""
        # The file names the fastest axis first.
        return int(self._tensor(name).shape[-1])

    def rows(self, *names: str) -> torch.Tensor:
        """Return the dequantised tensors, one below the other, as float32."""
        parts = []
        for name in names:
            tensor = self._tensor(name)
            self.unread.discard(tensor.name)
            parts.append(self._gguf.dequantize(tensor.data, tensor.tensor_type))
        return torch.from_numpy(np.concatenate(parts, dtype=np.float32))

    def _tensor(self, name: str) -> Any:
        if not self.holds(name):
            raise ConfigError(f"{self.path} has no tensor {name}; it is no Llama model")
        return self._tensors[f"{name}.weight"]


def _read_config(file: _GgufFile, *, name: str, revision: str) -> LlamaConfig:
    architecture = file.value("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{file.path} holds a {architecture!r} model; only 'llama' is supported")
    num_heads = file.value("llama.attention.head_count")
    hidden_size = file.value("llama.embedding_length")
    return LlamaConfig(
        name=name,
        weights_revision=revision,
        num_layers=file.value("llama.block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=file.value("llama.attention.head_count_kv"),
        head_dim=hidden_size // num_heads,
        ffn_size=file.value("llama.feed_forward_length"),
        vocab_size=file.num_rows("token_embd"),
        rope_theta=file.value("llama.rope.freq_base"),
        rms_eps=file.value("llama.attention.layer_norm_rms_epsilon"),
        max_positions=file.value("llama.context_length"),
        tied_embeddings=not file.holds("output"),
    )


def _read_layer(file: _GgufFile, layer: int) -> LlamaLayerWeights:
    block = f"blk.{layer}"
    return LlamaLayerWeights(
        attention_norm=file.rows(f"{block}.attn_norm"),
        qkv=file.rows(f"{block}.attn_q", f"{block}.attn_k", f"{block}.attn_v"),
        attention_output=file.rows(f"{block}.attn_output"),
        ffn_norm=file.rows(f"{block}.ffn_norm"),
        gate_up=file.rows(f"{block}.ffn_gate", f"{block}.ffn_up"),
        down=file.rows(f"{block}.ffn_down"),
    )


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "reading weights needs the package gguf: pip install 'hicache[demo]'"
        ) from error
    return gguf
