"""What a class is: where it comes from, which of its members its author wrote, and what its objects may hold."""

from __future__ import annotations

import functools
import inspect
import pathlib
import re
import sys
import types
from dataclasses import is_dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_OF_CLASSES = frozenset(
    """__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __annotate__ __annotate_func__
    __annotations_cache__ __dataclass_fields__ __dataclass_params__ __match_args__ __slots__ __hash__ __abstractmethods__
    _abc_impl __firstlineno__ __static_attributes__ __orig_bases__ __parameters__ __protocol_attrs__
    __non_callable_proto_members__ _is_protocol __type_params__""".split()  # noqa: SIM905 - two dozen quotes say no more
)
_MADE_BY_DATACLASS = frozenset(
    """__init__ __repr__ __eq__ __lt__ __le__ __gt__ __ge__ __setattr__ __delattr__ __hash__ __replace__ __getstate__
    __setstate__""".split()  # noqa: SIM905
)


def home_of(module: str | None, file: str | None) -> str:
    """Where a module comes from: "python" (Overlord too), "installed" or "user"."""
    top = (module or "").partition(".")[0]
    if is_ours(top) or (top in sys.stdlib_module_names and top != "__main__"):
        return "python"
    if file is None:
        file = getattr(sys.modules.get(module or ""), "__file__", None) or getattr(sys.modules.get(top), "__file__", None)
    parts = pathlib.PurePath(file).parts if file else ()
    return "installed" if "site-packages" in parts or "dist-packages" in parts else "user"


@functools.lru_cache(maxsize=256)
def version_of(package: str) -> str:
    """The major and minor version: a patch release does not change the stream."""
    version = getattr(sys.modules.get(package), "__version__", None)
    if not isinstance(version, str):
        import importlib.metadata  # with what reads mail: few packages do not say their version

        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""
    return ".".join(re.split(r"[.+]", version)[:2])


def is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "overlord"


def stable_name(module: str | None, name: str) -> str:
    """A name with its module's path. Of Overlord's own modules the path is left out: a file of ours that moves to another
    folder must not make saved states be refused. No two of our classes share a name, so none is mistaken for another."""
    return f"{'overlord' if is_ours(module) else module}.{name}"


def module_name(kind: type) -> str:
    """The module of a class. For types of compiled code `__module__` may be anything."""
    return kind.__module__ if isinstance(kind.__module__, str) else ""


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes in an object's `__dict__` and slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            mangled = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if hasattr(value, mangled):
                found[name] = getattr(value, mangled)
    return found


def is_own(kind: type, name: str, member: Any) -> bool:
    """Whether a member was written in the class, rather than generated (by dataclass, say)."""
    if name in _OF_CLASSES:
        return False
    if is_dataclass(kind) and name in _MADE_BY_DATACLASS and isinstance(member, FunctionType):
        return not (member.__code__.co_filename == "<string>" or member.__module__ == "dataclasses")
    if isinstance(member, FunctionType) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return member.__module__ == kind.__module__ and member.__code__.co_filename != "<string>"
    return type(member).__name__ != "_tuplegetter"


def is_compiled(kind: type) -> bool:
    """Whether objects of a class may hold more than attributes and the contents of builtin containers."""
    known = (object, dict, list, tuple, set, frozenset, *PLAIN)
    for base in kind.__mro__:
        if base in known or module_name(base) in ("typing", "abc", "collections.abc"):
            continue
        if isinstance(base.__dict__.get("__new__"), types.BuiltinFunctionType):
            return True
        if any(
            isinstance(member, (types.MethodDescriptorType, types.WrapperDescriptorType)) for member in vars(base).values()
        ):
            return True
    return False


def is_cached(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)


def own_getstate(kind: type) -> Callable[[Any], Any] | None:
    found = getattr(kind, "__getstate__", None)
    is_made = getattr(found, "__module__", None) == "dataclasses"
    return None if found is None or is_made or found is getattr(object, "__getstate__", None) else found
