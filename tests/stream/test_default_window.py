"""How many units make a chunk where a job does not say: by bytes, the same everywhere, and as in a state that is resumed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.checkpoint.fingerprint import SavedChunks
from overlord.checkpoint.form import contents_of, seal, with_checksum
from overlord.errors import StateError
from overlord.roles.assembly import list_units, with_windows
from overlord.stream.chunk_order import CHUNK_BYTES, LEAST_CHUNKS, default_window

NUM_FILES, ROWS = 45, 100


@given(
    st.lists(st.integers(0, 1 << 30), min_size=1, max_size=300),
    st.integers(1, 1 << 36),
    st.integers(1, 500),
)
def test_a_chunk_takes_a_bounded_part_of_the_buffer_and_an_epoch_has_several(unit_bytes, buffer_bytes, num_sources):
    window = default_window(unit_bytes, buffer_bytes=buffer_bytes, num_sources=num_sources)
    assert window >= 1
    if window > 1:
        assert min(unit_bytes) > 0
        assert len(unit_bytes) >= LEAST_CHUNKS * window
        largest = sum(sorted(unit_bytes, reverse=True)[:window])
        assert largest <= min(2 * CHUNK_BYTES, buffer_bytes // 4)


def test_small_units_fill_a_chunk_and_large_ones_stand_alone():
    def window(unit_mib: float, num_units: int = 1000, buffer_bytes: int = 256 << 20, num_sources: int = 1) -> int:
        sizes = [int(unit_mib * (1 << 20))] * num_units
        return default_window(sizes, buffer_bytes=buffer_bytes, num_sources=num_sources)

    assert [window(0.01), window(1), window(2), window(8), window(16), window(60)] == [250, 16, 8, 2, 1, 1]
    assert [window(1, num_units=n) for n in (1, 7, 8, 40, 64, 100)] == [1, 1, 2, 10, 16, 15]
    assert [window(1, buffer_bytes=mib << 20) for mib in (4, 16, 64)] == [1, 2, 8]
    assert [window(1, num_sources=n) for n in (8, 16, 64, 256)] == [16, 8, 2, 1]


def write_files(folder: Path, prefix: str = "f") -> str:
    """Files of one row group each; a document is its file's number, again and again."""
    for i in range(NUM_FILES):
        tokens = pa.array([[i] * 8 for _ in range(ROWS)], pa.list_(pa.int32()))
        pq.write_table(pa.table({"tokens": tokens}), folder / f"{prefix}{i:02d}.parquet")
    return f"{folder}/{prefix}*.parquet"


def job_of(paths: str, **options: Any) -> ol.Job:
    return ol.Job(sources={"a": ol.Parquet(paths, **options)}, batch=ol.Batch(samples=100, sequence_length=8), num_workers=0)


def steps(loader: ol.Loader, num_steps: int) -> list[list[int]]:
    """The file of each document, step by step."""
    client = loader.client(0)
    return [[int(n) for micro in next(client) for n in micro["tokens"].reshape(-1)[::8]] for _ in range(num_steps)]


def test_a_step_holds_documents_of_many_files(tmp_path: Path) -> None:
    paths = write_files(tmp_path)
    with ol.start(job_of(paths, window=1)) as loader:
        before = [len(set(files)) for files in steps(loader, 45)]
    with ol.start(job_of(paths)) as loader:
        assert loader.job.sources["a"].window == 9
        after = [len(set(files)) for files in steps(loader, 45)]
    assert before == [1] * 45
    assert min(after) >= 7
    assert np.mean(after) > 8.5


def test_sources_that_are_not_shuffled_or_do_not_tell_sizes_keep_their_chunks(tmp_path: Path) -> None:
    paths = write_files(tmp_path)
    unshuffled = job_of(paths, shuffle=False)
    assert with_windows(unshuffled, list_units(unshuffled.sources)).sources["a"].window == 1
    job = job_of(paths)
    unknown = {"a": [replace(unit, num_bytes=0) for unit in list_units(job.sources)["a"]]}
    assert with_windows(job, unknown).sources["a"].window == 1
    explicit = job_of(paths, window=3)
    assert with_windows(explicit, list_units(explicit.sources), {"a": SavedChunks(7)}).sources["a"].window == 3


def test_loaders_and_buffers_that_a_partition_chose_do_not_change_the_window(tmp_path: Path) -> None:
    source = ol.Parquet(write_files(tmp_path))
    job = ol.Job(sources={"a": source.with_loaders(3, 4096)}, batch=ol.Batch(samples=4, sequence_length=8))
    assert with_windows(job, list_units(job.sources)).sources["a"].window == 9


def of_earlier_release(state: Any) -> Any:
    """The state as a release wrote it that did not save windows."""
    contents = contents_of(state)
    contents["fingerprint"] = {key: value for key, value in contents["fingerprint"].items() if key != "windows"}
    return seal(with_checksum(contents))


@pytest.mark.parametrize(("window", "form"), [(1, of_earlier_release), (1, dict), (4, dict)])
def test_a_resumed_run_takes_the_window_of_its_state(tmp_path: Path, window: int, form: Callable[[Any], Any]) -> None:
    paths = write_files(tmp_path)
    with ol.start(job_of(paths, window=window)) as loader:
        whole = steps(loader, 60)
    with ol.start(job_of(paths, window=window)) as loader:
        steps(loader, 17)
        state = form(loader.state_dict())
    with ol.start(job_of(paths), resume=state) as loader:
        assert loader.job.sources["a"].window == window
        assert steps(loader, 20) == whole[17:37]
        later = loader.state_dict()
    with ol.start(job_of(paths, buffer_bytes=1 << 20, loaders=2), resume=later) as loader:
        assert steps(loader, 23) == whole[37:]


def test_a_run_by_default_resumes_with_another_buffer_and_with_sources_added(tmp_path: Path) -> None:
    paths = write_files(tmp_path)
    with ol.start(job_of(paths)) as loader:
        whole = steps(loader, 30)
    with ol.start(job_of(paths)) as loader:
        steps(loader, 10)
        state = loader.state_dict()
    with ol.start(job_of(paths, buffer_bytes=200_000), resume=state) as loader:
        assert steps(loader, 20) == whole[10:]
    added = write_files(tmp_path, "g")
    two = ol.Job(
        sources={"a": ol.Parquet(paths, buffer_bytes=200_000), "b": ol.Parquet(added)},
        batch=ol.Batch(samples=100, sequence_length=8),
        mixture=ol.Mixture({"a": 1, "b": 1}),
    )
    with ol.start(two, resume=state) as loader:
        assert {name: source.window for name, source in loader.job.sources.items()} == {"a": 9, "b": 9}


def test_a_run_continues_from_its_log_with_the_same_window(tmp_path: Path) -> None:
    paths = write_files(tmp_path)
    with ol.start(job_of(paths, window=1), log=tmp_path / "log") as loader:
        steps(loader, 5)
    with ol.start(job_of(paths), log=tmp_path / "log", resume="log") as loader:
        assert loader.job.sources["a"].window == 1


def test_a_state_with_another_window_is_refused_by_a_running_job_with_the_way_out(tmp_path: Path) -> None:
    paths = write_files(tmp_path)
    with ol.start(job_of(paths, window=1)) as loader:
        steps(loader, 3)
        state = of_earlier_release(loader.state_dict())
    said = r"source 'a' is declared differently \(window was 1, is 9: declare window=1, or give the state to start\(resume="
    with ol.start(job_of(paths)) as loader, pytest.raises(StateError, match=said):
        loader.load_state_dict(state)
