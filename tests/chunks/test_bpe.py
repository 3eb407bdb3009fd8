"""Byte-level BPE by tiktoken: the ids of the `tokenizers` library for every text, or a reason to leave it to that."""

import itertools
import json
import logging
import os
import pickle
import subprocess
import sys
import sysconfig
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.checkpoint.description import Describer
from overlord.chunks.transforms import bpe
from overlord.chunks.transforms.bpe import ByteLevelBpe, NotByteLevel
from overlord.chunks.transforms.merge_ranks import ALPHABET, NotRankable, rank_tokens
from overlord.chunks.transforms.tokenize import Tokenize

tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors, trainers  # noqa: E402

NEEDED = ".".join(map(str, bpe.LEAST_TIKTOKEN))
pytestmark = [
    pytest.mark.strangers,
    pytest.mark.skipif(
        tuple(map(int, tiktoken.__version__.split(".")[:2])) < bpe.LEAST_TIKTOKEN, reason=f"tiktoken before {NEEDED}"
    ),
]

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
CAPITALS, SMALL, ENDING = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}*{SMALL}+{ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}+{SMALL}*{ENDING}",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
WITH_MARKS = QWEN_2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")


def split_by(pattern: str, *before: Any, behavior: str = "isolated", invert: bool = False) -> Any:
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*before, pre_tokenizers.Split(Regex(pattern), behavior, invert), bytes_of])


def gpt_2(prefix: bool = False) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix)


def apart(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


STYLES: dict[str, Any] = {
    "gpt-2": gpt_2,
    "gpt-2, prefix space": lambda: gpt_2(prefix=True),
    "llama 3": lambda: split_by(LLAMA_3),
    "llama 3, matches kept": lambda: split_by(LLAMA_3, behavior="removed", invert=True),
    "line feeds unescaped": lambda: split_by(LLAMA_3.replace(r"\r\n", "\r\n")),
    "qwen 2": lambda: split_by(QWEN_2),
    "o200k": lambda: split_by(O200K),
    "letters with marks": lambda: split_by(WITH_MARKS),
    "each digit": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt_2()]),
    "digits": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), gpt_2()]),
    "three digits, then gpt-2": lambda: pre_tokenizers.Sequence([apart(r"\p{N}{1,3}"), gpt_2()]),
    "three digits, then llama 3": lambda: split_by(LLAMA_3, apart(r"\p{N}{1,3}")),
}
every_style = pytest.mark.parametrize("style", STYLES)


@cache
def real_texts() -> list[str]:
    """Code, prose and data of this Python, and of what is installed."""
    home, packages = (Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib"))
    files = [
        *sorted(home.glob("*.py"))[:40],
        *sorted(home.glob("encodings/*.py"))[:10],
        *sorted(packages.glob("*.dist-info/METADATA"))[:30],
        *sorted(packages.glob("numpy/lib/*.py"))[:10],
    ]
    return [file.read_bytes()[:20_000].decode(errors="replace") for file in files]


FOREIGN = [
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. ",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. ",
    "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。いろはにほへと　ちりぬるを。",
    "다람쥐 헌 쳇바퀴에 타고파. नमस्ते दुनिया। สวัสดีชาวโลก العالم مرحبا שלום עולם ",
    "👩‍👩‍👧 ½ ² Ⅷ ٣٤ e\u0301 \u1100\u1161 ſ 'ſ K ﬁ \u00a0\u2003\u3000\u0085 \ufeff",
]


@cache
def trained(style: str, size: int = 1500) -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = STYLES[style]()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|eot|>"],
        show_progress=False,
    )
    made.train_from_iterator([*real_texts()[:30], *FOREIGN * 20], trainer)
    return made


def changed(tokenizer: Any, **parts: Any) -> Any:
    """A copy; `model` replaces options of the model."""
    rules = json.loads(tokenizer.to_str())
    rules["model"] |= parts.pop("model", {})
    return Tokenizer.from_str(json.dumps(rules | parts))


def by_library(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def by_tiktoken(engine: ByteLevelBpe, texts: list[str], kind: Any = None) -> list[list[int]]:
    flat, lengths = engine.encode_column(pa.array(texts, kind or pa.large_string()))
    assert flat.dtype == np.int32
    assert lengths.sum() == len(flat)
    return [ids.tolist() for ids in np.split(flat, np.cumsum(lengths)[:-1])]


def assert_same(tokenizer: Any, texts: list[str]) -> ByteLevelBpe:
    engine = ByteLevelBpe.of(tokenizer)
    assert by_tiktoken(engine, texts) == by_library(tokenizer, texts)
    return engine


WORDS = [
    "the",
    " The",
    "HELLO",
    "I'll",
    "'S",
    "'ſ",
    "12345",
    " 7",
    "½²",
    "٣٤",
    "_",
    "--",
    "/",
    "!?",
    "://",
    "\ufffd",
    "İ",
    "ﬁ",
]
SPACES = ["  ", "\n", "\r\n", "\t", " \n ", "\u00a0", "\u2003", "\u3000", "\n\n", "\u0085", "def f(x):\n    return x\n"]
SCRIPTS = ["e\u0301", "\u0301", "한", "\u1100\u1161", "你好", "ไทย", "नमस्ते", "👩\u200d👧", "\u0378", "\U000e0001", "\ue000"]
MARKUP = ["<|eot|>", "<|eo", "|>", "<think>", "<b>", " <b> ", "\u0102", "\u0100", "\x00", "\x01", "\x02", "\x02 x", " \x02"]
OURS = [bpe._SEPARATOR, bpe._SEPARATOR[:9], bpe._SEPARATOR[4:], "\U00016d63\U00016d67"]
SNIPPETS = st.sampled_from([*WORDS, *SPACES, *SCRIPTS, *MARKUP, *OURS])
TEXTS = st.lists(SNIPPETS | st.text(max_size=6), max_size=14).map("".join)
COLUMNS = st.lists(TEXTS, min_size=1, max_size=6)


@every_style
@given(texts=COLUMNS)
def test_ids_are_those_of_the_library(style, texts):
    assert by_tiktoken(engine_of(style), texts) == by_library(trained(style), texts)


@cache
def engine_of(style: str) -> ByteLevelBpe:
    return ByteLevelBpe.of(trained(style))


@pytest.mark.parametrize(
    ("style", "size"), [*((style, 300) for style in STYLES), *((style, 6000) for style in ("gpt-2", "llama 3", "qwen 2"))]
)
def test_ids_of_real_texts_are_those_of_the_library(style, size):
    assert_same(trained(style, size), [*real_texts()[:: 1 if size == 300 else 4], *FOREIGN, ""])


@given(texts=COLUMNS)
def test_nfc_is_applied_as_the_library_applies_it(texts):
    assert by_tiktoken(with_nfc(), texts) == by_library(with_nfc().tokenizer, texts)


@cache
def with_nfc() -> ByteLevelBpe:
    tokenizer = changed(trained("qwen 2"), normalizer={"type": "NFC"})
    tokenizer.add_tokens([AddedToken("<think>", normalized=True), AddedToken("<b>", normalized=False)])
    return ByteLevelBpe.of(tokenizer)


ADDED = {
    "plain": [AddedToken("<think>", normalized=False), AddedToken("<b>", normalized=True)],
    "with rules": [
        AddedToken("the", single_word=True),
        AddedToken("<b>", lstrip=True, normalized=False),
        AddedToken("<think>", rstrip=True),
    ],
    "overlapping": [AddedToken("<think>"), AddedToken("<th"), AddedToken("k><"), AddedToken("  "), AddedToken("   ")],
    "inside a special token": [AddedToken("eot"), AddedToken("|><|")],
    "with control letters": [AddedToken("\x00"), AddedToken("\x01a"), AddedToken("\x02")],
    "with letters of bytes": [AddedToken("\u0102"), AddedToken("\u0100")],
}


@pytest.mark.parametrize("style", ["gpt-2", "gpt-2, prefix space", "llama 3"])
@pytest.mark.parametrize("kind", ADDED)
@pytest.mark.parametrize("special", [False, True])
@given(texts=COLUMNS)
def test_added_tokens_are_found_as_the_library_finds_them(style, kind, special, texts):
    engine = with_added(style, kind, special)
    assert by_tiktoken(engine, texts) == by_library(engine.tokenizer, texts)


@cache
def with_added(style: str, kind: str, special: bool) -> ByteLevelBpe:
    tokenizer = changed(trained(style))
    tokenizer.add_tokens(ADDED[kind])
    tokenizer.encode_special_tokens = not special
    return ByteLevelBpe.of(tokenizer)


SENTENCES = st.lists(SNIPPETS | st.sampled_from([" a", "b ", "word", " x y z", "Hello", " "]), max_size=30).map("".join)


def assert_cut_alike(engine: ByteLevelBpe, text: str, num_bytes: int) -> int:
    """The number of parts."""
    parts = engine.cut(pa.array([text]), num_bytes)
    assert "".join(parts.to_pylist()) == text  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert (
        np.concatenate([by_tiktoken(engine, [part])[0] for part in parts.to_pylist()]).tolist()  # pyright: ignore[reportArgumentType]
        == (by_library(engine.tokenizer, [text])[0])
    )
    return len(parts)


@every_style
@given(text=SENTENCES, num_bytes=st.integers(1, 12))
def test_the_parts_of_a_text_have_the_ids_of_the_whole(style, text, num_bytes):
    assert_cut_alike(engine_of(style), text, num_bytes)


@pytest.mark.parametrize("kind", ADDED)
@given(text=SENTENCES, num_bytes=st.integers(1, 12))
def test_no_added_token_is_cut_or_loses_its_space(kind, text, num_bytes):
    assert_cut_alike(with_added("llama 3", kind, special=True), text, num_bytes)
    assert_cut_alike(with_added("gpt-2, prefix space", kind, special=True), text, num_bytes)


@given(text=SENTENCES, num_bytes=st.integers(1, 12))
def test_parts_are_normalised_as_the_whole_is(text, num_bytes):
    assert_cut_alike(with_nfc(), text, num_bytes)


def test_an_added_token_with_a_space_keeps_a_text_whole():
    tokenizer = changed(trained("gpt-2"))
    tokenizer.add_tokens([AddedToken("new york")])
    assert assert_cut_alike(ByteLevelBpe.of(tokenizer), "a new york state of mind " * 4, 1) == 1
    assert assert_cut_alike(engine_of("gpt-2"), "a new york state of mind " * 4, 1) > 10


@pytest.mark.parametrize("text", ["x" * 50, "a  b\nc" * 20, "é à ü " * 20], ids=["a word", "no single space", "no ASCII"])
def test_a_text_without_a_safe_place_is_not_cut(text):
    assert assert_cut_alike(engine_of("llama 3"), text, 3) == 1


def test_long_texts_are_tokenised_in_parts_with_the_same_rows(monkeypatch):
    texts = ["short", "some words of a long text " * 50, "", "another one " * 70, "end"]
    made = Tokenize(encoding=trained("llama 3"), bos=1, eos=2)
    whole = made(pa.table({"text": texts}))
    monkeypatch.setattr("overlord.chunks.transforms.tokenize.SLICE_BYTES", 300)
    assert made(pa.table({"text": texts})) == whole


def all_splits(tokenizer: Any) -> Any:
    """Every way to put a token together is a merge, as in files that were converted from ranks."""
    rules = json.loads(tokenizer.to_str())
    vocabulary = rules["model"]["vocab"]
    made = dict.fromkeys(left + right for left, right in rules["model"]["merges"])
    merges = []
    for token in made:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return changed(tokenizer, model={"merges": merges, "ignore_merges": True})


@given(texts=COLUMNS)
def test_a_vocabulary_converted_from_ranks_is_encoded_alike(texts):
    assert by_tiktoken(converted(), texts) == by_library(converted().tokenizer, texts)


@cache
def converted() -> ByteLevelBpe:
    tokenizer = all_splits(trained("llama 3", 6000))
    assert_same(tokenizer, real_texts()[::5])
    return ByteLevelBpe.of(tokenizer)


def test_ids_need_not_be_in_the_order_of_merges():
    tokenizer = trained("gpt-2")
    rules = json.loads(tokenizer.to_str())
    order = np.random.default_rng(3).permutation(len(rules["model"]["vocab"])).tolist()
    shuffled = {token: order[i] for token, i in rules["model"]["vocab"].items()}
    assert_same(changed(tokenizer, added_tokens=[], model={"vocab": shuffled}), real_texts()[:10])


@given(data=st.data())
def test_any_merges_are_encoded_alike_or_not_at_all(data):
    # Merges of any kind: in any order, of parts that are made later or never, several for one token.
    made = ["a", "b"]
    merges: list[tuple[str, str]] = []
    for _ in range(data.draw(st.integers(1, 10))):
        pair = data.draw(st.sampled_from(made)), data.draw(st.sampled_from(made))
        if len("".join(pair)) <= 6 and pair not in merges:
            merges.append(pair)
            made.append("".join(pair))
    if data.draw(st.booleans()):
        merges = data.draw(st.permutations(merges))
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*ALPHABET, *made]))}
    try:
        ranked = rank_tokens(vocabulary, merges)
    except NotRankable:
        return
    library = models.BPE(vocab=vocabulary, merges=merges)
    ranks = {token: rank for rank, token in enumerate(ranked.tokens)}
    core = tiktoken.Encoding("merges", pat_str=r"\S+", mergeable_ranks=ranks, special_tokens={})
    for length in range(1, 9):
        for letters in itertools.product("ab", repeat=length):
            text = "".join(letters)
            assert ranked.ids[core.encode_ordinary(text)].tolist() == [token.id for token in library.tokenize(text)]


def test_merges_that_training_makes_are_ranked():
    for style in ("gpt-2", "llama 3"):
        rules = json.loads(trained(style, 6000).to_str())["model"]
        ranked = rank_tokens(rules["vocab"], rules["merges"])
        assert len(ranked.tokens) + len(ranked.left_out) == len(rules["vocab"])
        assert ranked.left_out == ["<|eot|>"]


def test_merges_in_another_order_are_not_ranked():
    rules = json.loads(trained("gpt-2").to_str())["model"]
    with pytest.raises(NotRankable, match="order"):
        rank_tokens(rules["vocab"], rules["merges"][::-1])


def test_a_merge_that_is_listed_twice_is_not_ranked():
    vocabulary = {token: i for i, token in enumerate([*ALPHABET, "aa", "aaa"])}
    merges = [("a", "a"), ("aa", "a")]
    assert len(rank_tokens(vocabulary, merges).tokens) == len(vocabulary)
    with pytest.raises(NotRankable, match="lists a merge twice"):
        rank_tokens(vocabulary, [*merges, ("a", "a")])


def never() -> Any:
    raise AssertionError("the library was asked to read the file")


@every_style
@pytest.mark.parametrize("special", [False, True])
def test_a_file_is_encoded_alike_and_its_library_does_not_read_it(style, special):
    tokenizer = changed(trained(style))
    tokenizer.encode_special_tokens = not special
    engine = ByteLevelBpe.of_file(tokenizer.to_str().encode(), special_tokens=special, load=never)
    texts = [*FOREIGN[:2], "def f(x):\n    return  x + 12345\n", "The cat's <|eot|> hat, 7 of them"]
    if style == "gpt-2, prefix space":  # rows with added tokens are left to the library
        texts.pop()
    assert by_tiktoken(engine, texts) == by_library(tokenizer, texts)
    assert [engine.id_of(token) for token in ("a", "Ġthe", "<|eot|>")] == [
        tokenizer.token_to_id(token) for token in ("a", "Ġthe", "<|eot|>")
    ]


def test_the_library_reads_a_file_once_when_a_row_is_left_to_it():
    tokenizer, loaded = trained("llama 3"), []
    engine = ByteLevelBpe.of_file(
        tokenizer.to_str().encode(), special_tokens=False, load=lambda: loaded.append(tokenizer) or tokenizer
    )
    assert engine.id_of("a token that nobody has") is None
    texts = ["\x00, \x01 and \x02", "plain"]
    assert by_tiktoken(engine, texts) == by_tiktoken(engine, texts) == by_library(tokenizer, texts)
    assert loaded == [tokenizer]


def written(**changes: Any) -> Any:
    """A change of a file: of its model where that has the key, otherwise of the file."""

    def change(rules: dict[str, Any]) -> None:
        for key, value in changes.items():
            place = rules["model"] if key in rules["model"] else rules
            place[key] = value(place[key]) if callable(value) else value

    return change


OTHERWISE = {
    "an id that the library changes": written(added_tokens=lambda old: [old[0] | {"id": old[0]["id"] + 7}, *old[1:]]),
    "a token added twice": written(added_tokens=lambda old: [*old, *old]),
    "an added token without its options": written(added_tokens=lambda old: [{"id": 0, "content": "!"}, *old]),
    "a merge listed twice": written(merges=lambda old: [*old, old[0]]),
    "a first line": written(merges=lambda old: ["#version: 0.2", *(" ".join(pair) for pair in old)]),
    "a vocabulary with a gap": written(vocab=lambda old: {token: i + (i > 300) for token, i in old.items()}),
    "no kind of model": lambda rules: rules["model"].pop("type"),
    "no version": lambda rules: rules.pop("version"),
    "no decoder": lambda rules: rules.pop("decoder"),
}


@pytest.mark.parametrize("change", OTHERWISE.values(), ids=OTHERWISE)
def test_a_file_that_is_written_otherwise_is_read_by_its_library_first(change, tmp_path):
    rules = json.loads(trained("gpt-2").to_str())
    change(rules)
    data = json.dumps(rules).encode()
    with pytest.raises(NotByteLevel):
        ByteLevelBpe.of_file(data, special_tokens=False, load=never)
    file = tmp_path / "tokenizer.json"
    file.write_bytes(data)
    try:
        library = Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - the library raises nothing more precise
        library = None
    if library is None:
        with pytest.raises(Exception):  # noqa: B017, PT011 - as above
            Tokenize(encoding=file)(pa.table({"text": ["a"]}))
        return
    library.encode_special_tokens = True
    texts = real_texts()[:3]
    assert Tokenize(encoding=file)(pa.table({"text": texts}))["tokens"].to_pylist() == by_library(library, texts)


UNKNOWN = {
    "dropout": ({"model": {"dropout": 0.1}}, "is a BPE with dropout"),
    "byte fallback": ({"model": {"byte_fallback": True}}, "is a BPE with byte_fallback"),
    "lower case": ({"normalizer": {"type": "Lowercase"}}, "has the normalizer Lowercase"),
    "no splitting": ({"pre_tokenizer": None}, "has no byte-level pre-tokenizer"),
    "words": ({"pre_tokenizer": {"type": "Whitespace"}}, "has no byte-level pre-tokenizer"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_another_tokenizer_is_left_to_its_library_and_it_says_why(case, caplog):
    parts, why = UNKNOWN[case]
    tokenizer = changed(trained("gpt-2"), **parts)
    with pytest.raises(NotByteLevel, match=why):
        ByteLevelBpe.of(tokenizer)
    with caplog.at_level(logging.INFO):
        assert Tokenize(encoding=tokenizer).engine_used == f"tokenizers: it {why}"
    assert f"is encoded by the tokenizers library, because it {why}" in caplog.text
    with pytest.raises(ol.errors.SpecError, match=f"engine='tiktoken' cannot encode with Tokenizer: it {why}"):
        Tokenize(encoding=tokenizer, engine="tiktoken")(pa.table({"text": ["a"]}))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: split_by(r"\w+|\W+"), r"not known to be safe: \\w\+"),
        (lambda: split_by(r" ?\p{L}+|\s+"), "may leave gaps"),
        (lambda: split_by(LLAMA_3, behavior="merged_with_next"), "MergedWithNext"),
        (lambda: split_by(LLAMA_3, apart(r"\p{L}+")), "the first of which is not of numbers"),
        (lambda: split_by(LLAMA_3, apart(r"\p{N}"), apart(r"\p{N}")), "by 3 patterns"),
        (lambda: pre_tokenizers.Sequence([apart(LLAMA_3), gpt_2(prefix=True)]), "a space before every word"),
    ],
)
def test_a_pattern_that_may_mean_something_else_is_left_to_the_library(make, why):
    tokenizer = changed(trained("gpt-2"))
    tokenizer.pre_tokenizer = make()
    with pytest.raises(NotByteLevel, match=why):
        ByteLevelBpe.of(tokenizer)


def test_a_vocabulary_without_some_byte_is_left_to_the_library():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = gpt_2()
    with pytest.raises(NotByteLevel, match="has no token for the byte 0x00"):
        ByteLevelBpe.of(tokenizer)


def test_a_word_that_no_merge_makes_is_left_to_the_library_if_merges_are_ignored():
    rules = json.loads(trained("gpt-2").to_str())["model"]
    vocabulary = rules["vocab"] | {"Qxqxqz": len(rules["vocab"])}
    without = changed(trained("gpt-2"), model={"vocab": vocabulary})
    assert_same(without, ["Qxqxqz", "a Qxqxqz"])
    with pytest.raises(NotByteLevel, match="has a word that no merge makes: 'Qxqxqz'"):
        ByteLevelBpe.of(changed(without, model={"vocab": vocabulary, "ignore_merges": True}))
    assert_same(changed(trained("gpt-2"), model={"ignore_merges": True}), ["<|eot|> eot"])


def test_post_processors_add_nothing():
    tokenizer = changed(trained("gpt-2"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|eot|> $A", special_tokens=[("<|eot|>", 0)])
    assert_same(tokenizer, ["some text"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A $A", special_tokens=[])
    with pytest.raises(NotByteLevel, match="a template that does not contain the text once"):
        ByteLevelBpe.of(tokenizer)


def test_characters_that_the_engines_know_differently_are_left_to_the_library(monkeypatch):
    engine = ByteLevelBpe.of(trained("gpt-2"))
    members = bpe._library_members
    monkeypatch.setattr(bpe, "_library_members", lambda name, letters: members(name, letters) - {"é"})
    left = []
    monkeypatch.setattr(ByteLevelBpe, "_by_library", lambda self, rows: left.extend(rows.tolist()) or by_lists(self, rows))
    assert by_tiktoken(engine, ["ab", "café", "Zwölf"]) == by_library(engine.tokenizer, ["ab", "café", "Zwölf"])
    assert left == ["café"]


def by_lists(engine: ByteLevelBpe, texts: pa.Array) -> Any:
    rows: Any = texts.to_pylist()
    lists = by_library(engine.tokenizer, rows)
    return np.array([i for ids in lists for i in ids], np.int32), np.array([len(ids) for ids in lists])


@pytest.mark.parametrize("unit", ["a", " ", "\n", "!", "a\u0301", "\u3000", "ab", " \n", "'s", "0", "你"])
@pytest.mark.parametrize("style", ["gpt-2", "llama 3", "o200k", "each digit"])
@pytest.mark.timeout(30)  # quadratic time would take minutes
def test_a_long_run_of_one_letter_is_encoded_as_the_library_does(style, unit):
    # Both a run at the end of a text and one before a word: the second needs a step back.
    tokenizer, engine = trained(style), engine_of(style)
    texts = [unit * (150_000 // len(unit)), unit * (150_000 // len(unit)) + "x"]
    assert by_tiktoken(engine, texts) == by_library(tokenizer, texts)


def test_more_spaces_than_a_regular_expression_can_step_over_are_left_to_the_library():
    texts = [" " * 1_100_000 + "x", "a"]
    assert_same(trained("gpt-2"), texts)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_slices_of_columns_and_empty_ones_are_encoded(kind):
    engine = engine_of("gpt-2")
    texts = ["", "a b", "", "c", ""]
    assert by_tiktoken(engine, texts, kind) == by_library(engine.tokenizer, texts)
    ids, lengths = engine.encode_column(pa.array(texts, kind).slice(1, 3))
    assert ids.tolist() == engine.tokenizer.encode("a b").ids + engine.tokenizer.encode("c").ids
    assert lengths.tolist() == [2, 0, 1]
    assert [len(part) for part in engine.encode_column(pa.array([], kind))] == [0, 0]


OPTIONS: list[dict[str, Any]] = [{}, {"special_tokens": True}, {"bos": "<|eot|>", "eos": 7}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokenize_encodes_alike_with_both_engines(options):
    table = pa.table({"text": pa.chunked_array([["some <|eot|> text", None], ["", "é\u0301 more"]])})
    by_default = Tokenize(encoding=trained("gpt-2"), **options)
    by_force = Tokenize(encoding=trained("gpt-2"), engine="tokenizers", **options)
    assert (by_default.engine_used, by_force.engine_used) == ("tiktoken", "tokenizers")
    assert by_default(table) == by_force(table)


def test_the_engine_is_not_part_of_the_fingerprint():
    engines: tuple[Any, ...] = (None, "tokenizers", "tiktoken")
    texts = {Describer().text(Tokenize(encoding=trained("gpt-2"), engine=engine), "t") for engine in engines}
    assert len(texts) == 1
    assert "engine" not in texts.pop(), "states of earlier releases have no such field"


def test_an_engine_that_is_none_is_refused():
    with pytest.raises(ol.errors.SpecError, match="engine is 'tokenizers' or 'tiktoken', or None to choose; got 'fast'"):
        Tokenize(encoding=trained("gpt-2"), engine="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("encoding", "engine"), [(ol.ByteTokenizer(), "bytes"), (lambda text: [1], "function")], ids=["bytes", "function"]
)
def test_every_encoding_names_its_engine(encoding, engine):
    assert Tokenize(encoding=encoding).engine_used == engine


def test_threads_share_an_engine():
    engine, texts = ByteLevelBpe.of(trained("llama 3")), [*FOREIGN, *real_texts()[:5]]
    expected, found = by_library(engine.tokenizer, texts), {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: by_tiktoken(engine, texts)})) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == [expected] * 6


ONE_THREAD = """
import pickle, sys, time, pyarrow as pa
tokenize = pickle.load(sys.stdin.buffer)
tokenize(pa.table({"text": ["warm"]}))
table = pa.table({"text": ["The cat sat on the mat. " * 50] * 2000})
here, everywhere = time.thread_time(), time.process_time()
tokenize(table)
print(tokenize.engine_used, (time.thread_time() - here) / (time.process_time() - everywhere))
"""


def test_another_process_encodes_in_the_thread_that_calls(tmp_path: Path):
    trained("gpt-2").save(str(tmp_path / "tokenizer.json"))
    for encoding in (tmp_path / "tokenizer.json", trained("gpt-2")):
        data = pickle.dumps(Tokenize(encoding=encoding))
        # numpy's own threads spin for a while after its import.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        found = subprocess.run(
            [sys.executable, "-c", ONE_THREAD], input=data, capture_output=True, check=True, env=environment
        )
        engine, share = found.stdout.decode().split()
        assert engine == "tiktoken"
        assert float(share) > 0.9, "of the CPU time"
