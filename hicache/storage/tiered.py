"""Several backends as one: fast ones in front of large ones."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from hicache.errors import ConfigError, StorageError
from hicache.storage.answers import count_outcomes, error_text, is_page_count, num_leading_ok
from hicache.storage.base import StorageCapabilities
from hicache.storage.checked import CheckedStorage
from hicache.storage.instrumented import InstrumentedStorage
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from hicache.storage.base import HiCacheStorage, HiCacheStorageConfig, Page
    from hicache.storage.instrumented import StorageSnapshot
    from hicache.types import PageHash

__all__ = ["DEFAULT_MAX_FILL_PAGES", "BackendTier", "TieredStorage"]

DEFAULT_MAX_FILL_PAGES: Final = 128
"""As many as a batch of the cache has by default."""

_AnswerT = TypeVar("_AnswerT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendTier:
    """One backend of several.

    Attributes:
        name: for messages; differs from those of the other tiers.
        storage: the backend.
        written: whether `batch_set` writes to it. One that is not gets only what is read past it.
        required: whether a page is stored only if this tier, which is written, has it.
    """

    name: str
    storage: HiCacheStorage
    written: bool = True
    required: bool = True


class _Run(NamedTuple):
    """Pages `first` to `last`, exclusive, that one read of a tier brought."""

    tier: int
    first: int
    last: int


class _TierCall:
    """One call to several tiers; what fails in one does not concern the others.

    Args:
        tiers: the tiers.
        note: takes every error, for people.

    Attributes:
        errors: by index, what was wrong with a tier that raised or whose answer was none.
    """

    def __init__(self, tiers: Sequence[BackendTier], note: Callable[[Exception], None]) -> None:
        self._tiers = tiers
        self._note_for_people = note
        self.errors: dict[int, Exception] = {}

    def next_tier(self, lacking: Collection[int]) -> int | None:
        """Return the fastest tier that is sound and not among those that lack a page."""
        usable = (i for i in range(len(self._tiers)) if i not in lacking and i not in self.errors)
        return next(usable, None)

    def ask(self, index: int, call: Callable[[HiCacheStorage], _AnswerT]) -> _AnswerT | None:
        """Return the answer of a tier; `None` when it raised."""
        try:
            return call(self._tiers[index].storage)
        except Exception as error:  # noqa: BLE001  # kept, and raised if no tier does better
            self._note(index, error, error_text(error))
            return None

    def exists(self, index: int, keys: Sequence[PageHash]) -> int:
        """Return how many leading pages a tier has; one that fails has none."""
        answer = self.ask(index, lambda storage: storage.batch_exists(keys))
        if answer is not None and is_page_count(answer, len(keys)):
            return answer
        self._note_no_answer(index)
        return 0

    def get(
        self,
        index: int,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> list[PageOutcome]:
        """Read from a tier; from one that fails every page `FAILED`."""
        answer = self.ask(
            index, lambda storage: storage.batch_get(keys, parent_keys, pages, deadline=deadline)
        )
        return self._outcomes(index, answer, len(keys))

    def set(
        self,
        index: int,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> list[PageOutcome]:
        """Write to a tier; in one that fails every page `FAILED`."""
        answer = self.ask(
            index, lambda storage: storage.batch_set(keys, parent_keys, pages, deadline=deadline)
        )
        return self._outcomes(index, answer, len(keys))

    def raise_if_all_failed(self, num_asked: int) -> None:
        """Raise the error of the fastest tier if all of `num_asked` have one."""
        if len(self.errors) == num_asked:
            raise self.errors[min(self.errors)]

    def raise_for_each(self, what: str) -> None:
        """Raise one error that names all."""
        if self.errors:
            each = "; ".join(
                f"{self._tiers[index].name}: {error_text(error)}"
                for index, error in self.errors.items()
            )
            raise StorageError(f"not every tier could be {what} ({each})")

    def _outcomes(
        self, index: int, answer: list[PageOutcome] | None, num_pages: int
    ) -> list[PageOutcome]:
        counts = count_outcomes(answer, num_pages)
        if answer is None or counts is None:
            self._note_no_answer(index)
            return [PageOutcome.FAILED] * num_pages
        if PageOutcome.FAILED in counts or PageOutcome.NO_SPACE in counts:
            stats = self.ask(index, lambda storage: storage.stats())
            if stats is not None:
                self._tell(index, str(stats.last_error))
        return answer

    def _note_no_answer(self, index: int) -> None:
        if index not in self.errors:
            text = "the answer has a wrong shape"
            self._note(index, StorageError(text), text)

    def _note(self, index: int, error: Exception, text: str) -> None:
        self.errors[index] = error
        self._tell(index, text)

    def _tell(self, index: int, text: str) -> None:
        self._note_for_people(StorageError(f"tier {self._tiers[index].name}: {text}"))


class TieredStorage(CheckedStorage):
    """Reads every page from the first tier that has it, and writes it to several.

    - `batch_exists` and `batch_get` follow a prefix through the tiers: where one ends, the first
      other that has the next page goes on, so a prefix may lie partly in each.
    - After a read, the tiers in front of the one that had the pages are given them, chained as they
      are there, as long as the deadline is ahead and at most `max_fill_pages` a call. What comes of
      that is counted, and is no error.
    - `batch_set` writes to each tier that is `written`. A page is `OK` or `PRESENT` when every
      `required` tier has it, and `PRESENT` when each had it already; else it has the outcome of the
      first required tier that does not.
    - `clear` and `close` reach every tier whatever becomes of the others, and then raise one
      `StorageError` that names those that failed. The number of pages cleared is that of the
      fullest tier: how many differed is not known.

    A tier that raises, or whose answer is none, is not asked again in the same call and counts as
    one whose pages `FAILED`; a call raises only if every tier that it concerns did. Tiers are asked
    one after the other, so a tier that hangs holds up the call. Thread-safe.
    """

    def __init__(
        self,
        tiers: Sequence[BackendTier],
        *,
        config: HiCacheStorageConfig,
        max_fill_pages: int = DEFAULT_MAX_FILL_PAGES,
    ) -> None:
        """Stand around the tiers' backends, and close them when closed.

        Args:
            tiers: fast ones first.
            config: what the backends were made from, whatever their own options.
            max_fill_pages: pages of one read that the tiers in front are given; 0 for none.

        Raises:
            ConfigError: no tier is required, one is that is not written, or a bound is negative.
        """
        super().__init__(config)
        if max_fill_pages < 0:
            raise ConfigError(f"max_fill_pages must be at least 0, got {max_fill_pages}")
        if not any(tier.required for tier in tiers):
            raise ConfigError("a tiered storage needs at least one tier that is required")
        for tier in tiers:
            if tier.required and not tier.written:
                raise ConfigError(
                    f"tier {tier.name} is required but not written; write to more tiers, or do "
                    "not require it"
                )
        self._tiers = tuple(tiers)
        self._instruments = tuple(
            InstrumentedStorage(tier.storage, clock=config.clock) for tier in tiers
        )
        # What is called: the same tiers, with instruments around them.
        self._watched = tuple(
            dataclasses.replace(tier, storage=instrumented)
            for tier, instrumented in zip(tiers, self._instruments, strict=True)
        )
        self._max_fill_pages = max_fill_pages
        self._fill_outcomes: Counter[PageOutcome] = Counter()

    @property
    def tiers(self) -> tuple[BackendTier, ...]:
        """The tiers, fast ones first."""
        return self._tiers

    @property
    def capabilities(self) -> StorageCapabilities:
        """What any required tier can do: it has every page."""
        each = [tier.storage.capabilities for tier in self._tiers if tier.required]
        return StorageCapabilities(
            durable=any(one.durable for one in each),
            shared_between_processes=any(one.shared_between_processes for one in each),
            call_bytes=max(one.call_bytes for one in each),
        )

    def fill_outcomes(self) -> Mapping[PageOutcome, int]:
        """Return the pages that tiers were given after a read, by outcome; none ever decreases."""
        with self._stats_lock:
            return dict(self._fill_outcomes)

    def tier_snapshots(self) -> Mapping[str, StorageSnapshot]:
        """Return by name what each tier has done, fills included, and how it is; asks no tier."""
        return {
            tier.name: instrumented.snapshot()
            for tier, instrumented in zip(self._tiers, self._instruments, strict=True)
        }

    def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """See `HiCacheStorage.register_memory`."""
        super().register_memory(regions)
        for tier in self._watched:
            tier.storage.register_memory(regions)

    def close(self) -> None:
        """See `HiCacheStorage.close`."""
        super().close()
        call = self._begin()
        for index in range(len(self._tiers)):
            call.ask(index, lambda storage: storage.close())
        call.raise_for_each("closed")

    def _count_leading(self, keys: Sequence[PageHash]) -> int:
        call = self._begin()
        lacking: set[int] = set()
        num_found = 0
        while num_found < len(keys) and (index := call.next_tier(lacking)) is not None:
            num_more = call.exists(index, keys[num_found:])
            # Where a tier ended, it lacks the next page; any other may have it.
            lacking = {index} if num_more else {*lacking, index}
            num_found += num_more
        call.raise_if_all_failed(len(self._tiers))
        return num_found

    def _read_pages(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> list[PageOutcome]:
        call = self._begin()
        lacking: dict[int, PageOutcome] = {}
        runs: list[_Run] = []
        num_read = 0
        in_time = self._clock.now() < deadline
        while num_read < len(keys) and in_time and (index := call.next_tier(lacking)) is not None:
            left = slice(num_read, None)
            answer = call.get(index, keys[left], parent_keys[left], pages[left], deadline)
            num_more = num_leading_ok(answer)
            if num_more:
                runs.append(_Run(index, num_read, num_read + num_more))
                num_read += num_more
                lacking.clear()
            if num_read < len(keys):
                lacking[index] = answer[num_more]
            in_time = self._clock.now() < deadline
        call.raise_if_all_failed(len(self._tiers))
        self._fill(call, runs, keys, parent_keys, pages, deadline)
        outcomes = [PageOutcome.OK] * num_read
        if in_time and num_read < len(keys):
            outcomes.append(_reason({**dict.fromkeys(call.errors, PageOutcome.FAILED), **lacking}))
        rest = PageOutcome.SKIPPED if in_time else PageOutcome.TIMEOUT
        return outcomes + [rest] * (len(keys) - len(outcomes))

    def _write_pages(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> list[PageOutcome]:
        call = self._begin()
        answers = {
            index: call.set(index, keys, parent_keys, pages, deadline)
            for index, tier in enumerate(self._tiers)
            if tier.written
        }
        call.raise_if_all_failed(len(answers))
        required = [answer for index, answer in answers.items() if self._tiers[index].required]
        return _merge(required, keys, parent_keys)

    def _clear_pages(self) -> int:
        call = self._begin()
        counts = [call.ask(index, lambda tier: tier.clear()) for index in range(len(self._tiers))]
        call.raise_for_each("cleared")
        return max(count for count in counts if count is not None)

    def _begin(self) -> _TierCall:
        return _TierCall(self._watched, self._note_error)

    def _fill(
        self,
        call: _TierCall,
        runs: Sequence[_Run],
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> None:
        """Give what was read to the tiers in front of the one that had it."""
        num_left = self._max_fill_pages
        for run in runs:
            last = min(run.last, run.first + num_left)
            if run.tier == 0 or last == run.first:
                continue
            num_left -= last - run.first
            part = slice(run.first, last)
            for index in range(run.tier):
                if index not in call.errors:
                    outcomes = call.set(index, keys[part], parent_keys[part], pages[part], deadline)
                    with self._stats_lock:
                        self._fill_outcomes.update(outcomes)


def _reason(lacking: Mapping[int, PageOutcome]) -> PageOutcome:
    """Return why a page is in no tier: the fastest tier's reason that is more than a miss."""
    reasons = [lacking[index] for index in sorted(lacking)]
    return next((one for one in reasons if one is not PageOutcome.MISS), PageOutcome.MISS)


def _merge(
    answers: Sequence[Sequence[PageOutcome]],
    keys: Sequence[PageHash],
    parent_keys: Sequence[bytes],
) -> list[PageOutcome]:
    """Return for each page what became of it, given what each required tier answered."""
    outcomes: list[PageOutcome] = []
    not_stored: set[bytes] = set()
    for key, parent_key, *column in zip(keys, parent_keys, *answers, strict=True):
        bad = next((outcome for outcome in column if not outcome.good), None)
        if bad is not PageOutcome.TIMEOUT and parent_key in not_stored:
            bad = PageOutcome.SKIPPED
        if bad is not None:
            not_stored.add(key)
        stored = PageOutcome.OK if PageOutcome.OK in column else PageOutcome.PRESENT
        outcomes.append(stored if bad is None else bad)
    return outcomes
