"""Logs that are damaged, foreign or cannot be written: an error that names the place, or nothing lost."""

import logging
import os
import shutil

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.checkpoint.fingerprint import Fingerprint, differences_of
from overlord.errors import StateError, StorageError
from overlord.planlog.append_log import LogPosition, frame, read_frames
from overlord.planlog.plan_log import Era, PlanLog, read_newest
from overlord.planlog.records import Header
from overlord.planlog.segments import FileSegments
from overlord.roles.planner import Planner
from overlord.steering.decisions import Decision
from tests.checkpoint.edited import edited
from tests.full_disk import full_disk
from tests.roles.mortal import Mortal, stream_of
from tests.roles.recovering import JOBS, STEPS, A, log_of, segment_of
from tests.small_sources import job_of, read_all, same
from tests.sources.damage import rewrite


@settings(max_examples=15)
@given(st.floats(0, 1, exclude_max=True))
def test_a_torn_end_is_cut_and_changes_nothing(tmp_path_factory, undisturbed, place):
    folder = tmp_path_factory.mktemp("run")
    loader = ol.start(JOBS[0], log=log_of(folder))
    engine_steps = stream_of(loader, 5)
    loader.close()
    path = segment_of(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(place * len(whole))])
    with ol.start(JOBS[0], resume="log", log=log_of(folder)) as loader:
        first = loader.start_step
        assert 0 <= first <= 5
        assert stream_of(loader, STEPS - first) == undisturbed[0][first:]
    assert engine_steps == undisturbed[0][:5]


def test_the_warning_of_a_torn_end_says_how_much_is_cut_and_where_it_goes_on(tmp_path, caplog):
    read_all(job_of({"a": A}), 5, log=log_of(tmp_path))
    with segment_of(tmp_path).open("ab") as file:
        file.write(frame(b"{}")[:-1])
    with caplog.at_level(logging.WARNING, "overlord.planlog"):
        ol.start(job_of({"a": A}), resume="log", log=log_of(tmp_path)).close()
    assert "segment-00000001.log has a torn end: its last 13 bytes are dropped, and it continues at step" in caplog.text


def test_a_damaged_middle_is_an_error_that_names_the_place_and_the_way_out(tmp_path):
    job = job_of({"a": A})
    uncut, _ = read_all(job, 8)
    read_all(job, 5, log=log_of(tmp_path))
    path = segment_of(tmp_path)
    damaged = bytearray(path.read_bytes())
    place = len(frame(read_frames(bytes(damaged)).bodies[0]))
    damaged[place + 20] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(StateError, match=rf"segment-00000001.log is damaged at byte {place}: .* \d+ good ones follow"):
        ol.start(job, resume="log", log=log_of(tmp_path))
    path.unlink()  # the way out
    assert same(read_all(job, 8, resume="log", log=log_of(tmp_path))[0], uncut)


def test_a_record_that_is_whole_but_makes_no_sense_is_an_error_that_names_the_file(tmp_path):
    read_all(job_of({"a": A}), 2, log=log_of(tmp_path))
    with segment_of(tmp_path).open("ab") as file:
        file.write(frame(b'{"kind": "step", "step": 99}'))
    with pytest.raises(StateError, match=r"segment-00000001.log cannot be used: .*records are missing; delete it"):
        ol.start(job_of({"a": A}), resume="log", log=log_of(tmp_path))


@pytest.mark.parametrize("resume", [None, "log"])
def test_the_log_of_another_job_is_refused_saying_what_differs(tmp_path, resume):
    read_all(job_of({"a": A}), 2, log=log_of(tmp_path))
    other = job_of({"a": A}, seed=5)
    with pytest.raises(StateError, match=r"(?s)the log at .* differs.*seed was 0, is 5.*accept_changes=\['seed'\]"):
        ol.start(other, resume=resume, log=log_of(tmp_path))
    ol.start(other, resume=resume, log=log_of(tmp_path), accept_changes=["seed"]).close()


@pytest.mark.strangers
def test_edited_records_of_a_log_are_an_error_that_names_the_file_or_go_on_the_same(tmp_path):
    job = job_of({"a": A, "b": A}, ol.Batch(tokens=96, sequence_length=32))
    with ol.start(job, log=log_of(tmp_path)) as loader:
        loader.set_weights({"a": 3, "b": 1}, from_step=2)
        client = loader.client(0, timeout_s=30)
        for _ in range(4):
            next(client)
    path = segment_of(tmp_path)
    records = [orjson.loads(body) for body in read_frames(path.read_bytes()).bodies]
    segments = FileSegments(str(tmp_path / "log"))
    num_refused = num_edits = 0
    for _, other in edited(records):
        if not isinstance(other, list):
            continue
        try:
            bodies = [orjson.dumps(record) for record in other]
        except TypeError:
            continue  # no JSON, so no record
        path.write_bytes(b"".join(map(frame, bodies)))
        num_edits += 1
        try:
            found = read_newest(segments)
            if found is not None:
                differences_of(Fingerprint.of(job, {"a": A.units(), "b": A.units()}), found.header.fingerprint, "damaged")
        except StateError:
            num_refused += 1
    assert num_edits > 2000
    assert num_refused > num_edits // 2  # whoever edits a log writes its checksums anew: the rest is in range


@pytest.mark.strangers
@pytest.mark.parametrize("first", [b"null", b"[]", b"7", b'{"kind": "header"}', b'{"kind": "header", "version": 1}'])
def test_a_log_whose_header_makes_no_sense_is_an_error_that_names_the_file(tmp_path, first):
    read_all(job_of({"a": A}), 2, log=log_of(tmp_path))
    path = segment_of(tmp_path)
    bodies = read_frames(path.read_bytes()).bodies
    path.write_bytes(b"".join(map(frame, [first, *bodies[1:]])))
    with pytest.raises(StateError, match=r"segment-00000001.log cannot be used: .*delete it"):
        ol.start(job_of({"a": A}), resume="log", log=log_of(tmp_path))


def test_a_log_that_cannot_be_written_stops_a_run_before_it_starts(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be written: .*Not a directory"):
        ol.start(job_of({"a": A}), log=str(tmp_path / "file" / "log"))


def log_status(loader: ol.Loader) -> LogPosition:
    status = loader.status().log
    assert status is not None
    return status


@settings(max_examples=12)
@given(st.integers(0, 6), st.integers(0, 6), st.sampled_from([1, 3, 1000]), st.booleans())
def test_a_full_disk_under_the_log_loses_and_repeats_nothing(tmp_path_factory, undisturbed, before, during, every, lost):
    folder = tmp_path_factory.mktemp("run")
    engine = Mortal()
    with ol.start(JOBS[0], engine=engine, log=log_of(folder, every=every)) as loader:
        clients = [loader.client(rank, timeout_s=30) for rank in range(2)]
        numbers = [next(client).number for _ in range(before) for client in clients]
        with full_disk(segment_of(folder).stat().st_size + 7):
            numbers += [next(client).number for _ in range(during) for client in clients]
            state = loader.state_dict()
            if lost:
                engine.lose("planner")
            numbers += [next(client).number for client in clients]
        numbers += [next(client).number for _ in range(3) for client in clients]
        assert log_status(loader).error is None, "it is written again"
        assert numbers == [step for step in range(before + during + 4) for _ in clients]
        assert state["step"] == before + during
    found = read_newest(FileSegments(str(folder / "log")))
    assert found is not None
    assert found.recovered.reached >= before + during + 4, "and nothing is missing in it"
    with ol.start(JOBS[0], resume=state) as loader:
        assert stream_of(loader, STEPS - before - during) == undisturbed[0][before + during :]


def test_a_full_disk_is_told_once_and_so_is_its_end(tmp_path, caplog):
    with ol.start(JOBS[0], log=log_of(tmp_path)) as loader, caplog.at_level(logging.WARNING, "overlord.planlog"):
        clients = [loader.client(rank, timeout_s=30) for rank in range(2)]
        with full_disk(10):
            for client in clients * 4:
                next(client)
            assert log_status(loader).error is not None
            assert log_status(loader).num_waiting > 0
        for client in clients * 4:
            next(client)
    assert caplog.text.count("cannot be written") == 1
    assert caplog.text.count("is written again, up to step") == 1


def test_a_decision_is_safe_or_refused(tmp_path):
    header = Header("job", 0, "samples", {})
    start = ol.start(job_of({"a": A}))
    progress = start._roles.planner.call(Planner.progress, 0).result()
    start.close()
    log = PlanLog(Era(log_of(tmp_path, sync_s=1000), header), progress, keep=0)
    log.decide(Decision(3, "cost", {"a": 1.5}))
    with full_disk(10), pytest.raises(StorageError, match="cannot be written"):
        log.decide(Decision(5, "cost", {"a": 2.5}))
    again = PlanLog(Era(log_of(tmp_path), header), progress, keep=0)
    assert again._decisions == (Decision(3, "cost", {"a": 1.5}),)
    later = PlanLog(Era(log_of(tmp_path), Header("job", 1, "samples", {})), progress, keep=0)
    assert later._decisions == (Decision(3, "cost", {"a": 1.5}),), "it holds in the next era too"


def test_a_step_that_is_drawn_again_and_differs_is_an_error(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()

    def write(length: int) -> None:
        lines = [orjson.dumps({"tokens": [i + 1] * (1 + (i * length) % 7)}) + b"\n" for i in range(200)]
        (folder / "a.jsonl").write_bytes(b"".join(lines))

    write(3)
    size = os.stat(folder / "a.jsonl").st_size
    engine = Mortal()
    source = ol.Jsonl(str(folder / "a.jsonl"), shuffle=False, buffer_bytes=1 << 20, unit_bytes=300)
    with ol.start(job_of({"a": source}), engine=engine, log=log_of(tmp_path)) as loader:
        client = loader.client(0)
        next(client)
        loader.plan(3)  # so that the log knows what the steps before were
        lines = (folder / "a.jsonl").read_bytes().split(b"\n")
        mixed = b"\n".join([*sorted(lines[:-1], key=len), b""])
        assert len(mixed) == size
        shutil.copy(folder / "a.jsonl", folder / "kept")
        rewrite(folder / "a.jsonl", mixed)
        engine.lose("loaders/0")  # first: a planner that is made anew draws at once, for whoever waits
        engine.lose("planner")
        with pytest.raises(ol.errors.DataError, match=r"step \d was drawn again and has changed"):
            loader.plan(1)
