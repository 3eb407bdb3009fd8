"""The files that verbs read and write: job files, saved states and tokens."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import re
import stat
import sys
import traceback
from typing import TYPE_CHECKING, Any

import cloudpickle
import orjson

import overlord
from overlord.checkpoint.form import contents_of, seal
from overlord.declare.job import Job
from overlord.errors import OverlordError, SpecError, StateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import ModuleType

    from overlord.messages import State

_NO_NAME = re.compile(r"module 'overlord' has no attribute '(\w+)'")
_NO_OPTION = re.compile(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'")


def load_job(path: Path) -> Job:
    """Execute a job file and return its `job`. The file's folder is on sys.path, as if Python ran the file."""
    if not path.is_file():
        raise SpecError(f"there is no job file {path}; a job is a Python file with `job = overlord.Job(...)`")
    module = _execute(path)
    job = getattr(module, "job", None)
    if job is None:
        raise SpecError(f"{path} declares no `job`; it must say `job = overlord.Job(...)`")
    if not isinstance(job, Job):
        raise SpecError(f"`job` in {path} must be an overlord.Job, it is of type {type(job).__name__}")
    return job


def _execute(path: Path) -> ModuleType:
    # The name that `import` would use: names of transforms contain it, and the fingerprint of a saved state contains those.
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
    """A hint at the right spelling, if the error is about a misspelt name or option of ours."""
    misspelt = _NO_NAME.search(str(error)) or _NO_OPTION.search(str(error))
    if misspelt is None:
        return ""
    if misspelt.re is _NO_NAME:
        known: Sequence[str] = [name for name in dir(overlord) if not name.startswith("_")]
    else:
        kind = getattr(overlord, misspelt[1], None)
        known = () if kind is None else tuple(inspect.signature(kind).parameters)
    close = difflib.get_close_matches(misspelt[misspelt.lastindex or 1], known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _location(path: Path, error: Exception) -> str:
    here = str(path.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == here]
    return f"{path}, line {lines[-1]}" if lines else str(path)


_MOST_BYTES = 256 << 20  # a state of a thousand sources has 200 kB


def read_state(path: Path) -> State:
    """Read and check a saved state."""
    try:
        num_bytes = path.stat().st_size
        if path.is_dir():
            raise StateError(
                f"{path} is a folder; name the state file in it, or leave out --resume to start from the beginning"
            )
        if num_bytes > _MOST_BYTES:
            raise StateError(f"{path} has {num_bytes >> 20:,} MiB, and a state has some kB: it is another file")
        text = path.read_bytes()
    except FileNotFoundError:
        raise StateError(f"there is no state file {path}; leave out --resume to start from the beginning") from None
    except OSError as error:
        raise StateError(f"the state file {path} cannot be read: {error}") from None
    if not text.strip():
        raise StateError(f"{path} is empty: its writer was stopped; use an older state")
    try:
        return seal(contents_of(text))
    except StateError as error:
        raise StateError(f"{path} is not a state that can be used: {error}") from None


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state as JSON, atomically: an older state in the file stays until the new one is on disk."""
    draft = _draft_path(path)
    try:
        with draft.open("wb") as file:
            file.write(orjson.dumps(contents_of(state)))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise StateError(f"the state cannot be written to {path}: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Fail before a run rather than after it. Creates a file to find out, because permissions alone do not tell."""
    way_out = "name a file in a folder that you may write to"
    if path.is_dir():
        raise StateError(f"the state cannot be written to {path}: it is a folder; {way_out}")
    draft = _draft_path(path)
    try:
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise StateError(f"the state cannot be written to {path}: {error.strerror}; {way_out}") from error


def _draft_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def read_token(path: Path) -> str:
    """Read the token of a service, and warn if other users may read the file."""
    try:
        token = path.read_text("ascii").strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise SpecError(f"the token cannot be read from {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SpecError(f"{path} holds no token: a token is printable ASCII; `openssl rand -hex 32` makes one") from None
    if not token:
        raise SpecError(f"{path} holds no token: it is empty; `openssl rand -hex 32 > {path}` makes one")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        sys.stderr.write(f"warning: other users of this machine may read the token: chmod 600 {path}\n")
    return token
