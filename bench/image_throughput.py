"""Image-text tar to batches of 64 uint8 images of 336 x 336: images per CPU-second of the whole process tree.

    python -m bench.image_throughput [--quick] [--json] [--rounds N] [--seconds S] [--only NAME ...]

JPEGs sized like COYO-700M, data in the page cache, one rank. Peers decode with Pillow and resize by its bilinear
filter; Overlord decodes at a reduced scale with libjpeg-turbo. Start-up is excluded. The PSNR at the
end says how far Overlord's pictures are from Pillow's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from bench import corpus
from bench.measure import Competitor, Setting, Table, compare, options

COMPETITORS = (
    Competitor("overlord", "overlord", {"workers": 1}),
    Competitor("overlord, no threads", "overlord", {"workers": 0}),
    Competitor("torch", "torch"),
    Competitor("webdataset", "webdataset"),
    Competitor("spdl", "spdl"),
)
TABLE = Table("units_per_cpu_s", 1.0, "images / CPU s", baselines=("overlord",))


def main(argv: Sequence[str] | None = None) -> int:
    given = options(__doc__, argv, seconds=4.0)
    corpus.IMAGES.make()
    setting = Setting("image-text tar, 1 rank", "images", ("--seconds", str(given.seconds), "--warmup", "16"))
    status = compare([setting], given.chosen(COMPETITORS), TABLE, given)
    if not given.json and "overlord" in [competitor.name for competitor in given.chosen(COMPETITORS)]:
        worst, median = psnr()
        print(f"\nOverlord's pictures against Pillow's: PSNR median {median:.1f} dB, worst {worst:.1f} dB")
    return status


def psnr(images: int = 256) -> tuple[float, float]:
    """Overlord's pictures against Pillow's full decode and bilinear resize: the worst and the median, in dB."""
    import overlord as ol
    from bench.peers.pictures import SIZE, TarPairs, decode

    pairs = TarPairs(corpus.IMAGES.paths)
    reduced = ol.vision.DecodeImage(size=(SIZE, SIZE))
    found = []
    for number in range(min(images, len(pairs))):
        jpeg, _ = pairs[number]
        difference = reduced.decode(jpeg).astype(np.float64) - decode(jpeg)
        found.append(10 * np.log10(255**2 / max(np.mean(difference**2), 1e-9)))
    return float(np.min(found)), float(np.median(found))


if __name__ == "__main__":
    sys.exit(main())
