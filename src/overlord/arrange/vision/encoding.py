"""Which rank encodes which image, and how what comes out reaches the rank that trains on it.

The images of a step are a graph of their own: they are spread over all encoder places, whatever the backbone's arrangement
is. Ranks run their microbatches in step, so microbatch k of all groups is a round: the images of a round are encoded
together, sent on in one all-to-all, and its places cost the same. Most images stay where they are used; only what a place
has too much of moves.

Encoder places lie along an axis of the mesh:

- "cp": place d * cp + c is the rank with these indexes on the first pipeline stage. Ranks that differ only in tp encode the
  same images, and exchange with the ranks of their own tp index.
- "world": every rank is a place of its own, by its number; later pipeline stages encode too.

A microbatch's images go to all ranks of its group on the first pipeline stage, whole: context parallelism spreads the places
of an image over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.arrange.balancing import max_over_mean, summed
from overlord.arrange.plan import Plan, PlanStage
from overlord.arrange.vision.images import ImageCost, Images, sizes_of
from overlord.errors import DataError, SpecError
from overlord.stream.facts import (
    ONLY_IMAGE,
    Floats,
    ImageSizes,
    Ints,
    Samples,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.arrange.graph import DGraph
    from overlord.arrange.mesh_tree import Bucket, ClientPlaceTree, Place
    from overlord.arrange.microbatches import Arrangement
    from overlord.messages import Fields


@dataclass(frozen=True, slots=True)
class Encoding:
    """Every image of a step: microbatch `micro` (numbered over all groups) trains on it, `place` encodes it. Images are in
    the order of their microbatches and, in these, of their documents. `by_place` lists them round by round and, in these,
    place by place: entries bounds[k * num_places + e] to the next bound are what place e encodes in round k."""

    axis: Bucket
    num_places: int
    places: list[list[int]]
    """The encoder places of each group."""
    images: Images
    micro: Ints
    place: Ints
    by_place: Ints
    bounds: Ints

    def microbatch(self, plan: Plan, group: int, micro: int, documents: Ints, samples: Samples) -> tuple[Samples, Round]:
        """The round that a group's ranks encode while they run a microbatch, and the microbatch's texts."""
        number = micro - int(plan.counts[:group].sum())
        return text_alone(samples), round_of_group(self, plan.samples, plan.counts, group, number, documents)


@dataclass(frozen=True, slots=True)
class Round:
    """One group's part of a round: what its places encode, and what its microbatch gets.

    `samples`, `tokens`, `place` and `home` have one entry per image that a place of the group encodes; `home` is
    the group that trains on it. `own_*` have one entry per image of the group's own microbatch, in document order.
    """

    axis: Bucket
    num_places: int
    samples: Samples
    tokens: Ints
    place: Ints
    home: Ints
    own_document: Ints
    own_tokens: Ints
    own_place: Ints

    @property
    def more_samples(self) -> Samples:
        """The images that the group's places encode, of whatever group's samples."""
        return self.samples

    def build(self, fields: Fields, images: Sequence[NDArray[np.uint8]]) -> tuple[Fields, EncodedRound]:
        """The fields of the microbatch that gets the images, as they are."""
        rows: NDArray[Any] | None = fields.get("image_row")
        found, planned = (0, 0) if rows is None else (int(rows.max(initial=-1)) + 1, int(self.own_tokens.sum()))
        if found != planned:
            raise DataError(
                f"the texts of a microbatch have {found} image places, but its images have {planned} tokens by the "
                "strategy's PatchGrid; use one grid for both, and documents that are not cut (long_documents='drop' or "
                "'fail')"
            )
        return fields, EncodedRound(self, images)


@dataclass(frozen=True, slots=True)
class EncodedRound:
    """A round with the images that the group's ranks encode. The fields that it adds for a rank:

        encode_images      uint8 [n, h, w, c]     or a list of [h, w, c] where sizes differ: what this rank encodes
        encode_tokens      int64 [n]              the rows that the encoder returns for each of them
        send_rows          int64 [sent]           the rows of the encoder's output to send, by the place they go to
        send_counts        int64 [places]         how many rows go to each place
        receive_counts     int64 [places]         how many rows come from each
        receive_rows       int64 [rows]           the rows of what came that the microbatch's images have, in their order
        image_document     int32 [images]         the document of each image of the microbatch
        image_tokens       int64 [images]         its rows

    The microbatch's images themselves are not there: `images` is missing. `overlord.trainer.exchange` makes one call of it.
    """

    round: Round
    images: Sequence[NDArray[np.uint8]]

    def fields_for(self, place: Place, tree: ClientPlaceTree) -> Fields:
        """A rank that is no encoder place sends and receives nothing."""
        of = self.round
        own: Fields = {"image_document": of.own_document.astype(np.int32), "image_tokens": of.own_tokens}
        at = place_of(place, tree, of.axis)
        if at is None:
            return own
        found = routing(of, at, places_of_groups(tree, of.axis))
        return own | {
            "encode_images": stacked_images([self.images[i] for i in found.encoded.tolist()]),
            "encode_tokens": of.tokens[found.encoded],
            "send_rows": found.send_rows,
            "send_counts": found.send_counts,
            "receive_counts": found.receive_counts,
            "receive_rows": found.receive_rows,
        }


def stacked_images(images: list[NDArray[np.uint8]]) -> NDArray[np.uint8] | list[NDArray[np.uint8]]:
    """Images as one array, or as they are where their sizes differ."""
    if len({image.shape for image in images}) > 1:
        return images
    return _stacked(images) if images else np.empty((0, 0, 0, 3), np.uint8)


def _stacked(images: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Images of one shape as one array; without a copy where they already lie one after the other."""
    first, size = images[0], images[0].nbytes
    base, address = first.base, first.ctypes.data
    in_a_row = base is not None and all(
        image.base is base and image.flags.c_contiguous and image.ctypes.data == address + i * size
        for i, image in enumerate(images)
    )
    if not in_a_row:
        return np.stack(images)
    return np.lib.stride_tricks.as_strided(first, (len(images), *first.shape), (size, *first.strides))


def places_of_groups(tree: ClientPlaceTree, axis: Bucket) -> list[list[int]]:
    """For each data-parallel group, its places that train on images: those of the first pipeline stage."""
    mesh = tree.mesh
    if axis == "cp":
        return [list(range(dp * mesh.cp, (dp + 1) * mesh.cp)) for dp in range(mesh.dp)]
    if axis == "world":
        return [
            [tree.rank_of(dp=dp, cp=cp, tp=tp) for cp in range(mesh.cp) for tp in range(mesh.tp)] for dp in range(mesh.dp)
        ]
    raise SpecError(f"images are spread along cp or world, not {axis!r}")


def encoders_of_groups(tree: ClientPlaceTree, axis: Bucket) -> list[list[int]]:
    """For each data-parallel group, its places that encode."""
    return places_of_groups(tree, axis) if axis == "cp" else [tree.ranks_of(dp) for dp in range(tree.mesh.dp)]


def place_of(place: Place, tree: ClientPlaceTree, axis: Bucket) -> int | None:
    """The encoder place of a rank; None where it has none."""
    if axis == "world":
        return place.rank
    return place.dp * tree.mesh.cp + place.cp if place.pp == 0 else None


def _placed(costs: Floats, group: Ints, round_of: Ints, homes: list[list[int]], num_places: int) -> Ints:
    """The place of each image: in every round all places cost about the same, and as much as can stays in its group."""
    place = np.empty(len(costs), np.int64)
    order = np.lexsort((-costs, round_of))
    for part in np.split(order, np.flatnonzero(np.diff(round_of[order])) + 1):
        place[part] = _placed_round(costs[part], group[part], homes, num_places)
    return place


def _placed_round(costs: Floats, group: Ints, homes: list[list[int]], num_places: int) -> list[int]:
    """By falling cost: to the group's least place while that stays below the mean, the rest to the least place of all."""
    mean = float(costs.sum()) / num_places
    loads, places = [0.0] * num_places, [-1] * len(costs)
    own = [[(0.0, place) for place in home] for home in homes]
    surplus: list[tuple[int, float]] = []
    # A loop over images, because each choice depends on those before.
    for i, (cost, g) in enumerate(zip(costs.tolist(), group.tolist(), strict=True)):
        total, place = own[g][0]
        total += cost
        if total > mean:
            surplus.append((i, cost))
            continue
        places[i], loads[place] = place, total
        heapreplace(own[g], (total, place))
    least = [(total, place) for place, total in enumerate(loads)]
    heapify(least)
    for i, cost in surplus:
        total, place = least[0]
        places[i] = place
        heapreplace(least, (total + cost, place))
    return places


@dataclass(frozen=True, slots=True)
class Placement:
    """Where images are encoded, before the order of a plan is known: `costs` and `place` have an entry per image."""

    axis: Bucket
    num_places: int
    places: list[list[int]]
    """The encoder places of each group."""
    images: Images
    costs: Floats
    place: Ints
    share_that_stays: float
    """Of all image tokens, those that are encoded in the group that trains on them."""

    def in_plan(self, arrangement: Arrangement, order: Ints) -> Encoding:
        """Where images are encoded, in a plan whose samples are run in `order`."""
        return encoding_of(self, arrangement, order)

    @property
    def straggler(self) -> float:
        """How much longer the slowest place encodes in the whole step than the average one."""
        return max_over_mean(summed(self.place, self.costs, self.num_places))


def spread(images: Images, costs: Floats, a: Arrangement, tree: ClientPlaceTree, axis: Bucket) -> Placement:
    """Spread images over all places, evenly in each round of microbatches."""
    num_places, homes = tree.num_groups(axis), places_of_groups(tree, axis)
    group = a.group[images.sample]
    place = _placed(costs, group, a.micro[images.sample], homes, num_places)
    group_of_place = np.full(num_places, -1)
    for number, home in enumerate(homes):
        group_of_place[home] = number
    here = images.tokens[group_of_place[place] == group].sum() / max(1, images.tokens.sum())
    return Placement(axis, num_places, encoders_of_groups(tree, axis), images, costs, place, float(here))


def encode(graph: DGraph, images: Images, cost: ImageCost, axis: Bucket = "cp") -> DGraph:
    """Spread the encoding of images over all ranks along an axis ("cp": dp x cp, or "world"), evenly in each round of
    microbatches, whatever the samples' arrangement. Trainers exchange what comes out."""
    a = graph.arrangement
    if a is None or (a.counts != a.counts[0]).any():
        raise SpecError(
            "ranks exchange images microbatch by microbatch: call balance(...) with equal_counts=True before encode"
        )
    found = spread(images, cost(images), a, graph.place, axis)
    text = "{} images over {} ranks along {}: slowest {:.3f}x mean; {:.0%} of their tokens stay in their group"
    stage = PlanStage("encode", text, (len(images), found.num_places, axis, found.straggler, found.share_that_stays))
    return graph.change(stage, parts=(*graph.parts, found))


def encoding_of(of: Placement, a: Arrangement, order: Ints) -> Encoding:
    """The encoding of a plan whose samples are run in `order`."""
    images, place, num_places = of.images, of.place, of.num_places
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    at = np.lexsort((images.number, position[images.sample]))
    images = Images(images.sample[at], images.number[at], images.patches[at], images.tokens[at])
    first = np.cumsum(a.counts) - a.counts
    round_of = a.micro[images.sample]
    slot = round_of * num_places + place[at]
    by_place = np.argsort(slot, kind="stable")
    num_slots = int(a.counts.max(initial=0)) * num_places
    bounds = np.concatenate([[0], np.cumsum(np.bincount(slot, minlength=num_slots))])
    micro = first[a.group[images.sample]] + round_of
    return Encoding(of.axis, num_places, of.places, images, micro, place[at], by_place, bounds)


def round_of_group(encoding: Encoding, samples: Samples, counts: Ints, group: int, number: int, documents: Ints) -> Round:
    """Round `number` as a group sees it. `documents` are the indexes of its microbatch's samples."""
    images, bounds = encoding.images, encoding.bounds
    slots = number * encoding.num_places + np.array(encoding.places[group], np.int64)
    mine = np.concatenate([encoding.by_place[bounds[slot] : bounds[slot + 1]] for slot in slots.tolist()])
    micro = int(counts[:group].sum()) + number
    begin, end = np.searchsorted(encoding.micro, [micro, micro + 1]).tolist()
    document_of = dict(zip(documents.tolist(), range(len(documents)), strict=True))
    last_of = np.cumsum(counts)
    return Round(
        axis=encoding.axis,
        num_places=encoding.num_places,
        samples=images_alone(samples.take(images.sample[mine]), images.number[mine]),
        tokens=images.tokens[mine],
        place=encoding.place[mine],
        home=np.searchsorted(last_of, encoding.micro[mine], side="right"),
        own_document=np.array([document_of[sample] for sample in images.sample[begin:end].tolist()], np.int64),
        own_tokens=images.tokens[begin:end],
        own_place=encoding.place[begin:end],
    )


def images_alone(samples: Samples, number: Ints) -> Samples:
    """One image of each sample, and nothing of its text."""
    sizes = sizes_of(samples)
    one = ImageSizes(sizes.first + number, np.ones(len(samples), np.int64), sizes.height, sizes.width)
    wanted = {**samples.sizes, ONLY_IMAGE: number + 1}
    return replace(samples.with_columns(start=0, stop=0, tokens=0, loss_tokens=0), sizes=wanted, images=one)


def text_alone(samples: Samples) -> Samples:
    """The samples without their images."""
    return replace(samples, sizes={**samples.sizes, ONLY_IMAGE: np.full(len(samples), -1)})


@dataclass(frozen=True, slots=True)
class Routing:
    """How the rows that an encoder gives for a rank's images reach those who train on them.

    Take the rows `send_rows` of the encoder's output, exchange them so that each place gets `send_counts` of them and gives
    `receive_counts`, and take the rows `receive_rows` of what came: the rows of the microbatch's images, in their order.
    """

    encoded: Ints
    """Which of the group's images of the round this place encodes."""
    send_rows: Ints
    send_counts: Ints
    receive_rows: Ints
    receive_counts: Ints


def routing(of: Round, place: int, homes: list[list[int]]) -> Routing:
    """The routing of one place; `homes` has the places of each group that train on images."""
    encoded = np.flatnonzero(of.place == place)
    tokens, home = of.tokens[encoded], of.home[encoded]
    ends = np.cumsum(tokens)
    send_counts = np.zeros(of.num_places, np.int64)
    sent: list[tuple[int, Ints]] = []
    # Images lie by home already, so those of a group are one run of rows, which goes to every place of the group.
    for group in np.unique(home).tolist():
        own = np.flatnonzero(home == group)
        rows = np.arange(int(ends[own[0]] - tokens[own[0]]), int(ends[own[-1]]))
        for target in homes[group]:
            send_counts[target] = len(rows)
            sent.append((target, rows))
    sent.sort(key=lambda entry: entry[0])
    receive_rows, receive_counts = _received(of, any(place in home for home in homes))
    return Routing(
        encoded=encoded,
        send_rows=np.concatenate([np.zeros(0, np.int64), *(rows for _, rows in sent)]),
        send_counts=send_counts,
        receive_rows=receive_rows,
        receive_counts=receive_counts,
    )


def _received(of: Round, trains: bool) -> tuple[Ints, Ints]:
    """What comes of the microbatch's images, by the place that encodes each, and where each row of it lies then."""
    if not trains:
        return np.zeros(0, np.int64), np.zeros(of.num_places, np.int64)
    counts = np.bincount(of.own_place, of.own_tokens, of.num_places).astype(np.int64)
    arrival = np.argsort(of.own_place, kind="stable")  # a place sends a group's images in their order
    begins = np.empty(len(arrival), np.int64)
    begins[arrival] = np.cumsum(of.own_tokens[arrival]) - of.own_tokens[arrival]
    ends = np.cumsum(of.own_tokens)
    rows = np.arange(int(of.own_tokens.sum())) + np.repeat(begins - (ends - of.own_tokens), of.own_tokens)
    return rows, counts
