"""What every storage of a log that is not a folder promises: a bucket, and a cluster's own table."""

import pytest

from overlord.errors import StorageError
from overlord.planlog.append_log import AppendLog, read_frames
from overlord.planlog.segments import Segments

_NEVER_S = 3600.0


def assert_written_in_parts_and_pruned(segments: Segments) -> None:
    log = AppendLog(segments, sync_s=_NEVER_S)
    log.begin([b"header", b"snapshot"])
    log.append(b"waits")
    assert segments.numbers() == [], "nobody waits for storage"
    log.sync()
    log.append(b"later")
    log.sync()
    assert read_frames(segments.read(0)).bodies == [b"header", b"snapshot", b"waits", b"later"]
    for number in range(1, 4):
        log.begin([b"snapshot %d" % number])
        log.sync()
    assert segments.numbers() == [2, 3]
    log.close()


def assert_two_writers_do_not_mix(segments: Segments) -> None:
    old, new = AppendLog(segments, sync_s=_NEVER_S), AppendLog(segments, sync_s=_NEVER_S)
    new.begin([b"new"])
    new.sync()
    old.begin([b"old"])
    with pytest.raises(StorageError, match="was replaced"):
        old.sync()
    assert read_frames(segments.read(0)).bodies == [b"new"]
