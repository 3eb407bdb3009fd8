"""What the fingerprint of a state sees of the code of transforms: what it refers to, and nothing of how it is written."""

import importlib.util
import sys

import numpy as np
import pytest

from overlord.checkpoint.description import Describer
from tests.checkpoint.describing import described, module_of

pytestmark = pytest.mark.strangers


CODE = '''
import numpy as np
LIMIT = 5
TABLE = {"a": 1}
def helper(x):
    return x + LIMIT
def walk(x):
    return turn(x - 1) if x else 0
def turn(x):
    return walk(x - 1) if x else 1
class Row:
    scale = 2
    def of(self, row):
        return helper(row) * self.scale
def f(row):
    """What it does."""
    y = helper(row)  # a comment
    return np.where(y > 2, TABLE["a"], walk(y)), Row().of(y)
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y = helper(row)", "y = helper(row) + 1"),
        ("LIMIT = 5", "LIMIT = 6"),
        ('{"a": 1}', '{"a": 2}'),
        ("return x + LIMIT", "return x - LIMIT"),
        ("else 1", "else 2"),
        ("scale = 2", "scale = 3"),
        ("* self.scale", "+ self.scale"),
        ("np.where(y > 2", "np.where(y > 3"),
    ],
)
def test_the_code_of_a_function_counts_with_all_that_it_refers_to(tmp_path, old, new):
    assert old in CODE
    before = module_of(tmp_path / "one", CODE).f
    after = module_of(tmp_path / "two", CODE.replace(old, new)).f
    assert described(before) != described(after)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # a comment", ""),
        ('    """What it does."""\n', ""),
        ("def f(row):", "def f(\n    row: int,\n) -> tuple:"),
        ("LIMIT = 5", "# more\n\n\nLIMIT = 5"),
        ("TABLE =", "UNUSED = 7\nTABLE ="),
        ("y > 2", "(y > 2)"),
    ],
)
def test_comments_docstrings_annotations_and_formatting_do_not_count(tmp_path, old, new):
    assert old in CODE
    before = module_of(tmp_path / "one", CODE).f
    after = module_of(tmp_path / "two", CODE.replace(old, new), "elsewhere").f
    assert described(before) == described(after)


def test_lambdas_in_one_line_are_told_apart(tmp_path):
    module = module_of(tmp_path, "a, b, c = (lambda x: x + 1), (lambda x: x + 2), (lambda x: (lambda y: y + 1))\n")
    assert len({described(module.a), described(module.b), described(module.c)}) == 3


def test_code_whose_file_was_changed_since_counts_as_it_runs(tmp_path):
    module = module_of(tmp_path, "def f(x):\n    return x + 1\n")
    (tmp_path / "strange.py").write_text("def f(x):\n    return x + 2\n")
    other = module_of(tmp_path / "other", "def f(x):\n    return x + 2\n")
    assert described(module.f) != described(other.f)


def test_code_without_a_file_counts_too():
    def made(text: str):
        scope: dict = {}
        exec(text, scope)
        return scope["f"]

    assert described(made("def f(x): return x + 1")) == described(made("def f(x): return x + 1"))
    assert described(made("def f(x): return x + 1")) != described(made("def f(x): return x + 2"))


def test_values_in_another_module_of_the_user_count(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    using = "import strange_settings\ndef f(x):\n    return x + strange_settings.LIMIT\n"
    importing = "def f(x):\n    from strange_settings import LIMIT\n    return x + LIMIT\n"
    found = []
    for limit in (1, 22):
        (tmp_path / "strange_settings.py").write_text(f"LIMIT = {limit} * 1\n")
        sys.modules.pop("strange_settings", None)
        importlib.invalidate_caches()
        found.append([described(module_of(tmp_path, text).f) for text in (using, importing)])
    sys.modules.pop("strange_settings", None)
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


CACHING = """
_cache = {}
_loaded = None
TABLE = {}
TABLE["a"] = 1

def load():
    global _loaded
    if _loaded is None:
        _loaded = [1, 2, 3]
    return _loaded

def f(row):
    if row not in _cache:
        _cache[row] = len(load())
    TABLE["b"] = 2
    return _cache[row]

class Lazy:
    def __init__(self, table):
        self.table = table
        self._model = None
        self.calls = 0
    def model(self):
        if self._model is None:
            self._model = [7]
        return self._model
    def __call__(self, row):
        self.calls += 1
        return self.model(), self.table
"""


def test_what_a_transform_keeps_for_itself_while_it_runs_does_not_count(tmp_path):
    module = module_of(tmp_path, CACHING.replace('    TABLE["b"] = 2\n', ""))
    lazy = module.Lazy({"a": 1})
    before = described(module.f), described(lazy)
    module.f(3)
    lazy(3)
    assert (described(module.f), described(lazy)) == before
    assert described(lazy) != described(module.Lazy({"a": 2})), "what it was given counts"


def test_a_table_that_is_filled_when_its_module_is_loaded_counts_though_code_adds_to_it(tmp_path):
    before = module_of(tmp_path / "one", CACHING).f
    after = module_of(tmp_path / "two", CACHING.replace('TABLE["a"] = 1', 'TABLE["a"] = 5')).f
    assert described(before) != described(after)


OPTIONS = """
import argparse
from dataclasses import dataclass
from types import SimpleNamespace

@dataclass
class Config:
    length: int = 8
    resume: str = ""

args = argparse.Namespace(length=8, resume=None)
space = SimpleNamespace(length=8, resume=None)
config = Config()

def inside():
    given = argparse.Namespace(length=8, resume=None)
    return lambda row: row[: given.length]

f = {
    "args": lambda row: row[: args.length],
    "space": lambda row: row[: space.length],
    "config": lambda row: row[: config.length],
    "closure": inside(),
}
whole = lambda row: (row[: args.length], vars(args))
"""


@pytest.mark.parametrize("name", ["args", "space", "config", "closure"])
def test_of_the_options_of_a_script_those_count_that_code_takes(tmp_path, name):
    first = described(module_of(tmp_path, OPTIONS).f[name])
    resumed = OPTIONS.replace("resume=None", 'resume="saved.json"').replace('resume: str = ""', 'resume: str = "saved"')
    assert described(module_of(tmp_path, resumed).f[name]) == first
    longer = OPTIONS.replace("length=8", "length=9").replace("length: int = 8", "length: int = 9")
    assert described(module_of(tmp_path, longer).f[name]) != first


def test_options_that_code_takes_as_a_whole_count_as_a_whole(tmp_path):
    first = described(module_of(tmp_path, OPTIONS).whole)
    assert described(module_of(tmp_path, OPTIONS.replace("resume=None", "resume=1")).whole) != first


USED = """
import collections, concurrent.futures, functools, threading

stats = {"seen": 0, "bad": 0}
pool = concurrent.futures.ThreadPoolExecutor(1)

@functools.singledispatch
def kind(value):
    return "any"

@kind.register
def _(value: int):
    return "whole"

def counts(row):
    stats["seen"] += 1
    return row

def pooled(row):
    return pool.submit(len, row).result()

def dispatched(row):
    return kind(row)

class Shared:
    cache = {}

    def __call__(self, row):
        self.cache[row] = 1
        return row

class Counts:
    def __init__(self):
        self.stats = {"seen": 0}

    def __call__(self, row):
        self.stats["seen"] += 1
        return row

def closing():
    stats = {"seen": 0}

    def inner(row):
        stats["seen"] += 1
        return row

    return inner

shared, counting, closed = Shared(), Counts(), closing()
"""


@pytest.mark.parametrize("name", ["counts", "pooled", "dispatched", "shared", "counting", "closed"])
def test_a_transform_that_has_run_is_described_as_before(tmp_path, name):
    transform = getattr(module_of(tmp_path, USED), name)
    before = described(transform)
    transform("abc")
    assert described(transform) == before


def test_the_implementations_of_a_dispatched_function_count(tmp_path):
    first = described(module_of(tmp_path, USED).dispatched)
    assert described(module_of(tmp_path, USED.replace('"whole"', '"number"')).dispatched) != first


def test_the_version_of_a_package_that_code_uses_is_noted(tmp_path):
    describer = Describer()
    describer.digest(module_of(tmp_path, CODE).f, "x")
    assert describer.packages == {"numpy": ".".join(np.__version__.split(".")[:2])}
