"""What `DGraph.split` does: `hdp.spread` over the samples of a step, as the pieces, rings and costs of a plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from overlord.errors import SpecError
from overlord.planning.arrangement import Arrangement, cut_samples
from overlord.planning.facts import Floats, Ints, Samples
from overlord.planning.hdp.offload import Offload
from overlord.planning.hdp.rings import Rings
from overlord.planning.hdp.spread import Mode, Pool, Spread, spread
from overlord.planning.packing import Pieces
from overlord.planning.place_tree import Bucket, ClientPlaceTree
from overlord.planning.plan import Stage
from overlord.spec import Batch


class Split(NamedTuple):
    """The step in pieces."""

    samples: Samples
    costs: Floats
    rings: Rings
    arrangement: Arrangement
    stage: Stage
    text: str
    values: tuple[object, ...]


def pool_of(
    place: ClientPlaceTree,
    capacity: int,
    mode: Mode | None,
    offload: Offload | None,
    communication: float,
    widen: bool,
) -> Pool:
    """The dp x cp ranks of a mesh as one pool."""
    mesh = place.mesh
    if mode == "dp" and mesh.pp > 1:
        raise SpecError(
            f"mode='dp' lets ranks run a ring at different indices, where the {mesh.pp} stages of a pipeline would wait for "
            "each other for ever; use mode='pp', or leave it out"
        )
    mode = mode or ("pp" if mesh.pp > 1 else "dp")
    return Pool(place.num_groups("cp"), capacity, mode, mesh.pp, offload, communication, widen)


def split(
    samples: Samples, extra: Ints | None, costs: Floats | None, batch: Batch, axis: Bucket, group_size: int, pool: Pool
) -> Split:
    """The samples of a step over a pool of ranks. `extra` would be tokens that they get beside those of their text."""
    if costs is None:
        raise SpecError("split needs to know what samples cost: call cost(fn) before it")
    if axis != "cp" or group_size != 1:
        raise SpecError(f"split shares a step over dp x cp ranks: call distribute('cp') before it, not distribute({axis!r})")
    if batch.layout != "packed" or batch.document_multiple != 1:
        raise SpecError(
            "split cuts documents without padding: it needs layout='packed' and document_multiple=1, not "
            f"layout={batch.layout!r} and document_multiple={batch.document_multiple}"
        )
    if batch.image_token is not None or extra is not None:
        raise SpecError(
            "split cannot say which image rows lie in a piece of a document; leave Batch.image_token and fuse(...) out"
        )
    found = spread(samples.tokens, costs, pool)
    zeros = np.zeros(len(found.sample), np.int64)
    rings = Rings(
        of_micro=found.ring_of_micro,
        members=found.members,
        bounds=found.bounds,
        offset=found.start,
        whole=samples.tokens[found.sample],
        offload=found.offload[found.sample],
        cost=found.cost,
    )
    mean = float(found.cost.sum()) / pool.num_ranks
    text = "{}-balance, up to {} tokens: {} to {} a rank, the slowest ends at {:.3f}x mean"
    counts = (found.counts.min(), found.counts.max())
    return Split(
        samples=cut_samples(samples, Pieces(found.sample, found.start, found.stop, zeros)),
        costs=found.cost,
        rings=rings,
        arrangement=Arrangement(found.rank, found.micro, zeros, found.counts, 1, 0),
        stage=_cuts(found),
        text=text,
        values=(pool.mode, pool.capacity, *counts, found.slowest / mean if mean > 0 else 1.0),
    )


def _cuts(found: Spread) -> Stage:
    parts = found.num_parts[found.num_parts > 1]
    if not len(parts):
        return Stage("split", "every sample stays whole on one rank")
    text, values = "{} of {} samples over {} to {} ranks each", (len(parts), len(found.num_parts), parts.min(), parts.max())
    moved = found.offload[found.offload > 0]
    if len(moved):
        text += "; {} move up to {:.0%} of their activations to the host"
        values = (*values, len(moved), moved.max())
    return Stage("split", text, values)
