"""Images with captions from a tar file, as padded batches: one sample a row, its picture beside it.

python examples/image_text.py
"""

import io
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

import overlord as ol

COLOURS = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 200)}


def write_shard(path: Path, num_samples: int) -> None:
    """A WebDataset shard: members that share a name up to the first dot (00017.jpg, 00017.txt) are one sample."""
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for number in range(num_samples):
            name, colour = list(COLOURS.items())[number % 3]
            height, width = rng.integers(80, 200, 2).tolist()
            picture = io.BytesIO()
            Image.new("RGB", (width, height), colour).save(picture, "JPEG")
            caption = f"a {'wide' if width > height else 'tall'} {name} picture"
            for ending, content in (("jpg", picture.getvalue()), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{number:05}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for shard in range(2):
            write_shard(Path(folder) / f"pairs-{shard}.tar", num_samples=30)
        job = ol.Job(
            sources={
                "pairs": ol.WebDataset(
                    f"{folder}/pairs-{{0..1}}.tar",
                    columns={"jpg": pa.binary_view(), "txt": pa.string()},
                    # `keep` carries the picture through. It stays in the tar, unread but for its header, until a plan asks
                    # for its row: only then is it decoded, straight to the size wanted.
                    transform=ol.Tokenize("txt", encoding=ol.ByteTokenizer(), keep=("jpg",)),
                    decode=ol.vision.DecodeImage("jpg", size=(64, 64)),
                    repeat=False,
                )
            },
            batch=ol.Batch(samples=16, sequence_length=32, layout="padded"),
            mesh=ol.Mesh(dp=2),  # 8 of the 16 samples to each rank
        )
        with ol.start(job) as loader:
            seen = 0
            for step in loader.client(rank=0):
                micro = step.microbatches[0]
                if step.number == 0:
                    shapes = {name: micro[name].shape for name in ("tokens", "labels", "attention_mask", "images")}
                    print(f"a batch of rank 0: {shapes}")
                for image, document in zip(micro["images"], micro["image_document"], strict=True):
                    # Rows have one width, so a document's first place tells its row.
                    row = micro["document_starts"][document] // micro["tokens"].shape[1]
                    caption = bytes(micro["tokens"][row][micro["attention_mask"][row]].astype(np.uint8)).decode()
                    brightest = list(COLOURS)[int(image.mean((0, 1)).argmax())]
                    assert brightest in caption, f"{caption!r} beside a {brightest} picture"
                    seen += 1
            print(f"rank 0 saw {seen} of the 60 pictures in one epoch, each beside its own caption")


if __name__ == "__main__":
    main()
