"""What is worth having for a trace: how much L2 and L3, and which policies."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from hicache.errors import ConfigError
from hicache.replay.replay import BELADY, ReplayResult, replay, replay_belady
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.replay.cache import CacheOptions
    from hicache.replay.request import TraceRequest
    from hicache.replay.time_model import TimeModel

__all__ = ["Advice", "Curve", "Prices", "Workload", "advise"]

_GIB: Final = 1 << 30
_SHARE_OF_GAIN: Final = 0.95
"""Without prices: the smallest size that saves this share of what any size saves."""

_WORTH_MENTIONING: Final = 0.01
"""Without prices: a tier that saves less of the engine's time than this is not worth having."""

_CLEARLY_BETTER: Final = 0.001
"""Of the token hit ratio, that another order of eviction than the first one has to gain."""

_SAME_HITS: Final = 0.02
"""Write policies within this share of the most hits count as equal; fewest writes then decide."""

_MAX_DOUBLINGS: Final = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prices:
    """In any one currency; None when not known.

    Attributes:
        engine_hour: of an engine.
        memory_gib_hour: of a GiB of host memory.
        storage_gib_hour: of a GiB of storage.
    """

    engine_hour: float | None = None
    memory_gib_hour: float | None = None
    storage_gib_hour: float | None = None

    def __post_init__(self) -> None:
        prices = (self.engine_hour, self.memory_gib_hour, self.storage_gib_hour)
        if any(price is not None and price < 0 for price in prices):
            raise ConfigError("a price is at least 0")
        if self.engine_hour is None and any(price is not None for price in prices):
            raise ConfigError("what memory saves is engine time: give --engine-price as well")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What advice is about.

    Attributes:
        requests: of the trace.
        block_tokens: tokens in a block.
        model: speeds.
        insert_output: see `replay`.
        progress: told of every request that a cache is done with.
    """

    requests: Sequence[TraceRequest]
    block_tokens: int
    model: TimeModel
    insert_output: bool = False
    progress: Callable[[int], object] = lambda _count: None

    @property
    def block_bytes(self) -> int:
        """Of the KV of a block."""
        return self.block_tokens * self.model.kv_bytes_per_token

    @property
    def hours(self) -> float:
        """From the first request to the last."""
        if not self.requests:
            return 0.0
        span = self.requests[-1].arrival_seconds - self.requests[0].arrival_seconds
        return span / self.model.speed / 3600

    @property
    def num_distinct(self) -> int:
        """Distinct blocks."""
        return 1 + max((int(one.blocks.max(initial=-1)) for one in self.requests), default=-1)

    def replay(self, options: Sequence[CacheOptions]) -> list[ReplayResult]:
        """Replay the requests on a cache for each of `options`."""
        return replay(
            self.requests,
            options,
            block_tokens=self.block_tokens,
            model=self.model,
            insert_output=self.insert_output,
            progress=self.progress,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One tier in several sizes, the first of which is none, and the one that is worth having.

    Attributes:
        sizes: in blocks.
        results: one for each size.
        gains: for each size, what it saves: money per hour if prices are known, else seconds of
            the engine over the whole trace.
        chosen: index of the best.
    """

    sizes: Sequence[int]
    results: Sequence[ReplayResult]
    gains: Sequence[float]
    chosen: int

    @property
    def size(self) -> int:
        """The size worth having."""
        return self.sizes[self.chosen]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """What is worth having, and the curves that say so.

    Attributes:
        host: L2 in several sizes, under the first policy and `write_back`, which writes all that
            the device loses.
        policies: with that L2, a result for each order of eviction.
        write_policies: with the best of them, a result for each write policy.
        storage: with all that, L3 in several sizes.
        expected: of everything that is worth having together.
        bound: of a cache of that size that knows the future.
    """

    host: Curve
    policies: Sequence[ReplayResult]
    write_policies: Sequence[ReplayResult]
    storage: Curve
    expected: ReplayResult
    bound: ReplayResult

    def to_json(self) -> dict[str, Any]:
        """Return what is advised as an object of the command's JSON."""
        options = self.expected.options
        return {
            "policy": options.policy,
            "write_policy": options.write_policy.value,
            "host_blocks": options.host_blocks,
            "storage_blocks": options.storage_blocks,
            "block_hit_ratio": self.expected.block_hit_ratio,
            "token_hit_ratio": self.expected.token_hit_ratio,
            "ttft_seconds_p50": self.expected.times.ttft_seconds_p50,
            "ttft_seconds_p99": self.expected.times.ttft_seconds_p99,
            "host_curve": _curve_to_json(self.host),
            "storage_curve": _curve_to_json(self.storage),
        }


def advise(
    workload: Workload, base: CacheOptions, *, policies: Sequence[str], prices: Prices
) -> Advice:
    """Find what is worth having beside an L1 of `base.device_blocks`.

    L2 and L3 are at most as large as those of `base`.

    L2 first, then the order of eviction, then the write policy, then L3, each with what was found
    before. Replays the trace about 25 times.

    Raises:
        ConfigError: L1 has no bound, so that nothing is worth having; or no such policy.
    """
    device_blocks = base.device_blocks
    if not device_blocks:
        raise ConfigError("--advise needs the size of L1: give one --capacity-blocks")
    first = dataclasses.replace(base, policy=policies[0], write_policy=WritePolicy.WRITE_BACK)
    distinct = workload.num_distinct
    host = _curve(
        workload,
        [
            dataclasses.replace(first, host_blocks=size, storage_blocks=0)
            for size in _sizes(device_blocks, distinct, base.host_blocks)
        ],
        prices,
    )
    chosen = dataclasses.replace(first, host_blocks=host.size, storage_blocks=0)
    by_policy = workload.replay([dataclasses.replace(chosen, policy=name) for name in policies])
    chosen = _best_policy(by_policy)
    by_write: list[ReplayResult] = []
    if host.size:
        by_write = workload.replay(
            [dataclasses.replace(chosen, write_policy=policy) for policy in WritePolicy]
        )
        chosen = _best_write_policy(by_write)
    sizes = _sizes(host.size, distinct, base.storage_blocks) if host.size else [0]
    storage = _curve(
        workload, [dataclasses.replace(chosen, storage_blocks=size) for size in sizes], prices
    )
    expected = storage.results[storage.chosen]
    bound = dataclasses.replace(expected.options, policy=BELADY)
    return Advice(
        host=host,
        policies=by_policy,
        write_policies=by_write,
        storage=storage,
        expected=expected,
        bound=replay_belady(
            workload.requests,
            [bound],
            block_tokens=workload.block_tokens,
            model=workload.model,
        )[0],
    )


def _sizes(faster_blocks: int, distinct: int, bound: int | None) -> list[int]:
    """Return none, and doublings of the tier above until a tier would hold all that it may."""
    most = distinct if bound is None else min(bound, distinct)
    sizes = [0]
    size = faster_blocks
    while size < most and len(sizes) < _MAX_DOUBLINGS:
        sizes.append(size)
        size *= 2
    return [*sizes, most] if distinct > faster_blocks else sizes


def _curve(workload: Workload, options: Sequence[CacheOptions], prices: Prices) -> Curve:
    results = workload.replay(options)
    without = results[0].times.engine_seconds
    seconds = [without - result.times.engine_seconds for result in results]
    sizes = [_size_of_curve(result, results[0]) for result in results]
    if prices.engine_hour is None or not workload.hours:
        most = max(seconds)
        chosen = 0
        if most > _WORTH_MENTIONING * without:
            chosen = next(i for i, gain in enumerate(seconds) if gain >= _SHARE_OF_GAIN * most)
        return Curve(sizes=sizes, results=results, gains=seconds, chosen=chosen)
    is_storage = results[-1].options.storage_blocks != 0
    price = prices.storage_gib_hour if is_storage else prices.memory_gib_hour
    money = [
        saved / 3600 / workload.hours * prices.engine_hour
        - size * workload.block_bytes / _GIB * (price or 0.0)
        for saved, size in zip(seconds, sizes, strict=True)
    ]
    return Curve(
        sizes=sizes,
        results=results,
        gains=money,
        chosen=max(range(len(money)), key=money.__getitem__),
    )


def _size_of_curve(result: ReplayResult, first: ReplayResult) -> int:
    """Return the size of the tier whose size is none in the first result of a curve."""
    sizes = (result.options.host_blocks, result.options.storage_blocks)
    size = sizes[1] if first.options.host_blocks else sizes[0]
    assert size is not None
    return size


def _best_policy(results: Sequence[ReplayResult]) -> CacheOptions:
    best = results[0]
    for result in results[1:]:
        if result.token_hit_ratio > max(
            best.token_hit_ratio, results[0].token_hit_ratio + _CLEARLY_BETTER
        ):
            best = result
    return best.options


def _best_write_policy(results: Sequence[ReplayResult]) -> CacheOptions:
    most = max(result.hit_tokens for result in results)
    good = [result for result in results if result.hit_tokens >= (1 - _SAME_HITS) * most]
    return min(good, key=lambda result: result.num_written).options


def _curve_to_json(curve: Curve) -> list[dict[str, Any]]:
    return [
        {
            "blocks": size,
            "token_hit_ratio": result.token_hit_ratio,
            "engine_seconds": result.times.engine_seconds,
            "ttft_seconds_p50": result.times.ttft_seconds_p50,
            "gain": gain,
        }
        for size, result, gain in zip(curve.sizes, curve.results, curve.gains, strict=True)
    ]
