"""Everything Overlord raises on purpose.

    OverlordError
    ├── SpecError (ValueError)        a job, mixture, batch, mesh or source is declared wrongly
    ├── StateError (ValueError)       a saved state belongs to another job, or is damaged
    ├── DataError                     the data is not what was declared
    │   ├── SourceError               a file or object is missing, empty, truncated or unreadable
    │   ├── SchemaError               a column is missing or has another type
    │   └── BadRowError               a row is bad and the policy is to fail, or the budget is spent
    ├── StorageError (OSError)        storage did not answer after all retries
    ├── BufferTooSmallError           one chunk alone is larger than the buffer that must hold it
    ├── WaitTimeoutError (TimeoutError)   a batch did not come in time; says what was waited for
    ├── WorkerDiedError               a worker process died and could not be replaced
    ├── SharedUseError (RuntimeError)    a client or loader is used by two threads at once, or in a forked process
    ├── ServiceError (ConnectionError)    a service cannot be reached, or refuses the request
    └── ClosedError                   the loader or client was closed

Every message says the rule, the value given and the way out. Where it happened (source, file, row, step, rank)
is in the message or added as a note on the way up.
"""


class OverlordError(Exception):
    """Anything Overlord raises on purpose."""


class SpecError(OverlordError, ValueError):
    """Something is declared wrongly."""


class StateError(OverlordError, ValueError):
    """A saved state cannot continue this job."""


class DataError(OverlordError):
    """The data is not what was declared."""


class SourceError(DataError):
    """A file or object is missing, empty, truncated or unreadable."""


class SchemaError(DataError):
    """A column is missing or has another type than declared."""


class BadRowError(DataError):
    """A row is bad and the policy says fail, or too many rows were bad."""


class StorageError(OverlordError, OSError):
    """Storage did not answer after all retries."""


class BufferTooSmallError(OverlordError):
    """One chunk alone is larger than the buffer that must hold it."""


class WaitTimeoutError(OverlordError, TimeoutError):
    """A batch did not come in time."""


class WorkerDiedError(OverlordError):
    """A worker process died and could not be replaced."""


class SharedUseError(OverlordError, RuntimeError):
    """A client or a loader is used by two threads at once, or in a process that was forked from its own."""


class ServiceError(OverlordError, ConnectionError):
    """A service cannot be reached, or refuses the request."""


class ClosedError(OverlordError):
    """The loader or client was closed."""
