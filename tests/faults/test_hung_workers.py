"""A worker process that hangs is given up, also one that hangs before it has begun."""

import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest

import overlord as ol
from overlord.chunks.workers import pool as processes
from tests.small_sources import Numbered, job_of, read_all, same

GIVEN_UP_S = 4.0


class HangsOnce:
    """A function that the first process never gets to the end of loading."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def __call__(self, table: pa.Table) -> pa.Table:
        return table

    def __reduce__(self):
        return loaded, (self._marker,)


def loaded(marker: str) -> HangsOnce:
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return HangsOnce(marker)
    threading.Event().wait(300)
    raise AssertionError("nobody has given up on this process")


@pytest.mark.second_try(reason="the second process, too, must start within 4 s")
def test_a_worker_that_hangs_while_it_loads_its_function_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "START_TIMEOUT_S", GIVEN_UP_S)
    plain = Numbered(rows=40, first=1)
    marked = Numbered(rows=40, first=1, transform=ol.InProcesses(HangsOnce(str(tmp_path / "marker"))))
    found, _ = read_all(job_of({"a": marked}, num_processes=1), 3)
    assert same(found, read_all(job_of({"a": plain}), 3)[0])
    assert (tmp_path / "marker").exists()
