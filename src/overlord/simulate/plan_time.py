"""`plan_time`: the predicted time of a planned step on a mesh, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.arrange.balancing import bin_sums, max_over_mean
from overlord.arrange.hdp.rings import Rings
from overlord.arrange.pipelines.simulator import Pipeline, simulate
from overlord.arrange.vision.encoding import Encoding
from overlord.errors import SpecError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from overlord.arrange.plan import Plan
    from overlord.declare.mesh import Mesh
    from overlord.simulate.step_time import EncoderModel, TimeModel
    from overlord.stream.facts import Floats, Ints


@dataclass(frozen=True, slots=True)
class PlanTime:
    """The predicted times of a step under one plan. There is one entry per dp x cp rank, the ranks of a dp group side by
    side; each stands for its tp x pp ranks."""

    busy_s: Floats
    """The time that each rank works: matrix products, attention, and communication that attention does not hide."""
    sending_s: Floats
    """The communication in `busy_s`."""
    step_s: float
    """The time of the step, until the last rank is done and gradients are exchanged."""
    tokens: Ints
    """The most tokens of one microbatch in each rank's memory, without those moved to the host."""
    num_microbatches: Ints
    padding: float
    """The share of tokens that are padding."""

    @property
    def straggler(self) -> float:
        """The busiest rank over the mean rank."""
        return max_over_mean(self.busy_s)

    @property
    def bubbles(self) -> float:
        """The share of all ranks' time that is spent waiting: for the slowest rank, for other ranks of a ring, for pipeline
        neighbours, for gradients."""
        return 1.0 - float(self.busy_s.mean()) / self.step_s if self.step_s > 0 else 0.0

    @property
    def sending(self) -> float:
        """The share of all ranks' time that is spent on communication that nothing hides."""
        return float(self.sending_s.mean()) / self.step_s if self.step_s > 0 else 0.0


class _Micros(NamedTuple):
    """Each microbatch of a plan: its time, the communication in it, and its tokens on each rank with and without padding."""

    seconds: Floats
    sending_s: Floats
    places: Floats
    tokens: Floats


def plan_time(plan: Plan, mesh: Mesh, model: TimeModel) -> PlanTime:
    """Predict the time of a plan. In plans over dp groups, every document is cut over all cp ranks of its group; in plans of
    hybrid data parallelism, over the ranks of its ring.

    With pp > 1, ranks are timed as independent pipelines: waiting for other ranks of a ring is not counted. Images that
    ranks exchange are encoded first, round by round, and each round takes as long as its slowest place.
    """
    rings, encoding = plan.part(Rings), plan.part(Encoding)
    if plan.axis != ("cp" if rings is not None else "dp"):
        raise SpecError(
            f"a plan is timed over dp groups, or over dp x cp ranks with rings; this one has groups along {plan.axis}"
        )
    micros = _of_groups(plan, mesh.cp, model) if rings is None else _of_pool(plan, rings, model)
    if rings is not None and mesh.pp == 1:
        last_s = _last_end(plan.counts, micros.seconds, rings)
    else:
        last_s = simulate(micros.seconds, plan.counts, Pipeline(mesh.pp)).step_time
    group = np.repeat(np.arange(plan.num_groups), plan.counts)
    held = np.zeros(plan.num_groups)
    np.maximum.at(held, group, micros.places)
    ranks_each = mesh.dp * mesh.cp // plan.num_groups
    busy_s = np.repeat(bin_sums(group, micros.seconds, plan.num_groups) / mesh.pp, ranks_each)
    if encoding is not None and model.encoder is not None:
        rounds_s = _rounds(encoding, model.encoder)
        busy_s, last_s = busy_s + rounds_s.sum(axis=0), last_s + float(rounds_s.max(axis=1).sum())
    places = float(micros.places.sum())
    # A pipeline of p stages does a microbatch of cost c in c / p on each: its pool rank is busy for that long.
    return PlanTime(
        busy_s=busy_s,
        sending_s=np.repeat(bin_sums(group, micros.sending_s, plan.num_groups) / mesh.pp, ranks_each),
        step_s=last_s + model.sync_s(mesh.dp * mesh.cp),
        tokens=np.repeat(np.ceil(held).astype(np.int64), ranks_each),
        num_microbatches=np.repeat(plan.counts, ranks_each),
        padding=1.0 - float(micros.tokens.sum()) / places if places and rings is None else 0.0,
    )


def _of_groups(plan: Plan, cp: int, model: TimeModel) -> _Micros:
    lengths = plan.samples.tokens.astype(np.float64)
    tokens, squares = plan.micro_costs(lengths), plan.micro_costs(lengths * lengths)
    places = plan.micro_places().astype(np.float64)
    attention_s = model.attention_s(squares, np.diff(plan.offsets), cp)
    sending_s = np.maximum(model.ring_s(tokens, cp) - attention_s, 0.0)
    seconds = model.matmul_s(places, cp) + attention_s + sending_s
    if model.encoder is not None and plan.part(Encoding) is None:
        seconds += plan.micro_costs(model.encoder.samples_s(plan.samples)) / cp
    return _Micros(seconds, sending_s, places / cp, tokens / cp)


def _of_pool(plan: Plan, rings: Rings, model: TimeModel) -> _Micros:
    lengths, whole = plan.samples.tokens.astype(np.float64), rings.whole.astype(np.float64)
    # A ring runs one document; its square is shared by as many ranks as the ring has, and each has a part of its tokens.
    in_ring = rings.of_micro >= 0
    num_ranks = np.where(in_ring, np.diff(rings.bounds, append=rings.bounds[-1])[rings.of_micro], 1)
    in_node = np.append(_in_node(rings, model), True)[rings.of_micro]
    part = lengths / np.maximum(whole, 1)
    tokens = plan.micro_costs(lengths)
    attention_s = model.attention_s(plan.micro_costs(part * whole * whole), plan.micro_costs(part))
    sending_s = np.maximum(model.ring_s(tokens * num_ranks, num_ranks, in_node) - attention_s, 0.0)
    layers = max(2, model.shape.layers // model.pp)
    stays = 1.0 - rings.offload * (layers - 2) / layers  # two layers always stay on the device
    seconds = model.matmul_s(tokens) + attention_s + sending_s
    if model.encoder is not None:
        seconds += plan.micro_costs(part * model.encoder.samples_s(plan.samples))
    return _Micros(seconds, sending_s, plan.micro_costs(lengths * stays), tokens)


def _in_node(rings: Rings, model: TimeModel) -> NDArray[np.bool_]:
    """True for each ring whose ranks are all in one node. tp ranks are neighbours."""
    if len(rings.bounds) == 1:
        return np.zeros(0, bool)
    node = rings.members * model.tp // model.links.ranks_per_node
    return np.minimum.reduceat(node, rings.bounds[:-1]) == np.maximum.reduceat(node, rings.bounds[:-1])


def _rounds(encoding: Encoding, encoder: EncoderModel) -> Floats:
    """The encoding time of each place in each round of microbatches: [round, place]."""
    if encoding.axis != "cp":
        raise SpecError(f"images are timed over dp x cp ranks, exchange='cp', not over {encoding.axis}")
    ends_s = np.concatenate([[0.0], np.cumsum(encoder.cost(encoding.images)[encoding.by_place])])[encoding.bounds]
    return np.diff(ends_s).reshape(-1, encoding.num_places)


def _last_end(counts: Ints, seconds: Floats, rings: Rings) -> float:
    """When the last rank finishes. Each runs its microbatches in order, and a ring begins when all of its ranks have
    arrived."""
    rank = np.repeat(np.arange(len(counts)), counts)
    in_ring = rings.of_micro >= 0
    alone_s = np.where(in_ring, 0.0, seconds)
    before_s = np.cumsum(alone_s) - alone_s
    before_s -= before_s[np.minimum(np.cumsum(counts) - counts, len(seconds) - 1)][rank]
    ready = np.zeros(len(counts))  # when each rank has ended its last ring so far
    done_s = np.zeros(len(counts))  # the time that it ran alone until then
    micros = np.flatnonzero(in_ring)
    micros = micros[np.argsort(rings.of_micro[micros], kind="stable")]
    # A loop over rings, because each waits for those before it.
    for begin, end in zip(rings.bounds[:-1].tolist(), rings.bounds[1:].tolist(), strict=True):
        these = micros[begin:end]
        ranks = rank[these]
        arrived = ready[ranks] + before_s[these] - done_s[ranks]
        ready[ranks] = arrived.max() + seconds[these]
        done_s[ranks] = before_s[these]
    return float((ready + bin_sums(rank, alone_s, len(counts)) - done_s).max(initial=0.0))
