"""Images and text: what they cost, both costs even at once, and every image encoded once for the right microbatch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.arrange.balancing import bin_sums, max_over_mean
from overlord.arrange.cost import TransformerCost
from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.pipelines.ordering import level
from overlord.arrange.pipelines.simulator import Pipeline
from overlord.arrange.plan import Plan
from overlord.arrange.strategies import long_short, multimodal, plain
from overlord.arrange.vision.encoding import (
    Encoding,
    Round,
    encode,
    places_of_groups,
    routing,
)
from overlord.arrange.vision.hybrid import hybrid
from overlord.arrange.vision.images import (
    PatchGrid,
    VisionTransformerCost,
    images_of,
    with_image_tokens,
)
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.errors import SpecError
from overlord.simulate.presets import LlavaLike
from overlord.stream.facts import ImageSizes, Samples

GRID = PatchGrid(patch=14, merge=2)
BACKBONE = TransformerCost.of(hidden=4096, layers=32, kv_heads=8, ffn=14336, vocab=128_256)
ENCODER = VisionTransformerCost.of(hidden=1280, layers=32)

sizes_of_samples = st.lists(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), max_size=4), min_size=1, max_size=25
)
meshes = st.builds(
    Mesh,
    dp=st.integers(1, 4),
    cp=st.integers(1, 2),
    tp=st.integers(1, 2),
    pp=st.integers(1, 2),
    order=st.permutations(["pp", "dp", "cp", "tp"]).map(tuple),
)


def _samples(sizes: list[list[tuple[int, int]]]) -> Samples:
    without_places = Samples.of_lengths(np.arange(len(sizes)) % 7 + 3, images=ImageSizes.of(sizes))
    whole = with_image_tokens(without_places, images_of(without_places, GRID))
    return Samples.of_lengths(whole.tokens, images=without_places.images)


# Costs


@pytest.mark.parametrize(
    ("grid", "height", "width", "patches", "tokens"),
    [
        (PatchGrid(14, 1, size=(336, 336)), 50, 4000, 576, 576),
        (PatchGrid(14, 2), 541, 622, 39 * 45, 20 * 23),
        (PatchGrid(14, 2), 1, 1, 1, 1),
        (PatchGrid(16, 1, more_tokens=1), 224, 224, 196, 197),
    ],
)
def test_patches_and_tokens_follow_from_the_size(grid, height, width, patches, tokens):
    sides = np.array([height]), np.array([width])
    assert (grid.patches(*sides)[0], grid.tokens(*sides)[0]) == (patches, tokens)


def test_an_image_costs_by_its_patches_and_frames_of_a_video_one_by_one():
    cost = VisionTransformerCost(per_patch=2.0, per_patches_squared=0.5, constant=1.0)
    video = Samples.of_lengths(np.array([10]), images=ImageSizes.of([[(28, 28)] * 3]))
    one_tall = Samples.of_lengths(np.array([10]), images=ImageSizes.of([[(84, 28)]]))
    assert cost(images_of(video, GRID)).tolist() == [2 * 4 + 0.5 * 16 + 1] * 3
    assert cost(images_of(one_tall, GRID)).tolist() == [2 * 12 + 0.5 * 144 + 1]


def test_a_frozen_encoder_costs_a_third_and_attention_counts_all_pairs():
    trained, frozen = (VisionTransformerCost.of(hidden=64, layers=2, trained=trained) for trained in (True, False))
    assert trained.per_patch == pytest.approx(3 * frozen.per_patch)
    assert trained.per_patches_squared == pytest.approx(3.5 * frozen.per_patches_squared)


def test_where_only_the_largest_image_is_known_all_of_the_sample_count_as_that():
    sizes = {name: np.array(values) for name, values in {"num_images": [2, 0], "image_height": [28, 0]}.items()}
    samples = Samples.of_lengths(np.array([5, 5]), {**sizes, "image_width": np.array([56, 0])})
    images = images_of(samples, GRID)
    assert images.sample.tolist() == [0, 0]
    assert images.patches.tolist() == [8, 8]


@given(sizes_of_samples, st.data())
def test_image_sizes_follow_their_samples_through_taking_and_joining(sizes, data):
    whole = ImageSizes.of(sizes)
    index = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=10))
    taken = whole.take(np.array(index, np.int64))
    joined = ImageSizes.concatenate([taken, None, whole.take(slice(1, None))], [len(index), 2, len(sizes) - 1])
    expected = [[list(size) for size in of_sample] for of_sample in [*(sizes[i] for i in index), [], [], *sizes[1:]]]
    assert joined is not None
    assert joined.to_lists() == expected
    assert joined.compact().to_lists() == expected


# The two-objective balancer


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=80), st.integers(1, 9))
def test_hybrid_puts_every_item_into_a_bin_and_the_same_one_each_time(costs, num_bins):
    one, two = (np.array(column) for column in zip(*costs, strict=True))
    bins = hybrid([one, two])(one + two, num_bins, np.ones(len(one), np.int64), None)
    assert bins.min() >= 0
    assert bins.max() < num_bins
    again = hybrid([one, two])(one + two, num_bins, np.ones(len(one), np.int64), None)
    assert np.array_equal(bins, again)


def test_hybrid_keeps_to_a_capacity_that_leaves_some_room():
    samples = LlavaLike().samples(2000, 8192, seed=3)
    images = images_of(samples, GRID)
    modules = [np.bincount(images.sample, ENCODER(images), len(samples)), BACKBONE(samples)]
    capacity = int(samples.tokens.sum() / 16 * 1.1)
    bins = hybrid(modules)(modules[0] + modules[1], 16, samples.tokens, capacity)
    assert bin_sums(bins, samples.tokens, 16).max() <= capacity
    assert all(max_over_mean(bin_sums(bins, module, 16)) < 1.02 for module in modules)


def test_hybrid_moves_samples_not_rows():
    with pytest.raises(SpecError, match="packed rows"):
        hybrid([np.ones(4), np.ones(4)])(np.ones(3), 2, np.ones(3, np.int64), None)


def _graph(samples: Samples, mesh: Mesh, context: int = 8192) -> DGraph:
    return DGraph(samples, Batch(samples=len(samples), sequence_length=context), ClientPlaceTree(mesh))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("exchange", [None, "cp"])
def test_encoder_and_backbone_are_within_five_per_cent_at_once_at_dp_64(seed, exchange):
    samples = LlavaLike().samples(4096, 8192, seed)
    graph = _graph(samples, Mesh(dp=64))
    plan = multimodal(BACKBONE, ENCODER, grid=GRID, exchange=exchange)(graph)
    encoder, backbone = stragglers(plan)
    assert max(encoder, backbone) <= 1.05
    blind_encoder, blind_backbone = stragglers(plain()(graph))
    assert min(blind_encoder, blind_backbone) > 1.2
    alone = stragglers(long_short(BACKBONE)(graph))
    assert alone[0] > 1.05, "balancing the backbone alone leaves the encoder uneven"


def stragglers(plan: Plan) -> tuple[float, float]:
    """Slowest over mean, of the encoder's work and of the backbone's."""
    images = images_of(plan.samples, GRID)
    backbone = plan.max_over_mean(BACKBONE(plan.samples))
    encoding = plan.part(Encoding)
    if encoding is None:
        per_sample = np.bincount(images.sample, ENCODER(images), len(plan.samples))
        return plan.max_over_mean(per_sample.astype(np.float64)), backbone
    return max_over_mean(bin_sums(encoding.place, ENCODER(encoding.images), encoding.num_places)), backbone


# Who encodes what


@given(sizes_of_samples, meshes, st.sampled_from(["cp", "world"]))
@settings(max_examples=60)
def test_every_image_is_encoded_once_and_its_rows_reach_all_who_train_on_it(sizes, mesh, axis):
    samples = _samples(sizes)
    longest = int(samples.tokens.max())
    graph = _graph(samples, mesh, longest)
    plan = multimodal(BACKBONE, ENCODER, grid=GRID, exchange=axis)(graph)
    encoding, homes = plan.part(Encoding), places_of_groups(graph.place, axis)
    assert encoding is not None
    assert len(encoding.place) == sum(map(len, sizes))
    groups = [plan.for_group(0, group) for group in range(plan.num_groups)]
    for number in range(int(plan.counts[0])):
        rounds = [group.microbatches[number].part(Round) for group in groups]
        assert all(of is not None for of in rounds)
        routes = {}
        for of, places in zip(rounds, encoding.places, strict=True):
            assert of is not None
            routes.update({place: routing(of, place, homes) for place in places})
        counts = np.stack([routes[place].send_counts for place in range(encoding.num_places)])
        received = np.stack([routes[place].receive_counts for place in range(encoding.num_places)])
        assert np.array_equal(counts, received.T)
        for group, of in enumerate(rounds):
            assert of is not None
            micro = groups[group].microbatches[number]
            assert micro.samples.images is not None
            assert of.own_tokens.sum() == sum(
                int(GRID.tokens(*np.array([[h], [w]]))[0]) for each in micro.samples.images.to_lists() for h, w in each
            )
            for place in homes[group]:
                assert sorted(routes[place].receive_rows) == list(range(received[place].sum()))
    assert plan.loss_tokens == samples.loss_tokens.sum()


def test_most_images_stay_where_they_are_used():
    graph = _graph(LlavaLike().samples(4096, 8192, 0), Mesh(dp=64))
    plan = multimodal(BACKBONE, ENCODER, grid=GRID, exchange="cp")(graph)
    encoding = plan.part(Encoding)
    assert encoding is not None
    group_of_micro = np.repeat(np.arange(64), plan.counts)
    here = encoding.images.tokens[group_of_micro[encoding.micro] == encoding.place].sum()
    assert here / encoding.images.tokens.sum() > 0.7


def test_texts_without_places_for_images_are_packed_by_what_the_backbone_sees():
    bare = Samples.of_lengths(np.full(64, 4), images=ImageSizes.of([[(280, 280)]] * 64))
    batch = Batch(samples=64, sequence_length=200, micro_tokens=200)
    graph = DGraph(bare, batch, ClientPlaceTree(Mesh(dp=2)))
    plan = multimodal(BACKBONE, ENCODER, grid=GRID, places_in_text=False)(graph)
    longest = np.diff(plan.offsets).max() * (4 + 100)
    assert longest <= 300, "a microbatch holds one and a half times its mean at most, images included"


def test_padded_batches_are_dealt_by_both_costs_and_pipelines_ordered():
    samples = LlavaLike().samples(256, 4096, 1)
    batch = Batch(samples=256, sequence_length=4096, layout="padded", micro_tokens=4 * 4096)
    graph = DGraph(samples, batch, ClientPlaceTree(Mesh(dp=8, pp=4)))
    plan = multimodal(BACKBONE, ENCODER, grid=GRID, pipeline=Pipeline(4))(graph)
    assert max(stragglers(plan)) < max(stragglers(plain()(graph)))
    assert "order" in [stage.name for stage in plan.stages]


def test_an_exchange_needs_ranks_in_step_and_an_axis_that_has_them():
    graph = _graph(LlavaLike().samples(256, 8192, 1), Mesh(dp=8))
    with pytest.raises(SpecError, match="equal_counts"):
        multimodal(BACKBONE, ENCODER, grid=GRID, exchange="cp", equal_counts=False)
    uneven = level(graph.cost(BACKBONE).distribute("dp"), Pipeline(4))
    with pytest.raises(SpecError, match="equal_counts"):
        encode(uneven, images_of(graph.samples, GRID), ENCODER)
    with pytest.raises(SpecError, match="cp or world"):
        encode(graph.cost(BACKBONE).distribute("dp").balance(), images_of(graph.samples, GRID), ENCODER, "dp")
