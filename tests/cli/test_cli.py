"""The command line as users meet it; in its own process where that makes a difference."""

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.cli.files import read_token
from tests.commands import environment, overlord, overlord_process, python

JOB = """
import overlord as ol
from tests.small_sources import Numbered

def same(table):
    return table

job = ol.Job(
    sources={{
        "a": Numbered(rows=400, first=1, transform={transform}, repeat={repeat}),
        "b": Numbered(rows=100, first=500, repeat={repeat}),
    }},
    mixture=ol.Mixture({{"a": 3, "b": 1}}, unit="tokens"),
    batch=ol.Batch(tokens=64, sequence_length=16),
    mesh=ol.Mesh(dp=2, cp=2),
    strategy=ol.strategies.long_short(ol.TransformerCost(1.0, 0.1)),
)
"""


UP_TO_300 = """
def up_to_300(table):
    if max(table["document"].to_pylist()) > 300:
        raise ValueError("too far")
    return table
"""


def job_file(folder: Path, text: str | None = None, transform: str = "()", repeat: bool = True) -> Path:
    path = folder / "my_job.py"
    path.write_text(JOB.format(transform=transform, repeat=repeat) if text is None else text)
    return path


def test_help_names_every_command_and_the_version_is_told():
    told = overlord_process("--help").stdout
    assert all(verb in told for verb in ("demo", "check", "explain", "run"))
    assert overlord_process("--version").stdout.startswith("overlord ")


def test_help_imports_nothing_heavy():
    heavy = ("rich", "torch", "PIL", "simplejpeg", "pyarrow.parquet", "tiktoken", "obstore", "multiprocessing.pool")
    code = f"""
import sys
from overlord.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
print("imported:", sorted(set(sys.modules) & set({heavy!r})))
"""
    assert python("-c", code).stdout.splitlines()[-1] == "imported: []"


def test_check_lists_the_sources_and_builds_the_first_step(tmp_path):
    path = job_file(tmp_path)
    told = overlord_process("check", path).stdout
    assert "is sound" in told
    found = json.loads(overlord_process("check", path, "--json").stdout)
    assert found["ok"] is True
    assert found["errors"] == []
    a = found["sources"]["a"]
    assert (a["reader"], a["weight"], a["units"], a["rows"]) == ("Numbered", 0.75, 80, 400)
    assert found["first_step"]["number"] == 0
    assert 0 < found["first_step"]["tokens"] <= 64


def test_check_tells_how_long_a_run_is_and_how_long_its_sources_last(tmp_path):
    path = job_file(tmp_path)
    told = overlord("check", path).stdout
    assert "the number of steps is not known: source 'a' repeats for ever; set repeat=False" in told
    assert re.search(r"source 'a': an epoch is about [\d,]+ tokens, and lasts about [\d,]+ steps", told)
    endless = json.loads(overlord("check", path, "--json").stdout)["length"]
    assert endless["steps"] is None
    path = job_file(tmp_path, repeat=False)
    found = json.loads(overlord("check", path, "--json").stdout)["length"]
    run = json.loads(overlord("run", path, "--json").stdout)
    assert found["steps"] == run["steps"]
    assert {name: each["tokens"] for name, each in found["sources"].items()} == {
        name: each["tokens"] for name, each in run["mix"].items()
    }
    assert all(each["epochs"] == 1 for each in found["sources"].values())
    estimated, exact = endless["sources"]["a"]["epoch_tokens"], found["sources"]["a"]["tokens"]
    assert 0.5 * exact < estimated < 2 * exact
    assert f"the run has {found['steps']:,} steps" in overlord("check", path).stdout


def test_check_names_the_engine_that_tokenises_each_source(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 30)
    text = f"""
import overlord as ol
def letters(text):
    return [1] * len(text)
path = "{tmp_path}/a.jsonl"
job = ol.Job(
    sources={{
        "bytes": ol.Jsonl(path, transform=ol.Tokenize("text", encoding=ol.ByteTokenizer())),
        "again": ol.Jsonl(path, transform=ol.Tokenize("text", encoding=ol.ByteTokenizer())),
        "letters": ol.Jsonl(path, transform=ol.InProcesses(ol.Tokenize("text", encoding=letters))),
        "lost": ol.Jsonl(path, transform=ol.Tokenize("text", encoding="{tmp_path}/none.json")),
    }},
    batch=ol.Batch(tokens=16, sequence_length=16),
)
"""
    path = job_file(tmp_path, text)
    run = overlord("check", path, expect=1)
    assert "error: source 'lost': encoding: there is no tokenizer file" in run.stderr
    path.write_text(text.replace('"lost"', '# "lost"'))
    told = overlord("check", path).stdout
    assert "source 'bytes' and 1 more: tokenising engine: bytes" in told
    assert "source 'letters': tokenising engine: function" in told
    assert json.loads(overlord("check", path, "--json").stdout)["sources"]["letters"]["engines"] == ["function"]


def test_check_warns_of_what_will_disappoint(tmp_path):
    text = JOB.format(transform="()", repeat=True).replace('"b": 1', '"b": 0').replace("dp=2", "dp=3")
    found = json.loads(overlord("check", job_file(tmp_path, text), "--json").stdout)
    assert any("'b' has weight 0 at every step" in warning for warning in found["warnings"])
    assert any("which dp=3 does not divide" in warning for warning in found["warnings"])


def test_check_tells_everything_that_is_wrong_with_the_sources_and_fails(tmp_path):
    text = f"""
import overlord as ol
job = ol.Job(
    sources={{"web": ol.Parquet("{tmp_path}/web/*.parquet"), "code": ol.Jsonl("{tmp_path}/code.jsonl")}},
    batch=ol.Batch(tokens=16, sequence_length=16),
)
"""
    run = overlord("check", job_file(tmp_path, text), expect=1)
    web, code = run.stderr.splitlines()
    assert web.startswith("error: source 'web': nothing matches")
    assert code.startswith("error: source 'code': ")
    assert "code.jsonl does not exist" in code


def test_check_tells_in_a_line_what_a_transform_did_wrong(tmp_path):
    path = job_file(tmp_path, transform="lambda table: table.drop_columns(['tokens'])")
    (line,) = overlord_process("check", path, expect=1).stderr.splitlines()
    assert line.startswith("error: source 'a' has no column 'tokens'")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\n", "declares no `job`; it must say `job = overlord.Job(...)`"),
        ("job = 3\n", "must be an overlord.Job, it is of type int"),
        ("\nx = 1 / 0\n", "raised ZeroDivisionError: division by zero"),
        ("def (\n", "is not Python: invalid syntax"),
        ("import overlord as ol\njob = ol.Mesh(dp=0)\n", "mesh size dp must be at least 1, got 0"),
    ],
)
def test_a_job_file_that_is_no_job_gets_one_clear_line(tmp_path, text, told):
    (line,) = overlord("run", job_file(tmp_path, text), expect=1).stderr.splitlines()
    assert line.startswith("error: ")
    assert told in line
    assert "my_job.py" in line


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("job = ol.Jobb()", r"module 'overlord' has no attribute 'Jobb'; did you mean 'Job'\? \("),
        ("ol.Batch(token=64, sequence_length=16)", r"unexpected keyword argument 'token'. .id you mean 'tokens'\? \("),
        ("ol.Parquet('x', onbadrow='skip')", r"unexpected keyword argument 'onbadrow'. .id you mean 'on_bad_row'\? \("),
        ("ol.Mesh(quux=2)", r"unexpected keyword argument 'quux' \("),
    ],
)
def test_a_misspelt_name_in_a_job_file_is_told_with_the_nearest_one(tmp_path, line, told):
    (error,) = overlord("check", job_file(tmp_path, f"import overlord as ol\n{line}\n"), expect=1).stderr.splitlines()
    assert re.search(told, error)
    assert "my_job.py, line 2)" in error


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["run", "JOB", "--steps", "abc"], 2, "--steps: must be a whole number of at least 1, got 'abc'"),
        (["explain", "JOB", "--step", "3.5"], 2, "--step: must be a whole number of at least 0, got '3.5'"),
        (["explain", "JOB", "--resume", "."], 1, "error: . is a folder; name the state file in it"),
        (["run", "JOB", "--state", "."], 1, "error: the state cannot be written to .: it is a folder"),
        (
            ["run", "JOB", "--state", "/proc/x"],
            1,
            "error: the state cannot be written to /proc/x: No such file or directory",
        ),
        (["run", "JOB", "--stepz", "3"], 2, "unrecognized arguments: --stepz 3"),
        (["serve", "JOB", "--drain", "-3"], 2, "--drain: must be a number of at least 0, got '-3'"),
        (["serve", "JOB", "--leave-after", "0"], 2, "--leave-after: must be a number above 0, got '0'"),
        (
            ["serve", "JOB", "--address", "192.0.2.1:0"],
            1,
            "error: a service on 192.0.2.1 can be reached from other machines, so",
        ),
        (["serve", "JOB", "--address", "127.0.0.1:TAKEN"], 1, ": Address already in use; choose an address of this machine"),
        (["serve", "JOB", "--token-file", "EMPTY"], 1, "holds no token: it is empty; `openssl rand -hex 32 > "),
        (
            ["serve", "JOB", "--token-file", "none"],
            1,
            "error: the token cannot be read from none: No such file or directory",
        ),
        (["mix", "127.0.0.1:1", "--timeout", "0"], 2, "--timeout: must be a number above 0, got '0'"),
        (["mix", "127.0.0.1:1", "a=1", "--from-step", "-5"], 2, "--from-step: must be at least 0, got -5"),
        (["mix", "127.0.0.1:1", "--timeout", "1"], 1, "error: the service could not be reached for"),
        (["mix", "127.0.0.1:1", "--from-step", "5", "a=x"], 1, "error: a weight is written as source=number"),
        (["mix", "127.0.0.1:1", "--from-step", "5", "a=1", "--b=2"], 2, "unrecognized arguments: a=1 --b=2"),
    ],
)
def test_what_a_newcomer_gets_wrong_is_told_in_one_line(tmp_path, arguments, code, told):
    empty = tmp_path / "empty"
    empty.touch(0o600)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        there = {"JOB": str(job_file(tmp_path)), "EMPTY": str(empty)}
        words = [there.get(word, word.replace("TAKEN", str(taken.getsockname()[1]))) for word in arguments]
        errors = overlord(*words, expect=code).stderr
    assert told in errors
    if code == 1:
        assert len(errors.splitlines()) == 1
        assert errors.startswith("error: ")


@pytest.mark.strangers
def test_a_token_that_others_may_read_is_warned_of(tmp_path, capsys):
    token = tmp_path / "token"
    token.write_text("hard-to-guess\n")
    token.chmod(0o640)
    assert read_token(token) == "hard-to-guess"
    assert capsys.readouterr().err == f"warning: other users of this machine may read the token: chmod 600 {token}\n"
    token.chmod(0o600)
    assert read_token(token) == "hard-to-guess"
    assert capsys.readouterr().err == ""


def test_the_line_of_a_job_file_that_raised_is_named(tmp_path):
    path = job_file(tmp_path, "\nx = 1 / 0\n")
    assert "my_job.py, line 2)" in overlord("check", path, expect=1).stderr


def test_a_missing_job_file_and_wrong_arguments_are_told(tmp_path):
    assert "there is no job file" in overlord("explain", tmp_path / "none.py", expect=1).stderr
    assert "must be at least 1, got 0" in overlord("run", job_file(tmp_path), "--steps", 0, expect=2).stderr
    assert "rank must be from 0 to 3, got 4" in overlord("run", job_file(tmp_path), "--rank", 4, expect=1).stderr


def test_debug_shows_the_traceback(tmp_path):
    run = python("-m", "overlord", "run", tmp_path / "none.py", "--debug", expect=1)
    assert "Traceback" in run.stderr


def test_explain_shows_how_a_step_was_drawn_and_arranged(tmp_path):
    path = job_file(tmp_path)
    told = overlord("explain", path, "--step", 3).stdout
    for word in ("Step 3", "distribute", "balance", "slowest group", "asked"):
        assert word in told
    found = json.loads(overlord("explain", path, "--step", 3, "--json").stdout)
    assert [stage["name"] for stage in found["stages"]][-2:] == ["balance", "pack"]
    assert sum(source["tokens"] for source in found["sources"].values()) == found["tokens"]
    assert found["groups"] == len(found["microbatches"]) == 2


@pytest.mark.strangers
@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_explain_shows_weights_beside_shares_of_the_same_unit(tmp_path, unit):
    text = JOB.format(transform="()", repeat=True).replace('unit="tokens"', f'unit="{unit}"').replace("64", "4096")
    path = job_file(tmp_path, text)
    told = overlord("explain", path).stdout
    assert f"{unit} asked   {unit} drawn" in told
    source = json.loads(overlord("explain", path, "--json").stdout)["sources"]["a"]
    assert abs(source["asked"] - source["share"]) < 0.05
    assert f"share of {unit} asked/drawn: a 0.750/{source['share']:.3f}," in told


@pytest.mark.strangers
@pytest.mark.parametrize(
    "strategy", ["ol.strategies.plain()", "ol.strategies.hdp(ol.TransformerCost(1.0, 0.1), capacity=64)"]
)
def test_explain_lists_the_documents_of_a_step_with_file_row_and_the_ranks_that_train_on_them(tmp_path, strategy):
    for part in range(3):  # every token says which row of which file it is of
        documents = [[1000 * part + row + 1] * (1 + (7 * row + part) % 40) for row in range(60)]
        table = pa.table({"tokens": pa.array(documents, pa.list_(pa.int32()))})
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=20)
    text = f"""
import overlord as ol
job = ol.Job(
    sources={{"web": ol.Parquet("{tmp_path}/*.parquet", repeat=False, window=2)}},
    batch=ol.Batch(tokens=512, sequence_length=64),
    mesh=ol.Mesh(dp=2, cp=2),
    strategy={strategy},
)
"""
    path, state = job_file(tmp_path, text), tmp_path / "state.json"
    overlord("run", path, "--steps", 2, "--state", state)
    told = json.loads(overlord("explain", path, "--step", 2, "--documents", "--json", "--resume", state).stdout)
    listed: dict[int, list[int]] = {rank: [] for rank in range(4)}
    for document in told["documents"]:
        assert document["source"] == "web"
        name, _, row_group = Path(document["file"]).name.partition("#")
        token = 1000 * int(name[0]) + 20 * int(row_group or 0) + document["row"] + 1
        for rank in document["ranks"]:
            listed[rank].append(token)
    declared: dict[str, Any] = {}
    exec(text, declared)
    with ol.start(declared["job"], resume=json.loads(state.read_bytes())) as loader:
        for rank in range(4):
            step = next(loader.client(rank))
            found = {int(token) for micro in step for token in np.unique(micro["tokens"]) if token}
            if "hdp" in strategy:
                assert set(listed[rank]) == found
            else:  # a rank has slices of its group's documents, which may leave it none of a short one
                assert found <= set(listed[rank])
    assert len(told["documents"]) == told["samples"]
    shown = overlord("explain", path, "--step", 2, "--documents", "--resume", state).stdout
    assert re.search(r"web +\S+/\d\.parquet\S* +\d+ +\d+-\d+ +\d+ +\d", shown)


def test_a_step_can_be_explained_from_a_saved_state_and_not_past_the_end(tmp_path):
    path, state = job_file(tmp_path, repeat=False), tmp_path / "state.json"
    overlord("run", path, "--steps", 5, "--state", state)
    from_start = json.loads(overlord("explain", path, "--step", 7, "--json").stdout)
    from_state = json.loads(overlord("explain", path, "--step", 7, "--json", "--resume", state).stdout)
    assert from_state == from_start
    assert json.loads(overlord("explain", path, "--json", "--resume", state).stdout)["step"] == 5
    assert "ends before step 99,999" in overlord("explain", path, "--step", 99_999, expect=1).stderr


def test_a_run_goes_on_from_its_state_as_if_it_had_not_been_stopped(tmp_path):
    path, cut, end, uncut_end = job_file(tmp_path), *(tmp_path / f"{name}.json" for name in ("cut", "end", "uncut"))
    whole = json.loads(overlord("run", path, "--steps", 30, "--state", uncut_end, "--json").stdout)
    first = json.loads(overlord("run", path, "--steps", 12, "--state", cut, "--json").stdout)
    second = json.loads(overlord("run", path, "--steps", 18, "--resume", cut, "--state", end, "--json").stdout)
    assert json.loads(end.read_bytes()) == json.loads(uncut_end.read_bytes())
    assert first["tokens"] + second["tokens"] == whole["tokens"]
    assert second["mix"] == whole["mix"]
    assert (first["next_step"], second["next_step"]) == (12, 30)


def test_a_finite_job_runs_to_its_end_and_counts_every_token_once(tmp_path):
    path = job_file(tmp_path, repeat=False)
    found = json.loads(overlord_process("run", path, "--json").stdout)
    assert found["mix"]["a"]["samples"] == 400
    assert found["mix"]["b"]["samples"] == 100
    assert found["tokens"] == sum(share["tokens"] for share in found["mix"].values())
    one_rank = json.loads(overlord_process("run", path, "--rank", 3, "--json").stdout)
    assert one_rank["steps"] == found["steps"]
    assert 0 < one_rank["tokens"] < found["tokens"]


def test_a_state_that_is_missing_damaged_or_cannot_be_written_is_told_at_once(tmp_path):
    path, state = job_file(tmp_path), tmp_path / "state.json"
    assert "there is no state file" in overlord("run", path, "--resume", state, expect=1).stderr
    state.write_text("{")
    assert "is not a state" in overlord("run", path, "--resume", state, expect=1).stderr
    state.write_text("[]")
    assert "not an Overlord state" in overlord("run", path, "--resume", state, expect=1).stderr
    assert "cannot be written" in overlord("run", path, "--state", tmp_path / "none" / "s.json", expect=1).stderr


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("null", "not an Overlord state"),
        ("", "is empty"),
        (" \n", "is empty"),
        ("7", "not an Overlord state"),
        ('{"overlord": 2, "step": 3, "unit"', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\x00\x01", "is not JSON"),
        ('{"overlord": 2, "step": 3}', "the state is damaged: the state lacks 'unit'"),
    ],
)
def test_a_file_that_holds_no_state_never_starts_a_run_at_step_0(tmp_path, text, message):
    path, state = job_file(tmp_path), tmp_path / "state.json"
    state.write_text(text)
    for verb in ("run", "explain"):
        assert message in overlord(verb, path, "--resume", state, expect=1).stderr


@pytest.mark.strangers
def test_a_folder_or_a_huge_file_given_as_a_state_is_told(tmp_path):
    path, huge = job_file(tmp_path), tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # it takes no room
    for given, message in ((tmp_path, "is a folder"), (huge, "1,048,576 MiB, and a state has some kB")):
        assert message in overlord("run", path, "--resume", given, expect=1).stderr


@pytest.mark.strangers
def test_an_edited_state_file_is_refused(tmp_path):
    path, state = job_file(tmp_path), tmp_path / "state.json"
    overlord("run", path, "--steps", 3, "--state", state)
    saved = json.loads(state.read_text())
    assert saved["sources"], "it is there to be read"
    state.write_text(json.dumps({**saved, "step": 4}))
    assert "edited or damaged" in overlord("run", path, "--resume", state, expect=1).stderr


def test_what_was_read_before_an_error_is_kept_in_the_state(tmp_path):
    text = JOB.format(transform="up_to_300", repeat="True, shuffle=False")
    path, state = job_file(tmp_path, UP_TO_300 + text), tmp_path / "state.json"
    assert "ValueError: too far" in overlord("run", path, "--state", state, expect=1).stderr
    stopped = json.loads(state.read_bytes())
    chunk, *_ = stopped["sources"]["a"]
    assert stopped["step"] > 10
    assert 50 <= chunk <= 60  # of five rows each


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_save_the_state_and_leave_no_process(tmp_path, number, code):
    path, state = job_file(tmp_path, transform="ol.InProcesses(same)"), tmp_path / "state.json"
    command = [sys.executable, "-u", "-m", "overlord", "run", str(path), "--state", str(state)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment()) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if line.startswith("my_job.py: step "):  # after the first step; a slow machine says before what it waits for
                break
        children = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(number)
        told, errors = run.communicate(timeout=30)
    assert run.returncode == code
    assert f"stopping ({number.name})" in errors
    assert "Traceback" not in errors
    assert "stopped before step" in told
    assert children
    assert psutil.wait_procs(children, timeout=10)[1] == []
    stopped = json.loads(state.read_bytes())
    assert stopped["step"] > 0
    resumed = json.loads(overlord("run", path, "--resume", state, "--steps", 3, "--json").stdout)
    assert resumed["next_step"] == stopped["step"] + 3


def test_ctrl_c_in_a_job_file_ends_quietly(tmp_path):
    """A job that is still being declared when Ctrl-C comes."""
    path = job_file(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    assert overlord_process("run", path, expect=130).stderr == "stopping (SIGINT); a second one ends the process at once\n"


def test_an_error_after_ctrl_c_is_told_and_the_exit_code_is_that_of_the_signal(tmp_path):
    fails = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
finally:
    raise ValueError("while closing")
"""
    told = overlord_process("run", job_file(tmp_path, fails), expect=130).stderr
    assert told.startswith("stopping (SIGINT)")
    assert "while closing" in told


HANGS = """
import sys, threading
from dataclasses import dataclass
import overlord as ol
from tests.small_sources import Numbered, job_of

@dataclass(frozen=True)
class Hangs(Numbered):
    def {method}:
        sys.stderr.write("hangs\\n")
        threading.Event().wait()

job = job_of({{name: Hangs(rows=400, first=1) for name in "abcdef"}}, num_workers=8)
"""


_WAIT_NOTE = re.compile(r"^[^\n]* for \d+ s\n(?:  - [^\n]*\n)*", re.MULTILINE)
"""Written every five seconds before the first step, so only where a machine is slow."""


def _stopped(command: list[object], *signals: int, told: str = "hangs\n") -> tuple[int, str]:
    """Sends signals to a program, the first when it has said something, the next when it has said that it stops. Returns its
    exit code and what it said in between and after, notes on what it waits for left out."""
    words = [sys.executable, "-u", *map(str, command)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()) as run:
        assert run.stderr is not None
        while run.stderr.readline() != told:
            assert run.poll() is None
        lines = ""
        for number in signals:
            run.send_signal(number)
            while "stopping" not in lines and run.poll() is None:
                line = run.stderr.readline()
                lines += "" if line == told else line
        _, errors = run.communicate(timeout=60)
    return run.returncode, _WAIT_NOTE.sub("", lines + errors)


@pytest.mark.second_try(reason="a signal may come at any moment of a start, and closing must end within a deadline")
@pytest.mark.strangers
@pytest.mark.parametrize("verb", ["run", "explain", "check", "serve"])
def test_ctrl_c_says_at_once_that_it_stops_and_what_it_waits_for_though_every_read_hangs(tmp_path, verb):
    path = job_file(tmp_path, HANGS.format(method="read(self, unit)"))
    code, told = _stopped(["-m", "overlord", verb, path], signal.SIGINT)
    assert code in ({0, 130} if verb == "serve" else {130}), told  # it may not be serving yet
    assert told.startswith("stopping")
    assert re.search(r"closing waits up to 1.2 s for what is under way: .*source '\w' is making chunk 0 for", told)
    assert "Traceback" not in told


@pytest.mark.strangers
def test_ctrl_c_does_not_wait_for_a_listing_that_hangs(tmp_path):
    path = job_file(tmp_path, HANGS.format(method="units(self)"))
    code, told = _stopped(["-m", "overlord", "run", path], signal.SIGINT)
    assert (code, told.replace("hangs\n", "")) == (130, "stopping (SIGINT); a second one ends the process at once\n")


@pytest.mark.strangers
def test_a_second_ctrl_c_ends_the_process_where_it_stands(tmp_path):
    text = """
import sys, threading
sys.stderr.write("hangs\\n")
while True:
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        pass  # as a library may
"""
    code, told = _stopped(["-m", "overlord", "run", job_file(tmp_path, text)], signal.SIGINT, signal.SIGINT)
    assert code == -signal.SIGINT
    assert told == "stopping (SIGINT); a second one ends the process at once\n"


@pytest.mark.second_try(reason="a signal may come at any moment of a start, and closing must end within a deadline")
@pytest.mark.strangers
@pytest.mark.parametrize("block", ["loader = ol.start(job)\n", "with ol.start(job) as loader:\n    "])
def test_a_script_that_ctrl_c_stops_says_what_it_still_waits_for(tmp_path, block):
    script = tmp_path / "script.py"
    script.write_text(HANGS.format(method="read(self, unit)") + block + "next(loader.client(0))\n")
    code, told = _stopped([script], signal.SIGINT)
    assert code == -signal.SIGINT, told
    assert re.search(r"closing waits up to 1.2 s for what is under way: .*source '\w' is making chunk 0 for", told)
    assert "KeyboardInterrupt" in told
