"""Text to token ids, a slice of the column at a time, so that memory stays a small multiple of the ids.

Slices run side by side where the encoder releases the GIL and there are threads. Where slices are cut, and which thread
encodes one, changes no id.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from overlord.chunks.transforms.bpe import ByteLevelBpe, NotByteLevel, Tokens, library_ids
from overlord.chunks.transforms.outcome import ORIGIN, RowError, row_error
from overlord.errors import DataError, SchemaError, SpecError
from overlord.sources.numbers import array_of, is_present, text_offsets, text_scalar

if TYPE_CHECKING:
    import tiktoken
    import tokenizers
    from numpy.typing import NDArray

    from overlord.runtime.threads import Executor
    from overlord.stream.facts import Ints


TokenizerEngine: TypeAlias = Literal["tokenizers", "tiktoken"]
TokenizerLike: TypeAlias = "str | Path | tiktoken.Encoding | tokenizers.Tokenizer | Callable[[str], Any]"
MOST_TOKENS = 2**31 - 1
"""Arrow's list<int32> counts its values in 32 bits."""

SLICE_BYTES = 1 << 18
"""Bytes of text to encode at once, in each thread. The `tokenizers` library takes about fifty times as much memory
meanwhile. A slice takes 20 to 100 ms, so that a thread that joins in is soon free again."""

_ROW_BYTES = 256
"""The overhead of one text while it is encoded."""

_log = logging.getLogger(__name__)


class ByteTokenizer:
    """UTF-8 bytes as token ids 0 to 255, for demos and tests: needs no vocabulary and no package."""

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_column(self, column: pa.Array) -> tuple[Tokens, Ints]:
        """(all ids, length of each text), straight from Arrow's buffers."""
        column = column.cast(pa.large_binary())
        _, where, data = column.buffers()
        if where is None or not len(column):
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        offsets = np.frombuffer(memoryview(where), np.int64)[column.offset : column.offset + len(column) + 1]
        flat = (
            np.frombuffer(memoryview(data), np.uint8)[offsets[0] : offsets[-1]]
            if data is not None
            else np.zeros(0, np.uint8)
        )
        return flat.astype(np.int32), np.diff(offsets)


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Encode the text in `column` into a list<int32> column `into`; other columns go unless named in `keep`.

    `encoding` is the name of a tiktoken encoding or such an object, the path of a tokenizer.json, a
    `tokenizers.Tokenizer`, a tokenizer of `transformers`, or any function from str to ids. `bos` is put before and `eos`
    after each text, where given: an id, or the token that the encoding knows by that name. The encoding itself adds
    nothing.

    Text that spells a special token is encoded as plain text: a web page about chat templates must not end a turn. With
    `special_tokens=True` it becomes that token, for text that a chat template has rendered. Tokens that were added to a
    vocabulary without being marked as special are ordinary words of it in both cases. A function decides for itself.

    A byte-level BPE of the `tokenizers` library (GPT-2, Llama 3, Qwen) is encoded by tiktoken, several times faster and with
    the same ids, if all its rules are known to mean the same there. `engine="tokenizers"` leaves it to its library;
    `engine="tiktoken"` makes it an error if tiktoken cannot encode it. `engine_used` says which engine it is.

    A null text is an empty one. Names and paths are loaded when first used, in each process that uses them, but for a
    tokenizer.json, which worker processes of one machine share; tokenizer objects are copied then, and never changed.
    """

    column: str = "text"
    into: str = "tokens"
    _: KW_ONLY
    encoding: TokenizerLike
    eos: int | str | None = None
    bos: int | str | None = None
    keep: Sequence[str] = ()
    special_tokens: bool = False
    engine: TokenizerEngine | None = field(default=None, metadata={"changes_rows": False})

    def __post_init__(self) -> None:
        named = isinstance(self.encoding, (str, Path))
        if not (named or callable(self.encoding) or hasattr(self.encoding, "encode_batch")):
            raise SpecError(
                "encoding is a tiktoken name, the path of a tokenizer.json, a tokenizer, or a function from str to ids; "
                f"got {type(self.encoding).__name__}"
            )
        if isinstance(self.keep, str):
            raise SpecError(f"keep is a sequence of column names: keep=({self.keep!r},)")
        if self.into in self.keep:
            raise SpecError(f"column {self.into!r} cannot be kept: the tokens are written into it")
        for name in ("bos", "eos"):
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 2**31:
                raise SpecError(f"{name} is a token id from 0 to 2**31 - 1, or the name of a token; got {value!r}")
        if self.engine not in (None, "tokenizers", "tiktoken"):
            raise SpecError(f"engine is 'tokenizers' or 'tiktoken', or None to choose; got {self.engine!r}")
        if self.special_tokens and (isinstance(self.encoding, ByteTokenizer) or _is_function(self.encoding)):
            raise SpecError(
                "special_tokens=True is for tokenizers that know their special tokens; a function from str to ids decides "
                "for itself what it makes of them: leave special_tokens out"
            )

    def __call__(self, table: pa.Table) -> pa.Table:
        return self.run_on(None, table)

    def run_on(self, threads: Executor | None, table: pa.Table) -> pa.Table:
        """The same, with slices side by side on these threads."""
        present = [name for name in table.column_names if name != ORIGIN]
        missing = [name for name in (self.column, *self.keep) if name not in present]
        if missing:
            raise SchemaError(f"Tokenize: no column {', '.join(map(repr, missing))}; the columns are {present}")
        column = _as_text(table.column(self.column), self.column)
        encoder = _encoder(self.encoding, self.special_tokens, self.engine)
        bos, eos = (token_id(encoder, name, getattr(self, name)) for name in ("bos", "eos"))
        try:
            tokens = _encode(encoder, column, _Ends(bos, eos), threads)
        except RowError as error:
            raise row_error(table, error.origin, error.cause) from None
        kept = {name: table.column(name) for name in (*self.keep, ORIGIN) if name in table.column_names}
        return pa.table({self.into: tokens, **kept})

    @property
    def engine_used(self) -> str:
        """What encodes the texts: "tiktoken", "tokenizers", "tokenizers: " and why it is not tiktoken, "transformers",
        "bytes" or "function". Loads the encoding."""
        encoder = _encoder(self.encoding, self.special_tokens, self.engine)
        return "bytes" if isinstance(encoder, ByteTokenizer) else encoder.engine


def _as_text(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """The column as string or large_string."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return column
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return column.cast(pa.large_string())  # a text member of a tar; bytes that are no UTF-8 are a bad row
    if pa.types.is_string_view(kind) or pa.types.is_null(kind):  # null: a chunk without any text, of no known type
        return column.cast(pa.large_string())
    raise SchemaError(f"Tokenize: column {name!r} must be text, it is {kind}")


def _encode(encoder: Any, column: pa.ChunkedArray, ends: _Ends, threads: Executor | None) -> pa.Array:
    """The ids of each text. Raises RowError, with the row of the column, for ids that int32 does not hold."""
    if isinstance(encoder, ByteTokenizer):
        filled = column.cast(pa.large_string()).fill_null(text_scalar("", pa.large_string()))
        return _to_lists([ends.around(*encoder.encode_column(filled.combine_chunks()))], len(column), [0])
    slices = [piece for part in _slices(column, encoder) for piece in part]
    calls = [partial(_encode_slice, encoder, piece, ends) for piece in slices]
    # The library takes fifty times the bytes of a text: long ones, which cannot be cut for it, are encoded one by one.
    is_light = not isinstance(encoder, _Tokenizers) or all(piece.texts.nbytes <= 2 * SLICE_BYTES for piece in slices)
    can_share = encoder.releases_gil and is_light
    found = threads.share(calls) if threads is not None and can_share else [call() for call in calls]
    return _to_lists(found, len(column), [piece.first for piece in slices])


@dataclass(frozen=True, slots=True)
class _TextSlice:
    """Texts from row `first` on; or a part of the text in that row, with its beginning, its end or neither."""

    texts: Any
    first: int
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class _Ends:
    """The ids to put around each text."""

    bos: int | None
    eos: int | None

    def around(self, ids: Tokens, lengths: Ints, begins: bool = True, ends: bool = True) -> tuple[Tokens, Ints]:
        """Concatenated ids, and the length of each text, with `bos` and `eos` around each; around a part of a text only
        where the text begins or ends."""
        bos, eos = self.bos if begins else None, self.eos if ends else None
        if bos is None and eos is None:
            return ids, lengths
        lengths = lengths + (bos is not None) + (eos is not None)
        stops = np.cumsum(lengths)
        whole = np.empty(lengths.sum(), np.int32)
        is_text = np.ones(len(whole), bool)
        for token, places in ((bos, stops - lengths), (eos, stops - 1)):
            if token is not None:
                whole[places] = token
                is_text[places] = False
        whole[is_text] = ids
        return whole, lengths


def _slices(column: pa.ChunkedArray, encoder: Any) -> Iterator[Iterable[_TextSlice]]:
    """The texts, about SLICE_BYTES at a time: as Python objects a whole column would take several times its size. A long
    text is cut where the encoder knows that this changes no id."""
    first = 0
    for chunk in column.chunks:
        texts: Any = chunk  # strings or large strings
        lengths = np.where(is_present(texts), np.diff(text_offsets(texts)), 0).astype(np.int64)
        is_long = (lengths > 2 * SLICE_BYTES) & isinstance(encoder, _Bpe)
        starts = np.diff(np.cumsum(lengths + _ROW_BYTES) // SLICE_BYTES) != 0
        starts |= is_long[1:] | is_long[:-1]  # a long text is a slice of its own
        ends = (np.flatnonzero(starts) + 1).tolist()
        for begin, end in zip([0, *ends], [*ends, len(chunk)], strict=True):
            part = texts.slice(begin, end - begin)
            if len(part) and is_long[begin]:
                yield _pieces(encoder.bpe, part, first + begin)
            else:
                yield [_TextSlice(part, first + begin)]
        first += len(chunk)


def _pieces(bpe: ByteLevelBpe, text: pa.Array, row: int) -> list[_TextSlice]:
    cut = bpe.cut(text, SLICE_BYTES)
    last = len(cut) - 1
    return [_TextSlice(cut.slice(i, 1), row, begins=i == 0, ends=i == last) for i in range(len(cut))]


def _encode_slice(encoder: Any, piece: _TextSlice, ends: _Ends) -> tuple[Tokens, Ints]:
    texts = piece.texts.fill_null(text_scalar("", piece.texts.type)) if piece.texts.null_count else piece.texts
    if isinstance(encoder, _Bpe):
        ids, counts = encoder.bpe.encode_column(texts)
    else:
        rows: list[str] = texts.to_pylist()
        ids, counts = _as_int32([np.asarray(ids) for ids in encoder.encode(rows)], piece.first)
    return ends.around(ids, counts, piece.begins, piece.ends)


def _as_int32(lists: Sequence[NDArray[Any]], first_row: int) -> tuple[Tokens, Ints]:
    """The concatenated ids of some texts, and the number of ids of each."""
    counts = np.array([len(ids) if ids.ndim == 1 else -1 for ids in lists], np.int64)
    filled = [(row, ids) for row, ids in enumerate(lists) if ids.size or ids.ndim != 1]
    for _, ids in filled:
        if ids.ndim != 1 or ids.dtype.kind not in "iuO":
            got = f"{ids.ndim} dimensions" if ids.ndim != 1 else f"{ids.dtype} values"
            raise SchemaError(
                f"Tokenize: the encoding must return a flat sequence of integers for each text, it returned {got}"
            )
    if len({ids.dtype for _, ids in filled}) == 1 and filled[0][1].dtype != object:
        joined = np.concatenate([ids for _, ids in filled])
        if _fits_int32(joined):
            return joined.astype(np.int32, copy=False), counts
    for row, ids in filled:  # texts with ids of several types, or one that does not fit
        if not _fits_int32(ids):
            value = next(value for value in ids.tolist() if not -(2**31) <= value < 2**31)
            raise RowError(first_row + row, DataError(f"Tokenize: token id {value} is not an id that int32 can hold"))
    return np.concatenate([np.zeros(0, np.int32), *(ids.astype(np.int32) for _, ids in filled)]), counts


def _fits_int32(ids: NDArray[Any]) -> bool:
    return np.can_cast(ids.dtype, np.int32) or bool(ids.min() >= -(2**31) and ids.max() < 2**31)


def _to_lists(parts: list[tuple[Tokens, Ints]], num_rows: int, first_rows: Sequence[int]) -> pa.Array:
    """list<int32> from the concatenated ids and the lengths of consecutive slices, whose first rows are given."""
    lengths = np.zeros(num_rows, np.int64)
    for first, (_, counts) in zip(first_rows, parts, strict=True):
        lengths[first : first + len(counts)] += counts  # of a text in parts, all its parts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > MOST_TOKENS:
        raise DataError(f"a chunk of {offsets[-1]:,} tokens is too large for one column; lower the source's window")
    flat = parts[0][0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in parts)])
    return pa.ListArray.from_arrays(array_of(offsets.astype(np.int32)), array_of(flat))


class _Encoder(Protocol):
    def encode(self, texts: list[str]) -> Iterable[Any]:
        """The ids of each text."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name; None where the encoding does not know it."""
        ...

    @property
    def engine(self) -> str:
        """See `Tokenize.engine_used`."""
        ...

    @property
    def releases_gil(self) -> bool:
        """Whether threads encode side by side."""
        ...


@dataclass(frozen=True, slots=True)
class _Tiktoken:
    encoding: tiktoken.Encoding
    special_tokens: bool
    engine: str = "tiktoken"
    releases_gil: bool = True

    def encode(self, texts: list[str]) -> Iterable[Any]:
        allowed = self.encoding.special_tokens_set if self.special_tokens else set[str]()
        # Arrays, without a Python integer per token.
        return (self.encoding.encode_to_numpy(text, allowed_special=allowed, disallowed_special=()) for text in texts)

    def id_of(self, token: str) -> int | None:
        try:
            return self.encoding.encode_single_token(token)
        except KeyError:
            return None


@dataclass(frozen=True, slots=True)
class _Tokenizers:
    """A configured `tokenizers.Tokenizer`, or an object with its interface."""

    tokenizer: Any
    engine: str = "tokenizers"
    releases_gil: bool = True

    def encode(self, texts: list[str]) -> Iterable[Any]:
        return library_ids(self.tokenizer, texts)

    def id_of(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)


@dataclass(frozen=True, slots=True)
class _Bpe:
    """A tokenizer of the `tokenizers` library that tiktoken's core encodes, whole columns at a time."""

    bpe: ByteLevelBpe
    engine: str = "tiktoken"
    releases_gil: bool = True

    def encode(self, texts: list[str]) -> Iterable[Any]:
        ids, lengths = self.bpe.encode_column(pa.array(texts, pa.large_string()))
        return np.split(ids, np.cumsum(lengths)[:-1])

    def id_of(self, token: str) -> int | None:
        return self.bpe.id_of(token)


@dataclass(frozen=True, slots=True)
class _Transformers:
    """A tokenizer of `transformers` that is written in Python."""

    tokenizer: Any
    special_tokens: bool
    engine: str = "transformers"
    releases_gil: bool = False

    def encode(self, texts: list[str]) -> Iterable[Any]:
        options = {"add_special_tokens": False, "split_special_tokens": not self.special_tokens}
        return (self.tokenizer(text, **options)["input_ids"] for text in texts)

    def id_of(self, token: str) -> int | None:
        # Not convert_tokens_to_ids, which returns the id of the unknown token for one that is not in the vocabulary.
        return self.tokenizer.get_vocab().get(token)


@dataclass(frozen=True, slots=True)
class _FunctionEncoder:
    function: Callable[[str], Any]
    engine: str = "function"
    releases_gil: bool = False

    def encode(self, texts: list[str]) -> Iterable[Any]:
        for text in texts:
            ids = self.function(text)
            yield ids["input_ids"] if isinstance(ids, Mapping) else ids


def _is_function(encoding: TokenizerLike) -> bool:
    """Whether the encoding is only known to be callable."""
    known = ("encode_to_numpy", "encode_batch", "backend_tokenizer", "convert_tokens_to_ids")
    return not isinstance(encoding, (str, Path)) and not any(hasattr(encoding, name) for name in known)


def token_id(encoder: Any, option: str, token: int | str | None, transform: str = "Tokenize") -> int | None:
    """The id of a token that is given by its id or its name."""
    if not isinstance(token, str):
        return token
    if not hasattr(encoder, "id_of"):
        raise SpecError(f"{transform}: {option}={token!r} names a token, but this encoding cannot look it up: give its id")
    found = encoder.id_of(token)
    if found is None:
        raise SpecError(
            f"{transform}: {option}={token!r}: the encoding has no such token; check its spelling, or give its id"
        )
    return found


def find_encoder(encoding: TokenizerLike, *, special_tokens: bool) -> Any:
    """An encoder that can tell offsets where its library does, so not tiktoken's in place of another."""
    return _encoder(encoding, special_tokens, "tokenizers")


def load_encoding(name: str, special_tokens: bool, engine: TokenizerEngine | None) -> None:
    """Load what a name or a path stands for, for every `Tokenize` of this process that has these three."""
    encoder = _encoder(name, special_tokens, engine)
    if isinstance(encoder, _Bpe):
        _ = encoder.bpe.tokenizer  # loads the library's too: processes that are forked from this one share it


_preparing = threading.Lock()
_MOST_PREPARED = 16
_prepared: dict[tuple[int, bool, TokenizerEngine | None], tuple[TokenizerLike, Any]] = {}
"""Encoders of users' objects, by id(object). The object is kept here too, so that its id is not reused."""


def _encoder(encoding: TokenizerLike, special_tokens: bool, engine: TokenizerEngine | None) -> Any:
    with _preparing:  # threads that start together load a vocabulary once
        if isinstance(encoding, (str, Path)):
            return _load(os.fspath(encoding), special_tokens, engine)
        key = id(encoding), special_tokens, engine
        if key not in _prepared:
            while len(_prepared) >= _MOST_PREPARED:
                del _prepared[next(iter(_prepared))]
            _prepared[key] = encoding, _wrap(encoding, special_tokens, engine)
        return _prepared[key][1]


def _wrap(encoding: Any, special_tokens: bool, engine: TokenizerEngine | None) -> Any:
    if isinstance(encoding, ByteTokenizer):
        return encoding
    if hasattr(encoding, "encode_to_numpy"):
        return _Tiktoken(encoding, special_tokens)
    if hasattr(encoding, "encode_batch"):
        return _choose_engine(_configure(encoding, special_tokens), type(encoding).__name__, engine)
    backend = getattr(encoding, "backend_tokenizer", None)
    if hasattr(backend, "encode_batch"):
        return _choose_engine(_configure(backend, special_tokens), type(encoding).__name__, engine)
    if hasattr(encoding, "convert_tokens_to_ids"):
        return _Transformers(encoding, special_tokens)
    return _FunctionEncoder(encoding)


def _choose_engine(tokenizer: Any, name: str, engine: TokenizerEngine | None) -> _Bpe | _Tokenizers:
    """Says which engine encodes, and why if that is the slower one."""
    if engine == "tokenizers":
        return _Tokenizers(tokenizer)
    try:
        made = _Bpe(ByteLevelBpe.of(tokenizer))
    except NotByteLevel as error:
        if engine == "tiktoken":
            raise SpecError(f"Tokenize: engine='tiktoken' cannot encode with {name}: it {error}; leave engine out") from None
        _log.info("%s is encoded by the tokenizers library, because it %s", name, error)
        return _Tokenizers(tokenizer, f"tokenizers: it {error}")
    _log_engine(name)
    return made


def _log_engine(name: str) -> None:
    _log.info("%s is encoded by tiktoken, with the same ids", name)


def _configure(tokenizer: Any, special_tokens: bool) -> Any:
    """The tokenizer, or a copy, with the wanted treatment of special tokens, without padding, and without truncation: a
    limit left in a tokenizer.json would cut every long document."""
    padding, truncation = (getattr(tokenizer, name, None) for name in ("padding", "truncation"))
    is_plain = getattr(tokenizer, "encode_special_tokens", None)
    if is_plain in (None, not special_tokens) and padding is None and truncation is None:
        return tokenizer
    try:
        copy = type(tokenizer).from_str(tokenizer.to_str())
    except Exception as error:  # a component written in Python cannot be saved, and the library raises a bare Exception
        raise SpecError(
            f"Tokenize: the tokenizer must be copied, since it is not set as wanted, and cannot be: {error}. Set "
            f"tokenizer.encode_special_tokens = {not special_tokens}, and call tokenizer.no_padding() and "
            "tokenizer.no_truncation(), before it is given here"
        ) from error
    copy.encode_special_tokens = not special_tokens
    copy.no_padding()
    copy.no_truncation()
    return copy


@lru_cache(maxsize=16)
def _load(name: str, special_tokens: bool, engine: TokenizerEngine | None) -> Any:
    if name.endswith(".json") or os.sep in name:
        return _load_file(name, special_tokens, engine)
    try:
        import tiktoken
    except ModuleNotFoundError:
        raise SpecError("tiktoken encodings need an extra: pip install 'overlord-dataloader[tokenizers]'") from None
    if name not in tiktoken.list_encoding_names():
        raise SpecError(
            f"tiktoken has no encoding {name!r}; it has {', '.join(sorted(tiktoken.list_encoding_names()))}. "
            "A file is named by a path that ends in .json"
        )
    return _Tiktoken(tiktoken.get_encoding(name), special_tokens)


def _load_file(path: str, special_tokens: bool, engine: TokenizerEngine | None) -> _Bpe | _Tokenizers:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise SpecError("tokenizer.json files need an extra: pip install 'overlord-dataloader[tokenizers]'") from None
    if not os.path.isfile(path):
        raise SpecError(f"encoding: there is no tokenizer file {path}")
    data = Path(path).read_bytes()

    def load() -> tokenizers.Tokenizer:
        found = tokenizers.Tokenizer.from_buffer(data)
        found.encode_special_tokens = not special_tokens
        found.no_padding()
        found.no_truncation()
        return found

    if engine != "tokenizers":
        with suppress(NotByteLevel):  # if its library cannot help either, `_choose_engine` says why
            made = _Bpe(ByteLevelBpe.of_file(data, special_tokens=special_tokens, load=load))
            _log_engine(path)
            return made
    return _choose_engine(load(), path, engine)
