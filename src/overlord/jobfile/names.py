"""Names in job files: the public names of Overlord, and `module:name` for anything else that can be imported."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from dataclasses import is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import overlord
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable

_IMPORTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SPACES = ("strategies", "policies", "formats", "vision", "pipelines", "hdp", "balancers")
"""The modules of public names, besides the flat ones, that a job may need."""
_FACTORIES = ("strategies",)
"""Modules whose functions return the value that a job needs."""


def is_imported(text: str) -> bool:
    """Whether a text is `module:name`."""
    return _IMPORTED.fullmatch(text) is not None


@cache
def public_values() -> dict[str, Any]:
    """Name to value, of everything public that a job may be made of: `Tokenize`, `policies.BadRows`, `strategies.plain`.
    Names in modules also stand alone, where no other has them."""
    found: dict[str, Any] = {}
    for space in _SPACES:
        module = getattr(overlord, space)
        names = getattr(module, "__all__", [name for name in dir(module) if not name.startswith("_")])
        found |= {f"{space}.{name}": getattr(module, name) for name in names}
    alone: dict[str, list[str]] = {}
    for name in found:
        alone.setdefault(name.partition(".")[2], []).append(name)
    found |= {name: found[full[0]] for name, full in alone.items() if len(full) == 1 or name == "hdp"}
    flat = {name: getattr(overlord, name) for name in overlord.__all__}
    return found | {name: value for name, value in flat.items() if not inspect.ismodule(value)}


def is_public(name: str) -> bool:
    return name in public_values()


def value_named(name: str) -> Any:
    """The value with a name; SpecError for one that is not there, with the nearest."""
    if not is_imported(name):
        if name in public_values():
            return public_values()[name]
        raise SpecError(
            f"there is no {name!r} in Overlord{nearest(name, public_values())}; a function of your own is module:function"
        )
    module, _, attribute = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except ImportError as error:
        raise SpecError(f"{name!r}: the module {module!r} cannot be imported: {error}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise SpecError(f"{name!r}: {module} has no {attribute!r}{nearest(part, vars(value))}")
        value = getattr(value, part)
    return value


def name_for(value: Any) -> str | None:
    """The name by which a job file can say a class or function; None where there is none."""
    for name, known in public_values().items():
        if known is value:
            return name
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualified, str) or "<" in qualified or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return f"{module}:{qualified}" if found is value else None


def is_called(name: str, value: Any) -> bool:
    """Whether a name without options stands for the result of calling it: our classes, and functions that make a value."""
    if is_imported(name):
        return False
    if inspect.isclass(value):
        return True
    return any(public_values().get(f"{space}.{name.rpartition('.')[2]}") is value for space in _FACTORIES)


def nearest(name: str, known: Iterable[str]) -> str:
    """The question whether another name was meant; nothing where none is like it."""
    known = [each for each in known if not each.startswith("_")]
    swapped = [each for each in known if sorted(each) == sorted(name)]  # letters typed in another order
    close = swapped or difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def is_value(kind: Any) -> bool:
    """Whether a class is written as a mapping of its fields."""
    return inspect.isclass(kind) and is_dataclass(kind)
