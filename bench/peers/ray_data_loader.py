"""Ray Data: one dataset for all trainers, split as it streams, as Ray Train does it; packed in the trainer.

The dataset lives in a process of its own, which a benchmark starts beside the trainers; they find their parts of it by name.
Sources are read one after the other and in the order of their files. With the setting `shuffled` text is shuffled as Ray
Data's guides do it without a barrier: files in a random order, and in each trainer a local shuffle over as many rows as a
row group of every source has. The other loaders have so many rows at hand. A batch is of the few files that are read at
the time: there are no weights.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from typing import Any, cast

import numpy as np

from bench import corpus
from bench.peers.packing import BATCH_TOKENS, batches
from bench.peers.pictures import BATCH, SIZE
from bench.run_one import Work

SHELF = "bench-ray-data"
_CORE_TOKENS = 45_000_000
_CORE_IMAGES = 600
"""More than a core of Ray Data takes a second."""
_START_S = 40.0
"""Before the clock of a benchmark starts: with hundreds of files some trainers wait that long for their first batch, and the
others take theirs meanwhile. A dataset that is read to its end inside the window would cost nothing from then on."""
_BLOCK = 64
_LOOK_EVERY_S = 0.1


def text(work: Work, rank: int) -> Iterator[Any]:
    if work.settings.get("shuffled"):
        rows = work.sources * corpus.text_of(work.benchmark, work.sources).row_group_tokens // corpus.MEAN_DOCUMENT
        options = {
            "batch_size": BATCH_TOKENS // corpus.MEAN_DOCUMENT,
            "local_shuffle_buffer_size": rows,
            "local_shuffle_seed": rank,
        }
    else:
        options = {"batch_size": None}
    packed = batches(_documents(_part(work, rank), options))
    return packed if work.micros == 1 else iter(lambda: tuple(islice(packed, work.micros)), ())


def images(work: Work, rank: int) -> Iterator[Mapping[str, Any]]:
    for batch in _part(work, rank).iter_batches(batch_size=BATCH, batch_format="numpy", prefetch_batches=2):
        yield {"images": batch["images"], "captions": batch["txt"]}


def _part(work: Work, rank: int) -> Any:
    ray = _connect(work.settings["cluster"])
    while True:
        try:
            return ray.get(ray.get_actor(SHELF, namespace=SHELF).part.remote(rank))
        except ValueError:  # the dataset is not there yet
            time.sleep(_LOOK_EVERY_S)


def _documents(part: Any, options: Mapping[str, Any]) -> Iterator[np.ndarray[Any, Any]]:
    for table in part.iter_batches(**options, batch_format="pyarrow", prefetch_batches=2):
        for column in table.column("tokens").chunks:
            values, offsets = column.values.to_numpy(), column.offsets.to_numpy().tolist()
            for begin, end in pairwise(offsets):
                yield values[begin:end]


def _connect(address: str) -> Any:
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    paths = [os.path.abspath(path) for path in sys.path]
    ray.init(
        address=address,
        namespace=SHELF,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
    )
    return ray


def _repeats(work: Work, most_a_core: int, batch_units: int, units: int) -> int:
    """How often all files are read: as often as the benchmark may need them. Ray Data reads the footers of all files when
    it starts, so files that are never read would be charged to those that are."""
    before_the_clock = work.warmup * work.ranks * work.micros * batch_units
    most = most_a_core * len(os.sched_getaffinity(0)) * (work.seconds + _START_S)
    return math.ceil((before_the_clock + most) / units)


class Shelf:
    """Keeps the parts of a dataset for the trainers."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def part(self, rank: int) -> Any:
        return self._parts[rank]


def decoded(batch: dict[str, Any]) -> dict[str, Any]:
    import io

    from PIL import Image

    pictures = []
    for encoded in batch["jpg"]:
        picture = Image.open(io.BytesIO(encoded))
        picture.draft("RGB", (SIZE, SIZE))  # decodes at a reduced scale, as Overlord does
        pictures.append(np.asarray(picture.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)))
    return {"images": np.stack(pictures), "txt": batch["txt"]}


def main() -> None:
    """Make the dataset, and keep it until standard input closes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("work", type=json.loads)
    work = Work(**parser.parse_args().work)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    ray = _connect(work.settings["cluster"])
    from ray import data

    data.DataContext.get_current().enable_progress_bars = False
    if work.benchmark == "images":
        paths = corpus.IMAGES.paths * _repeats(work, _CORE_IMAGES, BATCH, corpus.IMAGES.images)
        dataset = data.read_webdataset(paths, decoder=None, suffixes=["jpg", "txt"])
        dataset = dataset.map_batches(cast(Any, decoded), batch_size=_BLOCK, batch_format="numpy")
    else:
        text = corpus.text_of(work.benchmark, work.sources, work.files)
        repeats = _repeats(work, _CORE_TOKENS, BATCH_TOKENS, text.tokens)
        if work.settings.get("shuffled"):
            dataset = data.read_parquet(text.paths * repeats, shuffle="files").select_columns(["tokens"])
        else:
            dataset = data.read_parquet(text.paths * repeats).select_columns(["tokens"])
    parts = dataset.streaming_split(work.ranks, equal=False)
    shelf = ray.remote(num_cpus=0)(Shelf).options(name=SHELF, namespace=SHELF, max_concurrency=8).remote(parts)
    ray.get(shelf.part.remote(0))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
