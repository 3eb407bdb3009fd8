"""The append-only log: what was written comes back, damage is told apart, and storage that fails stops nobody."""

import errno
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SourceError, SpecError, StorageError
from overlord.planlog.append_log import AppendLog, frame, read_frames
from overlord.planlog.segments import FileSegments, Segment, segments_at
from tests.buckets import s3_bucket
from tests.full_disk import full_disk
from tests.planlog.storages import assert_two_writers_do_not_mix, assert_written_in_parts_and_pruned

BODIES = st.lists(st.binary(max_size=60), min_size=1, max_size=6)
NEVER_S = 1000.0  # the background does not come: what is safe is decided by the test


def bodies_in(segments: FileSegments, number: int) -> list[bytes]:
    return read_frames(segments.read(number)).bodies


# Records


@given(BODIES)
def test_records_come_back_as_they_were(bodies):
    contents = read_frames(b"".join(map(frame, bodies)))
    assert contents.bodies == bodies
    assert contents.good_bytes == contents.num_bytes
    assert contents.num_after_damage == 0


@given(BODIES, st.data())
def test_a_log_cut_anywhere_gives_every_whole_record_before_the_cut(bodies, data):
    whole = b"".join(map(frame, bodies))
    contents = read_frames(whole[: data.draw(st.integers(0, len(whole)))])
    assert contents.bodies == bodies[: len(contents.bodies)]
    assert contents.num_bytes - contents.good_bytes < max(len(frame(body)) for body in bodies)
    assert contents.num_after_damage == 0


@given(BODIES, st.data())
def test_a_flipped_bit_never_gives_a_wrong_record_and_is_told_from_a_torn_end(bodies, data):
    whole = bytearray(b"".join(map(frame, bodies)))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    contents = read_frames(bytes(whole))
    ends = [sum(len(frame(body)) for body in bodies[: i + 1]) for i in range(len(bodies))]
    damaged = next(i for i, end in enumerate(ends) if place < end)
    assert contents.bodies == bodies[:damaged]
    assert contents.num_after_damage == len(bodies) - damaged - 1


def test_an_end_full_of_zeros_is_torn_and_not_damaged():
    contents = read_frames(frame(b"one") + bytes(4096))
    assert contents.bodies == [b"one"]
    assert contents.num_after_damage == 0


# Segments on a filesystem


def test_what_is_appended_is_in_the_file_at_once_so_that_a_kill_loses_nothing(tmp_path):
    segments = FileSegments(str(tmp_path / "log"))
    log = AppendLog(segments, sync_s=NEVER_S)
    log.begin([b"header", b"snapshot"])
    log.append(b"step")
    assert bodies_in(segments, 0) == [b"header", b"snapshot", b"step"]
    assert log.position.num_waiting == 0
    assert log.error is None


def test_the_newest_two_segments_stay_and_only_once_the_newest_is_safe(tmp_path):
    segments = FileSegments(str(tmp_path))
    log = AppendLog(segments, sync_s=NEVER_S)
    for number in range(4):
        log.begin([b"snapshot %d" % number])
        if number == 3:
            assert segments.numbers() == [1, 2, 3]
        log.sync()
    assert segments.numbers() == [2, 3]
    log.close()


def test_the_segment_that_was_recovered_from_stays_whatever_lies_between(tmp_path):
    segments = FileSegments(str(tmp_path))
    for number in range(5):
        segments.create(number).append(b"")
    log = AppendLog(segments, follows=2, sync_s=NEVER_S)
    log.begin([b"snapshot"])
    log.sync()
    assert segments.numbers() == [2, 5]


def test_the_background_makes_it_safe(tmp_path):
    synced = threading.Event()

    class Watched(FileSegments):
        def create(self, number: int) -> Segment:
            segment = super().create(number)
            sync = segment.sync
            segment.sync = lambda: (sync(), synced.set())[0]
            return segment

    log = AppendLog(Watched(str(tmp_path)), sync_s=0.01)
    log.begin([b"snapshot"])
    assert synced.wait(10)
    log.close()


def test_a_writer_that_was_replaced_stops_for_good(tmp_path):
    segments = FileSegments(str(tmp_path))
    old = AppendLog(segments, sync_s=NEVER_S)
    old.begin([b"old"])
    new = AppendLog(segments, sync_s=NEVER_S)
    new.begin([b"new"])
    old.append(b"its own segment is still its own")
    assert old.error is None
    old.begin([b"old, again"])
    assert old.error is not None
    assert "this one was replaced" in old.error
    old.append(b"more")
    with pytest.raises(StorageError, match="was replaced"):
        old.sync()
    new.append(b"more")
    assert bodies_in(segments, 1) == [b"new", b"more"]
    assert segments.numbers() == [0, 1]
    new.close()
    old.close()


def test_a_full_disk_leaves_no_half_record_and_nothing_is_missing_when_there_is_room_again(tmp_path):
    segments = FileSegments(str(tmp_path))
    log = AppendLog(segments, sync_s=NEVER_S)
    log.begin([b"snapshot"])
    log.append(b"first")
    with full_disk(100):
        log.append(b"x" * 80)  # fits in part
        assert log.error is not None
        assert "large" in log.error
        log.append(b"third")
        assert bodies_in(segments, 0) == [b"snapshot", b"first"]
        assert read_frames(segments.read(0)).good_bytes == len(segments.read(0)), "no half record"
        assert log.position.num_waiting > 80
        with pytest.raises(StorageError, match="cannot be written"):
            log.sync()
    log.append(b"fourth")
    assert log.error is None
    assert bodies_in(segments, 0) == [b"snapshot", b"first", b"x" * 80, b"third", b"fourth"]
    log.close()


@dataclass
class Flaky(FileSegments):
    """A folder whose disk is full for some of the writes."""

    place: str
    full: bool = False
    tried: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        FileSegments.__init__(self, self.place)

    def create(self, number: int) -> Segment:
        self.tried.append(number)
        self.check()
        segment = super().create(number)
        append = segment.append
        segment.append = lambda data: (self.check(), append(data))[1]
        return segment

    def check(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=25))
def test_however_a_disk_fills_and_empties_the_newest_segment_holds_everything_since_its_snapshot(tmp_path_factory, ops):
    segments = Flaky(str(tmp_path_factory.mktemp("log")))
    log = AppendLog(segments, sync_s=NEVER_S)
    log.begin([b"0"])
    written = [b"0"]
    for count, (full, begins) in enumerate(ops, 1):
        segments.full = full
        body = b"%d" % count
        if begins:
            log.begin([body])
            written = [body]
        else:
            log.append(body)
            written.append(body)
        assert (log.error is None) == (not full)
    segments.full = False
    log.append(b"end")
    assert bodies_in(segments, segments.numbers()[-1]) == [*written, b"end"]
    log.close()


def test_what_waits_is_bounded_by_one_segment(tmp_path):
    segments = Flaky(str(tmp_path), full=True)
    log = AppendLog(segments, sync_s=NEVER_S)
    for _ in range(50):
        log.begin([b"x" * 1000])
        for _ in range(10):
            log.append(b"y" * 10)
    assert log.position.num_waiting < 2000
    assert set(segments.tried) == {0}, "a number that was never created is tried again"
    log.close()


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("https://host/log", "a log can be written to a folder or to s3, gs, az"),
        ("s3://bucket", "names no folder in a bucket: write s3://bucket/name"),
        (__file__, "is a file: a log is a folder"),
    ],
)
def test_a_place_where_no_log_can_be_says_so(location, message):
    with pytest.raises(SpecError, match=message):
        segments_at(location)


# Segments on an object store


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    with s3_bucket("runs") as options:
        yield options


def test_a_log_in_a_bucket_is_written_in_parts_and_pruned(bucket):
    assert_written_in_parts_and_pruned(segments_at("s3://runs/a/log", bucket))
    assert segments_at("s3://runs/a", bucket).numbers() == [], "what is in a folder below is another log"


def test_two_writers_in_a_bucket_do_not_mix(bucket):
    assert_two_writers_do_not_mix(segments_at("s3://runs/b/log", bucket))


def test_a_bucket_that_does_not_exist_is_an_error_before_anything_is_written(bucket):
    with pytest.raises(SourceError, match="s3://elsewhere/log"):
        AppendLog(segments_at("s3://elsewhere/log", bucket))


def test_a_log_is_a_folder_that_is_made_when_it_is_missing(tmp_path: Path):
    log = AppendLog(FileSegments(f"file://{tmp_path}/deep/er"), sync_s=NEVER_S)
    log.begin([b"snapshot"])
    log.close()
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["segment-00000000.log"]
