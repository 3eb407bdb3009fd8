"""The options of all verbs together: each is declared once, overrides reach every job file, and shells complete them."""

import argparse
import ast
import shutil
import subprocess
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from overlord.cli import VERBS, _parse, build_parser, main
from overlord.cli.options import SHARED, add_option
from overlord.jobfile.loading import load_job

CLI = Path(__file__).parent.parent.parent / "src" / "overlord" / "cli"
JOB = """
sources:
  web: {reader: Parquet, paths: /data/*.parquet}
batch: {sequence_length: 128, tokens: 1024}
mesh: {dp: 1}
"""
DIFFERENT = {
    "--rows": "inspect reads so many; skip leaves these out",
    "--source": "prepare takes several",
    "--preset": "one takes names of corpora, the other of models",
}
"""Flags that two verbs have, and which are not one option."""
NEEDED = {
    "trace": ["--step", "3"],
    "find": ["--log", "place", "--source", "web"],
    "show": ["--source", "web"],
    "spikes": ["losses.csv", "--log", "place"],
    "prepare": ["--to", "folder"],
}
"""What a verb requires beside its job."""


def parsers() -> dict[str, argparse.ArgumentParser]:
    actions = build_parser(VERBS)._actions
    return next(each.choices for each in actions if isinstance(each, argparse._SubParsersAction))


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def takes_job(parser: argparse.ArgumentParser) -> bool:
    return any(getattr(action.type, "__name__", "") == "job_file" for action in parser._actions)


def declarations() -> dict[str, list[str]]:
    """The flags that modules of the command line declare by themselves, each with the modules."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in CLI.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call):
                name = getattr(call.func, "attr", getattr(call.func, "id", ""))
                words = [word.value for word in call.args if isinstance(word, ast.Constant)]
                flag = next((word for word in words if isinstance(word, str) and word.startswith("--")), None)
                if flag is not None and (
                    name == "add_argument" or (name in ("add_option", "option", "_number") and flag not in SHARED)
                ):
                    found[flag].append(path.stem)
    return found


def test_what_a_flag_takes_is_declared_once():
    """`SHARED` has the flags of several verbs. A flag that a module declares by itself is in no other module, nor there."""
    found = declarations()
    assert len(found) > 60
    assert {flag: files for flag, files in found.items() if flag in SHARED} == {}
    assert {flag for flag, files in found.items() if len(files) > 1} <= set(DIFFERENT)


def test_a_flag_takes_the_same_values_in_every_verb():
    taken: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    verbs: dict[str, list[str]] = defaultdict(list)
    for verb, parser in parsers().items():
        for action in parser._actions:
            kind = getattr(action.type, "__qualname__", action.type)
            for flag in action.option_strings:
                taken[flag].add((kind, action.nargs, action.metavar, action.const, type(action)))
                verbs[flag].append(verb)
    several = {flag for flag, names in verbs.items() if len(names) > 1}
    assert several > {"--state", "--log", "--token-file", "--steps"}
    assert {flag for flag in several if len(taken[flag]) > 1} == set(DIFFERENT)
    assert set(SHARED) <= several


def test_a_flag_that_is_shared_cannot_be_declared_again():
    with pytest.raises(TypeError, match="metavar"):
        add_option(argparse.ArgumentParser(), "--state", metavar="PLACE", help="...")


@pytest.mark.parametrize("verb", [verb for verb, parser in parsers().items() if takes_job(parser)])
def test_words_change_the_job_of_every_verb_that_has_one(verb, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    job = ["--job", str(path)] if verb == "spikes" else [str(path)]
    for line in (
        [verb, *job, *NEEDED.get(verb, []), "mesh.dp=8", "--json", "batch.tokens=1M"],
        [verb, *NEEDED.get(verb, []), *job, "mesh.dp=8", "batch.tokens=1M", "--debug"],
    ):
        changed = load_job(_parse(line).job)
        assert (changed.mesh.dp, changed.batch.tokens) == (8, 1 << 20)


def test_every_verb_that_has_a_job_takes_words_for_it():
    for parser in parsers().values():
        assert takes_job(parser) == any(action.dest == "overrides" for action in parser._actions)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("serv job.py", "overlord: error: there is no command 'serv'; did you mean serve? (options: overlord --help)"),
        (
            "serve job.py --adress=1 mesh.dp=8",
            "overlord serve: error: unrecognized arguments: --adress=1 mesh.dp=8; did you mean --address? (options: "
            "overlord serve --help)",
        ),
        ("run job.py --zzz", "overlord run: error: unrecognized arguments: --zzz (options: overlord run --help)"),
        ("plan HOST 7 8 9", "overlord plan: error: unrecognized arguments: 7 8 9 (options: overlord plan --help)"),
        (
            "schema / /dev",
            "overlord schema: error: unrecognized arguments: / /dev; quote a pattern, so that the shell does not "
            "replace it by its files (options: overlord schema --help)",
        ),
        ("serve", "overlord serve: error: the following arguments are required: job (options: overlord serve --help)"),
        (
            "simulate --ranks many",
            "overlord simulate: error: argument --ranks: must be a whole number of at least 1, got 'many'; it may end in k, "
            "M or G (options: overlord simulate --help)",
        ),
    ],
)
def test_a_wrong_command_is_told_in_one_line_with_the_nearest_name(line, told, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"{told}\n"


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """A folder with the completion scripts, and two files to complete."""
    folder = tmp_path_factory.mktemp("completion")
    for shell, name in (("bash", "overlord.bash"), ("zsh", "_overlord")):
        with (folder / name).open("w") as out, redirect_stdout(out):
            assert main(["completion", shell]) == 0
    (folder / "my_job.yaml").touch()
    (folder / "my_state.json").touch()
    return folder


def complete_in_bash(scripts: Path, lines: list[str]) -> dict[str, set[str]]:
    """What bash offers at the end of each line."""
    program = ["source ./overlord.bash"]
    for line in lines:
        words = " ".join(f"'{word}'" for word in line.split(" "))
        program += [f"COMP_WORDS=({words}); COMP_CWORD=$(({len(line.split(' '))} - 1)); _shtab_overlord 2>&1"]
        program += ["echo ${COMPREPLY[@]}"]
    command = ["bash", "--norc", "--noprofile", "-c", "\n".join(program)]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, timeout=120, check=True)
    return {line: set(offered.split()) for line, offered in zip(lines, done.stdout.splitlines(), strict=True)}


SETUP = """
PROMPT= fpath=($PWD $fpath)
autoload -Uz compinit; compinit -u -d $PWD/.dump
print_mark () { print -r -- @@ }
compprefuncs=(print_mark); comppostfuncs=(print_mark exit)
compadd () {
  if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\\ * ]]; then builtin compadd "$@"; return; fi
  typeset -a offered; builtin compadd -A offered "$@"; print -rl -- $offered
}
"""
"""Makes an interactive zsh print what it would offer at a tab, between two lines of @@, and exit."""
TYPE = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "source ./setup.zsh"
zpty -w shell "$1"$'\\t'
while zpty -r shell part; do print -rn -- $part; done
"""


def complete_in_zsh(scripts: Path, lines: list[str]) -> dict[str, set[str]]:
    (scripts / "setup.zsh").write_text(SETUP)
    found: dict[str, set[str]] = {}
    for line in lines:
        command = ["zsh", "-f", "-c", TYPE, "zsh", line]
        done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, timeout=120, check=True)
        found[line] = set(done.stdout.split("@@")[-2].split())
    return found


@pytest.mark.parametrize(
    "complete",
    [
        complete_in_bash,
        pytest.param(complete_in_zsh, marks=pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")),
    ],
)
def test_a_shell_completes_every_verb_its_options_and_files(complete, scripts):
    known = parsers()
    verbs = {f"overlord {verb} --": flags_of(parser) for verb, parser in known.items()}
    files = {
        "overlord serve my": {"my_job.yaml", "my_state.json"},
        "overlord serve my_job.yaml --resume my_s": {"my_state.json"},
        "overlord check my_job.yaml --print ": {"yaml", "python"},
    }
    offered = complete(scripts, ["overlord ", *verbs, *files])
    assert offered.pop("overlord ") >= set(known)
    for line, flags in verbs.items():
        assert offered[line] == {flag for flag in flags if flag.startswith("--")}, line
    for line, expected in files.items():
        assert expected <= offered[line], line
