"""What it costs to keep a chunk twice, or to have it again: making it, copying it from its loader, saving and reading it.

    python -m bench.shadow_cost [--json] [--chunks N] [--tokens N]

CPU seconds of a chunk, for pre-tokenised text and for text that is tokenised on the way: to make it; to copy it through
shared memory of the node (`near`) and through a message, as between nodes (`far`, both ends); to write it into a snapshot
and read it back; and the bytes of each. Beside them the planner's log: bytes and CPU seconds of a step. All in one process,
so that its CPU time is all there is.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from bench.measure import Spread
from bench.telling import parser_of, tell
from overlord.chunks.chunk import Chunk
from overlord.chunks.chunk_files import decode_chunk, encode_chunk
from overlord.chunks.shared_rows import ChunkArenas, ChunkHead, RowsInMemory, copy_chunk, share_chunk
from overlord.roles.loader_host import LoaderHost

WORDS = 4000
STEPS = 64


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    source: str
    chunk_bytes: int
    file_bytes: int
    make_s: Spread
    near_s: Spread
    far_s: Spread
    save_s: Spread
    read_s: Spread
    log_bytes_per_step: float
    log_s_per_step: float


def files(folder: Path, tokens: int, num_chunks: int) -> tuple[str, str]:
    """The same number of tokens in each chunk: as lists of ids, and as text."""
    rng = np.random.default_rng(7)
    words = [bytes(rng.integers(97, 123, rng.integers(2, 9), np.uint8)).decode() for _ in range(WORDS)]
    rows = tokens // 500
    ids = pa.array([rng.integers(1, 32000, 500, dtype=np.int32) for _ in range(rows * num_chunks)], pa.list_(pa.int32()))
    text = pa.array([" ".join(words[at] for at in rng.integers(0, WORDS, 250)) for _ in range(rows * num_chunks)])
    paths = str(folder / "ids.parquet"), str(folder / "text.parquet")
    pq.write_table(pa.table({"tokens": ids}), paths[0], row_group_size=rows)
    pq.write_table(pa.table({"text": text}), paths[1], row_group_size=rows)
    return paths


def jobs(folder: Path, tokens: int, num_chunks: int) -> dict[str, ol.Job]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    ids, text = files(folder, tokens, num_chunks)
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = pq.read_table(text).column("text").slice(0, 200).to_pylist()
    learnt.train_from_iterator(words, trainers.BpeTrainer(vocab_size=2000, show_progress=False))
    tokenize = ol.Tokenize("text", encoding=learnt)
    sources = {"ids": ol.Parquet(ids, window=1), "text": ol.Parquet(text, window=1, transform=tokenize)}
    batch = ol.Batch(tokens=8192, sequence_length=2048)
    return {name: ol.Job(sources={name: source}, batch=batch, num_workers=1) for name, source in sources.items()}


def cpu_of(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    found = call()
    return time.process_time() - began, found


def measure(name: str, job: ol.Job, folder: Path, num_chunks: int) -> ChunkCosts:
    log_bytes, log_s = _log_costs(job, folder / f"log-{name}")
    costs: dict[str, list[float]] = {kind: [] for kind in ("make", "near", "far", "save", "read")}
    arenas, copies = ChunkArenas(), ChunkArenas()
    sizes: list[tuple[int, int]] = []
    with ol.start(job) as loader:
        engine: Any = loader._roles.engine
        host: LoaderHost = engine._roles[loader._roles.fleet.names[0]]
        make = host._open(name).loader._make
        for number in range(num_chunks):
            made_s, chunk = cpu_of(lambda number=number: share_chunk(make(number), (), arenas))
            head, rows = ChunkHead.of(chunk), chunk.shared
            assert rows is not None
            near_s, _ = cpu_of(partial(copy_chunk, head, rows, copies))
            far_s, _ = cpu_of(partial(_send, head, rows, copies))
            path = folder / f"{name}-{number}"
            save_s, num_bytes = cpu_of(partial(_save, path, chunk, name, number))
            read_s, _ = cpu_of(partial(_read, path, chunk, name, number))
            sizes.append((chunk.num_bytes, num_bytes))
            for kind, seconds in zip(costs, (made_s, near_s, far_s, save_s, read_s), strict=True):
                costs[kind].append(seconds)
    spreads = {kind: Spread.of(seconds[1:] or seconds) for kind, seconds in costs.items()}  # the first allocates memory
    return ChunkCosts(
        source=name,
        chunk_bytes=max(size for size, _ in sizes),
        file_bytes=max(size for _, size in sizes),
        make_s=spreads["make"],
        near_s=spreads["near"],
        far_s=spreads["far"],
        save_s=spreads["save"],
        read_s=spreads["read"],
        log_bytes_per_step=log_bytes,
        log_s_per_step=log_s,
    )


def _send(head: ChunkHead, rows: RowsInMemory, arenas: ChunkArenas) -> Chunk:
    head, rows = pickle.loads(pickle.dumps((head, rows), 5))
    return copy_chunk(head, rows, arenas)


def _save(path: Path, chunk: Chunk, name: str, number: int) -> int:
    parts = encode_chunk(chunk, name, number, columns=(), bad_rows=())
    assert parts is not None
    return path.write_bytes(b"".join(parts))


def _read(path: Path, chunk: Chunk, name: str, number: int) -> Chunk:
    lineage = chunk.lineage
    return decode_chunk(path.read_bytes(), name, number, units=lineage.units, unit_numbers=lineage.unit_numbers)[0]


def _log_costs(job: ol.Job, folder: Path) -> tuple[float, float]:
    """Bytes and CPU seconds of the planner's log for a step: with the log less without it."""
    seconds: list[float] = []
    for log in (None, ol.Log(str(folder))):
        with ol.start(job, log=log) as loader:
            client = loader.client(0)
            next(client)
            seconds.append(cpu_of(lambda client=client: [next(client) for _ in range(STEPS)])[0])
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return num_bytes / STEPS, max(seconds[1] - seconds[0], 0.0) / STEPS


def show(result: ChunkCosts) -> None:
    def ms(spread: Spread) -> str:
        return f"{1e3 * spread.median:.2f} ({1e3 * spread.low:.2f}-{1e3 * spread.high:.2f}) ms"

    print(f"{result.source}: chunk of {result.chunk_bytes:,} bytes, snapshot of {result.file_bytes:,}; CPU time")
    for what in ("make", "near", "far", "save", "read"):
        print(f"  {what:5} {ms(getattr(result, f'{what}_s'))}")
    print(f"  the planner's log: {result.log_bytes_per_step:,.0f} bytes and {1e3 * result.log_s_per_step:.2f} ms a step")


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of a chunk of ids")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = jobs(Path(folder), given.tokens, given.chunks)
        results = [measure(name, job, Path(folder), given.chunks) for name, job in found.items()]
    tell(results, show, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
