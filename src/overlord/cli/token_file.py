"""Tokens in files: they should not stand on a command line, where others see them."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from overlord.errors import SpecError


def read_token(path: Path) -> str:
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
