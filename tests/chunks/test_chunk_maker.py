"""What is checked when a chunk is made: token ids, loss masks, loss weights and columns; and what bad rows are called."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.chunks.bad_rows import BadRowLog
from overlord.chunks.chunk import Chunk
from overlord.chunks.chunk_maker import ChunkMaker

untyped: Any = ol  # for calls that types forbid

pytestmark = pytest.mark.strangers
SAMPLES = ol.Batch(samples=2, sequence_length=64)
INTEGERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]


def chunk_of(source: ol.Source, batch: ol.Batch = SAMPLES, bad_rows: BadRowLog | None = None) -> Chunk:
    return ChunkMaker(
        "web", source, source.units(), seed=0, batch=batch, bad_rows=bad_rows or BadRowLog("web", source.bad_rows)
    ).make(0)


def parquet(folder: Path, **columns: pa.Array) -> str:
    path = folder / "part.parquet"
    pq.write_table(pa.table(columns), path)
    return str(path)


def lists(values: Sequence[Any], kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(values, pa.list_(kind or pa.int32()))


def documents_of(chunk: Chunk) -> list[list[int]]:
    assert chunk.values is not None
    return sorted(chunk.values[begin:end].tolist() for begin, end in zip(chunk.begin, chunk.end, strict=True))


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_token_columns_of_every_integer_type_are_read_as_they_are(tmp_path: Path, kind: pa.DataType):
    source = ol.Parquet(parquet(tmp_path, tokens=lists([[1, 127], [], [3]], kind)), shuffle=False)
    assert documents_of(chunk_of(source)) == [[1, 127], [3]]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), 2**31),
        (pa.int64(), -(2**31) - 1),
        (pa.uint32(), 2**32 - 1),
        (pa.uint64(), 2**63 + 5),
        (pa.int8(), -3),
        (pa.int32(), -200),
        (pa.int64(), -100),
    ],
    ids=str,
)
def test_an_id_that_is_none_is_a_bad_row_with_its_file_and_row(tmp_path: Path, kind: pa.DataType, value: int):
    path = parquet(tmp_path, tokens=lists([[1, 2], [], [3, value, value], [4]], kind))
    with pytest.raises(
        ol.errors.BadRowError, match=rf"source 'web': .*part.parquet, row 2: token id {value} is .*on_bad_row='skip'"
    ):
        chunk_of(ol.Parquet(path))
    log = BadRowLog("web", ol.policies.BadRows("skip"))
    chunk = chunk_of(ol.Parquet(path, on_bad_row="skip"), bad_rows=log)
    assert documents_of(chunk) == [[1, 2], [4]]
    assert log.dropped == {(path, 2)}


def test_a_row_with_a_bad_id_is_quarantined_and_the_run_goes_on(tmp_path: Path):
    path, listed = parquet(tmp_path, tokens=lists([[1, 2], [3, -7], [4]])), tmp_path / "bad.jsonl"
    source = ol.Parquet(path, on_bad_row=ol.policies.BadRows("quarantine", path=str(listed)), repeat=False)
    with ol.start(ol.Job(sources={"web": source}, batch=SAMPLES)) as loader:
        tokens = [token for step in loader.client(0) for micro in step for token in micro["tokens"].tolist()]
    assert sorted(tokens) == [1, 2, 4]
    entry = json.loads(listed.read_text())
    assert (entry["source"], entry["file"], entry["row"]) == ("web", path, 1)
    assert "Batch(special_ids=(-7,))" in entry["error"]


def test_values_that_belong_to_no_row_are_not_looked_at():
    everything = lists([[-5], [1, 2], None, [3], [-6]])
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 1, 3, 4], pa.int32()), pa.array([7, -1, -2, 8]), mask=pa.array([False, True, False])
    )

    class Slices(ol.Source):
        def units(self) -> list[ol.Unit]:
            return [ol.Unit("part", 0), ol.Unit("part", 1)]

        def read(self, unit: ol.Unit) -> pa.Table:
            return pa.table({"tokens": hidden if unit.index else everything.slice(1, 3)})

    source = Slices(shuffle=False)
    makers = ChunkMaker("web", source, source.units(), seed=0, batch=SAMPLES, bad_rows=BadRowLog("web", source.bad_rows))
    assert [documents_of(makers.make(number)) for number in range(2)] == [[[1, 2], [3]], [[7], [8]]]


def test_special_ids_that_are_declared_take_no_loss_and_others_are_still_bad(tmp_path: Path):
    batch = ol.Batch(samples=2, sequence_length=64, special_ids=(-200,))
    source = ol.Parquet(parquet(tmp_path, tokens=lists([[5, -200, 6, 7, -200]])))
    chunk = chunk_of(source, batch)
    assert chunk.facts.loss_tokens.tolist() == [2]
    assert chunk.count_losses(np.array([0, 0]), np.array([0, 3]), np.array([3, 5])).tokens.tolist() == [2, 0]
    other = ol.Parquet(parquet(tmp_path, tokens=lists([[5, -200, -201]])))
    with pytest.raises(ol.errors.BadRowError, match="token id -201 is below 0"):
        chunk_of(other, batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: untyped.Batch(samples=1, sequence_length=8, special_ids=-200), r"write special_ids=\(-200,\)"),
        (lambda: ol.Batch(samples=1, sequence_length=8, special_ids=(7,)), r"from -2\*\*31 to -1, got 7"),
        (lambda: ol.Batch(samples=1, sequence_length=8, pad_token=2**31), r"pad_token is a token id that int32 can hold"),
        (lambda: ol.Batch(samples=1, sequence_length=8, image_token=2**40), r"image_token is a token id"),
        (lambda: untyped.Batch(samples=1, sequence_length=8, columns="score"), r"write columns=\('score',\)"),
        (lambda: ol.Batch(samples=1, sequence_length=8, columns=("a", "a")), r"columns names 'a' twice"),
        (lambda: untyped.Batch(samples=1, sequence_length=8, columns=(3,)), r"column names, got 3"),
        (lambda: untyped.Batch(samples=1, sequence_length=8, pad_to="max"), r"pad_to must be longest or sequence_length"),
        (lambda: ol.Parquet("x", null_columns="score"), r"write null_columns=\('score',\)"),
        (lambda: ol.Parquet("x", columns="score"), r"write columns=\('score',\)"),
        (lambda: ol.Parquet("x", loss_mask="m", loss_weights="w"), r"loss_mask='m' or loss_weights='w', not both"),
    ],
)
def test_an_option_that_is_given_wrongly_says_how_it_is_written(make, message):
    with pytest.raises(ol.errors.SpecError, match=message):
        make()


def test_names_may_be_given_as_a_list():
    assert untyped.Batch(samples=1, sequence_length=8, columns=["a", "b"]).columns == ("a", "b")


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int8(), pa.uint8(), pa.int64(), pa.float32()], ids=str)
def test_masks_of_every_type_are_taken_where_they_are_0_and_1(tmp_path: Path, kind: pa.DataType):
    mask = lists([[1, 0, 1], [1, 1]], pa.int64()).cast(pa.list_(kind))
    path = parquet(tmp_path, tokens=lists([[1, 2, 3], [4, 5]]), mask=mask)
    assert sorted(chunk_of(ol.Parquet(path, loss_mask="mask")).facts.loss_tokens.tolist()) == [1, 1]


@pytest.mark.parametrize(
    ("kind", "value"), [(pa.int64(), 3), (pa.int8(), -1), (pa.float64(), 0.5), (pa.int64(), 256)], ids=str
)
def test_weights_in_a_mask_are_refused_under_any_policy_with_the_way_out(tmp_path: Path, kind: pa.DataType, value: float):
    path = parquet(tmp_path, tokens=lists([[1], [2, 3]]), mask=lists([[1], [0, value]], kind))
    source = ol.Parquet(path, loss_mask="mask", on_bad_row="skip")
    with pytest.raises(
        ol.errors.DataError, match=rf"'web': .*row 1: loss_mask='mask' .* has {value}; .* loss_weights='mask'"
    ):
        chunk_of(source)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 1025.0])
def test_a_weight_that_is_none_is_a_bad_row(tmp_path: Path, value: float):
    path = parquet(tmp_path, tokens=lists([[1, 2], [2, 3]]), w=lists([[1, 0.5], [0, value]], pa.float64()))
    with pytest.raises(ol.errors.BadRowError, match=rf"row 1: a loss weight is a number from 0 to 1024, 'w' has {value}"):
        chunk_of(ol.Parquet(path, loss_weights="w"))
    assert documents_of(chunk_of(ol.Parquet(path, loss_weights="w", on_bad_row="skip"))) == [[1, 2]]


@pytest.mark.parametrize("option", ["loss_mask", "loss_weights"])
def test_a_mask_of_another_length_than_its_tokens_is_a_bad_row(tmp_path: Path, option: str):
    path = parquet(tmp_path, tokens=lists([[1, 2], [3, 4], [5]]), m=lists([[1, 1], [1], [1]]))
    named: dict[str, Any] = {option: "m"}
    with pytest.raises(ol.errors.BadRowError, match=r"row 1: 'm' must have one entry per token, it has 1 for 2 tokens"):
        chunk_of(ol.Parquet(path, **named))
    assert documents_of(chunk_of(ol.Parquet(path, **named, on_bad_row="skip"))) == [[1, 2], [5]]


def test_a_null_among_tokens_is_a_bad_row(tmp_path: Path):
    path = parquet(tmp_path, tokens=lists([[1, 2], [3, None], None]))
    with pytest.raises(ol.errors.BadRowError, match=r"row 1: 'tokens' has a null inside its list"):
        chunk_of(ol.Parquet(path))
    assert documents_of(chunk_of(ol.Parquet(path, on_bad_row="skip"))) == [[1, 2]]


class InMemory(ol.Source):
    """One unit with the table that the test gives it."""

    def __init__(self, table: pa.Table, **options: Any) -> None:
        super().__init__(**options)
        object.__setattr__(self, "table", table)

    def units(self) -> list[ol.Unit]:
        return [ol.Unit("memory")]

    def read(self, unit: ol.Unit) -> pa.Table:
        return self.table  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "column",
    [
        lists([[1, 2], [3]], pa.int64()).cast(pa.large_list(pa.int64())),
        pa.array([[1, 2], [3]], pa.list_view(pa.int32())),
        pa.array([[1, 2], [3]], pa.large_list_view(pa.int32())),
        pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), pa.array([1, 2, 3]).dictionary_encode()),
        pa.DictionaryArray.from_arrays(pa.array([1, 0]), lists([[3], [1, 2]])),
    ],
    ids=["large", "view", "large view", "list of dictionary", "dictionary of lists"],
)
def test_token_columns_of_every_kind_of_list_are_read(column: pa.Array):
    assert documents_of(chunk_of(InMemory(pa.table({"tokens": column})))) == [[1, 2], [3]]


def test_mask_and_tokens_that_lie_differently_in_memory_are_put_side_by_side():
    mask = lists([[9], [0, 1, 1], [1, 0]]).slice(1)
    chunk = chunk_of(InMemory(pa.table({"tokens": lists([[1, 2, 3], [4, 5]]), "m": mask}), loss_mask="m", shuffle=False))
    assert chunk.facts.loss_tokens.tolist() == [2, 0]


def test_truth_values_are_no_tokens():
    with pytest.raises(ol.errors.SchemaError, match="column 'tokens' must be a list of integers, it is list<item: bool>"):
        chunk_of(InMemory(pa.table({"tokens": lists([[True]], pa.bool_())})))


def test_a_column_that_a_source_does_not_have_is_an_error_that_lists_those_it_has(tmp_path: Path):
    path = parquet(tmp_path, text=pa.array(["ab", "c"]), score=pa.array([0.5, 1.0]))
    batch = ol.Batch(samples=2, sequence_length=8, columns=("score",))
    lost = ol.Parquet(path, transform=ol.Tokenize(encoding=ol.ByteTokenizer()))
    kept = ol.Parquet(path, transform=ol.Tokenize(encoding=ol.ByteTokenizer(), keep=("score",)))
    with pytest.raises(
        ol.errors.SchemaError,
        match=r"source 'web' has no column 'score', .* it has \['tokens'\]\..*null_columns=\('score',\)",
    ):
        next_step({"web": lost}, batch)
    assert sorted(next_step({"web": kept}, batch)["score"].to_pylist()) == [0.5, 1.0]
    typo = ol.Batch(samples=2, sequence_length=8, columns=("scroe",))
    with pytest.raises(ol.errors.SchemaError, match=r"no column 'scroe'"):
        next_step({"web": kept}, typo)


def test_a_source_may_say_that_it_has_no_such_column():
    table = pa.table({"tokens": lists([[1], [2]])})
    with_score = InMemory(table.append_column("score", pa.array([7, 8])), repeat=False)
    without = InMemory(pa.table({"tokens": lists([[3]])}), repeat=False, null_columns=("score",))
    batch = ol.Batch(samples=3, sequence_length=8, columns=("score",))
    step = next_step({"a": with_score, "b": without}, batch)
    assert dict(zip(step["tokens"].tolist(), step["score"].to_pylist(), strict=True)) == {1: 7, 2: 8, 3: None}


def next_step(sources: dict[str, ol.Source], batch: ol.Batch) -> ol.Step:
    with ol.start(ol.Job(sources=sources, batch=batch)) as loader:
        return next(loader.client(0))


def test_the_memory_of_a_chunk_counts_a_mask_that_was_made_for_it():
    tokens = lists([np.full(1000, 5), np.full(1000, -200)])
    batch = ol.Batch(samples=2, sequence_length=1000, special_ids=(-200,))
    plain = chunk_of(InMemory(pa.table({"tokens": tokens.slice(0, 1)})), batch)
    masked = chunk_of(InMemory(pa.table({"tokens": tokens.slice(1, 1)})), batch)
    assert masked.num_bytes >= plain.num_bytes + 1000


def test_a_chunk_of_several_units_holds_its_tokens_once(tmp_path: Path):
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"tokens": lists([[n] * 100 for n in range(40)])}), path, row_group_size=10)
    chunk = chunk_of(ol.Parquet(str(path), window=4))
    assert chunk.values is not None
    assert chunk.table.column("tokens").num_chunks == 1
    column: Any = chunk.table.column("tokens").chunk(0)
    assert np.shares_memory(chunk.values, column.values.to_numpy())
    assert 16_000 <= chunk.num_bytes < 20_000
