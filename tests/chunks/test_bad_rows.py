"""Bad rows: the policy, the budget, the quarantine file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import orjson
import pytest

from overlord.chunks.bad_rows import BadRowLog
from overlord.declare.source import BadRows
from overlord.errors import BadRowError, SpecError, StorageError


def entries(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def quarantine(path: Path, budget: int = 10) -> BadRows:
    return BadRows("quarantine", budget=budget, path=str(path))


def test_the_policy_fail_stops_at_the_first_bad_row_and_names_it() -> None:
    log = BadRowLog("web", BadRows("fail"))
    with pytest.raises(BadRowError, match=r"source 'web': a\.parquet, row 7: not UTF-8; on_bad_row='skip'"):
        log.add("a.parquet", 7, "not UTF-8")


def test_skipped_rows_are_counted_until_the_budget_is_spent() -> None:
    log = BadRowLog("web", BadRows("skip", budget=2))
    log.add("a", 1, "x")
    log.add("a", 2, "x")
    assert log.num_dropped == 2
    with pytest.raises(BadRowError, match=r"3 bad rows are more than its budget of 2; the last is b, row 0: the end"):
        log.add("b", 0, "the end")


def test_a_budget_of_zero_allows_none() -> None:
    with pytest.raises(BadRowError, match="budget of 0"):
        BadRowLog("web", BadRows("skip", budget=0)).add("a", 0, "x")


def test_a_row_seen_again_neither_counts_nor_is_listed_twice(tmp_path: Path) -> None:
    log = BadRowLog("web", quarantine(tmp_path / "q.jsonl", budget=2))
    for _ in range(5):
        log.add("a", 1, "x")
        log.add("unknown place", -1, "y")
    assert log.num_dropped == 2
    assert [(entry["file"], entry["row"]) for entry in entries(tmp_path / "q.jsonl")] == [("a", 1), ("unknown place", -1)]


def test_quarantined_rows_are_listed_one_json_line_each(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    BadRowLog("web", quarantine(path)).add("a.tar", 3, "two\nlines of ünicode")
    BadRowLog("code", quarantine(path)).add("b.jsonl", 4, "z")
    assert entries(path) == [
        {"source": "web", "file": "a.tar", "row": 3, "error": "two lines of ünicode"},
        {"source": "code", "file": "b.jsonl", "row": 4, "error": "z"},
    ]


def test_rows_that_an_earlier_run_listed_are_counted_but_not_listed_again(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    BadRowLog("web", quarantine(path)).add("a", 1, "x")
    again = BadRowLog("web", quarantine(path))
    again.add("a", 1, "x")
    again.add("a", 2, "x")
    assert again.num_dropped == 2
    assert [entry["row"] for entry in entries(path)] == [1, 2]


def test_a_line_cut_short_by_a_crash_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'{"source": "web", "fi')
    BadRowLog("web", quarantine(path)).add("a", 1, "x")
    assert orjson.loads(path.read_bytes().splitlines()[1])["row"] == 1


@pytest.mark.strangers
def test_a_file_that_was_edited_by_hand_is_read_as_far_as_it_lists_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "q.jsonl"
    lines = [
        b'{"source": "web", "file": "a", "row": 1, "error": "x"}\r',
        b"",
        b"# checked by hand",
        b'{"source": "web", "file": "a", "row": "two", "error": "x"}',
        b'{"source": "web", "file": ["a"], "row": 3}',
        b"[1, 2]",
        b"\xff\xfe",
        b'{"source": "web", "file": "a", "row": 4, "note": "kept", "error": "x"}',
        b'{"source": "web", "fi',
    ]
    path.write_bytes(b"\n".join(lines))
    log = BadRowLog("web", quarantine(path))
    assert f"the quarantine file {path} has 6 lines that list no bad row, the first is line 3" in caplog.text
    for row in (1, 4, 5):
        log.add("a", row, "x")
    assert path.read_bytes().splitlines()[: len(lines)] == [line.removesuffix(b"\r") for line in lines]
    assert [orjson.loads(line)["row"] for line in path.read_bytes().splitlines()[len(lines) :]] == [5]


@pytest.mark.strangers
def test_the_quarantine_file_may_be_a_path_and_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in (tmp_path / "q.jsonl", "~/q.jsonl", Path("~/q.jsonl")):
        assert BadRows("quarantine", path=given).path == str(tmp_path / "q.jsonl")


@pytest.mark.strangers
def test_a_fifo_as_quarantine_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "q")
    with pytest.raises(SpecError, match=r"the quarantine file .*/q cannot be written"):
        BadRowLog("web", quarantine(tmp_path / "q"))


@pytest.mark.strangers
def test_text_that_is_no_unicode_is_listed_with_escapes(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    BadRowLog("web", quarantine(path)).add("caf\udce9.tar", 3, "a lone \ud800")
    assert entries(path) == [{"source": "web", "file": "caf\\udce9.tar", "row": 3, "error": "a lone \\ud800"}]
    again = BadRowLog("web", quarantine(path))
    again.add("caf\udce9.tar", 3, "a lone \ud800")
    assert len(entries(path)) == 1


def test_an_unwritable_quarantine_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"source 'web': the quarantine file .*missing/q\.jsonl cannot be written"):
        BadRowLog("web", quarantine(tmp_path / "missing" / "q.jsonl"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_under_the_quarantine_file_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    log = BadRowLog("web", quarantine(path))
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"cannot add to the quarantine file .* No space left on device"):
        log.add("a", 1, "x")


def test_threads_that_report_the_same_rows_agree_on_the_count(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    log = BadRowLog("web", quarantine(path, budget=1000))
    threads = [threading.Thread(target=lambda: [log.add("a", row, "x") for row in range(100)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.num_dropped == 100
    assert sorted(int(str(entry["row"])) for entry in entries(path)) == list(range(100))
