"""How the sources of a job are spread over the processes of a machine."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.roles.assembly import list_units, make_partition


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
