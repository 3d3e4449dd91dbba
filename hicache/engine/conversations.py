"""The demo's workload: people who ask a code assistant about files of Python's standard library.

All users share one system prompt; each talks about a file of their own over several turns. Every
prompt is the prompt before it, the answer to that, and a new message, joined as token ids: so each
is a prefix of the next exactly, which text encoded anew would not guarantee.
"""

from __future__ import annotations

import bisect
import dataclasses
import importlib
import inspect
import random
from typing import TYPE_CHECKING

from hicache.engine.tokenizer import encode_answer_start, encode_message, encode_message_end
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.engine.tokenizer import Tokenizer

__all__ = ["Conversation", "code_assistant_conversations", "interleave"]

# Pure Python on every version supported, a few hundred lines or more each.
_MODULES = (
    "textwrap",
    "heapq",
    "shlex",
    "statistics",
    "calendar",
    "fnmatch",
    "queue",
    "bisect",
    "string",
    "csv",
    "difflib",
    "fractions",
    "configparser",
    "graphlib",
    "zipfile",
    "argparse",
)

_SYSTEM_PROMPT = """\
You are a code assistant for a team that maintains a large Python code base. People paste a part \
of a source file and ask about it. Follow these rules in every answer.

1. Answer from the code that was pasted. When the answer is not in it, say which file or function \
you would have to see, and do not guess.
2. Begin with the answer in one sentence. Explain afterwards, in at most two short paragraphs.
3. Name functions, classes and parameters exactly as the code spells them, in backticks.
4. When you propose a change, show only the lines that change and one line around them. Keep the \
style of the file: its quotes, its line length, its way of naming things.
5. Point out errors that you notice even when nobody asked, most serious first: wrong results, \
then lost data, then leaks, then slow code. Say how likely each is.
6. Say what a test for the change has to check, and give one example with concrete values.
7. The team supports every Python version that still gets security fixes. Do not use features that \
are newer, and do not add dependencies.
8. Write plain English. No greetings, no praise, no apologies, and no summary of what was asked.
"""

_FIRST_QUESTIONS = (
    "What does this part of the file do, and who would call it?",
    "Which names in this part are public, and what does each of them promise?",
    "What would you read first in this file to change its behaviour safely?",
    "Which assumptions about its input does this code make without checking them?",
)

_NEXT_QUESTIONS = (
    "Which inputs make this code slow, and why?",
    "Write a test for the edge case that you think is most likely to be wrong.",
    "What happens here when the argument is empty?",
    "Which of these functions could be called from two threads at once?",
    "Suggest better names for two variables, and say why they are better.",
    "How would you explain the main loop to a new colleague?",
    "Which errors can a caller get from this code, and where are they raised?",
    "Is there anything here that older Python versions handle differently?",
    "Add type annotations to the function with the most parameters.",
    "Which part would you move into a function of its own?",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """One user's side of a conversation, as token ids.

    Attributes:
        user: position among the users.
        file_name: the file that it is about.
        system_ids: the system message, equal for all users.
        user_messages: one framed message a turn, each followed by what makes the model answer.
        answer_end_ids: what closes an answer; the first is the token by which a model ends it.
    """

    user: int
    file_name: str
    system_ids: tuple[int, ...]
    user_messages: tuple[tuple[int, ...], ...]
    answer_end_ids: tuple[int, ...]

    def first_prompt(self) -> list[int]:
        """Return the prompt of turn 0: the system message and the user's first."""
        return [*self.system_ids, *self.user_messages[0]]

    def next_prompt(
        self, turn: int, *, previous_prompt: Sequence[int], answer: Sequence[int]
    ) -> list[int]:
        """Return the prompt of `turn`, which begins with `previous_prompt` and `answer`.

        Args:
            turn: `1 <= turn < len(user_messages)`.
            previous_prompt: the prompt of the turn before.
            answer: what the model answered to it, ended by the model or cut short.
        """
        assert 1 <= turn < len(self.user_messages), turn
        ended = bool(answer) and answer[-1] == self.answer_end_ids[0]
        end = self.answer_end_ids[1:] if ended else self.answer_end_ids
        return [*previous_prompt, *answer, *end, *self.user_messages[turn]]


def code_assistant_conversations(
    tokenizer: Tokenizer, *, num_users: int, num_turns: int, source_tokens: int, seed: int
) -> tuple[Conversation, ...]:
    """Return the conversations of `num_users` users, equal for equal arguments and Python version.

    The first turn pastes the beginning of a file, every second turn after it a further piece a
    quarter as long. Users beyond the number of files talk about a file that somebody else has, too,
    so that their prompts have more than the system message in common.

    Args:
        tokenizer: what turns text into ids.
        num_users: at least 1.
        num_turns: turns of each user, at least 1.
        source_tokens: tokens of source in the first turn, at most; at least 64. The source is cut
            at the end of a line.
        seed: decides who gets which file and asks which questions.

    Raises:
        ConfigError: a number is too small, or this Python comes without its library's source.
    """
    for name, value, least in (
        ("num_users", num_users, 1),
        ("num_turns", num_turns, 1),
        ("source_tokens", source_tokens, 64),
    ):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")
    rng = random.Random(seed)
    modules = rng.sample(_MODULES, len(_MODULES))
    system_ids = tuple(encode_message(tokenizer, "system", _SYSTEM_PROMPT))
    conversations = []
    for user in range(num_users):
        module = modules[user % len(modules)]
        texts = _texts(tokenizer, rng, module, num_turns=num_turns, source_tokens=source_tokens)
        messages = (
            (*encode_message(tokenizer, "user", text), *encode_answer_start(tokenizer))
            for text in texts
        )
        conversations.append(
            Conversation(
                user=user,
                file_name=f"{module}.py",
                system_ids=system_ids,
                user_messages=tuple(messages),
                answer_end_ids=tuple(encode_message_end(tokenizer)),
            )
        )
    return tuple(conversations)


def interleave(*, num_users: int, num_turns: int, seed: int) -> list[tuple[int, int]]:
    """Return every (user, turn) once: turn by turn, the users of each turn in random order."""
    rng = random.Random(seed)
    return [
        (user, turn)
        for turn in range(num_turns)
        for user in rng.sample(range(num_users), num_users)
    ]


def _texts(
    tokenizer: Tokenizer, rng: random.Random, module: str, *, num_turns: int, source_tokens: int
) -> list[str]:
    """Return what one user writes, turn by turn."""
    lines = _source(module).splitlines(keepends=True)
    piece, lines = _split(tokenizer, lines, source_tokens)
    questions = rng.sample(_NEXT_QUESTIONS, len(_NEXT_QUESTIONS))
    opening = f"This is the beginning of `{module}.py`"
    texts = [f"{opening}:\n\n```python\n{piece}```\n\n{rng.choice(_FIRST_QUESTIONS)}"]
    for turn in range(1, num_turns):
        text = questions[turn % len(questions)]
        if turn % 2 == 0 and lines:
            piece, lines = _split(tokenizer, lines, source_tokens // 4)
            text = f"The file goes on like this:\n\n```python\n{piece}```\n\n{text}"
        texts.append(text)
    return texts


def _source(module: str) -> str:
    try:
        return inspect.getsource(importlib.import_module(module))
    except OSError as error:
        raise ConfigError(
            f"this Python has no source of its module {module}; use an installation with sources"
        ) from error


def _split(tokenizer: Tokenizer, lines: list[str], max_tokens: int) -> tuple[str, list[str]]:
    """Return as many leading lines as fit into `max_tokens`, at least one, and the other lines."""

    def num_tokens(num_lines: int) -> int:
        return len(tokenizer.encode("".join(lines[:num_lines])))

    fitting = bisect.bisect_right(range(1, len(lines) + 1), max_tokens, key=num_tokens)
    num_lines = max(fitting, 1)
    return "".join(lines[:num_lines]), lines[num_lines:]
