"""The JSON schema of YAML job files, for editors: completion, documentation and red lines under mistakes."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from itertools import pairwise
from typing import Any

import pyarrow as pa

from overlord.declare.job import Job
from overlord.declare.source import Source
from overlord.jobfile.hints import (
    alternatives,
    choices,
    entry_hints,
    is_listing,
    is_mapping,
    is_named,
    is_path,
    is_source,
    needed_options,
    options_of,
)
from overlord.jobfile.loading import table_options
from overlord.jobfile.names import is_value, public_values

_COUNT = {"type": ["integer", "string"], "pattern": r"^-?\d+(\.\d+)? ?([kKmMgGtT]i?[bB]?)?$"}
_IMPORTED = {"type": "string", "pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"}


def job_schema() -> dict[str, Any]:
    """The schema as plain values."""
    definitions: dict[str, Any] = {}
    schema = _fields(Job, definitions)
    schema["properties"]["sources"] = {
        "description": schema["properties"]["sources"].get("description", ""),
        "anyOf": [
            {"type": "string", "description": "A table of sources: a CSV or Parquet file"},
            _table(definitions),
            {
                "type": "object",
                "minProperties": 1,
                "not": _IS_TABLE,
                "additionalProperties": _hint(Source, definitions),
            },
        ],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An Overlord job",
        **schema,
        "$defs": dict(sorted(definitions.items())),
    }


_IS_TABLE = {"properties": {"table": {"type": "string"}}, "required": ["table"]}


def _table(definitions: dict[str, Any]) -> dict[str, Any]:
    """Sources that a table lists, and options of all of them."""
    options = {name: _hint(hint, definitions, is_size=name.endswith("_bytes")) for name, hint in table_options().items()}
    return {"type": "object", "properties": options, "required": ["table"], "additionalProperties": False}


def _source(definitions: dict[str, Any]) -> dict[str, Any]:
    """A source: its path, or its options with those of all readers, and its reader."""
    readers = {name: kind for name, kind in public_values().items() if inspect.isclass(kind) and issubclass(kind, Source)}
    readers.pop("Source")
    merged: dict[str, Any] = {"reader": {"anyOf": [{"enum": sorted(readers)}, _IMPORTED]}}
    for kind in readers.values():
        for name, option in _fields(kind, definitions)["properties"].items():
            known = merged.setdefault(name, option)
            if known != option and option not in known.get("anyOf", ()):
                merged[name] = {"anyOf": [*known.get("anyOf", [known]), option]}
    # A reader of the user's own has options that nobody knows here.
    own = {"properties": {"reader": _IMPORTED}, "required": ["reader"]}
    ours = {"properties": merged, "additionalProperties": False}
    return {"anyOf": [{"type": "string"}, {"type": "object", "if": own, "then": {}, "else": ours}]}


def _fields(target: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    notes = _docstrings(target)
    properties = {}
    for name, hint in options_of(target).items():
        found = _hint(hint, definitions, is_size=name.endswith("_bytes"))
        properties[name] = {"description": notes[name], **found} if name in notes else found
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if needed := needed_options(target):
        schema["required"] = needed
    return schema


def _hint(hint: Any, definitions: dict[str, Any], *, is_size: bool = False) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for kind in alternatives(hint):
        if (one := _kind(kind, definitions, is_size)) is None:
            return {}  # anything
        if one not in found:
            found.append(one)
    return found[0] if len(found) == 1 else {"anyOf": found}


def _kind(kind: Any, definitions: dict[str, Any], is_size: bool) -> dict[str, Any] | None:
    if kind is Any:
        return None
    if offered := choices(kind):
        return {"enum": list(offered)}
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind is pa.DataType or is_path(kind):
        return {"type": "string"}
    if is_listing(kind):
        entries = entry_hints(kind)
        return {"type": "array", "items": _hint(entries[0], definitions)}
    if is_mapping(kind):
        return {"type": "object", "additionalProperties": _hint(entry_hints(kind)[1], definitions, is_size=is_size)}
    if is_source(kind):
        if "source" not in definitions:
            definitions["source"] = {}  # a blend has sources
            definitions["source"] = _source(definitions)
        return {"$ref": "#/$defs/source"}
    if is_value(kind) and not is_named(kind):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}  # it may contain itself
            definitions[kind.__name__] = _fields(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    return _named(definitions)


_PLAIN: dict[Any, dict[str, Any]] = {
    int: _COUNT,
    float: {"type": ["number", "string"]},
    bool: {"type": "boolean"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}


def _named(definitions: dict[str, Any]) -> dict[str, Any]:
    """A class or function by its name, alone or with options."""
    if "named" not in definitions:
        definitions["named"] = {}
        values = {name: value for name, value in public_values().items() if _is_offered(value)}
        options = {name: {"anyOf": [_options(value, definitions), {"type": "string"}]} for name, value in values.items()}
        definitions["named"] = {
            "description": "A name of Overlord or module:function; with options as {name: {option: value}}",
            "anyOf": [
                {"enum": sorted(values)},
                _IMPORTED,
                {
                    "type": "object",
                    "minProperties": 1,
                    "maxProperties": 1,
                    "properties": options,
                    "patternProperties": {_IMPORTED["pattern"]: {}},
                    "additionalProperties": False,
                },
            ],
        }
    return {"$ref": "#/$defs/named"}


_MAKERS = ("overlord.arrange", "overlord.chunks", "overlord.steering.cost_file")


def _is_offered(value: Any) -> bool:
    if inspect.isclass(value):
        return not issubclass(value, (Source, Exception)) and "__call__" in dir(value)
    return callable(value) and value.__module__.startswith(_MAKERS)


def _options(value: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    return _fields(value, definitions) if is_value(value) or not inspect.isclass(value) else {"type": "object"}


@cache
def _docstrings(target: Any) -> dict[str, str]:
    """Field to the docstring below it, of a class and those that it extends."""
    found: dict[str, str] = {}
    for base in reversed(target.__mro__) if inspect.isclass(target) else ():
        try:
            body: Any = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):
            continue
        for pair in pairwise(body.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found
