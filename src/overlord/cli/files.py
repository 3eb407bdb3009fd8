"""The files that verbs read and write besides job files: saved states and tokens."""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, Any

import orjson

from overlord.checkpoint.form import contents_of, seal
from overlord.errors import SpecError, StateError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from overlord.messages import State

_MOST_BYTES = 256 << 20  # a state of a thousand sources has 200 kB


def read_state(path: Path) -> State:
    """Read and check a saved state."""
    try:
        num_bytes = path.stat().st_size
        if path.is_dir():
            raise StateError(f"{path} is a folder; name the state file in it, or none to start from the beginning")
        if num_bytes > _MOST_BYTES:
            raise StateError(f"{path} has {num_bytes >> 20:,} MiB, and a state has some kB: it is another file")
        text = path.read_bytes()
    except FileNotFoundError:
        raise StateError(f"there is no state file {path}; name none to start from the beginning") from None
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
