"""Trainers that come and go: the mesh changes between steps, and the steps themselves do not."""

import threading
from itertools import islice

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.planlog.append_log import read_frames
from overlord.planlog.segments import FileSegments
from tests.roles.mortal import Mortal, stream_of
from tests.small_sources import Numbered, job_of, read_all, same, tokens_of

A = Numbered(rows=40, first=1)
B = Numbered(rows=23, unit_rows=4, first=100, longest=16)
C = Numbered(rows=9, unit_rows=2, first=300, longest=3)
SOURCES = {"a": A, "b": B, "c": C}
MIXTURE = ol.Mixture({0: {"a": 5, "b": 3}, 4: {"a": 1, "b": 1, "c": 1}}, unit="tokens", ramp="linear")
COST = ol.TransformerCost(per_token=1.0, per_length_squared=0.1, constant=0.0)
MESHES = st.builds(ol.Mesh, dp=st.integers(1, 4), cp=st.integers(1, 2), tp=st.integers(1, 2), pp=st.just(1))
HISTORIES = st.lists(st.tuples(st.integers(0, 4), MESHES), min_size=1, max_size=4)
BATCHES = st.sampled_from(
    [
        ol.Batch(tokens=64, sequence_length=16),
        ol.Batch(tokens=64, sequence_length=16, cut_documents=True),
        ol.Batch(samples=9, sequence_length=16),
    ]
)


def taken(loader: ol.Loader, num_steps: int) -> list[np.ndarray]:
    """The sorted tokens of steps, read on every rank; loss tokens must be those that the ranks hold together."""
    tree = loader.tree
    clients = [loader.client(rank, timeout_s=30) for rank in range(tree.world_size)]
    distinct = [tree.rank_of(dp=dp, cp=cp) for dp in range(tree.mesh.dp) for cp in range(tree.mesh.cp)]
    found = []
    for _ in range(num_steps):
        steps = [next(client) for client in clients]
        held = sum(int(np.count_nonzero(micro["labels"] != -100)) for rank in distinct for micro in steps[rank])
        assert {step.loss_tokens for step in steps} == {held}
        found.append(np.sort(np.concatenate([tokens_of(steps[rank]) for rank in distinct])))
    return found


@settings(max_examples=25)
@given(BATCHES, MESHES, HISTORIES, st.sets(st.integers(1, 60), max_size=3), st.booleans())
def test_a_run_resized_at_any_steps_to_any_meshes_gives_the_steps_of_one_that_never_was(
    tmp_path_factory, batch, first, history, losses, balanced
):
    strategy = ol.strategies.long_short(COST) if balanced else None
    uncut, _ = read_all(job_of(SOURCES, batch, mixture=MIXTURE), 24)
    job = job_of(SOURCES, batch, mixture=MIXTURE, mesh=first, strategy=strategy)
    found: list[np.ndarray] = []
    with ol.start(job, engine=Mortal(losses), log=str(tmp_path_factory.mktemp("log"))) as loader:
        for num_steps, mesh in history:
            found += taken(loader, num_steps)
            assert loader.resize(mesh) == len(found)
            assert loader.start_step == len(found)
            assert loader.tree.mesh == loader.job.mesh == mesh
            assert loader.state_dict()["step"] == len(found)
        found += taken(loader, 3)
        state = loader.state_dict()
    assert same(found, uncut[: len(found)])
    assert same(read_all(job_of(SOURCES, batch, mixture=MIXTURE), 3, resume=state)[0], uncut[len(found) : len(found) + 3])


def test_a_resized_run_is_arranged_as_one_that_was_started_so():
    job = job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=2), strategy=ol.strategies.long_short(COST))
    mesh = ol.Mesh(dp=3, cp=2)
    with ol.start(job) as loader:
        stream_of(loader, 4)
        state = loader.state_dict()
        loader.resize(mesh)
        resized = stream_of(loader, 4)
    with ol.start(job_of({"a": A, "b": B}, mesh=mesh, strategy=ol.strategies.long_short(COST)), resume=state) as loader:
        assert stream_of(loader, 4) == resized


def test_clients_of_the_old_mesh_are_told_and_may_rejoin():
    with ol.start(job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=3))) as loader:
        old = [loader.client(rank, timeout_s=20) for rank in range(3)]
        for client in old:
            next(client)
        assert loader.resize(ol.Mesh(dp=2)) == 1
        for client in old:
            with pytest.raises(
                ol.errors.ClosedError, match=f"client of rank {client.rank} too, or rejoin if its mesh was changed"
            ):
                next(client)
        for client in old[:2]:
            client.rejoin()
        assert [next(client).number for client in old[:2]] == [1, 1]
        old[2].rejoin()
        with pytest.raises(ol.errors.SpecError, match="rank must be from 0 to 1, got 2"):
            next(old[2])
        assert loader.client(0).step == 1
        assert loader.state_dict()["step"] == 1


def test_a_rank_that_is_behind_is_named_and_nothing_changes_until_it_has_caught_up():
    job = job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=2))
    uncut, _ = read_all(job, 6)
    with ol.start(job) as loader:
        ahead, behind = loader.client(0, timeout_s=20), loader.client(1, timeout_s=20)
        parts = [[tokens_of(next(ahead)) for _ in range(2)], []]
        with pytest.raises(
            ol.errors.WaitTimeoutError, match=r"cannot change at step 2 yet: rank 1 \(at step 0\) did not take"
        ):
            loader.resize(ol.Mesh(dp=1))
        assert loader.tree.mesh.dp == 2
        parts[0].append(tokens_of(next(ahead)))  # it goes on as before
        parts[1] += [tokens_of(next(behind)) for _ in range(3)]
        assert loader.resize(ol.Mesh(dp=1)) == 3
        last = taken(loader, 3)
    steps = [np.sort(np.concatenate(both)) for both in zip(*parts, strict=True)]
    assert same([*steps, *last], uncut)


def test_ranks_that_read_in_other_threads_are_waited_for():
    job = job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=4))
    uncut, _ = read_all(job, 200)
    with ol.start(job) as loader:
        parts: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(4)]
        clients = [loader.client(rank, timeout_s=30) for rank in range(4)]
        some_read = threading.Event()

        def read(rank: int) -> None:
            try:
                while True:
                    step = next(clients[rank])
                    parts[rank].append((step.number, tokens_of(step)))
                    if step.number == 3:
                        some_read.set()
            except ol.errors.ClosedError:
                pass

        threads = [threading.Thread(target=read, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        assert some_read.wait(30)
        step = loader.resize(ol.Mesh(dp=2, cp=2), timeout_s=30)
        for thread in threads:
            thread.join(30)
        assert step >= 4
        assert [[number for number, _ in part] for part in parts] == [list(range(step))] * 4, (
            "all to the same step, no further"
        )
        found = [np.sort(np.concatenate([part[n][1] for part in parts])) for n in range(step)]
        assert same([*found, *taken(loader, 2)], uncut[: step + 2])


def test_a_step_that_trainers_lost_can_be_handed_out_again_for_the_new_mesh():
    job = job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=4))
    uncut, _ = read_all(job, 8)
    with ol.start(job) as loader:
        first = taken(loader, 5)
        assert loader.resize(ol.Mesh(dp=3), at=4) == 4  # a rank died in step 4, and nobody could finish it
        assert loader.state_dict()["step"] == 4
        again = taken(loader, 4)
    assert same(first, uncut[:5])
    assert same(again, uncut[4:8])


@pytest.mark.parametrize("at", [-1, 4])
def test_a_mesh_can_change_only_between_the_first_step_of_the_run_and_the_first_untaken(at):
    with ol.start(job_of({"a": A})) as loader:
        taken(loader, 3)
        with pytest.raises(ol.errors.SpecError, match=rf"from step 0, .* to step 3, .*; at={at} is not between them"):
            loader.resize(ol.Mesh(dp=2), at=at)
        taken(loader, 2)


def test_a_closed_client_is_not_waited_for():
    with ol.start(job_of({"a": A}, mesh=ol.Mesh(dp=2))) as loader:
        left, right = loader.client(0), loader.client(1)
        next(left)
        next(left)
        next(right)
        right.close()
        assert loader.resize(ol.Mesh(dp=1)) == 2


def test_after_all_clients_were_closed_the_run_goes_on_behind_the_furthest_of_them():
    with ol.start(job_of({"a": A}, mesh=ol.Mesh(dp=2))) as loader:
        for rank in range(2):
            with loader.client(rank, timeout_s=20) as client:
                list(islice(client, 3))
        assert loader.resize(ol.Mesh(dp=1)) == 3


def test_a_mesh_that_cannot_be_leaves_the_run_as_it_was():
    def only_two(graph: ol.DGraph) -> ol.Plan:
        return graph.pack().distribute("dp").deal().plan()

    class Full(Mortal):
        def spawn(self, name, make, **apart):
            if name == "constructor/2":
                raise ol.OverlordError("the cluster is full")
            return super().spawn(name, make, **apart)

    job = job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=2), strategy=only_two)
    uncut, _ = read_all(job, 6)
    with ol.start(job, engine=Full()) as loader:
        clients = [loader.client(rank, timeout_s=20) for rank in range(2)]
        steps = [[tokens_of(next(client)) for client in clients] for _ in range(3)]
        with pytest.raises(ol.OverlordError, match="the cluster is full"):
            loader.resize(ol.Mesh(dp=3))
        steps += [[tokens_of(next(client)) for client in clients] for _ in range(3)]
        assert same([np.sort(np.concatenate(parts)) for parts in steps], uncut)
        assert loader.resize(ol.Mesh(dp=1)) == 6


def test_a_finite_run_ends_where_it_would_have_and_can_be_resized_at_its_end():
    source = Numbered(rows=30, first=1, repeat=False)
    uncut, _ = read_all(job_of({"a": source}), 1000)
    with ol.start(job_of({"a": source}, mesh=ol.Mesh(dp=2))) as loader:
        found = taken(loader, len(uncut) - 1)
        loader.resize(ol.Mesh(dp=1))
        found += [np.sort(tokens_of(step)) for step in loader.client(0)]
        assert same(found, uncut)
        assert loader.resize(ol.Mesh(dp=3)) == len(uncut)
        assert [list(loader.client(rank)) for rank in range(3)] == [[], [], []]


def test_a_state_from_before_can_be_loaded_after():
    with ol.start(job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=2))) as loader:
        first = taken(loader, 2)
        state = loader.state_dict()
        following = taken(ol.start(job_of({"a": A, "b": B}), resume=state), 3)
        loader.resize(ol.Mesh(dp=3))
        taken(loader, 3)
        clients = [loader.client(rank) for rank in range(3)]
        for client in clients:
            client.load_state_dict(state)
        again = [np.sort(np.concatenate([tokens_of(next(client)) for client in clients])) for _ in range(3)]
        assert same(again, following)
        assert len(first) == 2


def test_the_log_says_which_mesh_each_step_was_arranged_for(tmp_path):
    with ol.start(job_of({"a": A}, mesh=ol.Mesh(dp=2)), log=str(tmp_path)) as loader:
        taken(loader, 2)
        loader.resize(ol.Mesh(dp=1))
        taken(loader, 1)
        loader.resize(ol.Mesh(dp=3))
    segments = FileSegments(str(tmp_path))
    snapshots = [orjson.loads(read_frames(segments.read(n)).bodies[1]) for n in segments.numbers()]
    assert [[(step, value["dp"]) for step, _, value in s["decisions"]] for s in snapshots][-2:] == [[(2, 1)], [(3, 3)]]


def test_resizing_again_and_again_leaves_no_old_clients_behind():
    with ol.start(job_of({"a": A})) as loader:
        for _ in range(10):
            list(islice(loader.client(0), 1))
            loader.resize(ol.Mesh(dp=1))
        assert len(loader._readers.clients) <= 2


def read_again(client: ol.Client) -> None:
    client.rejoin()
    next(client)


@pytest.mark.strangers
@pytest.mark.parametrize("connected", [False, True], ids=["in process", "connected"])
def test_a_client_of_a_rank_that_is_gone_can_always_be_closed(connected):
    with ol.start(job_of({"a": A}, mesh=ol.Mesh(dp=3))) as loader:
        address = loader.serve()
        made = [ol.connect(address, rank=r, timeout_s=30) if connected else loader.client(r, timeout_s=30) for r in range(3)]
        for client in made:
            next(client)
        assert loader.resize(ol.Mesh(dp=1)) == 1
        gone = made[2]
        assert gone.state_dict()["step"] == 1, "a state is that of the run, and the run has it"
        with pytest.raises(
            ol.errors.ClosedError, match=r"the run was moved to another state; .*rejoin if its mesh was changed"
        ):
            next(gone)
        gone.close()
        gone.close()
        made[0].rejoin()
        with pytest.raises(
            (ol.errors.ClosedError, ol.errors.SpecError), match=r"rank 2 is closed|rank must be from 0 to 0, got 2"
        ):
            read_again(gone)
        assert next(made[0]).number == 1
    made[0].close()  # and after the loader
    made[1].close()


@pytest.mark.strangers
def test_closing_a_client_of_the_old_mesh_does_not_let_the_new_one_of_its_rank_leave():
    with ol.start(job_of({"a": A}, mesh=ol.Mesh(dp=2), prefetch=0)) as loader:
        old = [loader.client(rank, timeout_s=30) for rank in range(2)]
        for client in old:
            next(client)
        loader.resize(ol.Mesh(dp=2))
        new = [loader.client(rank, timeout_s=0.5) for rank in range(2)]
        for client in new:
            next(client)
        old[1].close()
        with pytest.raises(ol.errors.WaitTimeoutError, match="data-parallel group 1 are still at step"):
            list(islice(new[0], 10))
