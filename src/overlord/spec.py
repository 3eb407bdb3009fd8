"""What a user declares: sources, mixture, batch, mesh, job. Values only; each checks itself when made."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from overlord.arguments import whole
from overlord.curriculum import check_limits
from overlord.errors import SpecError
from overlord.log import Log as Log
from overlord.outlier_delay import OutlierDelay

if TYPE_CHECKING:
    import pyarrow as pa

    from overlord.planning.learning.feedback import Feedback
    from overlord.planning.strategies import Strategy

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest piece of a source that is read at once: a row group, a tar shard, a byte range of JSONL.

    `detail` is whatever `Source.read` needs to read it without looking anything up again (a footer, a byte
    range). It must pickle. `version` tells one content of the file from another (its modification time, its ETag):
    a state that was saved over another version is refused. Empty: not compared.
    """

    path: str
    index: int = 0
    num_rows: int | None = None
    num_bytes: int = 0
    detail: Any = None
    version: str = ""

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
            raise SpecError("quarantine needs a file: BadRows('quarantine', path='bad_rows.jsonl')")
        if self.path is not None:
            object.__setattr__(self, "path", os.path.expanduser(os.fspath(self.path)))


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of samples. Subclass it and write `units` and `read` to bring your own.

    `units` lists the source once per run, in a stable order. `read` returns one unit's rows in file order and must
    return the same rows each time it is called: Overlord may call it again, in another thread or process.
    """

    transform: Callable[..., pa.Table] | Sequence[Callable[..., pa.Table]] = ()
    """Functions over an Arrow table, applied to each chunk in order; see `overlord.data.transforms`."""
    decode: Any = None
    """A deferred transform (`ol.DecodeImage`), run only for rows that a plan asks for."""
    tokens: str | None = "tokens"
    """The column with the token ids; None for a source without text."""
    loss_mask: str | None = None
    """A column of 0/1 per token: 0 means no loss on predicting that token."""
    loss_weights: str | None = None
    """A column of numbers per token, instead of `loss_mask`: what predicting that token counts in the loss. Batches then
    have a field of that name, and `step.loss_tokens` is the sum of the step's weights."""
    null_columns: Sequence[str] = ()
    """Those of `Batch.columns` that this source does not have: they are null for its samples."""
    repeat: bool | int = True
    """True: endless. False: one epoch. A number: that many epochs."""
    shuffle: bool = True
    """Permute units each epoch, and rows inside a chunk."""
    window: int = 1
    """Units per chunk: rows are shuffled inside a chunk."""
    buffer_bytes: int = 256 * MIB
    """The most memory that decoded chunks of this source may take."""
    loaders: int = 1
    """How many Source Loaders share the source. Changes who reads, never what."""
    on_bad_row: BadRows | Literal["fail", "skip"] = "fail"

    def units(self) -> Sequence[Unit]:
        raise NotImplementedError(f"{type(self).__name__} must define units()")

    def read(self, unit: Unit) -> pa.Table:
        raise NotImplementedError(f"{type(self).__name__} must define read(unit)")

    def close(self) -> None:
        """Called when a loader that read the source stops: let go of files that `read` left open. Another loader may still
        be reading."""

    def identity(self) -> str:
        """What the stream of this source depends on, for the fingerprint of a saved state."""
        return type(self).__name__

    def __post_init__(self) -> None:
        if self.window < 1:
            raise SpecError(f"window is a number of units, at least 1, got {self.window}")
        if self.buffer_bytes < 1:
            raise SpecError(f"buffer_bytes must be positive, got {self.buffer_bytes}")
        if self.loaders < 1:
            raise SpecError(f"loaders must be at least 1, got {self.loaders}")
        if self.repeat is not True and self.repeat is not False and self.repeat < 1:
            raise SpecError(f"repeat is True, False or a number of epochs, got {self.repeat}")
        if self.loss_mask is not None and self.loss_weights is not None:
            raise SpecError(
                f"a source has loss_mask={self.loss_mask!r} or loss_weights={self.loss_weights!r}, not both: a weight of 0 "
                "masks a token"
            )
        object.__setattr__(self, "null_columns", _names(self.null_columns, "null_columns"))
        if isinstance(self.on_bad_row, str):
            object.__setattr__(self, "on_bad_row", BadRows(self.on_bad_row))

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


LongDocuments = Literal["split", "truncate", "drop", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one global step holds, over all ranks. Only this and the mixture decide which samples a step has.

    Give `tokens` (then a step holds as many whole documents as can be packed without splitting into
    tokens / sequence_length rows) or `samples` (then a step holds exactly that many).
    """

    sequence_length: int
    tokens: int | None = None
    samples: int | None = None
    cut_documents: bool = False
    """With `tokens`: fill the step to the last token by cutting the document at its end; the rest comes first
    in the next step."""
    long_documents: LongDocuments = "split"
    """What to do with documents longer than sequence_length."""
    layout: Literal["packed", "padded"] = "packed"
    """packed: documents one after the other with cu_seqlens (thd). padded: one document a row (bshd)."""
    pad_to: Literal["longest", "sequence_length"] = "longest"
    """How wide the rows of layout="padded" are: as its longest document in each microbatch, so that shapes differ between
    microbatches and ranks, or always sequence_length, for a model that is compiled for one shape."""
    micro_tokens: int | None = None
    """Mean tokens of a microbatch; sequence_length unless given. A rank runs tokens / dp / micro_tokens of them."""
    document_multiple: int = 1
    """Pad each document to a multiple of this (2 x cp for ring attention that needs equal slices)."""
    pad_token: int = 0
    special_ids: tuple[int, ...] = ()
    """Ids below 0 that token columns may hold, such as the -200 of LLaVA. They are inputs and never labels: no loss is taken
    on predicting one. Any other id below 0 is a bad row."""
    image_token: int | None = None
    """The token in every place of an image in texts; with it, batches say which encoded row goes where (`image_row`)."""
    columns: tuple[str, ...] = ()
    """Other columns to hand to the trainer, as Arrow arrays. Each source has all of them, or says so with `null_columns`."""
    outliers: OutlierDelay | None = None
    """Which long documents wait for others, and how long; none unless given."""
    drop_last: bool = False
    """Drop the last, partial step of a finite run instead of delivering it."""
    document_limits: Mapping[int, int] | None = None
    """A length curriculum, {step: tokens}: from that step on documents are cut into parts of at most so many tokens, all of
    which are in the step."""

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise SpecError(f"sequence_length must be positive, got {self.sequence_length}")
        if (self.tokens is None) == (self.samples is None):
            raise SpecError("a Batch needs tokens=... or samples=..., and not both")
        if self.tokens is not None and (self.tokens < self.sequence_length or self.tokens % self.sequence_length):
            raise SpecError(
                f"tokens per step must be a multiple of sequence_length: {self.tokens} is not a multiple of "
                f"{self.sequence_length}; the nearest is "
                f"{max(1, round(self.tokens / self.sequence_length)) * self.sequence_length}"
            )
        if self.samples is not None and self.samples < 1:
            raise SpecError(f"samples per step must be positive, got {self.samples}")
        if self.cut_documents and self.tokens is None:
            raise SpecError("cut_documents fills a step to a number of tokens: give tokens=...")
        if self.cut_documents and self.document_multiple != 1:
            raise SpecError("cut_documents fills rows to the last token; document_multiple must stay 1")
        if self.outliers is not None and (self.cut_documents or self.document_limits is not None):
            raise SpecError("outliers delays whole documents; it does not go with cut_documents or document_limits")
        if self.cut_documents and self.layout == "padded":
            raise SpecError("cut_documents packs rows; it does not go with layout='padded'")
        if self.document_multiple < 1 or self.sequence_length % self.document_multiple:
            raise SpecError(
                f"document_multiple must divide sequence_length: {self.document_multiple} does not divide "
                f"{self.sequence_length}"
            )
        if self.long_documents not in ("split", "truncate", "drop", "fail"):
            raise SpecError(f"long_documents must be split, truncate, drop or fail, not {self.long_documents!r}")
        if self.layout not in ("packed", "padded"):
            raise SpecError(f"layout must be packed or padded, not {self.layout!r}")
        if self.pad_to not in ("longest", "sequence_length"):
            raise SpecError(f"pad_to must be longest or sequence_length, not {self.pad_to!r}")
        object.__setattr__(self, "columns", _names(self.columns, "columns"))
        object.__setattr__(self, "special_ids", _special_ids(self.special_ids))
        for name in ("pad_token", "image_token"):
            value = getattr(self, name)
            if value is not None and not -(2**31) <= value < 2**31:
                raise SpecError(f"{name} is a token id that int32 can hold, got {value}")
        if self.micro_tokens is not None and self.micro_tokens % self.sequence_length:
            raise SpecError(
                f"micro_tokens must be a multiple of sequence_length: {self.micro_tokens} is not a multiple of "
                f"{self.sequence_length}"
            )
        if self.document_limits is not None:
            check_limits(self.document_limits, self.tokens, self.sequence_length, self.document_multiple)

    @property
    def num_rows(self) -> int | None:
        """Rows of sequence_length tokens in a step; None when a step is counted in samples."""
        return None if self.tokens is None else self.tokens // self.sequence_length

    @property
    def rows_per_microbatch(self) -> int:
        return (self.micro_tokens or self.sequence_length) // self.sequence_length


Axis = Literal["pp", "dp", "cp", "tp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The sizes of the trainer's parallel dimensions. `order` is outermost first; Megatron's is pp, dp, cp, tp.

    A mesh without `dp` has one data-parallel group, unless the size of the world is known: `overlord.trainer.attach` and
    `start(world_size=...)` then set dp to what the other sizes leave of it.
    """

    dp: int = None  # type: ignore[assignment] - to tell 1 from nothing; it is a number once the mesh is made
    cp: int = 1
    tp: int = 1
    pp: int = 1
    order: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
    is_dp_open: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether dp was left out."""

    def __post_init__(self) -> None:
        if self.dp is None:
            object.__setattr__(self, "is_dp_open", True)
            object.__setattr__(self, "dp", 1)
        for axis in ("dp", "cp", "tp", "pp"):
            object.__setattr__(self, axis, whole(getattr(self, axis), f"mesh size {axis}", least=1))
        if not isinstance(self.order, (tuple, list)) or sorted(map(str, self.order)) != ["cp", "dp", "pp", "tp"]:
            raise SpecError(f"mesh order must name pp, dp, cp and tp once each, got {self.order}")

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    def for_world(self, world_size: int) -> Mesh:
        """This mesh for a world of that size: with an open dp set to what the other sizes leave, else as it is. SpecError
        when it does not fit."""
        if not self.is_dp_open:
            if self.world_size != world_size:
                raise SpecError(
                    f"the mesh dp={self.dp} x cp={self.cp} x tp={self.tp} x pp={self.pp} has {self.world_size} ranks, "
                    f"but the world has {world_size}; change one of the sizes"
                )
            return self
        model = self.cp * self.tp * self.pp
        if world_size < 1 or world_size % model:
            raise SpecError(
                f"the mesh cp={self.cp} x tp={self.tp} x pp={self.pp} takes {model} ranks for each data-parallel group, "
                f"which does not divide the world of {world_size}; change one of the sizes"
            )
        return Mesh(dp=world_size // model, cp=self.cp, tp=self.tp, pp=self.pp, order=self.order)


Weights = Mapping[str, float]
Stop = Literal["first_exhausted", "all_exhausted", "drop_exhausted"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """How much of each source a step holds.

    `weights` is one mapping of source to weight, or a schedule {step: mapping}. Between two entries of a schedule the
    weights stay (`ramp="hold"`) or move in a straight line (`ramp="linear"`). A source that an entry leaves out has
    weight 0 there. `unit` says whether weights share out samples or tokens.
    """

    weights: Weights | Mapping[int, Weights]
    unit: Literal["samples", "tokens"] = "samples"
    ramp: Literal["hold", "linear"] = "hold"
    stop: Stop = "drop_exhausted"
    """When sources are finite: end with the first that runs out; restart those that run out until all have been
    read once; or go on without those that ran out until none is left."""
    feedback: Feedback | None = None
    """Moves the weights by the losses that trainers report."""

    def __post_init__(self) -> None:
        if self.unit not in ("samples", "tokens"):
            raise SpecError(f"a mixture's unit is samples or tokens, not {self.unit!r}")
        if self.ramp not in ("hold", "linear"):
            raise SpecError(f"a mixture's ramp is hold or linear, not {self.ramp!r}")
        if self.stop not in ("first_exhausted", "all_exhausted", "drop_exhausted"):
            raise SpecError(f"stop must be first_exhausted, all_exhausted or drop_exhausted, not {self.stop!r}")
        schedule = self.schedule
        if not schedule:
            raise SpecError("a mixture needs at least one weight")
        if schedule[0][0] != 0:
            raise SpecError(f"a mixture's schedule must begin at step 0, it begins at {schedule[0][0]}")
        for step, weights in schedule:
            for name, weight in weights.items():
                if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0):
                    raise SpecError(f"the weight of {name!r} at step {step} must be a number >= 0, got {weight!r}")
            if not any(weights.values()):
                raise SpecError(f"at step {step} every weight is 0: nothing to train on")
        if self.feedback is not None and len(schedule) > 1:
            raise SpecError("a mixture is moved by its schedule or by feedback, not by both: give one set of weights")

    @property
    def schedule(self) -> tuple[tuple[int, Weights], ...]:
        """(step, weights), in order of steps."""
        entries: dict[int, Weights] = {}
        for key, value in self.weights.items():
            if isinstance(value, Mapping):
                if not isinstance(key, int) or key < 0:
                    raise SpecError(f"a mixture's schedule is {{step: weights}} with steps >= 0, got step {key!r}")
                entries[key] = value
            elif isinstance(key, str):
                entries.setdefault(0, {})
                entries[0] = {**entries[0], key: value}
            else:
                raise SpecError(f"a mixture is {{source: weight}} or {{step: {{source: weight}}}}, got {key!r}: {value!r}")
        return tuple(sorted(entries.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, weights in self.schedule for name in weights))

    def at(self, step: int) -> dict[str, float]:
        """The weights of a step, summing to 1. Sources with weight 0 are left out."""
        schedule = self.schedule
        index = max(i for i, (start, _) in enumerate(schedule) if start <= step)
        start, weights = schedule[index]
        if self.ramp == "linear" and index + 1 < len(schedule):
            end, following = schedule[index + 1]
            share = (step - start) / (end - start)
            names = dict.fromkeys((*weights, *following))
            weights = {n: (1 - share) * weights.get(n, 0.0) + share * following.get(n, 0.0) for n in names}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items() if weight > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One declaration of everything that decides the stream and who receives what of it."""

    sources: Mapping[str, Source]
    batch: Batch
    mixture: Mixture | None = None
    """Equal weights unless given."""
    mesh: Mesh = field(default_factory=lambda: Mesh())
    strategy: Strategy | None = None
    """How a step's samples are arranged over ranks; `strategies.plain()` unless given."""
    seed: int = 0
    num_workers: int | None = None
    """Threads that read and transform; one less than cores unless given. With 0 there are none: everything is done by
    whoever asks for a step, when it asks, which is the least work in all and the easiest to debug, but hides no waiting."""
    num_processes: int | None = None
    """Worker processes for transforms wrapped in `ol.InProcesses`; one per core unless given."""
    prefetch: int = 2
    """Steps that each Data Constructor keeps ready."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise SpecError("a job needs at least one source")
        for name, source in self.sources.items():
            if not isinstance(name, str) or not name:
                raise SpecError(f"a source's name is a non-empty string, got {name!r}")
            if not isinstance(source, Source):
                raise SpecError(f"source {name!r} must be an overlord.Source, got {type(source).__name__}")
        if self.mixture is None:
            object.__setattr__(self, "mixture", Mixture({name: 1.0 for name in self.sources}))
        unknown = [name for name in self.mix.names if name not in self.sources]
        if unknown:
            raise SpecError(
                f"the mixture gives a weight to {_listed(unknown)}, but the job's sources are {_listed(self.sources)}"
            )
        finite = [name for name, source in self.sources.items() if source.num_epochs is not None]
        if self.mix.stop == "all_exhausted" and finite and len(finite) < len(self.sources):
            raise SpecError(
                f"stop='all_exhausted' ends when every source has been read, but {_listed(finite)} are finite and the "
                "others repeat for ever; set repeat=False on all, or use stop='first_exhausted' or 'drop_exhausted'"
            )
        if self.batch.tokens is not None or self.mix.unit == "tokens":
            without = [name for name, source in self.sources.items() if source.tokens is None]
            if without:
                raise SpecError(f"steps are counted in tokens, but {_listed(without)} have tokens=None; use samples=...")
        if self.prefetch < 0:
            raise SpecError(f"prefetch is a number of steps >= 0, got {self.prefetch}")
        if self.mix.feedback is not None and self.mix.feedback.lag <= self.prefetch:
            raise SpecError(f"feedback needs a lag of more than prefetch={self.prefetch} steps, got {self.mix.feedback.lag}")
        if self.num_workers is not None and self.num_workers < 0:
            raise SpecError(f"num_workers must be at least 0, got {self.num_workers}")
        if self.num_processes is not None and self.num_processes < 1:
            raise SpecError(f"num_processes must be at least 1, got {self.num_processes}")

    @property
    def mix(self) -> Mixture:
        assert self.mixture is not None  # __post_init__ fills it in
        return self.mixture

    @property
    def is_weighted(self) -> bool:
        """Whether batches have loss weights."""
        return any(source.loss_weights is not None for source in self.sources.values())

    @property
    def is_masked(self) -> bool:
        """Whether some tokens may be without loss though another follows them."""
        return (
            self.is_weighted or bool(self.batch.special_ids) or any(s.loss_mask is not None for s in self.sources.values())
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _names(names: Iterable[str], option: str) -> tuple[str, ...]:
    """Column names as a tuple. A lone string would count as one name per letter."""
    if isinstance(names, str):
        raise SpecError(f"{option} is a sequence of column names: write {option}=({names!r},)")
    found = tuple(names)
    wrong = [name for name in found if not isinstance(name, str)]
    if wrong:
        raise SpecError(f"{option} is a sequence of column names, got {wrong[0]!r} among them")
    twice = [name for i, name in enumerate(found) if name in found[:i]]
    if twice:
        raise SpecError(f"{option} names {twice[0]!r} twice")
    return found


def _special_ids(ids: Iterable[int] | int) -> tuple[int, ...]:
    if isinstance(ids, int):
        raise SpecError(f"special_ids is a sequence of ids: write special_ids=({ids},)")
    found = tuple(ids)
    for value in found:
        if not isinstance(value, int) or not -(2**31) <= value < 0:
            raise SpecError(f"special_ids are ids from -2**31 to -1, got {value!r}; ids from 0 on are tokens like any other")
    return found
