"""One job is one stream on every engine: byte for byte, cut and resumed anywhere, on any mesh."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from tests.contract.conftest import Start
from tests.contract.streams import as_value, picture_file, stream, text_file, text_job
from tests.pictures import picture_documents, picture_job

COST = ol.TransformerCost(per_token=1.0, per_length_squared=0.1, constant=0.0)
STEPS = 6


def test_every_field_of_every_rank_is_the_same_byte_for_byte(start: Start, tmp_path: Path):
    mesh = ol.Mesh(pp=2, dp=2, cp=2)
    job = text_job(tmp_path, loaders=2, mesh=mesh, strategy=ol.strategies.long_short(COST))
    with ol.start(job) as loader:
        expected = stream(loader, STEPS)
    with start(job) as loader:
        assert stream(loader, STEPS) == expected


@pytest.mark.strangers
def test_loss_weights_and_special_ids_are_the_same_on_every_engine(start: Start, tmp_path: Path):
    rng = np.random.default_rng(5)
    documents = [rng.integers(1, 1000, rng.integers(2, 60)) for _ in range(80)]
    table = {
        "tokens": pa.array([np.where(tokens % 7 == 0, -200, tokens) for tokens in documents], pa.list_(pa.int64())),
        "weights": pa.array([rng.random(len(tokens)) for tokens in documents], pa.list_(pa.float64())),
    }
    pq.write_table(pa.table(table), tmp_path / "weighted.parquet", row_group_size=20)
    batch = ol.Batch(tokens=512, sequence_length=64, micro_tokens=128, cut_documents=True, special_ids=(-200,))
    sources = {
        "weighted": ol.Parquet(str(tmp_path / "weighted.parquet"), loss_weights="weights"),
        "web": ol.Parquet(text_file(tmp_path / "web.parquet", 60, 1), loss_mask="mask"),
    }
    job = ol.Job(sources=sources, batch=batch, mesh=ol.Mesh(dp=2, cp=2))
    with ol.start(job) as loader:
        expected = stream(loader, STEPS)
    with start(job) as loader:
        assert stream(loader, STEPS) == expected


def test_a_run_saved_on_one_engine_goes_on_on_the_other_with_another_mesh(start: Start, other_start: Start, tmp_path: Path):
    job = text_job(tmp_path, batch=ol.Batch(tokens=512, sequence_length=64, cut_documents=True))
    with ol.start(job) as loader:
        uncut = tokens_of_steps(loader, STEPS)
    with start(job) as loader:
        before = tokens_of_steps(loader, 2)
        state = json.loads(json.dumps(loader.state_dict()))
    with other_start(replace(job, mesh=ol.Mesh(dp=2)), resume=state) as loader:
        assert before + tokens_of_steps(loader, STEPS - 2) == uncut


def tokens_of_steps(loader: ol.Loader, steps: int) -> list[list[int]]:
    """The tokens of each step over all data-parallel ranks, sorted."""
    clients = [loader.client(rank, timeout_s=60) for rank in range(loader.job.mesh.dp)]
    found = []
    for _ in range(steps):
        tokens = np.sort(np.concatenate([micro["tokens"] for client in clients for micro in next(client)]))
        found.append(tokens[tokens > 0].tolist())
    return found


def test_a_finite_run_ends_on_all_ranks_and_begins_anew(start: Start, tmp_path: Path):
    job = text_job(tmp_path, mesh=ol.Mesh(dp=2), repeat=False)
    with ol.start(job) as loader:
        expected = stream(loader, 1000)
    with start(job) as loader:
        assert stream(loader, 1000) == expected
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        assert [next(iter(client)).number for client in clients] == [0, 0]


def test_a_state_moves_the_run_for_every_client_and_plans_can_be_looked_at(start: Start, tmp_path: Path):
    with start(text_job(tmp_path, mesh=ol.Mesh(dp=2))) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        for client in clients:
            next(client)
        state = loader.state_dict()
        planned = loader.plan(1)
        first = [[as_value(micro["tokens"]) for micro in next(client)] for client in clients]
        for _ in range(3):
            for client in clients:
                next(client)
        for client in clients:
            client.load_state_dict(state)
        again = loader.plan(1)
        assert [[as_value(micro["tokens"]) for micro in next(client)] for client in clients] == first
        assert planned is not None
        assert again is not None
        assert again.plan.samples.row.tolist() == planned.plan.samples.row.tolist()
        assert again.step.after().step == 2


def test_pictures_and_columns_of_views_arrive_as_they_were_planned(start: Start, tmp_path: Path):
    source = ol.WebDataset(
        picture_file(tmp_path / "pictures.tar", 12),
        transform=ol.Tokenize("txt", encoding=ol.ByteTokenizer(), keep=("jpg", "__key__")),
        decode=ol.vision.DecodeImage("jpg"),
    )
    batch = ol.Batch(samples=5, sequence_length=32, layout="padded", columns=("__key__", "jpg"))
    job = ol.Job(sources={"pictures": source}, batch=batch)
    with ol.start(job) as loader:
        expected = stream(loader, 4)
    with start(job) as loader:
        assert stream(loader, 4) == expected


def test_pictures_that_others_encode_come_with_their_routes(start: Start, tmp_path: Path):
    job = picture_job(picture_documents(tmp_path / "pictures.parquet", 40), ol.Mesh(dp=2, cp=2), "cp", samples=16)
    with ol.start(job) as loader:
        expected = stream(loader, 3)
    with start(job) as loader:
        assert stream(loader, 3) == expected
