"""Describes values for the fingerprint of a state, by their types and contents, never by their addresses.

A description is a short text. Two values that behave alike have the same description in every process, whatever the hash
seed. Two values that differ in anything listed here have different ones:

    a number, text, bytes, enum, date, pattern, dtype   its value
    a list, tuple, dict, set                            its entries; dicts and sets without their order
    an array, tensor, Arrow table, random generator     its type, shape and bytes
    a path, or a text that names a file                 the contents of the file
    a tokenizer                                         its vocabulary, merges and rules
    a function of the user's                            its code without comments, docstrings, annotations and formatting;
                                                        defaults, closure, and the globals it refers to, and so on
    a function of an installed package                  its name, code, defaults and closure, and the package's version
    a function of Python or Overlord                    its name; Overlord's without the path of its module
    a class                                             likewise: its methods and attributes, or its name
    an object                                           its `identity()` if it has one, else its class and attributes
    an object of compiled code                          its pickle
    options (argparse, a dataclass) of which code only
    takes attributes                                    these attributes
    a lock, thread, pool, logger or progress bar        its type or name

The working state of a function or a `__call__` is left out: a global, attribute or closure variable that starts empty
(None, {}, 0, {"seen": 0}, ...) and that only the running code writes. It is a cache or a counter. Any other value whose
contents cannot be inspected is listed in `unseen`.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import importlib.util
import inspect
import itertools
import logging
import os
import pathlib
import re
import sys
import threading
import types
import uuid
import weakref
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.checkpoint.arrays import array_text, arrow_text, bytes_digest, torch_text
from overlord.checkpoint.classes import (
    PLAIN,
    attributes_of,
    home_of,
    is_cached,
    is_compiled,
    is_ours,
    is_own,
    module_name,
    own_getstate,
    stable_name,
    version_of,
)
from overlord.checkpoint.source_code import CodeTexts, Written, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_LONGEST = 120  # a longer description is replaced by its digest
_MOST_FILE_BYTES = 1 << 30
_MOST_NAMES = 1000  # a larger container, or folder, is not checked for names of files
_FEW = 64  # descriptions of smaller containers are not cached
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_OVERLORD_PATH = re.compile(r"(?<![\w.])overlord\.(?:[a-z_]\w*\.)*")

_BY_REPR = (
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    range,
    slice,
    type(Ellipsis),
    type(NotImplemented),
)
_STATELESS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Event,
    threading.Condition,
    threading.Semaphore,
    threading.Barrier,
    threading.Thread,
    threading.local,
    concurrent.futures.Executor,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
)
_ONLOOKERS = ("tqdm", "rich.progress", "wandb", "torch.utils.tensorboard")  # packages that show or record progress
_BUILTIN_METHODS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodWrapperType,
)
_CYTHON = ("cython_function_or_method", "fused_cython_function")


class Describer:
    """Describes the values of one job. Values that they share are described once.

    `unseen` has a line for each value whose contents are left out of its description. `packages` has the versions of the
    installed packages that the described code belongs to or refers to.
    """

    def __init__(self) -> None:
        self.unseen: list[str] = []
        self.packages: dict[str, str] = {}
        self._roots: dict[int, str] = {}
        self._leaves: dict[int, str] = {}
        self._numbers: dict[int, int] = {}
        self._files: dict[str, str] = {}
        self._kept: list[Any] = []  # keeps described values alive, since the caches are keyed by id
        self._code = CodeTexts()

    def digest(self, value: Any, path: str) -> str:
        """The digest of a value's description. `path` is the value's place in the job, for `unseen`."""
        return digest_of(self.text(value, path))

    def text(self, value: Any, path: str) -> str:
        if isinstance(value, PLAIN):
            return self._any(value, path)
        if id(value) not in self._roots:
            self._numbers = {}
            try:
                self._roots[id(value)] = self._any(value, path)
            except Exception as error:  # noqa: BLE001 - an error in a foreign object must not keep a job from starting
                self._roots[id(value)] = self._opaque(value, path, f"which cannot be inspected: {error!r:.200}")
            self._kept.append(value)
        return self._roots[id(value)]

    def _any(self, value: Any, path: str) -> str:
        kind = type(value)
        if kind in PLAIN:
            return self._text_or_file(value) if kind is str else _short(repr(value))
        if id(value) in self._leaves:
            return self._leaves[id(value)]
        if kind in (list, tuple, set, frozenset, dict) and (plain := _plain_entries(value)) is not None:
            if len(value) > _FEW:
                self._leaves[id(value)] = plain
                self._kept.append(value)
            return plain
        outer, self._numbers = self._numbers, {}
        leaf = self._leaf(value, path)
        self._numbers = outer
        if leaf is not None:
            self._leaves[id(value)] = _short(leaf)
            self._kept.append(value)
            return self._leaves[id(value)]
        if id(value) in self._numbers:  # described before, or a cycle
            return f"#{self._numbers[id(value)]}"
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        return _short(self._composite(value, path))

    def _leaf(self, value: Any, path: str) -> str | None:
        """Describes a value that holds no others, or is digested as a whole; None for any other value."""
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}={self._any(value.value, path)}"
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            return array_text(value)
        if isinstance(value, (np.dtype, np.ufunc)):
            return f"{type(value).__name__} {value}"
        if isinstance(value, (bytearray, memoryview)):
            return f"{type(value).__name__} {bytes_digest(value)}"
        if isinstance(value, pathlib.PurePath):
            return self._path(value, path)
        if isinstance(value, re.Pattern):
            return f"pattern {value.pattern!r} {value.flags}"
        if type(value) in _BY_REPR:
            return _ADDRESS.sub("", repr(value))
        if isinstance(value, _STATELESS):
            return type(value).__qualname__
        if isinstance(value, logging.Logger):
            return f"logger {value.name}"
        return self._leaf_of_package(value, path)

    def _leaf_of_package(self, value: Any, path: str) -> str | None:
        """Progress bars, Arrow data, tensors and tokenizers, which are recognised by their package or methods."""
        module = module_name(type(value))
        if f"{module}.".startswith(tuple(f"{name}." for name in _ONLOOKERS)):
            return type(value).__qualname__
        top = module.partition(".")[0]
        if top == "pyarrow":
            return arrow_text(value)
        if top == "torch":
            return torch_text(value)
        if _is_hugging_face(value):
            return self._hugging_face(value, path)
        to_str = getattr(value, "to_str", None)
        if callable(to_str) and not isinstance(value, type) and is_compiled(type(value)):  # a tokenizer, whole
            self._note_package(module)
            return f"{type(value).__qualname__} {digest_of(str(to_str()))}"
        return None

    def _composite(self, value: Any, path: str) -> str:
        if isinstance(value, (type, types.GenericAlias)):
            return self._class(value, path)
        if isinstance(value, ModuleType):
            return self._module(value)
        identity = getattr(value, "identity", None)
        if callable(identity):
            return self._identity(value, identity, path)
        for describe in (self._callable, self._container):
            if (found := describe(value, path)) is not None:
                return found
        return self._object(value, path)

    def _callable(self, value: Any, path: str) -> str | None:
        if isinstance(value, types.MethodType):
            return self._method(value, path)
        if isinstance(value, FunctionType):
            return self._function(value, path)
        if isinstance(value, _BUILTIN_METHODS) or type(value).__name__ in _CYTHON:
            return self._builtin(value, path)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return f"partial({self._list_text(parts, path)})"
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None and type(value).__module__ == "functools":  # lru_cache, without the results that it holds
            return f"{type(value).__qualname__}({self._any(wrapped, path)})"
        return None

    # Containers

    def _container(self, value: Any, path: str) -> str | None:
        if isinstance(value, types.MappingProxyType) or type(value) is dict:
            return self._mapping(value, path)
        if isinstance(value, np.ndarray):  # of Python objects
            return f"array {value.dtype} {value.shape} {self._list_text(value.ravel().tolist(), path)}"
        if type(value) in (list, tuple):
            return f"{type(value).__name__}[{self._list_text(value, path)}]"
        if type(value) in (set, frozenset):
            return f"{type(value).__name__}{{{', '.join(self._sorted_texts(value, path))}}}"
        return None

    def _list_text(self, values: Iterable[Any], path: str) -> str:
        return ", ".join(self._any(entry, f"{path}[{i}]") for i, entry in enumerate(values))

    def _sorted_texts(self, values: Iterable[Any], path: str) -> list[str]:
        """Independent descriptions: the order of a set is arbitrary, so no entry may depend on those before it."""
        found = []
        for entry in values:
            outer, self._numbers = self._numbers, dict(self._numbers)
            found.append(self._any(entry, f"{path}{{}}"))
            self._numbers = outer
        return sorted(found)

    def _mapping(self, values: Mapping[Any, Any], path: str) -> str:
        keys = sorted(((self._any(key, f"{path}[{key!r:.40}]"), key) for key in values), key=lambda entry: entry[0])
        entries = (f"{text}: {self._any(values[key], f'{path}[{key!r:.40}]')}" for text, key in keys)
        return f"{{{', '.join(entries)}}}"

    # Files

    def _text_or_file(self, text: str) -> str:
        if not _may_name_file(text) or not os.path.isfile(text):
            return _short(repr(text))
        return f"file {os.path.basename(text)!r} {self._file(pathlib.Path(text), repr(text))}"

    def _path(self, value: pathlib.PurePath, path: str) -> str:
        here = pathlib.Path(value)
        if here.is_file():
            return f"file {self._file(here, path)}"
        if here.is_dir():
            return self._folder(here, path)
        return f"path {str(value)!r}"  # does not exist, perhaps a file to be written

    def _folder(self, folder: pathlib.Path, path: str) -> str:
        inside = sorted(entry for entry in itertools.islice(folder.rglob("*"), _MOST_NAMES + 1) if entry.is_file())
        num_bytes = sum(entry.stat().st_size for entry in inside)
        if len(inside) > _MOST_NAMES or num_bytes > _MOST_FILE_BYTES:
            self._note_unseen(path, "is a folder with too many files to be read: its contents do not count")
            return f"path {str(folder)!r}"
        return "folder " + digest_of(repr([(str(f.relative_to(folder)), self._file(f, path)) for f in inside]))

    def _file(self, file: pathlib.Path, path: str) -> str:
        real = os.path.realpath(file)
        if real not in self._files:
            size = os.path.getsize(real)
            if size > _MOST_FILE_BYTES:
                self._note_unseen(path, f"is a file of {size >> 20:,} MiB: of its contents only the size counts")
                return f"{size} bytes"
            with open(real, "rb") as opened:
                self._files[real] = hashlib.file_digest(opened, _hasher).hexdigest()
        return self._files[real]

    # Code

    def _function(self, value: FunctionType, path: str) -> str:
        registry = getattr(value, "registry", None)
        if isinstance(registry, types.MappingProxyType) and value.__code__.co_filename == functools.__file__:
            return f"singledispatch({self._mapping(registry, path)})"  # without its cache of implementations
        home = home_of(value.__module__, value.__code__.co_filename)
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        written = self._code.written(value.__code__, value.__globals__)
        parts = {
            "defaults": value.__defaults__,
            "kwdefaults": value.__kwdefaults__,
            "attributes": {name: v for name, v in vars(value).items() if name != "__wrapped__"} or None,
        }
        text = [f"{name}={self._any(part, path)}" for name, part in parts.items() if part is not None]
        for name, cell in cells.items():
            kept = name in written.kept_cells
            used = self._code.parts(value.__code__).get(name)
            text.append(f"{name} is {'kept' if kept else self._cell(cell, used, f'{path}.{name}')}")
        if home == "python":
            return f"function {stable_name(value.__module__, value.__qualname__)}({', '.join(text)})"
        text.append(self._code.body(value.__code__))
        if home == "installed":
            self._note_package(value.__module__)
            return f"function {value.__module__}.{value.__qualname__}({', '.join(text)})"
        text += self._globals(value, written, path)
        return f"function({', '.join(text)})"

    def _cell(self, cell: types.CellType, used: frozenset[str] | None, path: str) -> str:
        try:
            return self._used_text(cell.cell_contents, used, path)
        except ValueError:  # not assigned yet
            return "empty"

    def _used_text(self, value: Any, used: frozenset[str] | None, path: str) -> str:
        """Describes a value that code refers to. Of options only the attributes that the code takes count: a script's `args`
        also say where to resume from."""
        if used is None or not used <= _option_names(value):
            return self._any(value, path)
        found = (f"{name}={self._any(getattr(value, name), f'{path}.{name}')}" for name in sorted(used))
        return f"options({', '.join(found)})"

    def _globals(self, function: FunctionType, written: Written, path: str) -> list[str]:
        found = []
        for name, attributes in sorted(self._code.names(function.__code__)):
            if name not in function.__globals__:
                continue  # a builtin, whose name is in the code, or a name that is not defined yet
            value = function.__globals__[name]
            label = ".".join((name, *attributes))
            if name in written.kept_globals:
                found.append(f"{name} is kept")
            elif isinstance(value, ModuleType):
                found.append(f"{label}={self._of_module(value, attributes, f'{path}->{label}')}")
            elif not attributes:
                used = self._code.parts(function.__code__).get(name)
                found.append(f"{name}={self._used_text(value, used, f'{path}->{name}')}")
        for name in sorted(self._code.imports(function.__code__)):
            found.append(f"import {name} {self._import_text(name)}")
        return found

    def _of_module(self, module: ModuleType, attributes: tuple[str, ...], path: str) -> str:
        """Describes an attribute of a module that code uses; for a module of the user's, the value of the attribute."""
        value: Any = module
        for name in attributes:
            if not isinstance(value, ModuleType) or home_of(value.__name__, getattr(value, "__file__", None)) != "user":
                break
            if not hasattr(value, name):
                return "missing"
            value = getattr(value, name)
        return self._any(value, path)

    def _module(self, module: ModuleType) -> str:
        if home_of(module.__name__, getattr(module, "__file__", None)) == "installed":
            self._note_package(module.__name__)
        package, _, name = module.__name__.rpartition(".")
        return f"module {stable_name(package, name) if is_ours(package) else module.__name__}"

    def _import_text(self, name: str) -> str:
        """Describes a module that a function imports when it runs; for a module of the user's, the code of its file."""
        top = name.partition(".")[0]
        if home_of(top, None) == "python":
            return ""
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            spec = None
        origin = None if spec is None else spec.origin
        if home_of(top, origin) == "installed":
            self._note_package(top)
            return ""
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        return "missing" if spec is None or spec.origin is None else self._code.file(spec.origin)

    def _method(self, value: types.MethodType, path: str) -> str:
        owner = value.__self__
        function = getattr(value.__func__, "__qualname__", type(value.__func__).__qualname__)
        if isinstance(owner, type):
            return f"method {function} of {self._any(owner, path)}"
        return f"method {value.__func__.__name__} of {self._any(owner, f'{path}.__self__')}"

    def _builtin(self, value: Any, path: str) -> str:
        owner = getattr(value, "__self__", None)
        name = getattr(value, "__qualname__", value.__name__)
        if owner is None or isinstance(owner, ModuleType):
            module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", "")
            if home_of(module or "builtins", None) == "installed":
                self._note_package(module)
            return f"builtin {stable_name(module, name)}"
        return f"builtin {value.__name__} of {self._any(owner, f'{path}.__self__')}"

    def _class(self, value: Any, path: str) -> str:
        if isinstance(value, types.GenericAlias):
            return f"class {_OVERLORD_PATH.sub('overlord.', repr(value))}"
        module = module_name(value)
        home = home_of(module, getattr(sys.modules.get(module), "__file__", None))
        name = stable_name(module, value.__qualname__)
        if home != "user":
            if home == "installed":
                self._note_package(module)
            return f"class {name}"
        if issubclass(value, enum.Enum):
            members = {str(key): member.value for key, member in value.__members__.items()}
            return f"enum {value.__qualname__} {self._mapping(members, path)}"
        bases = ", ".join(self._any(base, path) for base in value.__bases__ if base is not object)
        text = [f"class {value.__qualname__}({bases})"]
        if issubclass(value, tuple) and hasattr(value, "_fields"):
            text.append(repr(getattr(value, "_fields")))  # noqa: B009 - a named tuple's
        kept = self._code.kept_attributes(value)
        for key, member in sorted(vars(value).items()):
            if is_own(value, key, member) and key not in kept:
                text.append(f"{key}={self._member(member, f'{path}.{key}')}")
        return "; ".join(text)

    def _member(self, member: Any, path: str) -> str:
        if isinstance(member, (staticmethod, classmethod)):
            return f"{type(member).__name__} {self._any(member.__func__, path)}"
        if isinstance(member, property):
            return f"property {self._list_text([f for f in (member.fget, member.fset, member.fdel) if f is not None], path)}"
        if isinstance(member, functools.cached_property):
            return f"property {self._any(member.func, path)}"
        if isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            return "slot"
        return self._any(member, path)

    # Objects

    def _identity(self, value: Any, identity: Callable[[], Any], path: str) -> str:
        text = str(identity())
        if _ADDRESS.search(text):
            self._note_unseen(
                path, f"is a {type(value).__qualname__} whose identity() names an address in memory, which is cut out"
            )
            text = _ADDRESS.sub("", text)
        return f"{type(value).__qualname__}: {text}"

    def _object(self, value: Any, path: str) -> str:
        kind = type(value)
        text = [self._any(kind, path)]
        if is_compiled(kind):
            return self._pickle_text(value, path)
        if isinstance(value, dict):
            text.append(self._mapping(value, path))
        elif isinstance(value, (list, tuple)):
            text.append(self._list_text(value, path))
        elif isinstance(value, (set, frozenset)):
            text += self._sorted_texts(value, path)
        elif isinstance(value, PLAIN):
            base: Any = next(base for base in PLAIN if isinstance(value, base))
            text.append(repr(base(value)))
        getstate = own_getstate(kind)
        if getstate is not None:
            return f"object {'; '.join(text)} {self._any(getstate(value), path)}"
        kept = self._kept_attributes(value)
        for name, attribute in sorted(attributes_of(value).items()):
            if name not in kept and not is_cached(kind, name) and _changes_rows(kind, name):
                text.append(f"{name}={self._any(_as_declared(value, name, attribute, self), f'{path}.{name}')}")
        return f"object {'; '.join(text)}"

    def _kept_attributes(self, value: Any) -> frozenset[str]:
        """The attributes that are working state of `__call__`."""
        kind = type(value)
        if not isinstance(getattr(kind, "__call__", None), FunctionType):  # noqa: B004 - its type matters, not whether it is callable
            return frozenset()
        if home_of(kind.__module__, getattr(sys.modules.get(kind.__module__), "__file__", None)) == "python":
            return frozenset()
        return self._code.kept_attributes(kind)

    def _pickle_text(self, value: Any, path: str) -> str:
        """Describes an object of compiled code by its pickle."""
        try:
            parts = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - a foreign object may raise anything
            return self._opaque(value, path, "whose contents cannot be seen")
        if isinstance(parts, str):
            return f"object {type(value).__qualname__} {parts}"
        made, arguments, state, items, pairs = (*parts, None, None, None)[:5]
        described = [self._any(made, path), self._any(arguments, path), self._any(state, path)]
        described += [] if items is None else [self._list_text(items, path)]
        described += [] if pairs is None else [self._mapping(dict(pairs), path)]
        self._note_package(module_name(type(value)))
        return f"object {type(value).__qualname__}({'; '.join(described)})"

    def _hugging_face(self, value: Any, path: str) -> str:
        """Describes a tokenizer of transformers, without padding and truncation: each call sets these in the backend."""
        import json

        rules = json.loads(value.backend_tokenizer.to_str())
        rules = {name: part for name, part in rules.items() if name not in ("padding", "truncation")}
        names = ("chat_template", "special_tokens_map", "padding_side", "truncation_side", "model_max_length")
        options = [self._any(getattr(value, name, None), f"{path}.{name}") for name in names]
        self._note_package(module_name(type(value)))
        return f"{type(value).__qualname__} {digest_of(json.dumps(rules, sort_keys=True))} {', '.join(options)}"

    def _opaque(self, value: Any, path: str, why: str) -> str:
        name = stable_name(module_name(type(value)), type(value).__qualname__)
        self._note_unseen(path, f"is a {name}, {why}")
        return f"opaque {name}"

    def _note_unseen(self, path: str, why: str) -> None:
        self.unseen.append(f"{path} {why}")

    def _note_package(self, module: str | None) -> None:
        top = (module or "").partition(".")[0]
        if top and top not in self.packages and home_of(top, getattr(sys.modules.get(top), "__file__", None)) == "installed":
            self.packages[top] = version_of(top)

    def note_used(self, package: str) -> None:
        """Note the version of a package that may not be imported yet."""
        with suppress(ImportError):  # it will be used, and says its version sooner than its metadata are found
            importlib.import_module(package)
        if package not in self.packages and (version := version_of(package)):
            self.packages[package] = version


def _option_names(value: Any) -> set[str]:
    """The names of a script's options, parsed or in a dataclass. Empty for any other value."""
    kind = type(value)
    parsed = getattr(sys.modules.get("argparse"), "Namespace", None)  # a script without options has not imported it
    if kind in (parsed, types.SimpleNamespace):
        return set(vars(value))
    if not is_dataclass(kind) or hasattr(kind, "identity") or kind.__getattribute__ is not object.__getattribute__:
        return set()
    if home_of(kind.__module__, getattr(sys.modules.get(kind.__module__), "__file__", None)) != "user":
        return set()
    names = {each.name for each in fields(kind)} & set(attributes_of(value))
    return {name for name in names if not isinstance(inspect.getattr_static(kind, name, None), property)}


def declared_options(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults: an option that a later release adds changes nothing."""
    found = {}
    for each in fields(value):
        option = getattr(value, each.name)
        default = each.default if each.default is not MISSING else MISSING
        if default is MISSING and each.default_factory is not MISSING:
            default = each.default_factory()
        if default is MISSING or not _is_equal(option, default):
            found[each.name] = option
    return found


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except ValueError:  # arrays: the truth of == is ambiguous
        return False


class _Missing:
    """Placeholder for an option that has its default."""

    def identity(self) -> str:
        return "default"


_DEFAULT = _Missing()


def _as_declared(owner: Any, name: str, attribute: Any, describer: Describer) -> Any:
    """An attribute as its owner interprets it: a name of a tokenizer file as a path, a default as `_DEFAULT`."""
    kind = type(owner)
    if not is_ours(kind.__module__) or not is_dataclass(owner):
        return attribute
    if kind.__name__ == "Tokenize" and name == "encoding" and isinstance(attribute, (str, pathlib.PurePath)):
        is_file = str(attribute).endswith(".json") or os.sep in str(attribute)
        describer.note_used("tokenizers" if is_file else "tiktoken")
        return pathlib.Path(attribute) if is_file else attribute
    return attribute if name in declared_options(owner) else _DEFAULT


def _changes_rows(kind: type, name: str) -> bool:
    """Whether rows depend on a field. Overlord's own transforms mark those that choose only how rows are made."""
    if kind.__module__.partition(".")[0] != "overlord" or not is_dataclass(kind):
        return True
    return all(each.metadata.get("changes_rows", True) for each in fields(kind) if each.name == name)


def _plain_entries(value: Any) -> str | None:
    """Describes a container of plain values; None where an entry is another kind of value, or names a file."""
    entries = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    if not all(type(entry) in PLAIN for entry in entries):
        return None
    if len(entries) <= _MOST_NAMES and any(type(e) is str and _may_name_file(e) and os.path.isfile(e) for e in entries):
        return None
    if isinstance(value, dict):
        return _short(f"{{{sorted(f'{key!r}: {entry!r}' for key, entry in value.items())}}}")
    listed = sorted(map(repr, entries)) if isinstance(value, (set, frozenset)) else entries
    return _short(f"{type(value).__name__} {listed!r}")


def _may_name_file(text: str) -> bool:
    return 0 < len(text) < 1024 and "\0" not in text and "\n" not in text and (os.sep in text or "." in text[1:])


def _is_hugging_face(value: Any) -> bool:
    if isinstance(value, type) or not hasattr(type(value), "backend_tokenizer"):
        return False
    return callable(getattr(value.backend_tokenizer, "to_str", None))


def _hasher() -> Any:
    return hashlib.blake2b(digest_size=8)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:24]}~{digest_of(text)}"
