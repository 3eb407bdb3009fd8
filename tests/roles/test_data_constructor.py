"""A data-parallel group's steps: kept as long as a rank may want them, and built again if one asks later."""

import gc
import weakref

import numpy as np

import overlord as ol
from overlord.messages import Delivery, Later
from overlord.service.run import LocalChannel
from tests.small_sources import Numbered, job_of


def fetched(loader: ol.Loader, step: int, rank: int) -> Delivery:
    found = LocalChannel(loader, loader._constructor_of).fetch(step, rank, 20.0)
    assert isinstance(found, Delivery)
    return found


def test_a_step_is_kept_until_the_last_rank_has_it_and_can_be_had_again():
    job = job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(tp=2), num_workers=0)
    with ol.start(job) as loader:
        first = fetched(loader, 0, 0).microbatches[0]
        kept = weakref.ref(first["tokens"])
        tokens = first["tokens"].copy()
        del first
        gc.collect()
        assert kept() is not None, "the other rank has not come for it"
        fetched(loader, 0, 1)
        gc.collect()
        assert kept() is None
        np.testing.assert_array_equal(fetched(loader, 0, 0).microbatches[0]["tokens"], tokens)
        assert fetched(loader, 1, 0).step == 1


def test_a_rank_of_another_group_is_told_to_wait_and_holds_nobody_back():
    """As while the mesh changes: a client of the old mesh may reach a constructor of the new one."""
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=2))) as loader:
        wrong = LocalChannel(loader, lambda _: loader._constructors[0]).fetch(0, 1, 20.0)
        assert isinstance(wrong, Later)
        assert "rank 1 is not in data-parallel group 0" in wrong.reason
        for step in range(8):  # more than a group may be ahead of a rank that was counted
            for rank in range(2):
                assert fetched(loader, step, rank).step == step
