"""What people see of a run in a terminal, and one clear line for each mistake."""

import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

import overlord as ol
from overlord.cli import main
from overlord.cli.live import WaitNotes
from overlord.cli.output import printable, table
from overlord.cli.run_view import headline, summary_line, view_of
from overlord.service.admin import Control
from tests.commands import environment
from tests.service.served import served, streams, two_sources
from tests.small_sources import Numbered, job_of

ODD = '<script>[red]alert("1")\x1b[2J'


def command(capsys, *arguments: object, expect: int = 0) -> tuple[str, str]:
    code = main([str(argument) for argument in arguments])
    out, errors = capsys.readouterr()
    assert code == expect, errors
    return out, errors


def test_status_shows_the_run_once_and_as_json_for_programs(capsys):
    with served(two_sources(mesh=ol.Mesh(dp=2))) as (loader, address):
        streams([loader.client(rank) for rank in range(2)], 3)
        shown, _ = command(capsys, "status", address)
        found = json.loads(command(capsys, "status", address, "--json")[0])
        with Control(address) as control:
            told = json.loads(_json(control))["sources"]
        for source in (*found["sources"].values(), *told.values()):
            assert source.pop("left_s") > 0  # an estimate, that goes on with time
        assert found["sources"] == told
    assert "step 3 (planned to" in shown
    assert "2 of 2 ranks read" in shown
    assert re.search(r"^ *a +50\.00%", shown, re.MULTILINE)
    assert "samples asked" in shown, "shares say what they are of"
    assert "constructor/1" in shown
    assert "serving" in shown
    assert found["step"] == 3
    assert found["ranks"]["1"]["num_steps"] == 3
    assert found["waits"] == []


def _json(control: Control) -> str:
    from overlord.status import to_plain

    return json.dumps(to_plain(control.metrics()))


def test_a_source_with_a_name_that_a_terminal_or_a_page_would_obey_is_shown_as_it_is(capsys):
    with served(job_of({ODD: Numbered(), "b": Numbered(first=100)})) as (loader, address):
        streams([loader.client(0)], 1)
        shown, _ = command(capsys, "status", address)
        found = json.loads(command(capsys, "status", address, "--json")[0])
        command(capsys, "mix", address, "b=1")
        told = command(capsys, "mix", address)[0]
    assert '<script>[red]alert("1")\\x1b[2J' in shown
    assert "\x1b" not in shown + told
    assert ODD in found["sources"]


def test_top_shows_rates_and_tells_when_it_lost_the_service(capsys):
    with served(two_sources()) as (loader, address):
        client = loader.client(0)
        reading = threading.Event()

        def read() -> None:
            while not reading.is_set():
                next(client)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            shown, _ = command(capsys, "top", address, "--every", "0.05", "--count", "3")
        finally:
            reading.set()
            thread.join()
        lines = shown.splitlines()
        assert len(lines) == 3
        assert "steps/s" not in lines[0]
        assert all(re.search(r"[\d.e+]+ steps/s +\S+ ?k? tokens/s", line) for line in lines[1:])
        look = json.loads(command(capsys, "top", address, "--count", "1", "--json")[0])
        assert look["unit"] == "samples"
    assert "could not be reached" in command(capsys, "top", address, "--timeout", "0.2", expect=1)[1]


def test_a_service_that_is_lost_while_it_is_watched_is_told_and_found_again(capsys):
    from argparse import Namespace

    from overlord.cli.top import watch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with served(two_sources(), address=f"127.0.0.1:{port}") as (loader, address), Control(address, timeout_s=0.3) as control:
        first = control.metrics()
        loader.close()
        watch(control, first, Namespace(json=False, count=2, every_s=0.01))
    out = capsys.readouterr().out
    assert re.search(r"lost the service \d+ s ago: the service could not be reached", out)


@contextmanager
def started(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A command in a process of its own, and the lines that it prints."""
    words = [sys.executable, "-u", "-m", "overlord", *map(str, arguments)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stdout is not None
            yield process, iter(process.stdout)
        finally:
            process.kill()


def test_top_says_soon_that_a_service_is_lost_or_stopped_though_its_first_look_may_wait_longer(tmp_path):
    path = tmp_path / "watched_job.py"
    path.write_text("from tests.service.served import two_sources\njob = two_sources()\n")
    with (
        started("serve", path, "--processes", 0) as (service, printed),
        started("top", next(printed).strip(), "--every", "0.1") as (_, shown),
    ):
        assert "step 0" in next(shown)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            service.send_signal(number)
            began = time.monotonic()
            assert any("lost the service" in line for line in shown)
            assert time.monotonic() - began < 20, "far less than the 30 s that a first look has"
            service.send_signal(signal.SIGCONT)
            if number == signal.SIGSTOP:
                assert any("step 0" in line for line in shown), "the service is found again"


def test_who_waits_for_a_service_learns_of_it_before_the_timeout(caplog, monkeypatch):
    monkeypatch.setattr("overlord.service.admin._TELL_AFTER_S", 0.2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
    with Control(nobody, timeout_s=0.6) as control, pytest.raises(ol.errors.ServiceError, match="could not be reached for"):
        control.metrics()
    (told,) = caplog.messages
    assert nobody in told
    assert told.endswith("; tried again for up to 0.6 s")


@pytest.mark.parametrize(
    "verb",
    [
        ("status",),
        ("top",),
        ("resize", "--dp", "2"),
        ("checkpoint", "--state", "x.json"),
        ("mix",),
        ("skip", "--source", "a", "--file", "numbered"),
        ("plan", "--step", "3"),
        ("sources", "--remove", "a"),
    ],
)
def test_an_unknown_address_and_a_wrong_token_are_one_clear_line_each(capsys, verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
    with served(two_sources(), token="hard-to-guess") as (_, address):
        for where, token, said in (
            (nobody, None, "the service could not be reached for"),
            (address, None, "the service requires its token, and the call carried no token"),
            (address, "wrong", "the service requires its token, and the call carried a wrong token"),
            ("nowhere", None, "an address is host:port"),
        ):
            timeout = "0.3" if where == nobody else "30"
            arguments = [verb[0], where, *verb[1:], "--timeout", timeout, *(() if token is None else ("--token", token))]
            out, errors = command(capsys, *arguments, expect=1)
            assert out == ""
            assert errors.startswith("error: ")
            assert said in errors
            assert errors.count("\n") == 1
    assert not (tmp_path / "x.json").exists()


def test_a_run_is_resized_drained_and_saved_from_the_terminal(capsys, tmp_path):
    job, state = two_sources(mesh=ol.Mesh(dp=2, order=("dp", "pp", "cp", "tp"))), tmp_path / "state.json"
    with served(job) as (loader, address):
        clients = [ol.connect(address, rank=rank, timeout_s=30) for rank in range(2)]
        streams(clients, 2)
        assert "From step 2 on: dp=3 pp=1 cp=1 tp=1" in command(capsys, "resize", address, "--dp", "3")[0]
        assert loader.tree.world_size == 3
        assert loader.job.mesh.order == job.mesh.order, "what is not named stays"
        for client in clients:
            client.close()
        clients = [ol.connect(address, rank=rank, timeout_s=30) for rank in range(3)]
        streams(clients, 2)
        told = json.loads(command(capsys, "checkpoint", address, "--state", state, "--drain", "5", "--json")[0])
        assert told == {"step": 4, "state": str(state), "drained": True}
        kinds = [event.kind for event in loader.metrics().events]
        for client in clients:
            client.close()
    assert kinds == ["serving", "resize", "draining"]
    assert json.loads(state.read_text())["step"] == 4


def test_the_plan_of_a_step_is_shown_and_as_json_for_programs(capsys):
    with served(two_sources(mesh=ol.Mesh(dp=2))) as (loader, address):
        shown, _ = command(capsys, "plan", address, "--step", "4")
        assert shown.startswith("Step 4: ")
        assert "2 groups along dp" in shown
        assert re.search(r"^ *1 +\d+ +\d+ +\d+", shown, re.MULTILINE)
        assert json.loads(command(capsys, "plan", address, "--json")[0])["step"] == 0
        plan = loader.plan_summary(4)
        assert plan is not None
        assert json.loads(command(capsys, "plan", address, "--step", "4", "--json")[0])["tokens"] == plan.tokens
        error = command(capsys, "plan", address, "--step", "9999999", expect=1)[1]
    assert "step 9,999,999 is too far away" in error


def test_resizing_to_a_mesh_that_ranks_are_behind_is_one_clear_line(capsys):
    with served(two_sources(mesh=ol.Mesh(dp=2))) as (loader, address):
        clients = [loader.client(rank) for rank in range(2)]
        streams(clients, 1)
        next(clients[0])
        _, errors = command(capsys, "resize", address, "--dp", "3", "--wait", "0", expect=1)
        assert "rank 1 (at step 1) did not take all steps before it" in errors
        assert errors.count("\n") == 1


def test_the_handle_of_an_attached_rank_is_that_of_a_rank_beside_the_loader():
    with served(two_sources(mesh=ol.Mesh(dp=2))) as (loader, address):
        near, far = loader.client(0), ol.connect(address, rank=1, timeout_s=30)
        streams([near, far], 2)
        assert type(near.run) is type(far.run)
        assert near.run.plan(1) == far.run.plan(1)
        assert near.run.checkpoint() == far.run.checkpoint()
        assert far.run.set_weights({"a": 1.0}, from_step=50) == 50
        assert near.run.decisions() == far.run.decisions() == list(loader.decisions())
        assert far.run.resize(ol.Mesh(dp=1)) == 2
        with pytest.raises(ol.errors.SpecError, match=r"resize takes an overlord\.Mesh"):
            far.run.resize(3)  # type: ignore[arg-type]
        far.close()


def test_doctor_looks_at_the_machine_and_at_a_job(capsys, tmp_path):
    out, _ = command(capsys, "doctor")
    for word in ("cores", "memory", "shared memory", "open files", "ports", "clock", "pyarrow"):
        assert re.search(rf"^ *{word} ", out, re.MULTILINE), word
    job = tmp_path / "good_job.py"
    job.write_text("from tests.service.served import two_sources\njob = two_sources()\n")
    found = json.loads(command(capsys, "doctor", job, "--json")[0])
    whats = [finding["what"] for finding in found["findings"]]
    assert found["ok"]
    assert {"source 'a'", "reading 'b'", "first step: plan", "first step: build", "first step: in all"} <= set(whats)


def test_doctor_names_a_source_that_cannot_be_read_and_fails(capsys, tmp_path):
    job = tmp_path / "bad_job.py"
    job.write_text(
        "import overlord as ol\n"
        "job = ol.Job(sources={'x': ol.Parquet('nowhere/*.parquet')}, batch=ol.Batch(tokens=64, sequence_length=16))\n"
    )
    out, _ = command(capsys, "doctor", job, expect=1)
    assert re.search(r"^error: source 'x': .*nowhere", out, re.MULTILINE)
    assert not re.search(r"^ *first step", out, re.MULTILINE)


def test_before_the_first_step_people_are_told_what_is_waited_for():
    out, said = io.StringIO(), threading.Event()

    class Told(io.StringIO):
        def write(self, text: str) -> int:
            out.write(text)
            if "chunk 0" in text:
                said.set()
            return len(text)

    notes = WaitNotes(Console(file=Told(), width=200), "x: waiting for the first step", every_s=0.01)
    notes.describe = lambda: ["source '[red]' is making chunk 0 for 4.9 s\x1b"]
    with notes:
        assert said.wait(20)
    assert "x: waiting for the first step for 0 s\n  - source '[red]' is making chunk 0 for 4.9 s\\x1b" in out.getvalue()


def test_the_summary_of_a_run_says_steps_tokens_waits_and_faults():
    with ol.start(two_sources(mesh=ol.Mesh(dp=2))) as loader:
        streams([loader.client(rank) for rank in range(2)], 3)
        loader.set_weights({"a": 1.0})
        metrics = loader.metrics()
    line = summary_line(metrics)
    assert re.match(r"3 steps in [\d.]+ s; \d+ tokens; ranks waited [\d.]+ ms a step; ", line)
    assert "1 weights" in line
    assert "dp=2" in headline(metrics)


def test_large_runs_fit_a_screen():
    with ol.start(job_of({f"source {n}": Numbered(first=n * 50) for n in range(60)}, mesh=ol.Mesh(dp=30))) as loader:
        metrics = loader.metrics()
    out = io.StringIO()
    Console(file=out, width=200).print(view_of(metrics, None, []))
    assert "and 20 sources more" in out.getvalue()
    assert "and 14 ranks more, which wait less" in out.getvalue()


def test_cells_of_tables_are_text_and_not_markup():
    out = io.StringIO()
    Console(file=out, width=100).print(table("[b]", rows=[("[red]x[/red]",)]))
    assert "[red]x[/red]" in out.getvalue()
    assert printable("a\x07é\n") == "a\\x07é\\n"


def test_run_says_in_the_end_what_happened(capsys, tmp_path):
    job = Path(tmp_path / "summary_job.py")
    job.write_text("from tests.service.served import two_sources\njob = two_sources()\n")
    out, _ = command(capsys, "run", job, "--steps", "3")
    assert re.search(r"^in all: 3 steps in ", out, re.MULTILINE)
