"""What the fingerprint of a state sees of transforms: everything that they depend on, and nothing of where it lies."""

import datetime
import decimal
import enum
import functools
import json
import operator
import random
import re
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tiktoken
import torch

import overlord as ol
from overlord.checkpoint.description import Describer
from tests.checkpoint.describing import bpe, described, module_of, unseen
from tests.checkpoint.test_described_code import CODE

pytestmark = pytest.mark.strangers


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
    "array of dates": lambda x: np.array(["2020-01-01"], "M8[D]") + np.timedelta64(x, "D"),
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
