"""Turns plain values, as a YAML file or a command line has them, into values of a job. Errors name the place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return float(value) if isinstance(value, int) and float in kinds and int not in kinds else value
    if isinstance(value, str):
        return _from_text(value, kinds, place)
    if isinstance(value, Mapping):
        return _from_mapping(value, kinds, place)
    if isinstance(value, Sequence):
        return _from_list(value, kinds, place)
    raise place.error(f"{place.path} cannot be a {type(value).__name__} ({value!r})")


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
    wanted = "a number" if int in kinds or float in kinds else "true or false" if bool in kinds else "a mapping"
    raise place.error(f"{place.path} is {wanted}, got {text!r}")


def _from_mapping(value: Mapping[Any, Any], kinds: Sequence[Any], place: JobPlace) -> Any:
    name = next(iter(value)) if len(value) == 1 else None
    if isinstance(name, str) and any(is_named(k) or is_value(k) for k in kinds) and (is_imported(name) or is_public(name)):
        return build(name, value[name], place.at(name, value))
    # Options have names. Where a field takes a mapping too, numbers are keys of that: of steps, say.
    has_numbers = any(map(is_mapping, kinds)) and all(str(key).isdigit() for key in value)
    for kind in kinds:
        if is_value(kind) and not has_numbers:
            return construct(kind, value, place)
    for kind in kinds:
        if is_mapping(kind):
            key_hint, value_hint = entry_hints(kind)
            values = [hint for each in kinds if is_mapping(each) for hint in alternatives(entry_hints(each)[1])]
            hint = value_hint if len(values) == 1 else _either(values)
            return {_key(key, key_hint): convert(each, hint, place.at(key, value)) for key, each in value.items()}
    if Any in kinds:
        return dict(value)
    if any(map(is_named, kinds)):
        listed = ", ".join(map(str, value))
        raise place.error(
            f"{place.path} is written {{name: options}} with one name, of Overlord or module:function, got {listed}"
            f"{nearest(str(next(iter(value), '')), public_values())}"
        )
    raise place.error(f"{place.path} has no options of its own, got {dict(value)!r}")


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
        raise place.error(f"{place.path} needs a reader (Parquet, Jsonl, ...): the ending of its paths does not tell it")
    kind = _checked(lambda: value_named(name), place.at("reader", value))
    if not inspect.isclass(kind) or not issubclass(kind, Source):
        raise place.at("reader", value).error(
            f"{place.path}: {name!r} is not a reader; Parquet, Jsonl and WebDataset are some"
        )
    return construct(kind, PlainMapping(options, lines), place)


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


def _key(key: Any, hint: Any) -> Any:
    if isinstance(key, str) and int in alternatives(hint) and re.fullmatch(r"\d+", key):
        return int(key)
    return key


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
        loader.flatten_mapping(node)
        found: dict[Any, Any] = {}
        lines: dict[Any, int] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                raise SpecError(f"{name}, line {key_node.start_mark.line + 1}: a key is text or a number, got {key!r}")
            if key in found:
                raise SpecError(
                    f"{name}, line {key_node.start_mark.line + 1}: {key!r} stands twice, first in line {lines[key]}"
                )
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
