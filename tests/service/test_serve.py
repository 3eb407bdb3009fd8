"""`overlord serve`: says where it listens in one line, lets in who may come, and stops without losing a step."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.runtime.cores import num_usable_cores
from tests.commands import environment
from tests.service.served import content, streams, two_sources, undisturbed

JOB = """
import overlord as ol
from tests.service.served import two_sources
job = two_sources(mesh=ol.Mesh(dp=2))
"""


@pytest.fixture
def job_file(tmp_path) -> Path:
    path = tmp_path / "served_job.py"
    path.write_text(JOB)
    return path


class Serving:
    """`overlord serve` in a process of its own."""

    def __init__(self, job: Path, *arguments: object) -> None:
        command = [sys.executable, "-m", "overlord", "serve", job, "--json", *arguments]
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.told = json.loads(line) if line else {}

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def stopped_by(self, number: int) -> str:
        """What it says on the way out; it must have ended well."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors
        return errors


@pytest.mark.second_try(reason="a stopped server must end within 60 s")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_at_a_signal_keeps_the_state_and_goes_on_from_it_for_the_same_clients(job_file, tmp_path, number):
    job, state = two_sources(mesh=ol.Mesh(dp=2)), tmp_path / "state.json"
    with Serving(job_file, "--state", state) as first:
        assert first.told["ranks"] == 2
        assert first.told["step"] == 0
        address = first.told["address"]
        clients = [ol.connect(address, rank=rank, timeout_s=60) for rank in range(2)]
        before = streams(clients, 3)
        told = first.stopped_by(number)
    assert f"stopped before step 3; state saved to {state}" in told
    port = address.rpartition(":")[2]
    with Serving(job_file, "--resume", state, "--address", f"127.0.0.1:{port}") as second:
        assert second.told == {"address": address, "ranks": 2, "step": 3}
        after = streams(clients, 3)
        second.stopped_by(number)
    assert [a + b for a, b in zip(before, after, strict=True)] == undisturbed(job, 6)


def test_when_stopped_every_rank_still_gets_the_step_that_one_has(job_file, tmp_path):
    state = tmp_path / "state.json"
    with Serving(job_file, "--state", state, "--processes", "2") as serving:
        left, right = (ol.connect(serving.told["address"], rank=rank, timeout_s=60) for rank in range(2))
        streams([left, right], 1)
        expected = next(left).loss_tokens
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.stderr is not None
        assert "loader hosts" in serving.process.stderr.readline()
        told = serving.process.stderr.readline()
        if "every rank has its first step" in told:
            told = serving.process.stderr.readline()
        assert "stopping" in told
        assert next(right).loss_tokens == expected
        serving.process.communicate(timeout=60)
        assert serving.process.returncode == 0
    assert json.loads(state.read_text())["step"] == 2


def test_the_token_is_read_from_its_file(job_file, tmp_path):
    token = tmp_path / "token"
    token.write_text("hard-to-guess\n")
    with Serving(job_file, "--token-file", token) as serving:
        with pytest.raises(ol.errors.ServiceError, match="requires its token"):
            ol.connect(serving.told["address"], rank=0, timeout_s=20)
        client = ol.connect(serving.told["address"], rank=0, token="hard-to-guess", timeout_s=20)
        assert content(next(client)) == undisturbed(two_sources(mesh=ol.Mesh(dp=2)), 1)[0][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--address", "0.0.0.0:0"], "needs a token"),
        (["--tls-cert", "x.pem"], "TLS needs both files"),
        (["--token-file", "nowhere"], "the token cannot be read from nowhere"),
        (["--resume", "nowhere"], "there is no state file nowhere"),
        (["--resume", "log"], "--resume log resumes from the planner's log: say where it is with --log"),
        (["--address", "here"], "an address is host:port"),
        (["--ray", "--processes", "2"], "--ray and --processes both say where the job runs"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_served(job_file, arguments, message):
    with Serving(job_file, *arguments) as serving:
        out, errors = serving.process.communicate(timeout=60)
        assert (serving.process.returncode, out) == (1, "")
        assert errors.startswith("error: ")
        assert message in errors
        assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--processes", "3"], r"3 worker processes on \d+ cores: 3 loader hosts, 2 data constructors\n"),
        (["--processes", "0"], "one process, as --processes 0 says\n"),
        (
            [],
            r"\d+ worker processes on \d+ cores: .*, 2 data constructors\n|one process: .*, and trainers need some too\n",
        ),
    ],
)
def test_it_says_which_processes_it_took_and_serves_the_same_in_any(job_file, arguments, where):
    job = two_sources(mesh=ol.Mesh(dp=2))
    with Serving(job_file, *arguments) as serving:
        clients = [ol.connect(serving.told["address"], rank=rank, timeout_s=60) for rank in range(2)]
        assert streams(clients, 2) == undisturbed(job, 2)
        assert re.match(where, serving.stopped_by(signal.SIGTERM))


TOKENS = """
from pathlib import Path
import overlord as ol
from tests.small_sources import job_of
folder = Path(__file__).parent
job = job_of({name: ol.Parquet(folder / f"{name}.parquet") for name in "abcdefgh"}, mesh=ol.Mesh(dp=4))
"""


def test_trainers_of_this_machine_need_few_processes_for_sources_that_are_only_read(tmp_path):
    for number, name in enumerate("abcdefgh"):
        rows = [list(range(number * 1000, number * 1000 + 5 + row % 7)) for row in range(40)]
        pq.write_table(pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))}), tmp_path / f"{name}.parquet")
    (tmp_path / "job.py").write_text(TOKENS)
    with Serving(tmp_path / "job.py", "--processes", "6") as serving:
        told = serving.stopped_by(signal.SIGTERM)
    assert f"4 worker processes on {num_usable_cores()} cores: 3 loader hosts, 4 data constructors\n" in told


@pytest.mark.second_try(reason="a Ray cluster must end within 60 s")
def test_on_a_ray_of_its_own_it_serves_the_same_and_drains_all_the_same(job_file, tmp_path):
    job, state = two_sources(mesh=ol.Mesh(dp=2)), tmp_path / "state.json"
    with Serving(job_file, "--ray", "--state", state) as serving:
        clients = [ol.connect(serving.told["address"], rank=rank, timeout_s=60) for rank in range(2)]
        assert streams(clients, 2) == undisturbed(job, 2)
        serving.stopped_by(signal.SIGTERM)  # Ray has a handler of its own for it
    assert json.loads(state.read_text())["step"] == 2


LIVE_JOB = """
import overlord as ol
from tests.small_sources import Numbered
sources = {"a": Numbered(rows=40, first=1, window=2), "b": Numbered(rows=23, unit_rows=4, first=100, longest=16)}
# one more
job = ol.Job(
    sources=sources,
    batch=ol.Batch(tokens=64, sequence_length=16),
    mixture=ol.Mixture({"a": 3, "b": 2}),
    mesh=ol.Mesh(dp=2),
)
"""
ONE_MORE = 'sources["c"] = Numbered(rows=31, unit_rows=3, first=200, longest=9)'


def by_number(clients: list[ol.Client], end: int) -> dict[int, list]:
    """What each rank gets in each step before `end`, from where the clients are."""
    found: dict[int, list] = {}
    while clients[0].step < end:
        steps = [next(client) for client in clients]
        found[steps[0].number] = [content(step) for step in steps]
    return found


@pytest.mark.second_try(reason="a killed server is started again within 60 s")
def test_a_source_is_added_over_the_wire_and_a_killed_service_goes_on_with_it_from_its_log(tmp_path):
    path, log = tmp_path / "live_job.py", tmp_path / "log"
    path.write_text(LIVE_JOB)
    grown: dict[str, ol.Job] = {}
    exec(LIVE_JOB.replace("# one more", ONE_MORE), grown)
    declared = grown["job"].sources
    job = replace(grown["job"], sources={name: declared[name] for name in ("a", "b")})
    with ol.start(job) as loader:
        clients = [loader.client(rank) for rank in range(2)]
        expected = by_number(clients, 3)
        assert loader.add_source("c", declared["c"], 0.5, timeout_s=30) == 3
        expected |= by_number(clients, 14)
        state = loader.state_before(10)
    with Serving(path, "--log", log) as first:
        clients = [ol.connect(first.told["address"], rank=rank, timeout_s=60) for rank in range(2)]
        found = by_number(clients, 3)
        with ol.Control(first.told["address"]) as control:
            with pytest.raises(ol.errors.SpecError, match="the job file declares no source 'c'; it has 'a', 'b'"):
                control.add_source("c", 0.5)
            path.write_text("sources = {")
            with pytest.raises(ol.errors.OverlordError, match=r"live_job\.py"):
                control.add_source("c", 0.5)
            path.write_text(LIVE_JOB.replace("# one more", ONE_MORE))
            assert control.add_source("c", 0.5) == 3
        found |= by_number(clients, 8)
        first.process.kill()
        for client in clients:
            client.close()
    assert found == {step: expected[step] for step in range(8)}
    with Serving(path, "--log", log, "--resume", "log") as second:
        assert second.told["step"] <= 8
        clients = [ol.connect(second.told["address"], rank=rank, timeout_s=60) for rank in range(2)]
        again = by_number(clients, 10)
        saved = clients[0].state_dict()
        again |= by_number(clients, 12)
        for client in clients:
            client.close()
    assert again == {step: expected[step] for step in range(second.told["step"], 12)}
    with ol.start(grown["job"], resume=saved) as loader:
        assert by_number([loader.client(rank) for rank in range(2)], 14) == {step: expected[step] for step in range(10, 14)}
    with ol.start(grown["job"], resume=state) as loader:
        assert by_number([loader.client(rank) for rank in range(2)], 14) == {step: expected[step] for step in range(10, 14)}
