"""What crosses the border of a process: exceptions in envelopes, and tables as Arrow streams."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from overlord import errors
from overlord.errors import OverlordError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class ErrorEnvelope:
    """An exception on its way to another process. `open` returns it there.

    Between processes of one run it travels pickled, and arrives as its own type. Where that fails, and over the network,
    which carries no pickle, its type's name, its message and its notes travel in its place.
    """

    kind: str
    message: str
    notes: tuple[str, ...]
    pickled: bytes = b""

    @staticmethod
    def of(error: Exception) -> ErrorEnvelope:
        """Without the pickled exception: for processes that do not trust each other."""
        notes = tuple(str(note) for note in getattr(error, "__notes__", ()))
        return ErrorEnvelope(type(error).__name__, _message(error), notes)

    @staticmethod
    def pickling(error: Exception, place: str, name: str = "") -> ErrorEnvelope:
        """With the pickled exception, for processes of one run. Tracebacks do not travel, so a note has it as text, after
        the kind of place where the error was raised, such as "in a worker process", and the name of that place. An error
        that passes several places of one kind gets one note, in the first of them."""
        if not any(note.startswith(place) for note in getattr(error, "__notes__", ())):
            lines = "".join(traceback.format_exception(error)).rstrip()
            error.add_note(f"{place} {name!r}:\n{lines}" if name else f"{place}:\n{lines}")
        return replace(ErrorEnvelope.of(error), pickled=_pickled(error))

    def open(self, otherwise: type[OverlordError] = OverlordError) -> Exception:
        """The exception: of its own type where that travelled or is one of Overlord's, else an `otherwise` that names it."""
        if self.pickled:
            try:
                return pickle.loads(self.pickled)
            except Exception:  # noqa: BLE001 - its module may be missing in this process
                pass
        known = getattr(errors, self.kind, None)
        if isinstance(known, type) and issubclass(known, OverlordError):
            error = known(self.message)
        else:
            error = otherwise(f"{self.kind}: {self.message}" if self.message else self.kind)
        for note in self.notes:
            error.add_note(note)
        return error


def _message(error: Exception) -> str:
    try:
        return str(error)
    except Exception as failed:  # noqa: BLE001 - a user's exception may fail to describe itself in any way
        return f"its message cannot be shown: {type(failed).__name__}"


def _pickled(error: Exception) -> bytes:
    """Empty where the exception cannot travel."""
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(error)
        return pickled if isinstance(pickle.loads(pickled), Exception) else b""
    except Exception:  # noqa: BLE001 - a user's exception may fail to pickle in any way
        return b""


def table_to_stream(table: pa.Table) -> pa.Buffer:
    """The table as an Arrow IPC stream."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def table_from_stream(stream: pa.Buffer) -> pa.Table:
    """The table again, over the memory of the stream. Trusts its sender: it is not checked."""
    import pyarrow as pa

    return pa.ipc.open_stream(stream).read_all()
