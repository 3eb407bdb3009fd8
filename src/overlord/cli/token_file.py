"""Tokens in files: they should not stand on a command line, where others see them."""

from __future__ import annotations

from pathlib import Path

from overlord.errors import SpecError


def read_token(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"the token cannot be read from {path}: {error}") from error
