"""Transforms: calling them, lineage, schemas, errors, and those that are built in."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.checkpoint.description import Describer
from overlord.checkpoint.first_release import first_description
from overlord.chunks.bad_rows import BadRowLog
from overlord.chunks.transforms.apply import InProcesses, Reporter, Transforms
from overlord.chunks.transforms.outcome import ORIGIN, Context
from overlord.chunks.transforms.per_row import per_row
from overlord.chunks.transforms.pick import Pick
from overlord.chunks.transforms.tokenize import ByteTokenizer, Tokenize
from overlord.declare.source import BadRows
from overlord.errors import BadRowError, DataError, SchemaError, SpecError
from overlord.sources.column_types import has_null_type
from overlord.stream.facts import Ints

CONTEXT = Context("web", 3, 17)


def in_file(origin: int) -> tuple[str, int]:
    return "part.parquet", origin


def reporter(policy: BadRows | None = None) -> Reporter:
    return Reporter(BadRowLog("web", policy or BadRows("fail")), in_file)


def log_of(to: Reporter) -> BadRowLog:
    assert isinstance(to.log, BadRowLog)
    return to.log


def numbers(count: int) -> pa.Table:
    return pa.table({"n": np.arange(count)})


def run(table: pa.Table, *transforms: Callable[..., pa.Table], to: Reporter | None = None) -> tuple[pa.Table, Ints]:
    return Transforms(transforms).run(table, CONTEXT, np.arange(table.num_rows), to or reporter())


# Randomness


def test_a_rows_generator_is_the_same_in_every_process_and_on_every_platform() -> None:
    code = "import overlord as ol; print(ol.Context('web', 3, 17).rng(5).bit_generator.random_raw())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(out) == CONTEXT.rng(5).bit_generator.random_raw() == 4717839096334225847


def test_generators_differ_in_every_part_of_their_key() -> None:
    contexts = [CONTEXT, Context("w", 3, 17), Context("web", 4, 17), Context("web", 3, 18), Context("web", 3, 17, 1)]
    drawn = [context.rng(row).integers(0, 2**62) for context in contexts for row in (0, 1)]
    assert len(set(drawn)) == len(drawn)


# Calling


def test_a_transform_is_given_the_context_only_if_it_takes_two_arguments() -> None:
    def plain(table: pa.Table, suffix: str = "!") -> pa.Table:
        return table.append_column("s", pa.array([suffix] * table.num_rows))

    def with_context(table: pa.Table, context: Context) -> pa.Table:
        return table.append_column("chunk", pa.array([context.chunk] * table.num_rows))

    table, _ = run(numbers(2), plain, with_context)
    assert table.to_pylist() == [{"n": 0, "s": "!", "chunk": 3}, {"n": 1, "s": "!", "chunk": 3}]


def test_a_transform_that_returns_no_table_is_named() -> None:
    with pytest.raises(SchemaError, match=r"must return a pyarrow.Table, it returned dict"):
        run(numbers(2), lambda table: {"n": 1})  # type: ignore[arg-type, return-value]


def test_a_transform_must_be_callable() -> None:
    with pytest.raises(SpecError, match=r"a function over a pyarrow.Table, got str"):
        Transforms(["tokenize"])  # type: ignore[list-item]


# Lineage


@given(st.lists(st.integers(0, 3), max_size=30), st.randoms(use_true_random=False))
def test_lineage_survives_dropping_repeating_and_reordering(copies: list[int], random: Any) -> None:
    origin = np.array(random.sample(range(1000), len(copies)), np.int64)
    table = pa.table({"n": origin, "copies": pa.array(copies, pa.int64())})

    def repeat(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for copy in range(row["copies"]):
            yield {"n": row["n"], "copy": copy}

    def reverse(part: pa.Table) -> pa.Table:
        return part.take(np.arange(part.num_rows)[::-1].copy())

    def even(part: pa.Table) -> pa.Table:
        return part.filter(part["n"].to_numpy() % 2 == 0) if part.num_rows else part

    made, where = Transforms([per_row(repeat), reverse, even]).run(table, CONTEXT, origin, reporter())
    expected = [n for n, times in zip(origin.tolist(), copies, strict=True) for _ in range(times) if n % 2 == 0]
    assert where.tolist() == expected[::-1]
    if expected:
        assert made["n"].to_pylist() == expected[::-1]


def test_a_function_that_forgets_the_hidden_column_keeps_lineage_if_it_keeps_the_count() -> None:
    _, where = run(numbers(3), lambda table: pa.table({"m": table["n"]}))
    assert where.tolist() == [0, 1, 2]


def test_lineage_ends_where_a_function_forgets_it_and_changes_the_count() -> None:
    def forget(table: pa.Table) -> pa.Table:
        return pa.table({"n": table["n"].to_pylist()[1:]})

    drawn: list[float] = []

    def draw(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        drawn.append(rng.random())
        return row

    _, where = run(numbers(4), forget, per_row(draw))
    assert where.tolist() == [-1, -1, -1]
    assert len(set(drawn)) == 3  # rows without lineage still have randomness of their own


def test_users_see_neither_the_hidden_column_in_rows_nor_in_the_result() -> None:
    seen: list[dict[str, Any]] = []
    table, _ = run(numbers(1), per_row(lambda row: seen.append(row) or row))
    assert seen == [{"n": 0}]
    assert table.column_names == ["n"]


def test_a_source_may_not_use_the_reserved_name() -> None:
    with pytest.raises(SchemaError, match="reserved"):
        run(pa.table({ORIGIN: [1]}), lambda table: table)


# Schemas


def test_another_schema_than_for_the_first_chunk_is_an_error_that_shows_both() -> None:
    kinds = iter([pa.int64(), pa.string()])
    transforms = Transforms([lambda table: pa.table({"a": table["n"].cast(next(kinds))})])
    transforms.run(numbers(2), CONTEXT, np.arange(2), reporter())
    with pytest.raises(SchemaError, match=r"returned \(a: string\) for chunk 3, but \(a: int64\) for chunk 3"):
        transforms.run(numbers(2), CONTEXT, np.arange(2), reporter())


def test_a_column_that_is_all_null_in_one_chunk_takes_the_type_it_has_in_others() -> None:
    transforms = Transforms([per_row(lambda row: {"s": "x" if row["n"] else None, "n": row["n"]})])
    parts = [transforms.run(part, CONTEXT, np.arange(1), reporter())[0] for part in (numbers(2).slice(1), numbers(1))]
    assert parts[1].schema == parts[0].schema == pa.schema({"s": pa.string(), "n": pa.int64()})


def test_a_chunk_of_which_nothing_is_left_has_the_schema_of_the_others() -> None:
    transforms = Transforms([per_row(lambda row: row if row["n"] else None)])
    transforms.run(numbers(2), CONTEXT, np.arange(2), reporter())
    table, where = transforms.run(numbers(1), CONTEXT, np.arange(1), reporter())
    assert table.schema == pa.schema({"n": pa.int64()})
    assert table.num_rows == len(where) == 0


@pytest.mark.strangers
def test_a_first_chunk_of_which_nothing_is_left_says_nothing_of_types() -> None:
    seen: list[int] = []

    def counted(table: pa.Table) -> pa.Table:
        seen.append(table.num_rows)
        return table

    transforms = Transforms([per_row(lambda row: row if row["n"] else None), counted])
    table, where = transforms.run(numbers(1), CONTEXT, np.arange(1), reporter())
    assert table.num_rows == len(where) == 0
    assert transforms.run(numbers(3), CONTEXT, np.arange(3), reporter())[0]["n"].to_pylist() == [1, 2]
    assert seen == [2], "a later function is not called with a table that has no columns"


def chunks_in_turn(values: list[Any], order: list[int], **options: Any) -> dict[int, pa.Table]:
    """What `per_row` makes of one value a chunk, made in some order."""
    transforms = Transforms([per_row(lambda row: {"v": values[row["n"]]}, **options)])
    one = {n: numbers(len(values)).slice(n, 1) for n in order}
    return {n: transforms.run(one[n], CONTEXT, np.arange(1), reporter())[0] for n in order}


@pytest.mark.strangers
@pytest.mark.parametrize(
    "values",
    [
        [[], [1, 2], None, [3]],
        [1, 0.5, None, 2**40],
        [{"a": 1}, {"b": "x"}, {"a": None}, {}],
        [np.array([1], np.int32), [2], [], np.array([3])],
    ],
)
def test_chunks_hold_the_same_values_whichever_is_made_first(values: list[Any]) -> None:
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 0, 2, 3]]
    made = [chunks_in_turn(values, order) for order in orders]
    for n in range(4):
        assert len({str(_without_nulls(tables[n]["v"].to_pylist())) for tables in made}) == 1
        own = pa.array([values[n]]).type
        if not has_null_type(own):
            assert {str(tables[n].schema.field("v").type) for tables in made} == {str(own)}


def _without_nulls(value: Any) -> Any:
    """Keys that a struct has only because other chunks have them are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in sorted(value.items()) if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.strangers
def test_declared_types_hold_in_every_chunk() -> None:
    kind = pa.list_(pa.float32())
    for order in ([0, 1, 2], [2, 1, 0]):
        tables = chunks_in_turn([[], [1, 2], [0.5]], order, types={"v": kind, "w": pa.string()})
        assert {str(table.schema) for table in tables.values()} == {str(pa.schema({"v": kind, "w": pa.string()}))}
    to = reporter(BadRows("skip"))
    table, _ = run(numbers(3), per_row(lambda row: {"v": row["n"] / 2}, types={"v": pa.int64()}), to=to)
    assert table["v"].to_pylist() == [0, 1]
    assert "column 'v' cannot hold float, its type is int64: 0.5 is not a whole number" in str(log_of(to).last_error)


@pytest.mark.strangers
def test_types_are_declared_by_a_decorator_too_and_checked() -> None:
    @per_row(types={"n": pa.int8()})
    def same(row: dict[str, Any]) -> dict[str, Any]:
        return row

    assert run(numbers(2), same)[0].schema == pa.schema({"n": pa.int8()})
    with pytest.raises(SpecError, match="types gives the column 'n' the type 'int'; a type is a pyarrow one"):
        per_row(lambda row: row, types={"n": "int"})  # type: ignore[dict-item]
    with pytest.raises(SpecError, match="types is a dict of columns and their types, got list"):
        per_row(lambda row: row, types=["n"])  # type: ignore[arg-type]


@pytest.mark.strangers
def test_types_that_no_type_holds_are_refused_with_both_chunks_and_the_way_out() -> None:
    with pytest.raises(SchemaError, match=r"\(v: string\) for chunk 3, but \(v: int64\).*types=\{\.\.\.\}"):
        chunks_in_turn([1, "x"], [0, 1])


@pytest.mark.strangers
def test_the_fingerprint_knows_declared_types_and_is_as_before_without_them() -> None:
    def same(row: dict[str, Any]) -> dict[str, Any]:
        return row

    assert first_description(per_row(same), {}) == f"PerRow(fn={same.__qualname__}, wants_rng=False)"
    bare, typed, other = (Describer().text(per_row(same, types=t), "t") for t in ({}, {"n": pa.int8()}, {"n": pa.int16()}))
    assert len({bare, typed, other}) == 3


@pytest.mark.strangers
def test_tensors_and_arrays_of_any_shape_come_out_of_a_row_function() -> None:
    torch = pytest.importorskip("torch")
    cases = [
        (torch.tensor([1, 2]), [1, 2], pa.list_(pa.int64())),
        (torch.tensor([1, 2], dtype=torch.int32), [1, 2], pa.list_(pa.int32())),
        (torch.tensor(0.5, requires_grad=True), 0.5, pa.float32()),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]], pa.list_(pa.list_(pa.int64()))),
        ({"a": torch.tensor([1]), "b": [torch.tensor(2)]}, {"a": [1], "b": [2]}, None),
        (np.array(7, np.int16), 7, pa.int16()),
        (np.float32(0.5), 0.5, pa.float32()),
        (np.zeros((1, 1, 2)), [[[0.0, 0.0]]], pa.list_(pa.list_(pa.list_(pa.float64())))),
        (torch.zeros(0, dtype=torch.int64), [], pa.list_(pa.int64())),
    ]
    for value, expected, kind in cases:
        table, _ = run(numbers(2), per_row(lambda row, value=value: {"v": value}))
        assert table["v"].to_pylist() == [expected, expected]
        assert kind is None or table["v"].type == kind
    table, _ = run(numbers(2), per_row(lambda row: {"v": torch.arange(row["n"])}, types={"v": pa.list_(pa.int32())}))
    assert table["v"].to_pylist() == [[], [0]]


@pytest.mark.strangers
def test_a_chunk_without_any_text_is_tokenized_whether_it_is_the_first_or_not() -> None:
    for order in ([0, 1], [1, 0]):
        texts = per_row(lambda row: {"text": "ab" if row["n"] else None})
        transforms = Transforms([texts, Tokenize(encoding=ByteTokenizer())])
        made = {n: transforms.run(numbers(2).slice(n, 1), CONTEXT, np.arange(1), reporter())[0] for n in order}
        assert [made[n]["tokens"].to_pylist() for n in (0, 1)] == [[[]], [[97, 98]]]


# Errors


def refuse(*bad: int) -> Callable[[pa.Table], pa.Table]:
    def check(table: pa.Table) -> pa.Table:
        for n in table["n"].to_pylist():
            if n in bad:
                raise KeyError(f"no entry for {n}")
        return table

    return check


def refuse_rows(*bad: int) -> Callable[..., pa.Table]:
    @per_row
    def check(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] in bad:
            raise KeyError(f"no entry for {row['n']}")
        return row

    return check


def test_under_fail_the_users_own_exception_is_raised_and_says_where() -> None:
    with pytest.raises(KeyError, match="no entry for 5") as caught:
        run(numbers(9), refuse(5))
    note = caught.value.__notes__[-1]
    assert "refuse.<locals>.check of source 'web', chunk 3" in note
    assert "from part.parquet, row 0 to part.parquet, row 8" in note


def test_under_fail_an_error_of_a_row_function_names_the_row() -> None:
    with pytest.raises(KeyError) as caught:
        run(numbers(9), refuse_rows(5))
    assert caught.value.__notes__[-1].endswith("chunk 3, part.parquet, row 5")


@given(st.sets(st.integers(0, 39), max_size=40), st.sampled_from([refuse, refuse_rows]))
def test_under_skip_exactly_the_bad_rows_are_dropped(bad: set[int], make: Callable[..., Any]) -> None:
    to = reporter(BadRows("skip"))
    table, where = run(numbers(40), make(*bad), to=to)
    left = [n for n in range(40) if n not in bad]
    assert where.tolist() == left
    assert log_of(to).num_dropped == len(bad)
    if left:
        assert table["n"].to_pylist() == left


def test_a_spent_budget_stops_the_search_for_bad_rows() -> None:
    calls: list[int] = []

    def fail(table: pa.Table) -> pa.Table:
        calls.append(table.num_rows)
        raise ValueError("always")

    with pytest.raises(BadRowError, match=r"4 bad rows are more than its budget of 3; the last is part.parquet, row 3"):
        run(numbers(1024), fail, to=reporter(BadRows("skip", budget=3)))
    assert len(calls) < 30


def test_a_missing_column_is_never_pinned_on_rows() -> None:
    to = reporter(BadRows("skip"))
    with pytest.raises(SchemaError, match="no column 'text'; the columns are \\['n'\\]"):
        run(numbers(4), Pick("text"), to=to)
    assert log_of(to).num_dropped == 0


def test_a_row_that_does_not_fit_its_column_is_a_bad_row() -> None:
    to = reporter(BadRows("skip"))
    table, where = run(numbers(3), per_row(lambda row: {"v": "text" if row["n"] == 1 else row["n"]}), to=to)
    assert table["v"].to_pylist() == [0, 2]
    assert where.tolist() == [0, 2]
    assert "column 'v' cannot hold str" in str(log_of(to).last_error)


def test_a_row_function_may_leave_keys_out_or_add_them() -> None:
    table, _ = run(numbers(3), per_row(lambda row: {"a": 1} if row["n"] == 0 else {"b": row["n"]}))
    assert table.to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": 1}, {"a": None, "b": 2}]


def test_a_row_function_that_returns_something_else_is_a_bad_row() -> None:
    with pytest.raises(TypeError, match="returns a dict, None or dicts, not int"):
        run(numbers(1), per_row(lambda row: 3))  # type: ignore[arg-type, return-value]


def test_a_row_function_can_be_called_directly() -> None:
    assert refuse_rows(5)(numbers(3), CONTEXT).to_pylist() == numbers(3).to_pylist()
    with pytest.raises(KeyError):
        refuse_rows(1)(numbers(3), CONTEXT)


# Pick


def test_pick_selects_renames_and_orders() -> None:
    table, where = run(pa.table({"a": [1], "b": [2], "c": [3]}), Pick("c", first="a"))
    assert table.to_pylist() == [{"c": 3, "first": 1}]
    assert table.column_names == ["c", "first"]
    assert where.tolist() == [0]


def test_pick_refuses_nothing_and_the_same_name_twice() -> None:
    with pytest.raises(SpecError, match="at least one column"):
        Pick()
    with pytest.raises(SpecError, match="names 'a' twice"):
        Pick("a", a="b")


# Tokenize

texts = st.lists(st.none() | st.text(max_size=20), max_size=20)


@given(texts, st.none() | st.integers(0, 9), st.none() | st.integers(0, 9), st.integers(0, 3))
def test_tokens_are_the_encoding_between_bos_and_eos(
    column: list[str | None], bos: int | None, eos: int | None, cut: int
) -> None:
    table = pa.table({"text": pa.array([*("x" * cut), *column], pa.string())}).slice(cut)
    before, after = [bos] if bos is not None else [], [eos] if eos is not None else []
    expected = [[*before, *(text or "").encode(), *after] for text in column]
    for encoding in (ByteTokenizer(), lambda text: list(text.encode())):
        made = Tokenize(encoding=encoding, bos=bos, eos=eos)(table)
        assert made.schema == pa.schema({"tokens": pa.list_(pa.int32())})
        assert made["tokens"].to_pylist() == expected


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_every_kind_of_text_column_is_read_whatever_its_chunks(kind: pa.DataType) -> None:
    column = pa.chunked_array([pa.array(["ab", None], kind), pa.array(["c"], kind)])
    made = Tokenize("body", "ids", encoding=ByteTokenizer(), keep=["n"])(pa.table({"body": column, "n": [1, 2, 3]}))
    assert made.to_pylist() == [{"ids": [97, 98], "n": 1}, {"ids": [], "n": 2}, {"ids": [99], "n": 3}]


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 10, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_and_its_object_give_the_same_tokens(tokenizer_file: Path) -> None:
    import tokenizers

    loaded = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    table = pa.table({"text": ["the cat", "", "sat on the mat"]})
    by_path = Tokenize(encoding=tokenizer_file)(table)
    assert by_path["tokens"].to_pylist() == [loaded.encode(text).ids for text in table["text"].to_pylist()]
    assert Tokenize(encoding=str(tokenizer_file))(table) == Tokenize(encoding=loaded)(table) == by_path


def test_tokenize_pickles_by_name_and_loads_again(tokenizer_file: Path) -> None:
    tokenize = Tokenize(encoding=tokenizer_file, eos=0)
    table = pa.table({"text": ["the cat"]})
    tokenize(table)
    pickled = pickle.dumps(tokenize)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)(table) == tokenize(table)


def test_threads_may_share_a_tokenizer(tokenizer_file: Path) -> None:
    tokenize = Tokenize(encoding=tokenizer_file)
    tables = [pa.table({"text": ["the cat sat"] * n}) for n in range(1, 9)]
    results: dict[int, pa.Table] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: tokenize(tables[i])})) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[i] == tokenize(tables[i]) for i in range(8))


def test_a_tiktoken_encoding_treats_special_tokens_as_text() -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    encoding = tiktoken.Encoding("tiny", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={"<end>": 300})
    texts = ["the <end>", ""]
    made = Tokenize(encoding=encoding, eos=300)(pa.table({"text": texts}))
    assert made["tokens"].to_pylist() == [[*encoding.encode_ordinary(text), 300] for text in texts]
    assert made["tokens"][0].as_py()[0] == 257


def test_tokenize_names_what_is_wrong() -> None:
    table = pa.table({"body": ["a"], "n": [1]})
    with pytest.raises(SchemaError, match=r"no column 'text'; the columns are \['body', 'n'\]"):
        Tokenize(encoding=ByteTokenizer())(table)
    with pytest.raises(SchemaError, match="column 'n' must be text, it is int64"):
        Tokenize("n", encoding=ByteTokenizer())(table)
    with pytest.raises(SpecError, match=r"there is no tokenizer file no/tokenizer.json"):
        Tokenize("body", encoding="no/tokenizer.json")(table)
    with pytest.raises(SpecError, match="got int"):
        Tokenize(encoding=3)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"keep=\('url',\)"):
        Tokenize(encoding=ByteTokenizer(), keep="url")
    with pytest.raises(SpecError, match="eos is a token id"):
        Tokenize(encoding=ByteTokenizer(), eos=-1)


def test_an_unknown_tiktoken_name_lists_those_that_exist() -> None:
    pytest.importorskip("tiktoken")
    with pytest.raises(SpecError, match=r"no encoding 'gpt17'; it has .*cl100k_base"):
        Tokenize(encoding="gpt17")(pa.table({"text": ["a"]}))


def test_a_transform_marked_for_processes_runs_here_when_there_is_no_pool() -> None:
    table, where = run(numbers(4), InProcesses(per_row(lambda row: row if row["n"] % 2 else None)))
    assert table["n"].to_pylist() == where.tolist() == [1, 3]


@pytest.mark.strangers
@pytest.mark.parametrize("rows", [[1, 2], [1, 0], [0, 1]])
def test_a_row_without_columns_is_a_bad_row_whatever_is_beside_it(rows: list[int]) -> None:
    def emptied(row: dict[str, Any]) -> dict[str, Any]:
        return {} if row["a"] else row

    table = pa.table({"a": rows})
    with pytest.raises(DataError, match=r"returned \{\}, a row without columns; return None to drop a row"):
        per_row(emptied)(table, Context("s", 0, 0))
    declared = per_row(emptied, types={"a": pa.int64()})(table, Context("s", 0, 0))
    assert declared["a"].to_pylist() == [None if a else 0 for a in rows]
