"""The metrics of a run: they count what happened, once, wherever it happened, and nobody who waits holds them up."""

import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import overlord as ol
from overlord.roles.rank_pace import PaceMeter
from overlord.runtime.events import KINDS, MOST_EVENTS, EventHistory, EventRing
from overlord.service.auth import Listen
from overlord.service.metric_table import FAMILIES
from overlord.service.metrics_http import MetricsServer, render
from overlord.status import WAIT_BOUNDS_S, RunMetrics, to_plain
from tests.service.served import served, streams, two_sources
from tests.small_sources import Numbered, job_of

RUN_ON: dict[str, type] = {"embedded": ol.Embedded, "processes": lambda: ol.Processes(2)}  # type: ignore[dict-item]


@pytest.mark.parametrize("engine", RUN_ON)
def test_ranks_and_sources_are_counted_exactly_for_trainers_in_other_processes_and_in_this_one(engine):
    job = two_sources(mesh=ol.Mesh(dp=2))
    with ol.start(job, engine=RUN_ON[engine]()) as loader:
        address = loader.serve()
        clients = [loader.client(0), ol.connect(address, rank=1, timeout_s=60)]
        tokens = [0, 0]
        for _ in range(6):
            for rank, client in enumerate(clients):
                tokens[rank] += sum(micro["num_tokens"] for micro in next(client))
        found = loader.metrics()
        drawn = loader.report(6).mix
        over_the_wire = clients[1].run.metrics()
        assert [client.metrics()["overlord/tokens_total"] for client in clients] == tokens
        clients[1].close()
    for rank in range(2):
        assert found.ranks[rank].num_steps == sum(found.ranks[rank].waits) == 6
        assert found.ranks[rank].step == 6
        assert found.ranks[rank].tokens >= tokens[rank], "a rank may have fetched more than its trainer has taken"
    assert found.ranks[0].tokens == tokens[0]
    assert found.step == 6
    for name in job.sources:
        assert (found.sources[name].samples, found.sources[name].tokens) == (drawn[name].samples, drawn[name].tokens)
        assert found.sources[name].samples > 0
        assert found.sources[name].num_chunks > 0
        assert found.sources[name].buffer.num_bytes > 0
    assert sum(source.share for source in found.sources.values()) == pytest.approx(1)
    assert over_the_wire.ranks[0] == found.ranks[0]
    assert set(found.roles) >= {"planner", "loaders/0", "constructor/0", "constructor/1"}
    assert all(role.process is not None and role.restarts == 0 for role in found.roles.values())


def test_nothing_that_was_counted_is_lost_when_the_mesh_changes_or_the_run_is_moved():
    with ol.start(two_sources(mesh=ol.Mesh(dp=2))) as loader:
        clients = [loader.client(rank) for rank in range(2)]
        streams(clients, 3)
        state = loader.state_dict()
        before = loader.metrics()
        streams(clients, 1)  # which nobody asks for before the constructors are replaced
        for client in clients:
            client.close()
        loader.resize(ol.Mesh(dp=3))
        clients = [loader.client(rank) for rank in range(3)]
        streams(clients, 2)
        after = loader.metrics()
        loader.load_state_dict(state)
        streams(clients, 1)
        moved = loader.metrics()
    assert [rank.num_steps for rank in after.ranks.values()] == [6, 6, 2]
    assert [rank.num_steps for rank in moved.ranks.values()] == [7, 7, 3]
    assert after.ranks[0].tokens > before.ranks[0].tokens
    assert (before.generation, after.generation, moved.generation) == (0, 1, 2)
    assert moved.step == 4
    assert moved.event_counts == {"resize": 1, "moved": 1}
    assert [event.kind for event in moved.events] == ["resize", "moved"]


@pytest.mark.second_try(reason="a killed worker process must be replaced within the patience of its callers")
def test_totals_never_go_down_when_processes_are_killed_and_the_restart_is_told():
    with ol.start(two_sources(mesh=ol.Mesh(dp=2)), engine=ol.Processes(2)) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        streams(clients, 4)
        before = loader.metrics()
        os.kill(before.roles["loaders/0"].process or 0, signal.SIGKILL)
        streams(clients, 4)
        after = loader.metrics()
    for name, source in after.sources.items():
        assert source.num_chunks >= before.sources[name].num_chunks
        assert source.make_s >= before.sources[name].make_s
    assert all(after.ranks[rank].num_steps >= before.ranks[rank].num_steps for rank in range(2))
    assert after.event_counts["restart"] == 1
    assert "loaders/0" in next(event.text for event in after.events if event.kind == "restart")
    assert after.roles["loaders/0"].restarts == 1


@dataclass(frozen=True)
class Hanging(Numbered):
    """Hangs at its third unit until the event is set."""

    def read(self, unit: ol.Unit) -> pa.Table:
        if unit.index >= 2:
            RELEASED.wait(60)
        return super().read(unit)


RELEASED = threading.Event()


def _waits_for_the_hanging_unit(loader: ol.Loader) -> bool:
    """True once the trainer has taken every step that can be planned without the unit that hangs."""
    lines = loader.status_lines()
    drawing = f"the planner is drawing step {loader.metrics().step}"
    hangs = "source 'stuck' is making chunk 2"
    return any(line.split(",")[0] == drawing for line in lines) and any(hangs in line for line in lines)


@contextmanager
def hanging_run(**fields: Any) -> Iterator[tuple[ol.Loader, threading.Thread]]:
    """A run whose rank 0 waits for a source that hangs."""
    RELEASED.clear()
    hangs = Hanging(rows=40, shuffle=False)
    with ol.start(job_of({"stuck": hangs, "fine": Numbered(first=100)}, **fields)) as loader:
        client = loader.client(0)
        reader = threading.Thread(target=lambda: [next(client) for _ in range(6)], daemon=True)
        reader.start()
        try:
            while not _waits_for_the_hanging_unit(loader):
                time.sleep(0.01)
            yield loader, reader
        finally:
            RELEASED.set()
            reader.join(30)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_neither_report_nor_metrics_nor_status_waits_for_a_source_that_hangs(num_workers):
    with hanging_run(num_workers=num_workers) as (loader, reader):
        address = loader.serve()
        answers: list = []
        calls = (loader.report, loader.metrics, loader.status, loader.state_dict)
        asking = threading.Thread(target=lambda: answers.extend(call() for call in calls), daemon=True)
        asking.start()
        asking.join(20)
        assert reader.is_alive(), "the source hangs still"
        assert len(answers) == 4
        assert answers[0].mix["stuck"].samples == answers[1].sources["stuck"].samples
        from overlord.service.admin import Control

        with Control(address) as control:
            assert control.report().step == answers[0].step
            assert control.metrics().sources["stuck"].num_pending == 1
            assert any("source 'stuck' is making chunk 2" in line for line in control.waits())


def test_events_of_all_kinds_are_noted_with_times():
    began = time.time()
    with served(two_sources(mesh=ol.Mesh(dp=2)), leave_after_s=0.2) as (loader, address):
        loader.set_weights({"a": 1.0})
        client = ol.connect(address, rank=0, timeout_s=30)
        next(client)
        deadline = time.monotonic() + 30  # rank 1 never comes
        while "rank_lost" not in loader.metrics().event_counts and time.monotonic() < deadline:
            time.sleep(0.05)
        client.close()
        loader.drain(1)
        events = loader.metrics().events
    assert [event.kind for event in events] == ["serving", "weights", "rank_lost", "draining"]
    assert all(began <= event.at_s <= time.time() for event in events)
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert {event.kind for event in events} <= set(KINDS)
    assert "a 1" in events[1].text


def test_the_ring_of_events_is_bounded_and_each_event_is_counted_once():
    ring, history = EventRing(), EventHistory(0.0)
    for number in range(MOST_EVENTS + 10):
        ring.note("retry", f"{number} " + "x" * 10_000)
        history.add(ring.recent()[-2:])
    history.add(ring.recent())
    assert len(ring.recent()) == len(history.newest()) == MOST_EVENTS
    assert history.counts == {"retry": MOST_EVENTS + 10}
    assert max(len(event.text) for event in ring.recent()) == 500


@given(st.lists(st.tuples(st.integers(1, 70), st.floats(0, 100)), max_size=30))
def test_the_histogram_has_every_step_once_and_the_sum_of_all_waits(takes):
    """A trainer that shares memory may have taken several steps when the service looks."""
    step, now = -1, 0.0
    meter = PaceMeter(clock=lambda: now)
    for number, (steps, waited_s) in enumerate(takes):
        step, now = step + (steps if number else 1), now + waited_s + 1
        meter.note_take(0, step, waited_s)
    counted = meter.ranks.get(0)
    if not takes:
        assert counted is None
        return
    assert counted is not None
    assert counted.num_steps == sum(counted.waits) == sum(n if n <= 64 else 1 for n, _ in [(1, 0), *takes[1:]])
    assert counted.waited_s == pytest.approx(sum(waited for _, waited in takes), abs=1e-6)


# Over HTTP


def get(url: str, token: str | None = None, method: str = "GET") -> str:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=20) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return reply.read().decode()


def refused(url: str, token: str | None = None, method: str = "GET") -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(url, token, method)
    with error.value as answer:
        return answer.code, answer.read().decode()


def samples_of(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """name to labels to value, by Prometheus' own parser."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


ODD = '<script>alert("1")</script>\\ \n é'


def test_what_prometheus_scrapes_is_the_snapshot_and_any_name_of_a_source_survives():
    with ol.start(job_of({ODD: Numbered(), "b": Numbered(first=100)}, mesh=ol.Mesh(dp=2))) as loader:
        url = loader.serve_metrics()
        streams([loader.client(rank) for rank in range(2)], 3)
        metrics = loader.metrics()
        found = samples_of(get(url))
    assert found["overlord_source_samples_total"] == {(("source", n),): s.samples for n, s in metrics.sources.items()}
    assert found["overlord_rank_steps_total"] == {(("rank", "0"),): 3, (("rank", "1"),): 3}
    assert found["overlord_rank_wait_seconds_count"] == {(("rank", "0"),): 3, (("rank", "1"),): 3}
    bounds = [float(dict(labels)["le"]) for labels in found["overlord_rank_wait_seconds_bucket"] if ("rank", "0") in labels]
    assert bounds == [*WAIT_BOUNDS_S, float("inf")]
    assert found["overlord_step"] == {(): 3}
    names = {re.sub(r"_(created|bucket|sum|count)$", "", name) for name in found}
    assert names <= {family.full_name for family in FAMILIES}


def test_on_loopback_it_needs_no_token_and_with_one_every_request_does():
    with served(two_sources()) as (loader, _):
        assert "overlord_step" in get(loader.serve_metrics())
    with served(two_sources()) as (loader, _):
        url = loader.serve_metrics(token="hard-to-guess")
        assert "overlord_step" in get(url, "hard-to-guess")
        for wrong, said in ((None, "no token"), ("hard-to-gues", "a wrong token"), ("é", "a wrong token")):
            code, answer = refused(url, wrong)
            assert code == 401
            assert said in answer
            assert answer.count("\n") == 1
            assert "overlord_step" not in answer


def test_off_loopback_it_refuses_to_start_without_a_token():
    with ol.start(two_sources()) as loader, pytest.raises(ol.errors.SpecError, match="needs a token"):
        loader.serve_metrics("0.0.0.0:0")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/../etc/passwd", "/metrics/../x", "/%2e%2e/metrics"])
def test_it_answers_metrics_and_nothing_else(path):
    with ol.start(two_sources()) as loader:
        base = loader.serve_metrics().removesuffix("/metrics")
        assert refused(base + path) == (404, "this service answers /metrics\n")
        assert refused(f"{base}/metrics", method="POST")[0] == 501


def test_a_port_that_is_taken_and_a_second_server_are_one_clear_error_each():
    with ol.start(two_sources()) as loader:
        url = loader.serve_metrics()
        with pytest.raises(ol.errors.SpecError, match=f"serves its metrics at {url} already"):
            loader.serve_metrics()
        port = url.rpartition(":")[2].partition("/")[0]
        with ol.start(two_sources()) as other, pytest.raises(ol.errors.SpecError, match="cannot serve metrics on 127"):
            other.serve_metrics(f"127.0.0.1:{port}")


def test_scrapes_within_a_second_cost_the_run_one():
    now, asked = [0.0], []
    with ol.start(two_sources()) as loader:

        def metrics() -> RunMetrics:
            asked.append(now[0])
            return loader.metrics()

        server = MetricsServer(Listen(), metrics, clock=lambda: now[0])
        for at in (0.0, 0.5, 0.9, 1.1, 1.2):
            now[0] = at
            assert server.answer("/metrics", "")[0] == 200
        server.close()
    assert asked == [0.0, 1.1]


def test_a_snapshot_is_plain_values_and_every_family_reads_it():
    with ol.start(two_sources()) as loader:
        metrics = loader.metrics()
    plain = to_plain(metrics)
    assert plain["ranks"]["0"]["step"] is None
    assert plain["sources"]["a"]["weight"] == 0.5
    assert {"overlord_planner_lead_steps", "overlord_events_total"} <= set(samples_of(render(metrics).decode()))
    assert "overlord_planner_lead_steps" not in samples_of(render(replace(metrics, planner=None)).decode())
