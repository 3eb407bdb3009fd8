"""What the fingerprint of a state sees of transforms: everything that they depend on, and nothing of where it lies."""

import datetime
import decimal
import enum
import functools
import importlib.util
import json
import logging
import operator
import random
import re
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tiktoken
import tokenizers
import torch

import overlord as ol
from overlord.checkpoint.description import Describer
from tests.small_sources import Numbered, job_of, read_all, same

pytestmark = pytest.mark.strangers


def described(value: object) -> str:
    return Describer().digest(value, "x")


def unseen(value: object) -> list[str]:
    describer = Describer()
    describer.digest(value, "x")
    return describer.unseen


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Options:
    table: dict
    limit: int = 3


class Slotted:
    __slots__ = ("table",)

    def __init__(self, table: object) -> None:
        self.table = table

    def apply(self, row: object) -> object:
        return row


class Bag(dict):
    pass


def closing_over(value: object) -> Any:
    def inner(row: object) -> object:
        return (row, value)

    return inner


def with_default(value: object):
    def inner(row: object, table: object = value) -> object:
        return (row, table)

    return inner


def counted(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


def bpe(last: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, last: 1}, unk_token="a"))


def tiktoken_of(last: bytes) -> tiktoken.Encoding:
    return tiktoken.Encoding("own", pat_str=r"\w+|\s", mergeable_ranks={b"a": 0, last: 1}, special_tokens={})


def linear(weight: float) -> torch.nn.Module:
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, weight)
    return module


def object_array(value: object) -> np.ndarray:
    array = np.empty(2, object)
    array[:] = [{"a": value}, None]
    return array


PAIRS = {
    "dict": lambda x: {"a": 1, "b": x},
    "nested dict": lambda x: {"a": {"b": [1, {"c": x}]}},
    "keys of several types": lambda x: {1: 2, "1": 3, None: x},
    "subclass of dict": lambda x: Bag(a=x),
    "ordered dict": lambda x: OrderedDict(a=x),
    "set": lambda x: {"a", "b", x},
    "set of tuples": lambda x: {("a", 1), ("b", x)},
    "frozenset": lambda x: frozenset({"a", x}),
    "deque": lambda x: deque([1, x]),
    "array": lambda x: np.array([1, 2, x]),
    "array of floats": lambda x: np.array([[1.5, x]], np.float32),
    "array of text": lambda x: np.array(["a", str(x)]),
    "array of objects": object_array,
    "array of records": lambda x: np.array([(1, x)], [("a", "i4"), ("b", "i8")]),
    "array of dates": lambda x: np.array(["2020-01-01"], "M8[D]") + x,
    "numpy scalar": lambda x: np.int32(x),
    "masked array": lambda x: np.ma.array([1, 2], mask=[False, x == 3]),
    "arrow array": lambda x: pa.array([1, None, x]),
    "arrow table": lambda x: pa.table({"a": [[1], [x]]}),
    "arrow chunked": lambda x: pa.chunked_array([[1], [x]]),
    "arrow scalar": lambda x: pa.scalar(x),
    "arrow schema": lambda x: pa.schema([("a", pa.int32() if x == 3 else pa.int64())]),
    "arrow type": lambda x: pa.list_(pa.int32() if x == 3 else pa.int8()),
    "bytes": lambda x: bytes([1, x]),
    "long bytes": lambda x: bytes(1000) + bytes([x]),
    "bytearray": lambda x: bytearray([x]),
    "pattern": lambda x: re.compile(f"a{x}"),
    "flags of a pattern": lambda x: re.compile("a", re.IGNORECASE if x == 3 else 0),
    "enum": lambda x: Colour.RED if x == 3 else Colour.BLUE,
    "date": lambda x: datetime.datetime(2020, 1, x),
    "zone": lambda x: datetime.timezone(datetime.timedelta(hours=x)),
    "decimal": lambda x: decimal.Decimal(x),
    "dtype": lambda x: np.dtype(np.int32 if x == 3 else np.int64),
    "range": lambda x: range(x),
    "partial": lambda x: functools.partial(operator.add, x),
    "keyword of a partial": lambda x: functools.partial(sorted, key=operator.itemgetter(x)),
    "bound method": lambda x: Slotted(x).apply,
    "builtin bound method": lambda x: {"a": x}.get,
    "slots": lambda x: Slotted({"a": x}),
    "dataclass": lambda x: Options({"a": x}),
    "closure": closing_over,
    "closure over a dict": lambda x: closing_over({"a": x}),
    "default argument": with_default,
    "decorated": lambda x: counted(closing_over(x)),
    "cached": lambda x: functools.lru_cache(closing_over(x)),
    "lambda": lambda x: (lambda row: row + 3) if x == 3 else (lambda row: row + 4),
    "tokenizer": lambda x: bpe(str(x)),
    "method of a tokenizer": lambda x: bpe(str(x)).encode,
    "tiktoken": lambda x: tiktoken_of(str(x).encode()),
    "tensor": lambda x: torch.tensor([1, x]),
    "bfloat16": lambda x: torch.tensor([x], dtype=torch.bfloat16),
    "module": lambda x: linear(x),
    "random": lambda x: random.Random(x),
    "numpy generator": lambda x: np.random.default_rng(x),
    "torch generator": lambda x: torch.Generator().manual_seed(x),
    "per_row": lambda x: ol.per_row(closing_over({"a": x})),
    "in processes": lambda x: ol.InProcesses(closing_over({"a": x})),
    "option of ours": lambda x: ol.Tokenize("a", encoding=ol.ByteTokenizer(), eos=x),
    "columns": lambda x: ol.Pick("a" if x == 3 else "b"),
    "name of an encoding": lambda x: ol.Tokenize("a", encoding="cl100k_base" if x == 3 else "o200k_base"),
    "image size": lambda x: ol.vision.DecodeImage(size=(x, 2)),
    "int and float": lambda x: [1] if x == 3 else [1.0],
    "int and bool": lambda x: 1 if x == 3 else True,
    "list and tuple": lambda x: [{}, 1] if x == 3 else ({}, 1),
}


@pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)
def test_what_a_value_holds_counts_and_where_it_lies_does_not(make):
    assert described(make(3)) == described(make(3))
    assert described(make(3)) != described(make(4))
    assert unseen(make(3)) == []


def test_the_order_of_dicts_and_sets_and_chunks_does_not_count():
    assert described({"a": 1, "b": {}}) == described({"b": {}, "a": 1})
    assert described(pa.chunked_array([[1], [2]])) == described(pa.chunked_array([[1, 2]]))
    assert described(pa.array([0, 1, 2])[1:]) == described(pa.array([1, 2]))
    assert described(np.arange(6).reshape(2, 3).T) == described(np.arange(6).reshape(2, 3).T.copy())


def test_a_value_that_holds_itself_is_described():
    value: dict = {"a": 1}
    value["self"] = [value]
    assert described(value) == described(value)


def module_of(folder: Path, text: str, name: str = "strange") -> ModuleType:
    """A user's module, of a file that is there."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_a_progress_bar_does_not_count():
    tqdm = pytest.importorskip("tqdm").tqdm
    with tqdm(total=5, disable=True) as one, tqdm(total=9, disable=True) as other:
        assert described(closing_over(one)) == described(closing_over(other))


def test_a_cached_property_and_a_lock_do_not_count():
    class Reader:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        @functools.cached_property
        def rows(self) -> list[int]:
            return [1, 2]

    reader = Reader()
    before = described(reader)
    assert reader.rows
    assert described(reader) == before
    assert unseen(reader) == []


def test_an_object_that_hides_its_contents_is_listed_with_its_place():
    generator = (number for number in range(3))
    assert unseen(Options({"rows": [generator]})) == [
        "x.table['rows'][0] is a builtins.generator, whose contents cannot be seen"
    ]


def test_an_object_that_raises_when_it_is_looked_at_stops_no_job():
    class Angry:
        def identity(self) -> str:
            raise RuntimeError("no")

    assert described(Angry()) == described(Angry())
    assert "which cannot be inspected: RuntimeError('no')" in unseen(Angry())[0]
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert "which cannot be inspected: RecursionError" in unseen(deep)[0]


def test_files_and_folders_count_by_what_is_in_them(tmp_path):
    for folder, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "table.txt").write_text(text)
    for form in (lambda name: tmp_path / name, lambda name: tmp_path / name / "table.txt"):
        assert described(form("a")) == described(form("b")) != described(form("c"))
    named = [str(tmp_path / name / "table.txt") for name in "abc"]
    assert described([named[0]]) == described([named[1]]) != described([named[2]])
    (tmp_path / "a" / "more.txt").write_text("3")
    assert described(tmp_path / "a") != described(tmp_path / "b")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    assert "is a file of 1,048,576 MiB: of its contents only the size counts" in unseen(tmp_path / "huge")[0]
    assert "is a folder with too many files" in unseen(tmp_path)[0]


def test_an_identity_is_all_that_counts_of_an_object_and_an_address_in_it_is_said():
    class Known:
        def __init__(self, number: int) -> None:
            self.rows = iter([number])

        def identity(self) -> str:
            return "rows of 2020"

    class Addressed(Known):
        def identity(self) -> str:
            return object.__repr__(self)

    assert described(Known(1)) == described(Known(2))
    assert unseen(Known(1)) == []
    assert described(Addressed(1)) == described(Addressed(2))
    assert "names an address in memory" in unseen(Addressed(1))[0]


def _of_overlord(monkeypatch: pytest.MonkeyPatch, module: str) -> list[Any]:
    """Values that refer to classes and functions of ours, as if these were defined in a module."""
    for moved in (ol.vision.DecodeImage, type(ol.per_row(dict)), ol.Pick, ol.per_row):
        monkeypatch.setattr(moved, "__module__", module)
    return [
        ol.vision.DecodeImage("image", size=(8, 8)),
        ol.vision.DecodeImage,
        ol.per_row(dict),
        ol.Pick,
        ol.per_row,
        type("Mine", (ol.vision.DecodeImage,), {}),
        list[ol.vision.DecodeImage],
    ]


@pytest.mark.parametrize("module", ["overlord.chunks.elsewhere", "overlord.other_room.deeper.file", "overlord"])
def test_a_class_or_function_of_ours_counts_without_the_path_of_its_file(monkeypatch, module):
    before = [described(value) for value in _of_overlord(monkeypatch, "overlord.media.images")]
    assert [described(value) for value in _of_overlord(monkeypatch, module)] == before


def test_no_path_of_ours_is_in_a_description():
    values = (ol.vision.DecodeImage("image", size=(8, 8)), ol.per_row, ol.vision, sys.modules["overlord.media.images"])
    texts = [Describer().text(value, "x") for value in values]
    assert [re.findall(r"overlord[.\w]*", text) for text in texts] == [
        ["overlord.DecodeImage"],
        ["overlord.per_row"],
        ["overlord.vision"],
        ["overlord.images"],
    ]


def test_a_class_of_another_package_counts_with_its_module(monkeypatch):
    ours = described(ol.vision.DecodeImage)
    DecodeImage = type("DecodeImage", (), {})
    assert described(DecodeImage) != ours  # a class of the user's own, by its code
    found = set()
    for module in ("numpy.one", "numpy.other", "overlord_extras.media", "decimal"):
        monkeypatch.setattr(DecodeImage, "__module__", module)
        found.add(described(DecodeImage))
    assert len(found) == 4
    assert ours not in found


def test_the_version_of_a_package_that_code_uses_is_noted(tmp_path):
    describer = Describer()
    describer.digest(module_of(tmp_path, CODE).f, "x")
    assert describer.packages == {"numpy": ".".join(np.__version__.split(".")[:2])}


def all_descriptions(folder: Path) -> dict[str, str]:
    found = {name: Describer().text(make(3), "x") for name, make in PAIRS.items()}
    found["code"] = Describer().text(module_of(folder, CODE).f, "x")
    found["sets"] = Describer().text({frozenset({"a", "b", ("c", "d")}), frozenset("xyz")}, "x")
    return found


PROGRAM = """
import json, sys
from pathlib import Path
from tests.checkpoint.test_description import all_descriptions
print(json.dumps(all_descriptions(Path(sys.argv[1]))))
"""


def test_descriptions_are_the_same_in_every_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join([str(Path(__file__).parents[1]), *sys.path])},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    here = json.dumps(all_descriptions(tmp_path))
    assert json.loads(done.stdout) == json.loads(here)
    assert "0x" not in here


# The same, where users meet it: a run that is resumed.


@dataclass(frozen=True)
class Mapped:
    """A transform that looks tokens up."""

    table: dict = field(default_factory=dict)

    def __call__(self, table: pa.Table) -> pa.Table:
        mapped = [[self.table.get(token, token) for token in row or ()] for row in table["tokens"].to_pylist()]
        return table.set_column(0, "tokens", pa.array(mapped, pa.list_(pa.int32())))


def mapping_job(table: dict) -> ol.Job:
    return job_of({"web": Numbered(rows=40, first=1, transform=(ol.Pick("tokens"), Mapped(table)))})


def test_a_run_is_not_resumed_with_another_lookup_table():
    job = mapping_job({1000: 7})
    uncut, _ = read_all(job, 5)
    _, state = read_all(job, 3)
    assert same(read_all(mapping_job({1000: 7}), 2, resume=state)[0], uncut[3:])
    with pytest.raises(
        ol.errors.StateError, match=r"source 'web' is declared differently \(transform\[1\], Mapped: its code"
    ):
        ol.start(mapping_job({1000: 8}), resume=state)
    ol.start(mapping_job({1000: 8}), resume=state, accept_changes=["sources.web"]).close()


def test_a_run_is_not_resumed_with_another_tokenizer_file(tmp_path):
    for name, last in (("one", "b"), ("two", "c"), ("three", "b")):
        (tmp_path / name).mkdir()
        bpe(last).save(str(tmp_path / name / "tokenizer.json"))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"a b c {i}"}) + "\n" for i in range(50)))

    def job(name: str, kind: type = str) -> ol.Job:
        transform = ol.Tokenize(encoding=kind(tmp_path / name / "tokenizer.json"))
        return job_of({"text": ol.Jsonl(str(tmp_path / "text.jsonl"), transform=transform)})

    state = read_all(job("one"), 2)[1]
    with pytest.raises(ol.errors.StateError, match=r"transform\[0\], Tokenize"):
        ol.start(job("two"), resume=state)
    for kind in (str, Path):
        ol.start(job("three", kind), resume=state).close()  # the same file, moved


def test_a_reader_without_an_identity_counts_with_its_fields_and_code():
    @dataclass(frozen=True)
    class Silent(Numbered):
        salt: int = 0
        identity = ol.Source.identity

    state = read_all(job_of({"a": Silent(rows=20)}), 2)[1]
    ol.start(job_of({"a": Silent(rows=20)}), resume=state).close()
    with pytest.raises(ol.errors.StateError, match="source 'a' is declared differently"):
        ol.start(job_of({"a": Silent(rows=20, salt=1)}), resume=state)


def test_every_option_of_a_batch_counts_but_those_that_only_arrange():
    from dataclasses import fields

    from overlord.checkpoint.fingerprint import BATCH_MAY_CHANGE, Fingerprint

    job = job_of({"a": Numbered()})
    counted_fields = set(Fingerprint.of(job, {"a": Numbered().units()}).batch)
    assert counted_fields == {each.name for each in fields(ol.Batch)} - BATCH_MAY_CHANGE
    state = read_all(job, 2)[1]
    limited = job_of({"a": Numbered()}, ol.Batch(tokens=64, sequence_length=16, document_limits={0: 4}))
    with pytest.raises(ol.errors.StateError, match=r"batch.document_limits was None, is \[\[0, 4\]\]"):
        ol.start(limited, resume=state)


def test_another_version_of_a_package_that_transforms_use_is_refused_by_name(tmp_path):
    from overlord.checkpoint.form import contents_of, with_checksum

    job = job_of(
        {"a": Numbered(transform=module_of(tmp_path, "import numpy as np\ndef f(t):\n    np.pi\n    return t\n").f)}
    )
    contents = contents_of(read_all(job, 1)[1])
    contents["fingerprint"]["packages"]["numpy"] = "1.26"
    with pytest.raises(
        ol.errors.StateError, match=r"numpy 1.26 was installed, is 2(?s:.*)accept_changes=\['packages.numpy'\]"
    ) as raised:
        ol.start(job, resume=with_checksum(contents))
    assert "transforms use it" in str(raised.value)


class Hidden:
    """A transform with something that nobody can look into."""

    def __init__(self) -> None:
        self.lookup = (number for number in range(3))

    def __call__(self, table: pa.Table) -> pa.Table:
        return table


def test_what_cannot_be_seen_is_said_once_at_the_first_save(caplog):
    job = job_of({"web": Numbered(transform=(ol.Pick("tokens"), Hidden()))})
    with caplog.at_level(logging.WARNING, "overlord.checkpoint"), ol.start(job) as loader:
        client = loader.client(0, timeout_s=30)
        next(client)
        assert caplog.messages == []
        client.state_dict()
        client.state_dict()
        loader.state_dict()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(
        "sources.web.transform[1].lookup is a builtins.generator, whose contents cannot be seen"
    )
    assert "give it an identity() method" in caplog.messages[0]


def test_what_cannot_be_seen_is_said_when_a_log_begins(caplog, tmp_path):
    job = job_of({"web": Numbered(transform=Hidden())})
    with caplog.at_level(logging.WARNING, "overlord.checkpoint"), ol.start(job, log=tmp_path / "log") as loader:
        loader.state_dict()
    assert len(caplog.messages) == 1
