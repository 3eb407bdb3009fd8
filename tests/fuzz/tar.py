"""WebDataset shards, against tarfile."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from collections.abc import Callable, Sequence

import overlord as ol
from tests.fuzz.mutations import NUMBERS, Region
from tests.fuzz.targets import Answer, FileTarget, OracleFailed, Seed, Wrong

BLOCK = 512


def _archive(format_: int, names: Sequence[str], add: Callable[[tarfile.TarFile], None] | None = None) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=format_) as archive:
        for i, name in enumerate(names):
            _add(archive, name, f"{i}:".encode() * (i * 251 % 700))
        if add is not None:
            add(archive)
    return sink.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes = b"", **fields: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(content))


def make_seeds() -> Sequence[Seed]:
    plain = [f"{i:04}.{ending}" for i in range(5) for ending in ("jpg", "txt", "json")]
    folders = [f"part/{i}/a.b.{ending}" for i in range(3) for ending in ("PNG", "cls")]
    long = [f"{'folder/' * 30}{i}.{ending}" for i in range(2) for ending in ("jpg", "txt")]
    odd = ["./a.txt", "README", ".hidden", "x/.hidden.txt", "b..txt", "ünï.txt", "a b.txt", "no_dot", "trailing."]

    def special(archive: tarfile.TarFile) -> None:
        _add(archive, "folder", type=tarfile.DIRTYPE)
        _add(archive, "link.txt", type=tarfile.SYMTYPE, linkname="0000.txt")
        _add(archive, "fifo.txt", type=tarfile.FIFOTYPE)
        _add(archive, "7.txt", b"contiguous", type=tarfile.CONTTYPE)
        _add(archive, "old.txt", b"old", type=tarfile.AREGTYPE)

    def hard(archive: tarfile.TarFile) -> None:
        _add(archive, "9999.txt", type=tarfile.LNKTYPE, linkname="0000.txt")

    def pax(archive: tarfile.TarFile) -> None:
        _add(archive, "9000.txt", b"with notes", pax_headers={"comment": "x" * 30, "mtime": "1.5"})

    ustar, gnu, posix = tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT
    archives = {
        "ustar": _archive(ustar, plain),
        "gnu": _archive(gnu, plain),
        "pax": _archive(posix, plain, pax),
        "folders": _archive(ustar, folders),
        "gnu-long": _archive(gnu, long),
        "pax-long": _archive(posix, long),
        "odd": _archive(posix, odd),
        "special": _archive(ustar, plain[:6], special),
        "hard-link": _archive(ustar, plain[:6], hard),
        "pax-sparse": _with_sparse(_archive(posix, plain[:3])),
        "gnu-sparse": _with_old_sparse(_archive(gnu, plain[:3])),
        "pax-global": _global() + _archive(posix, plain[:6]),
        "twice": _archive(ustar, ["a.txt"]) + _archive(ustar, ["b.txt"]),
        "bare": _archive(ustar, plain)[: -2 * BLOCK].rstrip(b"\0").ljust(BLOCK * 30, b"\0"),
    }
    seeds = [_seed(name, data) for name, data in archives.items()]
    seeds.append(Seed("gzip", gzip.compress(archives["ustar"], mtime=0), ".tar.gz"))
    return seeds


def _with_sparse(archive: bytes) -> bytes:
    """A member as GNU tar writes it with --sparse in pax archives: a map of its pieces in front of them."""
    content = b"2\n0\n512\n2048\n512\n".ljust(BLOCK, b"\0") + b"a" * BLOCK + b"b" * BLOCK
    info = tarfile.TarInfo("./GNUSparseFile.0/8000.txt")
    info.size = len(content)
    keys = {"major": "1", "minor": "0", "name": "8000.txt", "realsize": "2560"}
    info.pax_headers = {f"GNU.sparse.{key}": value for key, value in keys.items()}
    return info.tobuf(tarfile.PAX_FORMAT) + content + archive


def _with_old_sparse(archive: bytes) -> bytes:
    header = bytearray(_header("8000.txt", 2 * BLOCK, b"S", magic=b"ustar  \0"))
    for i, number in enumerate((0, 512, 2048, 512)):
        header[386 + 12 * i : 398 + 12 * i] = b"%011o\0" % number
    header[483:495] = b"%011o\0" % 2560
    return _summed(header) + b"a" * BLOCK + b"b" * BLOCK + archive


def _global() -> bytes:
    record = b"19 comment=for all\n"
    return _header("pax_global_header", len(record), b"g") + record.ljust(BLOCK, b"\0")


def _header(name: str, size: int, kind: bytes, magic: bytes = b"ustar\x0000") -> bytes:
    header = bytearray(BLOCK)
    header[: len(name)] = name.encode()
    header[100:124] = b"0000644\0" + b"0000000\0" * 2
    header[124:148] = b"%011o\0%011o\0" % (size, 0)
    header[156:157], header[257:265] = kind, magic
    return _summed(header)


def _summed(header: bytes | bytearray) -> bytes:
    header = bytearray(header)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def _seed(name: str, data: bytes) -> Seed:
    return Seed(name, data, ".tar", tuple(Region(at, at + BLOCK) for at in _headers(data)))


def _headers(data: bytes) -> list[int]:
    """Where headers are, by their magic."""
    return [at for at in range(0, len(data) - BLOCK, BLOCK) if data[at + 257 : at + 262] == b"ustar"]


def change_blocks(rng: random.Random, seed: Seed) -> bytes | None:
    """Whole blocks lost, repeated, exchanged or zeroed, as storage does it."""
    if seed.suffix != ".tar":
        return None
    blocks = [seed.data[at : at + BLOCK] for at in range(0, len(seed.data), BLOCK)]
    used = max(i for i, block in enumerate(blocks) if block.strip(b"\0")) + 3
    for _ in range(rng.choice((1, 1, 2))):
        at, other, many = rng.randrange(used), rng.randrange(used), rng.choice((1, 1, 2, 3, 8))
        match rng.randrange(6):
            case 0 | 1:
                blocks[at : at + many] = [bytes(BLOCK)] * many
            case 2:
                del blocks[at : at + many]
            case 3:
                blocks[at:at] = blocks[other : other + many]
            case 4:
                blocks[at:at] = [bytes(BLOCK)] * many
            case 5:
                blocks = blocks[:at]
    return b"".join(blocks)


_FIELDS = {
    "name": (0, 100), "mode": (100, 8), "size": (124, 12), "mtime": (136, 12), "kind": (156, 1), "link": (157, 100),
    "magic": (257, 8), "prefix": (345, 155), "map": (386, 97),
}  # fmt: skip


def change_field(rng: random.Random, seed: Seed) -> bytes | None:
    """Another value in a field of a header, whose checksum is then put right."""
    if not seed.regions:
        return None
    data = bytearray(seed.data)
    at = rng.choice(seed.regions).start
    header = data[at : at + BLOCK]
    start, width = _FIELDS[rng.choice(("name", "size", "size", "size", "kind", "kind", *_FIELDS))]
    values = [
        rng.randbytes(width),
        b"",
        b"\xff" * width,
        header[start : start + width][::-1],
        b"a.txt",
        b"0001.jpg",
        b"a\nb.txt",
    ]
    if start == 124:
        old = int(header[124:135].strip(b" \0") or b"0", 8)
        sizes = [abs(number) for number in (*NUMBERS, old + 1, old - 1, old + 512, 8**11 - 1)]
        values = [b"%011o\0" % (size % 8**11) for size in sizes]
        values += [b"%o" % 5, b" 5 ", b"5 5", b"\x80" + (7).to_bytes(11, "big"), b"\xff" * 12, b"\x80" + b"\xff" * 11]
        values += [b"-0000000005\0", b"+0000000005\0", b"0o000000005\0", b"0_0000_0005\0", b"00000000009\0"]
    elif start == 156:
        values = [bytes([kind]) for kind in b"0\x0001234567xgLKSMVNDAX ~"]
    header[start : start + width] = rng.choice(values)[:width].ljust(width, b"\0")
    data[at : at + BLOCK] = _summed(header)
    return bytes(data)


_RECORDS = (
    b"path=p.txt", b"path=", b"path=a\nb.txt", b"path=\xff\xfe.txt", b"path=a\0b.txt",
    b"size=0", b"size=5", b"size=-1", b"size=1e3", b"size= 7", b"size=7 ", b"size=0x10", b"size=\xd9\xa3", b"size=1_0",
    b"size=99999999999999999999", b"size=", b"size", b"linkpath=0000.txt", b"hdrcharset=BINARY", b"comment=x", b"=x", b"x",
    b"GNU.sparse.major=1", b"GNU.sparse.name=q.txt", b"GNU.sparse.realsize=9", b"GNU.sparse.map=0,1",
)  # fmt: skip


def add_records(rng: random.Random, seed: Seed) -> bytes | None:
    """A pax header in front of a member, of this file or of all that follow, sometimes with wrong lengths."""
    if not seed.regions:
        return None
    content = b""
    for record in rng.sample(_RECORDS, rng.choice((1, 1, 2, 3))):
        length = len(record) + 2
        length += len(str(length + len(str(length)))) if rng.random() < 0.9 else rng.randrange(-5, 9)
        content += b"%d %s%s" % (length, record, b"\n" if rng.random() < 0.95 else b"")
    at = rng.choice(seed.regions).start
    header = _header("PaxHeaders/x", len(content), rng.choice((b"x", b"x", b"x", b"g")))
    padded = content + bytes(-len(content) % BLOCK)
    return seed.data[:at] + header + padded + seed.data[at:]


def read(path: str) -> Answer:
    source = ol.WebDataset(path)
    rows = []
    for unit in source.units():
        result = source.read_rows(unit)
        if result.bad:
            raise Wrong("bad rows where nothing is declared to be text")
        result.table.validate(full=True)
        rows += [
            (row.pop("__key__"), {name: value for name, value in sorted(row.items()) if value is not None})
            for row in result.table.to_pylist()
        ]
    return Answer(rows)


def oracle(data: bytes, suffix: str) -> list[Answer]:
    """For archives that were joined, all of them; or only up to the first end mark, as tar reads an archive."""
    try:
        if suffix.endswith(".gz"):
            data = gzip.decompress(data)
        first, end = _members(data)
        answers = [_samples(first)]
        joined = first
        while end < len(data) and data[end:].strip(b"\0"):
            if data[end : end + 2 * BLOCK] != bytes(2 * BLOCK):
                break  # not the end mark: tarfile stopped at something that is no header
            end += next(i for i, byte in enumerate(data[end:]) if byte) // BLOCK * BLOCK
            more, length = _members(data[end:])
            joined, end = joined + more, end + length
            answers.insert(0, _samples(joined))
        return answers
    except (tarfile.TarError, OSError, EOFError, ValueError, UnicodeError, MemoryError, KeyError, OverflowError) as error:
        raise OracleFailed(str(error)) from error


def _members(data: bytes) -> tuple[list[tuple[str, bytes]], int]:
    """(name, content) of all files, links followed, and where the archive ends."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errors="surrogateescape") as archive:
        found = []
        for info in archive.getmembers():
            is_unknown = info.type not in (*tarfile.SUPPORTED_TYPES, b"D", b"V")  # a file, as POSIX has it
            if info.isreg() or info.islnk() or info.issym() or is_unknown:
                file = archive.extractfile(info)
                content = b"" if file is None else file.read()
                if (info.isreg() or is_unknown) and len(content) != info.size:
                    raise tarfile.ReadError("a member is cut off")
                found.append((info.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"), content))
        end = archive.offset
        return found, end


def _samples(members: Sequence[tuple[str, bytes]]) -> Answer:
    samples: dict[str, dict[str, bytes]] = {}
    for name, content in members:
        folder, slash, last = name.rpartition("/")
        stem, dot, ending = last.partition(".")
        if not stem or not dot:
            continue
        sample = samples.setdefault(f"{folder}{slash}{stem}", {})
        if ending.lower() in sample:
            raise ValueError(f"{name} is there twice")
        sample[ending.lower()] = content
    return Answer([(key, dict(sorted(sample.items()))) for key, sample in samples.items()])


TARGET = FileTarget("tar", make_seeds, read, oracle, (change_blocks, change_blocks, change_field, change_field, add_records))
