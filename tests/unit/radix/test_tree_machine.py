"""The tree against a book-keeper, with operations that Hypothesis chooses and shrinks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tree_driver import TreeModel

from hicache.radix import RadixKey

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
salts = st.sampled_from([None, "a", "b"])
choices = st.integers(0, 99)
counts = st.integers(1, 12)


class TreeMachine(RuleBasedStateMachine):
    """Every operation of a tree, in any order, on pools that are always nearly full."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TreeModel(device_pages=16, host_pages=16)

    @rule(tokens=tokens, salt=salts, lock=st.booleans())
    def insert(self, tokens: list[int], salt: str | None, lock: bool) -> None:
        self.model.insert(RadixKey(tokens, cache_salt=salt), lock=lock)

    @rule(tokens=tokens, salt=salts, lock=st.booleans())
    def match(self, tokens: list[int], salt: str | None, lock: bool) -> None:
        self.model.match(RadixKey(tokens, cache_salt=salt), lock=lock)

    @rule(choice=choices)
    def unlock(self, choice: int) -> None:
        self.model.unlock(choice)

    @rule(choice=choices)
    def write(self, choice: int) -> None:
        self.model.write(self.model.node(choice))

    @rule(choice=choices)
    def load(self, choice: int) -> None:
        self.model.load(self.model.node(choice))

    @rule(choice=choices)
    def persist(self, choice: int) -> None:
        self.model.persist(self.model.node(choice))

    @rule(choice=choices, tokens=tokens.filter(lambda t: len(t) > 1), salt=salts)
    def prefetch(self, choice: int, tokens: list[int], salt: str | None) -> None:
        whole = len(tokens) - len(tokens) % self.model.page_size
        self.model.prefetch(self.model.node(choice), tokens[:whole], salt)

    @rule(choice=choices, num_good=st.integers(0, 8))
    def finish(self, choice: int, num_good: int) -> None:
        self.model.finish(choice, num_good)

    @rule(count=counts)
    def evict(self, count: int) -> None:
        self.model.evict(count)

    @rule(count=counts)
    def evict_back(self, count: int) -> None:
        self.model.evict_back(count)

    @rule(count=counts)
    def write_ahead(self, count: int) -> None:
        self.model.write_ahead(count)

    @rule(count=counts)
    def evict_host(self, count: int) -> None:
        self.model.evict_host(count)

    @rule()
    def reset(self) -> None:
        self.model.reset()

    @invariant()
    def every_page_has_one_owner_and_its_own_bytes(self) -> None:
        self.model.verify()

    def teardown(self) -> None:
        self.model.drain()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
