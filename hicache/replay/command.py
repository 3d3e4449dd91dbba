"""The command `hicache replay`: reads, replays, advises, and writes down what came out."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from typing import TYPE_CHECKING, Any, Final

from hicache.errors import ConfigError
from hicache.radix.policies import POLICY_NAMES, create_policy
from hicache.replay.advice import Prices, Workload, advise
from hicache.replay.advice_text import advice_text
from hicache.replay.cache import CacheOptions
from hicache.replay.outputs import fill_outputs
from hicache.replay.plots import plot_advice, plot_results, require_plotting
from hicache.replay.replay import BELADY, replay, replay_belady, replay_uncached
from hicache.replay.report import MODEL_NOTE, format_results, result_to_json
from hicache.replay.time_model import TimeModel
from hicache.replay.trace import TraceError, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hicache.replay.arguments import ReplayArguments
    from hicache.replay.replay import ReplayResult
    from hicache.replay.request import TraceRequest
    from hicache.replay.trace import Trace

__all__ = ["run_replay"]

_SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of the distinct blocks, as sizes of L1 when none is given."""

_PLAIN: Final = "lru"
_PREFERRED: Final = "adaptive"
"""In advice, unless another is clearly better."""


def run_replay(
    arguments: ReplayArguments, *, write: Callable[[str], None], say: Callable[[str], None]
) -> int:
    """Carry out the command; results go to `write`, what happens meanwhile to `say`.

    Returns:
        The exit status, which is 0.

    Raises:
        HiCacheError: an option cannot work, or the trace cannot be read.
    """
    model, prices = _time_model(arguments), _prices(arguments)
    _require_possible(arguments)
    trace = open_trace(
        arguments.trace,
        trace_format=arguments.format,
        block_tokens=arguments.block_tokens,
        tokenizer=arguments.tokenizer,
    )
    workload = Workload(
        requests=_read(trace, arguments),
        block_tokens=trace.block_tokens,
        model=model,
        insert_output=arguments.insert_output,
    )
    say(_summary(trace, workload))
    uncached = replay_uncached(workload.requests, model)
    document: dict[str, Any] = {
        "trace": trace.name,
        "format": trace.format.value,
        "block_tokens": trace.block_tokens,
        "requests": len(workload.requests),
        "distinct_blocks": workload.num_distinct,
        "about": MODEL_NOTE,
        "insert_output": arguments.insert_output,
        "time_model": dataclasses.asdict(model),
        "uncached": dataclasses.asdict(uncached),
    }
    if arguments.advise:
        with _progress(None) as progress:
            advice = advise(
                dataclasses.replace(workload, progress=progress),
                _base(arguments),
                policies=_advised_policies(arguments),
                prices=prices,
            )
        write(advice_text(advice, workload, prices, uncached=uncached) + "\n")
        if arguments.plot_path is not None:
            plot_advice(advice, arguments.plot_path, title=trace.name)
        document["advice"] = advice.to_json()
        document["results"] = [result_to_json(advice.expected)]
    else:
        results = _replay_all(arguments, workload)
        write(format_results(results) + "\n")
        if arguments.plot_path is not None:
            plot_results(results, arguments.plot_path, title=trace.name)
        document["results"] = [result_to_json(result) for result in results]
    if arguments.json_path is not None:
        arguments.json_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def _replay_all(arguments: ReplayArguments, workload: Workload) -> list[ReplayResult]:
    """Replay every combination, and return the results in the order of the combinations."""
    options = _combinations(arguments, workload.num_distinct)
    online = [chosen for chosen in options if chosen.policy != BELADY]
    bounds = [chosen for chosen in options if chosen.policy == BELADY]
    with _progress(len(workload.requests) if online else 0) as progress:
        found = replay(
            workload.requests,
            online,
            block_tokens=workload.block_tokens,
            model=workload.model,
            insert_output=workload.insert_output,
            progress=progress,
        )
    found += replay_belady(
        workload.requests, bounds, block_tokens=workload.block_tokens, model=workload.model
    )
    by_options = {result.options: result for result in found}
    return [by_options[chosen] for chosen in options]


def _combinations(arguments: ReplayArguments, distinct: int) -> list[CacheOptions]:
    device_blocks: Sequence[int | None] = arguments.device_blocks or sorted(
        {max(1, int(share * distinct)) for share in _SHARES}
    )
    found: dict[CacheOptions, None] = {}
    for policy, device, host, storage, write_policy in itertools.product(
        arguments.policies or (_PLAIN,),
        device_blocks,
        arguments.host_blocks,
        arguments.storage_blocks,
        arguments.write_policies,
    ):
        is_written = host != 0 and policy != BELADY
        found[
            CacheOptions(
                policy=policy,
                device_blocks=device,
                host_blocks=host,
                storage_blocks=storage,
                # Without a tier to write to, all write policies are the same cache.
                write_policy=write_policy if is_written else arguments.write_policies[0],
                storage_admission=arguments.storage_admission,
                prefetch_policy=arguments.prefetch_policy,
                load=arguments.load,
            )
        ] = None
    return list(found)


def _base(arguments: ReplayArguments) -> CacheOptions:
    sizes = arguments.device_blocks
    if len(sizes) > 1:
        raise ConfigError("--advise is about one size of L1: give one --capacity-blocks")
    return CacheOptions(
        device_blocks=sizes[0] if sizes else None,
        host_blocks=_most(arguments.host_blocks),
        storage_blocks=_most(arguments.storage_blocks),
        storage_admission=arguments.storage_admission,
        prefetch_policy=arguments.prefetch_policy,
        load=arguments.load,
    )


def _most(sizes: Sequence[int | None]) -> int | None:
    """Return the largest size; none given, which is the size 0, bounds nothing."""
    return None if None in sizes else max(size or 0 for size in sizes) or None


def _advised_policies(arguments: ReplayArguments) -> list[str]:
    """Return those that were asked for, or all; the first is kept unless another is better."""
    asked = [policy for policy in arguments.policies if policy != BELADY]
    return asked or sorted(POLICY_NAMES, key=_PREFERRED.__ne__)


def _read(trace: Trace, arguments: ReplayArguments) -> list[TraceRequest]:
    requests = list(itertools.islice(trace, arguments.limit))
    if not requests:
        raise TraceError(f"{trace.path} holds no request")
    return fill_outputs(requests, trace.block_tokens) if arguments.insert_output else requests


def _summary(trace: Trace, workload: Workload) -> str:
    requests = workload.requests
    num_blocks = sum(len(request.blocks) for request in requests)
    num_tokens = sum(request.input_tokens for request in requests)
    return (
        f"{trace.name} ({trace.format.value}): {len(requests):,} requests in {workload.hours:.2f} "
        f"hours, {num_tokens:,} tokens in {num_blocks:,} blocks of {trace.block_tokens}, "
        f"{workload.num_distinct:,} of them distinct"
    )


def _require_possible(arguments: ReplayArguments) -> None:
    """Raise before the work begins, so that no long run ends without its report."""
    for policy in arguments.policies:
        if policy != BELADY:
            create_policy(policy)
    if any(size != 0 for size in arguments.storage_blocks) and 0 in arguments.host_blocks:
        raise ConfigError("what L3 has comes by way of L2: give --host-blocks as well")
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit must be at least 1, not {arguments.limit}")
    if arguments.plot_path is not None:
        require_plotting(arguments.plot_path)
    for path in (arguments.json_path, arguments.plot_path):
        if path is not None:
            _require_writable(path)


def _require_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written; name a file in a writable folder")


def _time_model(arguments: ReplayArguments) -> TimeModel:
    return TimeModel(
        prefill_tokens_per_second=arguments.prefill_tokens_per_second,
        kv_bytes_per_token=arguments.kv_bytes_per_token,
        link_bytes_per_second=arguments.link_bytes_per_second,
        storage_bytes_per_second=arguments.storage_bytes_per_second,
        storage_latency_seconds=arguments.storage_latency_seconds,
        attention_per_ki_token=arguments.attention_per_ki_token,
        speed=arguments.speed,
    )


def _prices(arguments: ReplayArguments) -> Prices:
    prices = Prices(
        engine_hour=arguments.engine_price,
        memory_gib_hour=arguments.memory_price,
        storage_gib_hour=arguments.storage_price,
    )
    if prices != Prices() and not arguments.advise:
        raise ConfigError("prices are for advice; give --advise as well")
    return prices


@contextlib.contextmanager
def _progress(num_requests: int | None) -> Iterator[Callable[[int], object]]:
    """Show a bar on a terminal if `tqdm`, of the extra `demo`, is there."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda _count: None
        return
    with tqdm(total=num_requests, unit="request", disable=None) as bar:
        yield bar.update
