"""What code reads when it runs counts for rows that are kept, and leaves the fingerprints of states as they are."""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.checkpoint.cache_keys import row_keys
from overlord.checkpoint.code_reads import ReadsDescriber
from overlord.checkpoint.description import Describer
from tests.checkpoint.describing import module_of

CODE = """
import functools, json, os, pathlib
HERE = os.path.dirname(__file__)
def plain(row):
    return json.load(open("vocab.json"))
@functools.lru_cache
def load():
    return json.load(open("vocab.json"))
def cached(row):
    return load()
def nested(row):
    def inner():
        return [open(name).read() for name in ("missing.txt", "vocab.json")]
    return inner()
class Reader:
    def __call__(self, row):
        return pathlib.Path("vocab.json").read_text()
def of_class(row):
    return Reader()(row)
def joined(row):
    return open(os.path.join(HERE, "assets", "words.txt")).read()
def formatted(row):
    return open(f"{HERE}/assets/words.txt").read()
def divided(row):
    return (pathlib.Path(__file__).parent / "assets" / "words.txt").read_text()
def by_default(row, root=HERE + "/assets"):
    return open(root + "/words.txt").read()
def importing(row):
    from strange_lazy import table
    return table()
def quiet(row):
    return row.upper(), "vocab.txt"
"""
LAZY = "import strange_deep\ndef table():\n    return strange_deep.words()\n"
DEEP = "def words():\n    return open('vocab.json').read()\n"
READING = ["plain", "cached", "nested", "of_class", "joined", "formatted", "divided", "by_default", "importing"]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "code")
    (tmp_path / "code" / "assets").mkdir(parents=True)
    (tmp_path / "code" / "strange_lazy.py").write_text(LAZY)
    (tmp_path / "code" / "strange_deep.py").write_text(DEEP)
    write_read_files(tmp_path, 1)
    forget_modules()
    yield tmp_path
    forget_modules()


def forget_modules() -> None:
    """Modules of the same names lie in another folder in the next test."""
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.startswith("strange_")]:
        del sys.modules[name]


def write_read_files(place: Path, number: int) -> None:
    (place / "vocab.json").write_text(json.dumps({"a": number}))
    (place / "code" / "assets" / "words.txt").write_text(f"words {number}")


def reads_of(value: Any) -> tuple[Any, ...]:
    describer = ReadsDescriber()
    text = describer.text(value, "x")
    assert describer.unseen == []
    return text, *describer.reads_text


@pytest.mark.parametrize("name", READING)
def test_a_file_that_a_function_names_counts_with_its_contents(place, name):
    value = getattr(module_of(place / "code", CODE), name)
    before, state = reads_of(value), Describer().text(value, "x")
    assert reads_of(value) == before
    write_read_files(place, 2)
    assert reads_of(value) != before
    assert before[0] == reads_of(value)[0] == state == Describer().text(value, "x")  # states of before stay valid


def test_a_file_that_appears_counts_and_code_that_reads_nothing_has_no_reads(place):
    value = module_of(place / "code", CODE)
    before = reads_of(value.nested)
    (place / "missing.txt").write_text("there now")
    assert reads_of(value.nested) != before
    assert len(reads_of(value.quiet)) == 1


def test_code_of_a_module_that_an_imported_module_imports_counts(place):
    value = module_of(place / "code", CODE).importing
    before = reads_of(value)
    (place / "code" / "strange_deep.py").write_text(DEEP.replace("words():", "words(more=3):"))
    assert reads_of(value) != before


@pytest.mark.parametrize(
    "line",
    [
        "from strange_package import words\n    return words.COUNT",
        "from strange_package.words import COUNT\n    return COUNT",
        "import strange_package.words as words\n    return words.COUNT",
        "from strange_package import taking\n    return taking.count()",
        "import strange_package.lazy as lazy\n    return lazy.count()",
    ],
)
def test_modules_of_a_package_count_also_by_relative_imports(place, line):
    package = place / "code" / "strange_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("COUNT = 1\n")
    (package / "taking.py").write_text("from .words import COUNT\ndef count():\n    return COUNT\n")
    (package / "lazy.py").write_text("def count():\n    from . import words\n    return words.COUNT\n")
    importlib.invalidate_caches()
    value = module_of(place / "code", f"def f(row):\n    {line}\n").f
    before = reads_of(value)
    (package / "words.py").write_text("COUNT = 1 + 1\n")
    assert reads_of(value) != before


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os\ndef f(row):\n    return os.environ['SHIFT']\n", "reads os.environ"),
        ("import os\ndef f(row):\n    return os.environ.get('SHIFT')\n", "reads os.environ"),
        ("def f(row):\n    import os\n    return os.getenv('SHIFT')\n", "calls os.getenv"),
        ("from os import environ as settings\ndef f(row):\n    return settings['SHIFT']\n", "reads os.environ"),
        ("from os import getenv as get\ndef g():\n    return get('A')\ndef f(row):\n    return g()\n", "calls os.getenv"),
        ("import importlib\ndef f(row):\n    return importlib.import_module(row)\n", "calls importlib.import_module"),
        ("def f(row):\n    return __import__(row)\n", "calls __import__"),
        ("import sys\ndef f(row):\n    return sys.argv[1]\n", "reads sys.argv"),
        ("import runpy\ndef f(row):\n    return runpy.run_path(row)\n", "calls runpy.run_path"),
    ],
)
def test_what_cannot_be_seen_ahead_is_named(place, code, said):
    describer, bare = ReadsDescriber(), Describer()
    value = module_of(place / "code", code).f
    assert describer.text(value, "x") == bare.text(value, "x")
    assert [f"{said}, whose result cannot be seen ahead" in line for line in describer.unseen] == [True]
    assert bare.unseen == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_cannot_be_read_is_named(place):
    (place / "vocab.json").chmod(0)
    describer = ReadsDescriber()
    describer.text(module_of(place / "code", CODE).plain, "x")
    assert "names the file 'vocab.json', which cannot be read" in describer.unseen[0]


SHIFTING = """
import os
import pyarrow as pa
import pyarrow.parquet as pq
def load():
    with open("shift.txt") as opened:
        return int(opened.read())
def shifted(table):
    return pa.table({"tokens": [[b + load() for b in text.encode()] for text in table["text"].to_pylist()]})
def of_environment(table):
    shift = int(os.environ.get("SHIFT", "1"))
    return pa.table({"tokens": [[b + shift for b in text.encode()] for text in table["text"].to_pylist()]})
"""


def shifting_job(place: Path, name: str) -> ol.Job:
    module = module_of(place / "code", SHIFTING, "strange_shift")
    (place / "rows.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(30)))
    return ol.Job(
        sources={"web": ol.Jsonl("rows.jsonl", transform=getattr(module, name), cache=ol.Cache(place / "kept", 1 << 24))},
        batch=ol.Batch(sequence_length=64, samples=5),
        num_workers=0,
    )


def test_the_key_of_kept_rows_changes_with_a_file_that_the_transform_opens(place):
    (place / "shift.txt").write_text("1")
    before = row_keys(shifting_job(place, "shifted"))
    assert row_keys(shifting_job(place, "shifted")) == before
    (place / "shift.txt").write_text("2")
    assert row_keys(shifting_job(place, "shifted"))["web"] != before["web"]


def test_rows_that_depend_on_the_environment_are_not_kept(place, caplog):
    assert row_keys(shifting_job(place, "of_environment")) == {}
    assert "reads os.environ, whose result cannot be seen ahead; give it an identity() method" in caplog.text


def prepared_tokens(place: Path, name: str) -> list[Any]:
    prepared = ol.prepare(shifting_job(place, name), place / "out", num_processes=1, overwrite=True)
    source = prepared.sources["web"]
    assert isinstance(source, ol.Prepared)
    tables = [pq.read_table(place / "out" / "web" / part.file) for part in source.manifest().parts]
    return pc.list_flatten(pa.concat_tables(tables)["tokens"]).to_pylist()


def test_prepared_rows_are_made_again_after_a_change_of_a_file_that_the_transform_opens(place, caplog):
    (place / "shift.txt").write_text("1")
    first = prepared_tokens(place, "shifted")
    (place / "shift.txt").write_text("3")
    with pytest.raises(ol.errors.SpecError, match="or files that its transforms read, changed since"):
        ol.prepare(shifting_job(place, "shifted"), place / "out", num_processes=1)
    assert prepared_tokens(place, "shifted") == [token + 2 for token in first]
    assert caplog.messages == []


def test_preparing_warns_of_what_it_cannot_see(place, caplog):
    ol.prepare(shifting_job(place, "of_environment"), place / "out", num_processes=1)
    assert "reads os.environ, whose result cannot be seen ahead: rows that are prepared already" in caplog.text
