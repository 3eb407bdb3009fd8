"""`Ring`: the ranks that attend together to the documents of one microbatch, and the pieces that each of them has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from overlord.arrange.hdp.rings import chunks_of
from overlord.errors import SpecError
from overlord.trainer.ring.messages import GroupMessages, Messages

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens [begin, end) of a rank's microbatch, which are a document from its token `offset` on."""

    document: int
    offset: int
    begin: int
    end: int


class Ring:
    """The ranks that attend together to the documents of one microbatch, and the pieces that each of them has.

    Make it with `Ring.of(micro)` and pass it to `ring_attention`. One ring serves all layers of the microbatch.
    Do not change it.
    """

    # A plain class: FSDP2 copies every dataclass among the arguments of a module when it casts tensors to its precision, and
    # each copy would lose what `cache` has.

    def __init__(
        self,
        ranks: tuple[int, ...],
        index: int,
        pieces: tuple[tuple[Piece, ...], ...],
        number: int = -1,
        messages: Messages | None = None,
    ) -> None:
        self.ranks = ranks
        self.index = index
        """The index of this process in `ranks`."""
        self.pieces = pieces
        """The pieces of each rank."""
        self.number = number
        """The number of the ring among those of the step; every rank runs its rings by rising number."""
        self.messages: Messages = GroupMessages() if messages is None else messages
        """Sends to the next rank and receives from the previous one."""
        self.cache: dict[Any, Any] = {}
        """What is computed once for all layers: the calls of each turn, and their bounds on the device."""

    def with_messages(self, messages: Messages) -> Ring:
        """The same ring, whose ranks talk in another way."""
        return Ring(self.ranks, self.index, self.pieces, self.number, messages)

    @staticmethod
    def of(micro: Mapping[str, Any], group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> Ring:
        """Make it from a microbatch of a job with `strategies.hdp`.

        `group` must have all ranks; None is the default group. A rank that does not answer within `timeout_s` seconds is an
        error that names the ring and the rank; on NCCL that holds for the check at the beginning of a microbatch (see
        `GroupMessages`), and the group's own time-out for the rest.
        """
        if "hdp_ranks" not in micro:
            raise SpecError("the microbatch has no hdp_ranks: ring attention needs the job to use strategies.hdp")
        ranks, index = tuple(micro["hdp_ranks"].tolist()), int(micro["hdp_index"])
        if not 0 <= index < len(ranks):
            raise SpecError(f"hdp_index is the index of this rank among {len(ranks)} hdp_ranks, got {index}")
        wholes = _documents(micro, len(ranks), index)
        pieces = tuple(_pieces(wholes, len(ranks), part) for part in range(len(ranks)))
        number = int(micro.get("hdp_number", -1))
        return Ring(ranks, index, pieces, number, GroupMessages(group, timeout_s))

    @staticmethod
    def alone(micro: Mapping[str, Any]) -> Ring:
        """A ring of this rank alone, for a packed microbatch of any strategy: its documents are whole."""
        # On a GPU this waits for the copy of the batch, as reading any tensor does.
        if "cu_seqlens" not in micro:
            raise SpecError("a ring is made from a packed microbatch, with cu_seqlens: use layout='packed'")
        ends = micro["cu_seqlens"].tolist()
        pieces = tuple(Piece(i, 0, begin, end) for i, (begin, end) in enumerate(pairwise(ends)))
        return Ring((0,), 0, (pieces,))

    def __str__(self) -> str:
        return f"ring {self.number} over ranks {list(self.ranks)}"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def own(self) -> int:
        """The rank of this process."""
        return self.ranks[self.index]

    @property
    def before(self) -> int:
        """The rank that this one receives from."""
        return self.ranks[self.index - 1]

    @property
    def after(self) -> int:
        """The rank that this one sends to."""
        return self.ranks[(self.index + 1) % self.size]

    def part(self, turn: int) -> int:
        """The index of the rank whose keys this one attends to in a turn. After the last turn it is this rank again."""
        return (self.index - turn) % self.size

    def num_tokens(self, part: int) -> int:
        """The number of tokens of the rank with this index."""
        return self.pieces[part][-1].end if self.pieces[part] else 0


def lengths_of(micro: Mapping[str, Any]) -> list[int]:
    """The tokens of each piece of a microbatch with `hdp_ranks`, from fields that are always on the host: nobody waits for
    a GPU."""
    ranks, index = len(micro["hdp_ranks"]), int(micro["hdp_index"])
    found: list[int] = []
    wholes = micro["whole_lengths"].tolist()
    while len(found) < len(wholes):
        chunks = chunks_of(wholes[len(found)], ranks, index)
        found += [chunk.end - chunk.begin for chunk in chunks]
        if not chunks:
            break
    return found


def _documents(micro: Mapping[str, Any], num_ranks: int, index: int) -> list[int]:
    """The lengths of a microbatch's whole documents. Raises SpecError if its pieces are not those of the cut."""
    names = ["whole_lengths", "piece_offsets", "document_lengths"]
    if is_on_device(micro["document_lengths"]):
        names.pop()  # to compare it would stop the host until the GPU is done with all that was started before
    rows = list(zip(*(micro[name].tolist() for name in names), strict=True))
    wholes: list[int] = []
    at = 0
    while at < len(rows):
        whole = rows[at][0]
        chunks = chunks_of(whole, num_ranks, index)
        expected = [(whole, chunk.begin, chunk.end - chunk.begin)[: len(names)] for chunk in chunks]
        found = rows[at : at + len(chunks)]
        if not chunks or found != expected:
            raise SpecError(
                f"a document of {whole} tokens over {num_ranks} ranks has the pieces (whole, offset, length) {expected} on "
                f"rank {index} of the ring, but the microbatch has {found}; do not change its fields"
            )
        wholes.append(whole)
        at += len(chunks)
    return wholes


def is_on_device(value: Any) -> bool:
    """True if reading a tensor stops the host until its device is done."""
    device = getattr(value, "device", None)  # in numpy it is the name "cpu"
    return getattr(device, "type", "cpu") != "cpu"


def _pieces(wholes: list[int], num_ranks: int, part: int) -> tuple[Piece, ...]:
    pieces, at = [], 0
    for document, whole in enumerate(wholes):
        for begin, end in chunks_of(whole, num_ranks, part):
            pieces.append(Piece(document, begin, at, at + end - begin))
            at += end - begin
    return tuple(pieces)
