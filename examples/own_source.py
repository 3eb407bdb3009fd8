"""Bring your own source: rows of an SQLite table, read in ranges of their keys.

python examples/own_source.py
"""

import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

import overlord as ol


@dataclass(frozen=True)
class SqliteTable(ol.Source):
    """A table with an integer key `id`. Two methods make a source, and `identity` makes its saved states safe."""

    path: str
    table: str
    column: str = "text"
    rows_per_unit: int = 100

    def units(self) -> Sequence[ol.Unit]:
        # Called once per run. A unit is what is read at once, and what loaders share out; small ones shuffle well, large
        # ones read fast. `detail` is for `read`, which may run in another thread or process.
        with closing(sqlite3.connect(self.path)) as database:
            (last,) = database.execute(f"SELECT MAX(id) FROM {self.table}").fetchone()
        starts = range(0, last + 1, self.rows_per_unit)
        return [ol.Unit(self.path, index, detail=start) for index, start in enumerate(starts)]

    def read(self, unit: ol.Unit) -> pa.Table:
        # Called as often as Overlord likes, so the same unit must give the same rows in the same order.
        wanted = (unit.detail, unit.detail + self.rows_per_unit)
        query = f"SELECT {self.column} FROM {self.table} WHERE id >= ? AND id < ? ORDER BY id"
        with closing(sqlite3.connect(self.path)) as database:
            texts = [text for (text,) in database.execute(query, wanted)]
        return pa.table({self.column: pa.array(texts, pa.string())})

    def identity(self) -> str:
        # All that decides which rows come in which order: a saved state is refused when this has changed.
        return f"SqliteTable({self.path}, {self.table}, {self.column}, {self.rows_per_unit})"


def write_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE poems (id INTEGER PRIMARY KEY, text TEXT)")
        lines = ((number, f"verse {number} " + "la " * (number % 17)) for number in range(1000))
        database.executemany("INSERT INTO poems VALUES (?, ?)", lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "poems.sqlite"
        write_database(path)
        job = ol.Job(
            # Mixing, shuffling, packing, resuming and the rest come with being a source.
            sources={
                "poems": SqliteTable(
                    path=str(path),
                    table="poems",
                    transform=ol.Tokenize("text", encoding=ol.ByteTokenizer()),
                    window=4,  # shuffle rows over four units at a time
                    repeat=False,
                )
            },
            batch=ol.Batch(tokens=4096, sequence_length=1024),
        )
        with ol.start(job) as loader:
            documents = sum(micro["num_documents"] for step in loader.client(rank=0) for micro in step)
            steps = loader.report().step
    print(f"one epoch: {documents} documents in {steps} steps")
    assert documents == 1000, "every row once"


if __name__ == "__main__":
    main()
