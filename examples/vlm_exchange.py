"""A vision-language job in which ranks encode each other's images: both the encoder and the backbone have even work.

python examples/vlm_exchange.py

Here four ranks live in one process and the all-to-all is a few lines of numpy. In a trainer it is one call:
`rows = overlord.trainer.exchange(encoder(micro["encode_images"]), micro)`.
"""

import io
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

import overlord as ol
from overlord.arrange.vision.encoding import Encoding

RANKS = 4
IMAGE_TOKEN = 300
GRID = ol.vision.PatchGrid(patch=14, merge=2)
BACKBONE = ol.TransformerCost.of(hidden=2048, layers=24)
ENCODER = ol.vision.VisionTransformerCost.of(hidden=1024, layers=24)


def write_pairs(path: Path, count: int) -> None:
    """Pictures of all sizes, each of one shade of grey, with captions of all lengths that tell the shade."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        picture = io.BytesIO()
        height, width = np.exp(rng.normal(5.5, 0.6, 2)).astype(int).clip(28, 900).tolist()
        Image.new("L", (width, height), number % 256).save(picture, "PNG")
        rows.append({"image": picture.getvalue(), "text": f"{number % 256:03} " + "word " * int(rng.integers(1, 120))})
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=50)


def encode(images: list[np.ndarray]) -> np.ndarray:
    """Stands for the encoder: one row for each token of each image, holding its shade."""
    rows = [np.full(int(GRID.tokens(*np.array([[i.shape[0]], [i.shape[1]]]))[0]), int(i[0, 0, 0])) for i in images]
    return np.concatenate([np.zeros(0, np.int64), *rows])


def exchange(micros: list[dict]) -> list[np.ndarray]:
    """The rows of each rank's own images, from what all ranks encoded."""
    sent = [encode(list(m["encode_images"]))[m["send_rows"]] for m in micros]
    pieces = [np.split(rows, np.cumsum(m["send_counts"])[:-1]) for rows, m in zip(sent, micros, strict=True)]
    return [np.concatenate([p[rank] for p in pieces])[m["receive_rows"]] for rank, m in enumerate(micros)]


def straggler(work: np.ndarray) -> str:
    return f"{work.max() / work.mean():.2f}x the mean"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_pairs(Path(folder) / "pairs.parquet", 400)
        decode = ol.vision.DecodeImage("image")
        source = ol.Parquet(
            f"{folder}/pairs.parquet",
            transform=[
                ol.Tokenize("text", encoding=ol.ByteTokenizer(), keep=("image",)),
                ol.vision.PlaceImages(decode, GRID, IMAGE_TOKEN),  # a place in the text for every token of the image
            ],
            decode=decode,
            loss_mask="loss_mask",
        )
        job = ol.Job(
            sources={"pairs": source},
            batch=ol.Batch(
                samples=100, sequence_length=2048, micro_tokens=4096, image_token=IMAGE_TOKEN, long_documents="drop"
            ),
            mesh=ol.Mesh(dp=RANKS),
            strategy=ol.strategies.multimodal(BACKBONE, ENCODER, grid=GRID, exchange="cp"),
        )
        with ol.start(job) as loader:
            planned = loader.plan(0)
            assert planned is not None
            encoding = planned.plan.part(Encoding)
            assert encoding is not None
            work = np.bincount(encoding.place, ENCODER(encoding.images), RANKS)
            print(f"the slowest encoder takes {straggler(work)},", end=" ")
            print(f"the slowest backbone {planned.plan.max_over_mean(BACKBONE(planned.plan.samples)):.2f}x")
            checked = 0
            for micros in zip(*(next(loader.client(rank)) for rank in range(RANKS)), strict=True):
                for micro, rows in zip(micros, exchange(list(micros)), strict=True):
                    starts = np.cumsum(micro["image_tokens"]) - micro["image_tokens"]
                    for document, start in zip(micro["image_document"], starts, strict=True):
                        begin = micro["document_starts"][document]
                        text = micro["tokens"][begin : begin + micro["document_lengths"][document]]
                        shade = bytes(text[text != IMAGE_TOKEN][:3].astype(np.uint8)).decode()
                        assert int(shade) == rows[start], "a caption beside another picture's rows"
                        checked += 1
            print(f"{checked} pictures of step 0 were encoded somewhere and reached their captions")


if __name__ == "__main__":
    main()
