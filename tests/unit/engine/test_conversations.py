"""Laws of the demo's workload."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

from hicache.engine import conversations
from hicache.engine.conversations import Conversation, code_assistant_conversations, interleave
from hicache.engine.tokenizer import ByteTokenizer
from hicache.errors import ConfigError

TOKENIZER = ByteTokenizer()
NUM_TURNS = 5
SOURCE_TOKENS = 1000


def make_conversations(**changes: Any) -> tuple[Conversation, ...]:
    arguments = {
        "num_users": 6,
        "num_turns": NUM_TURNS,
        "source_tokens": SOURCE_TOKENS,
        "seed": 0,
        **changes,
    }
    return code_assistant_conversations(TOKENIZER, **arguments)


def pasted(conversation: Conversation) -> list[str]:
    """The pieces of source in a user's messages."""
    text = "".join(TOKENIZER.decode(message) for message in conversation.user_messages)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_equal_arguments_give_equal_conversations_and_another_seed_others() -> None:
    assert make_conversations() == make_conversations()
    assert make_conversations() != make_conversations(seed=1)


def test_all_users_share_the_system_message_and_nothing_else() -> None:
    users = make_conversations()
    assert len({user.system_ids for user in users}) == 1
    assert len({user.file_name for user in users}) == len(users)
    assert len({user.user_messages[0] for user in users}) == len(users)


@pytest.mark.parametrize("answer", [[], [72, 105], [72, 105, TOKENIZER.eos_id]])
def test_every_prompt_begins_with_the_prompt_and_answer_before_it(answer: list[int]) -> None:
    for user in make_conversations():
        prompt = user.first_prompt()
        assert prompt == [*user.system_ids, *user.user_messages[0]]
        for turn in range(1, NUM_TURNS):
            following = user.next_prompt(turn, previous_prompt=prompt, answer=answer)
            assert following[: len(prompt) + len(answer)] == prompt + answer
            assert tuple(following[-len(user.user_messages[turn]) :]) == user.user_messages[turn]
            prompt = following


def test_an_answer_cut_short_is_closed_like_one_that_ended() -> None:
    user = make_conversations()[0]
    prompt = user.first_prompt()
    cut, ended = (
        user.next_prompt(1, previous_prompt=prompt, answer=answer)
        for answer in ([72, 105], [72, 105, TOKENIZER.eos_id])
    )
    assert cut == ended


def test_prompts_open_and_close_every_message_but_the_awaited_answer() -> None:
    user = make_conversations()[0]
    prompt = user.first_prompt()
    for turn in range(1, NUM_TURNS):
        prompt = user.next_prompt(turn, previous_prompt=prompt, answer=[72, 105])
        opened, closed = prompt.count(TOKENIZER.message_start_id), prompt.count(TOKENIZER.eos_id)
        assert (opened, closed) == (2 * turn + 3, 2 * turn + 2)


def test_pasted_source_is_the_file_in_order_in_whole_lines_and_within_the_limit() -> None:
    for user in make_conversations():
        source = inspect.getsource(importlib.import_module(user.file_name.removesuffix(".py")))
        first, *further = pasted(user)
        assert SOURCE_TOKENS - 200 < len(TOKENIZER.encode(first)) <= SOURCE_TOKENS
        assert all(len(TOKENIZER.encode(piece)) <= SOURCE_TOKENS // 4 for piece in further)
        assert source.startswith("".join([first, *further]))
        assert all(piece.endswith("\n") for piece in [first, *further])


def test_users_beyond_the_files_share_a_file() -> None:
    num_files = len(conversations._MODULES)
    users = make_conversations(num_users=num_files + 1)
    assert users[0].file_name == users[num_files].file_name
    assert pasted(users[0])[0] == pasted(users[num_files])[0]


def test_more_turns_than_questions_or_lines_are_answered_all_the_same() -> None:
    users = make_conversations(num_turns=40, source_tokens=10**6)
    assert all(len(user.user_messages) == 40 for user in users)
    assert all(len(pasted(user)) == 1 for user in users)


@pytest.mark.parametrize("seed", range(3))
def test_interleaving_takes_every_users_turns_in_order_and_all_of_them(seed: int) -> None:
    order = interleave(num_users=5, num_turns=3, seed=seed)
    assert sorted(order) == [(user, turn) for user in range(5) for turn in range(3)]
    assert [turn for _, turn in order] == sorted(turn for _, turn in order)
    assert order == interleave(num_users=5, num_turns=3, seed=seed)


@pytest.mark.parametrize(
    "change", [{"num_users": 0}, {"num_turns": 0}, {"source_tokens": 63}], ids=str
)
def test_a_workload_of_nothing_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        make_conversations(**change)


def test_a_library_without_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_MODULES", ("itertools", "math"))
    with pytest.raises(ConfigError, match="no source"):
        make_conversations()
