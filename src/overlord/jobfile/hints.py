"""What the fields of declared classes and the options of functions may be, from their annotations."""

from __future__ import annotations

import collections.abc
import inspect
import os
import sys
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, cast, get_args, get_origin

import pyarrow as pa

import overlord
from overlord.errors import SpecError

_NAMES: dict[str, Any] = {
    **{name: getattr(collections.abc, name) for name in collections.abc.__all__},
    **{name: getattr(typing, name) for name in ("Any", "Literal", "Protocol", "TypedDict")},
    "os": os,
    "pa": pa,
}
"""What annotations name that their modules import for type checkers alone."""


@cache
def options_of(target: Any) -> dict[str, Any]:
    """Option to annotation, of a class that is a dataclass or of a function."""
    if inspect.isclass(target) and is_dataclass(target):
        named = {each.name for each in fields(target) if each.init and not each.name.startswith("_")}
        found: dict[str, Any] = {}
        for base in reversed(target.__mro__):
            space = vars(sys.modules.get(base.__module__, types))
            for name, written in vars(base).get("__annotations__", {}).items():
                if name in named:
                    found[name] = _evaluated(written, space)
        return {name: found.get(name, Any) for name in _in_order(target, named)}
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return {}
    space = getattr(inspect.unwrap(target), "__globals__", {})
    return {p.name: Any if p.annotation is p.empty else _evaluated(p.annotation, space) for p in parameters}


def _in_order(target: Any, named: set[str]) -> list[str]:
    return [each.name for each in fields(target) if each.name in named]


def takes_any_option(target: Any) -> bool:
    """Whether the options of a function are not known."""
    try:
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return True


def needed_options(target: Any) -> list[str]:
    """Options without a default."""
    if is_dataclass(target):
        return [e.name for e in fields(target) if e.init and e.default is MISSING and e.default_factory is MISSING]
    return [p.name for p in inspect.signature(target).parameters.values() if p.default is p.empty and p.kind in (1, 3)]


def _evaluated(annotation: Any, space: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, {**_NAMES, **_public(), **space})
    except (NameError, TypeError, AttributeError):
        return Any


@cache
def _public() -> dict[str, Any]:
    from overlord.arrange.cost import CostFunction
    from overlord.arrange.hdp.spread import Mode
    from overlord.declare.mesh import Axis, StageFields

    extra = {"CostFunction": CostFunction, "Mode": Mode, "Axis": Axis, "StageFields": StageFields}
    flat = {name: getattr(overlord, name) for name in ("Batch", "Mixture", "Mesh", "Source", "Strategy", "Skip")}
    return {**extra, **flat, "Offload": overlord.hdp.Offload, "Pipeline": overlord.pipelines.Pipeline}


def alternatives(hint: Any) -> list[Any]:
    """The members of a union, also of unions in it; of anything else itself. A text is its evaluation."""
    if isinstance(hint, typing.ForwardRef):
        return alternatives(_evaluated(hint.__forward_arg__, {}))
    if isinstance(hint, str):
        return alternatives(_evaluated(hint, {}))
    if get_origin(hint) in (Union, types.UnionType):
        return [each for part in get_args(hint) for each in alternatives(part)]
    return [hint]


def is_named(hint: Any) -> bool:
    """Whether values are written by name: functions, protocols, and classes that are not plain values."""
    if hint is Any or get_origin(hint) is collections.abc.Callable or hint is collections.abc.Callable:
        return True
    if not inspect.isclass(hint) or hint in (str, int, float, bool, bytes, type(None), pa.DataType):
        return False
    if (
        get_origin(hint) is not None
        or is_path(hint)
        or issubclass(hint, (collections.abc.Mapping, collections.abc.Sequence))
    ):
        return False
    return not is_dataclass(hint) or getattr(hint, "_is_protocol", False)


def is_source(hint: Any) -> bool:
    """Whether values are sources, which are written as in `sources`."""
    return inspect.isclass(hint) and issubclass(hint, overlord.Source)


def is_path(hint: Any) -> bool:
    """Whether values are paths, as text."""
    return get_origin(hint) is os.PathLike or (inspect.isclass(hint) and hasattr(hint, "__fspath__"))


def is_listing(hint: Any) -> bool:
    origin = get_origin(hint) or hint
    listings = (tuple, list, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
    return origin in listings


def is_mapping(hint: Any) -> bool:
    return (get_origin(hint) or hint) in (dict, collections.abc.Mapping)


def entry_hints(hint: Any) -> tuple[Any, ...]:
    """The types of the entries of a list (one, or one for each place of a tuple) or of the keys and values of a mapping."""
    arguments = tuple(each for each in get_args(hint) if each is not ...)
    if is_mapping(hint):
        return arguments if len(arguments) == 2 else (str, Any)
    return arguments or (Any,)


def choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def arrow_type(text: str) -> pa.DataType:
    """A type as Arrow prints it: int32, string, list<int32>."""
    text = text.strip()
    for kind, make in (("list", pa.list_), ("large_list", pa.large_list)):
        if text.startswith(f"{kind}<") and text.endswith(">"):
            return make(arrow_type(text[len(kind) + 1 : -1].removeprefix("item: ").removeprefix("element: ")))
    try:
        return cast("Any", pa).type_for_alias(text)
    except ValueError:
        raise SpecError(f"{text!r} is not the name of an Arrow type such as int64, string or list<int32>") from None
