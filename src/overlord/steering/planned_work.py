"""The work that a plan gives to each rank, as features that a cost is linear in: what reported times are compared with.

A column for each coefficient of the cost, and one for the tokens whose keys and values a rank receives in rings.

- A whole document counts with its own features, a piece of a document that several ranks share with its part of them.
- Where images are exchanged, a rank encodes the images of its place instead of those of its own samples.
- Only the first stage of a pipeline encodes images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.arrange.balancing import bin_sums
from overlord.arrange.hdp.rings import Rings
from overlord.arrange.learned_cost import ENCODER
from overlord.arrange.vision.encoding import Encoding, place_of
from overlord.arrange.vision.images import EncodedSamples

if TYPE_CHECKING:
    from overlord.arrange.learned_cost import LearnedCost
    from overlord.arrange.mesh_tree import Bucket, ClientPlaceTree
    from overlord.arrange.plan import Plan
    from overlord.stream.facts import Floats, Ints


class RankWork(NamedTuple):
    """The microbatches of one rank in a step."""

    features: Floats
    """[microbatch, column]."""
    rings: list[int]
    """The ring of each microbatch, -1 where the rank runs it alone."""


@dataclass(frozen=True, slots=True)
class EncodedPlaces:
    """What each place encodes in each round of microbatches, where images are exchanged."""

    axis: Bucket
    features: Floats
    """[round, place, column of the encoder]."""


@dataclass(frozen=True, slots=True)
class PlannedWork:
    """The work of all ranks in a step."""

    axis: Bucket
    features: Floats
    """[microbatch, column], group by group."""
    first: Ints
    """The first microbatch of each group, and the number of all."""
    encoder: slice
    """The columns of the encoder."""
    encoded: EncodedPlaces | None
    rings: Rings | None

    @staticmethod
    def of(plan: Plan, cost: LearnedCost) -> PlannedWork:
        rings, encoding = plan.part(Rings), plan.part(Encoding)
        samples = plan.samples
        received = np.zeros(len(samples))
        of_samples = cost.features(samples if rings is None else samples.with_columns(tokens=rings.whole))
        if rings is not None:
            share = samples.tokens / np.maximum(1, rings.whole)
            parts = rings.parts_of_pieces(plan)
            # A rank has a part in `parts` of the document, and gets the keys and values of the others.
            of_samples, received = of_samples * share[:, None], rings.whole * share * (parts - 1)
        columns = np.column_stack([of_samples, received])[plan.order]
        features = summed_features(columns, plan.micro_of_order(), len(plan.offsets) - 1)
        first = np.concatenate([[0], np.cumsum(plan.counts)])
        encoder = cost.columns_of(ENCODER)
        encoded = None if encoding is None else _encoded(encoding, cost)
        return PlannedWork(plan.axis, features, first, encoder, encoded, rings)

    def of_rank(self, rank: int, tree: ClientPlaceTree) -> RankWork:
        """The microbatches of a rank."""
        place, group = tree.coordinates(rank), tree.group_of(rank, self.axis)
        begin, end = self.first[group : group + 2].tolist()
        features = self.features[begin:end]
        if self.encoded is not None:
            features = features.copy()
            at = place_of(place, tree, self.encoded.axis)
            features[:, self.encoder] = 0.0 if at is None else self.encoded.features[: end - begin, at]
        elif place.pp > 0 and self.encoder.stop > self.encoder.start:
            features = features.copy()
            features[:, self.encoder] = 0.0
        rings = [-1] * (end - begin) if self.rings is None else self.rings.of_micro[begin:end].tolist()
        return RankWork(features, rings)

    def ring_ranks(self, ring: int, rank: int, tree: ClientPlaceTree) -> tuple[int, ...]:
        """The ranks that run a ring together with a rank: those with its pipeline stage and tensor-parallel index."""
        assert self.rings is not None  # there is a ring
        place, cp = tree.coordinates(rank), tree.mesh.cp
        members = self.rings.members[self.rings.bounds[ring] : self.rings.bounds[ring + 1]].tolist()
        return tuple(tree.rank_of(pp=place.pp, dp=at // cp, cp=at % cp, tp=place.tp) for at in members)


def _encoded(encoding: Encoding, cost: LearnedCost) -> EncodedPlaces | None:
    module = cost.modules.get(ENCODER)
    if not isinstance(module, EncodedSamples):
        return None
    features = module.of_images.features(encoding.images)[encoding.by_place]
    slot = np.repeat(np.arange(len(encoding.bounds) - 1), np.diff(encoding.bounds))
    sums = summed_features(features, slot, len(encoding.bounds) - 1)
    return EncodedPlaces(encoding.axis, sums.reshape(-1, encoding.num_places, features.shape[1]))


def summed_features(features: Floats, micro: Ints, num_micro: int) -> Floats:
    """Features of samples, summed over each microbatch."""
    return np.column_stack([bin_sums(micro, column, num_micro) for column in features.T])
