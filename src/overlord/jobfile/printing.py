"""Prints a job as a YAML file or as a Python file. What a file cannot say (a lambda, some object) is an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.arrange.graph import deal_rows
from overlord.checkpoint.description import declared_options
from overlord.chunks.transforms.per_row import PerRow, per_row
from overlord.declare.mixture import Mixture
from overlord.declare.source import BadRows, Source
from overlord.errors import SpecError
from overlord.jobfile.hints import alternatives, entry_hints, is_listing, is_mapping, is_named, options_of
from overlord.jobfile.names import is_imported, name_for
from overlord.jobfile.values import reader_of
from overlord.sources.files import type_text

if TYPE_CHECKING:
    from overlord.declare.job import Job


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function by its name, called with options; None: not called."""

    name: str
    options: Mapping[str, Any] | None = None
    is_plain: bool = False
    """The field has this class, so that YAML needs no name."""
    is_source: bool = False


def as_yaml(job: Job) -> str:
    """The job as the text of a YAML file."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            del indentless  # lists in mappings are indented, too
            super().increase_indent(flow, False)

    plain = _yaml_value(Named("Job", _job_options(job), is_plain=True))
    return yaml.dump(plain, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True)


def as_python(job: Job) -> str:
    """The job as the text of a Python file."""
    named = Named("Job", _job_options(job))
    modules = sorted({name.partition(":")[0] for name in _imported_names(named)})
    imports = ["import overlord as ol", *(f"import {module}" for module in modules)]
    if "pa." in (body := _python(named, 0)):
        imports.insert(0, "import pyarrow as pa")
    return "\n".join(imports) + f"\n\njob = {body}\n"


def _job_options(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {"sources": {name: _source(source, f"sources.{name}") for name, source in job.sources.items()}}
    hints = options_of(type(job))
    default = Mixture({name: 1.0 for name in job.sources})
    for name, value in declared_options(job).items():
        if name == "sources" or (name == "mixture" and value == default) or value == ():
            continue
        if name == "mesh":
            options = {key: each for key, each in declared_options(value).items() if key in options_of(type(value))}
            options = {key: each for key, each in options.items() if key != "dp" or not value.is_dp_open}
            if options:
                found[name] = Named(
                    "Mesh", {key: _plain(each, f"mesh.{key}") for key, each in options.items()}, is_plain=True
                )
            continue
        found[name] = _described(value, hints.get(name, Any), name)
    return found


def _source(source: Source, path: str) -> Named:
    name = name_for(type(source))
    if name is None:
        raise _unsayable(path, source)
    hints = options_of(type(source))
    options: dict[str, Any] = {}
    if "paths" in hints:
        options["paths"] = _plain(source.paths, f"{path}.paths")  # type: ignore[attr-defined] - a reader of files
    for key, value in declared_options(source).items():
        if key in hints and key != "paths" and not (key == "on_bad_row" and value == BadRows()):
            given = _short_policy(value) if key == "on_bad_row" else value
            options[key] = _described(given, hints[key], f"{path}.{key}")
    return Named(name, options, is_source=True)


def _short_policy(value: BadRows) -> BadRows | str:
    return value.policy if value.path is None and value == BadRows(value.policy) else value


def _described(value: Any, hint: Any, path: str) -> Any:
    """A value as plain values and `Named`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if value is deal_rows:
        return Named("strategies.plain", {})
    declared = getattr(value, "declared_as", None)
    if declared is not None and callable(value):
        maker, options = declared
        hints = options_of(maker)
        given = {key: _described(each, hints.get(key, Any), f"{path}.{key}") for key, each in options.items()}
        return Named(str(name_for(maker)), given)
    if isinstance(value, PerRow):
        return _per_row(value, path)
    if isinstance(value, Mapping):
        inner = next((entry_hints(kind)[1] for kind in alternatives(hint) if is_mapping(kind)), Any)
        return {_plain(key, path): _described(each, inner, f"{path}.{key}") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        inner = next((entry_hints(kind)[0] for kind in alternatives(hint) if is_listing(kind)), Any)
        return type(value)(_described(each, inner, f"{path}[{i}]") for i, each in enumerate(value))
    if isinstance(value, Source):
        return _source(value, path)
    if is_dataclass(value) and not isinstance(value, type):
        name = name_for(type(value))
        if name is None:
            raise _unsayable(path, value)
        hints = options_of(type(value))
        given = {
            key: _described(each, hints[key], f"{path}.{key}")
            for key, each in declared_options(value).items()
            if key in hints
        }
        kinds = alternatives(hint)
        return Named(name, given, is_plain=type(value) in kinds and not any(map(is_named, kinds)))
    if isinstance(value, type) or callable(value):
        return _function(value, path)
    return _plain(value, path)


def _per_row(value: PerRow, path: str) -> Named:
    found = name_for(value) or _module_name_of(value)
    if found is not None:  # made by the decorator: the name is that of the transform
        return Named(found)
    options: dict[str, Any] = {"fn": _function(value.fn, path)}
    if value.types:
        options["types"] = {name: _plain(type_, path) for name, type_ in value.types.items()}
    return Named(str(name_for(per_row)), options)


def _module_name_of(value: PerRow) -> str | None:
    module, name = getattr(value.fn, "__module__", None), getattr(value.fn, "__qualname__", "")
    found = getattr(sys.modules.get(str(module)), name, None)
    return f"{module}:{name}" if found is value else None


def _function(value: Any, path: str) -> Named:
    if isinstance(value, partial):
        raise _unsayable(path, value)
    name = name_for(value)
    if name is not None:
        return Named(name)
    made = name_for(type(value))  # an object with the defaults of its class, such as ByteTokenizer()
    if made is not None and not is_imported(made) and not getattr(value, "__dict__", None):
        return Named(made, {})
    raise _unsayable(path, value)


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, pa.DataType):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(each, path) for each in value)
    raise _unsayable(path, value)


def _unsayable(path: str, value: Any) -> SpecError:
    return SpecError(
        f"{path} is {value!r}, which a job file cannot say: name functions at the top of a module, and keep other objects "
        "in a Python file"
    )


# YAML


def _yaml_value(value: Any) -> Any:
    if isinstance(value, pa.DataType):
        return str(value)
    if isinstance(value, Named):
        if value.is_source:
            return _source_value(value)
        if value.options is None:
            return value.name
        options = {key: _yaml_value(each) for key, each in value.options.items()}
        if value.is_plain:
            return options
        return {value.name: options} if options or is_imported(value.name) else value.name
    if isinstance(value, dict):
        return {key: _yaml_value(each) for key, each in value.items()}
    return [_yaml_value(each) for each in value] if isinstance(value, (list, tuple)) else value


def _source_value(value: Named) -> Any:
    options = {key: _yaml_value(each) for key, each in (value.options or {}).items()}
    return options if reader_of(options.get("paths")) == value.name else {"reader": value.name, **options}


# Python


def _python(value: Any, depth: int) -> str:
    indent = "    " * (depth + 1)
    if isinstance(value, Named):
        name = value.name.replace(":", ".") if is_imported(value.name) else f"ol.{value.name}"
        if value.options is None:
            return name
        return _bracketed(
            f"{name}(", [f"{key}={_python(each, depth + 1)}" for key, each in value.options.items()], ")", indent
        )
    if isinstance(value, dict):
        return _bracketed("{", [f"{key!r}: {_python(each, depth + 1)}" for key, each in value.items()], "}", indent)
    if isinstance(value, (list, tuple)):
        entries = [_python(each, depth + 1) for each in value]
        if isinstance(value, list):
            return _bracketed("[", entries, "]", indent)
        return f"({entries[0]},)" if len(entries) == 1 else _bracketed("(", entries, ")", indent)
    return type_text(value) if isinstance(value, pa.DataType) else repr(value)


_WIDTH = 100


def _bracketed(begin: str, entries: Sequence[str], end: str, indent: str) -> str:
    line = f"{begin}{', '.join(entries)}{end}"
    if len(line) + len(indent) <= _WIDTH and "\n" not in line:
        return line
    return begin + "".join(f"\n{indent}{entry}," for entry in entries) + f"\n{indent[:-4]}{end}"


def _imported_names(value: Any) -> set[str]:
    if isinstance(value, Named):
        own = {value.name} if is_imported(value.name) else set()
        return own.union(*map(_imported_names, (value.options or {}).values()))
    if isinstance(value, dict):
        return set().union(*map(_imported_names, value.values()))
    return set().union(*map(_imported_names, value)) if isinstance(value, (list, tuple)) else set()
