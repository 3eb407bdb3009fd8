"""Bad input on a whole run: a clear error that says where and what to do, and nothing lost when it is set aside."""

import json
from collections.abc import Callable
from itertools import islice
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from tests.small_sources import Numbered, job_of, read_all, same, tokens_of

untyped: Any = ol  # for calls that types forbid

LENGTHS = [3, 0, 20, 5, 0, 33, 1]
"""Documents of one file: two are empty, two longer than 16 tokens."""


@pytest.fixture
def documents(tmp_path):
    path = tmp_path / "documents.parquet"
    lists = [np.arange(length, dtype=np.int32) + 1000 * (i + 1) for i, length in enumerate(LENGTHS)]
    pq.write_table(pa.table({"tokens": pa.array(lists, pa.list_(pa.int32()))}), path)
    return ol.Parquet(str(path), repeat=False)


def run(source: ol.Source, policy: Any) -> tuple[list[int], dict[str, int]]:
    batch = ol.Batch(tokens=64, sequence_length=16, long_documents=policy)
    with ol.start(job_of({"docs": source}, batch)) as loader:
        tokens = np.concatenate([tokens_of(step) for step in loader.client(0)])
        return sorted(tokens.tolist()), loader.report().documents["docs"]


def tokens_up_to(most: int, longest: int | None = None) -> list[int]:
    return sorted(
        1000 * (i + 1) + place
        for i, length in enumerate(LENGTHS)
        if longest is None or length <= longest
        for place in range(min(length, most))
    )


def test_long_documents_are_split_without_losing_a_token(documents):
    assert run(documents, "split") == (tokens_up_to(1000), {"empty": 2, "split": 2})


def test_long_documents_are_truncated_and_counted(documents):
    assert run(documents, "truncate") == (tokens_up_to(16), {"empty": 2, "truncated": 2})


def test_long_documents_are_dropped_and_counted(documents):
    assert run(documents, "drop") == (tokens_up_to(1000, longest=16), {"empty": 2, "dropped": 2})


def test_a_long_document_can_be_an_error_that_names_file_and_row(documents):
    message = r"source 'docs': .*documents.parquet.*, row 2: a document of 20 tokens is longer than sequence_length 16; set"
    with pytest.raises(ol.errors.DataError, match=message):
        run(documents, "fail")


def test_a_split_document_keeps_the_label_across_the_cut(documents):
    batch = ol.Batch(samples=20, sequence_length=16, long_documents="split")
    with ol.start(job_of({"docs": documents}, batch)) as loader:
        step = next(loader.client(0))
        labels = np.concatenate([micro["labels"] for micro in step])
        assert sorted(labels[labels != -100].tolist()) == sorted(
            1000 * (i + 1) + place for i, length in enumerate(LENGTHS) for place in range(1, length)
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: job_of({"a": Numbered()}, mixture=ol.Mixture({"a": 1, "typo": 2})), r"gives a weight to 'typo', but"),
        (lambda: ol.Mixture({"a": -1}), r"the weight of 'a' at step 0 must be a number >= 0, got -1"),
        (lambda: ol.Mixture({"a": 0}), r"at step 0 every weight is 0"),
        (lambda: ol.Mixture({5: {"a": 1}}), r"must begin at step 0, it begins at 5"),
        (lambda: ol.Batch(sequence_length=16), r"a Batch needs tokens=... or samples=..."),
        (lambda: ol.Batch(tokens=100, sequence_length=16), r"100 is not a multiple of 16; the nearest is 96"),
        (lambda: ol.Mesh(dp=0), r"mesh size dp must be at least 1, got 0"),
        (lambda: job_of({}), r"a job needs at least one source"),
        (lambda: cast("Any", job_of)({"a": "data/*.parquet"}), r"source 'a' must be an overlord.Source, got str"),
        (lambda: Numbered(window=0), r"window is a number of units, at least 1, got 0"),
        (
            lambda: job_of(
                {"a": Numbered(repeat=False), "b": Numbered()},
                mixture=ol.Mixture({"a": 1, "b": 1}, stop="all_exhausted"),
            ),
            r"'a' are finite and the others repeat for ever",
        ),
        (lambda: ol.policies.BadRows("quarantine"), r"quarantine needs a file"),
    ],
)
def test_a_wrong_declaration_is_refused_when_it_is_made(make, message):
    with pytest.raises(ol.errors.SpecError, match=message):
        make()


def test_a_mesh_that_does_not_fit_the_world_says_the_sizes():
    message = r"dp=2 x cp=2 x tp=1 x pp=1 has 4 ranks, but the world has 8"
    with pytest.raises(ol.errors.SpecError, match=message):
        ol.start(job_of({"a": Numbered()}, mesh=ol.Mesh(dp=2, cp=2)), world_size=8)


def test_a_source_without_the_token_column_says_what_it_has():
    job = job_of({"a": Numbered(first=1, tokens="input_ids")})
    with (
        ol.start(job) as loader,
        pytest.raises(ol.errors.SchemaError, match=r"source 'a' has no column 'input_ids'.*it has \['tokens'"),
    ):
        next(loader.client(0))


def test_text_where_tokens_should_be_is_told_how_to_tokenise():
    def as_text(table: pa.Table) -> pa.Table:
        return pa.table({"tokens": ["text"] * table.num_rows})

    job = job_of({"a": Numbered(first=1, transform=as_text)})
    with (
        ol.start(job) as loader,
        pytest.raises(ol.errors.SchemaError, match=r"must be a list of integers, it is string; tokenise"),
    ):
        next(loader.client(0))


def test_a_transform_that_raises_is_named_with_source_chunk_and_rows():
    def divide(table: pa.Table) -> pa.Table:
        raise ZeroDivisionError("by nothing")

    job = job_of({"a": Numbered(first=1, transform=divide)})
    with ol.start(job) as loader, pytest.raises(ZeroDivisionError) as caught:
        next(loader.client(0))
    notes = "\n".join(caught.value.__notes__)
    assert "divide of source 'a', chunk 0" in notes
    assert "numbered" in notes
    assert "data-parallel group 0 built step 0" in notes


def test_a_transform_that_changes_its_schema_says_both():
    def moody(table: pa.Table, context: ol.Context) -> pa.Table:
        return table if context.chunk == 0 else table.drop_columns(["document"])

    job = job_of({"a": Numbered(first=1, transform=moody)})
    with (
        ol.start(job) as loader,
        pytest.raises(ol.errors.SchemaError, match=r"moody of source 'a' returned .* for chunk 1, but .*document"),
    ):
        list(islice(loader.client(0), 20))


def test_bad_rows_are_quarantined_and_nothing_else_is_lost(tmp_path):
    listing = tmp_path / "bad.jsonl"

    @ol.per_row
    def picky(row: dict) -> dict:
        if row["document"] % 10 == 3:
            raise ValueError(f"document {row['document']} is odd")
        return row

    source = Numbered(
        rows=40, first=1, repeat=False, transform=picky, on_bad_row=ol.policies.BadRows("quarantine", path=str(listing))
    )
    with ol.start(job_of({"a": source})) as loader:
        tokens = np.concatenate([tokens_of(step) for step in loader.client(0)])
        assert {int(t) // 1000 for t in tokens} == {d for d in range(1, 41) if d % 10 != 3}
        assert loader.report().bad_rows == {"a": 4}
    listed = [json.loads(line) for line in listing.read_text().splitlines()]
    assert sorted(entry["error"] for entry in listed) == [f"ValueError: document {d} is odd" for d in (13, 23, 3, 33)]
    assert all(entry["source"] == "a" and entry["file"].startswith("numbered") and entry["row"] >= 0 for entry in listed)


def test_more_bad_rows_than_the_budget_stop_the_run():
    @ol.per_row
    def hopeless(row: dict) -> dict:
        raise ValueError("no")

    source = Numbered(rows=40, first=1, transform=hopeless, on_bad_row=ol.policies.BadRows("skip", budget=3))
    with (
        ol.start(job_of({"a": source})) as loader,
        pytest.raises(ol.errors.BadRowError, match=r"\d+ bad rows are more than its budget of 3"),
    ):
        next(loader.client(0))


def test_a_source_without_data_is_an_error_at_the_start():
    with pytest.raises(ol.errors.SourceError, match=r"source 'a' has no data"):
        ol.start(job_of({"a": Numbered(rows=0)}))


def test_an_empty_glob_names_the_source_and_the_pattern(tmp_path):
    with pytest.raises(ol.errors.SourceError, match=r"nothing\*\.parquet") as caught:
        ol.start(job_of({"web": ol.Parquet(f"{tmp_path}/nothing*.parquet")}))
    assert any("source 'web'" in note for note in caught.value.__notes__)


def test_units_with_different_columns_in_one_chunk_say_which():
    class TwoFaced(Numbered):
        def read(self, unit: ol.Unit) -> pa.Table:
            table = super().read(unit)
            return table.drop_columns(["document"]) if unit.index % 2 else table

    job = job_of({"a": TwoFaced(first=1, window=2, shuffle=False)})
    with (
        ol.start(job) as loader,
        pytest.raises(ol.errors.SchemaError, match=r"numbered#1 has the columns .* but numbered has .*document"),
    ):
        next(loader.client(0))


# Types that are inferred from the rows at hand


def rare(row: dict) -> dict | None:
    """Rows of one unit in eight; the others are dropped."""
    return {"tokens": row["tokens"], "half": row["document"] / 2} if row["document"] <= 5 else None


def hollow(row: dict) -> dict:
    """Empty documents and nulls but in one unit of eight, and numbers that are whole in most units."""
    some = row["document"] <= 5
    return {"tokens": row["tokens"] if some else [], "half": row["document"] / 2 if some else None}


@pytest.mark.strangers
@pytest.mark.parametrize("fn", [rare, hollow])
@pytest.mark.parametrize("window", [1, 3])
def test_a_row_function_that_leaves_nothing_of_most_chunks_runs_under_any_seed_and_from_any_state(fn, window):
    for seed in range(12):
        source = Numbered(rows=40, unit_rows=5, first=1, window=window, transform=ol.per_row(fn))
        job = job_of({"a": source}, ol.Batch(samples=2, sequence_length=16, columns=("half",)), seed=seed, num_workers=0)
        whole, _ = read_all(job, 10)
        assert len(whole) == 10
        with ol.start(job) as loader:
            states = [loader.state_before(step) for step in (3, 8)]
        for state in states:
            assert same(read_all(job, 10 - state["step"], resume=state)[0], whole[state["step"] :])


@pytest.mark.strangers
def test_a_source_of_which_a_row_function_leaves_nothing_is_an_error():
    job = job_of({"a": Numbered(rows=40, first=1, transform=ol.per_row(lambda row: None))})
    with ol.start(job) as loader, pytest.raises(ol.errors.DataError, match="'a' gave no usable row in a whole epoch"):
        next(loader.client(0))


def with_column(name: str, value: object, kind: pa.DataType | None = None) -> Callable[[pa.Table], pa.Table]:
    def add(table: pa.Table) -> pa.Table:
        return table.append_column(name, pa.array([value] * table.num_rows, kind))

    return add


@pytest.mark.strangers
@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ((3, pa.int64()), (0.5, pa.float64()), pa.float64()),
        (("x", pa.string()), ("y", pa.large_string()), pa.large_string()),
        (([1], pa.list_(pa.int32())), ([2], pa.large_list(pa.int64())), pa.large_list(pa.int64())),
        ((None, pa.null()), ("y", pa.string()), pa.string()),
    ],
    ids=["numbers", "text", "lists", "nulls"],
)
def test_a_column_that_sources_have_in_different_types_is_widened_without_changing_a_value(one, other, both, loaders):
    sources = {
        "a": Numbered(first=1, loaders=loaders, transform=with_column("v", *one)),
        "b": Numbered(first=101, transform=with_column("v", *other)),
    }
    with ol.start(job_of(sources, ol.Batch(samples=8, sequence_length=16, columns=("v", "document")))) as loader:
        types = set()
        for micro in (micro for step in islice(loader.client(0), 4) for micro in step):
            expected = [one[0] if document < 100 else other[0] for document in micro["document"].to_pylist()]
            assert micro["v"].to_pylist() == expected
            types |= {micro["v"].type} if one[0] in expected and other[0] in expected else set()
        assert types == {both}


@pytest.mark.strangers
@pytest.mark.parametrize("loaders", [1, 2])
def test_a_column_that_no_type_holds_for_two_sources_names_both_and_the_way_out(loaders):
    sources = {
        "a": Numbered(first=1, loaders=loaders, transform=with_column("v", 1)),
        "b": Numbered(first=101, transform=with_column("v", "x")),
    }
    message = r"the column 'v' is (int64|string) in source '[ab]'.* and (int64|string) in source '[ab]'.*ol\.Pick"
    with (
        ol.start(job_of(sources, ol.Batch(samples=8, sequence_length=16, columns=("v",)))) as loader,
        pytest.raises(ol.errors.SchemaError, match=message),
    ):
        next(loader.client(0))


@pytest.mark.strangers
def test_units_of_one_chunk_may_differ_in_what_their_rows_say_of_types():
    class Inferred(Numbered):
        def read(self, unit: ol.Unit) -> pa.Table:
            """As one writes it at first: every unit has the types that Arrow infers from its rows."""
            rows = super().read(unit).to_pylist()
            tokens = [[] if unit.index % 2 else row["tokens"] for row in rows]
            return pa.table({"tokens": tokens, "document": [row["document"] / (1 + unit.index % 3) for row in rows]})

    job = job_of({"a": Inferred(first=1, window=3, repeat=False)}, ol.Batch(samples=4, sequence_length=16))
    with ol.start(job) as loader:
        tokens = np.concatenate([tokens_of(step) for step in loader.client(0)])
    assert {int(t) // 1000 for t in tokens} == {d for d in range(1, 41) if (d - 1) // 5 % 2 == 0}


@pytest.mark.strangers
def test_units_of_one_chunk_whose_types_do_not_go_together_name_the_column_both_units_and_types():
    class TwoFaced(Numbered):
        def read(self, unit: ol.Unit) -> pa.Table:
            values: list[Any] = ["x" if unit.index else 0] * self.unit_rows
            return super().read(unit).append_column("v", pa.array(values))

    job = job_of({"a": TwoFaced(first=1, window=2, shuffle=False)})
    message = r"numbered#1 has the column 'v' as string, but numbered has it as int64; .*columns="
    with ol.start(job) as loader, pytest.raises(ol.errors.SchemaError, match=message):
        next(loader.client(0))


# What is handed over as text, or as something else that merely looks like a number


@pytest.mark.strangers
@pytest.mark.parametrize("rank", ["0", 0.0, True, None, b"0", np.float32(0)])
def test_a_rank_is_a_whole_number(rank):
    message = (
        r"rank must be a whole number, got .* \((str|float|bool|NoneType|bytes|float32)\)|rank must be a whole number, got"
    )
    with ol.start(job_of({"a": Numbered(first=1)})) as loader, pytest.raises(ol.errors.SpecError, match=message):
        loader.client(rank)
    with pytest.raises(ol.errors.SpecError, match=message):
        ol.connect("127.0.0.1:9", rank=rank, timeout_s=1.0)


@pytest.mark.strangers
def test_numpys_whole_numbers_are_ranks_and_sizes():
    mesh = untyped.Mesh(dp=np.int64(2), tp=np.int32(1))
    assert (type(mesh.dp), mesh) == (int, ol.Mesh(dp=2))
    with untyped.start(job_of({"a": Numbered(first=1)}, mesh=mesh), world_size=np.int64(2)) as loader:
        assert next(loader.client(np.int64(1))).number == 0


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda loader: loader.client(0, timeout_s="10"),
            r"timeout_s is a positive number of seconds or None, got '10' \(str\)",
        ),
        (
            lambda loader: loader.client(0, timeout_s=float("nan")),
            r"timeout_s is a positive number of seconds or None, got nan",
        ),
        (lambda loader: loader.client(0, timeout_s=True), r"timeout_s is a positive number .* got True \(bool\)"),
        (lambda loader: loader.client(0, torch="yes"), r"torch is True or False, got 'yes' \(str\)"),
        (lambda loader: loader.client(0, torch=True, pin_memory=1), r"pin_memory is True or False, got 1"),
        (
            lambda loader: loader.serve(leave_after_s="60"),
            r"leave_after_s is a positive number of seconds or None, got '60'",
        ),
        (lambda loader: loader.serve(leave_after_s=0), r"leave_after_s is a positive number of seconds or None, got 0"),
        (lambda loader: loader.serve(5000), r"an address is host:port, .* got 5000"),
        (lambda loader: loader.serve("127.0.0.1"), r"an address is host:port, .* got '127.0.0.1'"),
        (lambda loader: loader.serve("127.0.0.1:99999"), r"an address is host:port, .* got '127.0.0.1:99999'"),
        (lambda loader: loader.serve(token=b"secret"), r"a token is printable ASCII"),
        (lambda loader: loader.drain("1"), r"timeout_s is a number of seconds from 0 on, got '1'"),
        (lambda loader: loader.wait_for_leave(["0"], 1), r"rank must be a whole number, got '0' \(str\)"),
        (lambda loader: loader.resize({"dp": 2}), r"resize takes an overlord.Mesh, got {'dp': 2}"),
        (lambda loader: loader.resize(ol.Mesh(), timeout_s="1"), r"timeout_s is a number of seconds from 0 on, got '1'"),
        (lambda _: untyped.Mesh(dp="2"), r"mesh size dp must be a whole number, got '2' \(str\)"),
        (lambda _: untyped.Mesh(tp=2.0), r"mesh size tp must be a whole number, got 2.0"),
        (lambda _: ol.Mesh(cp=True), r"mesh size cp must be a whole number, got True \(bool\)"),
        (lambda _: untyped.Mesh(order="pdct"), r"mesh order must name pp, dp, cp and tp once each, got pdct"),
        (lambda _: untyped.start(job_of({"a": Numbered()}), world_size="1"), r"world_size must be a whole number, got '1'"),
        (lambda _: untyped.connect("127.0.0.1:9", rank=0, timeout_s="1"), r"timeout_s is a positive number .* got '1'"),
        (lambda _: untyped.connect("127.0.0.1:9", rank=0, torch="no"), r"torch is True or False, got 'no' \(str\)"),
        (lambda _: ol.connect("127.0.0.1", rank=0), r"an address is host:port, .* got '127.0.0.1'"),
        (lambda _: untyped.connect(None, rank=0), r"an address is host:port, .* got None"),
        (lambda _: untyped.connect("127.0.0.1:9", rank=0, tls_root=b"pem"), r"must be the path of a PEM file, got b'pem'"),
    ],
)
def test_what_a_run_is_asked_wrongly_is_said_at_once(call, message):
    with ol.start(job_of({"a": Numbered(first=1)})) as loader, pytest.raises(ol.errors.SpecError, match=message):
        call(loader)
