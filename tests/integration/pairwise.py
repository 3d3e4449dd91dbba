"""Tables of options in which every two values meet, far smaller than all combinations."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Row: TypeAlias = dict[str, Any]
Pair: TypeAlias = tuple[tuple[str, Any], tuple[str, Any]]
"""Two factors of a row with their values, in the order of the factors."""


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Return rows in which every two values of different factors are together at least once.

    Greedy: a row begins with a pair that has not been together yet, and takes of each further
    factor the value that brings most pairs together for the first time. Equal factors give equal
    rows.
    """
    missing: dict[Pair, None] = {
        ((one, x), (other, y)): None
        for one, other in itertools.combinations(factors, 2)
        for x in factors[one]
        for y in factors[other]
    }

    def num_new_pairs(row: Row) -> int:
        return sum(pair in missing for pair in _pairs(row, factors))

    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in [name for name in factors if name not in row]:
            row = max([row | {name: value} for value in factors[name]], key=num_new_pairs)
        rows.append({name: row[name] for name in factors})
        for pair in _pairs(row, factors):
            missing.pop(pair, None)
    return rows


def _pairs(row: Row, factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    chosen = [(name, row[name]) for name in factors if name in row]
    return list(itertools.combinations(chosen, 2))
