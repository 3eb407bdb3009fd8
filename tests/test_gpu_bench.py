"""The GPU benchmark runs the work that the plans say, all of it, under every arrangement."""

from itertools import permutations

import numpy as np
import pytest
import torch

from bench.gpu.bubbles import least_of_pipelines, least_time
from bench.gpu.rings import PARTS, SMALL, dynamic_rings, static_rings
from bench.gpu.settings import ARRANGEMENTS, Setting
from bench.gpu.work import Fit, Ranks, Work, predicted_times
from overlord.arrange.hdp.reordering import Grid
from overlord.arrange.pipelines.simulator import Pipeline, times_of
from overlord.arrange.strategies import hdp, plain
from overlord.simulate.presets import BYTED, GITHUB

LENGTHS = (128, 1024, 8192, 65_536)
FIT = Fit.of(LENGTHS, [2e-3 * n + 9e-8 * n * n for n in LENGTHS])


def total(ranks: Ranks) -> tuple[int, float]:
    works = [work for rank in ranks for work in rank]
    return sum(work.num_tokens for work in works), sum(work.area for work in works)


@pytest.mark.parametrize("table", [BYTED, GITHUB])
@pytest.mark.parametrize("name", ["equal", "unequal", "hdp"])
def test_every_arrangement_computes_each_token_and_each_pair_of_tokens_once(table, name):
    graph = Setting(table, 32 << 10, 8, rows=2).graph(seed=3)
    lengths = graph.samples.tokens
    tokens, area = total(ARRANGEMENTS[name](graph, FIT))
    assert tokens == lengths.sum()
    assert area == pytest.approx(float((lengths**2).sum()))


def test_the_blind_one_computes_the_padding_of_its_rows_too():
    setting = Setting(GITHUB, 8 << 10, 4, rows=2)
    tokens, _ = total(ARRANGEMENTS["blind"](setting.graph(seed=0), FIT))
    assert tokens == setting.tokens


def test_a_rank_that_shares_every_document_has_its_part_of_tokens_and_pairs():
    setting = Setting(BYTED, 64 << 10, 2, cp=4)
    graph = setting.graph(seed=1)
    tokens, area = total(ARRANGEMENTS["blind"](graph, FIT))
    assert tokens == pytest.approx(setting.tokens / 4, rel=0.01)
    assert area == pytest.approx(float((graph.samples.tokens**2).sum()) / 4, rel=0.05)


def test_what_was_measured_is_what_is_predicted_for_the_same_documents():
    assert FIT.predicted(Work.of_documents(np.array([1024, 1024]))) == pytest.approx(2 * (2e-3 * 1024 + 9e-8 * 1024**2))
    assert predicted_times([[Work.of_documents(np.array([8192]))]], FIT)[0] == pytest.approx(2e-3 * 8192 + 9e-8 * 8192**2)


def test_hdp_is_even_by_prediction():
    ranks = ARRANGEMENTS["hdp"](Setting(GITHUB, 256 << 10, 2, cp=8).graph(seed=0), FIT)
    times = predicted_times(ranks, FIT)
    assert times.max() / times.mean() < 1.05


def test_the_rings_of_an_ablation_have_every_document_once():
    graph = Setting(BYTED, 32 << 10, 2, cp=4).graph(seed=0)
    rings = dynamic_rings(hdp(FIT.document_cost, capacity=8 << 10)(graph))
    shares = sum(sum(wholes) / ranks for micros in rings for wholes, ranks, _ in micros)
    assert shares == pytest.approx(float(graph.samples.tokens.sum()))
    assert max(ranks for micros in rings for _, ranks, _ in micros) > 1
    static = static_rings(plain()(graph), 4)
    assert sum(sum(wholes) for micros in static for wholes, _, _ in micros) == 64 << 10


@pytest.mark.parametrize("part", ["speed", "offload", "long"])
def test_a_part_of_the_ring_benchmark_runs_on_a_cpu(part):
    rows = PARTS[part](SMALL, torch.device("cpu"))["rows"]
    assert all(value > 0 for row in rows for name, value in row.items() if name.endswith("_ms") or name == "ms")


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_microbatches_is_quicker_than_the_lower_bound_and_the_best_is_near_it(seed):
    """All orders of up to six microbatches, of which some are much costlier than the others."""
    draw = np.random.default_rng(seed)
    pipeline = [Pipeline(2), Pipeline(3, backward=1.0), Pipeline(4), Pipeline(2, 2), Pipeline(3, 2)][seed % 5]
    num = int(draw.integers(1, 7)) // pipeline.count_multiple * pipeline.count_multiple or pipeline.count_multiple
    costs = np.where(draw.random(num) < 0.4, 1.0, 0.3 * draw.random(num) + 1e-3)
    best = times_of(costs[np.array(list(permutations(range(num))))], pipeline).min() * pipeline.stages
    least = least_time(costs, pipeline)
    assert costs.sum() * (1 - 1e-9) <= least <= best * (1 + 1e-9)
    assert best < 1.15 * least


def test_a_ring_counts_as_long_as_on_its_slowest_rank_in_the_lower_bound():
    grid = Grid(np.array([[1.0, 3.0], [1.0, 1.0]]), np.array([[0, 0], [-1, -1]]), np.array([2, 2]))
    assert least_of_pipelines(grid, Pipeline(2)) == pytest.approx(least_time(np.array([3.0, 1.0]), Pipeline(2)))
