"""Reads code objects: their source without comments and formatting, the names they refer to, and the variables they change.

Source is found by the file and line of a code object. It is used only if the file still compiles to that code object.
Otherwise the bytecode is used, which is as exact but differs between versions of Python.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import itertools
import linecache
import sys
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_ADDING = {"add", "append", "appendleft", "extend", "insert", "setdefault", "update"}
_TAKING = {"clear", "discard", "pop", "popitem", "remove"}


def digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Written:
    """The variables that are working state of a function: they start empty, and only the function writes them."""

    kept_globals: frozenset[str] = frozenset()
    kept_cells: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _File:
    """A file of source code: its syntax tree, and the code objects that it compiles to."""

    tree: ast.Module
    codes: frozenset[CodeType]


class CodeTexts:
    """Finds the source of code objects, and caches it."""

    def __init__(self) -> None:
        self._files: dict[str, _File | None] = {}
        self._nodes: dict[CodeType, ast.AST | None] = {}
        self._bodies: dict[CodeType, str] = {}
        self._names: dict[CodeType, set[tuple[str, tuple[str, ...]]]] = {}
        self._parts: dict[CodeType, dict[str, frozenset[str]]] = {}
        self._imports: dict[CodeType, set[str]] = {}
        self._written: dict[CodeType, Written] = {}
        self._kept_attributes: dict[type, frozenset[str]] = {}

    def body(self, code: CodeType) -> str:
        """The digest of a function's source if that is available and unchanged, else of its bytecode."""
        if code not in self._bodies:
            node = self._node(code)
            self._bodies[code] = digest_of(_code_text(code) if node is None else _function_text(node))
        return self._bodies[code]

    def file(self, path: str) -> str:
        found = self._file(path)
        return "unreadable" if found is None else digest_of(_tree_text(found.tree))

    def codes(self, path: str) -> frozenset[CodeType]:
        """The code objects of a file; none if it cannot be read."""
        found = self._file(path)
        return frozenset() if found is None else found.codes

    def names(self, code: CodeType) -> set[tuple[str, tuple[str, ...]]]:
        """The globals that code refers to, each with the attributes taken from it: ("np", ("where",))."""
        if code not in self._names:
            self._names[code] = _names(code)
        return self._names[code]

    def parts(self, code: CodeType) -> dict[str, frozenset[str]]:
        """The globals and closure variables of which code uses only attributes, with these: {"args": {"length"}}."""
        if code not in self._parts:
            self._parts[code] = _parts(code)
        return self._parts[code]

    def imports(self, code: CodeType) -> set[str]:
        if code not in self._imports:
            self._imports[code] = _arguments_of(code, "IMPORT_NAME")
        return self._imports[code]

    def written(self, code: CodeType, scope: Mapping[str, Any]) -> Written:
        """The globals and closure variables that are working state of a function."""
        if code not in self._written:
            self._written[code] = self._find_written(code, scope)
        return self._written[code]

    def _find_written(self, code: CodeType, scope: Mapping[str, Any]) -> Written:
        node, file = self._node(code), self._file(code.co_filename)
        if node is None or file is None:
            return Written(frozenset(_arguments_of(code, "STORE_GLOBAL")))
        around = _cells_that_begin_empty(file.tree, node) if code.co_freevars else set()
        return Written(
            kept_globals=frozenset(self._changed_by(code, scope) & _begin_empty(file.tree.body)),
            kept_cells=frozenset(_changed_names(node) & around & set(code.co_freevars)),
        )

    def _changed_by(self, code: CodeType, scope: Mapping[str, Any]) -> set[str]:
        """The globals that are changed by a function, or by a function of the same file that it calls."""
        reached: set[CodeType] = set()
        changed: set[str] = set()
        todo = [code]
        while todo:
            each = todo.pop()
            if each in reached or each.co_filename != code.co_filename:
                continue
            reached.add(each)
            node = self._node(each)
            changed |= _arguments_of(each, "STORE_GLOBAL") if node is None else _changed_names(node)
            called = (scope.get(name) for name, _ in self.names(each))
            todo += [function.__code__ for function in called if isinstance(function, FunctionType)]
        return changed

    def kept_attributes(self, kind: type) -> frozenset[str]:
        """The attributes that start empty and are written by `__call__`, or by a method that it calls."""
        if kind not in self._kept_attributes:
            self._kept_attributes[kind] = self._find_kept_attributes(kind)
        return self._kept_attributes[kind]

    def _find_kept_attributes(self, kind: type) -> frozenset[str]:
        methods = {
            name: member.fget if isinstance(member, property) else member
            for base in reversed(kind.__mro__)
            for name, member in vars(base).items()
        }
        nodes = {
            name: node
            for name, method in methods.items()
            if isinstance(method, FunctionType) and (node := self._node(method.__code__)) is not None
        }
        reached, todo = set(), ["__call__"]
        written: set[str] = set()
        while todo:
            name = todo.pop()
            if name in reached or name not in nodes:
                continue
            reached.add(name)
            uses, changes = _attributes_of_self(nodes[name])
            todo += uses
            written |= changes
        empty = {name for name, member in methods.items() if _is_empty_value(member)}
        if is_dataclass(kind):
            empty = {each.name for each in fields(kind) if _is_private(each) and _has_empty_default(each)}
        else:
            empty |= self._members_that_begin_empty(kind)  # the running code may have filled them since
        for name in ("__init__", "__post_init__"):
            if name in nodes:
                empty |= _attributes_that_begin_empty(nodes[name])
        return frozenset(written & empty)

    def _members_that_begin_empty(self, kind: type) -> set[str]:
        found = set()
        for base in kind.__mro__:
            codes = [member.__code__ for member in vars(base).values() if isinstance(member, FunctionType)]
            node = next((node for code in codes if (node := self._node(code)) is not None), None)
            file = self._file(codes[0].co_filename) if node is not None else None
            for each in ast.walk(file.tree) if file is not None else ():
                if isinstance(each, ast.ClassDef) and each.name == base.__name__ and node in each.body:
                    found |= _begin_empty(each.body)
        return found

    def _node(self, code: CodeType) -> ast.AST | None:
        if code not in self._nodes:
            file = self._file(code.co_filename)
            self._nodes[code] = None if file is None or code not in file.codes else _node_of(file.tree, code)
        return self._nodes[code]

    def _file(self, path: str) -> _File | None:
        if path not in self._files:
            linecache.checkcache(path)
            lines = linecache.getlines(path)
            try:
                tree = ast.parse("".join(lines))
                codes = frozenset(all_codes(compile(tree, path, "exec", dont_inherit=True)))
                self._files[path] = _File(tree, codes) if lines else None
            except (SyntaxError, ValueError):
                self._files[path] = None
        return self._files[path]


def _node_of(tree: ast.Module, code: CodeType) -> ast.AST | None:
    """The definition that a code object was compiled from."""
    spans = [(line, column) for line, _, column, _ in code.co_positions() if line is not None and column is not None]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            body = node.body
            start, end = (body.lineno, body.col_offset), (body.end_lineno or 0, body.end_col_offset or 0)
            inside = [span for span in spans if start <= span < end]
            if node.lineno == code.co_firstlineno and inside:
                found.append((len(inside), start, node))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                found.append((0, (node.lineno, node.col_offset), node))
    if not found:
        return None
    # Of several lambdas in one line, the one that contains all positions; of nested ones, the innermost.
    return max(found, key=lambda entry: (entry[0], entry[1]))[2]


def _function_text(node: ast.AST) -> str:
    """A function without its name, decorators and defaults, which are described as values."""
    if isinstance(node, ast.Lambda):
        return f"{_arguments(node.args)}: return {_tree_text(node.body)}"
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    body = _without_docstring(node.body)
    only = body[0] if len(body) == 1 else None
    if isinstance(only, ast.Return) and only.value is not None:
        return f"{_arguments(node.args)}: return {_tree_text(only.value)}"
    return (
        f"{type(node).__name__ if isinstance(node, ast.AsyncFunctionDef) else ''}{_arguments(node.args)}: {_tree_text(body)}"
    )


def _arguments(arguments: ast.arguments) -> str:
    listed = [f"{kind}:{arg.arg}" for kind in ("posonlyargs", "args", "kwonlyargs") for arg in getattr(arguments, kind)]
    return ",".join([*listed, *(f"{k}:{a.arg}" for k in ("vararg", "kwarg") if (a := getattr(arguments, k)) is not None)])


_NOT_CODE = frozenset({"ctx", "annotation", "returns", "type_comment", "type_params", "kind", "simple", "type_ignores"})


def _tree_text(node: Any) -> str:
    """A syntax tree as text that is the same in every version of Python. Empty fields are left out, because newer versions
    add fields, which are empty for older code."""
    if isinstance(node, list):
        return f"[{' '.join(_tree_text(entry) for entry in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return ""
    parts = []
    for name in node._fields:
        part = getattr(node, name, None)
        if name in _NOT_CODE or part == [] or (part is None and not isinstance(node, ast.Constant)):
            continue
        if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            part = _without_docstring(node.body)
        if isinstance(node, ast.JoinedStr):  # some versions of Python end an f-string with an empty constant
            part = [each for each in node.values if not (isinstance(each, ast.Constant) and each.value == "")]
        parts.append(f"{name}={_tree_text(part)}")
    return f"{type(node).__name__}({' '.join(parts)})"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return body[1:] if is_text else body


def _code_text(code: CodeType) -> str:
    """Bytecode as text, for code without source. It differs between versions of Python."""
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(f"<{_code_text(constant)}>")
        else:
            constants.append(repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant))
    parts = (code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars, code.co_flags)
    return repr((sys.version_info[:2], parts))


def _names(code: CodeType) -> set[tuple[str, tuple[str, ...]]]:
    found: set[tuple[str, tuple[str, ...]]] = set()
    for each in all_codes(code):
        name: str | None = None
        attributes: tuple[str, ...] = ()
        for instruction in dis.get_instructions(each):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name is not None:
                attributes = (*attributes, str(instruction.argval))
                continue
            if name is not None:
                found |= {(name, attributes), (name, ())}
                name = None
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                name, attributes = str(instruction.argval), ()
    return found


def _parts(code: CodeType) -> dict[str, frozenset[str]]:
    taken: dict[str, set[str]] = {}
    whole: set[str] = set()
    for each in all_codes(code):
        for first, then in itertools.pairwise(dis.get_instructions(each)):
            if first.opname not in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"):
                continue
            if then.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                taken.setdefault(str(first.argval), set()).add(str(then.argval))
            else:
                whole.add(str(first.argval))
    return {name: frozenset(attributes) for name, attributes in taken.items() if name not in whole}


def _arguments_of(code: CodeType, opname: str) -> set[str]:
    return {
        str(instruction.argval)
        for each in all_codes(code)
        for instruction in dis.get_instructions(each)
        if instruction.opname == opname and instruction.argval
    }


def all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from all_codes(constant)


def _changed_names(node: ast.AST) -> set[str]:
    """The names whose values code changes: assigned under `global` or `nonlocal`, or changed in place."""
    outer = {name for each in ast.walk(node) if isinstance(each, (ast.Global, ast.Nonlocal)) for name in each.names}
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, (ast.Store, ast.Del)) and each.id in outer:
            found.add(each.id)
        found |= _root_names(_changed_place(each))
    return found


def _root_names(place: ast.AST | None) -> set[str]:
    while isinstance(place, (ast.Subscript, ast.Attribute)):
        place = place.value
    return {place.id} if isinstance(place, ast.Name) else set()


def _changed_place(node: ast.AST) -> ast.AST | None:
    """The expression that a statement or call changes in place: `x` in `x[k] = v`, `x.a = v`, `x.append(v)`."""
    if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING | _TAKING:
        return node.func.value
    return None


def _attributes_of_self(node: ast.AST) -> tuple[set[str], set[str]]:
    """The attributes of its first argument that a method uses, and those that it changes."""
    arguments = getattr(getattr(node, "args", None), "args", [])
    if not arguments:
        return set(), set()
    owner = arguments[0].arg
    uses, changes = set(), set()
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == owner:
            uses.add(each.attr)
            if isinstance(each.ctx, (ast.Store, ast.Del)):
                changes.add(each.attr)
        place = _changed_place(each)
        while isinstance(place, (ast.Subscript, ast.Attribute)):
            if isinstance(place, ast.Attribute) and isinstance(place.value, ast.Name) and place.value.id == owner:
                changes.add(place.attr)
            place = place.value
    return uses, changes


def _begin_empty(body: Iterable[ast.AST]) -> set[str]:
    """The names to which a body assigns empty values only."""
    nodes = list(_outside_functions(body))
    empty, full = set(), set()
    for targets, value in _assignments(nodes):
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        (empty if _is_empty(value) else full).update(names)
    return empty - full - {name for node in nodes for name in _root_names(_changed_place(node))}


def _outside_functions(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield node
            yield from _outside_functions(ast.iter_child_nodes(node))


def _cells_that_begin_empty(tree: ast.Module, inner: ast.AST) -> set[str]:
    """The variables of enclosing functions that start empty."""
    place = range(getattr(inner, "lineno", 0), (getattr(inner, "end_lineno", 0) or 0) + 1)
    around = [
        each
        for each in ast.walk(tree)
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
        and each is not inner
        and each.lineno <= place[0] <= place[-1] <= (each.end_lineno or 0)
    ]
    return {name for each in around for name in _begin_empty(each.body)}


def _attributes_that_begin_empty(init: ast.AST) -> set[str]:
    empty, full = set(), set()
    for targets, value in _assignments(ast.walk(init)):
        names = {t.attr for t in targets if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name)}
        (empty if _is_empty(value) else full).update(names)
    changed = {place.attr for each in ast.walk(init) if isinstance(place := _changed_place(each), ast.Attribute)}
    return empty - full - changed


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[list[ast.expr], ast.expr]]:
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield [node.target], node.value


def _is_empty(node: ast.expr) -> bool:
    """None, 0, "", {}, [], {"seen": 0}, dict(), OrderedDict(), defaultdict(list), ..."""
    if isinstance(node, ast.Constant):
        return not node.value
    if isinstance(node, (ast.Dict, ast.List, ast.Tuple)):
        return all(map(_is_empty, node.values if isinstance(node, ast.Dict) else node.elts))
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("defaultdict", "local") or (
        name in ("dict", "list", "set", "OrderedDict", "Counter", "deque", "WeakKeyDictionary", "WeakValueDictionary")
        and not node.args
        and all(keyword.arg == "maxlen" for keyword in node.keywords)
    )


def _is_empty_value(value: Any) -> bool:
    return value is None or (type(value) in (bool, int, float, str, list, dict, set) and not value)


def _is_private(each: Any) -> bool:
    return each.name.startswith("_") or not each.init


def _has_empty_default(each: Any) -> bool:
    if each.default_factory is not MISSING:
        return each.default_factory in (dict, list, set)
    return _is_empty_value(each.default)
