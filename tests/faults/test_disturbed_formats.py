"""Sources of every format, while processes and storage fail: the stream is the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import overlord as ol
from tests.faults.as_service import AsService
from tests.faults.comparison import compared
from tests.faults.format_jobs import formats_job, tables_job, write_formats, write_tables
from tests.faults.store import Store
from tests.faults.test_disturbed_runs import PACE_S, disturb

pytestmark = pytest.mark.timeout(400)  # a loaded machine takes its time to start processes
STORAGE = ("storage errors", "storage cuts answers", "storage drops answers", "storage stalls", "storage shut")
DEATHS = ("host killed", "trainer killed", "service killed", "host killed")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    files = tmp_path / "files"
    files.mkdir()
    write_formats(files)
    made = Store(files)
    yield made
    made.close()


def test_the_job_has_every_format(store: Store, tmp_path: Path) -> None:
    readers = {name for name in ol.formats.__all__ if isinstance(getattr(ol.formats, name), type)}
    sources = [*formats_job(store.url, str(tmp_path)).sources.values(), *tables_job(str(tmp_path)).sources.values()]
    # HuggingFace is a map-style dataset of its library; a blend is a table of sources.
    assert readers - {"HuggingFace", "EnergonBlend"} <= {type(source).__name__ for source in sources}


@pytest.mark.second_try(reason="each fault has a deadline by which processes must have come back")
def test_the_stream_of_every_format_is_the_same_whatever_happens(store: Store, tmp_path: Path) -> None:
    arguments = store.url, str(tmp_path / "indexes")
    job_file = f"from tests.faults.format_jobs import formats_job\njob = formats_job(*{arguments!r})\n"
    run = AsService(tmp_path, store, PACE_S, 2, job_file)
    try:
        disturb(run, (*STORAGE, *DEATHS))
    finally:
        run.close()
    stream = compared(formats_job(*arguments), run.trainers.lives)
    assert stream.is_same, stream.first


@pytest.mark.second_try(reason="each fault has a deadline by which processes must have come back")
def test_the_stream_of_tables_with_versions_is_the_same_whatever_happens(store: Store, tmp_path: Path) -> None:
    for library in ("lance", "deltalake", "pyiceberg", "sqlalchemy"):
        pytest.importorskip(library, reason="make test-formats runs this")
    write_tables(tmp_path)
    job_file = f"from tests.faults.format_jobs import tables_job\njob = tables_job({str(tmp_path)!r})\n"
    run = AsService(tmp_path, store, PACE_S, 2, job_file)
    try:
        disturb(run, DEATHS)
    finally:
        run.close()
    stream = compared(tables_job(str(tmp_path)), run.trainers.lives)
    assert stream.is_same, stream.first
