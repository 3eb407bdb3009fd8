"""Tokenize: special tokens in texts, every kind of tokenizer, ids that are none, and the memory that it takes."""

import os
import pickle
import subprocess
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.checkpoint.description import Describer
from overlord.checkpoint.first_release import first_description
from overlord.chunks.transforms import tokenize
from overlord.chunks.transforms.apply import InProcesses, TransformCall
from overlord.chunks.transforms.bpe import ByteLevelBpe, NotByteLevel
from overlord.chunks.transforms.outcome import Context
from overlord.chunks.transforms.tokenize import ByteTokenizer, Tokenize
from overlord.chunks.workers.pool import ProcessPool
from overlord.runtime.threads import Threads, make_executor

tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.strangers

PAGE = "a page about <|eot|>, which ends a turn"
EOT, THINK = 256, 257


def hugging_face(**options: Any) -> Any:
    """Bytes as ids 0 to 255, a control token, and an added token that is an ordinary word."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([tokenizers.AddedToken("<|eot|>", special=True)])
    made.add_tokens([tokenizers.AddedToken("<think>", special=False)])
    return made


def tiktoken_bytes() -> Any:
    ranks = {bytes([i]): i for i in range(256)}
    return tiktoken.Encoding("bytes", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|eot|>": EOT})


class FastTokenizer:
    """As a fast tokenizer of `transformers` is to its callers: a mapping comes back, and a bos unless told otherwise."""

    def __init__(self, backend: Any) -> None:
        self._tokenizer = backend

    @property
    def backend_tokenizer(self) -> Any:
        return self._tokenizer

    def convert_tokens_to_ids(self, token: str) -> int:
        return self._tokenizer.token_to_id(token) or 0

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def __call__(self, text: str, add_special_tokens: bool = True) -> UserDict:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return UserDict({"input_ids": [EOT, *ids] if add_special_tokens else ids, "attention_mask": [1] * len(ids)})


class SlowTokenizer:
    """As one of `transformers` that is written in Python."""

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.get_vocab().get(token, 0)

    def get_vocab(self) -> dict[str, int]:
        return {"<|eot|>": EOT}

    def __call__(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False) -> UserDict:
        parts = [text] if split_special_tokens else text.split("<|eot|>")
        ids = list(parts[0].encode())
        for part in parts[1:]:
            ids += [EOT, *part.encode()]
        return UserDict({"input_ids": [EOT, *ids] if add_special_tokens else ids})


ENCODINGS = {
    "tokenizers": hugging_face,
    "tiktoken": tiktoken_bytes,
    "fast": lambda: FastTokenizer(hugging_face()),
    "slow": SlowTokenizer,
}
every_encoding = pytest.mark.parametrize("make", ENCODINGS.values(), ids=ENCODINGS)


def encoded(table: pa.Table, **options: Any) -> list[list[int]]:
    return [ids for ids in Tokenize(**options)(table)["tokens"].to_pylist() if ids is not None]


@every_encoding
def test_text_that_spells_a_special_token_is_text_unless_asked_for(make):
    encoding, table = make(), pa.table({"text": [PAGE, "", None]})
    plain = encoded(table, encoding=encoding)
    assert EOT not in plain[0]
    assert len(plain[0]) == len(PAGE)
    assert plain[1:] == [[], []]
    special = encoded(table, encoding=encoding, special_tokens=True)
    assert special[0].count(EOT) == 1
    assert len(special[0]) == len(PAGE.replace("<|eot|>", "")) + 1
    assert encoded(table, encoding=encoding) == plain, "the one does not change the other"


@every_encoding
@pytest.mark.parametrize("special", [False, True])
def test_worker_processes_encode_special_tokens_alike(make, special):
    fn = Tokenize(encoding=make(), special_tokens=special, eos="<|eot|>")
    table = pa.table({"text": [PAGE] * 5})
    with ProcessPool(1) as pool:
        outcome = pool.run(
            InProcesses(fn, batch_rows=2), table, np.arange(5), Context("web", 0, 0), on_bad=_never, stop_at_error=True
        )
    assert outcome.table is not None
    assert outcome.table["tokens"].to_pylist() == fn(table)["tokens"].to_pylist()


def _never(origin: int, error: str) -> None:
    raise AssertionError(error)


def test_a_tokenizer_file_treats_special_tokens_as_its_object_does(tmp_path: Path):
    hugging_face().save(str(tmp_path / "tokenizer.json"))
    table = pa.table({"text": [PAGE, "<think>"]})
    for special in (False, True):
        by_path = encoded(table, encoding=tmp_path / "tokenizer.json", special_tokens=special)
        assert by_path == encoded(table, encoding=hugging_face(), special_tokens=special)
        assert by_path[1] == [THINK], "a token that is added and not special is a word like any other"


def test_the_users_tokenizer_is_left_as_it_was():
    tokenizer = hugging_face()
    tokenizer.enable_padding(pad_id=9)
    tokenizer.enable_truncation(5)
    before = tokenizer.to_str(), tokenizer.encode(PAGE).ids
    texts = pa.table({"text": ["ab", "abc"]})
    assert [len(ids) for ids in encoded(texts, encoding=tokenizer)] == [2, 3], "no text is padded to its neighbours"
    for each in (tokenizer, FastTokenizer(tokenizer)):
        assert [len(ids) for ids in encoded(pa.table({"text": [PAGE]}), encoding=each)] == [len(PAGE)], "nor is any cut"
    assert (tokenizer.to_str(), tokenizer.encode(PAGE).ids) == before
    assert tokenizer.encode_special_tokens is False


def test_a_tokenizer_that_cannot_be_copied_says_what_to_set():
    class Spaces:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, part: part.split(" ", "isolated"))

    tokenizer = hugging_face()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(Spaces())
    table = pa.table({"text": ["ab <|eot|>"]})
    with pytest.raises(ol.errors.SpecError, match=r"Set tokenizer\.encode_special_tokens = True"):
        Tokenize(encoding=tokenizer)(table)
    tokenizer.encode_special_tokens = True
    assert EOT not in encoded(table, encoding=tokenizer)[0]


def test_a_tokenizer_of_transformers_adds_nothing_of_its_own():
    for encoding in (FastTokenizer(hugging_face()), SlowTokenizer()):
        assert len(encoded(pa.table({"text": ["abc"]}), encoding=encoding)[0]) == 3


def test_a_function_may_return_what_a_tokenizer_of_transformers_returns():
    tokenizer = FastTokenizer(hugging_face())
    found = encoded(pa.table({"text": ["abc"]}), encoding=lambda text: tokenizer(text))
    assert found == [[EOT, *tokenizer.backend_tokenizer.encode("abc").ids]]


@every_encoding
def test_bos_and_eos_may_be_named(make):
    found = encoded(pa.table({"text": ["ab", None]}), encoding=make(), bos="<|eot|>", eos="<|eot|>")
    assert [ids[0] for ids in found] == [ids[-1] for ids in found] == [EOT, EOT]
    with pytest.raises(ol.errors.SpecError, match=r"eos='<eos>': the encoding has no such token"):
        encoded(pa.table({"text": ["ab"]}), encoding=make(), eos="<eos>")


@pytest.mark.parametrize("encoding", [ByteTokenizer(), lambda text: [1]], ids=["bytes", "function"])
def test_what_a_function_cannot_know_is_refused(encoding):
    with pytest.raises(
        ol.errors.SpecError, match=r"eos='<\|eot\|>' names a token, but this encoding cannot look it up: give its id"
    ):
        Tokenize(encoding=encoding, eos="<|eot|>")(pa.table({"text": ["a"]}))
    with pytest.raises(ol.errors.SpecError, match="leave special_tokens out"):
        Tokenize(encoding=encoding, special_tokens=True)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["ab", None, "ab"]).dictionary_encode(),
        pa.chunked_array([pa.array(["ab", None]).dictionary_encode(), pa.array(["ab"]).dictionary_encode()]),
        pa.array([b"ab", None, b"ab"], pa.binary_view()),
    ],
    ids=["dictionary", "chunks of dictionaries", "binary view"],
)
@pytest.mark.parametrize("encoding", [ByteTokenizer(), lambda text: list(text.encode())], ids=["bytes", "function"])
def test_text_is_read_from_dictionaries_and_views(column, encoding):
    assert encoded(pa.table({"text": column}), encoding=encoding) == [[97, 98], [], [97, 98]]


@pytest.mark.parametrize(
    "ids",
    [
        lambda text: [1, 2**31] if "bad" in text else [1],
        lambda text: np.array([1, 2**40] if "bad" in text else [1]),
        lambda text: np.array([2**32 - 1] if "bad" in text else [1], np.uint32),
        lambda text: [2**70] if "bad" in text else np.array([1], np.int16),
    ],
    ids=["list", "int64", "uint32", "huge"],
)
def test_an_id_that_int32_cannot_hold_is_one_bad_row(ids):
    table = pa.table({"text": ["a", "b", "bad", "c"]})
    with pytest.raises(ol.errors.DataError, match="is not an id that int32 can hold") as caught:
        Tokenize(encoding=ids)(table)
    assert caught.value.__notes__ == ["in row 2 of the table"]
    bad: list[tuple[int, str]] = []
    outcome = TransformCall(Tokenize(encoding=ids)).run(
        table, np.arange(10, 14), Context("web", 0, 0), lambda *row: bad.append(row)
    )
    assert outcome.table is not None
    assert outcome.table["tokens"].to_pylist() == [[1], [1], [1]]
    assert [(row, error.startswith("DataError: Tokenize: token id ")) for row, error in bad] == [(12, True)]


def test_a_run_names_the_row_of_an_id_that_int32_cannot_hold(tmp_path: Path):
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n{"text": "bad"}\n')
    source = ol.Jsonl(
        str(tmp_path / "texts.jsonl"), transform=Tokenize(encoding=lambda text: [2**31 if text == "bad" else 1])
    )
    job = ol.Job(sources={"web": source}, batch=ol.Batch(samples=1, sequence_length=8))
    with ol.start(job) as loader, pytest.raises(ol.errors.DataError, match="token id 2147483648") as caught:
        next(loader.client(0))
    assert any("source 'web', chunk 0" in note and "texts.jsonl, row 1" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("ids", [[1.5], ["a"], [[1], [2]], [True]], ids=str)
def test_an_encoding_that_does_not_give_integers_is_refused(ids):
    with pytest.raises(ol.errors.SchemaError, match="must return a flat sequence of integers"):
        Tokenize(encoding=lambda text: ids)(pa.table({"text": ["a"]}))


@given(st.lists(st.none() | st.text(max_size=12), max_size=30), st.integers(1, 2000))
def test_slices_of_any_size_give_the_same_tokens(column, slice_bytes):
    table = pa.table({"text": pa.chunked_array([pa.array(column[:7], pa.string()), pa.array(column[7:], pa.string())])})
    whole = encoded(table, encoding=lambda text: list(text.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "SLICE_BYTES", slice_bytes)
        assert encoded(table, encoding=lambda text: list(text.encode())) == whole


@every_encoding
@given(data=st.data())
def test_threads_and_slices_change_no_token_and_no_bad_row(make, data):
    column = data.draw(st.lists(st.none() | st.text(max_size=40), max_size=20))
    table = pa.table({"text": pa.array(column, pa.string()), "n": pa.array(range(len(column)), pa.int64())})
    options = {
        "encoding": make(),
        "bos": data.draw(st.sampled_from([None, 7])),
        "eos": data.draw(st.sampled_from([None, 8])),
    }
    fn = Tokenize(keep=("n",), **options)
    whole = fn(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "SLICE_BYTES", data.draw(st.integers(1, 600)))
        for num_threads in (0, 1, 3):
            threads = make_executor(num_threads, "test")
            try:
                assert TransformCall(fn, threads).call(table, Context("web", 0, 0)) == whole
            finally:
                threads.shutdown()


def test_an_error_in_one_slice_names_its_row_and_the_other_slices_stay(monkeypatch):
    monkeypatch.setattr(tokenize, "SLICE_BYTES", 300)
    texts = [b"good"] * 40
    texts[17] = texts[33] = b"\xff is no UTF-8"
    table = pa.table({"text": pa.array(texts, pa.binary())})
    threads = Threads(2, "test")
    bad: list[tuple[int, str]] = []
    try:
        outcome = TransformCall(Tokenize(encoding=hugging_face()), threads).run(
            table, np.arange(100, 140), Context("web", 0, 0), lambda *row: bad.append(row)
        )
    finally:
        threads.shutdown()
    assert [row for row, _ in bad] == [117, 133]
    assert outcome.table is not None
    assert outcome.table.num_rows == 38
    assert outcome.origin is not None
    assert outcome.origin.tolist() == [n for n in range(100, 140) if n not in (117, 133)]


def test_the_id_of_a_later_slice_that_int32_cannot_hold_names_its_row(monkeypatch):
    monkeypatch.setattr(tokenize, "SLICE_BYTES", 300)
    table = pa.table({"text": ["good"] * 20 + ["bad"] + ["good"] * 5})
    with pytest.raises(ol.errors.DataError, match="is not an id that int32 can hold") as caught:
        Tokenize(encoding=lambda text: [2**31 if text == "bad" else 1])(table)
    assert caught.value.__notes__ == ["in row 20 of the table"]


class CountedBatches:
    """Notes the size of every batch that the library gets: with several texts it would start threads of its own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.sizes.append(len(texts))
        return self._tokenizer.encode_batch_fast(texts, **options)


def test_the_library_encodes_one_text_at_a_time_in_the_thread_that_calls():
    counted = CountedBatches(hugging_face())
    counted._tokenizer.encode_special_tokens = True
    found = tokenize._Tokenizers(counted).encode(["ab", "c"])
    assert [len(ids) for ids in found] == [2, 1]
    assert counted.sizes == [1, 1]


PEAK = """
import resource, sys
import pyarrow as pa
from overlord.chunks.transforms.tokenize import Tokenize
tokenize = Tokenize(encoding=sys.argv[1], eos=0, engine=sys.argv[2])
tokenize(pa.table({"text": ["warm"]}))
text = pa.table({"text": pa.array(["The cat sat on the mat. " * 40] * int(sys.argv[3]), pa.large_string())})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = tokenize(text)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((peak - before) * 1024 / made.nbytes)
"""


@pytest.mark.parametrize(("engine", "num_mib"), [("tiktoken", 24), ("tokenizers", 8)])
def test_the_memory_of_encoding_is_a_small_multiple_of_the_tokens(tmp_path: Path, engine: str, num_mib: int):
    # A MiB of text is 4 MiB of tokens here. In slices the peak is twice the tokens; at once it is 3.8 times as much with
    # tiktoken, and 5.3 times with the library, which takes ten times as long.
    hugging_face().save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", PEAK, str(tmp_path / "tokenizer.json"), engine, str(num_mib << 10)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert float(found.stdout) < 3, "times the size of its output"


def test_the_fingerprint_is_that_of_the_first_release_for_its_options_and_sees_what_is_new():
    tokenizer, options = hugging_face(), {"eos": 0, "keep": ("n",)}
    encoding = first_description(tokenizer, {})
    earlier = f"Tokenize(column='text', into='tokens', encoding={encoding}, eos=0, bos=None, keep=['n'])"
    assert first_description(Tokenize(encoding=tokenizer, **options), {}) == earlier
    plain, special = (
        Describer().text(Tokenize(encoding=tokenizer, special_tokens=on, **options), "t") for on in (False, True)
    )
    assert plain != special


def test_a_tokenizer_object_still_pickles_with_the_transform():
    made = Tokenize(encoding=hugging_face())
    table = pa.table({"text": [PAGE]})
    assert pickle.loads(pickle.dumps(made))(table) == made(table)


@pytest.mark.strangers
@pytest.mark.parametrize("value", [True, 1.5, -1, 2**31])
@pytest.mark.parametrize("name", ["bos", "eos"])
def test_bos_and_eos_are_whole_numbers_or_names(name: str, value: Any) -> None:
    with pytest.raises(ol.errors.SpecError, match=f"{name} is a token id from 0 to .* got {value!r}"):
        Tokenize(encoding=ol.ByteTokenizer(), **{name: value})
    assert Tokenize(encoding=ol.ByteTokenizer(), eos=np.int64(7)).eos == 7  # type: ignore[arg-type]


def test_with_an_old_tiktoken_a_tokenizer_json_is_left_to_its_library(monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr("tiktoken.__version__", "0.11.0")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    with pytest.raises(NotByteLevel, match=r"needs tiktoken 0\.14 or newer, and 0\.11\.0 is installed"):
        ByteLevelBpe.of(tokenizer)
