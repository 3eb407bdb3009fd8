"""What goes wrong in a user's data or code comes back as the user's own error, with notes that say where."""

import threading
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest

import overlord as ol
from tests.contract.conftest import Start
from tests.contract.streams import text_file
from tests.small_sources import Numbered, job_of


class OddDocumentError(Exception):
    """An error type of the user's own, which takes more than a message."""

    def __init__(self, document: int, reason: str) -> None:
        super().__init__(document, reason)
        self.document = document


@dataclass(frozen=True)
class Stuck(Numbered):
    """Storage that never answers."""

    def read(self, unit: ol.Unit) -> pa.Table:
        threading.Event().wait(60)
        return super().read(unit)


def notes_of(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def test_an_error_in_a_transform_keeps_its_type_and_says_where_it_happened(start: Start):
    def picky(table: pa.Table) -> pa.Table:
        raise OddDocumentError(7, "is odd")

    with start(job_of({"a": Numbered(first=1, transform=picky)})) as loader, pytest.raises(OddDocumentError) as caught:
        next(loader.client(0, timeout_s=60))
    assert caught.value.document == 7
    notes = notes_of(caught.value)
    assert "picky of source 'a', chunk 0" in notes
    assert "data-parallel group 0 built step 0" in notes


def test_a_missing_column_is_named(start_on_one_machine: Start, tmp_path: Path):
    source = ol.Parquet(text_file(tmp_path / "web.parquet", 20, 1), tokens="input_ids")
    message = r"source 'web' has no column 'input_ids'.*it has \['tokens'"
    job = job_of({"web": source})
    with start_on_one_machine(job) as loader, pytest.raises(ol.errors.SchemaError, match=message):
        next(loader.client(0, timeout_s=60))


def test_bad_rows_are_set_aside_counted_and_listed(start: Start, tmp_path: Path):
    listing = tmp_path / "bad.jsonl"

    @ol.per_row
    def picky(row: dict) -> dict:
        if row["document"] % 10 == 3:
            raise ValueError(f"document {row['document']} is odd")
        return row

    policy = ol.policies.BadRows("quarantine", path=str(listing))
    with start(job_of({"a": Numbered(rows=40, first=1, repeat=False, transform=picky, on_bad_row=policy)})) as loader:
        assert sum(1 for _ in loader.client(0, timeout_s=60)) > 0
        assert loader.report().bad_rows == {"a": 4}
    assert len(listing.read_text().splitlines()) == 4


def test_a_bad_row_that_must_not_be_stops_the_run_with_file_and_row(start_on_one_machine: Start, tmp_path: Path):
    path = tmp_path / "documents.jsonl"
    path.write_text('{"tokens": [1, 2]}\n{"tokens": [3, 4\n')
    with (
        start_on_one_machine(job_of({"a": ol.Jsonl(str(path))})) as loader,
        pytest.raises(ol.errors.BadRowError, match=r"source 'a': .*documents\.jsonl, row 1: "),
    ):
        next(loader.client(0, timeout_s=60))


def test_a_wait_that_is_too_long_says_what_was_waited_for_and_closing_wakes_whoever_waits(start: Start):
    loader = start(job_of({"slow": Stuck(first=1)}))
    said = ""
    for _ in range(60):  # until the source has begun
        with pytest.raises(ol.errors.WaitTimeoutError, match=r"rank 0 waited .* for step 0: ") as caught:
            next(loader.client(0, timeout_s=0.5))
        said = str(caught.value)
        if "source 'slow' is making chunk 0" in said:
            break
    assert "source 'slow' is making chunk 0" in said
    client = loader.client(0)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            next(client)
        except ol.errors.ClosedError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    loader.close()
    waiting.join(20)
    assert not waiting.is_alive()
    assert len(raised) == 1


class TimesOut(Numbered):
    """As a read over a network may."""

    def read(self, unit: ol.Unit) -> pa.Table:
        raise TimeoutError("no answer for 60 s")


def test_a_read_that_times_out_is_an_error_and_not_taken_for_a_step_that_is_late(start: Start):
    check_read_that_times_out(start, num_workers=1)


def test_so_it_is_where_the_caller_reads(start_on_one_machine: Start):
    check_read_that_times_out(start_on_one_machine, num_workers=0)


def check_read_that_times_out(start: Start, num_workers: int) -> None:
    with start(job_of({"a": TimesOut(first=1)}, num_workers=num_workers)) as loader:
        for _ in range(2):  # asked again, it is read again
            with pytest.raises(TimeoutError, match="no answer for 60 s"):
                next(loader.client(0, timeout_s=20))


def test_buffers_stay_within_their_bytes_when_one_rank_stops_reading(start: Start):
    source = Numbered(rows=400, unit_rows=10, first=1, longest=16, buffer_bytes=8_000)
    with start(job_of({"a": source}, mesh=ol.Mesh(dp=2), prefetch=2)) as loader:
        stopped, reading = loader.client(0, timeout_s=60), loader.client(1, timeout_s=6)
        next(stopped)
        with pytest.raises(ol.errors.WaitTimeoutError, match=r"the ranks of data-parallel group 0 are still at step \d"):
            list(islice(reading, 50))
        assert 0 < loader.report().buffers["a"].peak_bytes <= source.buffer_bytes
        for _ in range(8):
            next(stopped)
            next(reading)
        assert loader.report().buffers["a"].peak_bytes <= source.buffer_bytes
