"""What is said about a backend holds nothing of its options but their names."""

from __future__ import annotations

import pytest

from hicache.server.masking import mask_options, mask_text

OPTIONS = {
    "password": "hunter2-and-more",
    "address": "redis://user:pa55word@host:6379/0",
    "dsn": "host=db;token=abcdefgh;port=5",
    "pin": 4711,
    "on": True,
    "nested": {"keys": ["first-key", "it's a\nsecret"]},
}


@pytest.mark.parametrize(
    "secret",
    [
        "hunter2-and-more",
        "redis://user:pa55word@host:6379/0",
        "pa55word",
        "abcdefgh",
        "4711",
        "first-key",
        "it's a\nsecret",
        "it's a\\nsecret",
        # Errors are cut short.
        "hunter2-and",
        "redis://user:pa",
    ],
)
def test_values_and_the_credentials_in_them_are_masked_wherever_they_stand(secret: str) -> None:
    for text in ("{}", "cannot use {}", "{}!", "({}) and {}"):
        masked = mask_text(text.replace("{}", secret), OPTIONS)
        assert masked == text.replace("{}", "***")


def test_what_is_no_value_stays() -> None:
    text = "option 'password' must be of type str: True is on host db, port 5"
    assert mask_text(text, OPTIONS) == text
    assert mask_text("anything", {}) == "anything"


def test_the_code_that_options_name_can_be_named() -> None:
    options = {"module_path": "a.module", "class_name": "AClass", "backend_name": "mine"}
    text = "storage backend 'mine': a.module.AClass must be a subclass"
    assert mask_text(text, options) == text


def test_options_keep_their_names_and_lose_their_values() -> None:
    assert mask_options(OPTIONS) == {
        "password": "***",
        "address": "***",
        "dsn": "***",
        "pin": "***",
        "on": "***",
        "nested": {"keys": "***"},
    }
