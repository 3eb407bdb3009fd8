"""The page of a run without a browser: who may see it, and what it is told."""

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.service.page.history import LONG_S, NOT_READING, RECENT_S, RunHistory, TimeColumn, merge_columns
from overlord.service.page.verdict import judge
from overlord.status import RunMetrics
from tests.service.served import streams, two_sources
from tests.small_sources import Numbered, job_of

TOKEN = "0123456789abcdef"
pytest.importorskip("starlette", reason="the page needs the extra 'page'")


def get(url: str, token: str | None = None, **headers: str) -> tuple[int, bytes]:
    given = headers | ({} if token is None else {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=given), timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@contextmanager
def stream(url: str, wanted: str = "recent") -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """The messages of a viewer, one after the other."""
    with urllib.request.urlopen(f"{url}api/stream?range={wanted}", timeout=20) as answer:

        def messages() -> Iterator[tuple[str, dict[str, Any]]]:
            name = ""
            for line in answer:
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:])

        yield messages()


def test_nothing_of_the_job_is_told_without_the_token():
    job = job_of({"a_secret_source": Numbered()})
    with ol.start(job) as loader:
        url = loader.page(token=TOKEN)
        next(loader.client(0))
        status, page = get(url)
        assert status == 200
        assert b"a_secret_source" not in page
        for path in ("api/stream", "api/step/0", "api/step/now", "api/step/0/microbatch/0", "nothing"):
            for wrong in (None, "", TOKEN[:-1], TOKEN + "0", "ü"):
                status, body = get(url + path, None if wrong is None else wrong.encode().decode("latin-1"))
                assert status == 401, (path, wrong)
                assert b"a_secret_source" not in body
        assert b"a_secret_source" in get(url + "api/step/1", TOKEN)[1]


def test_an_address_that_others_can_reach_needs_a_token():
    with ol.start(two_sources()) as loader, pytest.raises(ol.errors.SpecError, match="needs a token"):
        loader.page("0.0.0.0:0")


def test_a_foreign_site_whose_name_points_here_reads_nothing():
    with ol.start(two_sources()) as loader:
        url = loader.page()
        for host, status in (
            ("evil.example", 403),
            ("127.0.0.1.evil.example:80", 403),
            ("localhost:1", 200),
            ("[::1]:1", 200),
        ):
            assert get(url, Host=host)[0] == status, host
            assert get(url + "api/step/0", Host=host)[0] in (status, 404)


@pytest.mark.parametrize(
    "path",
    [
        "/../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/page.js",
        "/api/",
        "/api/step/-1",
        "/api/step/1e9",
    ],
)
def test_no_file_is_served_whatever_the_path(path):
    with ol.start(two_sources()) as loader:
        host = loader.page().split("/")[2]
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 404
        assert b"root:" not in answer.read()
        connection.close()


def test_nothing_can_be_changed_and_nobody_else_may_use_the_page():
    with ol.start(two_sources()) as loader:
        url = loader.page()
        for method in ("POST", "PUT", "DELETE"):
            with pytest.raises(urllib.error.HTTPError, match="405"):
                urllib.request.urlopen(urllib.request.Request(url, method=method, data=b""), timeout=20)
        with urllib.request.urlopen(url, timeout=20) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert len(answer.read()) < 150_000
            assert "Access-Control-Allow-Origin" not in answer.headers
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_a_viewer_gets_a_snapshot_and_then_what_changed():
    with ol.start(two_sources(mesh=ol.Mesh(dp=2))) as loader:
        url = loader.page()
        clients = [loader.client(rank) for rank in range(2)]
        streams(clients, 3)
        with stream(url) as messages:
            name, first = next(messages)
            assert name == "snapshot"
            streams(clients, 2)
            known = first
            while known.get("run", {}).get("step") != 5 or len(known["columns"]) < 2:
                name, delta = next(messages)
                assert name == "delta"
                assert "kinds" not in delta or "kinds" not in first, "what has not changed is not sent again"
                known |= {
                    **delta,
                    "columns": known["columns"] + delta["columns"],
                    "events": known["events"] + delta["events"],
                }
        assert known["sources"]["name"] == ["a", "b"]
        assert known["ranks"]["step"] == [5, 5]
        assert known["run"]["reading"] == 2
        assert all(len(column["m"] or [0, 0]) == len(column["a"]) == 2 for column in known["columns"])
        with stream(url, "long") as messages:
            name, longer = next(messages)
            assert (name, longer["open"], len(longer["columns"])) == ("snapshot", True, 1)
        assert get(url + "api/stream?range=year")[0] == 400


def test_steps_that_are_not_kept_are_refused_in_a_sentence_and_nothing_is_drawn_for_them():
    with ol.start(two_sources()) as loader:
        url = loader.page()
        client = loader.client(0)
        streams([client], 6)
        before = loader.status().reached
        for path, said in (
            ("0", "no longer kept"),
            ("900000", "not planned yet"),
            (f"{before - 1}/microbatch/999", "has microbatches 0 to"),
        ):
            status, body = get(f"{url}api/step/{path}")
            assert status == 404
            assert said in json.loads(body)["error"]
        assert loader.status().reached < before + 100, "the next steps are built ahead, and no others"


def test_the_documents_of_a_microbatch_are_those_of_the_loader_also_when_the_run_went_on():
    with ol.start(two_sources(mesh=ol.Mesh(dp=2))) as loader:
        url = loader.page()
        clients = [loader.client(rank) for rank in range(2)]
        streams(clients, 2)
        step = json.loads(get(url + "api/step/now")[1])["step"]
        plan = json.loads(get(f"{url}api/step/{step}")[1])
        streams(clients, 8)
        found = [json.loads(get(f"{url}api/step/{step}/microbatch/{n}")[1]) for n in range(sum(plan["counts"]))]
        expected = loader.documents(step) or []
    assert [tuple(each) for micro in found for each in micro] == [(d.source, d.file, d.row, d.tokens) for d in expected]
    assert [len(micro) for micro in found] == plan["samples"]
    assert plan["ranks"] == [[0], [1]]


@pytest.mark.parametrize("engine", ["embedded", "processes"])
def test_a_run_with_a_log_shows_any_step_of_it_as_it_was_on_the_mesh_that_it_had(engine, tmp_path):
    runs_on = ol.Processes(2) if engine == "processes" else None
    with ol.start(two_sources(mesh=ol.Mesh(dp=2)), log=tmp_path, engine=runs_on) as loader:
        url = loader.page()
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        expected = [loader.documents(0) or [], loader.documents(3) or []]
        streams(clients, 40)
        loader.resize(ol.Mesh(dp=1))
        streams([loader.client(0, timeout_s=60)], 40)
        for step, documents in zip((0, 3), expected, strict=True):
            plan = json.loads(get(f"{url}api/step/{step}")[1])
            assert (plan["recorded"], plan["any"], plan["ranks"]) == (True, True, [[0], [1]])
            found = [json.loads(get(f"{url}api/step/{step}/microbatch/{n}")[1]) for n in range(sum(plan["counts"]))]
            told = [tuple(each) for micro in found for each in micro]
            assert told == [(d.source, d.file, d.row, d.tokens) for d in documents]
        later = json.loads(get(f"{url}api/step/45")[1])
        assert later["ranks"] == [[0]]
        newest = json.loads(get(f"{url}api/step/{json.loads(get(url + 'api/step/now')[1])['step']}")[1])
        assert not newest["recorded"]
        assert newest["any"]
        status, body = get(f"{url}api/step/{loader.status().reached + 900}")
        assert (status, "not planned yet" in json.loads(body)["error"]) == (404, True)


@dataclass(frozen=True)
class Stuck(Numbered):
    """Hangs at its third unit until the event is set."""

    def read(self, unit: ol.Unit) -> pa.Table:
        if unit.index >= 2:
            RELEASED.wait(60)
        return super().read(unit)


RELEASED = threading.Event()


def test_a_rank_that_waits_is_told_while_it_waits_with_what_it_waits_for():
    RELEASED.clear()
    with ol.start(job_of({"slow": Stuck(rows=40)}, num_workers=2)) as loader:
        url = loader.page()
        reader = threading.Thread(target=lambda: streams([loader.client(0)], 8))
        reader.start()
        try:
            with stream(url) as messages:
                known: dict[str, Any] = {}
                for _, message in messages:
                    known |= message
                    if known["run"]["level"] == "bad" and known["run"]["causes"]:
                        break
            assert "Rank 0 has waited" in known["run"]["verdict"]
            assert any("slow" in line for line in known["run"]["causes"])
            assert known["ranks"]["waiting_s"][0] > 4
        finally:
            RELEASED.set()
            reader.join()


def test_a_second_page_and_a_port_in_use_are_refused():
    with ol.start(two_sources()) as loader, ol.start(two_sources()) as other:
        url = loader.page()
        with pytest.raises(ol.errors.SpecError, match="already"):
            loader.page()
        with pytest.raises(ol.errors.SpecError, match="choose a free port"):
            other.page(url.split("/")[2])


# History and verdict


def a_column(at_s: float, waits: list[float], drawn: list[float], span_s: float = 1.0) -> TimeColumn:
    weights = np.full(len(drawn), 1 / len(drawn))
    return TimeColumn(at_s, span_s, 2, 100, np.array(waits, np.float32), np.array(drawn), weights, 5)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=40)
)
def test_merged_columns_lose_nothing(rows):
    columns = [a_column(i, [a, b], [c, d]) for i, (a, b, c, d) in enumerate(rows)]
    merged = merge_columns(columns)
    assert merged.num_steps == 2 * len(rows)
    assert merged.span_s == len(rows)
    assert merged.waited_s == pytest.approx([sum(row[0] for row in rows), sum(row[1] for row in rows)], abs=1e-4)
    assert merged.drawn.tolist() == [sum(row[2] for row in rows), sum(row[3] for row in rows)]


def test_ranks_that_do_not_read_are_told_apart_from_those_that_do_not_wait():
    merged = merge_columns([a_column(0, [np.nan, 0], [1, 1]), a_column(1, [np.nan, 0.5], [1, 1])])
    assert np.isnan(merged.waited_s[0])
    levels = np.frombuffer(__import__("base64").b64decode(merged.to_plain()["w"]), np.uint8)
    assert levels.tolist() == [NOT_READING, round(0.25 * 250)]


@pytest.fixture(scope="module")
def looked() -> RunMetrics:
    """A run of two ranks after some steps."""
    with ol.start(two_sources(mesh=ol.Mesh(dp=2))) as loader:
        streams([loader.client(rank) for rank in range(2)], 4)
        return loader.metrics()


def test_the_history_of_a_long_run_is_bounded(looked):
    history = RunHistory()
    for second in range(20_000):
        history.add(replace(looked, up_s=float(second), at_s=1e9 + second, step=second))
    assert len(history.recent()) <= RECENT_S + 1
    assert len(history.long()) <= LONG_S / 30 + 2
    assert sum(column.num_steps for column in history.long()) == pytest.approx(LONG_S, rel=0.01)


def test_a_run_that_is_moved_back_has_no_negative_figures(looked):
    history = RunHistory()
    history.add(looked)
    column, _ = history.add(
        replace(
            looked,
            up_s=looked.up_s + 1,
            generation=1,
            step=0,
            sources={name: replace(s, tokens=0, samples=0) for name, s in looked.sources.items()},
        )
    )
    assert column is not None
    assert (column.num_steps, column.tokens, column.drawn.min()) == (0, 0, 0)


def test_the_verdict_names_the_worst(looked):
    well = a_column(0, [0.0, 0.01], [1, 1])
    assert judge(looked, well).level == "ok"
    assert "Ranks wait 60%" in judge(looked, a_column(0, [0.5, 0.7], [1, 1])).text
    assert "not rank 1" in judge(looked, a_column(0, [0.9, 0.0], [1, 1])).text
    ranks = {rank: replace(found, waiting_s=60.0 * rank) for rank, found in looked.ranks.items()}
    assert judge(replace(looked, ranks=ranks), well).text.startswith("Rank 1 has waited 60 s for step 4")
    roles = looked.roles | {"loaders/0": replace(looked.roles["loaders/0"], process=None)}
    assert judge(replace(looked, roles=roles), well).text == "loaders/0 does not answer."
    assert judge(replace(looked, ranks={0: replace(looked.ranks[0], step=None)}), None).level == "idle"
