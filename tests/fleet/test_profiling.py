"""Profiles by making chunks for real: what waits and what computes, what is bounded, and what fails."""

import threading
import time
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.errors import BadRowError, SourceError, SpecError, WaitTimeoutError
from overlord.fleet.profile import Effort, profile_sources
from overlord.fleet.sizing import partition, profile_job, sizing_of
from overlord.roles.assembly import list_units
from tests.small_sources import Numbered, job_of, read_all, same

MIB = 1 << 20


def busy(table: pa.Table) -> pa.Table:
    """Computes for 60 ms."""
    ends = time.thread_time() + 0.06
    while time.thread_time() < ends:
        pass
    return table


def waiting(table: pa.Table) -> pa.Table:
    """Waits for 60 ms, as for storage."""
    threading.Event().wait(0.06)
    return table


@dataclass(frozen=True)
class Opened(Numbered):
    """Takes a second longer for the first unit that is read."""

    read_before: list = field(default_factory=list)

    def read(self, unit: ol.Unit) -> pa.Table:
        if not self.read_before:
            self.read_before.append(unit)
            threading.Event().wait(1.0)
        return super().read(unit)


@dataclass(frozen=True)
class Hanging(Numbered):
    released: threading.Event = field(default_factory=threading.Event)

    def read(self, unit: ol.Unit) -> pa.Table:
        self.released.wait(60)
        return super().read(unit)


def profile_of(source: ol.Source, **effort):
    job = job_of({"a": source})
    found = profile_sources(job, list_units(job.sources), Effort(**effort))
    assert found.failed == {}
    return found.profiles["a"]


@pytest.mark.second_try(reason="processor time is measured while other tests have the processor")
def test_processor_time_and_waiting_are_told_apart():
    computes, waits = profile_of(Numbered(transform=busy)), profile_of(Numbered(transform=waiting))
    assert computes.cpu_s >= 0.06
    assert waits.wait_s >= 0.05
    assert waits.cpu_s < waits.wait_s / 2
    assert computes.num_chunks == waits.num_chunks == 3


def busy_in_a_thread(table: pa.Table) -> pa.Table:
    thread = threading.Thread(target=busy, args=(table,))
    thread.start()
    thread.join()
    return table


@pytest.mark.second_try(reason="processor time is measured while other tests have the processor")
def test_the_processor_time_of_threads_is_counted_where_nothing_else_runs():
    source = Numbered(transform=busy_in_a_thread)
    assert profile_of(source).cpu_s < 0.06
    assert profile_of(source, is_alone=True).cpu_s >= 0.06


@pytest.mark.second_try(reason="processor time is measured while other tests have the processor")
def test_a_source_that_is_still_busy_is_not_counted_for_the_next_one():
    ends = threading.Event()

    def busy_for_ever(table: pa.Table) -> pa.Table:
        while not ends.is_set():
            pass
        return table

    job = job_of({"busy": Numbered(transform=busy_for_ever), "quick": Numbered(transform=waiting)})
    try:
        found = profile_sources(job, list_units(job.sources), Effort(seconds=0.5, is_alone=True))
    finally:
        ends.set()
    assert found.failed.keys() == {"busy"}
    assert found.profiles["quick"].cpu_s < found.profiles["quick"].wait_s / 2


@pytest.mark.second_try(reason="processor time is measured while other tests have the processor")
@pytest.mark.parametrize("engine", ["tokenizers", "tiktoken"])
def test_the_processor_time_of_tokenisers_is_counted(tmp_path, engine):
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = pa.table({"text": ["The cat sat on the mat. " * 40] * 800})
    pq.write_table(texts, tmp_path / "a.parquet", row_group_size=400)
    source = ol.Parquet(str(tmp_path / "a.parquet"), transform=ol.Tokenize("text", encoding=made, engine=engine))
    profile_of(source)  # what the first call sets up counts once
    ratios = [profile_of(source).cpu_s / profile_of(source, is_alone=True).cpu_s for _ in range(3)]
    assert any(0.5 < ratio < 1.5 for ratio in ratios), f"the library's threads would take most of the time: {ratios}"


def test_transforms_for_worker_processes_are_timed_too():
    assert profile_of(Numbered(transform=ol.InProcesses(busy))).cpu_s >= 0.06


def test_rows_tokens_and_bytes_are_those_of_chunks():
    source = Numbered(rows=40, unit_rows=10, longest=1)  # ten documents of one token in each of four units
    found = profile_of(source)
    assert (found.rows, found.tokens) == (10, 10)
    assert found.chunk_bytes > 10 * 4
    assert found.buffer_bytes == source.buffer_bytes
    twice = profile_of(Numbered(rows=40, unit_rows=10, longest=1, window=2))
    assert (twice.rows, twice.num_chunks) == (20, 2)


def test_the_largest_chunk_is_expected_from_the_list_of_units(tmp_path):
    """Nine small row groups and a large one, which is not among those that are read."""
    path = tmp_path / "a.parquet"
    table = pa.table({"tokens": pa.array([[1] * 100] * 2000, pa.list_(pa.int32()))})
    with pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
        for rows in [100] * 9 + [2000]:
            writer.write_table(table.slice(0, rows))
    found = profile_of(ol.Parquet(str(path), shuffle=False))
    assert found.chunk_bytes > 2000 * 100 * 4
    assert found.tokens == pytest.approx(100 * (9 * 100 + 2000) / 10, rel=0.05)  # the mean of all, by their bytes
    assert found.rows == pytest.approx(found.tokens / 100 * 7)  # documents of 100 tokens are split at 16


def test_what_only_the_first_chunk_takes_is_opening_the_source():
    found = profile_of(Opened())
    assert found.open_s > 0.5
    assert found.wait_s < 0.5


def test_profiling_stops_at_its_bytes_and_at_its_seconds():
    assert profile_of(Numbered(), num_bytes=1).num_chunks == 1
    assert profile_of(Numbered(rows=5000, transform=waiting), num_chunks=1000, seconds=1.5).num_chunks <= 25


def test_a_source_that_fails_is_reported_and_the_others_are_profiled():
    def broken(table):
        raise ValueError("no such luck")

    hanging = Hanging()
    job = job_of({"good": Numbered(), "broken": Numbered(transform=broken), "hangs": hanging, "empty": Numbered(longest=1)})
    begun: list[str] = []
    try:
        found = profile_sources(job, list_units(job.sources), Effort(seconds=2), begun.append)
    finally:
        hanging.released.set()
    assert begun == list(job.sources)
    assert found.profiles.keys() == {"good", "empty"}
    assert str(found.failed["broken"]) == "no such luck"
    assert any("while making chunk 0 of source 'broken'" in note for note in found.failed["broken"].__notes__)
    assert isinstance(found.failed["hangs"], WaitTimeoutError)
    assert "source 'hangs' made no chunk within 2 s" in str(found.failed["hangs"])


def test_profiling_puts_no_bad_row_aside_but_keeps_to_the_policy(tmp_path):
    def odd_only(row):
        if row["document"] % 2 == 0:
            raise ValueError("even")
        return row

    quarantine = tmp_path / "bad.jsonl"
    policy = ol.policies.BadRows("quarantine", path=str(quarantine))
    found = profile_of(Numbered(transform=ol.per_row(odd_only), on_bad_row=policy))
    assert 1 <= found.rows <= 4
    assert not quarantine.exists()
    job = job_of(
        {"a": Numbered(transform=ol.per_row(lambda row: odd_only(row)), on_bad_row=ol.policies.BadRows("skip", budget=2))}
    )
    assert isinstance(profile_sources(job, list_units(job.sources)).failed["a"], BadRowError)


def test_images_are_decoded_for_the_profile(tmp_path):
    from PIL import Image

    path = tmp_path / "picture.jpg"
    Image.effect_noise((640, 480), 60).convert("RGB").save(path)
    table = pa.table({"tokens": [[1, 2]] * 40, "image": [path.read_bytes()] * 40})
    pq.write_table(table, tmp_path / "a.parquet")
    plain = profile_of(ol.Parquet(str(tmp_path / "a.parquet")))
    decoded = profile_of(ol.Parquet(str(tmp_path / "a.parquet"), decode=ol.vision.DecodeImage("image")))
    assert decoded.cpu_s > plain.cpu_s + 40 * 0.0002


@pytest.mark.second_try(reason="a quick source must not wait for the processor for 30 ms a chunk")
def test_a_job_is_sized_from_its_own_data_and_runs_with_the_result():
    job = job_of(
        {"heavy": Numbered(rows=60, transform=busy), "light": Numbered(rows=30, first=500)},
        mixture=ol.Mixture({"heavy": 1, "light": 1}),
        batch=ol.Batch(samples=20, sequence_length=16),
    )
    budget = ol.scaling.Budget(cpus=64, memory_bytes=8 << 30, workers_per_host=1)
    found = ol.scaling.partition(job, budget, step_s=0.06)  # two chunks of 60 ms each of heavy in each step
    assert found.sources["heavy"].loaders >= 2
    assert found.sources["light"].loaders == 1
    with_partition, _ = read_all(found.applied_to(job), 3, partition=found.partition)
    assert same(with_partition, read_all(job, 3)[0])


def test_a_source_that_cannot_be_listed_is_reported_beside_the_others(tmp_path):
    job = job_of({"good": Numbered(), "gone": ol.Parquet(str(tmp_path / "none.parquet"))})
    found = profile_job(job)
    assert found.profiles.keys() == {"good"}
    assert isinstance(found.failed["gone"], SourceError)
    with pytest.raises(SourceError, match="not every source can be profiled: source 'gone': SourceError: "):
        partition(job, ol.scaling.Budget(cpus=1, memory_bytes=1 << 30), step_s=1.0)


def test_shadows_take_memory_before_buffers_do():
    job = job_of({"a": Numbered(rows=60)})
    found = profile_job(job).profiles
    budget = ol.scaling.Budget(cpus=4, memory_bytes=300 * MIB, host_bytes=100 * MIB)
    calm, pressed = (sizing_of(job, found, budget, step_s) for step_s in (10.0, 0.1))
    assert calm.shadowing is not None
    assert pressed.shadowing is not None
    assert (calm.shadowing.shadowed, pressed.shadowing.shadowed) == ((), (0,))
    assert pressed.partitioning.memory_bytes <= 300 * MIB - pressed.shadowing.hosts[0].memory_bytes
    assert "1 shadow(s) take" in pressed.partitioning.reasons[-1]
    in_one_process = ol.scaling.Budget.in_one_process(cpus=4, memory_bytes=300 * MIB)
    assert sizing_of(job, found, in_one_process, 0.1).shadowing is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Effort(num_chunks=0), "at least 1 chunk, got num_chunks=0"),
        (lambda: Effort(seconds=0), "some time, got seconds=0"),
        (lambda: Effort(num_bytes=0), "some bytes, got num_bytes=0"),
        (lambda: sizing_of(job_of({"a": Numbered()}), {}, ol.scaling.Budget(cpus=1, memory_bytes=1), 0.0), "got 0.0"),
    ],
)
def test_wrong_values_are_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


@pytest.mark.strangers
def test_a_source_of_whose_first_chunks_filters_leave_nothing_is_profiled_by_later_ones():
    late = Numbered(
        first=1, rows=40, unit_rows=5, shuffle=False, transform=ol.per_row(lambda r: r if r["document"] > 35 else None)
    )
    assert profile_of(late, num_chunks=2).num_chunks == 8
