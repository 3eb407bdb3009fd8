"""Documents with several pictures of different sizes, in Parquet, and what an encoder would make of them."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

import overlord as ol

GRID = ol.vision.PatchGrid(patch=8, merge=2)
IMAGE_TOKEN = 3000
MARKER = 3001
DECODE = ol.vision.DecodeImage("pictures", size=None)


def picture(number: int, height: int, width: int) -> bytes:
    """A PNG of one colour, which tells its number."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (number % 256, number // 256, 77)).save(file, "PNG")
    return file.getvalue()


def picture_documents(path: Path, count: int, seed: int = 0) -> str:
    """Documents of 0 to 3 pictures, with a marker in the text for each; the first token tells the document's number."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        sizes = [rng.integers(8, 70, 2).tolist() for _ in range(rng.integers(0, 4))]
        text = [number, *rng.integers(1000, 2000, rng.integers(3, 20)).tolist()]
        for _ in sizes:
            text.insert(int(rng.integers(1, len(text) + 1)), MARKER)
        rows.append({"tokens": text, "pictures": [picture(4 * number + i, *size) for i, size in enumerate(sizes)]})
    schema = pa.schema([("tokens", pa.list_(pa.int32())), ("pictures", pa.list_(pa.binary()))])
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=8)
    return str(path)


def encoded(image: np.ndarray) -> np.ndarray:
    """[tokens, 2]: the picture's number and the number of the row."""
    rows = int(GRID.tokens(*(np.array([side]) for side in image.shape[:2]))[0])
    number = int(image[0, 0, 0]) + 256 * int(image[0, 0, 1])
    return np.stack([np.full(rows, number), np.arange(rows)], axis=1)


def picture_job(path: str, mesh: ol.Mesh, exchange: Any, **options: Any) -> ol.Job:
    strategy = ol.strategies.multimodal(
        ol.TransformerCost(1.0, 0.01),
        ol.vision.VisionTransformerCost(2.0, 0.05),
        grid=GRID,
        exchange=exchange,
        broadcast=options.pop("broadcast", ()),
    )
    source = ol.Parquet(
        path,
        transform=ol.vision.PlaceImages(DECODE, GRID, IMAGE_TOKEN, marker=MARKER),
        decode=DECODE,
        loss_mask="loss_mask",
        repeat=options.pop("repeat", False),
    )
    batch = ol.Batch(samples=options.pop("samples", 24), sequence_length=256, image_token=IMAGE_TOKEN, long_documents="fail")
    return ol.Job(sources={"pictures": source}, batch=batch, mesh=mesh, strategy=strategy, **options)
