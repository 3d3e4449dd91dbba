"""Configuration from a command line, a file and the environment.

The environment goes over the file (or the inline JSON), which goes over the defaults, option by
option. `describe_options` lists the names of all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hicache.config.options import HiCacheConfig
from hicache.config.section import Option, Section, did_you_mean, options_of
from hicache.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["describe_options", "load_config", "load_mapping"]


def load_config(source: str = "{}", *, environ: Mapping[str, str] | None = None) -> HiCacheConfig:
    """Read a configuration.

    Args:
        source: inline JSON, or `@` and the path of a `.json`, `.toml`, `.yaml` or `.yml` file. In
            it, a text in the place of `storage.extra_config` is such a source of its own.
        environ: variables such as `HICACHE_PAGE_SIZE=32` or `HICACHE_HOST_RATIO=3`, which go over
            the source; usually `os.environ`. Numbers, booleans and mappings are written as in JSON
            (a mapping also as `@` and a path), texts as they are, and an empty value means none
            where none is allowed.

    Raises:
        ConfigError: the source cannot be read, a key is unknown, a value is not allowed, or a
            `HICACHE_` variable looks like a misspelt option.
    """
    mapping = load_mapping(source, name="the configuration")
    overrides = [*_read_texts_of_mappings(mapping), *_read_environment(environ or {})]
    try:
        return HiCacheConfig.from_mapping(_overlay(mapping, overrides))
    except ConfigError as error:
        place = source[1:] if source.startswith("@") else "the inline JSON"
        raise ConfigError(f"{error} (in {place} and the environment)") from error


def load_mapping(source: str, *, name: str) -> Mapping[str, object]:
    """Read options that are free in form, such as those of a storage backend.

    Args:
        source: inline JSON, or `@` and the path of a `.json`, `.toml`, `.yaml` or `.yml` file.
        name: what to call the options in an error, which repeats no value: one can be a secret.

    Raises:
        ConfigError: the source cannot be read, or is no mapping.
    """
    if source.startswith("@"):
        name = f"{name} in {source[1:]}"
        mapping = _read_file(Path(source[1:]))
    else:
        try:
            mapping = json.loads(source)
        except ValueError as error:
            raise ConfigError(
                f"{name} is not inline JSON ({error}); "
                'write a mapping such as {"option": 64}, or @FILE to read a file'
            ) from error
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"{name} must be a mapping of option names to values, not a {type(mapping).__name__}"
        )
    return mapping


def describe_options() -> str:
    """Return all options for a help text: name, default, environment variable, meaning, values."""
    return "\n".join(
        f"{option.path} ({_describe_default(option)}, {option.variable})\n"
        f"    {option.text} [{option.allowed}]"
        for option in _leaf_options()
    )


def _describe_default(option: Option) -> str:
    if option.required:
        return f"required with {option.section}"
    return "default none" if option.default is None else f"default {json.dumps(option.default)}"


def _leaf_options() -> Iterator[Option]:
    for option in options_of(HiCacheConfig).values():
        if issubclass(option.kind, Section):
            yield from options_of(option.kind).values()
        else:
            yield option


def _read_file(path: Path) -> Any:
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(
            f"{path} has no known kind; name it with one of the endings {', '.join(_PARSERS)}"
        )
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("YAML needs PyYAML: pip install 'hicache[yaml]'") from error
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        # Its text shows a part of the file.
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(f"no YAML in line {mark.line + 1}" if mark else "no YAML") from error
    return {} if loaded is None else loaded


_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}


def _read_texts_of_mappings(mapping: Mapping[str, object]) -> Iterator[tuple[Option, object]]:
    """Yield the options whose value is a text, the source of the mapping that it should be."""
    for option in _leaf_options():
        section = mapping.get(option.section)
        text = section.get(option.name) if isinstance(section, Mapping) else None
        if option.kind is Mapping and isinstance(text, str):
            yield option, load_mapping(text, name=option.path)


def _read_environment(environ: Mapping[str, str]) -> list[tuple[Option, object]]:
    options = {option.variable: option for option in _leaf_options()}
    for variable in environ:
        # Not every HICACHE_ variable is an option, so only a near miss is surely a mistake.
        if variable.startswith("HICACHE_") and variable not in options:
            hint = did_you_mean(variable, options, similarity=0.85)
            if hint:
                raise ConfigError(f"the environment variable {variable} is no option{hint}")
    return [
        (option, option.admit(_parse_variable(option, environ[variable]), name=variable))
        for variable, option in options.items()
        if variable in environ
    ]


def _parse_variable(option: Option, text: str) -> object:
    if not text and option.optional:
        return None
    if issubclass(option.kind, str):
        return text
    if option.kind is Mapping and text.startswith("@"):
        return load_mapping(text, name=option.variable)
    try:
        return json.loads(text)
    except ValueError:
        return text  # refused by `Option.admit`, which says what is allowed


def _overlay(
    mapping: Mapping[str, object], overrides: list[tuple[Option, object]]
) -> dict[str, object]:
    merged = dict(mapping)
    for option, value in overrides:
        if not option.section:
            merged[option.name] = value
            continue
        section = merged.get(option.section)
        if section is None or isinstance(section, Mapping):
            merged[option.section] = {**(section or {}), option.name: value}
    return merged
