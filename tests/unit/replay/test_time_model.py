"""Speeds that cannot be are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hicache.errors import ConfigError
from hicache.replay import TimeModel


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TimeModel)])
def test_a_speed_that_is_none_is_refused(name: str) -> None:
    values: dict[str, Any] = {name: -1}
    with pytest.raises(ConfigError, match=name):
        TimeModel(**values)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TimeModel)])
def test_what_takes_no_time_can_be_a_delay_but_not_a_speed(name: str) -> None:
    values: dict[str, Any] = {name: 0}
    if name.startswith(("timeout", "attention", "storage_latency")):
        assert getattr(TimeModel(**values), name) == 0
    else:
        with pytest.raises(ConfigError, match=name):
            TimeModel(**values)
