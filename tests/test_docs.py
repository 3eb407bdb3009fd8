"""The words are true: every Python block runs, every output shown is what comes out, every command, link and file exists."""

import importlib.util
import inspect
import io
import re
import shlex
import sys
import tarfile
import tomllib
import types
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.cli import VERBS, build_parser
from tests.test_public_names import EVERY

ROOT = Path(__file__).parent.parent
WITH_CODE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*WITH_CODE, *(ROOT / name for name in ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
REFERENCE = ROOT / "docs" / "reference.md"

FENCE = re.compile(r"^```(\S*)[ \t]*(.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OUTSIDE = ("s3://", "torchrun", "cuda", "ray://")
"""What a block that is not run must need: something that a test machine has not."""


@dataclass(frozen=True)
class Block:
    language: str
    mark: str
    text: str
    line: int
    follows: str
    """What lies between this block and the one before it."""


def blocks(page: Path) -> list[Block]:
    text, found, end = page.read_text("utf-8"), [], 0
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(match[1], match[2].strip(), match[3], line, text[end : match.start()]))
        end = match.end()
    return found


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def test_every_page_is_there():
    assert all(page.is_file() for page in PAGES)
    assert {"tutorial.md", "concepts.md", "operations.md", "reference.md"} <= {page.name for page in WITH_CODE}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 200


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_from_top_to_bottom_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write_files_of_the_readme(tmp_path)
    # As a user's script runs: what is defined in it can be pickled, also to worker processes.
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    printed = None
    for block in blocks(page):
        if block.language == "python" and not block.mark:
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            with redirect_stdout(io.StringIO()) as out:
                exec(code, module.__dict__)
            printed = out.getvalue()
        elif block.language == "text" and not block.follows.strip() and printed is not None:
            assert _squeezed(printed) == _squeezed(block.text), f"{page.name}, line {block.line}: it printed\n{printed}"
            printed = None


def _squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def _write_files_of_the_readme(folder: Path) -> None:
    """The files that the README's job names, small."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<eos>": 0, **{chr(code): code - 31 for code in range(32, 127)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "data" / "web").mkdir(parents=True)
    (folder / "data" / "code").mkdir()
    texts = ["data " * (20 + number * 37 % 900) for number in range(60)]
    pq.write_table(pa.table({"text": texts}), folder / "data" / "web" / "0.parquet", row_group_size=20)
    with pa.CompressedOutputStream(str(folder / "data" / "code" / "0.jsonl.zst"), "zstd") as file:
        file.write(b"".join(b'{"text": "print(%d)"}\n' % number for number in range(4000)))
    for shard in range(10):
        with tarfile.open(folder / "data" / f"vqa-{shard:05}.tar", "w") as tar:
            for ending, content in (("jpg", b""), ("txt", b"a question and its answer")):
                member = tarfile.TarInfo(f"{shard:05}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_only_python_that_needs_something_outside_is_not_run(page):
    for block in blocks(page):
        if block.language == "python" and block.mark:
            assert block.mark == "no-run", f"{page.name}, line {block.line}: a block is run, or marked no-run"
            assert any(word in block.text for word in OUTSIDE), f"{page.name}, line {block.line}: why is this not run?"


def commands(page: Path) -> list[str]:
    """What a page tells people to type: lines of shell blocks, and inline code that begins with one of our commands."""
    lines = [line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()]
    inline = re.findall(r"`((?:make|overlord|python -m) [^`]+)`", prose(page))
    return [line.partition(" #")[0].removeprefix("$ ").strip() for line in [*lines, *inline] if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_that_a_page_names_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "make":
            assert set(words[1:]) <= targets, command
        elif words[0] == "overlord" and len(words) == 2:  # a verb that is only named
            assert words[1] in {*VERBS, "--help", "--version"}, command
        elif words[0] == "overlord":
            numbered = ["1" if word in ("N", "R") else word for word in words[1:]]
            build_parser().parse_args(numbered)  # leaves with an error where a verb or an option is unknown
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]) is not None, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(there), re.MULTILINE)
            assert anchor in {_slug(heading) for heading in headings}, f"{page.name} links to {target}"


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_source_files_that_a_page_names_exist(page):
    for name in re.findall(r"`((?:src|tests|bench|examples|docs)/[\w/]+\.\w+)`", prose(page)):
        assert (ROOT / name).is_file(), f"{page.name} names {name}"


def test_the_readme_gives_a_reason_for_every_dependency_and_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [re.split(r"[<>=!\[ ]", dependency)[0] for dependency in project["dependencies"]]
    extras = [f"`{extra}`" for extra in project["optional-dependencies"] if extra != "dev"]
    readme = (ROOT / "README.md").read_text("utf-8")
    for name in needed + extras:
        assert f"\n| {name} | " in readme, f"README.md, What it needs: {name} is missing"


def signatures() -> dict[str, str]:
    """The signature lines of the reference: what stands before the first bracket, and the whole without line breaks."""
    lines = "".join(block.text for block in blocks(REFERENCE) if block.language == "text").replace("\n    ", " ")
    return {line.partition("(")[0]: " ".join(line.split()) for line in lines.splitlines() if line.strip()}


@pytest.mark.parametrize("name", [*ol.__all__, *EVERY])
def test_the_reference_has_every_public_name(name):
    short = re.escape(name.removeprefix("testing.").replace("errors.OverlordError", "OverlordError"))
    found = re.search(rf"`{short}\b|^{short}\(", REFERENCE.read_text("utf-8"), re.MULTILINE)
    assert found, f"docs/reference.md does not tell of {name}"


@pytest.mark.parametrize(("name", "shown"), signatures().items())
def test_the_signatures_of_the_reference_are_those_of_the_code(name, shown):
    assert shown == signature_of(name)


def signature_of(name: str) -> str:
    value: Any = ol
    for part in name.split("."):
        value = getattr(value, part)
    found = inspect.signature(value)
    parameters = [_shown(parameter) for parameter in found.parameters.values() if parameter.name != "self"]
    if isinstance(value, type) and issubclass(value, ol.Source) and value is not ol.Source:
        shared = inspect.signature(ol.Source).parameters
        parameters = [parameter for parameter in parameters if parameter.name not in shared]
        parameters.append(inspect.Parameter("source", inspect.Parameter.VAR_KEYWORD))
    return name + str(found.replace(parameters=parameters, return_annotation=found.empty))


def _shown(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    is_made = default is not parameter.empty and (repr(default) == "<factory>" or callable(default))
    return parameter.replace(annotation=parameter.empty, default=_Made() if is_made else default)


class _Made:
    """A default that is made anew each time."""

    def __repr__(self) -> str:
        return "..."
