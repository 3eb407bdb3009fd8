"""Saved states as JSON files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from overlord.errors import StateError


def read_state(path: Path) -> dict[str, Any]:
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise StateError(f"there is no state file {path}; leave out --resume to start from the beginning") from None
    except OSError as error:
        raise StateError(f"the state cannot be read from {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise StateError(f"{path} is not a state: {error}; use an older one") from None


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Whole or not at all: a state that was there stays until the new one is on disk."""
    draft = _draft(path)
    try:
        with draft.open("wb") as file:
            file.write(orjson.dumps(state))
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
