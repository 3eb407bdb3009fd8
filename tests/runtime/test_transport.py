"""Exceptions and tables arrive in another process as what they were."""

import pickle

import pyarrow as pa
import pytest

import overlord as ol
from overlord.runtime.transport import ErrorEnvelope, table_from_stream, table_to_stream


class TwoPartsError(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class NoMessageError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def raised(error: Exception) -> Exception:
    error.add_note("while looking for it")
    try:
        raise error
    except type(error) as caught:
        return caught


def travelled(envelope: ErrorEnvelope) -> ErrorEnvelope:
    return pickle.loads(pickle.dumps(envelope))


def test_an_exception_arrives_as_its_own_type_with_its_notes_and_its_traceback():
    error = travelled(ErrorEnvelope.pickling(raised(KeyError("gone")), "in a worker process")).open()
    assert type(error) is KeyError
    assert error.args == ("gone",)
    assert error.__notes__[0] == "while looking for it"
    assert error.__notes__[1].startswith("in a worker process:\nTraceback")
    assert "raise error" in error.__notes__[1]


def test_an_exception_that_passes_two_places_of_a_kind_tells_of_the_first():
    error = ErrorEnvelope.pickling(raised(KeyError("gone")), "raised in role", "loaders/0").open()
    error = ErrorEnvelope.pickling(error, "raised in role", "planner").open()
    assert [note.partition(":")[0] for note in error.__notes__] == ["while looking for it", "raised in role 'loaders/0'"]


@pytest.mark.parametrize("otherwise", [ol.OverlordError, ol.errors.DataError])
def test_an_exception_that_cannot_travel_is_named_and_keeps_its_notes(otherwise: type[ol.OverlordError]):
    error = travelled(ErrorEnvelope.pickling(raised(TwoPartsError("this", "that")), "in a worker process")).open(otherwise)
    assert type(error) is otherwise
    assert str(error) == "TwoPartsError: this and that"
    assert error.__notes__[0] == "while looking for it"


def test_an_exception_that_cannot_describe_itself_travels_all_the_same():
    envelope = ErrorEnvelope.pickling(raised(NoMessageError()), "in a worker process")
    assert type(envelope.open()) is NoMessageError
    assert str(ErrorEnvelope.of(NoMessageError()).open()) == "NoMessageError: its message cannot be shown: ValueError"


def test_without_pickle_our_own_errors_keep_their_type():
    error = ErrorEnvelope.of(raised(ol.errors.StateError("seed was 0, is 5"))).open()
    assert type(error) is ol.errors.StateError
    assert (str(error), error.__notes__) == ("seed was 0, is 5", ["while looking for it"])
    assert ErrorEnvelope.of(raised(KeyError("gone"))).pickled == b""


def test_a_name_of_the_module_of_errors_that_is_no_error_of_ours_is_not_called():
    assert type(ErrorEnvelope("annotations", "odd", ()).open()) is ol.OverlordError


def test_a_table_arrives_with_its_rows_and_its_schema():
    table = pa.table({"a": [1, None, 3], "b": ["x", "", "zz"]}).replace_schema_metadata({"k": "v"}).slice(1)
    found = table_from_stream(table_to_stream(table))
    assert found.equals(table, check_metadata=True)
