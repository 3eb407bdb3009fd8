"""`len(client)` and `count_steps`: the steps of a run that ends, counted beside it, without a trace in it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.service import client as client_module
from overlord.status import SourceTotal
from tests.service.served import served
from tests.small_sources import Numbered, job_of, tokens_of

A = Numbered(rows=40, first=1, repeat=False)
B = Numbered(rows=23, unit_rows=4, first=100, longest=16, repeat=2)
ENDLESS = Numbered(rows=9, first=500)
BATCHES = [ol.Batch(tokens=64, sequence_length=32), ol.Batch(samples=7, sequence_length=16)]


@settings(max_examples=12)
@given(
    rows=st.integers(1, 60),
    epochs=st.integers(1, 3),
    batch=st.sampled_from(BATCHES),
    stop=st.sampled_from(["first_exhausted", "all_exhausted", "drop_exhausted"]),
    cut=st.integers(0, 3),
    dp=st.sampled_from([1, 2]),
)
def test_the_length_is_the_number_of_steps_wherever_a_run_begins(rows, epochs, batch, stop, cut, dp):
    sources = {"a": Numbered(rows=rows, first=1, repeat=epochs), "b": B}
    job = job_of(sources, batch, mixture=ol.Mixture({"a": 2, "b": 1}, stop=stop), mesh=ol.Mesh(dp=dp))
    with ol.start(job) as loader:
        clients = [loader.client(rank, timeout_s=30) for rank in range(dp)]
        length = len(clients[0])
        taken = 0
        state = loader.state_dict()
        while steps := [step for client in clients if (step := next(client, None)) is not None]:
            taken += 1
            if taken == min(cut, length):
                state = steps[0].state_after()
        assert taken == length == len(clients[-1])
    with ol.start(job, resume=state) as loader:
        assert len(loader.client(0)) == length


def test_the_totals_of_each_source_are_told_before_the_run_and_at_its_end():
    with ol.start(job_of({"a": A, "b": B})) as loader:
        before = loader.count_steps(wait_s=60)
        assert before.steps == before.counted
        assert before.sources["a"].epochs == 1
        assert before.sources["b"].samples == 46
        tokens = {name: 0 for name in ("a", "b")}
        for step in loader.client(0, timeout_s=30):
            for micro in step:
                for source, length in zip(micro["document_sources"], micro["document_lengths"], strict=True):
                    tokens["ab"[source]] += int(length)
        assert {name: total.tokens for name, total in before.sources.items()} == tokens
        assert loader.count_steps().sources == before.sources
        assert isinstance(before.sources["a"], SourceTotal)


def test_counting_leaves_the_run_as_it_was():
    job = job_of({"a": A, "b": B})
    with ol.start(job) as loader, ol.start(job) as untouched:
        client, other = loader.client(0), untouched.client(0)
        assert len(client) > 6
        assert loader.status().reached == untouched.status().reached
        assert loader.set_weights({"a": 1, "b": 5}) == untouched.set_weights({"a": 1, "b": 5})
        counted = len(client)
        assert [tokens_of(step).tolist() for step in client] == [tokens_of(step).tolist() for step in other]
        assert client.step == counted


def test_weights_that_are_set_make_another_length():
    with ol.start(job_of({"a": A, "b": B}, mixture=ol.Mixture({"a": 1, "b": 1}, stop="first_exhausted"))) as loader:
        client = loader.client(0, timeout_s=30)
        before = len(client)
        loader.set_weights({"a": 20, "b": 1}, from_step=1)
        assert len(client) < before
        assert len(client) == sum(1 for _ in client)


def test_a_run_over_the_wire_has_a_length_and_a_handle_counts():
    with served(job_of({"a": A})) as (loader, address), ol.connect(address, rank=0, timeout_s=30) as client:
        assert len(client) == client.run.count_steps().steps == loader.count_steps(60).steps
        assert bool(client)


@pytest.mark.parametrize(
    ("sources", "mixture", "reason"),
    [
        ({"a": ENDLESS}, None, "source 'a' repeats for ever; set repeat=False, or a number of epochs, for a run that ends"),
        ({"a": A, "b": ENDLESS}, None, "source 'b' repeats for ever"),
        ({"a": A, "b": ENDLESS}, ol.Mixture({"b": 1}, stop="first_exhausted"), "source 'b' repeats for ever"),
        ({"a": A, "b": ENDLESS}, ol.Mixture(lambda step, progress: {"a": 1.0}), "repeats for ever, and the weights are a"),
        (
            {"a": A, "b": B},
            ol.Mixture({"a": 1, "b": 1}, feedback=ol.policies.Feedback()),
            "it depends on the losses that trainers report",
        ),
    ],
)
def test_a_run_without_an_end_has_no_length(sources, mixture, reason):
    with ol.start(job_of(sources, mixture=mixture)) as loader:
        client = loader.client(0)
        with pytest.raises(TypeError, match=f"has no length: .*{reason}"):
            len(client)
        assert client.run.count_steps().steps is None
        assert client
        assert next(client).number == 0


def test_a_source_that_repeats_may_be_in_a_run_that_ends():
    job = job_of({"a": A, "b": ENDLESS}, mixture=ol.Mixture({"a": 1, "b": 1}, stop="first_exhausted"))
    with ol.start(job) as loader:
        client = loader.client(0, timeout_s=30)
        assert len(client) == sum(1 for _ in client)


def test_much_data_is_not_read_for_a_length_unless_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(client_module, "_COUNTED_BYTES", 1000)
    with ol.start(job_of({"a": A})) as loader:
        client = loader.client(0, timeout_s=30)
        with pytest.raises(TypeError, match=r"length of this run is not known yet.*client.run.count_steps\(\) does so"):
            len(client)
        assert loader.count_steps(0.0, 1000).counted == 0
        steps = client.run.count_steps().steps
        assert len(client) == steps


@dataclass(frozen=True)
class Blocked(Numbered):
    may_read: threading.Event = threading.Event()  # noqa: RUF009 - one for all

    def read(self, unit):
        if unit.index == 5:
            assert self.may_read.wait(60)
        return super().read(unit)


def test_a_count_that_takes_long_tells_how_far_it_is_and_ends_with_the_run():
    source = Blocked(rows=40, first=1, repeat=False, shuffle=False)
    with ol.start(job_of({"a": source}, num_workers=1)) as loader:
        client = loader.client(0, timeout_s=30)
        count = client.run.count_steps(timeout_s=0.2)
        assert count.steps is None
        assert count.endless == ""
        source.may_read.set()
        assert len(client) > count.counted


def test_an_error_on_the_way_to_the_end_is_raised_by_the_count():
    @dataclass(frozen=True)
    class Broken(Numbered):
        def read(self, unit):
            if unit.index == 3:
                raise OSError("bad disk")
            return super().read(unit)

    with ol.start(job_of({"a": Broken(rows=40, first=1, repeat=False, shuffle=False)})) as loader:
        client = loader.client(0, timeout_s=30)
        with pytest.raises(OSError, match="bad disk"):
            len(client)
        assert next(client).number == 0


def test_bad_rows_are_quarantined_once(tmp_path):
    path = tmp_path / "bad.jsonl"
    policy = ol.policies.BadRows("quarantine", path=str(path), budget=100)
    source = Numbered(rows=10, first=1, repeat=False, transform=ol.per_row(odd_only), on_bad_row=policy)
    with ol.start(replace(job_of({"a": source}))) as loader:
        client = loader.client(0, timeout_s=30)
        length = len(client)
        assert sum(1 for _ in client) == length
        assert len(path.read_text().splitlines()) == 5


def odd_only(row: dict) -> dict:
    if row["document"] % 2:
        raise ValueError("odd")
    return row
