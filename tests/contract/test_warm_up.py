"""Steps that grow: sizes are a function of the number of a step, and the stream keeps its contract meanwhile."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.checkpoint.fingerprint import Fingerprint
from overlord.cli import main
from overlord.declare.policies import WarmUp
from overlord.lineage.obtaining import open_log
from overlord.stream.progress import Progress
from tests.contract.conftest import Start
from tests.contract.streams import stream, text_job
from tests.contract.test_stream import MESHES, STRATEGIES
from tests.small_sources import Numbered, documents_of, job_of, planned, read_all, same
from tests.stream.streams import keys, steps, streams

A = Numbered(rows=40, first=1)
B = Numbered(rows=23, unit_rows=4, first=100, longest=16)
MIXTURE = ol.Mixture({0: {"a": 5, "b": 3}, 4: {"a": 1, "b": 1}}, unit="tokens", ramp="linear")


@st.composite
def warm_ups(draw: st.DrawFn, unit: Literal["tokens", "samples"], multiple: int) -> WarmUp:
    """Sizes in multiples that a brute force can follow in a few hundred steps."""
    by = draw(st.sampled_from(("steps", unit)))
    most = 40 if by == "steps" else 40 * multiple
    starts = sorted(draw(st.sets(st.integers(1, most), min_size=1, max_size=3)))
    sizes = sorted(draw(st.lists(st.integers(1, 12), min_size=len(starts) + 1, max_size=len(starts) + 1)))
    given = {start: size * multiple for start, size in zip((0, *starts), sizes, strict=True)}
    return WarmUp(given, by=by, ramp=draw(st.sampled_from(("hold", "linear"))))


@given(warm_ups("tokens", 4))
def test_sizes_are_those_found_step_by_step(warm_up):
    entries, seen = warm_up.entries, 0
    phases = warm_up.phases(4)
    for step in range(200):
        amount = step if warm_up.by == "steps" else seen
        at = max(i for i, (start, _) in enumerate(entries) if start <= amount)
        (start, size), (later, then) = entries[at], entries[min(at + 1, len(entries) - 1)]
        if warm_up.ramp == "linear" and later > start:
            size += (amount - start) * (then - size) // (later - start) // 4 * 4
        assert (phases.size_at(step), phases.before_step(step)) == (size, seen)
        seen += size


def test_a_ramp_over_a_billion_tokens_is_known_at_once():
    batch = ol.Batch(
        sequence_length=4096,
        tokens=1 << 22,
        warm_up=WarmUp({0: 1 << 19, 10**12: 1 << 22}, by="tokens", ramp="linear", multiple=1 << 17),
    )
    phases = batch.phases
    assert phases is not None
    assert len(phases.size) == 29  # one more than the multiples between the two sizes
    assert batch.at(0).tokens == 1 << 19
    assert batch.at(phases.first[-1] - 1).tokens == (1 << 22) - (1 << 17)
    assert batch.at(phases.first[-1]) is batch
    assert 10**12 <= phases.before[-1] < 10**12 + (1 << 22)


BATCHES = st.one_of(
    st.builds(
        lambda warm_up, **options: ol.Batch(tokens=warm_up.entries[-1][1], sequence_length=16, warm_up=warm_up, **options),
        warm_ups("tokens", 16),
        cut_documents=st.booleans(),
    ),
    st.builds(
        lambda warm_up, **options: ol.Batch(samples=warm_up.entries[-1][1], sequence_length=16, warm_up=warm_up, **options),
        warm_ups("samples", 1),
        layout=st.sampled_from(["packed", "padded"]),
    ),
)
FEW = settings(max_examples=20)


def size_of(batch: ol.Batch, step: Any) -> int:
    return len(step.samples) if batch.tokens is None else int(step.samples.tokens.sum())


@FEW
@given(streams(finite=False, longest=16), BATCHES, st.integers(1, 30))
def test_a_growing_run_that_is_cut_anywhere_goes_on_as_if_it_had_not_been(made_up, batch, cut):
    mixture = ol.Mixture(dict.fromkeys(made_up.names, 1.0), unit="tokens")
    uncut = steps(made_up.drawer(batch, mixture), 40)
    for step in uncut:
        wanted = batch.at(step.number)
        if batch.samples is not None or batch.cut_documents:
            assert size_of(batch, step) == (wanted.tokens or wanted.samples)
        else:
            assert size_of(batch, step) <= (wanted.tokens or 0)
            assert step.rows is not None
            assert step.rows.max() < (wanted.num_rows or 0)
    state = uncut[cut - 1].after().to_plain()
    resumed = steps(made_up.drawer(batch, mixture, Progress.from_plain(json.loads(json.dumps(state)))), 40 - cut)
    assert [keys(step) for step in resumed] == [keys(step) for step in uncut[cut:]]


@FEW
@given(streams(finite=True), st.booleans())
def test_growing_steps_of_a_finite_run_hold_every_token_once(made_up, cut_documents):
    warm_up = WarmUp({0: 20, 3: 60, 100: 100}, by="tokens")
    batch = ol.Batch(tokens=100, sequence_length=20, cut_documents=cut_documents, warm_up=warm_up)
    found = steps(made_up.drawer(batch, ol.Mixture(dict.fromkeys(made_up.names, 1.0))), 10_000)
    seen = Counter(
        (source, chunk, row, place)
        for step in found
        for source, chunk, row, start, stop, _ in keys(step)
        for place in range(start, stop)
    )
    assert set(seen.values()) <= {1}
    whole = [made_up.describe(s, c).tokens.sum() for s, e in enumerate(made_up.extents) for c in range(e.end)]
    assert len(seen) == sum(whole)


@settings(max_examples=10)
@given(BATCHES, MESHES, MESHES, STRATEGIES, st.integers(0, 9))
def test_meshes_strategies_and_resumes_do_not_change_growing_steps(batch, first, second, strategy, cut):
    sources = {"a": A, "b": B}
    uncut, end = read_all(job_of(sources, batch, mixture=MIXTURE), 10)
    before, state = read_all(job_of(sources, batch, mixture=MIXTURE, mesh=first, strategy=strategy), cut)
    after, resumed_end = read_all(job_of(sources, batch, mixture=MIXTURE, mesh=second), 10 - cut, resume=state)
    assert same(before + after, uncut)
    assert resumed_end == end


GROWING = ol.Batch(
    tokens=512,
    sequence_length=64,
    micro_tokens=64,
    warm_up=WarmUp({0: 128, 8: 512}, ramp="linear", multiple=128),
    document_limits=WarmUp({0: 16, 1024: 64}, by="tokens", ramp="linear", multiple=16),
)


def test_every_engine_gives_growing_steps_and_tells_how_many_there_are(start: Start, tmp_path: Path):
    job = text_job(tmp_path, batch=GROWING, mesh=ol.Mesh(dp=2), repeat=False)
    with start(job) as loader:
        num_steps = loader.count_steps(120).steps
        found = stream(loader, 1000)
    with ol.start(job) as loader:
        assert stream(loader, 1000) == found
        assert len(loader.client(0)) == num_steps
    assert len(found) == num_steps
    assert [[len(micros) for _, _, micros in ranks] for ranks in found[:10]] == [
        [n, n] for n in (1, 1, 1, 2, 2, 2, 3, 3, 4, 4)
    ]
    longest = [
        max(
            np.frombuffer(micro["document_lengths"][2], np.int32).max(initial=0)
            for _, _, micros in ranks
            for micro in micros
        )
        for ranks in found[:9]
    ]
    limits = [GROWING.document_limit(step) for step in range(9)]
    assert limits == [16, 16, 16, 32, 32, 48, 64, 64, 64]
    assert all(length <= limit for length, limit in zip(longest, limits, strict=True))
    assert longest[2] == 16
    assert longest[8] > 48


def test_trace_explain_and_simulate_know_the_size_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    job = text_job(tmp_path, batch=GROWING, mesh=ol.Mesh(dp=2))
    log = tmp_path / "log"
    with ol.start(job, log=log) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        for _ in range(12):
            for client in clients:
                next(client)
        plans = [planned(loader, step).plan for step in range(12)]
    recorded = open_log(job, log)
    for step, plan in enumerate(plans):
        traced = recorded.planned(step).plan
        assert traced.counts.tolist() == plan.counts.tolist()
        assert np.array_equal(traced.samples.table, plan.samples.table)
    file = tmp_path / "job.yaml"
    web = tmp_path / "web.parquet"
    file.write_text(
        f"sources: {{web: {{paths: {web}}}}}\n"
        "batch: {sequence_length: 64, tokens: 512, warm_up: {sizes: {0: 128, 8: 512}, ramp: linear}}\n"
        "mesh: {dp: 2}\n"
    )
    assert main(["check", str(file)]) == 0
    told = capsys.readouterr().out
    assert "steps grow from 128 tokens to 512, which they have from step 8 on, after 2,176 tokens; sizes: 7" in told
    epoch = re.search(r"an epoch is about ([\d,]+) tokens, and lasts about (\d+) steps", told)
    assert epoch is not None
    tokens, num_steps = (int(number.replace(",", "")) for number in epoch.groups())
    assert abs(num_steps - (8 + (tokens - 2176) / 512)) < 2, "less than by the size of the first step"
    assert "warning: 3 of the 7 sizes of the warm-up, 192 for one, are no multiples of 128" in told
    assert main(["explain", str(file), "--step", "3"]) == 0
    assert "in 4 rows of 64 tokens" in capsys.readouterr().out
    assert main(["simulate", str(file), "--steps", "5", "--capacity", "64", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    sizes = [128, 128, 192, 256, 320]
    assert [size - 64 < step["tokens"] <= size for step, size in zip(simulated["steps"], sizes, strict=True)] == [True] * 5


def test_a_job_without_a_warm_up_has_the_fingerprint_that_it_had():
    job = job_of({"a": A})
    units = {"a": A.units()}
    plain = Fingerprint.of(job, units).to_dict()
    assert "warm_up" not in plain["batch"]
    growing = replace(job, batch=replace(job.batch, warm_up=WarmUp({0: 16, 4: 64})))
    saved = Fingerprint.of(growing, units).to_dict()
    assert Fingerprint.of(job, units).differences(saved).keys() == {"batch.warm_up"}
    assert Fingerprint.of(growing, units).differences(plain).keys() == {"batch.warm_up"}
    assert not Fingerprint.of(growing, units).differences(json.loads(json.dumps(saved)))


def test_an_evaluation_has_steps_of_the_declared_size():
    held_out = Numbered(rows=12, first=500)
    batch = ol.Batch(samples=6, sequence_length=16, warm_up=WarmUp({0: 2, 50: 6}))
    with ol.start(job_of({"a": A}, batch, evals={"val": ol.Eval(sources={"val": held_out})})) as loader:
        client = loader.client(0)
        sizes = [sum(len(micro["document_lengths"]) for micro in step) for step in client.evaluate("val")]
        assert sum(len(micro["document_lengths"]) for micro in next(client)) == 2
    assert sizes == [6, 6]
    assert sum(sizes) == len(documents_of(held_out))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sizes": {}}, "begins at 0"),
        ({"sizes": {4: 64}}, "begins at 0"),
        ({"sizes": {0: 64, 4: 32}}, "never fall: 64 at 0, then 32 at 4"),
        ({"sizes": {0: 0, 4: 64}}, "sizes from 1 on, got 0: 0"),
        ({"sizes": {0: 16, 4: 64}, "by": "epochs"}, "by steps, tokens or samples, not 'epochs'"),
        ({"sizes": {0: 16, 4: 64}, "ramp": "cosine"}, "hold or linear, not 'cosine'"),
        ({"sizes": {0: 16, 4: 64}, "multiple": 0}, "multiple is a whole number from 1 on"),
        ({"sizes": {0: 16, 4: 64}, "by": "samples"}, "by='steps' or by='tokens', not 'samples'"),
        ({"sizes": {0: 20, 4: 64}}, r"multiples of sequence_length \(16\): 20 at 0 is none"),
        ({"sizes": {0: 16, 4: 64}, "multiple": 24}, "must be whole rows: 24"),
        ({"sizes": {0: 16, 4: 64}, "multiple": 32}, "multiples of multiple=32: 16 at 0 is none"),
        ({"sizes": {0: 16, 4: 48}}, r"ends with the size of the batch: Batch\(tokens=64\) and 48 at 4 differ"),
    ],
)
def test_a_warm_up_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ol.errors.SpecError, match=message):
        ol.Batch(tokens=64, sequence_length=16, warm_up=WarmUp(**fields))


def test_limits_that_cannot_work_are_refused():
    with pytest.raises(ol.errors.SpecError, match="by='steps' or by='tokens', not 'samples'"):
        ol.Batch(tokens=64, sequence_length=16, document_limits=WarmUp({0: 8}, by="samples"))
    with pytest.raises(ol.errors.SpecError, match="must be a multiple of document_multiple"):
        ol.Batch(
            tokens=64, sequence_length=16, document_multiple=4, document_limits=WarmUp({0: 8}, ramp="linear", multiple=2)
        )
    with pytest.raises(ol.errors.SpecError, match=r"warm_up is a policies.WarmUp, got \{0: 16\}"):
        ol.Batch(tokens=64, sequence_length=16, warm_up={0: 16})  # type: ignore[arg-type]
