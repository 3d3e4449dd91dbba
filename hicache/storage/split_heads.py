"""A page stored as several, one for each group of heads, so that ranks can share heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hicache.errors import ConfigError, StorageError
from hicache.storage.answers import count_outcomes, error_text, is_page_count, num_leading_ok
from hicache.storage.base import Piece, StorageFigures
from hicache.storage.checked import CheckedStorage
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache.storage.base import (
        HiCacheStorage,
        HiCacheStorageConfig,
        Page,
        StorageCapabilities,
    )
    from hicache.types import PageHash

__all__ = ["SplitHeadsStorage"]

_AnswerT = TypeVar("_AnswerT")

_DAMAGED = (PageOutcome.CORRUPT, PageOutcome.TRUNCATED, PageOutcome.FOREIGN)


class SplitHeadsStorage(CheckedStorage):
    """One backend for each group of heads of a page, under a namespace of its own.

    A page is stored when every group of it is:

    - `batch_exists` is the minimum over groups.
    - `batch_get` asks each group for the pages that the groups before it had; a page is what the
      first group without it says.
    - `batch_set` gives each group the pages that went well in those before it. A page is `PRESENT`
      when it was so in all groups. One that only some have (a full disk, a damaged or an evicted
      part) is absent, and its next write brings what lacks. So the parts of a page may come from
      several writers: each is the KV of its heads, whoever computed it.
    - `clear` and `close` reach every group whatever becomes of the others, and then raise one
      `StorageError`. The number of pages cleared is that of the fullest group.

    Pages and bytes are counted whole, however many groups. A call raises when one of its groups
    does, or when its answer is none. Groups are asked one after the other. Thread-safe.
    """

    def __init__(
        self,
        groups: Sequence[HiCacheStorage],
        *,
        config: HiCacheStorageConfig,
        pool_bytes: Sequence[int],
    ) -> None:
        """Stand around the groups' backends, and close them when closed.

        Args:
            groups: in the order in which they follow each other in a page.
            config: of the whole page; a backend's own has its group's namespace and length.
            pool_bytes: the length of a page in each pool, one after the other; each divides into
                groups of equal length.

        Raises:
            ConfigError: the lengths do not fit each other.
        """
        super().__init__(config)
        if sum(pool_bytes) != config.page_bytes or any(one % len(groups) for one in pool_bytes):
            raise ConfigError(
                f"pages of {config.page_bytes} bytes cannot be split into {len(groups)} groups "
                f"with parts of {list(pool_bytes)} bytes"
            )
        self._groups = tuple(groups)
        self._spans = [list(_spans(index, len(groups), pool_bytes)) for index in range(len(groups))]

    @property
    def groups(self) -> tuple[HiCacheStorage, ...]:
        """The backends, in the order of the heads."""
        return self._groups

    @property
    def capabilities(self) -> StorageCapabilities:
        """Those of a group: all are of one kind."""
        return self._groups[0].capabilities

    def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """See `HiCacheStorage.register_memory`."""
        super().register_memory(regions)
        for group in self._groups:
            group.register_memory(regions)

    def figures(self) -> StorageFigures:
        """Return the largest of each figure: all groups are in one store, under one set of options.

        So the number of pages is that of the fullest group, as `clear` has it.
        """
        largest: dict[str, int] = {}
        for group in self._groups:
            for name, value in group.figures().known().items():
                largest[name] = max(value, largest.get(name, value))
        return StorageFigures(**largest)

    def close(self) -> None:
        """See `HiCacheStorage.close`."""
        super().close()
        self._each("closed", lambda group: group.close())

    def _count_leading(self, keys: Sequence[PageHash]) -> int:
        num_found = len(keys)
        for index, group in enumerate(self._groups):
            answer = group.batch_exists(keys[:num_found])
            if not is_page_count(answer, num_found):
                raise self._no_answer(index)
            num_found = answer
        return num_found

    def _read_pages(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> list[PageOutcome]:
        outcomes = [PageOutcome.OK] * len(keys)
        num_read = num_asked = len(keys)
        for index, group in enumerate(self._groups):
            parts = self._parts(index, pages[:num_asked])
            answer = group.batch_get(
                keys[:num_asked], parent_keys[:num_asked], parts, deadline=deadline
            )
            self._check(index, answer, num_asked)
            num_more = num_leading_ok(answer)
            outcomes[num_more:num_read] = answer[num_more:num_read]
            num_read = num_asked = min(num_read, num_more)
            if num_read < len(keys) and outcomes[num_read] in _DAMAGED:
                # Whatever damage the other parts have is found now, so that one write repairs all.
                num_asked += 1
        return _end_at_first_bad(outcomes)

    def _write_pages(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> list[PageOutcome]:
        outcomes = [PageOutcome.PRESENT] * len(keys)
        good = list(range(len(keys)))
        for index, group in enumerate(self._groups):
            answer = group.batch_set(
                [keys[page] for page in good],
                [parent_keys[page] for page in good],
                self._parts(index, [pages[page] for page in good]),
                deadline=deadline,
            )
            self._check(index, answer, len(good))
            for page, outcome in zip(good, answer, strict=True):
                if outcome is not PageOutcome.PRESENT:
                    outcomes[page] = outcome
            good = [page for page in good if outcomes[page].good]
        return outcomes

    def _clear_pages(self) -> int:
        return max(self._each("cleared", lambda group: group.clear()))

    def _parts(self, index: int, pages: Sequence[Page]) -> list[Page]:
        """Return where the pages of one group are."""
        spans = self._spans[index]
        return [
            tuple(piece for start, end in spans for piece in _cut(page, start, end))
            for page in pages
        ]

    def _check(self, index: int, answer: list[PageOutcome], num_pages: int) -> None:
        counts = count_outcomes(answer, num_pages)
        if counts is None:
            raise self._no_answer(index)
        if PageOutcome.FAILED in counts or PageOutcome.NO_SPACE in counts:
            last_error = self._groups[index].stats().last_error
            self._note_error(StorageError(f"group {index} of heads: {last_error}"))

    def _no_answer(self, index: int) -> StorageError:
        return StorageError(f"group {index} of heads: the answer has a wrong shape")

    def _each(self, what: str, call: Callable[[HiCacheStorage], _AnswerT]) -> list[_AnswerT]:
        """Call every group and return the answers; raise one error for all that failed."""
        answers: list[_AnswerT] = []
        errors: list[str] = []
        for index in range(len(self._groups)):
            self._try(index, call, answers, errors)
        if errors:
            raise StorageError(f"not every group of heads could be {what} ({'; '.join(errors)})")
        return answers

    def _try(
        self,
        index: int,
        call: Callable[[HiCacheStorage], _AnswerT],
        answers: list[_AnswerT],
        errors: list[str],
    ) -> None:
        try:
            answers.append(call(self._groups[index]))
        except Exception as error:  # noqa: BLE001  # raised when all groups were called
            errors.append(f"group {index}: {error_text(error)}")


def _spans(index: int, num_groups: int, pool_bytes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield from which byte of a page to which one group is, once for each pool."""
    pool_start = 0
    for num_bytes in pool_bytes:
        group_bytes = num_bytes // num_groups
        start = pool_start + index * group_bytes
        yield start, start + group_bytes
        pool_start += num_bytes


def _cut(page: Page, start: int, end: int) -> Iterator[Piece]:
    """Yield the pieces of the bytes `start` to `end` of a page."""
    piece_start = 0
    for address, num_bytes in page:
        low, high = max(start, piece_start), min(end, piece_start + num_bytes)
        if low < high:
            yield Piece(address + low - piece_start, high - low)
        piece_start += num_bytes


def _end_at_first_bad(outcomes: list[PageOutcome]) -> list[PageOutcome]:
    """Skip what is behind the first page that is not there, unless time ran out at that page."""
    num_ok = num_leading_ok(outcomes)
    if num_ok == len(outcomes):
        return outcomes
    rest = PageOutcome.SKIPPED
    if outcomes[num_ok] is PageOutcome.TIMEOUT:
        rest = PageOutcome.TIMEOUT
    return outcomes[: num_ok + 1] + [rest] * (len(outcomes) - num_ok - 1)
