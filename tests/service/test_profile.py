"""The profile of a run: a file that says who did what when, in the format of Perfetto, and never grows without bound."""

import json
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import overlord as ol
from overlord.errors import SpecError
from overlord.runtime.recorder import COLLECTED_S, MOST_SPANS, Recorder, SpanBatch, SpanRing, TimedSpan, current_recorder
from overlord.service.profile import ProfileWriter
from tests.cli.test_watching import command
from tests.service.served import two_sources
from tests.small_sources import Numbered, job_of


def spans_of(path: Path) -> tuple[list[dict[str, Any]], dict[int, str], dict[int, str]]:
    """The spans, the names of processes, and the names of tracks. Fails unless the file is what Perfetto takes."""
    entries = json.loads(path.read_text())
    spans = [entry for entry in entries if entry["ph"] == "X"]
    assert all(span["dur"] >= 0 and span["ts"] > 1e15 and isinstance(span["tid"], int) for span in spans)
    names = [entry for entry in entries if entry["ph"] == "M" and entry["args"]]
    processes = {entry["pid"]: entry["args"]["name"] for entry in names if entry["name"] == "process_name"}
    tracks = {entry["tid"]: entry["args"]["name"] for entry in names if entry["name"] == "thread_name"}
    assert {span["pid"] for span in spans} <= processes.keys()
    assert {span["tid"] for span in spans} <= tracks.keys()
    return spans, processes, tracks


def assert_nested(spans: list[dict[str, Any]]) -> None:
    """Spans of one track lie beside or inside one another: viewers draw nothing else."""
    by_track: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        by_track[span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
    for found in by_track.values():
        open_ends: list[float] = []
        for began, ended in sorted(found, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1] <= began + 1:  # a microsecond: times are rounded
                open_ends.pop()
            assert not open_ends or ended <= open_ends[-1] + 1
            open_ends.append(ended)


@dataclass(frozen=True)
class SlowUnit(Numbered):
    """One unit takes a while."""

    slow: int = 3

    def read(self, unit: ol.Unit):
        if unit.index == self.slow:
            time.sleep(0.4)  # the fault itself, which the profile is to show
        return super().read(unit)


@pytest.mark.parametrize("engine", ["embedded", "processes", "ray"])
def test_a_slow_step_explains_itself(engine, tmp_path, request):
    runs_on: Any = {"embedded": ol.Embedded, "processes": lambda: ol.Processes(2)}.get(engine)
    if engine == "ray":
        request.getfixturevalue("ray_cluster")
        runs_on = lambda: ol.Ray("auto", loader_hosts=1, loaders=ol.scaling.ActorOptions())  # noqa: E731
    job = job_of(
        {"a": SlowUnit(rows=40, first=1, shuffle=False, window=1)},
        ol.Batch(samples=4, sequence_length=16),
        mesh=ol.Mesh(dp=2),
    )
    path = tmp_path / "out.json"
    with ol.start(job, engine=runs_on(), profile=path) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        for _ in range(9):
            for client in clients:
                next(client)
    spans, processes, tracks = spans_of(path)
    assert_nested(spans)
    longest = {
        name: max(s["dur"] for s in spans if s["name"].startswith(name)) for name in ("wait for step", "build", "make")
    }
    slow = next(span for span in spans if span["name"] == "read numbered#3")
    assert slow["dur"] >= 0.4e6
    assert slow["args"] == {"source": "a"}
    chunk = next(s for s in spans if s["name"].startswith("make chunk 3 of a"))
    assert chunk["ts"] <= slow["ts"] + 1
    assert chunk["ts"] + chunk["dur"] >= slow["ts"] + slow["dur"] - 1
    assert min(longest.values()) > 0.1e6, "the step that needed the chunk waited for it"
    assert {"rank 0", "rank 1"} <= set(tracks.values())
    assert any("planner" in name for name in processes.values())
    assert len(processes) == 1 if engine == "embedded" else len(processes) > 1
    assert {f"plan step {n}" for n in range(9)} <= {s["name"] for s in spans}


def test_nothing_is_recorded_until_somebody_collects_and_not_long_after(monkeypatch):
    ring = SpanRing()
    with ring.around("before"):
        pass
    assert not ring.is_on
    assert ring.take().spans == []
    assert ring.is_on
    now = time.perf_counter()
    ring.add("work", now - 1, rows=3)
    ring.add("too short", now, ended=now + 1e-6)
    (span,) = ring.take().spans
    assert (span[0], span[4]) == ("work", {"rows": 3})
    assert threading.current_thread().name in span[1]
    assert abs(span[2] + span[3] - time.time()) < 5
    ring.add("much later", now, ended=now + 2 * COLLECTED_S)  # nobody collects any more
    assert not ring.is_on
    assert ring.take().spans == []


def test_what_is_not_collected_in_time_is_counted_and_memory_is_bounded():
    ring = SpanRing()
    ring.take()
    now = time.perf_counter()
    for _ in range(MOST_SPANS + 5):
        ring.add("work", now - 1, ended=now)
    found = ring.take()
    assert (len(found.spans), found.num_lost) == (MOST_SPANS, 5)


def test_the_file_is_turned_over_and_both_parts_can_be_read_alone(tmp_path):
    writer = ProfileWriter(tmp_path / "out.json", most_bytes=20_000)
    for second in range(40):
        spans: list[TimedSpan] = [(f"step {second}", f"rank {rank}", 1e9 + second, 0.5, None) for rank in range(20)]
        writer.add("constructor/0", SpanBatch(1, "node", spans, 0))
    writer.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.json", "out.previous.json"]
    newest, _, tracks = spans_of(tmp_path / "out.json")
    older, processes, _ = spans_of(tmp_path / "out.previous.json")
    assert newest[-1]["name"] == "step 39"
    assert older[-1]["ts"] < newest[0]["ts"]
    assert len(tracks) == 20
    assert processes == {1: "constructor/0 (process 1 on node)"}
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 60_000


def test_a_file_that_cannot_be_written_is_told_before_anything_is_read(tmp_path):
    with pytest.raises(SpecError, match=r"the profile cannot be written to .*/none/out.json: No such file"):
        ol.start(two_sources(), profile=tmp_path / "none" / "out.json")


def test_run_writes_a_profile(tmp_path, capsys):
    path = tmp_path / "profiled_job.py"
    path.write_text("from tests.service.served import two_sources\njob = two_sources()\n")
    command(capsys, "run", path, "--steps", 20, "--profile", tmp_path / "out.json")
    spans, _, _ = spans_of(tmp_path / "out.json")
    assert any(span["name"].startswith("build step 1") for span in spans)


def test_two_runs_in_one_process_do_not_see_each_others_events_and_spans(tmp_path):
    with (
        ol.start(two_sources(), profile=tmp_path / "first.json") as first,
        ol.start(two_sources(), engine=ol.Processes(1)) as second,
        ol.start(two_sources()) as third,
    ):
        for loader, weights in ((first, {"a": 1, "b": 0}), (second, {"a": 0, "b": 1}), (third, None)):
            client = loader.client(0, timeout_s=60)
            for _ in range(3):
                next(client)
            if weights is not None:
                loader.set_weights(weights)
        third.serve()
        told = [[event.text.partition(": ")[2] for event in loader.metrics().events] for loader in (first, second)]
        assert told == [["a 1, b 0"], ["a 0, b 1"]]
        assert [event.kind for event in third.metrics().events] == ["serving"]
        assert [loader.metrics().event_counts for loader in (first, second)] == [{"weights": 1}, {"weights": 1}]
    spans, _, _ = spans_of(tmp_path / "first.json")
    assert len([span for span in spans if span["name"].startswith("build step 1 of")]) == 1


def test_threads_of_a_run_note_for_it_and_others_for_the_process():
    found: list[Recorder] = []

    @dataclass(frozen=True)
    class Noting(Numbered):
        def read(self, unit: ol.Unit):
            found.append(current_recorder())
            return super().read(unit)

    engine = ol.Embedded()
    with ol.start(job_of({"a": Noting(rows=40, first=1)}), engine=engine) as loader:
        client = loader.client(0)
        for _ in range(20):
            next(client)
    assert set(found) == {engine.recorder}
    assert current_recorder() is not engine.recorder
