"""Held-out splits by hash: no value on both sides, and rows that stay where they are."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import DataError, SchemaError, SpecError

values = st.lists(st.text(max_size=8) | st.integers(-(2**40), 2**40).map(str), min_size=1, max_size=60)


def side(transform, texts, name="text"):
    return transform(pa.table({name: pa.array(texts)}))[name].to_pylist()


@given(texts=values, more=values, fraction=st.floats(0.01, 0.99), seed=st.integers(0, 5))
def test_each_row_is_on_one_side_and_stays_there_when_others_are_added(texts, more, fraction, seed):
    split = ol.Split(fraction, seed, by="text")
    train, held_out = side(split.train, texts), side(split.held_out, texts)
    assert sorted(map(str, [*train, *held_out])) == sorted(texts)
    assert not set(train) & set(held_out)
    assert set(side(split.train, [*more, *texts, *more])) >= set(train)
    assert set(side(split.held_out, [*more, *texts])) >= set(held_out)
    larger = ol.Split((1 + fraction) / 2, seed, by="text")
    assert set(side(larger.held_out, texts)) >= set(held_out)


def test_about_the_fraction_is_held_out_and_another_seed_holds_out_others():
    texts = [str(n) for n in range(20_000)]
    held_out = side(ol.Split(0.1, by="text").held_out, texts)
    assert 1_800 < len(held_out) < 2_200
    other = side(ol.Split(0.1, 1, by="text").held_out, texts)
    assert 100 < len(set(held_out) & set(other)) < 320


def test_the_sides_are_the_same_in_every_release():
    assert side(ol.Split(0.5, by="text").held_out, [str(n) for n in range(12)]) == ["2", "4", "6", "9", "11"]


def test_any_kind_of_value_can_be_split_by():
    rows = [[{"role": "user", "content": str(n)}] for n in range(40)]
    split = ol.Split(0.5, by="messages")
    held_out = side(split.held_out, rows, "messages")
    assert 8 < len(held_out) < 32
    assert all(row in rows for row in held_out)
    numbers = side(ol.Split(0.5, by="id").held_out, list(range(40)), "id")
    assert 8 < len(numbers) < 32


def test_training_and_evaluation_of_a_job_never_share_a_row(tmp_path):
    def write(name: str, rows: range) -> None:
        lines = (json.dumps({"text": f"document {n}"}) + "\n" for n in rows)
        (tmp_path / name).write_text("".join(lines))

    def read() -> tuple[set[str], set[str]]:
        split = ol.Split(0.2, seed=7, by="text")
        tokenize = ol.Tokenize(encoding=ol.ByteTokenizer())
        files = str(tmp_path / "*.jsonl")
        job = ol.Job(
            sources={"web": ol.Jsonl(files, transform=[split.train, tokenize], repeat=False)},
            evals={"val": ol.Eval(sources={"web": ol.Jsonl(files, transform=[split.held_out, tokenize])})},
            batch=ol.Batch(tokens=256, sequence_length=64),
            num_workers=0,
        )
        with ol.start(job) as loader:
            client = loader.client(0, timeout_s=30)
            return texts_of(client), texts_of(client.evaluate("val"))

    write("a.jsonl", range(100))
    train, held_out = read()
    assert len(train) + len(held_out) == 100
    assert not train & held_out
    write("0-new.jsonl", range(100, 150))
    more_train, more_held_out = read()
    assert more_train >= train
    assert more_held_out >= held_out
    assert len(more_train) + len(more_held_out) == 150


def texts_of(steps) -> set[str]:
    found = set()
    for step in steps:
        for micro in step:
            for start, length in zip(micro["document_starts"], micro["document_lengths"], strict=True):
                found.add(bytes(np.asarray(micro["tokens"])[start : start + length].tolist()).decode())
    return found


@pytest.mark.parametrize("fraction", [0, 1, -0.5, "0.1", True])
def test_a_fraction_lies_between_0_and_1(fraction):
    with pytest.raises(SpecError, match="the fraction of a Split is a number between 0 and 1"):
        ol.Split(fraction, by="text")


def test_a_split_needs_its_column_and_values():
    with pytest.raises(SchemaError, match=r"Split: no column 'id'; the columns are \['text'\]. A Split comes before"):
        side(ol.Split(0.1, by="id").train, ["a"])
    with pytest.raises(DataError, match="Split: 'text' is null"):
        side(ol.Split(0.1, by="text").train, ["a", None])
    with pytest.raises(SpecError, match="by the name of a column"):
        ol.Split(0.1, by="")
    with pytest.raises(SpecError, match="the seed of a Split is a whole number"):
        ol.Split(0.1, "7", by="text")  # pyright: ignore[reportArgumentType]
