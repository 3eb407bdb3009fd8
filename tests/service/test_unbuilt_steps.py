"""Steps that trainers build themselves, from chunks in shared memory: the same as those that the service builds."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.batches.buffers import Arenas
from overlord.batches.collate import collate
from overlord.batches.unbuilt import ChunkPlace, UnbuiltMicrobatch
from overlord.chunks.shared_rows import ChunkArenas
from overlord.errors import DataError
from overlord.messages import Delivery
from overlord.runtime.shared_memory import why_unavailable
from overlord.service import local_link, unbuilt_steps
from overlord.service.channel import FlightChannel
from overlord.service.local_link import LocalLink
from overlord.service.local_steps import StepBorrower
from overlord.service.prefetch import RequestedSteps
from overlord.service.steps import BuildError, DamagedStepError
from overlord.service.unbuilt_steps import UnbuiltStep
from tests.batches.microbatches import Microbatch, microbatch, microbatches
from tests.fuzz.mutations import damaged, edited
from tests.service.served import content, streams, two_sources, undisturbed
from tests.service.test_local_steps import Pair
from tests.service.test_steps import all_same

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason="needs Linux's memfd")


@dataclass
class SharedChunk:
    """A chunk as a loader host shares it."""

    values: np.ndarray
    begin: memoryview
    document_end: memoryview
    mask: np.ndarray | None
    place: ChunkPlace | None

    @staticmethod
    def of(arenas: Arenas, values: np.ndarray, begin: list[int], end: list[int], mask: np.ndarray | None) -> SharedChunk:
        arrays = [values, np.array(begin, np.int64), np.array(end, np.int64), *([] if mask is None else [mask])]
        memory = arenas.lease(sum(array.nbytes + 64 for array in arrays))
        at, lent = 0, []
        for array in arrays:
            lent.append(memory[at : at + array.nbytes].view(array.dtype))
            lent[-1][:] = array
            at += -(-array.nbytes // 64) * 64
        shared_mask = None if mask is None else lent[3]
        place = ChunkPlace.of(memory, lent[0], lent[1], lent[2], shared_mask)
        return SharedChunk(lent[0], lent[1].data, lent[2].data, shared_mask, place)


def unbuilt(
    arenas: Arenas, made: Microbatch, source: int = 0, *, dtype: Any = np.int32, weighted: bool = False
) -> UnbuiltMicrobatch:
    """A microbatch with its documents in two chunks of a source: those with masks, and the others."""
    micro, payload, batch = made
    chunks: dict[tuple[int, int], SharedChunk] = {}
    table = micro.samples.table.copy()
    masks = payload.loss_masks or [None] * len(payload.tokens)
    for number in range(2):
        values, mask, begin, end = [np.zeros(3, dtype)], [np.ones(3)], list[int](), list[int]()
        for place, tokens in enumerate(payload.tokens):
            of_sample: Any = masks[place]
            after = int(payload.following[place])
            if (of_sample is not None) != (number == 1):
                continue
            table[:5, place] = source, number, len(begin), 0, len(tokens)
            begin.append(sum(map(len, values)))
            values += [tokens.astype(dtype), np.array([after] if after >= 0 else [], dtype)]
            end.append(sum(map(len, values)))
            mask.append((np.ones(len(tokens) + 1) if of_sample is None else of_sample)[: end[-1] - begin[-1]])
        flat = np.concatenate(mask).astype(np.float32 if weighted else np.uint8) if number == 1 else None
        chunks[source, number] = SharedChunk.of(arenas, np.concatenate(values), begin, end, flat)
    samples = replace(micro.samples, table=table)
    used = {(source, int(number)) for number in samples.chunk}
    return UnbuiltMicrobatch(
        samples,
        micro.row,
        micro.num_rows,
        micro.row_tokens,
        {key: chunks[key] for key in used},
        batch,
        weighted,
    )


def travelled(pair: Pair, *steps: list[UnbuiltMicrobatch]) -> list[UnbuiltStep]:
    first, *following = [Delivery(i + 7, 30 + i, (), tuple(step)) for i, step in enumerate(steps)]
    pair.lender.take_back(pair.borrower.take_returned())
    return pair.send(pair.lender.pack(replace(first, following=tuple(following))))


@given(st.sampled_from(["packed", "padded"]).flatmap(lambda layout: microbatches(layout)), st.booleans(), st.booleans())
def test_what_a_trainer_builds_is_what_collation_makes(made, is_wide, weighted):
    pair, arenas = Pair(), ChunkArenas()
    ours = unbuilt(arenas, made, dtype=np.int64 if is_wide else np.int32, weighted=weighted)
    (step,) = travelled(pair, [ours])
    payload = made.payload
    if payload.loss_masks is not None:  # a mask has an entry for the token after a sample, where there is one
        ends = [mask is not None and after < 0 for mask, after in zip(payload.loss_masks, payload.following, strict=True)]
        masks = [
            mask if not is_end else np.append(mask[:-1], 0) for mask, is_end in zip(payload.loss_masks, ends, strict=True)
        ]
        payload = replace(payload, loss_masks=masks)
    expected = collate(replace(made.micro, samples=ours.samples), payload, made.batch, weighted=weighted)
    built = step.build()
    assert all_same(Delivery(7, 30, (expected,)), built)
    assert ours.num_tokens == expected["num_tokens"]
    assert not any(value.flags.writeable for value in built.microbatches[0].values() if isinstance(value, np.ndarray))


def test_several_steps_come_together_and_memory_is_held_until_the_last_is_built():
    pair, arenas = Pair(), ChunkArenas()
    ours = [
        [unbuilt(arenas, microbatch([300, 20 + i]), 2 * i), unbuilt(arenas, microbatch([5]), 2 * i + 1)] for i in range(3)
    ]
    micros = [micro for step in ours for micro in step]
    chunks = {key: chunk for micro in micros for key, chunk in micro.chunks.items()}
    ours = [[replace(micro, chunks=chunks) for micro in step] for step in ours]
    found = travelled(pair, *ours)
    assert [step.step for step in found] == [7, 8, 9]
    assert [step.loss_tokens for step in found] == [30, 31, 32]
    for i, step in enumerate(ours):
        assert all_same(Delivery(7 + i, 30 + i, tuple(micro.build() for micro in step)), found[i].build())
    gc.collect()
    assert pair.borrower.take_returned().free == []


def test_a_chunk_is_lent_once_and_returned_when_the_service_has_dropped_it():
    pair, arenas = Pair(), ChunkArenas()
    first, second, third = (unbuilt(arenas, microbatch([300 + i, 20]), i) for i in range(3))
    both = {**first.chunks, **second.chunks}
    (step,) = travelled(pair, [replace(first, chunks=both)])
    (again,) = travelled(pair, [second])
    assert all_same(Delivery(7, 30, (second.build(),)), again.build())
    assert pair.borrower.take_returned().free == []
    del first, second, both
    gc.collect()
    (other,) = travelled(pair, [third])
    assert len(pair.borrower.take_returned().free) == 2
    assert other.build().microbatches[0]["num_documents"] == 2
    with pytest.raises(BuildError):
        step.build()


def test_a_chunk_that_has_not_what_was_planned_is_left_to_the_service():
    pair, arenas = Pair(), ChunkArenas()
    micro = unbuilt(arenas, microbatch([300, 20]))
    micro.samples.table[4, 1] += 1000
    (step,) = travelled(pair, [micro])
    with pytest.raises(BuildError, match="step 7 is left to the service"):
        step.build()


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_message_is_refused_or_builds_something(seed):
    rng = random.Random(seed)
    pair, arenas = Pair(), ChunkArenas()
    (message,) = pair.lender.pack(Delivery(7, 30, (), (unbuilt(arenas, microbatch([300, 20, 9], document_multiple=4)),)))
    envelope = msgspec.msgpack.decode(message.data)
    for _ in range(50):
        body = damaged(rng, envelope["body"]) if rng.random() < 0.5 else edited_message(rng, envelope["body"])
        borrower = StepBorrower()
        try:
            found = borrower.receive(
                memoryview(msgspec.msgpack.encode({**envelope, "body": body})),
                [os.dup(segment.descriptor) for segment in message.segments],
                Arenas(2),
            )
        except DamagedStepError:
            continue
        for step in found if isinstance(found, list) else []:
            try:
                assert isinstance(step.build(), Delivery)
            except (BuildError, MemoryError):
                continue


def edited_message(rng: random.Random, body: bytes) -> bytes:
    """The message with another value somewhere."""
    try:
        return msgspec.msgpack.encode(edited(rng, msgspec.msgpack.decode(body)))
    except OverflowError:
        return b""


JOBS = {
    "packed": two_sources(mesh=ol.Mesh(dp=2)),
    "cut documents": two_sources(batch=ol.Batch(tokens=64, sequence_length=16, cut_documents=True), mesh=ol.Mesh(dp=2)),
    "padded": two_sources(batch=ol.Batch(samples=6, sequence_length=16, layout="padded"), mesh=ol.Mesh(dp=2)),
    "multiples": two_sources(batch=ol.Batch(tokens=64, sequence_length=16, document_multiple=4), mesh=ol.Mesh(dp=2)),
    "several ranks a group": two_sources(mesh=ol.Mesh(dp=1, tp=2)),
    "slices": two_sources(mesh=ol.Mesh(dp=1, cp=2)),
}
ONE_MICROBATCH = two_sources(batch=ol.Batch(tokens=64, sequence_length=16, micro_tokens=64))
"""Steps that `next` unpacks without a thread."""
STEPS = 25


@pytest.fixture
def built_here(monkeypatch) -> list[int]:
    """The steps that clients of this process have built."""
    numbers: list[int] = []
    build = UnbuiltStep.build

    def note(self: UnbuiltStep) -> Delivery:
        numbers.append(self.step)
        return build(self)

    monkeypatch.setattr(unbuilt_steps.UnbuiltStep, "build", note)
    return numbers


@pytest.mark.parametrize("name", JOBS)
def test_trainers_build_the_stream_where_they_have_a_group_to_themselves(name, built_here):
    job = JOBS[name]
    ranks = range(job.mesh.world_size)
    with ol.start(job, engine=ol.Processes(2)) as loader:
        address = loader.serve()
        clients = [ol.connect(address, rank=rank, timeout_s=60) for rank in ranks]
        assert streams(clients, STEPS) == undisturbed(job, STEPS)
        for client in clients:
            client.close()
    is_alone = job.mesh.world_size == job.mesh.dp
    assert set(built_here) >= set(range(STEPS)) if is_alone else not built_here


def test_a_step_that_cannot_be_built_here_comes_built(monkeypatch, built_here):
    def fail(*_: object) -> None:
        raise DataError("not here")

    job = JOBS["packed"]
    expected = undisturbed(job, STEPS)
    monkeypatch.setattr(UnbuiltMicrobatch, "build", fail)  # in this process, in which no constructor is
    with ol.start(job, engine=ol.Processes(2)) as loader:
        address = loader.serve()
        clients = [ol.connect(address, rank=rank, timeout_s=60) for rank in range(2)]
        assert streams(clients, STEPS) == expected
        for client in clients:
            channel: Any = client.channel
            assert isinstance(channel, FlightChannel)
            link: Any = channel._steps
            assert isinstance(link, LocalLink)
            assert not link.can_build
            client.close()
    assert built_here


def test_states_are_exact_while_several_steps_are_there_ahead(built_here):
    job = ONE_MICROBATCH
    expected = undisturbed(job, STEPS)[0]
    with ol.start(job, engine=ol.Processes(2)) as loader, ol.connect(loader.serve(), rank=0, timeout_s=60) as client:
        for number in range(10):
            assert content(next(client)) == expected[number]
        ahead = client._ahead
        assert isinstance(ahead, RequestedSteps)
        state = client.state_dict()
        assert state["step"] == 10
        for number in range(10, 14):
            assert content(next(client)) == expected[number]
        client.load_state_dict(state)
        for number in range(10, STEPS):
            assert content(next(client)) == expected[number]
    assert max(built_here) == STEPS - 1


def test_an_answer_has_several_small_steps(monkeypatch):
    sizes: list[int] = []
    receive = local_link.StepPipeline.receive

    def note(self: local_link.StepPipeline, timeout_s: float) -> Any:
        found = receive(self, timeout_s)
        sizes.append(len(found) if isinstance(found, list) else 0)
        return found

    monkeypatch.setattr(local_link.StepPipeline, "receive", note)
    with (
        ol.start(ONE_MICROBATCH, engine=ol.Processes(2)) as loader,
        ol.connect(loader.serve(), rank=0, timeout_s=60) as client,
    ):
        for number in range(2_000):  # the planner has to get ahead of the trainer
            assert next(client).number == number
            if local_link._MOST_TOGETHER in sizes:
                break
    assert max(sizes) == local_link._MOST_TOGETHER
