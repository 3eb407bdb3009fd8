"""How the sources of a job, and the work on their images, are spread over the processes of a machine."""

import gzip
import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.chunks.bad_rows import BadRowLog
from overlord.chunks.chunk_maker import ChunkMaker
from overlord.loaders.routing import RoutingTable
from overlord.roles.assembly import list_units, make_decode_threads, make_partition, with_windows
from overlord.runtime.engine import Workplace, WorkplaceSize
from overlord.runtime.threads import Threads
from overlord.sources import unpacking
from overlord.sources.unpacking import UnpackedFile
from overlord.stream.chunk_order import chunks_per_epoch


def keep(table: pa.Table) -> pa.Table:
    return table


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.parquet"
    pq.write_table(pa.table({"tokens": [[1, 2, 3]] * 8}), path)
    return path


@pytest.mark.parametrize(("transform", "num_hosts"), [((), 4), (keep, 16)], ids=["only read", "transformed"])
def test_sources_that_are_only_read_leave_the_constructors_alone(file, transform, num_hosts):
    sources = {f"source {i}": ol.Parquet(file, transform=transform) for i in range(16)}
    job = ol.Job(sources=sources, batch=ol.Batch(sequence_length=8, tokens=64), mesh=ol.Mesh(dp=4))
    partition = make_partition(job, list_units(job.sources), ol.Processes(16))
    assert len(partition.hosts) == num_hosts


@pytest.mark.parametrize(
    ("num_cores", "num_sharing", "num_groups", "num_threads"),
    [
        (16, 1, 8, 16),  # the groups of a node in one process
        (16, 1, 64, 16),
        (16, 8, 8, 2),
        (16, 16, 8, 2),  # eight processes have no constructor
        (16, 16, 64, 1),
        (16, 2, 64, 8),
        (96, 64, 64, 2),
        (2, 1, 8, 2),
    ],
)
def test_the_constructors_of_a_machine_decode_on_all_of_its_cores(
    file: Path, monkeypatch: pytest.MonkeyPatch, num_cores: int, num_sharing: int, num_groups: int, num_threads: int
):
    monkeypatch.setattr("overlord.runtime.engine.num_usable_cores", lambda: num_cores)
    source = ol.Parquet(file, decode=ol.vision.DecodeImage("image", size=(16, 16)))
    job = ol.Job(sources={"a": source}, batch=ol.Batch(sequence_length=8, tokens=1024), mesh=ol.Mesh(dp=num_groups))
    for machine_cores in (None, num_cores):
        workplace = Workplace(WorkplaceSize(machine_cores=machine_cores, num_sharing=num_sharing))
        threads = make_decode_threads(job, workplace)
        try:
            assert isinstance(threads, Threads)
            assert threads.num_threads == num_threads
        finally:
            threads.shutdown(wait=False)
            workplace.close()


@dataclass(frozen=True)
class Counted(ol.Jsonl):
    """Remembers the compressed files that its readers open, which count what they decompress."""

    opened: ClassVar[list[UnpackedFile]] = []

    def unpack(self, part: Any) -> UnpackedFile:
        self.opened.append(super().unpack(part))
        return self.opened[-1]


def bytes_decompressed(job: ol.Job, num_hosts: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """By all loader hosts in one epoch of the source "packed", each with what a process of its own would know of files."""
    units = list_units(job.sources)
    job = with_windows(job, units)
    source = job.sources["packed"]
    partition = make_partition(job, units, ol.Processes(num_hosts))
    names = [f"host {i}" for i in range(len(partition.hosts))]
    table = RoutingTable.of(partition, names)
    makers = {name: _maker(source, units["packed"]) for name in names}
    sizes: dict[str, OrderedDict[Any, int]] = {name: OrderedDict() for name in names}
    Counted.opened.clear()
    for number in range(chunks_per_epoch(len(units["packed"]), source.units_per_chunk)):
        host = table.host_of("packed", number)
        monkeypatch.setattr(unpacking, "_sizes", sizes[host])
        makers[host].make(number)
    for maker in makers.values():
        maker.close()
    return sum(file.num_decompressed for file in Counted.opened)


def _maker(source: ol.Source, units: Any) -> ChunkMaker:
    batch = ol.Batch(sequence_length=64, tokens=64)
    return ChunkMaker("packed", source, units, seed=0, batch=batch, bad_rows=BadRowLog("packed", source.bad_rows))


@pytest.mark.parametrize("num_files", [1, 3, 11])
def test_no_more_is_decompressed_where_there_are_more_hosts(tmp_path, num_files, monkeypatch):
    for i in range(num_files):
        lines = [json.dumps({"tokens": [i, number, 7 * number]}) for number in range(4000 + 500 * i)]
        (tmp_path / f"{i:02d}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    job = ol.Job(
        sources={"packed": Counted(str(tmp_path / "*.gz"), unit_bytes=4000)},
        batch=ol.Batch(sequence_length=64, tokens=64),
    )
    alone = bytes_decompressed(job, 1, monkeypatch)
    assert alone > 0
    assert bytes_decompressed(job, 4, monkeypatch) == alone


@pytest.mark.parametrize(("options", "num_hosts"), [({}, 1), ({"transform": keep}, 4), ({"loaders": 6}, 6)])
def test_few_hosts_share_a_compressed_source(tmp_path, options, num_hosts):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"tokens": [1, 2, 3]}\n' * 20_000))
    job = ol.Job(
        sources={"packed": ol.Jsonl(str(tmp_path / "*.gz"), unit_bytes=4000, **options)},
        batch=ol.Batch(sequence_length=64, tokens=64),
    )
    partition = make_partition(job, list_units(job.sources), ol.Processes(16))
    assert sum(any(share.source == "packed" for share in shares) for shares in partition.hosts) == num_hosts
