"""Where the members of a tar archive lie: one walk over its headers, which touches nothing of the members' data.

Reads ustar, GNU (long names, sizes beyond 8 GiB) and pax (path, size). A damaged or cut archive is an error
with its place: the end of a tar cannot be told from a missing rest in any other way than that every header is
whole and where it should be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from overlord.data.storage import FileBytes
from overlord.errors import SourceError

BLOCK = 512
FIRST_BYTES = 12
ZEROS = bytes(BLOCK)
_REGULAR = b"\0" + b"07"
_UNREADABLE = {ord("S"): "a sparse file", ord("M"): "a part of a file on several volumes"}


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    offset: int
    num_bytes: int
    first: bytes
    """Its first bytes, up to twelve: they lie beside its header."""


def members(path: str, data: pa.Buffer | FileBytes, num_bytes: int | None = None) -> list[Member]:
    """The regular files of an archive. With `num_bytes`, `data` is only the start of an archive of that
    length, and the members found are those whose header lies in it."""
    found: list[Member] = []
    headers: dict[int, bytes] = {}
    try:
        for offset, header, member in _walk(path, data, num_bytes):
            headers[offset] = header
            if member is not None:
                found.append(member)
    except SourceError:
        # The first damage is the cause: a wrong size in one header leads to a wrong place for the next.
        _check_sums(path, headers)
        raise
    _check_sums(path, headers)
    return found


def _walk(path: str, data: pa.Buffer | FileBytes, num_bytes: int | None) -> Iterator[tuple[int, bytes, Member | None]]:
    """(offset of a header, the header, the member it describes or None). One Python step a member: each header says
    where the next one is."""
    total = data.size if num_bytes is None else num_bytes
    view = data if isinstance(data, FileBytes) else memoryview(data)
    offset, long_name, pax = 0, None, {}
    while offset < total:
        if offset + BLOCK > total:
            raise _damaged(path, offset, "is cut off in the middle of a header")
        if offset + BLOCK > data.size:
            return
        header = bytes(view[offset : offset + BLOCK])
        if header == ZEROS:
            offset += BLOCK
            continue
        kind, size = header[156], _size(path, offset, header)
        if "size" in pax and kind not in b"xgLK":
            size = int(pax["size"])
        start = offset + BLOCK
        after = start + (size + BLOCK - 1) // BLOCK * BLOCK
        name = long_name or pax.get("path") or _name(header)
        if after > total:
            raise _damaged(path, offset, f"is cut off: the member {name!r} needs {after - total:,} bytes more")
        if kind in b"LKxg":
            if start + size > data.size:
                return
            content = bytes(view[start : start + size])
            if kind == ord("L"):
                long_name = _text(content)
            elif kind == ord("x"):
                pax = _pax_records(path, offset, content)
            yield offset, header, None
        elif kind in _UNREADABLE:
            raise _damaged(path, offset, f"has {_UNREADABLE[kind]} ({name!r}), which cannot be read in place")
        else:
            regular = kind in _REGULAR and not name.endswith("/")
            first = bytes(view[start : start + min(size, FIRST_BYTES)])
            yield offset, header, Member(name, start, size, first) if regular else None
            long_name, pax = None, {}
        offset = after


def _check_sums(path: str, headers: Mapping[int, bytes]) -> None:
    offsets = list(headers)
    for begin in range(0, len(offsets), 4096):
        places = offsets[begin : begin + 4096]
        blocks = np.frombuffer(b"".join(map(headers.__getitem__, places)), np.uint8).reshape(-1, BLOCK)
        # The sum is taken with the field of the sum itself seen as eight spaces.
        sums = blocks.sum(axis=1, dtype=np.int64) - blocks[:, 148:156].sum(axis=1, dtype=np.int64) + 8 * 32
        for i, block in enumerate(blocks[:, 148:156]):
            if _octal(block.tobytes()) != sums[i]:
                raise _damaged(path, places[i], "has a header whose checksum is wrong")


def _size(path: str, offset: int, header: bytes) -> int:
    raw = header[124:136]
    if raw[0] & 0x80:
        return int.from_bytes(bytes([raw[0] & 0x7F]) + raw[1:], "big")
    size = _octal(raw)
    if size is None:
        raise _damaged(path, offset, "has no header where one should be")
    return size


def _octal(raw: bytes) -> int | None:
    digits = raw.split(b"\0", 1)[0].strip()
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        return None


def _name(header: bytes) -> str:
    name = _text(header[:100])
    # Only POSIX archives have a prefix here; GNU keeps times in the same place.
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _pax_records(path: str, offset: int, content: bytes) -> dict[str, str]:
    """Records of the form `25 path=some/long/name\\n`: the number is the length of the whole record."""
    records: dict[str, str] = {}
    while content.strip(b"\0"):
        length, space, _ = content.partition(b" ")
        if not space or not length.isdigit() or not 0 < int(length) <= len(content):
            raise _damaged(path, offset, "has a damaged pax header")
        record = content[len(length) + 1 : int(length)].removesuffix(b"\n")
        key, _, value = record.partition(b"=")
        records[_text(key)] = _text(value)
        content = content[int(length) :]
    if not records.get("size", "0").isdigit():
        raise _damaged(path, offset, "has a damaged pax header")
    return records


def _damaged(path: str, offset: int, what: str) -> SourceError:
    return SourceError(f"{path} {what}, at byte {offset:,}: copy or write the archive again")
