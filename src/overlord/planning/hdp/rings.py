"""Which ranks run which microbatches of a step together, and which part of its documents each of them has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.planning.facts import Floats, Ints


@dataclass(frozen=True, slots=True)
class Ring:
    """One rank's side of one microbatch, for a trainer that attends over several ranks.

    `places` are the ranks that run it together, as numbers dp * cp size + cp index, in the order of the ring: one alone for
    a microbatch of whole documents. The columns have an entry for each sample of the microbatch, which is a piece of a
    document: it begins `offset` tokens into it, and the whole has `whole` tokens.
    """

    number: int
    """In which order ranks run the rings they share: each runs its own by rising number. -1 for one that is run alone."""
    places: Ints
    index: int
    """Which of `places` this rank is."""
    offset: Ints
    whole: Ints
    offload: Floats
    """The part of its activations that each document moves to the host, for it to fit."""


@dataclass(frozen=True, slots=True)
class Rings:
    """The rings of a plan. `of_micro[m]` is the ring that microbatch m is part of, or -1; the ranks of ring k are
    `members[bounds[k]:bounds[k + 1]]`. The other columns have an entry for each of the plan's samples."""

    of_micro: Ints
    members: Ints
    bounds: Ints
    offset: Ints
    whole: Ints
    offload: Floats
    cost: Floats
    """What each piece costs its rank: its part of what the whole document costs."""

    def ring(self, micro: int, rank: int, samples: Ints) -> Ring:
        """The side that `rank` has of a microbatch that holds these of the plan's samples."""
        number = int(self.of_micro[micro])
        places = np.array([rank]) if number < 0 else self.members[self.bounds[number] : self.bounds[number + 1]]
        index = int(np.flatnonzero(places == rank)[0])
        return Ring(number, places, index, self.offset[samples], self.whole[samples], self.offload[samples])
