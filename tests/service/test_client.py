"""The client: an iterator that can be taken up again, that says what it waits for, and that closes cleanly."""

import threading
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pyarrow as pa
import pytest

import overlord as ol
from tests.small_sources import Numbered, job_of, tokens_of


@dataclass(frozen=True)
class Gated(Numbered):
    """A source whose reads wait until the gate is opened."""

    gate: threading.Event = field(default_factory=threading.Event)

    def read(self, unit: ol.Unit) -> pa.Table:
        self.gate.wait(20)
        return super().read(unit)


def test_a_timeout_names_the_rank_the_step_and_what_it_waited_for():
    source = Gated(rows=40, first=1)
    with ol.start(job_of({"slow": source})) as loader:
        client = loader.client(0, timeout_s=2)
        with pytest.raises(ol.errors.WaitTimeoutError, match=r"(?s)rank 0 waited .* s for step 0: .*'slow'.*making chunk 0"):
            next(client)
        source.gate.set()
        assert next(client).number == 0, "the same client goes on when the data comes"


def test_a_wait_timeout_is_also_a_timeout_error():
    assert issubclass(ol.errors.WaitTimeoutError, TimeoutError)


def test_breaking_off_and_iterating_again_goes_on():
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        client = loader.client(0)
        numbers = []
        for step in client:
            numbers.append(step.number)
            if step.number == 2:
                break
        numbers += [step.number for step in islice(client, 2)]
        assert numbers == [0, 1, 2, 3, 4]


def test_after_the_end_of_a_finite_run_iterating_again_begins_anew():
    source = Numbered(rows=12, first=1, repeat=False)
    with ol.start(job_of({"a": source}, mesh=ol.Mesh(dp=2))) as loader:
        clients = [loader.client(0), loader.client(1)]
        rounds = []
        for _ in range(3):
            found = []
            for client in clients:
                iter(client)
            while True:
                steps = [next(client, None) for client in clients]
                if steps == [None, None]:
                    break
                found.append([tokens_of(step).tolist() for step in steps if step is not None])
            rounds.append(found)
        assert rounds[0]
        assert rounds[0] == rounds[1] == rounds[2]


@pytest.mark.strangers
@pytest.mark.parametrize("over_the_wire", [False, True], ids=["in process", "connected"])
def test_a_validation_pass_of_a_few_steps_is_the_same_each_time_once_it_is_rewound(over_the_wire):
    job = job_of({"a": Numbered(rows=400, first=1), "b": Numbered(first=500)}, mesh=ol.Mesh(dp=2, cp=2))
    with ol.start(job) as loader:
        if over_the_wire:
            address = loader.serve()
            clients = [ol.connect(address, rank=rank, timeout_s=60) for rank in range(4)]
        else:
            clients = [loader.client(rank, timeout_s=60) for rank in range(4)]
        passes = []
        for _ in range(3):
            found: list[list] = [[] for _ in clients]
            # Each rank begins its pass when it gets there, the first one while the others still stand at the end of theirs.
            for client in clients:
                client.rewind()
                found[client.rank] += [tokens_of(step).tolist() for step in islice(client, 2)]
            for _ in range(8):
                for client in clients:
                    found[client.rank].append(tokens_of(next(client)).tolist())
            passes.append(found)
        assert [client.step for client in clients] == [10] * 4
        for client in clients:
            client.close()
    assert passes[0] == passes[1] == passes[2]
    assert len({str(step) for step in passes[0][0]}) == 10


def test_a_closed_client_holds_nobody_back():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=2, cp=2))) as loader:
        clients = [loader.client(rank, timeout_s=20) for rank in range(4)]
        for client in clients:
            next(client)
        clients[1].close()
        clients[3].close()
        for _ in range(20):
            next(clients[0])
            next(clients[2])
        with pytest.raises(ol.errors.ClosedError, match="rank 1 is closed"):
            next(clients[1])


def test_a_rank_opened_late_starts_at_the_beginning_of_the_run():
    job = job_of({"a": Numbered(first=1), "b": Numbered(first=200)}, mesh=ol.Mesh(dp=2))
    with ol.start(job) as loader:
        early = loader.client(0)
        for _ in range(3):
            next(early)
        late = loader.client(1, timeout_s=20)
        assert next(late).number == 0


def test_closing_the_loader_wakes_a_client_that_waits_in_another_thread():
    source = Gated(rows=40, first=1)
    loader = ol.start(job_of({"slow": source}))
    errors: list[BaseException] = []

    def read() -> None:
        try:
            next(loader.client(0))
        except ol.errors.ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    source.gate.set()  # let the reader thread end too
    loader.close()
    thread.join(10)
    assert not thread.is_alive()
    loader.close()


def test_pipeline_stages_get_inputs_labels_or_metadata_only():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(pp=3))) as loader:
        first, middle, last = (next(loader.client(rank)) for rank in range(3))
        assert all("tokens" in micro and "labels" not in micro for micro in first)
        assert all("labels" in micro and "tokens" not in micro for micro in last)
        assert all("tokens" not in micro and "labels" not in micro and "cu_seqlens" in micro for micro in middle)
        assert all("position_ids" in micro for step in (first, middle, last) for micro in step)
        assert first.loss_tokens == middle.loss_tokens == last.loss_tokens > 0


def test_a_job_says_which_stages_of_the_pipeline_need_a_field():
    stages = ol.pipelines.StageFields({"tokens": (0, -1)}, chunks=2)
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(pp=3), stage_fields=stages)) as loader:
        has_tokens = [["tokens" in micro for micro in next(loader.client(rank))] for rank in range(3)]
    assert [set(found) for found in has_tokens] == [{True}, {False}, {True}]
    with pytest.raises(ol.errors.SpecError, match="'tokens' goes to stage 4"):
        job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(pp=2), stage_fields=ol.pipelines.StageFields({"tokens": (4,)}))


def test_tensor_parallel_ranks_share_one_fetch_or_receive_by_broadcast():
    source = {"a": Numbered(first=1)}
    with ol.start(job_of(source, mesh=ol.Mesh(tp=2))) as loader:
        left, right = next(loader.client(0)), next(loader.client(1))
        for a, b in zip(left, right, strict=True):
            assert np.shares_memory(a["tokens"], b["tokens"])

    def broadcasting(graph: ol.DGraph) -> ol.Plan:
        return graph.pack().distribute("dp").deal().broadcast_at("tp").plan()

    with ol.start(job_of(source, mesh=ol.Mesh(tp=2), strategy=broadcasting)) as loader:
        whole, told = next(loader.client(0)), next(loader.client(1))
        for a, b in zip(whole, told, strict=True):
            assert "tokens" not in b
            assert b["broadcast"]["tokens"] == (a["tokens"].shape, "int32")


def test_a_step_with_one_microbatch_reads_like_a_batch_and_one_with_several_says_how():
    with ol.start(job_of({"a": Numbered(first=1)}, ol.Batch(tokens=16, sequence_length=16))) as loader:
        step = next(loader.client(0))
        assert len(step) == 1
        assert step["tokens"].shape == (16,)
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        step = next(loader.client(0))
        with pytest.raises(ol.errors.SpecError, match=r"has 4 microbatches on this rank: iterate over them"):
            step["tokens"]


def test_torch_tensors_share_memory_with_the_arrays():
    torch = pytest.importorskip("torch")
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        for micro in next(loader.client(0, torch=True)):
            assert micro["tokens"].dtype == torch.int32
            assert micro["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("rank", "fields", "message"),
    [
        (4, {}, r"rank must be from 0 to 3, got 4"),
        (0, {"timeout_s": 0}, r"timeout_s is a positive number of seconds or None, got 0"),
        (0, {"pin_memory": True}, r"pin_memory needs torch=True"),
    ],
)
def test_a_client_asked_for_wrongly_says_so(rank, fields, message):
    job = job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=4))
    with ol.start(job) as loader, pytest.raises(ol.errors.SpecError, match=message):
        loader.client(rank, **fields)
