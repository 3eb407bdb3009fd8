"""Finds what the code of transforms reads when it runs, for rows that are kept: in a cache, or by `overlord prepare`.

The fingerprint of a state sees the files that values name. Kept rows must not outlive the files that only code names either:
`json.load(open("vocab.json"))` within a function. Saved states do not depend on them, so that they stay valid.
"""

from __future__ import annotations

import dis
import itertools
import os
import pathlib
import re
from typing import TYPE_CHECKING, Any

from overlord.checkpoint.classes import home_of
from overlord.checkpoint.description import Describer
from overlord.checkpoint.source_code import all_codes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType, FunctionType

_LONGEST_NAME = 1024  # characters
_MOST_FOLDERS = 32  # that the literals of a function are looked up in
_UNSEEN_NAMES = {
    "environ": "reads os.environ",
    "environb": "reads os.environb",
    "getenv": "calls os.getenv",
    "getenvb": "calls os.getenvb",
    "import_module": "calls importlib.import_module",
    "__import__": "calls __import__",
    "run_path": "calls runpy.run_path",
    "run_module": "calls runpy.run_module",
    "argv": "reads sys.argv",
}
"""What code may refer to whose result neither its text nor its values tell."""


class ReadsDescriber(Describer):
    """A describer that notes what the user's code reads. Its descriptions are those of `Describer`.

    `reads` has the digest of each file that a literal in the code of a function names, by the literal. A literal names a
    file from the current folder, from the folder of the function's own file, or from a folder that the function names.
    `unseen` also has the functions that read the environment or import a module by a name that is a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[str, str] = {}
        self._followed: set[str] = set()

    @property
    def reads_text(self) -> tuple[str, ...]:
        """The files that code names, as texts; empty if there are none."""
        return tuple(f"{name!r} is {digest}" for name, digest in sorted(self.reads.items()))

    def _function(self, value: FunctionType, path: str) -> str:
        if home_of(value.__module__, value.__code__.co_filename) == "user":
            self._note_reads([value.__code__], value.__code__.co_filename, path, _held_by(value))
            self._note_imports([value.__code__], str(value.__globals__.get("__package__") or ""))
        return super()._function(value, path)

    def _note_imports(self, codes: Iterable[CodeType], package: str) -> None:
        """Notes the modules of the user that code of a package imports when it runs."""
        imported = {name for code in codes for each in all_codes(code) for name in _imports(each, package)}
        for name in sorted(imported):
            for module, file in _files_of_module(name):
                self._follow(module, file)

    def _follow(self, module: str, file: str) -> None:
        """Notes what a module that is imported when code runs reads, and the modules of the user that it imports in turn."""
        if file in self._followed:
            return
        self._followed.add(file)
        codes = self._code.codes(file)
        self._note_reads(codes, file, f"module {module}", ())
        self.reads[f"import {module}"] = self._code.file(file)
        is_package = os.path.basename(file) == "__init__.py"
        self._note_imports(codes, module if is_package else module.rpartition(".")[0])

    def _note_reads(self, codes: Iterable[CodeType], file: str, path: str, held: Iterable[Any]) -> None:
        """Notes the reads of code of a file that refers to these values."""
        literals: set[str] = set()
        for code in codes:
            for each in all_codes(code):
                literals |= set(_texts_in(each.co_consts))
                for name in sorted(_UNSEEN_NAMES.keys() & set(each.co_names)):
                    self._note_once(path, _UNSEEN_NAMES[name])
        for value in held:
            if (name := _unseen_name_of(value)) is not None:
                self._note_once(path, _UNSEEN_NAMES[name])
        named = sorted(text for text in literals if _may_be_name(text))
        for text, found in _files_named(named, _folders(file, named, held)):
            try:
                self.reads[text] = self._file(found, path)
            except OSError as error:
                self._note_unseen(path, f"names the file {text!r}, which cannot be read: {error.strerror}")

    def _note_once(self, path: str, what: str) -> None:
        line = f"{what}, whose result cannot be seen ahead"
        if f"{path} {line}" not in self.unseen:
            self._note_unseen(path, line)


def _held_by(function: FunctionType) -> list[Any]:
    """The values that a function refers to by name: globals, closure variables, and defaults."""
    names = {name for code in all_codes(function.__code__) for name in code.co_names}
    found = [function.__globals__[name] for name in sorted(names) if name in function.__globals__]
    found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return found


def _unseen_name_of(value: Any) -> str | None:
    """The name of an environment, or function of imports, that code refers to under a name of its own."""
    import importlib

    known = {"environ": os.environ, "getenv": os.getenv, "import_module": importlib.import_module, "__import__": __import__}
    return next((name for name, each in known.items() if value is each), None)


def _texts_in(constants: Iterable[Any]) -> Iterator[str]:
    for each in constants:
        if isinstance(each, (str, bytes)):
            yield os.fsdecode(each)
        elif isinstance(each, (tuple, frozenset)):
            yield from _texts_in(each)


def _may_be_name(text: str) -> bool:
    return 0 < len(text) < _LONGEST_NAME and not re.search(r"[\0\n]", text) and text.strip("./\\") != ""


def _folders(file: str, names: Iterable[str], held: Iterable[Any]) -> list[str]:
    """The folders that names are looked up in: the current one, that of the code, and those that the code refers to."""
    first = ["", os.path.dirname(os.path.abspath(file))] if os.path.isfile(file) else [""]
    texts = [os.fspath(each) for each in held if isinstance(each, (str, pathlib.PurePath))]
    named = [text for text in texts if _may_be_name(text)]
    named = [text if os.path.isdir(text) else os.path.dirname(text) for text in named]
    named += [os.path.join(folder, name) for folder in first for name in names]
    return list(dict.fromkeys([*first, *filter(os.path.isdir, named)]))[:_MOST_FOLDERS]


def _files_named(names: Iterable[str], folders: Iterable[str]) -> Iterator[tuple[str, pathlib.Path]]:
    """The files that names are those of, in any of the folders; a name may begin with what divides it from a folder."""
    found: dict[str, list[str]] = {}
    for text, folder in itertools.product(names, folders):
        forms = dict.fromkeys((text, text.lstrip("/")) if folder else (text,))
        for path in (os.path.realpath(os.path.join(folder, os.path.expanduser(form))) for form in forms):
            others = found.setdefault(text, [])
            if os.path.isfile(path) and path not in others:
                yield (f"{text} {len(others)}" if others else text), pathlib.Path(path)
                others.append(path)


def _imports(code: CodeType, package: str) -> Iterator[str]:
    """The full names that code imports: modules, and what is taken from them, which may be modules too."""
    before: list[Any] = [None, None]  # an import is preceded by its level and the names that it takes
    for instruction in dis.get_instructions(code):
        if instruction.opname == "EXTENDED_ARG":
            continue
        if instruction.opname == "IMPORT_NAME":
            level, taken = before
            name = str(instruction.argval)
            if isinstance(level, int) and level > 0:
                base = package.split(".")[: len(package.split(".")) - level + 1]
                name = ".".join([*base, *([name] if name else [])])
            yield name
            if isinstance(taken, tuple):
                yield from (f"{name}.{each}" for each in taken if each != "*")
        before = [before[1], instruction.argval]


def _files_of_module(name: str) -> list[tuple[str, str]]:
    """The file of a module of the user, and those of the packages that it is in; none for other modules."""
    import importlib.util

    found: list[tuple[str, str]] = []
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        each = ".".join(parts[:i])
        if not each or home_of(each, None) == "python":
            return []
        try:
            spec = importlib.util.find_spec(each)
        except (ImportError, ValueError):
            return found
        if spec is None or home_of(each, spec.origin) != "user":
            return found
        if spec.origin is not None and os.path.isfile(spec.origin):
            found.append((each, spec.origin))
        if (
            spec.submodule_search_locations is None
        ):  # no package: what follows is no module, and looking would import this one
            return found
    return found
