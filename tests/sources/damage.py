"""Files that go bad, or are changed, behind the back of whoever listed them."""

import os
from pathlib import Path


def rewrite(path: Path, content: bytes) -> None:
    """Another content with the same modification time: what a failing disk does, and nobody can notice by looking."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path, content: bytes | None = None) -> None:
    """Another file under the same name, written a second later; of the same content unless given."""
    before, content = path.stat(), path.read_bytes() if content is None else content
    new = path.with_name("new file")
    new.write_bytes(content)
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    new.rename(path)
