"""Job files: Python files that declare `job = overlord.Job(...)`."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import cloudpickle

import overlord
from overlord.errors import OverlordError, SpecError
from overlord.spec import Job

_NO_NAME = re.compile(r"module 'overlord' has no attribute '(\w+)'")
_NO_OPTION = re.compile(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'")


def load_job(path: Path) -> Job:
    """The `job` that a file declares. The file's folder can be imported from, as if Python ran the file."""
    if not path.is_file():
        raise SpecError(f"there is no job file {path}; a job is a Python file with `job = overlord.Job(...)`")
    module = _executed(path)
    job = getattr(module, "job", None)
    if job is None:
        raise SpecError(f"{path} declares no `job`; it must say `job = overlord.Job(...)`")
    if not isinstance(job, Job):
        raise SpecError(f"`job` in {path} must be an overlord.Job, it is of type {type(job).__name__}")
    return job


def _executed(path: Path) -> ModuleType:
    # The name that `import` would give: it is part of the fingerprint of a saved state, through the names of transforms.
    name = path.stem
    found = sys.modules.get(name)
    if found is not None and getattr(found, "__file__", None) != str(path.resolve()):
        raise SpecError(f"a job file cannot be called {path.name}: a module {name!r} is in use; rename the file")
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise SpecError(f"a job is a Python file, and {path} does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except OverlordError as error:
        error.add_note(_place(path, error))
        raise
    except SyntaxError as error:
        raise SpecError(f"{path} is not Python: {error}") from error
    except Exception as error:
        told = f"{path} raised {type(error).__name__}: {error}{_nearest(error)} ({_place(path, error)})"
        raise SpecError(told) from error
    cloudpickle.register_pickle_by_value(module)  # worker processes cannot import it by its name
    return module


def _nearest(error: Exception) -> str:
    """The name of ours that was probably meant, where one was misspelt."""
    named = _NO_NAME.search(str(error)) or _NO_OPTION.search(str(error))
    if named is None:
        return ""
    if named.re is _NO_NAME:
        known: Sequence[str] = overlord.__all__
    else:
        kind = getattr(overlord, named[1], None)
        known = () if kind is None else tuple(inspect.signature(kind).parameters)
    close = difflib.get_close_matches(named[named.lastindex or 1], known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _place(path: Path, error: Exception) -> str:
    here = str(path.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == here]
    return f"{path}, line {lines[-1]}" if lines else str(path)
