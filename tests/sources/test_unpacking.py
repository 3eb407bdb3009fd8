"""Compressed JSON Lines in units: every line once, from wherever reading begins, at a bounded cost, and damage is named."""

import gzip
import io
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import BadRowError, BufferTooSmallError, SourceError, StateError
from overlord.sources import line_source, unpacking
from overlord.sources.jsonl import Jsonl
from overlord.sources.line_source import LineReader
from overlord.sources.storage import Storage
from overlord.sources.unpacking import UnpackedFile, open_packed
from overlord.stream.chunk_order import UnitRuns, units_of_chunk


def one_gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def one_zstd(data: bytes) -> bytes:
    """A frame that does not say its size, as a program in a pipe writes it."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        for start in range(0, len(data), 100_000):
            stream.write(data[start : start + 100_000])
    return sink.getvalue().to_pybytes()


def sized_zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def many(pack: Callable[[bytes], bytes], size: int) -> Callable[[bytes], bytes]:
    return lambda data: b"".join(pack(data[start : start + size]) for start in range(0, len(data), size))


def padded_gzip(data: bytes) -> bytes:
    return one_gzip(data) + bytes(700)


def zstd_with_skipped(data: bytes) -> bytes:
    skipped = bytes.fromhex("502a4d18") + (9).to_bytes(4, "little") + b"not data!"
    empty = bytes.fromhex("5f2a4d18") + bytes(4)
    return skipped + many(sized_zstd, 3000)(data) + empty + skipped


PACKINGS = {
    "one.jsonl.gz": one_gzip,
    "members.jsonl.gz": many(one_gzip, 1000),
    "padded.jsonl.gz": padded_gzip,
    "one.jsonl.zst": one_zstd,
    "sized.jsonl.zst": sized_zstd,
    "frames.jsonl.zst": many(sized_zstd, 1000),
    "skipped.jsonl.zst": zstd_with_skipped,
    "empty-parts.jsonl.zst": lambda data: sized_zstd(b"") + one_zstd(data) + sized_zstd(b""),
    "empty-parts.jsonl.gz": lambda data: one_gzip(b"") + one_gzip(data) + one_gzip(b""),
}


def unpacked(path: Path, most_bytes: int = 1 << 40) -> UnpackedFile:
    (file,) = Storage().list_files([str(path)])
    return open_packed(Storage(), file, "gzip" if path.suffix == ".gz" else "zstd", most_bytes)


def documents(num_rows: int, seed: int = 0) -> list[dict[str, object]]:
    rng = random.Random(seed)
    return [{"n": i, "text": rng.randbytes(rng.randrange(60)).hex()} for i in range(num_rows)]


def jsonl(rows: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


lines = st.lists(
    st.tuples(st.text(max_size=60), st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n  \r\n"])), min_size=1, max_size=12
)


@pytest.mark.parametrize("name", PACKINGS)
@settings(max_examples=20)
@given(lines=lines, last_newline=st.booleans(), unit_bytes=st.integers(15, 600), mark=st.booleans(), rng=st.randoms())
def test_every_line_comes_exactly_once_in_whatever_order_units_are_read(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    lines: list[tuple[str, bytes]],
    last_newline: bool,
    unit_bytes: int,
    mark: bool,
    rng: random.Random,
) -> None:
    content = b"".join(json.dumps({"text": text}).encode() + end for text, end in lines)
    content = (b"\xef\xbb\xbf" if mark else b"") + (content if last_newline else content.rstrip())
    path = tmp_path_factory.mktemp("packed") / name
    path.write_bytes(PACKINGS[name](content))
    source = Jsonl(str(path), {"text": pa.string()}, unit_bytes)
    units = source.units()
    assert units == source.units()
    shuffled = rng.sample(units, len(units))
    reader = source.open_reader(release_gil=False)
    found = {unit.index: reader.read_rows(unit).table["text"].to_pylist() for unit in shuffled}
    assert [text for index in sorted(found) for text in found[index]] == [text for text, _ in lines]
    reader.close()


@pytest.mark.parametrize("name", PACKINGS)
def test_threads_that_share_a_reader_read_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = documents(3000)
    (tmp_path / name).write_bytes(PACKINGS[name](jsonl(rows)))
    source = Jsonl(str(tmp_path / name), unit_bytes=9000)
    units, reader = source.units(), LineReader(source)
    assert len(units) > 8
    with ThreadPoolExecutor(4) as pool:
        tables = list(pool.map(lambda unit: reader.read_rows(unit).strict(), units))
    assert [row for table in tables for row in table.to_pylist()] == rows


@pytest.mark.parametrize("name", PACKINGS)
def test_an_epoch_decompresses_each_file_twice_at_most(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to find its size, once for its rows, shuffled over ten files."""
    monkeypatch.setattr(unpacking, "STEP_BYTES", 4096)
    monkeypatch.setattr(unpacking, "SKIPPED_BYTES", 0)
    opened: list[UnpackedFile] = []

    class Counted(Jsonl):
        def unpack(self, part):
            opened.append(super().unpack(part))
            return opened[-1]

    for i in range(10):
        (tmp_path / f"{i}-{name}").write_bytes(PACKINGS[name](jsonl(documents(1500, i))))
    source = Counted(f"{tmp_path}/*", unit_bytes=9000)
    units, reader = source.units(), LineReader(source)
    order = units_of_chunk(0, "s", UnitRuns.of(units), window=len(units), shuffle=True, chunk=0)
    found = [row for unit in order.tolist() for row in reader.read_rows(units[unit]).strict().to_pylist()]
    wanted = [row for i in range(10) for row in documents(1500, i)]
    assert sorted(map(str, found)) == sorted(map(str, wanted))
    num_bytes = sum(len(jsonl(documents(1500, i))) for i in range(10))
    assert len(opened) == 10
    assert sum(file.num_decompressed for file in opened) <= 2 * num_bytes + 10 * 4096


@pytest.mark.parametrize("name", ["one.jsonl.gz", "members.jsonl.gz", "frames.jsonl.zst"])
def test_the_middle_is_read_from_a_copy_of_the_decoder(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "STEP_BYTES", 2048)
    monkeypatch.setattr(unpacking, "COPY_EVERY", 8192)
    monkeypatch.setattr(unpacking, "MOST_COPIES", 10)
    content = jsonl(documents(6000))
    (tmp_path / name).write_bytes(PACKINGS[name](content))
    file = unpacked(tmp_path / name)
    assert file.size() == len(content)
    assert len(file._copies) <= 10
    before = file.num_decompressed
    rng = random.Random(3)
    for _ in range(50):
        start = rng.randrange(len(content) - 3000)
        offset, text = file.read_lines(start, start + 3000, lambda *_: None)
        assert text == content[offset : offset + len(text)]
    distance = len(content) / 5  # between copies, of which there are at least five
    assert file.num_decompressed - before < 50 * (distance + 3000 + 3 * 2048)


@pytest.mark.parametrize("name", PACKINGS)
def test_a_truncated_file_is_named_with_the_place(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = jsonl(documents(4000))
    packed = PACKINGS[name](content).rstrip(b"\0")
    path.write_bytes(packed)
    source = Jsonl(str(path), {"n": pa.int64()}, unit_bytes=30_000)
    for cut in (len(packed) // 2, len(packed) - 3):
        path.write_bytes(packed[:cut])
        units = source.units()
        if name.startswith(("frames", "skipped", "members")) and cut < len(packed) - 3:
            continue  # a cut between two frames would be a whole file
        assert len(units) > 1
        for unit in units[:2]:
            with pytest.raises(SourceError, match=rf"{name} is not whole (gzip|zstd) data: .*after [\d,]+ bytes"):
                source.read(unit)


def rows_or_error(source: Jsonl) -> list[dict] | str:
    try:
        return [row for unit in source.units() for row in source.read(unit).to_pylist()]
    except (SourceError, BadRowError, BufferTooSmallError) as error:
        return str(error)


@pytest.mark.parametrize("name", PACKINGS)
def test_no_flipped_bit_changes_a_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    rows = documents(400)
    packed = PACKINGS[name](jsonl(rows))
    rng = random.Random(5)
    num_errors = 0
    for _ in range(60):
        at = rng.randrange(len(packed))
        path.write_bytes(packed[:at] + bytes([packed[at] ^ 1 << rng.randrange(8)]) + packed[at + 1 :])
        source = Jsonl(str(path), {"n": pa.int64(), "text": pa.string()}, unit_bytes=9000)
        found = rows_or_error(source)
        if isinstance(found, str):
            assert name in found
            num_errors += 1
        elif name.endswith(".gz"):  # frames of zstd have no checksum unless their writer asks for one
            assert found == rows
    assert num_errors


def test_bad_lines_are_those_of_the_plain_file(tmp_path: Path) -> None:
    content = b"".join(b'{"n": %d}\n' % i if i % 97 else b'{"n": "%d"\n' % i for i in range(5000))
    results = []
    for name, data in (("a.jsonl", content), ("a.jsonl.gz", one_gzip(content)), ("a.jsonl.zst", one_zstd(content))):
        (tmp_path / name).write_bytes(data)
        source = Jsonl(str(tmp_path / name), {"n": pa.int64()}, unit_bytes=4000)
        assert len(source.units()) > 3
        read = [source.read_rows(unit) for unit in source.units()]
        places = [int(bad.where.rpartition(" ")[2]) for result in read for bad in result.bad]
        results.append(([row for result in read for row in result.table["n"].to_pylist()], places))
        assert all(content[place:].startswith(b'{"n": "') for place in places)
        skipping = Jsonl(str(tmp_path / name), {"n": pa.int64()}, 4000, tokens=None, on_bad_row="skip", repeat=False)
        job = ol.Job(
            sources={"a": skipping},
            batch=ol.Batch(samples=50, sequence_length=8, columns=("n",), drop_last=False),
        )
        with ol.start(job) as loader:
            assert sum(len(micro["n"]) for step in loader.client(0) for micro in step) > 4800
            assert loader.report().bad_rows == {"a": 52}
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("pack", [one_gzip, one_zstd])
def test_a_bomb_is_not_decompressed(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    name = "a.jsonl.gz" if pack is one_gzip else "a.jsonl.zst"
    (tmp_path / name).write_bytes(pack(b'{"n": 1}\n' + bytes(150 << 20)))
    source = Jsonl(str(tmp_path / name), {"n": pa.int64()}, unit_bytes=(tmp_path / name).stat().st_size * 2, buffer_bytes=1)
    assert len(source.units()) == 2
    with pytest.raises(BufferTooSmallError, match=rf"{name} .* has more than 67,108,864 bytes decompressed"):
        source.read(source.units()[1])


def test_a_file_that_is_replaced_between_two_units_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(one_gzip(jsonl(documents(90_000))))
    source = Jsonl(str(path), unit_bytes=400_000)
    reader = source.open_reader(release_gil=False)
    units = source.units()
    reader.read_rows(units[0])
    path.write_bytes(one_gzip(jsonl(documents(90_000, seed=1))))
    with pytest.raises(SourceError, match=r"a\.jsonl\.gz has changed since it was listed"):
        list(map(reader.read_rows, units[1:]))


def test_a_line_longer_than_many_units_belongs_to_the_one_it_begins_in(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": random.Random(1).randbytes(150_000).hex()}, {"text": "b"}]
    for name in ("one.jsonl.gz", "one.jsonl.zst"):
        (tmp_path / name).write_bytes(PACKINGS[name](jsonl(rows)))  # pyright: ignore[reportArgumentType]
        source = Jsonl(str(tmp_path / name), unit_bytes=20_000)
        counts = [source.read(unit).num_rows for unit in source.units()]
        assert len(counts) > 20
        assert [n for n in counts if n] == [2, 1]


def test_a_file_larger_than_the_buffer_is_read_through_it(tmp_path: Path) -> None:
    """Decoded, the file has 4 MB, and the buffer 3 MB."""
    rows = documents(50_000)
    (tmp_path / "a.jsonl.zst").write_bytes(one_zstd(jsonl(rows)))
    source = Jsonl(str(tmp_path / "*"), unit_bytes=200_000, tokens=None, buffer_bytes=3 << 20, repeat=False)
    assert len(jsonl(rows)) > source.buffer_bytes
    batch = ol.Batch(samples=500, sequence_length=8, columns=("n",), drop_last=False)
    with ol.start(ol.Job(sources={"a": source}, batch=batch)) as loader:
        found = [n for step in loader.client(0) for micro in step for n in micro["n"].to_pylist()]
    assert sorted(found) == list(range(50_000))


def test_python_reads_the_same_from_the_packings(tmp_path: Path) -> None:
    """The packings of these tests are files that other programs can read."""
    content = jsonl(documents(500))
    for name, pack in PACKINGS.items():
        if name.endswith(".gz"):
            assert gzip.decompress(pack(content)) == content
        elif "skipped" not in name:
            with pa.CompressedInputStream(io.BytesIO(pack(content)), "zstd") as stream:
                assert stream.read() == content


def test_a_state_of_a_release_that_read_compressed_files_whole_is_continued_as_its_error_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(5):
        (tmp_path / f"{i}.jsonl.gz").write_bytes(one_gzip(jsonl(documents(300, i))))

    def job(**options: int) -> ol.Job:
        source = Jsonl(f"{tmp_path}/*", tokens=None, window=1, **options)  # pyright: ignore[reportArgumentType]
        return ol.Job(sources={"a": source}, batch=ol.Batch(samples=70, sequence_length=8, columns=("text",)))

    def texts(loader: ol.Loader, num_steps: int) -> list[list[str]]:
        client = loader.client(0)
        return [[text for micro in next(client) for text in micro["text"]] for _ in range(num_steps)]

    with monkeypatch.context() as earlier:
        earlier.setattr(line_source, "PACKED_RATIO", 0)
        with ol.start(job(unit_bytes=9000)) as loader:
            client = loader.client(0)
            for _ in range(6):
                next(client)
            state = client.state_dict()
            rest = [[text for micro in next(client) for text in micro["text"]] for _ in range(12)]
    with pytest.raises(StateError, match=r"(?s)one unit each in earlier releases.*unit_bytes=2\*\*40.*sources\.a"):
        ol.start(job(unit_bytes=9000), resume=state)
    with ol.start(job(unit_bytes=2**40), resume=state, accept_changes=["sources.a"]) as loader:
        assert texts(loader, 12) == rest
