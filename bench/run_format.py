"""One competitor of `bench.formats`, once: python -m bench.run_format FORMAT overlord|own --seconds S. Prints JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from bench.formats import DATA
from bench.peers.packing import BATCH_TOKENS, ROW_TOKENS, batches

WARMUP_TOKENS = 8_000_000
NUM_SAMPLES = 100_000
"""Of GPTDataset: it draws them all when it is made, and keeps the order in files."""


def source_of(name: str) -> Any:
    import overlord as ol

    folder = DATA / name
    if name == "megatron":
        return ol.formats.MegatronBin(folder / "text")
    if name == "mds":
        return ol.formats.Mds(folder / "text")
    if name == "huggingface":
        return ol.formats.HuggingFaceFiles(folder / "text")
    return ol.formats.Lance(folder / "text.lance")  # documents or blocks


def packed_by_overlord(name: str) -> Iterator[tuple[int, int]]:
    """(tokens, checksum) of each step; all arrays are read."""
    import overlord as ol

    # One microbatch of all rows, as `batches` makes them.
    batch = ol.Batch(tokens=BATCH_TOKENS, sequence_length=ROW_TOKENS, micro_tokens=BATCH_TOKENS, cut_documents=True)
    with ol.start(ol.Job(sources={"text": source_of(name)}, batch=batch, num_workers=0)) as loader:
        for step in loader.client(0):
            yield BATCH_TOKENS, sum(_sum_of(micro) for micro in step)


def read_by_overlord(name: str) -> Iterator[tuple[int, int]]:
    from overlord.sources.files import open_reader

    source = source_of(name)
    units, reader = source.units(), open_reader(source, release_gil=False)
    rng = np.random.default_rng(0)
    while True:
        for number in rng.permutation(len(units)).tolist():
            column: Any = reader.read_rows(units[number]).table.column("tokens").combine_chunks()
            tokens = column.flatten().to_numpy(zero_copy_only=False)
            yield len(tokens), int(tokens.sum())


def packed_by_owner(name: str) -> Iterator[tuple[int, int]]:
    for batch in batches(tokens.astype(np.int32) for tokens in samples_of(name)):
        yield BATCH_TOKENS, _sum_of(batch)


def read_by_owner(name: str) -> Iterator[tuple[int, int]]:
    """Sample by sample where the loader gives samples; by the batch where it gives Arrow or tensors of a batch."""
    if name == "lance":
        found = (column.flatten().to_numpy() for column in lance_columns())
    else:
        found = lance_tensors() if name == "lance_blocks" else samples_of(name)
    for tokens in found:
        yield tokens.size, int(tokens.sum())


def packed_by_gpt_dataset(name: str) -> Iterator[tuple[int, int]]:
    """Megatron's own samples of 8,192 tokens, eight a batch, as its training loop gets them. Positions and loss masks do not
    restart at documents, so that the dataset makes them once; there is no attention mask."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)  # as torchrun does; several that wait for each other would count as CPU time
    prefix = str(DATA / name / "text")
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=ROW_TOKENS,
        blend_per_split=[([prefix], None), None, None],
        path_to_cache=str(DATA / name / "cache"),
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    documents = IndexedDataset(prefix)
    chosen = np.arange(len(documents.document_indices) - 1, dtype=np.int32)
    samples: Any = GPTDataset(documents, prefix, chosen, NUM_SAMPLES, Split.train, config)
    while True:
        for batch in DataLoader(samples, batch_size=BATCH_TOKENS // ROW_TOKENS):
            yield BATCH_TOKENS, _sum_of({name: value.numpy() for name, value in batch.items()})


class _Tokenizer:
    """What GPTDataset asks of a tokenizer."""

    vocab_size = 50_000
    eod = 0
    pad = 50_000
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "none"}


def _sum_of(fields: Any) -> int:
    return sum(int(np.asarray(value).sum()) for value in fields.values() if isinstance(value, np.ndarray))


def samples_of(name: str) -> Iterator[np.ndarray]:
    """Endless, by the format's own loader."""
    folder = DATA / name
    if name == "megatron":
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        dataset = IndexedDataset(str(folder / "text"))  # once: what it returned may not be touched when it is gone
        rng = np.random.default_rng(0)
        while True:
            for row in rng.permutation(len(dataset)).tolist():
                yield dataset[row]
    elif name == "mds":
        from streaming import StreamingDataset

        stream = StreamingDataset(local=str(folder / "text"), shuffle=True, batch_size=1)
        while True:
            for sample in stream:
                yield sample["tokens"]
    elif name == "huggingface":
        import datasets

        rows = datasets.load_from_disk(str(folder / "text")).with_format("numpy")
        while True:
            for batch in rows.iter(batch_size=1000):
                yield from batch["tokens"]
    else:
        for column in lance_columns():
            values, ends = column.flatten().to_numpy(), column.offsets.to_numpy()
            yield from np.split(values, ends[1:-1] - ends[0])


def lance_columns() -> Iterator[Any]:
    """Endless, the column of each batch of Lance's torch loader."""
    import lance
    from lance.torch.data import LanceDataset

    table = lance.dataset(str(DATA / "lance" / "text.lance"))
    while True:
        for batch in LanceDataset(table, batch_size=1024, columns=["tokens"], to_tensor_fn=_unchanged):
            yield batch.column("tokens")


def lance_tensors() -> Iterator[np.ndarray]:
    """Endless, each batch of Lance's torch loader as it makes tensors by default."""
    import lance
    import torch
    from lance.torch.data import LanceDataset

    torch.set_num_threads(1)
    table = lance.dataset(str(DATA / "lance_blocks" / "text.lance"))
    while True:
        for batch in LanceDataset(table, batch_size=1024, columns=["tokens"]):
            yield batch.numpy()


def _unchanged(batch: Any, *_: Any, **__: Any) -> Any:
    return batch


RUNS = {
    ("overlord", "packed"): packed_by_overlord,
    ("overlord", "read"): read_by_overlord,
    ("own", "packed"): packed_by_owner,
    ("own", "read"): read_by_owner,
    ("overlord", "gpt_dataset"): packed_by_overlord,
    ("own", "gpt_dataset"): packed_by_gpt_dataset,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("format")
    parser.add_argument("peer", choices=("overlord", "own"))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--what", choices=("packed", "read", "gpt_dataset"), default="packed")
    parser.add_argument("--set", default="{}")
    given = parser.parse_args()
    began = time.perf_counter()
    parts = RUNS[given.peer, given.what](given.format)
    warm, first = 0, 0.0
    while warm < WARMUP_TOKENS:
        warm += next(parts)[0]
        first = first or time.perf_counter() - began
    total, cpu, start = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - start < given.seconds:
        total += next(parts)[0]
    print(json.dumps({"tokens_per_cpu_s": total / (time.process_time() - cpu), "first_batch_s": first}), flush=True)


if __name__ == "__main__":
    main()
