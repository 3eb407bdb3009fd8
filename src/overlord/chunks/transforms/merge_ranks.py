"""From the merges of a byte-level BPE to a rank per token, where both encode every text alike.

The `tokenizers` library merges the pair of neighbours whose merge was listed first; a pair that is not listed never merges.
tiktoken merges the neighbours whose joined bytes have the lowest rank, whichever pair they are. `rank_tokens` proves that
the two agree for all texts, or raises `NotRankable`.

The proof. Choose one merge (l, r) for each token T, with the place m(T) of that merge in the list, such that

1. m(T) > m(l) and m(T) > m(r), where single bytes come before all merges;
2. the chosen merges alone, applied to the bytes of T, reach the two parts [l, r].

By 1 the chosen merges are applied in the order of their places: a merge never makes an earlier one possible. So the parts
inside a span of text depend only on the bytes of the span, as long as no merge has crossed its borders. Let two neighbours
u, v join to the bytes of T. No merge has crossed the borders of their span, so the bytes of T alone have the parts [u, v] at
that point too. These two parts can only become T, and by 2 they do so as [l, r]: u, v is l, r. Hence no other listed pair
that joins to T, and no other pair that tiktoken would join, ever stands side by side. A token that no merge can be chosen
for must be unreachable: none of its listed pairs may be left over when the chosen merges are applied to its bytes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_NEVER = 2**62
_MOST_ID = 2**24
"""Larger ids are not those of a real vocabulary, and tables are indexed by them."""

_MOST_ROUNDS = 32


_MOST_HASH_BITS = 22


def _hash(keys: _Ints, num_bits: int) -> NDArray[np.uint64]:
    return (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - num_bits)


class NotRankable(ValueError):
    """The merges are not known to be equal to any ranks of tokens. The message says why, after "it ..."."""


@dataclass(frozen=True, slots=True)
class RankedTokens:
    tokens: list[bytes]
    """By rank: the single bytes, then what merges make, in the order of the merges."""
    ids: NDArray[np.int32]
    """The id of each in the vocabulary."""
    left_out: list[str]
    """The rest of the vocabulary, which no merge of bytes reaches."""


def _alphabet() -> dict[str, int]:
    """The letters that stand for bytes in a byte-level vocabulary: printable Latin-1 for itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


ALPHABET = _alphabet()
_BYTE_OF = np.full(max(map(ord, ALPHABET)) + 2, -1, np.int16)
"""By the number of a letter; the last entry stands for all others, which stand for no byte."""
_BYTE_OF[[ord(letter) for letter in ALPHABET]] = [*ALPHABET.values()]


def bytes_of_tokens(tokens: Sequence[str]) -> list[bytes | None]:
    """The bytes of each token of a byte-level vocabulary; None where it has other letters, so that no text contains it."""
    letters = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32)
    values = _BYTE_OF[np.minimum(letters, len(_BYTE_OF) - 1)]
    ends = np.cumsum(np.fromiter(map(len, tokens), np.int64, len(tokens)))
    data = values.astype(np.uint8).tobytes()
    found: list[bytes | None] = [data[begin:end] for begin, end in pairwise([0, *ends.tolist()])]
    for at in np.searchsorted(ends, np.flatnonzero(values < 0), "right").tolist():
        found[at] = None
    return found


def _ids_of(vocabulary: Mapping[str, int], tokens: Iterable[str]) -> _Ints:
    return np.fromiter(map(vocabulary.__getitem__, tokens), np.int64)


def rank_tokens(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]]) -> RankedTokens:
    """`merges` are pairs in the order of their priority, each once."""
    missing = sorted(byte for letter, byte in ALPHABET.items() if letter not in vocabulary)
    if missing:
        raise NotRankable(f"has no token for the byte {missing[0]:#04x}")
    known_ids = np.fromiter(vocabulary.values(), np.int64, len(vocabulary))
    if len(set(vocabulary.values())) != len(vocabulary) or known_ids.min() < 0 or known_ids.max() > _MOST_ID:
        raise NotRankable("gives one id to several tokens, or has ids that are too large")
    tokens = [*vocabulary]
    bytes_of = bytes_of_tokens(tokens)
    at = np.full(known_ids.max() + 1, -1)  # the place of a token among `tokens`, by its id
    at[known_ids] = np.arange(len(tokens))
    can_occur = np.array([value is not None for value in bytes_of])
    found = _Merges.of(vocabulary, merges)
    found = found.take(can_occur[at[found.made]])
    chosen = found.choose()
    found.check(chosen)
    ids = np.concatenate([_ids_of(vocabulary, sorted(ALPHABET, key=ALPHABET.__getitem__)), found.made[chosen]])
    can_occur[at[ids]] = False
    left_out = sorted(tokens[place] for place in np.flatnonzero(can_occur).tolist())
    ranked = [value for place in at[ids].tolist() if (value := bytes_of[place]) is not None]
    return RankedTokens(ranked, ids.astype(np.int32), left_out)


@dataclass(frozen=True, slots=True)
class _Split:
    """Which merge makes each token: by id, its place in the list and its two parts. Single bytes have place -1, tokens that
    are never made _NEVER; both are their own parts."""

    place: _Ints
    left: _Ints
    right: _Ints
    pairs: _Ints
    """The pairs that merge, as left * size + right, sorted."""
    pair_place: _Ints
    may_merge: Flags
    """By the hash of a pair, of `hash_bits`."""
    hash_bits: int

    def place_of_pair(self, left: _Ints, right: _Ints) -> _Ints:
        """_NEVER for a pair that does not merge."""
        found = np.full(len(left), _NEVER)
        wanted = left * len(self.place) + right
        maybe = np.flatnonzero(self.may_merge[_hash(wanted, self.hash_bits)])  # few do, and a search takes ten times as long
        if len(maybe):
            wanted = wanted[maybe]
            at = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
            found[maybe] = np.where(self.pairs[at] == wanted, self.pair_place[at], _NEVER)
        return found

    def is_crossed(self, left: _Ints, right: _Ints, before: _Ints) -> Flags:
        """Whether a merge with a place lower than `before` joins the end of `left` to the beginning of `right`, when the
        bytes of both are encoded side by side.

        Until then each side is merged as it is alone. So the walk goes back in time from the two whole tokens: it takes the
        later one apart, and looks at the two parts that touch. They touch until the younger of their owners is made. Where
        a run of one part x goes over the border and (x, x) is the merge, pairs are taken from the left: the right owner,
        made by that same merge, is too late, and the left one is not. Hence < and <=. The pair itself does not count.
        """
        crossed = np.zeros(len(left), bool)
        lane = np.arange(len(left))
        left_until = right_until = joined = np.full(len(left), _NEVER)
        while len(lane):
            hit = (joined < left_until) & (joined <= right_until) & (joined < before)
            crossed[lane[hit]] = True
            left_place, right_place = self.place[left], self.place[right]
            later = np.maximum(left_place, right_place)
            goes_on = ~hit & (later >= 0) & (later < _NEVER)
            opens_left = left_place > right_place
            left_until = np.where(opens_left, left_place, left_until)[goes_on]
            right_until = np.where(opens_left, right_until, right_place)[goes_on]
            left, right = (
                np.where(opens_left, self.right[left], left)[goes_on],
                np.where(opens_left, right, self.left[right])[goes_on],
            )
            lane, before = lane[goes_on], before[goes_on]
            joined = self.place_of_pair(left, right)
        return crossed


@dataclass(frozen=True, slots=True)
class _Merges:
    """The listed merges, in order, by ids; `size` is above every id."""

    left: _Ints
    right: _Ints
    made: _Ints
    size: int
    single: _Ints

    @staticmethod
    def of(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]]) -> _Merges:
        lefts, rights = [left for left, _ in merges], [right for _, right in merges]  # zip(*merges) takes twice as long
        single = _ids_of(vocabulary, ALPHABET)
        try:
            left, right = _ids_of(vocabulary, lefts), _ids_of(vocabulary, rights)
            made = _ids_of(vocabulary, map(operator.add, lefts, rights))
        except KeyError as error:
            raise NotRankable(f"has a merge of a token that is not in its vocabulary: {error}") from None
        return _Merges(left, right, made, max(vocabulary.values()) + 1, single)

    def take(self, wanted: Flags) -> _Merges:
        return replace(self, left=self.left[wanted], right=self.right[wanted], made=self.made[wanted])

    def choose(self) -> _Ints:
        """One merge for each token that can be made, by its place. Only a guess where several merges make one token:
        `check` decides."""
        _, first, which = np.unique(self.made, return_index=True, return_inverse=True)
        first_place = first[which]  # of the merges that make the same token
        chosen = np.sort(first)
        if len(chosen) == len(self.made):
            return chosen
        pairs = np.sort(self.left * self.size + self.right)
        if (pairs[1:] == pairs[:-1]).any():
            raise NotRankable("lists a merge twice")
        for _ in range(_MOST_ROUNDS):
            # All pairs, at the first place of their token: as tiktoken merges.
            split = self._split(chosen, np.arange(len(self.made)), first_place)
            fits = self._is_after_parts(split, np.arange(len(self.made)), first_place)
            fits[fits] = ~split.is_crossed(self.left[fits], self.right[fits], first_place[fits])
            places = np.flatnonzero(fits)
            better = np.sort(places[np.unique(self.made[places], return_index=True)[1]])
            if np.array_equal(better, chosen):
                return chosen
            chosen = better
        raise NotRankable("has several merges for one token, none of which is sure to be the one that is used")

    def check(self, chosen: _Ints) -> None:
        """Raises NotRankable unless the chosen merges encode every text as all of them do; see the module's proof."""
        split = self._split(chosen, chosen, chosen)
        fits = self._is_after_parts(split, chosen, chosen)
        fits[fits] = ~split.is_crossed(self.left[chosen[fits]], self.right[chosen[fits]], chosen[fits])
        if not fits.all():
            raise NotRankable("has merges that are never reached, or not in the order in which they are listed")
        spare = np.flatnonzero(split.place[self.made] == _NEVER)
        spare = spare[np.maximum(split.place[self.left[spare]], split.place[self.right[spare]]) < _NEVER]
        if not split.is_crossed(self.left[spare], self.right[spare], np.full(len(spare), _NEVER)).all():
            raise NotRankable("has merges whose parts are made only after the merge is due")

    def _split(self, chosen: _Ints, pairs: _Ints, pair_place: _Ints) -> _Split:
        place, left, right = np.full(self.size, _NEVER), np.arange(self.size), np.arange(self.size)
        place[self.made[chosen]] = pair_place[np.searchsorted(pairs, chosen)]
        left[self.made[chosen]] = self.left[chosen]
        right[self.made[chosen]] = self.right[chosen]
        place[self.single] = -1
        keys = self.left[pairs] * self.size + self.right[pairs]
        order = np.argsort(keys)
        hash_bits = min(_MOST_HASH_BITS, 5 + len(keys).bit_length())  # few of all pairs have the hash of one that merges
        may_merge = np.zeros(1 << hash_bits, bool)
        may_merge[_hash(keys, hash_bits)] = True
        return _Split(place, left, right, keys[order], pair_place[order], may_merge, hash_bits)

    def _is_after_parts(self, split: _Split, merges: _Ints, place: _Ints) -> Flags:
        return np.maximum(split.place[self.left[merges]], split.place[self.right[merges]]) < place
