"""What a run of the demo measured: frozen records, their JSON, and joining two runs."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from typing import TYPE_CHECKING, Any, TypeAlias

from hicache.errors import ConfigError, InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = [
    "AnswerDifference",
    "DemoReport",
    "MovementReport",
    "Movements",
    "Top2",
    "TurnReport",
    "TurnTotals",
    "replace_file",
]

Top2: TypeAlias = tuple[tuple[int, float], tuple[int, float]]
"""The two likeliest tokens at one position, likeliest first, each as (token id, logit)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnReport:
    """One turn of one conversation: where its prompt's KV came from, and how long it took.

    Attributes:
        user: number of the conversation.
        turn: number of the turn in its conversation, from 0.
        after_restart: whether the process was started anew before it, so that L1 and L2 were empty.
        prompt_tokens: tokens of the prompt, the history included.
        device_hit_tokens: of these, found in L1.
        host_hit_tokens: of these, found in L2.
        storage_hit_tokens: of these, found in L3.
        computed_tokens: of these, computed.
        ttft_seconds: time to first token.
        ttft_uncached_seconds: time to first token of the same prompt without a cache.
        answer_tokens: tokens of the answer.
        answer_equal: whether the answer is token for token the one without a cache.
        text: the answer.
        delayed_hit_tokens: of the found tokens, those that no tier above storage had when the
            prompt came, and that another request brought while this one waited for it.

    Raises:
        InvariantViolation: the tokens by origin do not add up to the prompt's, or more were delayed
            than were found.
    """

    user: int
    turn: int
    after_restart: bool
    prompt_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    storage_hit_tokens: int
    computed_tokens: int
    ttft_seconds: float
    ttft_uncached_seconds: float
    answer_tokens: int
    answer_equal: bool
    text: str = ""
    delayed_hit_tokens: int = 0

    def __post_init__(self) -> None:
        by_origin = (
            self.device_hit_tokens,
            self.host_hit_tokens,
            self.storage_hit_tokens,
            self.computed_tokens,
        )
        if min(by_origin) < 0 or sum(by_origin) != self.prompt_tokens:
            raise InvariantViolation(
                [
                    f"turn {self.turn} of user {self.user}: {by_origin} tokens from L1, L2, L3 "
                    f"and computed are not the {self.prompt_tokens} of the prompt"
                ]
            )
        if not 0 <= self.delayed_hit_tokens <= self.prompt_tokens - self.computed_tokens:
            raise InvariantViolation(
                [
                    f"turn {self.turn} of user {self.user}: {self.delayed_hit_tokens} tokens were "
                    f"found late, of {self.prompt_tokens - self.computed_tokens} that were found"
                ]
            )

    def untimed(self) -> TurnReport:
        """Return the turn without its times: all ranks of a model have the same."""
        return dataclasses.replace(self, ttft_seconds=0.0, ttft_uncached_seconds=0.0)

    @property
    def speed_up(self) -> float | None:
        """How many times sooner the first token came; None when a time is too short to tell."""
        if self.ttft_seconds <= 0 or self.ttft_uncached_seconds <= 0:
            return None
        return self.ttft_uncached_seconds / self.ttft_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnTotals:
    """Sums of tokens and medians of times over several turns; a median of nothing is None."""

    turns: int
    prompt_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    storage_hit_tokens: int
    computed_tokens: int
    median_ttft_seconds: float | None
    median_ttft_uncached_seconds: float | None
    median_speed_up: float | None
    delayed_hit_tokens: int = 0

    @classmethod
    def of(cls, turns: Sequence[TurnReport]) -> TurnTotals:
        """Return the totals of `turns`, which may be none."""
        return cls(
            turns=len(turns),
            prompt_tokens=sum(turn.prompt_tokens for turn in turns),
            device_hit_tokens=sum(turn.device_hit_tokens for turn in turns),
            host_hit_tokens=sum(turn.host_hit_tokens for turn in turns),
            storage_hit_tokens=sum(turn.storage_hit_tokens for turn in turns),
            computed_tokens=sum(turn.computed_tokens for turn in turns),
            median_ttft_seconds=_median([turn.ttft_seconds for turn in turns]),
            median_ttft_uncached_seconds=_median([turn.ttft_uncached_seconds for turn in turns]),
            median_speed_up=_median([turn.speed_up for turn in turns if turn.speed_up is not None]),
            delayed_hit_tokens=sum(turn.delayed_hit_tokens for turn in turns),
        )

    @property
    def hit_tokens(self) -> int:
        """Tokens of the prompts that were not computed."""
        return self.prompt_tokens - self.computed_tokens

    def share(self, tokens: int) -> float:
        """Return `tokens` as a part of all tokens of the prompts, 0 to 1."""
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovementReport:
    """All copies of one kind.

    Attributes:
        num_bytes: bytes moved.
        seconds: time that copies were in progress.
    """

    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Mean bandwidth while copies were in progress; 0 when there were none."""
        return self.num_bytes / self.seconds if self.seconds else 0.0

    def __add__(self, other: MovementReport) -> MovementReport:
        return MovementReport(
            num_bytes=self.num_bytes + other.num_bytes, seconds=self.seconds + other.seconds
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Movements:
    """The copies between neighbouring tiers: L1 -> L2, L2 -> L1, L2 -> L3, L3 -> L2."""

    write: MovementReport = MovementReport()
    load: MovementReport = MovementReport()
    persist: MovementReport = MovementReport()
    prefetch: MovementReport = MovementReport()

    def by_name(self) -> dict[str, MovementReport]:
        """Return the four by name, in the order above."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __add__(self, other: Movements) -> Movements:
        others = other.by_name()
        return Movements(**{name: mine + others[name] for name, mine in self.by_name().items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerDifference:
    """The first position at which an answer is not the one without a cache.

    Attributes:
        user: number of the conversation.
        turn: number of the turn.
        position: position in the answer, in tokens.
        cached_top2: the two likeliest tokens with the cache.
        uncached_top2: and without it.
        near_tie: whether the logits are so close that rounding alone can swap the tokens.
    """

    user: int
    turn: int
    position: int
    cached_top2: Top2
    uncached_top2: Top2
    near_tie: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoReport:
    """One run of the demo, or several joined with `merge`.

    Attributes:
        model: name of the model.
        config: configuration of the cache and of the run, as plain data.
        machine: see `hicache.engine.machine.machine_facts`.
        turns: every turn in the order in which it was served.
        movements: bytes moved between tiers.
        differences: one for each answer that differs.
        counters: other counts of the cache by name.
        restart_logit_difference: where the model is split over other ranks after the restart, by
            how much a logit of the same prompt, computed without a cache, differs then at most,
            because they add in another order. None where it is not, or before the restart.
        num_pages_at_start: pages in L3 of a run that did not end, from which this one goes on.
    """

    model: str
    config: Mapping[str, object]
    machine: Mapping[str, object]
    turns: tuple[TurnReport, ...]
    movements: Movements = Movements()
    differences: tuple[AnswerDifference, ...] = ()
    counters: Mapping[str, float] = dataclasses.field(default_factory=dict)
    restart_logit_difference: float | None = None
    num_pages_at_start: int = 0

    @property
    def answers_equal(self) -> bool:
        """Whether there are turns and every answer is the one without a cache."""
        return bool(self.turns) and all(turn.answer_equal for turn in self.turns)

    @property
    def totals(self) -> dict[str, TurnTotals]:
        """Totals of the turns `before_restart`, `after_restart` and of `all`."""
        return {
            "before_restart": TurnTotals.of([t for t in self.turns if not t.after_restart]),
            "after_restart": TurnTotals.of([t for t in self.turns if t.after_restart]),
            "all": TurnTotals.of(self.turns),
        }

    def merge(self, later: DemoReport) -> DemoReport:
        """Return this run followed by `later`, a run of the same model and configuration.

        Turns and differences are appended; bytes, seconds and counters add up; the machine is the
        later one's.

        Raises:
            ConfigError: model or configuration differ.
        """
        if (self.model, self.config) != (later.model, later.config):
            raise ConfigError(
                f"the earlier report is of model {self.model!r} with {self.config}, the later of "
                f"{later.model!r} with {later.config}; delete the earlier or run it again"
            )
        difference = later.restart_logit_difference
        names = [*self.counters, *(name for name in later.counters if name not in self.counters)]
        return dataclasses.replace(
            later,
            turns=self.turns + later.turns,
            movements=self.movements + later.movements,
            differences=self.differences + later.differences,
            counters={
                name: self.counters.get(name, 0) + later.counters.get(name, 0) for name in names
            },
            restart_logit_difference=(
                self.restart_logit_difference if difference is None else difference
            ),
            num_pages_at_start=self.num_pages_at_start + later.num_pages_at_start,
        )

    def with_ranks(self, others: Sequence[DemoReport]) -> DemoReport:
        """Return this report of one rank with the bytes that the others have moved.

        Seconds add up too, so that a bandwidth is the mean of the ranks.

        Raises:
            InvariantViolation: a rank has served other turns, found other tokens in a tier, or
                answered otherwise.
        """
        mine = [turn.untimed() for turn in self.turns]
        wrong = [
            f"rank {number} has not served the turns of rank 0, or not from the same tiers"
            for number, other in enumerate(others, start=1)
            if [turn.untimed() for turn in other.turns] != mine
        ]
        if wrong:
            raise InvariantViolation(wrong)
        return dataclasses.replace(
            self, movements=sum((other.movements for other in others), self.movements)
        )

    def to_json(self) -> dict[str, object]:
        """Return the report as data for JSON, with everything that follows from it."""
        return {
            "answers_equal": self.answers_equal,
            "model": self.model,
            "config": dict(self.config),
            "machine": dict(self.machine),
            "turns": [dataclasses.asdict(turn) for turn in self.turns],
            "movements": {
                name: {
                    "bytes": movement.num_bytes,
                    "bytes_per_second": movement.bytes_per_second,
                    "seconds": movement.seconds,
                }
                for name, movement in self.movements.by_name().items()
            },
            "differences": [dataclasses.asdict(difference) for difference in self.differences],
            "totals": {name: dataclasses.asdict(totals) for name, totals in self.totals.items()},
            "counters": dict(self.counters),
            "restart_logit_difference": self.restart_logit_difference,
            "num_pages_at_start": self.num_pages_at_start,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DemoReport:
        """Return the report that `to_json` gave; what follows from the rest is not read.

        Raises:
            ConfigError: `data` is not such a report.
        """
        try:
            return cls(
                model=data["model"],
                config=data["config"],
                machine=data["machine"],
                turns=tuple(TurnReport(**turn) for turn in data["turns"]),
                movements=Movements(
                    **{
                        name: MovementReport(num_bytes=moved["bytes"], seconds=moved["seconds"])
                        for name, moved in data["movements"].items()
                    }
                ),
                differences=tuple(_read_difference(item) for item in data["differences"]),
                counters=data["counters"],
                restart_logit_difference=data["restart_logit_difference"],
                num_pages_at_start=data["num_pages_at_start"],
            )
        except (AttributeError, InvariantViolation, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this is no report of the demo ({error!r}); write it anew with `hicache demo`"
            ) from error

    def write_json(self, path: Path) -> None:
        """Write the report to `path`; see `replace_file`."""
        replace_file(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read_json(cls, path: Path) -> DemoReport:
        """Return the report that `write_json` wrote to `path`.

        Raises:
            ConfigError: there is none.
        """
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the report {path}: {error}") from error


def replace_file(path: Path, text: str) -> None:
    """Write `text` as UTF-8 so that a reader finds the old file or the new one, never a part.

    Folders that are missing are made. After a failure the old file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _read_difference(data: Mapping[str, Any]) -> AnswerDifference:
    cached, uncached = (
        tuple((token, logit) for token, logit in data[key])
        for key in ("cached_top2", "uncached_top2")
    )
    return AnswerDifference(**{**data, "cached_top2": cached, "uncached_top2": uncached})
