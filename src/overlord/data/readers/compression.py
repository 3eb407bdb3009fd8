"""Compressed files, by the end of their name."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa

from overlord.errors import SourceError

Codec = Literal["gzip", "zstd"]
CODECS: dict[str, Codec] = {".gz": "gzip", ".gzip": "gzip", ".tgz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


def codec_of(path: str) -> Codec | None:
    return next((codec for ending, codec in CODECS.items() if path.lower().endswith(ending)), None)


def decompressed(path: str, codec: Codec, content: pa.NativeFile, most_bytes: int | None = None) -> pa.Buffer:
    """The content, or its first `most_bytes`. Several frames or members one after the other are one content."""
    try:
        with pa.CompressedInputStream(content, codec) as stream:
            return stream.read_buffer(most_bytes)
    except OSError as error:
        raise SourceError(
            f"{path} is not whole {codec} data: {error}; it was cut off or damaged, copy or write it again"
        ) from error
