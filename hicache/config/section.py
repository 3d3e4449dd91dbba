"""What an option is: its meaning, the values it takes, and how a plain value becomes one.

A section of the configuration is a frozen dataclass under `Section`, and every field says what it
means with `about`. All else follows from the declaration: the checks at construction, the names in
files and in the environment, and the help text.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from enum import Enum
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard, TypeVar

from hicache.config.plain import freeze_mapping, thaw
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Option", "Section", "about", "did_you_mean", "options_of"]

_SectionT = TypeVar("_SectionT", bound="Section")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _About:
    text: str
    unit: str
    at_least: int | None
    above: int | None


def about(
    text: str, *, unit: str = "", at_least: int | None = None, above: int | None = None
) -> dict[str, _About]:
    """Return the metadata of a field of a `Section`.

    Args:
        text: what the option does.
        unit: of what a number is the number, such as `tokens`.
        at_least: smallest number allowed.
        above: number below all that are allowed.
    """
    return {"about": _About(text=text, unit=unit, at_least=at_least, above=above)}


@dataclasses.dataclass(frozen=True)
class Section:
    """Base of the configuration dataclasses: checks every field, reads and writes mappings.

    A plain value is accepted where it means exactly one value of the declared type (a text for an
    enum, a mapping for a section, `2` for `2.0`) and is converted at construction, so reading a
    field always gives the declared type.

    Attributes:
        section: name of this section in a mapping; empty for the outermost.
    """

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Convert and check every field; a subclass then checks what must hold between fields."""
        for option in options_of(type(self)).values():
            admitted = option.admit(getattr(self, option.name))
            object.__setattr__(self, option.name, admitted)

    @classmethod
    def from_mapping(cls: type[_SectionT], mapping: Mapping[str, object]) -> _SectionT:
        """Build from plain values, nested sections as nested mappings; absent keys take defaults.

        Raises:
            ConfigError: an unknown key, a required key that is missing, or a value not allowed.
        """
        place = f"section {cls.section!r}" if cls.section else "the configuration"
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{place} must be a mapping of keys to values, not {mapping!r}")
        options = options_of(cls)
        for key in mapping:
            if key not in options:
                raise ConfigError(
                    f"unknown key {key!r} in {place}{did_you_mean(str(key), options)}; "
                    f"known keys: {', '.join(options)}"
                )
        for option in options.values():
            if option.required and option.name not in mapping:
                raise ConfigError(f"{option.path} is missing, but required: {option.text}")
        return cls(**mapping)

    def to_mapping(self) -> dict[str, object]:
        """Return every field as plain data for JSON; `from_mapping` turns it back."""
        return {name: _plain(getattr(self, name)) for name in options_of(type(self))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One field of a section.

    Attributes:
        field: the field; its metadata is made by `about`.
        section: name of the section that it belongs to, empty for the outermost.
        kind: its type, without None.
        optional: whether None is allowed.
    """

    field: dataclasses.Field[Any]
    section: str
    kind: type
    optional: bool

    @property
    def name(self) -> str:
        """Name of the field."""
        return self.field.name

    @property
    def text(self) -> str:
        """What it does."""
        return self._about.text

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return (
            self.field.default is dataclasses.MISSING
            and self.field.default_factory is dataclasses.MISSING
        )

    @property
    def default(self) -> object:
        """Its default as plain data; None when there is none."""
        if self.field.default_factory is not dataclasses.MISSING:
            return _plain(self.field.default_factory())
        return None if self.required else _plain(self.field.default)

    @property
    def path(self) -> str:
        """Name in messages and documents, such as `host.ratio`."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def variable(self) -> str:
        """Name of the environment variable, such as `HICACHE_HOST_RATIO`."""
        return "HICACHE_" + self.path.replace(".", "_").upper()

    @property
    def allowed(self) -> str:
        """The values that it takes, in words."""
        words = self._allowed_some()
        return f"{words}, or none" if self.optional else words

    def _allowed_some(self) -> str:
        if issubclass(self.kind, Enum):
            return "one of " + ", ".join(str(member.value) for member in self.kind)
        if self.kind in (int, float):
            about = self._about
            words = "a whole number" if self.kind is int else "a finite number"
            words += f" of {about.unit}" if about.unit else ""
            words += "" if about.at_least is None else f", at least {about.at_least}"
            return words + ("" if about.above is None else f", above {about.above}")
        if self.kind is bool:
            return "true or false"
        return "a text that is not empty" if self.kind is str else "a mapping"

    def admit(self, value: object, *, name: str | None = None) -> object:
        """Return `value` as the declared type.

        Args:
            value: the value, or a plain value that means one.
            name: what to call the option in an error, instead of its path.

        Raises:
            ConfigError: the value is not allowed; the message says which are.
        """
        name = name or self.path
        if value is None and self.optional:
            return None
        if isinstance(value, Mapping) and issubclass(self.kind, Section):
            return self.kind.from_mapping(value)
        if isinstance(value, Mapping) and self.kind is Mapping:
            return freeze_mapping(value, name)
        if issubclass(self.kind, Enum):
            if value in [member.value for member in self.kind]:
                return self.kind(value)
        elif self.kind in (int, float):
            if self._is_allowed_number(value):
                return self.kind(value)
        elif isinstance(value, self.kind) and value != "":
            return value
        raise ConfigError(f"{name} must be {self.allowed}; it is {value!r}")

    def _is_allowed_number(self, value: object) -> TypeGuard[int | float]:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.kind is int and not isinstance(value, int):
            return False
        try:
            finite = math.isfinite(value)
        except OverflowError:  # an integer beyond every float
            finite = self.kind is int
        about = self._about
        return (
            finite
            and (about.at_least is None or value >= about.at_least)
            and (about.above is None or value > about.above)
        )

    @property
    def _about(self) -> _About:
        about: _About = self.field.metadata["about"]
        return about


def options_of(cls: type[Section]) -> Mapping[str, Option]:
    """Return the options of a section by name, in the order of their declaration."""
    hints = typing.get_type_hints(cls)
    options: dict[str, Option] = {}
    for field in dataclasses.fields(cls):
        arms = typing.get_args(hints[field.name])
        optional = NoneType in arms
        kind = next(arm for arm in arms if arm is not NoneType) if optional else hints[field.name]
        options[field.name] = Option(
            field=field,
            section=cls.section,
            kind=typing.get_origin(kind) or kind,
            optional=optional,
        )
    return options


def did_you_mean(name: str, known: Iterable[str], *, similarity: float = 0.6) -> str:
    """Return "; did you mean ...?" when names like `name` are known, else an empty text.

    Args:
        name: the unknown name.
        known: the known ones.
        similarity: how like they must be, between 0 and 1 (equal).
    """
    close = difflib.get_close_matches(name, list(known), cutoff=similarity)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _plain(value: object) -> object:
    if isinstance(value, Section):
        return value.to_mapping()
    return value.value if isinstance(value, Enum) else thaw(value)
