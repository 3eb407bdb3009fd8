"""The demo's corpus: five sources in three formats, made in seconds from files that every Python installation has.

code         the standard library, a document per file             Parquet
packages     the packages installed beside Overlord, likewise      Parquet
docstrings   docstrings of the standard library                    JSONL, zstd
manual       Python's reference topics, licences, readme files     JSONL, zstd
pictures     drawn here, with captions                             tar of JPEG and text
"""

from __future__ import annotations

import ast
import importlib
import io
import os
import sysconfig
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa

from overlord.errors import SourceError, SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

CODE_BYTES = 8_000_000
DOCSTRING_BYTES = 600_000
MANUAL_BYTES = 3_000_000
NUM_PICTURES = 384
FILES_PER_SOURCE = 4
ROWS_PER_GROUP = 64

# Folders without prose or ordinary code: tables, test data, copies of other packages.
_PASSED_OVER = frozenset(("test", "tests", "encodings", "pydoc_data", "lib2to3", "site-packages", "__pycache__"))
_COLOURS = {
    "red": (210, 40, 40), "green": (40, 160, 70), "blue": (50, 80, 200), "yellow": (230, 200, 50),
    "black": (20, 20, 25), "white": (245, 245, 240), "orange": (235, 130, 30), "violet": (130, 60, 180),
}  # fmt: skip


def make_corpus(folder: Path) -> None:
    """Write the five sources into subfolders of `folder`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = Path(np.__file__).parent.parent
    code = list(_within(_texts(library, (".py",)), CODE_BYTES))
    _write_parquet(folder / "code", code)
    _write_parquet(folder / "packages", list(_within(_texts(packages, (".py",)), CODE_BYTES)))
    _write_jsonl(folder / "docstrings", list(_within(_docstrings(code), DOCSTRING_BYTES)))
    _write_jsonl(folder / "manual", list(_within(_manual(packages), MANUAL_BYTES)))
    _write_pictures(folder / "pictures", NUM_PICTURES)


def _texts(root: Path, endings: tuple[str, ...]) -> Iterator[str]:
    """The contents of the UTF-8 files under a folder, in order of their names."""
    for parent, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _PASSED_OVER)
        for name in sorted(files):
            if name.endswith(endings):
                try:
                    yield (Path(parent) / name).read_text("utf-8")
                except (UnicodeDecodeError, OSError):
                    continue  # a corpus for a demo can do without it


def _within(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    left = num_bytes
    for text in texts:
        if left <= 0:
            return
        left -= len(text)
        if text:
            yield text


def _docstrings(files: Sequence[str]) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for text in files:
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue  # some files are wrong on purpose
        found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
        yield from (docstring for docstring in found if docstring)


def _manual(packages: Path) -> Iterator[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave it out
        topics = {}
    yield from (topics[name] for name in sorted(topics))
    for folder in sorted(packages.glob("*.dist-info")):
        yield from _texts(folder, ("METADATA", "LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING"))


def _shards(folder: Path, documents: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """The documents of each file, dealt round-robin."""
    if not documents:
        raise SourceError(f"found no text for the demo's source {folder.name!r} on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(FILES_PER_SOURCE):
        yield number, documents[number::FILES_PER_SOURCE]


def _write_parquet(folder: Path, documents: Sequence[str]) -> None:
    import pyarrow.parquet as pq

    for number, texts in _shards(folder, documents):
        table = pa.table({"text": pa.array(texts, pa.large_string())})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=ROWS_PER_GROUP, compression="zstd")


def _write_jsonl(folder: Path, documents: Sequence[str]) -> None:
    for number, texts in _shards(folder, documents):
        with pa.CompressedOutputStream(str(folder / f"{number}.jsonl.zst"), "zstd") as file:
            file.write(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))


def _write_pictures(folder: Path, num_pictures: int) -> None:
    simplejpeg = _simplejpeg()
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    for shard in range(FILES_PER_SOURCE):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, num_pictures, FILES_PER_SOURCE):
                pixels, caption = _picture(rng)
                _add(tar, f"{number:05}.jpg", simplejpeg.encode_jpeg(pixels, quality=85))
                _add(tar, f"{number:05}.txt", caption.encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _picture(rng: np.random.Generator) -> tuple[NDArray[np.uint8], str]:
    """A drawn shape on a background with a gradient, and its caption."""
    height, width = (int(side) for side in rng.integers(96, 257, 2))
    ground, colour = rng.choice(list(_COLOURS), 2, replace=False).tolist()
    radius = rng.uniform(0.15, 0.45)
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    shapes = {
        "disc": x**2 + y**2 < radius**2,
        "ring": abs(np.hypot(x, y) - radius) < radius / 4,
        "square": np.maximum(abs(x), abs(y)) < radius,
        "diamond": abs(x) + abs(y) < radius,
        "stripe": abs(x + y) < radius / 2,
    }
    shape = str(rng.choice(list(shapes)))
    light = (0.75 + 0.25 * x)[..., None]
    pixels = np.where(shapes[shape][..., None], _COLOURS[colour], np.array(_COLOURS[ground]) * light)
    size = "small" if radius < 0.25 else "large" if radius > 0.35 else "middling"
    caption = f"A {size} {colour} {shape} on a {ground} ground, {width} by {height} pixels."
    return np.ascontiguousarray(pixels, dtype=np.uint8), caption


def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ModuleNotFoundError:
        raise SpecError("the demo draws pictures, which needs an extra: pip install 'overlord-dataloader[images]'") from None
    return simplejpeg
