"""The exceptions that Overlord raises on purpose.

    OverlordError
    ├── SpecError (ValueError)        a declaration (job, mixture, batch, mesh, source) or an argument is invalid
    ├── StateError (ValueError)       a saved state belongs to another job, or is damaged
    ├── DataError                     the data is not what was declared
    │   ├── SourceError               a file or object is missing, empty, truncated or unreadable
    │   ├── SchemaError               a column is missing or has another type
    │   └── BadRowError               a row is bad and the policy is to fail, or the budget is spent
    ├── StorageError (OSError)        storage did not answer after all retries
    ├── BufferTooSmallError           one chunk alone is larger than the buffer that must hold it
    ├── WaitTimeoutError (TimeoutError)   a step did not arrive in time; the message says what it waited for
    ├── WorkerDiedError               a worker process died and could not be replaced
    ├── SharedUseError (RuntimeError)    a client, loader or log is used twice at once, or in a forked process
    ├── ServiceError (ConnectionError)    a service cannot be reached, or refuses the request
    ├── RingError (ConnectionError)   a trainer rank that shares a document died, does not answer, or is in another ring
    └── ClosedError                   the loader or client was closed

Every message has the rule, the value given and the way out. The place (source, file, row, step, rank) is in the message, or
in a note that a caller adds.
"""


class OverlordError(Exception):
    """The base class of all exceptions that Overlord raises on purpose."""


class SpecError(OverlordError, ValueError):
    """A declaration or an argument is invalid."""


class StateError(OverlordError, ValueError):
    """A saved state belongs to another job, or is damaged."""


class DataError(OverlordError):
    """The data is not what was declared."""


class SourceError(DataError):
    """A file or object is missing, empty, truncated or unreadable."""


class SchemaError(DataError):
    """A column is missing or has another type than declared."""


class BadRowError(DataError):
    """A row is bad and the policy is to fail, or the budget of bad rows is spent."""


class StorageError(OverlordError, OSError):
    """Storage did not answer after all retries."""


class BufferTooSmallError(OverlordError):
    """One chunk alone is larger than the buffer that must hold it."""


class WaitTimeoutError(OverlordError, TimeoutError):
    """A step, or an answer, did not arrive within its timeout."""


class WorkerDiedError(OverlordError):
    """A worker process died and could not be replaced."""


class SharedUseError(OverlordError, RuntimeError):
    """A client or a loader is used by two threads at once, or in a forked process; or a log by two runs."""


class ServiceError(OverlordError, ConnectionError):
    """A service cannot be reached, or refuses the request."""


class RingError(OverlordError, ConnectionError):
    """A trainer rank that shares a document with this one died, does not answer, or is in another ring."""


class ClosedError(OverlordError):
    """The loader or client was closed."""
