"""The members of a tar archive and their places, from one walk over its headers. The data of members is not read.

Reads ustar, GNU (long names, sizes beyond 8 GiB) and pax (path, linkpath, size). Links are members with the bytes of their
target. Sparse files are refused, because their bytes are not contiguous. A damaged or truncated archive is an error with
its place. A tar does not state its length, so truncation shows only in headers that are incomplete or misplaced, and in
zeros where no writer puts them.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from overlord.errors import SourceError
from overlord.sources.storage import FileBytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

BLOCK = 512
FIRST_BYTES = 12
ZEROS = bytes(BLOCK)
RECORD = 20 * BLOCK
"""Tar programs pad archives to a multiple of this by default."""
LONGEST_PADDING = (1 << 20) + 2 * BLOCK
"""The end-of-archive marker, and the rest of the largest record that a tar program is likely to be told to write."""
_HARD_LINK, _SYMBOLIC_LINK, _DIRECTORY = ord("1"), ord("2"), ord("5")
_NO_FILES = {ord("3"): "a character device", ord("4"): "a block device", ord("6"): "a FIFO"}
_WITHOUT_DATA = frozenset((_HARD_LINK, _SYMBOLIC_LINK, _DIRECTORY, *_NO_FILES))
_PAX, _GLOBAL_PAX, _LONG_NAME, _LONG_LINK = b"xX", ord("g"), ord("L"), ord("K")
_NOT_MEMBERS = frozenset((*_PAX, _GLOBAL_PAX, _LONG_NAME, _LONG_LINK))
_LEFT_OUT = frozenset(b"DV")  # a list of a directory's files, the name of a volume
_SPLIT = ord("M")
_SPARSE = ord("S")
_OF_ONE_MEMBER = ("path", "linkpath", "size", "GNU.sparse.")


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    offset: int
    num_bytes: int
    first: bytes = b""
    """Its first bytes, up to twelve: they are read with the header."""
    fault: str = ""
    """The reason why it has no bytes: it is a device, or a link whose target is missing."""


@dataclass(frozen=True, slots=True)
class _TarLink:
    """The target of member `index`."""

    index: int
    target: str
    is_symbolic: bool


@dataclass(slots=True)
class _TarContents:
    members: list[Member] = field(default_factory=list)
    links: list[_TarLink] = field(default_factory=list)
    headers: dict[int, bytes] = field(default_factory=dict)
    """By offset."""


@dataclass(slots=True)
class _Extended:
    """The extended headers (GNU or pax) before a member."""

    kinds: set[int] = field(default_factory=set)
    long_name: str = ""
    long_link: str = ""
    pax: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str | None:
        return self.long_name or self.pax.get("GNU.sparse.name") or self.pax.get("path")

    @property
    def link(self) -> str | None:
        return self.long_link or self.pax.get("linkpath")

    def add(self, path: str, offset: int, kind: int, content: bytes, size: int) -> None:
        if kind in self.kinds and kind != _GLOBAL_PAX:
            raise _damage_error(path, offset, "has two extended headers of one kind for one member")
        self.kinds.add(kind)
        if kind == _LONG_NAME:
            self.long_name = _long_text(path, offset, content, size)
        elif kind == _LONG_LINK:
            self.long_link = _long_text(path, offset, content, size)
        elif kind == _GLOBAL_PAX:
            _check_global(path, offset, _pax_records(path, offset, content[:size]))
        else:
            self.pax = _pax_records(path, offset, content[:size])

    def check_names(self, path: str, offset: int, name: str) -> None:
        if (self.long_name and "path" in self.pax) or (self.long_link and "linkpath" in self.pax):
            raise _damage_error(path, offset, f"has two names for the member {name!r}, a GNU and a pax one")

    def check_used(self, path: str, offset: int) -> None:
        if self.kinds:
            raise _damage_error(path, offset, "has an extended header (GNU or pax) without the member that it belongs to")


def read_members(path: str, data: pa.Buffer | FileBytes, num_bytes: int | None = None) -> list[Member]:
    """The files of an archive. With `num_bytes`, `data` is only the start of an archive of that length, and the members
    found are those whose header lies in it."""
    found = _TarContents()
    try:
        _walk(path, data, num_bytes, found)
    except SourceError:
        # The first damage is the cause: a wrong size in one header leads to a wrong place for the next.
        _check_sums(path, found.headers)
        raise
    _check_sums(path, found.headers)
    return _with_links(found)


def _walk(path: str, data: pa.Buffer | FileBytes, num_bytes: int | None, found: _TarContents) -> None:
    """One Python step a member: each header says where the next one is."""
    total = data.size if num_bytes is None else num_bytes
    view = data if isinstance(data, FileBytes) else memoryview(data)
    offset = begin = 0
    extended = _Extended()
    while offset < total:
        if offset + BLOCK > total:
            raise _damage_error(path, offset, "is cut off in the middle of a header")
        if offset + BLOCK > data.size:
            return
        header = bytes(view[offset : offset + BLOCK])
        if header == ZEROS:
            extended.check_used(path, offset)
            offset = begin = _after_zeros(path, data, offset, begin, total)
            continue
        kind, size = header[156], _size(path, offset, header)
        if kind not in _NOT_MEMBERS and "size" in extended.pax:
            size = int(extended.pax["size"])
        name = extended.name or _name(header)
        start = offset + BLOCK
        after = start if kind in _WITHOUT_DATA else start + (size + BLOCK - 1) // BLOCK * BLOCK
        if after > total:
            raise _damage_error(path, offset, f"is cut off: the member {name!r} needs {after - total:,} bytes more")
        if kind in _NOT_MEMBERS:
            if start + size > data.size:
                return
            extended.add(path, offset, kind, bytes(view[start : min(after, data.size)]), size)
        else:
            _check_in_one_piece(path, offset, name, kind, extended.pax)
            if kind in (_HARD_LINK, _SYMBOLIC_LINK):
                target = extended.link or _text(header[157:257])
                _add_link(found, _TarLink(len(found.members), target, kind == _SYMBOLIC_LINK), name, start)
            else:
                _add(found, kind, Member(name, start, size, bytes(view[start : start + min(size, FIRST_BYTES)])))
            if extended.kinds:
                extended.check_names(path, offset, name)
                extended = _Extended()
        found.headers[offset] = header
        offset = after
    extended.check_used(path, offset)


def _add_link(found: _TarContents, link: _TarLink, name: str, offset: int) -> None:
    found.links.append(link)
    found.members.append(Member(name, offset, 0, fault=f"is a link to {link.target!r}, which is no file of the archive"))


def _add(found: _TarContents, kind: int, member: Member) -> None:
    if kind in _NO_FILES:
        found.members.append(Member(member.name, member.offset, 0, fault=f"is {_NO_FILES[kind]}"))
    elif kind != _DIRECTORY and kind not in _LEFT_OUT and not member.name.endswith("/"):
        found.members.append(member)  # unknown kinds are files, by POSIX


def _with_links(found: _TarContents) -> list[Member]:
    """The members with links resolved to their targets, as Python's tarfile does: a hard link to the last member of that
    name before it, a symbolic link to the last of all."""
    if not found.links:
        return found.members
    links = {link.index: link for link in found.links}
    places: dict[str, list[int]] = {}
    for i, member in enumerate(found.members):
        places.setdefault(posixpath.normpath(member.name), []).append(i)
    resolved = list(found.members)
    for link in found.links:
        end, seen = link, {link.index}
        while (i := _target(found.members[end.index].name, end, places)) is not None and i not in seen:
            seen.add(i)
            if i not in links:
                file = found.members[i]
                resolved[link.index] = replace(file, name=found.members[link.index].name)
                break
            end = links[i]
    return resolved


def _target(name: str, link: _TarLink, places: dict[str, list[int]]) -> int | None:
    target = posixpath.join(posixpath.dirname(name), link.target) if link.is_symbolic else link.target
    known = [i for i in places.get(posixpath.normpath(target), ()) if link.is_symbolic or i < link.index]
    return known[-1] if known else None


def _after_zeros(path: str, data: pa.Buffer | FileBytes, offset: int, begin: int, total: int) -> int:
    """The offset after the zeros at `offset`: the end, or the begin of another archive that was appended.

    Two blocks of zeros end an archive, which is then filled up to a whole record. Other zeros may be a hole that a broken
    copy left, and skipping it would lose the members that stood there.
    """
    stop = _end_of_zeros(data, offset)
    if stop == data.size:
        if stop - offset > LONGEST_PADDING:
            raise _damage_error(
                path, offset, f"has nothing but zeros in its last {stop - offset:,} bytes: it is not complete"
            )
        return total if total > stop else offset + (stop - offset) // BLOCK * BLOCK
    stop = offset + (stop - offset) // BLOCK * BLOCK
    length = stop - offset
    if 2 * BLOCK <= length <= RECORD + BLOCK and (stop - begin) % RECORD == 0:
        return stop
    raise SourceError(
        f"{path} has {length:,} bytes of zeros at byte {offset:,} with more data after them: members that stood there may "
        "be lost. Copy or write the archive again; if archives were joined, name each of them as a file of its own"
    )


def _end_of_zeros(data: pa.Buffer | FileBytes, offset: int) -> int:
    view = data if isinstance(data, FileBytes) else memoryview(data)
    step = 1 << 16
    for start in range(offset, data.size, step):
        piece = np.frombuffer(view[start : start + step], np.uint8)
        if piece.any():
            return start + int((piece != 0).argmax())
    return data.size


def _check_in_one_piece(path: str, offset: int, name: str, kind: int, pax: dict[str, str]) -> None:
    if kind == _SPARSE or any(key.startswith("GNU.sparse.") for key in pax):
        raise SourceError(
            f"{path} has the sparse file {name!r} at byte {offset:,}, whose holes are not stored and which cannot be read "
            "in place: write the archive again without --sparse (-S)"
        )
    if kind == _SPLIT:
        raise SourceError(
            f"{path} has at byte {offset:,} a part of the file {name!r}, which is spread over several volumes: write "
            "archives that hold whole files, without --multi-volume (-M)"
        )


def _check_global(path: str, offset: int, records: dict[str, str]) -> None:
    for key in records:
        if key.startswith(_OF_ONE_MEMBER):
            raise SourceError(
                f"{path} has at byte {offset:,} a global pax header that sets {key!r} for all members after it: such a "
                "header is not supported; write the archive again"
            )


def _check_sums(path: str, headers: Mapping[int, bytes]) -> None:
    offsets = list(headers)
    for begin in range(0, len(offsets), 4096):
        places = offsets[begin : begin + 4096]
        blocks = np.frombuffer(b"".join(map(headers.__getitem__, places)), np.uint8).reshape(-1, BLOCK)
        # The checksum counts its own field as eight spaces.
        sums = blocks.sum(axis=1, dtype=np.int64) - blocks[:, 148:156].sum(axis=1, dtype=np.int64) + 8 * 32
        for place, block, total in zip(places, blocks, sums.tolist(), strict=True):
            stated = _octal(headers[place][148:156])
            # Old programs summed signed bytes.
            if stated != total and stated != _signed_sum(block):
                raise _damage_error(path, place, "has a header whose checksum is wrong")


def _signed_sum(block: np.ndarray) -> int:
    signed = block.view(np.int8).astype(np.int64)
    return int(signed.sum() - signed[148:156].sum() + 8 * 32)


def _size(path: str, offset: int, header: bytes) -> int:
    raw = header[124:136]
    if raw[0] == 0xFF:
        raise _damage_error(path, offset, f"has the member {_name(header)!r} with a size below zero")
    if raw[0] & 0x80:
        return int.from_bytes(bytes([raw[0] & 0x7F]) + raw[1:], "big")
    size = _octal(raw)
    if size is None:
        raise _damage_error(path, offset, "has no header where one should be")
    return size


def _octal(raw: bytes) -> int | None:
    digits = raw.split(b"\0", 1)[0].strip()
    if not digits:
        return 0
    if not digits.isdigit():  # int() would take a sign, underscores and 0o as well
        return None
    try:
        return int(digits, 8)
    except ValueError:  # there is an 8 or a 9
        return None


def _name(header: bytes) -> str:
    name = _text(header[:100])
    # Only POSIX archives have a prefix here; GNU keeps times in the same place.
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _long_text(path: str, offset: int, content: bytes, size: int) -> str:
    """The name in the blocks after a header. Only zeros may follow it: otherwise the name is incomplete."""
    name = content[:size].partition(b"\0")[0]
    if not name or name != content.rstrip(b"\0"):
        raise _damage_error(path, offset, "has a damaged header for a long name")
    return _text(name)


def _pax_records(path: str, offset: int, content: bytes) -> dict[str, str]:
    """Records of the form `25 path=some/long/name\\n`: the number is the length of the whole record."""
    records: dict[str, str] = {}
    while content.strip(b"\0"):
        length, space, _ = content.partition(b" ")
        if not space or not _is_number(length) or not len(length) + 1 < int(length) <= len(content):
            raise _damage_error(path, offset, "has a damaged pax header")
        record = content[len(length) + 1 : int(length)]
        key, equals, value = record.removesuffix(b"\n").partition(b"=")
        is_name = key in (b"path", b"linkpath")
        is_odd = not key or b"\0" in key or (is_name and (not value or b"\0" in value))
        if is_odd or not equals or not record.endswith(b"\n"):
            raise _damage_error(path, offset, "has a damaged pax header")
        records[_text(key)] = _text(value)
        content = content[int(length) :]
    if not _is_number(records.get("size", "0").encode()):
        raise _damage_error(path, offset, "has a damaged pax header")
    return records


def _is_number(digits: bytes) -> bool:
    return digits.isdigit() and len(digits) < 20


def _damage_error(path: str, offset: int, what: str) -> SourceError:
    return SourceError(f"{path} {what}, at byte {offset:,}: copy or write the archive again")
