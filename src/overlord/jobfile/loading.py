"""Reads job files, Python and YAML, and changes what they declare by words such as `mesh.dp=8`."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

import overlord
from overlord.declare.job import Job
from overlord.declare.mesh import Mesh
from overlord.errors import OverlordError, SpecError
from overlord.jobfile.hints import alternatives, entry_hints, is_mapping, options_of
from overlord.jobfile.names import nearest
from overlord.jobfile.table import read_table
from overlord.jobfile.values import JobPlace, convert, count_of, parse_yaml, source_of, unknown_key

if TYPE_CHECKING:
    from types import ModuleType

    from overlord.declare.source import Source
    from overlord.jobfile.table import Catalog

YAML = (".yaml", ".yml")
_NO_NAME = re.compile(r"module 'overlord' has no attribute '(\w+)'")
_NO_OPTION = re.compile(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'")
_WAY_OUT = "a job is a Python file with `job = overlord.Job(...)`, or a YAML file with the fields of a Job"


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job file and the words that change what it declares."""

    path: Path
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.name

    def __str__(self) -> str:
        return str(self.path)


def load_job(path: str | os.PathLike[str] | JobFile, overrides: Sequence[str] = ()) -> Job:
    """The job of a Python file (its `job`) or a YAML file, changed by words such as `mesh.dp=8` or `batch.tokens=1M`.

    The folder of the file is on sys.path, as if Python ran the file. A job file is code: a YAML file may name any function
    that can be imported, as `module:function`.
    """
    if isinstance(path, JobFile):
        path, overrides = path.path, (*path.overrides, *overrides)
    path = Path(path)
    if not path.is_file():
        raise SpecError(f"there is no job file {path}; {_WAY_OUT}")
    job = _read_yaml(path) if path.suffix.lower() in YAML else _execute(path)
    for word in overrides:
        job = override(job, word)
    return job


# Python files


def _execute(path: Path) -> Job:
    module = _import_file(path)
    job = getattr(module, "job", None)
    if job is None:
        raise SpecError(f"{path} declares no `job`; it must say `job = overlord.Job(...)`")
    if not isinstance(job, Job):
        raise SpecError(f"`job` in {path} must be an overlord.Job, it is of type {type(job).__name__}")
    return job


def _import_file(path: Path) -> ModuleType:
    # The name that `import` would use: names of transforms contain it, and the fingerprint of a saved state contains those.
    name = path.stem
    found = sys.modules.get(name)
    if found is not None and getattr(found, "__file__", None) != str(path.resolve()):
        raise SpecError(f"a job file cannot be called {path.name}: a module {name!r} is in use; rename the file")
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise SpecError(f"a job is a Python file or a YAML file, and {path} does not end in .py, .yaml or .yml")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except OverlordError as error:
        error.add_note(_location(path, error))
        raise
    except SyntaxError as error:
        raise SpecError(f"{path} is not Python: {error}") from error
    except Exception as error:
        message = f"{path} raised {type(error).__name__}: {error}{_suggestion(error)} ({_location(path, error)})"
        raise SpecError(message) from error
    cloudpickle.register_pickle_by_value(module)  # worker processes cannot import it by its name
    return module


def _suggestion(error: Exception) -> str:
    """A hint at the right spelling, if the error is about a misspelt name or option of ours and gives none itself, as errors
    of Python 3.13 do for options."""
    misspelt = _NO_NAME.search(str(error)) or _NO_OPTION.search(str(error))
    if misspelt is None or "Did you mean" in str(error):
        return ""
    if misspelt.re is _NO_NAME:
        known: Sequence[str] = [name for name in dir(overlord) if not name.startswith("_")]
    else:
        kind = getattr(overlord, misspelt[1], None)
        known = () if kind is None else tuple(inspect.signature(kind).parameters)
    return nearest(misspelt[misspelt.lastindex or 1], known)


def _location(path: Path, error: Exception) -> str:
    here = str(path.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == here]
    return f"{path}, line {lines[-1]}" if lines else str(path)


# YAML files


def _read_yaml(path: Path) -> Job:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    before = set(sys.modules)
    try:
        job = job_from_plain(parse_yaml(path.read_text("utf-8"), str(path)), JobPlace(str(path)))
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text: {error}") from error
    for name in set(sys.modules) - before:
        # Worker processes may not find modules beside the job file.
        module = sys.modules[name]
        if (getattr(module, "__file__", None) or "").startswith(folder + os.sep):
            cloudpickle.register_pickle_by_value(module)
    return job


def job_from_plain(plain: Any, place: JobPlace) -> Job:
    """A job from the mapping that a YAML file has."""
    if not isinstance(plain, Mapping) or not plain:
        raise place.error(f"{_WAY_OUT}; this file has no fields")
    known = options_of(Job)
    options: dict[str, Any] = {}
    for key, value in plain.items():
        here = place.at(key, plain)
        if key not in known:
            raise JobPlace(here.file, (), here.line).error(unknown_key(key, "the job", known))
        if key == "sources" and (catalog := _catalog(value, here)) is not None:
            options = {"mixture": catalog.mixture(), **options, "sources": catalog.sources}
            continue
        options[str(key)] = _sources(value, here) if key == "sources" else convert(value, known[str(key)], here)
    if missing := [name for name in ("sources", "batch") if name not in options]:
        raise place.error(f"the job has no {missing[0]}, which every job needs")
    try:
        return Job(**options)
    except OverlordError as error:
        error.add_note(str(place))
        raise


def _catalog(value: Any, place: JobPlace) -> Catalog | None:
    """Sources that a table lists: its path, or {table: its path, option: value}; None for sources that stand in the file."""
    if isinstance(value, str):
        return read_table(value)
    if not isinstance(value, Mapping) or not isinstance(value.get("table"), str):
        return None
    known = table_options()
    options = {key: each for key, each in value.items() if key not in ("table", "transform")}
    if unknown := [key for key in options if key not in known]:
        raise place.at(unknown[0], value).error(unknown_key(unknown[0], place.path, known))
    if "transform" in value:
        options["transform"] = convert(value["transform"], known["transform"], place.at("transform", value))
    return read_table(value["table"], **options)


def table_options() -> dict[str, Any]:
    """Option to annotation, of what may stand beside the path of a table of sources."""
    options = {name: hint for name, hint in options_of(overlord.Parquet).items() if name != "paths"}
    return {"table": str, "groups": Mapping[str, float], **options}


def _sources(value: Any, place: JobPlace) -> Mapping[str, Source]:
    if not isinstance(value, Mapping) or not value:
        raise place.error(f"sources is a mapping of names to sources, got {value!r}")
    return {str(name): source_of(each, place.at(name, value)) for name, each in value.items()}


# Overrides


def is_override(word: str) -> bool:
    """Whether a word of a command line is `field.option=value`."""
    return re.match(r"[A-Za-z_][\w]*([.\[][^=]*)?=", word) is not None


def override(job: Job, word: str) -> Job:
    """The job with one field, or one option of a field, changed: `mesh.dp=8`, `sources.web.window=4`, `seed=3`."""
    path, equals, text = word.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise SpecError(f"an override is field=value or field.option=value, as mesh.dp=8, got {word!r}")
    place = JobPlace(word)
    plain = parse_yaml(text, word) if text.strip() else text
    try:
        changed = _changed(job, keys, Job, plain, place)
    except OverlordError as error:
        if word not in str(error):
            error.add_note(f"in the override {word}")
        raise
    assert isinstance(changed, Job)
    return changed


def _changed(value: Any, keys: Sequence[str], hint: Any, plain: Any, place: JobPlace) -> Any:
    """The value with what the keys lead to replaced."""
    if not keys:
        if isinstance(value, overlord.Source):
            return source_of(plain, place)
        return convert(plain, hint, place)
    key, rest = _key_of(value, keys)
    here = place.at(key)
    if isinstance(value, Mapping):
        hints = [entry_hints(each)[1] for each in alternatives(hint) if is_mapping(each)]
        known = {str(each): each for each in value}
        has_steps = any(isinstance(each, int) for each in value)
        step = count_of(key) if has_steps or (not known and key.isdigit()) else None
        key = key if step is None else str(step)
        if rest and key not in known:
            raise place.error(f"{place.path} has no {key!r}{nearest(key, known) or '.'} It has {', '.join(known)}")
        actual = known.get(key, key if step is None else step)
        found = _changed(value.get(actual), rest, hints[0] if len(hints) == 1 else Any, plain, here)
        return {**value, actual: found}
    if isinstance(value, (list, tuple)) and key.isdigit() and int(key) < len(value):
        entries = list(value)
        entries[int(key)] = _changed(entries[int(key)], rest, Any, plain, here)
        return tuple(entries)
    if value is None and rest is not None and (kinds := [each for each in alternatives(hint) if is_dataclass(each)]):
        return convert(_nested(keys, plain), kinds[0], place)
    if not is_dataclass(value):
        raise place.error(f"{place.path} is {value!r}, which has no option {key!r}; give all of it, as {place.path}=...")
    known_options = options_of(type(value))
    if key not in known_options:
        raise place.error(unknown_key(key, place.path, known_options))
    found = _changed(getattr(value, key), rest, known_options[key], plain, here)
    return _replaced(value, key, found)


def _key_of(value: Any, keys: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The first key and the rest. Names of sources may have dots, so the longest name that is there counts."""
    if isinstance(value, Mapping):
        for length in range(len(keys), 0, -1):
            name = ".".join(keys[:length])
            if name in {str(each) for each in value}:
                return name, keys[length:]
    return keys[0], keys[1:]


def _nested(keys: Sequence[str], plain: Any) -> Any:
    for key in reversed(keys):
        plain = {key: plain}
    return plain


def _replaced(value: Any, name: str, found: Any) -> Any:
    if isinstance(value, Mesh) and value.is_dp_open and name != "dp":
        # Left out, so that the size of the world still decides.
        others = {
            each.name: getattr(value, each.name) for each in fields(value) if each.init and each.name not in ("dp", name)
        }
        return Mesh(**others, **{name: found})
    if isinstance(value, Job) and name == "sources":
        same = set(found) == set(value.sources)
        return replace(value, sources=found) if same else replace(value, sources=found, mixture=None)
    if isinstance(value, overlord.Batch) and name in ("tokens", "samples"):
        other = "samples" if name == "tokens" else "tokens"
        return replace(value, **{name: found, other: None if found is not None else getattr(value, other)})
    return replace(value, **{name: found})
