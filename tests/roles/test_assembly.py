"""How the sources of a job, and the work on their images, are spread over the processes of a machine."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.roles.assembly import list_units, make_decode_threads, make_partition
from overlord.runtime.engine import Workplace, WorkplaceSize
from overlord.runtime.threads import Threads


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
