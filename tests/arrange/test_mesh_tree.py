"""Every rank has its place, whichever way the mesh is declared."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.arrange.mesh_tree import ClientPlaceTree, Place
from overlord.declare.mesh import Mesh
from overlord.errors import SpecError

sizes = st.integers(1, 4)
meshes = st.builds(Mesh, dp=sizes, cp=sizes, tp=sizes, pp=sizes, order=st.permutations(("pp", "dp", "cp", "tp")).map(tuple))


@given(meshes)
def test_ranks_and_places_are_one_to_one(mesh):
    tree = ClientPlaceTree(mesh)
    places = [tree.coordinates(rank) for rank in range(tree.world_size)]
    assert [tree.rank_of(pp=p.pp, dp=p.dp, cp=p.cp, tp=p.tp) for p in places] == list(range(mesh.world_size))
    assert sorted(rank for dp in range(mesh.dp) for rank in tree.ranks_of(dp)) == list(range(mesh.world_size))


@given(meshes, st.sets(st.sampled_from(("tp", "cp", "pp"))))
def test_broadcast_reaches_every_rank_from_one_that_fetches_the_same_samples(mesh, broadcast):
    tree = ClientPlaceTree(mesh)
    fetchers = tree.fetchers(broadcast)
    assert {tree.source_of(rank, broadcast) for rank in range(tree.world_size)} == set(fetchers)
    for rank in range(tree.world_size):
        assert tree.coordinates(rank).dp == tree.coordinates(tree.source_of(rank, broadcast)).dp
    groups = tree.broadcast_groups(broadcast)
    assert [ranks[0] for ranks in groups] == fetchers
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(tree.world_size))
    assert all({tree.source_of(rank, broadcast) for rank in ranks} == {ranks[0]} for ranks in groups)


def test_megatron_puts_tp_innermost_and_pp_outermost():
    tree = ClientPlaceTree.from_megatron(world_size=32, tp=2, cp=2, pp=2)
    assert tree.mesh == Mesh(dp=4, cp=2, tp=2, pp=2)
    assert tree.coordinates(1) == Place(rank=1, pp=0, dp=0, cp=0, tp=1)
    assert tree.coordinates(16).pp == 1
    dp_outside_pp = ClientPlaceTree.from_megatron("tp-cp-ep-pp-dp", world_size=32, tp=2, cp=2, pp=2)
    assert dp_outside_pp.coordinates(16) == Place(rank=16, pp=0, dp=2, cp=0, tp=0)


@pytest.mark.parametrize(
    ("order", "sizes", "message"),
    [
        ("tp-cp-ep-dp-pp", {"world_size": 12, "tp": 8}, "does not divide the world of 12"),
        ("tp-dp-pp", {"world_size": 8, "cp": 2}, "does not name cp"),
        ("tp-cp-dp-pp-zz", {"world_size": 8}, "once each"),
    ],
)
def test_a_megatron_order_that_does_not_fit_is_refused(order, sizes, message):
    with pytest.raises(SpecError, match=message):
        ClientPlaceTree.from_megatron(order, **sizes)


def test_groups_lie_along_dp_cp_or_the_world():
    tree = ClientPlaceTree(Mesh(dp=2, cp=2, tp=2))
    assert (tree.num_groups(), tree.num_groups("cp"), tree.num_groups("world"), tree.num_groups("world", 4)) == (2, 4, 8, 2)
    with pytest.raises(SpecError, match="dp, cp or world, not 'pp'"):
        tree.num_groups("pp")  # pyright: ignore[reportArgumentType]
    with pytest.raises(SpecError, match="must divide the 2 places along dp, got 3"):
        tree.num_groups("dp", 3)


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(SpecError, match="from 0 to 3, got 4"):
        ClientPlaceTree(Mesh(dp=4)).coordinates(4)


@pytest.fixture(params=[16])
def make_device_mesh(request):
    distributed = pytest.importorskip("torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    device_mesh = pytest.importorskip("torch.distributed.device_mesh")
    distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=request.param)

    def make(shape, names):
        return device_mesh.init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)

    make.world_size = request.param  # pyright: ignore[reportFunctionMemberAccess]
    yield make
    distributed.destroy_process_group()


def torchtitan_sizes(world: int):
    """All (pp, dp_replicate, dp_shard, cp, tp, ep, etp) of a world that torchtitan takes, those with experts among them."""
    sizes = (1, 2, 4)
    for pp, dp_replicate, cp, tp in product(sizes, sizes, (1, 2), (1, 2)):
        dp_shard, rest = divmod(world, pp * dp_replicate * cp * tp)
        if rest or not dp_shard:
            continue
        for ep, etp in product((1, 2, 4, 8), {1, tp}):
            borrowed = cp if etp == tp else cp * tp
            if ep == 1 or (ep % borrowed == 0 and (dp_shard * borrowed) % ep == 0):
                yield pp, dp_replicate, dp_shard, cp, tp, ep, etp


@pytest.mark.parametrize("make_device_mesh", [8, 16], indirect=True)
def test_every_mesh_of_torchtitan_gives_each_rank_the_data_of_its_loading_mesh(make_device_mesh):
    count = 0
    for pp, dp_replicate, dp_shard, cp, tp, ep, etp in torchtitan_sizes(make_device_mesh.world_size):
        loading = make_device_mesh((pp, dp_replicate * dp_shard, cp, tp), ("pp", "batch", "cp", "tp"))
        tree = ClientPlaceTree.from_device_mesh(loading)
        assert tree.mesh == Mesh(pp=pp, dp=dp_replicate * dp_shard, cp=cp, tp=tp)
        ways = [
            ((pp, dp_replicate, dp_shard, cp, tp), ("pp", "dp_replicate", "dp_shard", "cp", "tp"), {}),
            ((pp, dp_replicate, dp_shard * cp, tp), ("pp", "dp_replicate", "fsdp", "tp"), {"cp": cp}),
            ((pp, dp_replicate, dp_shard * cp, tp), ("pp", "dp_replicate", "dp_shard_cp", "tp"), {"cp": cp}),
        ]
        if ep > 1:
            experts = dp_shard * cp * tp // (ep * etp)
            sparse = ("pp", "dp_replicate", "efsdp", "ep", "etp")
            ways.append(((pp, dp_replicate, experts, ep, etp), sparse, {"cp": cp, "tp": tp}))
            mod_ep = dp_shard * cp // ep if etp == tp else dp_shard * cp * tp // ep
            before = ("pp", "dp_replicate", "dp_shard_mod_ep", "dp_shard_in_ep", "cp", "tp")
            ways.append(((pp, dp_replicate, mod_ep, dp_shard // mod_ep, cp, tp), before, {}))
        for shape, names, passed in ways:
            found = ClientPlaceTree.from_device_mesh(make_device_mesh(shape, names), **passed)
            places = [found.coordinates(rank) for rank in range(found.world_size)]
            assert places == [tree.coordinates(rank) for rank in range(tree.world_size)], (shape, names)
            count += 1
    assert count > 50


@pytest.mark.parametrize(
    ("shape", "names", "passed", "message"),
    [
        ((2, 8), ("dp_replicate", "fsdp"), {}, r"\['fsdp'\] may hold it: pass cp="),
        ((2, 4, 2), ("efsdp", "ep", "etp"), {"cp": 1}, "no dimension tp.* pass tp="),
        ((2, 8), ("dp_replicate", "fsdp"), {"cp": 3}, "cp=3 does not divide the 8 ranks"),
        ((8, 2), ("ep", "dp"), {"cp": 2, "tp": 1}, "does not divide the 1 ranks"),
        ((8, 2), ("dp", "tp"), {"cp": 2}, "no dimension that holds it"),
        ((8, 2), ("dp", "cp"), {"cp": 4}, "has cp=2, but cp=4 was passed"),
    ],
)
def test_a_device_mesh_whose_dimensions_hold_several_axes_needs_their_sizes(make_device_mesh, shape, names, passed, message):
    with pytest.raises(SpecError, match=message):
        ClientPlaceTree.from_device_mesh(make_device_mesh(shape, names), **passed)


def test_expert_parallel_ranks_of_a_mesh_of_ones_own_get_different_samples(make_device_mesh):
    tree = ClientPlaceTree.from_device_mesh(make_device_mesh((2, 2, 2, 2), ("dp", "ep", "cp", "tp")))
    assert tree.mesh == Mesh(dp=4, cp=2, tp=2)


def test_a_device_mesh_gives_sizes_and_order(make_device_mesh):
    tree = ClientPlaceTree.from_device_mesh(make_device_mesh((2, 2, 2, 2), ("pp", "dp_replicate", "dp_shard", "tp")))
    assert tree.mesh == Mesh(pp=2, dp=4, tp=2, order=("cp", "pp", "dp", "tp"))
    assert tree.coordinates(9) == Place(rank=9, pp=1, dp=0, cp=0, tp=1)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("dp", "xp"), "'xp'.* are not known"),
        (None, "no dimension names"),
    ],
)
def test_a_device_mesh_with_other_dimensions_is_refused(make_device_mesh, names, message):
    with pytest.raises(SpecError, match=message):
        ClientPlaceTree.from_device_mesh(make_device_mesh((4, 4), names))


def test_a_part_of_a_device_mesh_is_refused(make_device_mesh):
    whole = make_device_mesh((2, 8), ("dp", "tp"))
    with pytest.raises(SpecError, match="pass the root mesh"):
        ClientPlaceTree.from_device_mesh(whole["dp"])


def test_dp_dimensions_apart_are_refused(make_device_mesh):
    with pytest.raises(SpecError, match="must be neighbours"):
        ClientPlaceTree.from_device_mesh(make_device_mesh((2, 4, 2), ("dp_replicate", "tp", "dp_shard")))
