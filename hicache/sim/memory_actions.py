"""What makes room in the memories, and what takes it away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.sim.action import Action

if TYPE_CHECKING:
    from hicache.radix import RadixTree
    from hicache.sim.choices import Choices
    from hicache.sim.ranks import Rank, Ranks

__all__ = ["memory_actions", "memory_faults"]

_MANY_PAGES = 10**6


def memory_actions(ranks: Ranks, choices: Choices) -> dict[str, Action]:
    """Return what a scheduler does, on all ranks alike, by name."""

    def tree() -> RadixTree:
        return ranks.first.system.cache.tree

    def back_up() -> str:
        key = choices.dice.choice(choices.keys)
        return ranks.alike(lambda rank: rank.scheduler.back_up(key))

    def evict() -> str:
        num_pages = choices.dice.choice([1, 2, 4, _MANY_PAGES])
        return ranks.alike(lambda rank: rank.scheduler.evict(num_pages))

    def evict_host() -> str:
        num_pages = choices.dice.choice([1, 2, 4, _MANY_PAGES])
        return ranks.alike(lambda rank: rank.scheduler.evict_host(num_pages))

    def flush() -> str:
        """Make both pools forget what nothing protects, so that storage is asked again."""
        return ranks.alike(
            lambda rank: (
                f"{rank.scheduler.evict(_MANY_PAGES)}, {rank.scheduler.evict_host(_MANY_PAGES)}"
            )
        )

    return {
        "back_up": Action(0.5, lambda: True, back_up, lambda: ranks.first.prospects.of_back_up()),
        "evict": Action(7, lambda: tree().evictable_size, evict),
        "evict_host": Action(0.7, lambda: tree().host_size, evict_host),
        "flush": Action(0.6, lambda: tree().host_size, flush),
    }


def memory_faults(rank: Rank, choices: Choices) -> dict[str, Action]:
    """Return what happens to the pools of one rank, by name."""
    # Pages that ranks share are free on all of them or on none.
    allocators = rank.system.tight_allocators

    def withhold() -> str:
        allocator = choices.dice.choice(allocators)
        num_pages = choices.dice.randint(1, allocator.num_pages)
        if choices.dice.random() < 0.3:
            num_pages = 1
        allocator.num_withheld = num_pages
        return f"{num_pages} of {allocator.num_pages} pages"

    def give_way() -> str:
        for allocator in allocators:
            allocator.num_withheld = 0
        return "all pages"

    return {
        "withhold": Action(0.3, lambda: allocators, withhold),
        "give_way": Action(
            2, lambda: any(allocator.num_withheld for allocator in allocators), give_way
        ),
    }
