"""Turns plain values, as a YAML file or a command line has them, into values of a job. Errors name the place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import pyarrow as pa

from overlord.declare.source import Source
from overlord.errors import OverlordError, SpecError
from overlord.jobfile.hints import (
    alternatives,
    arrow_type,
    choices,
    entry_hints,
    is_listing,
    is_mapping,
    is_named,
    is_path,
    is_source,
    options_of,
    takes_any_option,
)
from overlord.jobfile.names import is_called, is_imported, is_public, is_value, nearest, public_values, value_named

_COUNT = re.compile(r"(\d+(?:\.\d+)?) ?([kKmMgGtT])")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
READERS = {
    ".parquet": "Parquet",
    ".jsonl": "Jsonl",
    ".ndjson": "Jsonl",
    ".json": "Jsonl",
    ".arrow": "ArrowIpc",
    ".arrows": "ArrowIpc",
    ".feather": "ArrowIpc",
    ".ipc": "ArrowIpc",
    ".tar": "WebDataset",
    ".idx": "MegatronBin",
    ".csv": "Csv",
    ".tsv": "Csv",
    ".txt": "TextLines",
}
"""The reader of files by their ending, before that of a compression."""


class PlainMapping(dict[Any, Any]):
    """A mapping of a file, which knows the line of each key."""

    def __init__(self, entries: Mapping[Any, Any], lines: Mapping[Any, int]) -> None:
        super().__init__(entries)
        self.lines = dict(lines)


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where a value stands, for errors: the file, the line, and the keys that lead to it."""

    file: str
    keys: tuple[str, ...] = ()
    line: int | None = None

    def at(self, key: object, of: object = None) -> JobPlace:
        line = of.lines.get(key, self.line) if isinstance(of, PlainMapping) else self.line
        return JobPlace(self.file, (*self.keys, str(key)), line)

    @property
    def path(self) -> str:
        return ".".join(self.keys) or "the job"

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}, line {self.line}"

    def error(self, text: str) -> SpecError:
        return SpecError(f"{self}: {text}")


def convert(value: Any, hint: Any, place: JobPlace) -> Any:
    """A plain value as one of a field with this annotation."""
    kinds = alternatives(hint)
    if value is None:
        if type(None) in kinds or Any in kinds:
            return None
        raise place.error(f"{place.path} needs a value, it has none")
    if any(map(is_source, kinds)):
        return source_of(value, place)
    if isinstance(value, (bool, int, float)):
        return _from_scalar(value, kinds, place)
    if isinstance(value, str):
        return _from_text(value, kinds, place)
    if isinstance(value, Mapping):
        return _from_mapping(value, kinds, place)
    if isinstance(value, Sequence):
        return _from_list(value, kinds, place)
    raise place.error(f"{place.path} cannot be a {type(value).__name__} ({value!r})")


def _from_scalar(value: bool | float, kinds: Sequence[Any], place: JobPlace) -> Any:
    """Checks a number, or true or false. What a hint of the user's own means is not known here."""
    if type(value) in kinds or not all(map(_is_understood, kinds)):
        return value
    if any(type(value) is type(choice) and value == choice for kind in kinds for choice in choices(kind)):
        return value
    if type(value) is int and float in kinds:
        return float(value)
    is_text = str in kinds or any(map(is_path, kinds)) or any(map(choices, kinds))
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    way_out = f"; text that looks like that is quoted, as {shown!r}" if is_text else ""
    raise place.error(f"{place.path} is {_wanted(kinds)}, got {shown}{way_out}")


def _is_understood(kind: Any) -> bool:
    plain = (bool, int, float, str, type(None), pa.DataType)
    return kind is not Any and (
        kind in plain
        or any(is_it(kind) for is_it in (choices, is_listing, is_mapping, is_path, is_value))
        or (is_named(kind) and not inspect.isclass(kind))
        or getattr(kind, "_is_protocol", False)
    )


def _wanted(kinds: Sequence[Any]) -> str:
    """What values of these kinds are, in words."""
    offered = [str(choice) for kind in kinds for choice in choices(kind)]
    is_text = str in kinds or any(map(is_path, kinds))
    words = {
        f"one of {', '.join(offered)}": bool(offered) and not is_text,
        "true or false": bool in kinds,
        "a number": float in kinds,
        "a whole number": int in kinds and float not in kinds,
        "text": is_text,
        "an Arrow type": pa.DataType in kinds,
        "a list": any(map(is_listing, kinds)),
        "a mapping": any(is_mapping(kind) or (is_value(kind) and not is_named(kind)) for kind in kinds),
        "a name": any(is_named(kind) and kind is not Any for kind in kinds),
        "null": type(None) in kinds,
    }
    return " or ".join(word for word, is_so in words.items() if is_so)


def _from_text(text: str, kinds: Sequence[Any], place: JobPlace) -> Any:
    if any(map(is_named, kinds)) and (is_imported(text) or is_public(text)):
        return build(text, None, place)
    if int in kinds and (number := count_of(text, is_size=place.path.endswith("_bytes"))) is not None:
        return number
    if float in kinds and (number := _float(text)) is not None:
        return number
    if pa.DataType in kinds:
        return _checked(lambda: arrow_type(text), place)
    offered = [choice for kind in kinds for choice in choices(kind)]
    is_text = str in kinds or Any in kinds or any(map(is_path, kinds))
    if offered and text not in offered and not is_text:
        raise place.error(
            f"{place.path} is one of {', '.join(map(str, offered))}, got {text!r}{nearest(text, map(str, offered))}"
        )
    if is_text or text in offered:
        return text
    if any(is_listing(kind) for kind in kinds):
        return (text,)
    if any(map(is_named, kinds)):
        return build(text, None, place)
    raise place.error(f"{place.path} is {_wanted(kinds)}, got {text!r}")


def _from_mapping(value: Mapping[Any, Any], kinds: Sequence[Any], place: JobPlace) -> Any:
    name = next(iter(value)) if len(value) == 1 else None
    if isinstance(name, str) and any(is_named(k) or is_value(k) for k in kinds) and (is_imported(name) or is_public(name)):
        return build(name, value[name], place.at(name, value))
    # Options have names. Where a field takes a mapping too, numbers are keys of that: of steps, say.
    has_numbers = any(map(is_mapping, kinds)) and (not value or any(count_of(str(key)) is not None for key in value))
    for kind in kinds:
        if is_value(kind) and not has_numbers:
            return construct(kind, value, place)
    if mappings := [entry_hints(kind) if get_args(kind) else (Any, Any) for kind in kinds if is_mapping(kind)]:
        return _mapping(value, mappings, place)
    if Any in kinds:
        return dict(value)
    if any(map(is_named, kinds)):
        listed = ", ".join(map(str, value))
        raise place.error(
            f"{place.path} is written {{name: options}} with one name, of Overlord or module:function, got {listed}"
            f"{nearest(str(next(iter(value), '')), public_values())}"
        )
    raise place.error(f"{place.path} has no options of its own, got {dict(value)!r}")


def _mapping(value: Mapping[Any, Any], hints: Sequence[tuple[Any, ...]], place: JobPlace) -> dict[Any, Any]:
    """A mapping of which these are what keys and values may be. Numbers of steps may be written as 50k."""
    by_number = [pair for pair in hints if int in alternatives(pair[0])]
    others = [pair for pair in hints if pair not in by_number]
    if by_number and (not others or all(isinstance(each, Mapping) for each in value.values())):
        hints = by_number
    elif others:
        hints = others
    hint = _either([each for pair in hints for each in alternatives(pair[1])])
    found: dict[Any, Any] = {}
    for key, each in value.items():
        here = place.at(key, value)
        known = _number_of_step(key, here) if hints is by_number else str(key) if hints[0][0] is str else key
        if known in found:
            raise here.error(f"{place.path} has {known!r} twice, the second time as {key!r}")
        found[known] = convert(each, hint, here)
    return found


def _number_of_step(key: Any, place: JobPlace) -> int:
    number = count_of(key) if isinstance(key, str) else key
    if type(number) is not int:
        raise place.error(f"{'.'.join(place.keys[:-1])} has whole numbers as keys, such as 1000 or 50k, got {key!r}")
    return number


def _either(hints: Sequence[Any]) -> Any:
    found = hints[0]
    for hint in hints[1:]:
        found = found | hint
    return found


def _from_list(value: Sequence[Any], kinds: Sequence[Any], place: JobPlace) -> Any:
    for kind in kinds:
        if is_listing(kind):
            hints = entry_hints(kind)
            return tuple(
                convert(each, hints[i] if i < len(hints) else hints[-1], place.at(i)) for i, each in enumerate(value)
            )
    if Any in kinds:
        return list(value)
    raise place.error(f"{place.path} is a single value, got a list of {len(value)}")


def build(name: str, options: Any, place: JobPlace) -> Any:
    """The value that a name with options stands for. `module:name` alone is that thing itself; with options, even none
    (`{}`), it is called."""
    target = _checked(lambda: value_named(name), place)
    if options is None:
        return construct(target, {}, place) if is_called(name, target) else target
    if isinstance(options, Mapping):
        return construct(target, options, place)
    if isinstance(options, str) and not is_public(options) and not is_imported(options):
        first = next(iter(options_of(target)), None)
        if first is not None:
            return construct(target, {first: options}, place)
    inner = convert(options, next(iter(options_of(target).values()), Any), place)
    return _call(target, (inner,), {}, place)


def construct(target: Any, given: Mapping[Any, Any], place: JobPlace) -> Any:
    """Call a class or function with options that are plain values."""
    known = options_of(target)
    options: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known and not takes_any_option(target):
            here = place.at(key, given)
            raise JobPlace(here.file, place.keys, here.line).error(unknown_key(key, place.path, known))
        options[str(key)] = convert(value, known.get(str(key), Any), place.at(key, given))
    return _call(target, (), options, place)


def unknown_key(key: object, path: str, known: Mapping[str, Any]) -> str:
    return f"{path} has no option {key!r}{nearest(str(key), known) or '.'} It has {', '.join(known)}"


def _call(target: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], place: JobPlace) -> Any:
    try:
        return target(*arguments, **options)
    except OverlordError as error:
        error.add_note(f"{place}, {place.path}")
        raise
    except TypeError as error:
        raise place.error(f"{place.path}: {_without_init(error)}") from error


def _without_init(error: TypeError) -> str:
    return (
        str(error)
        .replace(".__init__()", "()")
        .replace("keyword-only argument", "option")
        .replace("positional argument", "option")
    )


def source_of(value: Any, place: JobPlace) -> Source:
    """A source: {reader: NAME, option: value, ...}; the reader may be left out where the ending of its files tells."""
    if isinstance(value, str):
        value = {"paths": value}
    if not isinstance(value, Mapping):
        raise place.error(f"{place.path} is a mapping with paths and a reader, got {value!r}")
    options = {key: each for key, each in value.items() if key != "reader"}
    lines = value.lines if isinstance(value, PlainMapping) else {}
    name = value.get("reader") or reader_of(options.get("paths"))
    if not isinstance(name, str):
        known = reader_options()
        if wrong := next((key for key in options if key not in known), None):
            raise place.at(wrong, value).error(f"{place.path} has no option {wrong!r}{nearest(str(wrong), known)}")
        raise place.error(f"{place.path} needs a reader (Parquet, Jsonl, ...): the ending of its paths does not tell it")
    kind = _checked(lambda: value_named(name), place.at("reader", value))
    if not inspect.isclass(kind) or not issubclass(kind, Source):
        raise place.at("reader", value).error(
            f"{place.path}: {name!r} is not a reader; Parquet, Jsonl and WebDataset are some"
        )
    return construct(kind, PlainMapping(options, lines), place)


@cache
def reader_options() -> dict[str, Any]:
    """Option to annotation, of all readers of Overlord."""
    readers = (value for value in public_values().values() if inspect.isclass(value) and issubclass(value, Source))
    return {name: hint for kind in readers for name, hint in options_of(kind).items()}


def reader_of(paths: Any) -> str | None:
    """The reader of files by their ending; None where that does not tell."""
    first = paths if isinstance(paths, str) else next(iter(paths), None) if isinstance(paths, Sequence) else None
    if not isinstance(first, str):
        return None
    bare = re.sub(r"\.(gz|gzip|zst|zstd)$", "", first.lower())
    if bare.endswith(".tgz"):
        return "WebDataset"
    return next((reader for ending, reader in READERS.items() if bare.endswith(ending)), None)


def count_of(text: str, *, is_size: bool = False) -> int | None:
    """A whole number, which may end in k, M, G or T (powers of 1024), or be a size such as 8GiB; None for other text."""
    text = text.strip().replace("_", "")
    if found := _COUNT.fullmatch(text):
        return round(float(found[1]) * 1024 ** _POWERS[found[2].lower()])
    if is_size and (found := _SIZE.fullmatch(text)):
        prefix = (found[2] or "").lower()
        return int(float(found[1]) * (1024 if prefix.endswith("i") else 1000) ** _POWERS[prefix.removesuffix("i")])
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _checked(make: Callable[[], Any], place: JobPlace) -> Any:
    try:
        return make()
    except SpecError as error:
        raise place.error(str(error)) from error.__cause__


def parse_yaml(text: str, name: str) -> Any:
    """The plain values of a YAML text. Mappings know the lines of their keys; a key that stands twice is an error."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> PlainMapping:
        own = {id(key_node) for key_node, _ in node.value}  # beside what << merges, which own keys replace
        loader.flatten_mapping(node)
        found: dict[Any, Any] = {}
        lines: dict[Any, int] = {}
        written: set[Any] = set()
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            where = f"{name}, line {key_node.start_mark.line + 1}"
            if type(key) not in (str, int, float):
                as_read = (
                    f"the key {key_node.value} is read as {key!r}" if isinstance(key_node.value, str) else f"got {key!r}"
                )
                raise SpecError(f"{where}: a key is text or a number, {as_read}; quote it if it is a name")
            if key in written:
                raise SpecError(f"{where}: {key!r} stands twice, first in line {lines[key]}")
            if id(key_node) in own:
                written.add(key)
            found[key] = loader.construct_object(value_node, deep=True)
            lines[key] = key_node.start_mark.line + 1
        return PlainMapping(found, lines)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error)
        raise SpecError(f"{name}{where} is not YAML: {problem}") from error
