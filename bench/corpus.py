"""The data of the benchmarks, made once under bench/.data: Parquet files of tokens or text, and image-text tars."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tarfile

DATA = Path(os.environ.get("OVERLORD_BENCH_DATA") or Path(__file__).parent / ".data")
VOCABULARY = 128_000
MEAN_DOCUMENT = 1000
LONGEST_DOCUMENT = 8192


def keep_in(folder: str) -> None:
    """Makes and looks for data in that folder, in this process and in those that it starts."""
    global DATA
    DATA = Path(folder).resolve()
    os.environ["OVERLORD_BENCH_DATA"] = str(DATA)


@dataclass(frozen=True, slots=True)
class TextCorpus:
    """`sources` Parquet files with a list<int32> column `tokens`, zstd, pyarrow's writer defaults otherwise.

    Document lengths are log-normal (sigma 1) around a mean of about 1,000 and clipped to 8,192; token ids follow
    Zipf's law over 128,000, which compresses to about 2.2 bytes a token. Every source has 16 row groups, so that as many
    workers can share it. With `distinct` < `sources` the rest are symbolic links to the first ones: enough where only
    memory is measured, and spares gigabytes of disk. With several `files` a source, each has eight columns more, as crawls
    have.
    """

    sources: int
    row_group_tokens: int
    row_groups: int = 16
    distinct: int | None = None
    files: int = 1

    @property
    def folder(self) -> Path:
        many = f"x{self.files}" if self.files > 1 else ""
        return DATA / f"text-{self.sources}{many}x{self.row_groups}x{self.row_group_tokens}"

    @property
    def paths(self) -> list[str]:
        """All files, those of a source after each other."""
        folder = self.folder
        return [str(folder / f"source_{i:03d}.parquet") for i in range(self.sources * self.files)]

    @property
    def paths_by_source(self) -> list[list[str]]:
        paths = self.paths
        return [paths[i : i + self.files] for i in range(0, len(paths), self.files)]

    @property
    def tokens(self) -> int:
        return self.sources * self.files * self.row_groups * self.row_group_tokens

    def make(self) -> TextCorpus:
        _once(self.folder, self._write)
        return self

    def _write(self, folder: Path) -> None:
        distinct = self.distinct or self.sources * self.files
        for index in range(self.sources * self.files):
            path = folder / f"source_{index:03d}.parquet"
            if index >= distinct:
                path.symlink_to(f"source_{index % distinct:03d}.parquet")
                continue
            rng = np.random.default_rng([7, index])
            with pq.ParquetWriter(path, self._schema(), compression="zstd") as writer:
                for _ in range(self.row_groups):
                    table = self._table(rng)
                    writer.write_table(table, row_group_size=table.num_rows)

    def _schema(self) -> pa.Schema:
        names = ("url", "title", "language", "crawled_at", "score", "license", "host", "digest") if self.files > 1 else ()
        return pa.schema([("tokens", pa.list_(pa.int32())), *((name, pa.string()) for name in names)])

    def _table(self, rng: np.random.Generator) -> pa.Table:
        documents = _documents(rng, self.row_group_tokens)
        schema = self._schema()
        others = [[f"{name} {number}" for number in rng.integers(1 << 60, size=len(documents))] for name in schema.names[1:]]
        return pa.table([documents, *others], schema=schema)


TEXT_8 = TextCorpus(sources=8, row_group_tokens=524_288)
"""2 MiB decoded a row group, 67 M tokens in all."""
TEXT_64 = TextCorpus(sources=64, row_group_tokens=262_144, distinct=16)
"""1 MiB decoded a row group, 268 M tokens to read."""


def text_of(benchmark: str, sources: int, files: int = 1) -> TextCorpus:
    if benchmark == "memory":
        return memory_text(sources, files)
    return {8: TEXT_8, 64: TEXT_64}[sources]


def memory_text(sources: int, files: int = 1) -> TextCorpus:
    """1.6 MiB decoded a row group: small for Parquet, so the memory peers need is not overstated."""
    # A source that names one file twice is an error, so its files are not links to each other.
    return TextCorpus(sources=sources, row_group_tokens=409_600, distinct=max(8, files), files=files)


def _documents(rng: np.random.Generator, tokens: int) -> pa.ListArray:
    lengths: list[int] = []
    left = tokens
    while left:
        draw = rng.lognormal(np.log(MEAN_DOCUMENT) - 0.5, 1.0)
        lengths.append(min(left, LONGEST_DOCUMENT, max(1, int(draw))))
        left -= lengths[-1]
    # Log-uniform ranks are Zipf's law with exponent 1.
    values = np.power(np.float32(VOCABULARY), rng.random(tokens, dtype=np.float32)).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))


@dataclass(frozen=True, slots=True)
class BpeCorpus:
    """Parquet files of real text, and a byte-level BPE of 16,000 tokens trained on some of it (Llama 3's pattern).

    The text is the Python code and the package descriptions that are installed here, cut into documents of at most 16,000
    characters and dealt over the sources. Where there is too little, it comes again.
    """

    sources: int = 8
    row_groups: int = 16
    row_group_bytes: int = 500_000

    @property
    def folder(self) -> Path:
        return DATA / f"bpe-{self.sources}x{self.row_groups}x{self.row_group_bytes}"

    @property
    def paths(self) -> list[str]:
        return [str(self.folder / f"source_{i:03d}.parquet") for i in range(self.sources)]

    @property
    def tokenizer(self) -> str:
        return str(self.folder / "tokenizer.json")

    def make(self) -> BpeCorpus:
        _once(self.folder, self._write)
        return self

    def _write(self, folder: Path) -> None:
        from bench.tokenizing import llama_3_style, train_tokenizer

        texts = _installed_texts(self.sources * self.row_groups * self.row_group_bytes)
        train_tokenizer(llama_3_style(), texts[:: max(1, len(texts) // 500)]).save(str(folder / "tokenizer.json"))
        np.random.default_rng(5).shuffle(texts)
        documents = cycle(texts)
        for path in self.paths:
            schema = pa.schema([("text", pa.string())])
            with pq.ParquetWriter(folder / Path(path).name, schema, compression="zstd") as writer:
                for _ in range(self.row_groups):
                    group: list[str] = []
                    while sum(map(len, group)) < self.row_group_bytes:
                        group.append(next(documents))
                    writer.write_table(pa.table({"text": group}), row_group_size=len(group))


def _installed_texts(num_bytes: int) -> list[str]:
    """Documents from what is installed here, at most so many bytes."""
    import sysconfig

    home, packages = (Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib"))
    found: list[str] = []
    size = 0
    for path in sorted({*home.rglob("*.py"), *packages.rglob("*.py"), *packages.glob("*.dist-info/METADATA")}):
        text = path.read_bytes().decode(errors="ignore")
        found += [text[begin : begin + 16_000] for begin in range(0, len(text), 16_000)]
        size += len(text)
        if size >= num_bytes:
            break
    return found


BPE = BpeCorpus()
"""64 MB of text."""
LARGE_BPE = BpeCorpus(row_groups=1, row_group_bytes=63_000_000)
"""500 MB in files of one row group each, as writers make them by default."""


def bpe_of(settings: Mapping[str, Any]) -> BpeCorpus:
    """The corpus that the settings of a competitor name."""
    return LARGE_BPE if settings.get("large_row_groups") else BPE


@dataclass(frozen=True, slots=True)
class ImageCorpus:
    """Tar shards of JPEG and caption pairs sized like COYO-700M: log-normal sides around 622 x 541, aspect at most 3,
    quality 90, smooth shapes under fine texture so that files take about 2.2 bits a pixel."""

    images: int = 1024
    shards: int = 8

    @property
    def folder(self) -> Path:
        return DATA / f"images-{self.images}"

    @property
    def paths(self) -> list[str]:
        return [str(self.folder / f"pairs-{shard:03d}.tar") for shard in range(self.shards)]

    def make(self) -> ImageCorpus:
        _once(self.folder, self._write)
        return self

    def _write(self, folder: Path) -> None:
        import tarfile  # here and below: trainers import this module, and their first batch is timed from its start

        rng = np.random.default_rng(11)
        numbers = range(self.images)
        for shard, path in enumerate(self.paths):
            with tarfile.open(folder / Path(path).name, "w") as archive:
                for number in numbers[shard :: self.shards]:
                    _add(archive, f"{number:06d}.jpg", _jpeg(rng))
                    _add(archive, f"{number:06d}.txt", _caption(rng).encode())


IMAGES = ImageCorpus()


def _jpeg(rng: np.random.Generator) -> bytes:
    from PIL import Image

    width, height = _size(rng)
    coarse = rng.integers(0, 256, (max(2, height // 64), max(2, width // 64), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    # Texture comes and goes over the picture, as in photographs: sky beside grass.
    strength = Image.fromarray(rng.integers(0, 13, (max(2, height // 96), max(2, width // 96)), dtype=np.uint8))
    strength = np.asarray(strength.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    texture = rng.standard_normal((height, width), dtype=np.float32) * strength
    pixels: NDArray[np.uint8] = np.clip(smooth + texture[..., None], 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=90)
    return out.getvalue()


def _size(rng: np.random.Generator) -> tuple[int, int]:
    sigma = 0.45
    while True:
        width, height = (int(mean * rng.lognormal(-(sigma**2) / 2, sigma)) for mean in (622, 541))
        if min(width, height) >= 200 and max(width, height) <= 3 * min(width, height):
            return width, height


def _caption(rng: np.random.Generator) -> str:
    words = ("red", "old", "house", "near", "the", "river", "with", "two", "boats", "and", "a", "dog")
    return " ".join(rng.choice(words, size=int(rng.integers(4, 24))))


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    import tarfile

    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _once(folder: Path, write: Callable[[Path], None]) -> None:
    """Fills the folder unless it is there: written beside it and renamed, so a stopped run leaves no half corpus."""
    if folder.exists():
        return
    import shutil
    import tempfile

    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        write(unfinished)
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def main() -> None:
    """Makes what the benchmarks with trainers read, side by side: python -m bench.corpus [FOLDER]"""
    if len(sys.argv) > 1:
        keep_in(sys.argv[1])
    from concurrent.futures import ProcessPoolExecutor

    wanted = [TEXT_8, TEXT_64, BPE, IMAGES, memory_text(256, 4), memory_text(256, 16)]
    with ProcessPoolExecutor() as processes:
        for done in [processes.submit(type(each).make, each) for each in wanted]:
            print(done.result().folder)


if __name__ == "__main__":
    main()
