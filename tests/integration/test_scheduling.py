"""Whatever comes, fails or is aborted: all end, answer as alone, and few pass anybody."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from scheduling_rig import MAX_STEPS, SchedulingRig, answers_alone, tokens

from hicache.engine.cache_aware import MAX_PASSES
from hicache.engine.request import Request
from hicache.storage.memory import MemoryPages
from hicache.testing.faulty_storage import Gate, Verb
from hicache.testing.invariants import check_system
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BATCH = 4
NUM_REQUESTS = 40
DOCUMENTS = [tokens(f"document {number}", 96 + 80 * number) for number in range(3)]
KNOWN: dict[tuple[int, ...], list[int]] = {}
"""Answers of prompts that were computed alone; several tests have some in common."""


class SometimesShut(Gate):
    """Holds a call for as long as a random number of steps."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self.open()

    def step(self) -> None:
        if self._rng.random() < 0.2:
            self._opened.clear()
        elif self._rng.random() < 0.4:
            self._opened.set()


class Passes:
    """Counts who passes whom by looking at the queue before and after each admission.

    Attributes:
        by_name: of the requests that could have run: those with no fetch to wait for.
    """

    def __init__(self, rig: SchedulingRig) -> None:
        self.by_name: Counter[str] = Counter()
        self._cache = rig.cache
        self._admission = rig.engine._admission
        self._admit = self._admission.admit
        self._admission.admit = self._watch  # type: ignore[method-assign]

    def _watch(self, running: list[Request]) -> None:
        before = list(self._admission.waiting)
        could_run = [self._could_run(one) for one in before]
        self._admit(running)
        admitted = [one not in self._admission.waiting for one in before]
        for position, one in enumerate(before):
            if could_run[position] and not admitted[position]:
                self.by_name[str(one.request_id)] += sum(admitted[position:])

    def _could_run(self, request: Request) -> bool:
        return request.standing.leader is None and not self._cache.prefetch_reach(
            request.request_id
        )


def prompts(rng: random.Random) -> list[list[int]]:
    """Return prompts that begin alike in many ways, so that few differ."""
    chosen = []
    for _ in range(NUM_REQUESTS):
        document = rng.choice(DOCUMENTS)
        beginning = document[: rng.choice([40, 96, len(document)])]
        chosen.append(beginning + tokens(("question", rng.randrange(4)), rng.choice([5, 30, 70])))
    return chosen


def verify_answers(requests: Sequence[Request]) -> None:
    unknown = {tuple(one.prompt_ids): one for one in requests if tuple(one.prompt_ids) not in KNOWN}
    KNOWN.update(zip(unknown, answers_alone(list(unknown.values())), strict=True))
    for one in requests:
        assert one.output_ids == KNOWN[tuple(one.prompt_ids)], one.request_id


@pytest.mark.parametrize("policy", [policy.value for policy in PrefetchPolicy])
@pytest.mark.parametrize("seed", range(5))
def test_requests_that_come_and_go_at_random_end_with_the_answers_they_have_alone(
    seed: int, policy: str
) -> None:
    rng = random.Random(f"{seed} {policy}")
    gate, store = SometimesShut(rng), rng.choice([None, MemoryPages()])
    queue = [
        Request(str(number), prompt, max_new_tokens=12, cacheable=rng.random() < 0.9)
        for number, prompt in enumerate(prompts(rng))
    ]
    requests, num_retracted = list(queue), 0
    with SchedulingRig(
        device_tokens=640,
        max_batch_requests=MAX_BATCH,
        chunk_tokens=rng.choice([100, 1000]),
        prefetch_policy=policy,
        store=store,
        gates={Verb.GET: gate},
    ) as rig:
        engine, passes = rig.engine, Passes(rig)
        loads = random.Random(f"loads {seed}")
        rig.let_loads_fail(lambda: loads.random() < 0.15)
        for _ in range(MAX_STEPS):
            if not (queue or engine.waiting or engine.running):
                break
            while queue and rng.random() < 0.5:
                engine.submit(queue.pop(0))
            if rng.random() < 0.05:
                engine.abort(str(rng.randrange(NUM_REQUESTS)))
            if engine.running and rng.random() < 0.05:
                engine._retract(engine.running[-1])
                num_retracted += 1
            gate.step()
            engine.step()
            faults = check_system(rig.cache, request_device_pages=engine.owned_pages())
            assert faults == [], f"seed {seed}"
        assert not engine.waiting, f"requests wait for ever, seed {seed}"
    finished = [one for one in requests if len(one.output_ids) == 12]
    assert len(finished) > NUM_REQUESTS // 2
    assert num_retracted
    verify_answers(finished)
    # The whole of a batch can be admitted in the step in which somebody becomes the next.
    assert passes.by_name.most_common(1)[0][1] < MAX_PASSES + MAX_BATCH, f"seed {seed}"
    assert all(
        one.delayed_hit_tokens <= one.num_prompt_tokens - one.computed_tokens for one in requests
    )


def test_the_count_of_passes_sees_a_request_that_is_passed_for_ever() -> None:
    """Without the bound, a stream of requests whose KV is there passes one without."""
    with SchedulingRig(max_batch_requests=1) as rig:
        resident = tokens("resident", 100)
        rig.run(Request("first", resident, max_new_tokens=1))
        cold = Request("cold", tokens("cold", 100), max_new_tokens=1)
        rig.submit(cold)
        passes = Passes(rig)
        for number in range(3 * MAX_PASSES):
            cold.standing.num_passes = 0
            rig.submit(Request(str(number), [*resident, number], max_new_tokens=1))
            rig.engine.step()
        assert passes.by_name["cold"] == 3 * MAX_PASSES
        rig.run()
