"""Compressed files, by the end of their name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pyarrow as pa

from overlord.errors import BufferTooSmallError, SourceError

Codec = Literal["gzip", "zstd"]
CODECS: dict[str, Codec] = {".gz": "gzip", ".gzip": "gzip", ".tgz": "gzip", ".zst": "zstd", ".zstd": "zstd"}

BLOCK_BYTES = 8 << 20
"""How much is decompressed at a time."""


def codec_of(path: str) -> Codec | None:
    return next((codec for ending, codec in CODECS.items() if path.lower().endswith(ending)), None)


def decompressed_blocks(path: str, codec: Codec, content: pa.NativeFile, block_bytes: int) -> Iterator[bytes]:
    """The content in blocks of at most `block_bytes`: how much there is cannot be known beforehand. Several frames or
    members one after the other are one content."""
    try:
        with pa.CompressedInputStream(content, codec) as stream:
            while block := stream.read_buffer(block_bytes).to_pybytes():  # read() leaks its memory when it raises
                yield block
    except OSError as error:
        raise SourceError(
            f"{path} is not whole {codec} data: {error}; it was cut off or damaged, copy or write it again"
        ) from error


def decompressed(path: str, codec: Codec, content: pa.NativeFile, most_bytes: int) -> pa.Buffer:
    """The whole content, if it has no more than `most_bytes`."""
    whole = pa.BufferOutputStream()
    for block in decompressed_blocks(path, codec, content, BLOCK_BYTES):
        if whole.tell() + len(block) > most_bytes:
            raise BufferTooSmallError(
                f"{path} has more than {most_bytes:,} bytes decompressed, which is more than one unit may "
                "take; raise buffer_bytes, or write it as several smaller files"
            )
        whole.write(block)
    return whole.getvalue()
