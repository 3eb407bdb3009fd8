"""The log in a cluster's own table: written like any other, without asking, and found again by a planner that is lost."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

import overlord as ol
from overlord.errors import StorageError
from overlord.planlog.append_log import AppendLog, read_frames
from overlord.planlog.segments import TableSegments
from tests.planlog.storages import assert_two_writers_do_not_mix, assert_written_in_parts_and_pruned
from tests.service.served import streams, two_sources, undisturbed
from tests.small_sources import Numbered, job_of

NEVER_S = 3600.0


@dataclass(frozen=True)
class Told(Numbered):
    """Writes a byte for each unit that is read."""

    path: str = ""

    def read(self, unit: ol.Unit) -> pa.Table:
        with open(self.path, "ab") as file:
            file.write(b".")
        return super().read(unit)


class Table:
    """A table in memory."""

    location = "a table"

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {"value/units": b"of another part"}
        self.is_away = False

    def put_new(self, key: str, value: bytes) -> bool:
        if self.is_away:
            raise OSError("the head node does not answer")
        return self.entries.setdefault(key, value) is value

    def get(self, key: str) -> bytes | None:
        return self.entries.get(key)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.entries if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        self.entries.pop(key, None)


def test_a_log_in_a_table_is_written_in_batches_and_pruned():
    table = Table()
    assert_written_in_parts_and_pruned(TableSegments(table))
    assert "value/units" in table.entries


def test_two_writers_in_a_table_do_not_mix():
    assert_two_writers_do_not_mix(TableSegments(Table()))


def test_a_table_that_is_away_for_a_while_costs_nothing():
    table = Table()
    log = AppendLog(TableSegments(table), sync_s=NEVER_S)
    table.is_away = True
    log.begin([b"header"])
    with pytest.raises(StorageError, match="a table cannot be written: the head node does not answer"):
        log.sync()
    table.is_away = False
    log.append(b"later")
    log.sync()
    assert read_frames(TableSegments(table).read(0)).bodies == [b"header", b"later"]


def test_a_log_is_named_to_resume_from_it_on_a_cluster_too(ray_cluster: None):
    with pytest.raises(ol.errors.SpecError, match="resume='log' continues from a log: say where it is"):
        ol.start(two_sources(), engine=ol.Ray("auto"), resume="log")


@pytest.mark.second_try(reason="Ray must replace a killed actor within 60 s")
def test_a_lost_planner_goes_on_from_the_clusters_table_and_draws_no_taken_step_again(ray_cluster: None, tmp_path: Path):
    from overlord.runtime.ray.stored_calls import JobTable

    reads = tmp_path / "reads"
    source = Told(rows=400, unit_rows=4, first=1, path=str(reads))
    job = job_of({"a": source}, mixture=ol.Mixture({"a": 1}), num_workers=1)
    with ol.start(job, engine=ol.Ray("auto", loader_hosts=1, loaders=ol.scaling.ActorOptions())) as loader:
        client = loader.client(0, timeout_s=60)
        found = streams([client], 60)[0]
        assert loader.set_weights({"a": 2}) > 60, "decisions are safe there too"
        before = loader.status()
        assert before.log is not None
        assert "the Ray cluster's own table" in before.log.segment
        read_before = reads.stat().st_size
        os.kill(before.process, signal.SIGKILL)
        found += streams([client], 20)[0]
        assert [decision.name for decision in loader.decisions()][-1:] == ["weights"]
        assert loader.status().process != before.process
        assert reads.stat().st_size - read_before < 60, "the chunks of the first 60 steps were not read again"
        table = JobTable(loader._roles.engine.log_table.namespace)  # type: ignore[union-attr] - Ray has one
        assert table.keys("log/")
    assert found == undisturbed(job, 80)[0]
    assert table.keys("") == [], "and nothing of it is left"
