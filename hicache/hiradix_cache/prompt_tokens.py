"""Where the tokens of prompts were found, for hit rates over any window."""

from __future__ import annotations

from collections import Counter

from hicache.types import Tier

__all__ = ["PromptTokens"]


class PromptTokens:
    """Counts prompts that a scheduler has admitted, each once; no number ever decreases.

    Only the scheduler knows what a request has used of what its look-ups found.

    Attributes:
        total: tokens of the prompts.
        cached: of these, those that were not computed, by the tier that had them.
        delayed: of those, what another request has brought while this one waited for it.
    """

    def __init__(self) -> None:
        self.total = 0
        self.cached = Counter(dict.fromkeys(Tier, 0))
        self.delayed = 0

    def count(
        self, num_tokens: int, *, device: int, host: int, storage: int, delayed: int = 0
    ) -> None:
        """Count a prompt of `num_tokens` and the tokens of it found in each tier.

        `delayed` of these were in no memory when the prompt came, and are there because another
        request that fetched or computed them was waited for.
        """
        self.total += num_tokens
        self.delayed += delayed
        self.cached.update({Tier.DEVICE: device, Tier.HOST: host, Tier.STORAGE: storage})
