"""Saved states as JSON files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from overlord.errors import StateError
from overlord.saved_state import State, contents_of, sealed

_MOST_BYTES = 256 << 20  # a state of a thousand sources has 200 kB


def read_state(path: Path) -> State:
    try:
        num_bytes = path.stat().st_size
        if path.is_dir():
            raise StateError(f"{path} is a folder; name the state file in it, or leave out --resume to start anew")
        if num_bytes > _MOST_BYTES:
            raise StateError(f"{path} has {num_bytes >> 20:,} MiB, and a state has some kB: it is another file")
        text = path.read_bytes()
    except FileNotFoundError:
        raise StateError(f"there is no state file {path}; leave out --resume to start from the beginning") from None
    except OSError as error:
        raise StateError(f"the state file {path} cannot be read: {error}") from None
    if not text.strip():
        raise StateError(f"{path} is empty: whatever wrote it was stopped; use an older state")
    try:
        return sealed(contents_of(text))
    except StateError as error:
        raise StateError(f"{path} is not a state that can be used: {error}") from None


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the contents of a state, for people and other programs to read. Whole or not at all: a state that was there
    stays until the new one is on disk."""
    draft = _draft(path)
    try:
        with draft.open("wb") as file:
            file.write(orjson.dumps(contents_of(state)))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise StateError(f"the state cannot be written to {path}: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Said before a run, not after it. The folder is tried out: its permissions alone do not tell."""
    way_out = "name a file in a folder that you may write to"
    if path.is_dir():
        raise StateError(f"the state cannot be written to {path}: it is a folder; {way_out}")
    draft = _draft(path)
    try:
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise StateError(f"the state cannot be written to {path}: {error.strerror}; {way_out}") from error


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
