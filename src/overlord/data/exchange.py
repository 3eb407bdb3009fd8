"""What a rank is given where images are encoded on other ranks than those that train on them: the fields of an exchange.

    encode_images      uint8 [n, h, w, c]     or a list of [h, w, c] where sizes differ: what this rank encodes
    encode_tokens      int64 [n]              the rows that the encoder gives for each of them
    send_rows          int64 [sent]           the rows of the encoder's output to send, by the place they go to
    send_counts        int64 [places]         how many rows go to each place
    receive_counts     int64 [places]         how many rows come from each
    receive_rows       int64 [rows]           the rows of what came that the microbatch's images have, in their order
    image_document     int32 [images]         the document of each image of the microbatch
    image_tokens       int64 [images]         its rows

The microbatch's images themselves are not there: `images` is missing. `overlord.trainer.exchange` makes one call of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overlord.data.collate import Fields, stacked_images
from overlord.data.payload import Payload
from overlord.errors import DataError
from overlord.planning.images.encoding import Round, place_of, places_of_groups, routing
from overlord.planning.place_tree import ClientPlaceTree, Place


@dataclass(frozen=True, slots=True)
class Exchange:
    """The rounds of a group's step with the images that its ranks encode in each."""

    rounds: tuple[Round, ...]
    images: tuple[Sequence[NDArray[np.uint8]], ...]

    @staticmethod
    def of(rounds: Sequence[Round], payloads: Iterable[Payload], whole: Sequence[Fields]) -> Exchange:
        """From what was given for the samples of each round; `whole` are the microbatches that get the images."""
        for fields, of in zip(whole, rounds, strict=True):
            _check_places(fields, of)
        images = [[image for images in payload.images or () for image in images] for payload in payloads]
        return Exchange(tuple(rounds), tuple(images))

    def joined(self, parts: Sequence[Fields], place: Place, tree: ClientPlaceTree) -> list[Fields]:
        """A rank's microbatches with the fields of the exchange."""
        axis = self.rounds[0].axis
        at, homes = place_of(place, tree, axis), places_of_groups(tree, axis)
        each = zip(parts, self.rounds, self.images, strict=True)
        return [fields | _fields(of, images, at, homes) for fields, of, images in each]


def _fields(of: Round, images: Sequence[NDArray[np.uint8]], place: int | None, homes: list[list[int]]) -> Fields:
    """The fields of one encoder place; a rank without one (None) takes no part."""
    own: Fields = {"image_document": of.own_document.astype(np.int32), "image_tokens": of.own_tokens}
    if place is None:
        return own
    found = routing(of, place, homes)
    return own | {
        "encode_images": stacked_images([images[i] for i in found.encoded.tolist()]),
        "encode_tokens": of.tokens[found.encoded],
        "send_rows": found.send_rows,
        "send_counts": found.send_counts,
        "receive_counts": found.receive_counts,
        "receive_rows": found.receive_rows,
    }


def _check_places(fields: Fields, of: Round) -> None:
    """Raises DataError where texts have places for images and these are not as many as the images have tokens."""
    rows: NDArray[Any] | None = fields.get("image_row")
    if rows is None:
        return
    found, planned = int(rows.max(initial=-1)) + 1, int(of.own_tokens.sum())
    if found != planned:
        raise DataError(
            f"the texts of a microbatch have {found} image places, but its images have {planned} tokens by the strategy's "
            "PatchGrid; use one grid for both, and documents that are not cut (long_documents='drop' or 'fail')"
        )
