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
    except orjson.JSONDecodeError as error:
        raise StateError(f"{path} is not a state: {error}; use an older one") from None


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Whole or not at all: a state that was there stays until the new one is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(orjson.dumps(state))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
