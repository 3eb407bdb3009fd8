"""Which rank encodes which image, and how the encoder's output reaches the rank that trains on the image.

Images are spread over all encoder places independently of where their samples are. Ranks run their microbatches in lockstep,
so microbatch k of all groups is a *round*: the images of a round are encoded together, balanced over places, and exchanged
in one all-to-all. Most images are encoded where they are used; only the surplus of a place moves.

Encoder places lie along an axis of the mesh:

- "cp": place d * cp + c is the rank with these indexes on the first pipeline stage. Ranks that differ only in tp encode the
  same images, and exchange with the ranks of their own tp index.
- "world": every rank is a place of its own, by its number; later pipeline stages encode too.

The output for a microbatch's images goes whole to all ranks of its group on the first pipeline stage, because context
parallelism spreads the tokens of an image over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.arrange.balancing import bin_sums, max_over_mean
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
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from overlord.arrange.graph import DGraph
    from overlord.arrange.mesh_tree import Bucket, ClientPlaceTree, Place
    from overlord.arrange.microbatches import Arrangement
    from overlord.messages import Fields


@dataclass(frozen=True, slots=True)
class Encoding:
    """The part that `vision.encode` adds to a plan: which place encodes each image of the step.

    Images are sorted by microbatch and, within it, by document. `by_place` lists them round by round and, within a round,
    place by place: the entries from bounds[k * num_places + e] to the next bound are those that place e encodes in round k.
    """

    axis: Bucket
    num_places: int
    places: list[list[int]]
    """The encoder places of each group."""
    images: Images
    micro: Ints
    """The microbatch that trains on each image, numbered over all groups."""
    place: Ints
    """The place that encodes each image."""
    by_place: Ints
    bounds: Ints

    def microbatch(self, plan: Plan, group: int, micro: int, documents: Ints, samples: Samples) -> tuple[Samples, Round]:
        """The texts of a microbatch, and the round of images that its group's ranks encode while they run it."""
        number = micro - int(plan.counts[:group].sum())
        return text_alone(samples), round_of_group(self, plan, group, number, documents)


@dataclass(frozen=True, slots=True)
class Round:
    """One group's part of a round: the images that its places encode, and the images of its own microbatch.

    `samples`, `tokens`, `place` and `home` have one entry per image that a place of the group encodes; `home` is the group
    that trains on it. `own_*` have one entry per image of the group's own microbatch, in document order.
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
        """The images that the group's places encode, which may belong to samples of other groups."""
        return self.samples

    def build(self, fields: Fields, images: Sequence[NDArray[np.uint8]]) -> tuple[Fields, EncodedRound]:
        """Check the microbatch's fields against its images; they stay as they are. The images travel to `EncodedRound`."""
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
    """A round with the images that the group's ranks encode. It adds these fields to a rank's microbatch:

        encode_images      uint8 [n, h, w, c]     the images that this rank encodes; a list of [h, w, c] where sizes differ
        encode_tokens      int64 [n]              the rows that the encoder returns for each of them
        send_rows          int64 [sent]           the rows of the encoder's output to send, by the place they go to
        send_counts        int64 [places]         how many rows go to each place
        receive_counts     int64 [places]         how many rows come from each
        receive_rows       int64 [rows]           the received row of each image token of the microbatch, in order
        image_document     int32 [images]         the document of each image of the microbatch
        image_tokens       int64 [images]         its number of rows

    The microbatch has no field `images`. `overlord.trainer.exchange` does the whole exchange in one call.
    """

    round: Round
    images: Sequence[NDArray[np.uint8]]

    def fields_for(self, place: Place, tree: ClientPlaceTree) -> Fields:
        """The fields of one rank. A rank that is no encoder place neither sends nor receives."""
        of = self.round
        own: Fields = {"image_document": of.own_document.astype(np.int32), "image_tokens": of.own_tokens}
        at = place_of(place, tree, of.axis)
        if at is None:
            return own
        found = routing(of, at, places_of_groups(tree, of.axis))
        return own | {
            "encode_images": stack_images([self.images[i] for i in found.encoded.tolist()]),
            "encode_tokens": of.tokens[found.encoded],
            "send_rows": found.send_rows,
            "send_counts": found.send_counts,
            "receive_counts": found.receive_counts,
            "receive_rows": found.receive_rows,
        }


def stack_images(images: list[NDArray[np.uint8]]) -> NDArray[np.uint8] | list[NDArray[np.uint8]]:
    """The images as one array; the list itself where their sizes differ."""
    if len({image.shape for image in images}) > 1:
        return images
    return _stack_same_shape(images) if images else np.empty((0, 0, 0, 3), np.uint8)


def _stack_same_shape(images: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Images of one shape as one array, without a copy where they are contiguous in memory already."""
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
    """The places of each data-parallel group that train on images: those of the first pipeline stage."""
    mesh = tree.mesh
    if axis == "cp":
        return [list(range(dp * mesh.cp, (dp + 1) * mesh.cp)) for dp in range(mesh.dp)]
    if axis == "world":
        return [
            [tree.rank_of(dp=dp, cp=cp, tp=tp) for cp in range(mesh.cp) for tp in range(mesh.tp)] for dp in range(mesh.dp)
        ]
    raise SpecError(f"images are spread along cp or world, not {axis!r}")


def encoders_of_groups(tree: ClientPlaceTree, axis: Bucket) -> list[list[int]]:
    """The places of each data-parallel group that encode images."""
    return places_of_groups(tree, axis) if axis == "cp" else [tree.ranks_of(dp) for dp in range(tree.mesh.dp)]


def place_of(place: Place, tree: ClientPlaceTree, axis: Bucket) -> int | None:
    """The encoder place of a rank; None if it has none."""
    if axis == "world":
        return place.rank
    return place.dp * tree.mesh.cp + place.cp if place.pp == 0 else None


def _place_rounds(costs: Floats, group: Ints, round_of: Ints, homes: list[list[int]], slowness: Floats) -> Ints:
    """The place of each image. In every round all places take about the same time, and as many images as possible stay in
    their group."""
    place = np.empty(len(costs), np.int64)
    order = np.lexsort((-costs, round_of))
    is_even = bool((slowness == slowness[0]).all())
    for part in np.split(order, np.flatnonzero(np.diff(round_of[order])) + 1):
        if is_even:
            place[part] = _place_round(costs[part], group[part], homes, len(slowness))
        else:
            place[part] = _place_round_by_time(costs[part], group[part], homes, slowness)
    return place


def _place_round_by_time(costs: Floats, group: Ints, homes: list[list[int]], slowness: Floats) -> Ints:
    """`_place_round` for places of different speed: each image goes to the place that would finish it first, of its group
    while that is before the mean, otherwise of all."""
    goal = float(costs.sum()) / float((1 / slowness).sum())
    times, places = np.zeros(len(slowness)), np.full(len(costs), -1)
    own = [np.array(home, np.int64) for home in homes]
    items: list[tuple[float, int]] = list(zip(costs.tolist(), group.tolist(), strict=True))
    # A loop over images, because each choice depends on those before.
    for i, (cost, g) in enumerate(items):
        ends = times[own[g]] + cost * slowness[own[g]]
        if ends.min() <= goal:
            places[i] = own[g][ends.argmin()]
            times[places[i]] = ends.min()
    for i in np.flatnonzero(places < 0).tolist():
        ends = times + costs[i] * slowness
        places[i] = int(ends.argmin())
        times[places[i]] = ends.min()
    return places


def _place_round(costs: Floats, group: Ints, homes: list[list[int]], num_places: int) -> list[int]:
    """The place of each image of a round, sorted by falling cost: the cheapest place of its group while that stays below the
    mean, otherwise the cheapest place of all."""
    mean = float(costs.sum()) / num_places
    loads, places = [0.0] * num_places, [-1] * len(costs)
    own: list[list[tuple[float, int]]] = [[(0.0, place) for place in home] for home in homes]
    surplus: list[tuple[int, float]] = []
    # A loop over images, because each choice depends on those before.
    items: Iterable[tuple[float, int]] = zip(costs.tolist(), group.tolist(), strict=True)
    for i, (cost, g) in enumerate(items):
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
    """The place that encodes each image, before the order of a plan is known. `costs` and `place` have an entry per
    image."""

    axis: Bucket
    num_places: int
    places: list[list[int]]
    """The encoder places of each group."""
    images: Images
    costs: Floats
    place: Ints
    share_that_stays: float
    """The share of image tokens that are encoded in the group that trains on them."""

    def in_plan(self, arrangement: Arrangement, order: Ints) -> Encoding:
        """The same for a plan that lists the samples in `order`."""
        return encoding_of(self, arrangement, order)

    @property
    def straggler(self) -> float:
        """The costliest place over the mean place, in the whole step."""
        return max_over_mean(bin_sums(self.place, self.costs, self.num_places))


def place_images(images: Images, costs: Floats, a: Arrangement, graph: DGraph, axis: Bucket) -> Placement:
    """Spread images over all places, evenly in each round of microbatches."""
    tree = graph.place
    num_places, homes = tree.num_groups(axis), places_of_groups(tree, axis)
    group = a.group[images.sample]
    slowness = graph.slowness_along(axis)
    place = _place_rounds(costs, group, a.micro[images.sample], homes, np.ones(num_places) if slowness is None else slowness)
    group_of_place = np.full(num_places, -1)
    for number, home in enumerate(homes):
        group_of_place[home] = number
    here = images.tokens[group_of_place[place] == group].sum() / max(1, images.tokens.sum())
    return Placement(axis, num_places, encoders_of_groups(tree, axis), images, costs, place, float(here))


def encode(graph: DGraph, images: Images, cost: ImageCost, axis: Bucket = "cp") -> DGraph:
    """Spread the encoding of images over all ranks along an axis: "cp" for dp x cp ranks, "world" for all.

    Call it after `balance(equal_counts=True)`. In each round of microbatches all ranks encode about the same `cost`,
    wherever the images' samples are. Trainers send the encoder's output to the rank that needs it with
    `overlord.trainer.exchange`.
    """
    a = graph.arrangement
    if a is None or (a.counts != a.counts[0]).any():
        raise SpecError(
            "ranks exchange images microbatch by microbatch: call balance(...) with equal_counts=True before encode"
        )
    if graph.axis != "dp":
        raise SpecError(f"images are exchanged between data-parallel groups: distribute over 'dp', not {graph.axis!r}")
    found = place_images(images, cost(images), a, graph, axis)
    text = "{} images over {} ranks along {}: slowest {:.3f}x mean; {:.0%} of their tokens stay in their group"
    stage = PlanStage("encode", text, (len(images), found.num_places, axis, found.straggler, found.share_that_stays))
    return graph.with_stage(stage, parts=(*graph.parts, found))


def encoding_of(of: Placement, a: Arrangement, order: Ints) -> Encoding:
    """The `Encoding` of a plan that lists the samples in `order`."""
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


def round_of_group(encoding: Encoding, plan: Plan, group: int, number: int, documents: Ints) -> Round:
    """One group's part of round `number`. `documents` are the indexes of its microbatch's samples in the plan."""
    images, bounds, samples, counts = encoding.images, encoding.bounds, plan.samples, plan.counts
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
    """The samples with only one image each, the one with this number, and no text."""
    sizes = sizes_of(samples)
    one = ImageSizes(sizes.first + number, np.ones(len(samples), np.int64), sizes.height, sizes.width)
    wanted = {**samples.sizes, ONLY_IMAGE: number + 1}
    return replace(samples.with_columns(start=0, stop=0, tokens=0, loss_tokens=0), sizes=wanted, images=one)


def text_alone(samples: Samples) -> Samples:
    """The samples without their images."""
    return replace(samples, sizes={**samples.sizes, ONLY_IMAGE: np.full(len(samples), -1)})


@dataclass(frozen=True, slots=True)
class Routing:
    """How the rows of a place's encoder output reach the ranks that train on them.

    The place sends the rows `send_rows` of its output, `send_counts` to each place, and receives `receive_counts` from each.
    The rows `receive_rows` of the received ones are those of its microbatch's images, in order.
    """

    encoded: Ints
    """The images of the round that this place encodes, as indexes into those of its group."""
    send_rows: Ints
    send_counts: Ints
    receive_rows: Ints
    receive_counts: Ints


def routing(of: Round, place: int, homes: list[list[int]]) -> Routing:
    """The routing of one place. `homes` has the places of each group that train on images."""
    encoded = np.flatnonzero(of.place == place)
    tokens, home = of.tokens[encoded], of.home[encoded]
    ends = np.cumsum(tokens)
    send_counts = np.zeros(of.num_places, np.int64)
    sent: list[tuple[int, Ints]] = []
    # Images are sorted by home, so those of a group are one run of rows, which goes to every place of the group.
    groups: list[int] = np.unique(home).tolist()
    for group in groups:
        own = np.flatnonzero(home == group)
        rows = np.arange(int(ends[own[0]] - tokens[own[0]]), int(ends[own[-1]]))
        for target in homes[group]:
            send_counts[target] = len(rows)
            sent.append((target, rows))
    sent.sort(key=lambda entry: entry[0])
    receive_rows, receive_counts = _receive(of, any(place in home for home in homes))
    return Routing(
        encoded=encoded,
        send_rows=np.concatenate([np.zeros(0, np.int64), *(rows for _, rows in sent)]),
        send_counts=send_counts,
        receive_rows=receive_rows,
        receive_counts=receive_counts,
    )


def _receive(of: Round, trains: bool) -> tuple[Ints, Ints]:
    """The received row of each image token of the microbatch, and the number of rows received from each place."""
    if not trains:
        return np.zeros(0, np.int64), np.zeros(of.num_places, np.int64)
    counts = np.bincount(of.own_place, of.own_tokens, of.num_places).astype(np.int64)
    arrival = np.argsort(of.own_place, kind="stable")  # a place sends the images of a group in their order
    begins = np.empty(len(arrival), np.int64)
    begins[arrival] = np.cumsum(of.own_tokens[arrival]) - of.own_tokens[arrival]
    ends = np.cumsum(of.own_tokens)
    rows = np.arange(int(of.own_tokens.sum())) + np.repeat(begins - (ends - of.own_tokens), of.own_tokens)
    return rows, counts
