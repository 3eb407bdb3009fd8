"""What a source is: units, rows, transforms and policies, as a user declares them."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from overlord.declare.arguments import column_names, whole
from overlord.declare.cache import Cache
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from overlord.declare.policies import LongDocuments


MIB = 1 << 20
DECLARED_BUFFER = "_declared_buffer_bytes"


@dataclass(frozen=True, slots=True)
class RowPart:
    """Some of the rows of a unit: those that one of `of` parts has."""

    index: int
    of: int
    is_strided: bool
    """Every `of`-th row, so that the rows of a part come from all over the unit; else a range of rows."""

    def rows(self, num_rows: int) -> range:
        """Its rows, of a unit with so many."""
        if self.is_strided:
            return range(self.index, num_rows, self.of)
        return range(num_rows * self.index // self.of, num_rows * (self.index + 1) // self.of)

    @staticmethod
    def with_row(row: int, num_rows: int, of: int, *, is_strided: bool) -> int:
        """The index of the part that has a row."""
        return row % of if is_strided else ((row + 1) * of - 1) // num_rows


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest piece of a source that is read at once: a row group, a tar shard, a byte range of JSONL."""

    path: str
    """The file or object that holds it."""
    index: int = 0
    """Its number among the units of that file."""
    num_rows: int | None = None
    """Rows in it, where they are known before it is read."""
    num_bytes: int = 0
    """Its size once decoded, for planning buffers; 0 where it is unknown."""
    detail: Any = None
    """Whatever `Source.read` needs to read it without another lookup, such as a footer or a byte range. It must pickle."""
    version: str = ""
    """The file's modification time or ETag: a state that was saved over another version is refused. Empty: not compared."""
    follows: bool = False
    """It is read quickly only after the unit before it: shuffling keeps such units in order, among those of other files."""
    whole: Unit | None = None
    """The unit that this one is a part of: it has its first `num_rows` rows (see `Source.max_rows`), or those of `part`."""
    part: RowPart | None = None
    """Rows are numbered as in the whole unit."""

    def __str__(self) -> str:
        return f"{self.path}#{self.index}" if self.index else self.path


@dataclass(frozen=True, slots=True)
class BadRows:
    """What to do with a row that cannot be read, transformed or decoded.

    `fail` stops the run at the first one. `skip` drops it and counts it. `quarantine` drops it and writes a JSON
    line with source, file, row and error to `path`. More than `budget` dropped rows in one source stop the run.
    """

    policy: Literal["fail", "skip", "quarantine"] = "fail"
    budget: int = 1000
    path: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.policy not in ("fail", "skip", "quarantine"):
            raise SpecError(f"on_bad_row must be fail, skip or quarantine, not {self.policy!r}")
        if self.budget < 0:
            raise SpecError(f"a bad-row budget cannot be negative, got {self.budget}")
        if self.policy == "quarantine" and not self.path:
            raise SpecError("quarantine needs a file: ol.policies.BadRows('quarantine', path='bad_rows.jsonl')")
        if self.path is not None:
            object.__setattr__(self, "path", os.path.expanduser(os.fspath(self.path)))


CHOSEN_TOKENS = "chosen_tokens"
"""The size of a sample that is a preference pair: the tokens of its chosen side, which come first. 0 for other samples."""
_SIZES_OF_PLANNING = (
    *("num_images", "image_height", "image_width", "image_pixels", "only_image"),
    *("loss_extra", "waiting_since", "waited_steps", CHOSEN_TOKENS),
)


@dataclass(frozen=True, slots=True)
class MadeColumns:
    """What a transform says of the rows it makes (its property `makes`), so that a source need not be told again."""

    loss_mask: str | None = None
    loss_weights: str | None = None
    pairs: str | None = None
    """The column with the number of tokens of the chosen side."""


def made_columns(transforms: Sequence[Callable[..., Any]]) -> MadeColumns | None:
    """What the transforms of a source say of its rows; None where they are plain documents. The last one counts."""
    found = None
    for transform in transforms:
        makes = getattr(getattr(transform, "fn", transform), "makes", None)
        found = makes if isinstance(makes, MadeColumns) else found
    return found


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of samples. For a format of your own, write a frozen dataclass with `units`, `read` and `identity`.

    Every reader (`Parquet`, `Jsonl`, ...) has these fields beside its own.
    """

    transform: Callable[..., pa.Table] | Sequence[Callable[..., pa.Table]] = ()
    """Functions over an Arrow table, applied to each chunk in order; see `overlord.chunks.transforms`."""
    decode: Any = None
    """A deferred transform (`ol.vision.DecodeImage`), run only for rows that a plan asks for."""
    tokens: str | None = "tokens"
    """The column with the token ids; None for a source without text."""
    loss_mask: str | None = None
    """A column of 0/1 per token: 0 means no loss on predicting that token."""
    loss_weights: str | None = None
    """A column of numbers per token, instead of `loss_mask`: what predicting that token counts in the loss. Batches then
    have a field of that name, and `step.loss_tokens` is the sum of the step's weights."""
    pairs: str | None = None
    """A column with a number of tokens: each row is a preference pair, the chosen side with so many tokens and then the
    rejected one. A pair is never cut or separated. `ol.PreferencePairs` makes such rows, and fills this in."""
    long_documents: LongDocuments | None = None
    """What to do with documents longer than sequence_length: the batch's policy unless given. Conversations and preference
    pairs are dropped and counted where that policy would cut them."""
    null_columns: Sequence[str] = ()
    """Those of `Batch.columns` that this source does not have: they are null for its samples."""
    size_columns: Sequence[str] = ()
    """Columns of whole numbers, one per row (frames of audio, say), that cost functions get as `samples.sizes[name]`: 0
    where null, and for sources without the column. Each piece of a cut document has those of the whole row."""
    repeat: bool | int = True
    """True: endless. False: one epoch. A number: that many epochs."""
    warn_epochs: bool | int = True
    """Log a warning, once and ahead, before the source is read more often than this many times. True: four times, where it
    repeats for ever and an epoch has a million tokens; where `repeat` ends it, before its end changes the mixture. False:
    never."""
    max_rows: int | None = None
    """The most rows to use, before transforms: the same ones in every epoch, run and evaluation. Files are taken in the
    order of a hash of their names, each from its beginning, and nothing else is read. For a share of the rows of every file,
    use `ol.Split`."""
    shuffle: bool = True
    """Permute units each epoch, and rows inside a chunk."""
    window: int | None = None
    """Units per chunk: rows are shuffled inside a chunk. Unless given, a shuffled source has as many as make 16 MiB (less
    with a small buffer, or with more than eight sources), but at least four chunks in an epoch, and rows of a large unit are
    transformed in several chunks."""
    buffer_bytes: int = 256 * MIB
    """The most memory that decoded chunks of this source may take."""
    loaders: int = 1
    """How many Source Loaders share the source. Changes who reads, never what."""
    cache: Cache | None = None
    """Keeps transformed rows, and bytes of remote storage, for later epochs and runs; `Job(cache=)` is for all sources."""
    on_bad_row: BadRows | Literal["fail", "skip"] = "fail"
    """What to do with rows that cannot be read, transformed or decoded; `ol.policies.BadRows` has a budget and a file."""

    def units(self) -> Sequence[Unit]:
        """The units of the source, in a stable order. Called once per run."""
        raise NotImplementedError(f"{type(self).__name__} must define units()")

    def read(self, unit: Unit) -> pa.Table:
        """The rows of one unit, in file order. It must return the same rows each time: Overlord may call it again, in
        another thread or process."""
        raise NotImplementedError(f"{type(self).__name__} must define read(unit)")

    def close(self) -> None:
        """Close files that `read` left open. Called when a loader of the source stops; another one may still be reading."""

    def decoded_bytes(self, unit: Unit) -> int:
        """About what a unit takes in memory; 0 where that is unknown."""
        return unit.num_bytes

    def identity(self) -> str:
        """Text that names everything the rows and their order depend on, for the fingerprint of a saved state. Without one,
        the class and all its fields count."""
        return type(self).__name__

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise SpecError(f"window is a number of units, at least 1, got {self.window}")
        if self.buffer_bytes < 1:
            raise SpecError(f"buffer_bytes must be positive, got {self.buffer_bytes}")
        if self.loaders < 1:
            raise SpecError(f"loaders must be at least 1, got {self.loaders}")
        if not isinstance(self.warn_epochs, bool):
            object.__setattr__(self, "warn_epochs", whole(self.warn_epochs, "warn_epochs", least=1))
        if self.max_rows is not None:
            object.__setattr__(self, "max_rows", whole(self.max_rows, "max_rows", least=1))
        if self.repeat is not True and self.repeat is not False and self.repeat < 1:
            raise SpecError(f"repeat is True, False or a number of epochs, got {self.repeat}")
        self._fill_from_transforms()
        if self.cache is not None and not isinstance(self.cache, Cache):
            raise SpecError(f"cache is an ol.Cache, got {self.cache!r}")
        if self.loss_mask is not None and self.loss_weights is not None:
            raise SpecError(
                f"a source has loss_mask={self.loss_mask!r} or loss_weights={self.loss_weights!r}, not both: a weight of 0 "
                "masks a token"
            )
        object.__setattr__(self, "null_columns", column_names(self.null_columns, "null_columns"))
        object.__setattr__(self, "size_columns", column_names(self.size_columns, "size_columns"))
        if taken := [name for name in self.size_columns if name in _SIZES_OF_PLANNING]:
            raise SpecError(
                f"size_columns names {taken[0]!r}, a size that planning computes itself; give the column another name"
            )
        if isinstance(self.on_bad_row, str):
            object.__setattr__(self, "on_bad_row", BadRows(self.on_bad_row))

    def _fill_from_transforms(self) -> None:
        """Take the columns of loss masks and pairs from the transforms that make them, and refuse to cut such rows."""
        if self.long_documents not in (None, "split", "truncate", "drop", "fail"):
            raise SpecError(f"long_documents must be split, truncate, drop or fail, not {self.long_documents!r}")
        made = made_columns(self.transforms)
        if made is not None and self.loss_mask is None and self.loss_weights is None:
            object.__setattr__(self, "loss_mask", made.loss_mask)
            object.__setattr__(self, "loss_weights", made.loss_weights)
        if made is not None and self.pairs is None:
            object.__setattr__(self, "pairs", made.pairs)
        if self.is_whole and self.long_documents == "split":
            raise SpecError(
                "long_documents='split' would cut conversations, and train on their later parts without the prompt: use "
                "'drop' or 'fail', or 'truncate' to keep their beginnings"
            )
        if self.pairs is not None and self.long_documents == "truncate":
            raise SpecError(
                "long_documents='truncate' would cut the rejected side off a preference pair: use 'drop' or 'fail'"
            )
        if self.pairs is not None and self.tokens is None:
            raise SpecError(f"pairs={self.pairs!r} are pairs of token sequences, but the source has tokens=None")

    @property
    def is_whole(self) -> bool:
        """Whether rows mean nothing without their beginning: conversations, and preference pairs."""
        return self.pairs is not None or made_columns(self.transforms) is not None

    def long_policy(self, of_batch: LongDocuments) -> LongDocuments:
        """What to do with documents that are too long, where the batch says `of_batch`."""
        if self.long_documents is not None:
            return self.long_documents
        return "drop" if self.is_whole and of_batch in ("split", "truncate") else of_batch

    def with_loaders(self, loaders: int, buffer_bytes: int) -> Self:
        """A copy with other loaders and another buffer. Subclasses may have constructors of their own, so none is called."""
        copied = copy.copy(self)
        object.__setattr__(copied, DECLARED_BUFFER, self.declared_buffer_bytes)
        object.__setattr__(copied, "loaders", loaders)
        object.__setattr__(copied, "buffer_bytes", buffer_bytes)
        return copied

    def with_cache(self, cache: Cache) -> Self:
        """A copy with a cache."""
        copied = copy.copy(self)
        object.__setattr__(copied, "cache", cache)
        return copied

    def without_warnings(self) -> Self:
        """A copy for reading beside a run, of whose epochs nobody is told."""
        copied = copy.copy(self)
        object.__setattr__(copied, "warn_epochs", False)
        return copied

    def with_window(self, window: int) -> Self:
        """A copy with so many units per chunk."""
        copied = copy.copy(self)
        object.__setattr__(copied, "window", window)
        return copied

    @property
    def declared_buffer_bytes(self) -> int:
        """The buffer before `with_loaders`, which must not change the stream."""
        return getattr(self, DECLARED_BUFFER, self.buffer_bytes)

    @property
    def units_per_chunk(self) -> int:
        """`window`, which `start` fills in."""
        return 1 if self.window is None else self.window

    @property
    def transforms(self) -> tuple[Callable[..., pa.Table], ...]:
        return (self.transform,) if callable(self.transform) else tuple(self.transform)

    @property
    def bad_rows(self) -> BadRows:
        return self.on_bad_row if isinstance(self.on_bad_row, BadRows) else BadRows(self.on_bad_row)

    @property
    def most_unit_bytes(self) -> int:
        """What one unit may take while it is read, before transforms: more than the buffer, because they may leave little
        of it, but bounded, because a small compressed file may hold any amount."""
        return max(8 * self.buffer_bytes, 32 * MIB)

    @property
    def num_epochs(self) -> int | None:
        """None when endless."""
        return None if self.repeat is True else int(self.repeat) or 1
