"""Megatron-Core: two processes train, stop and resume exactly, also on one; batches are what Megatron's own functions
take."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

import overlord as ol
from overlord.errors import SpecError
from tests.commands import environment, python
from tests.integrations.training import check_stop_and_resume, import_tiny
from tests.trainer.ranks import join_world, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework


@pytest.mark.timeout(900)
def test_megatron_trains_stops_and_resumes_exactly_on_other_ranks_too(tmp_path):
    check_stop_and_resume("megatron", tmp_path, reference=None)


def _write(folder: Path, rank: int | None = None) -> ol.Job:
    """Write the documents, unless a rank is given; returns a job over them."""
    lengths = [8 * (1 + number * 7 % 12) for number in range(60)]  # multiples of 2 x cp, up to 96
    documents = [np.full(length, number + 1, np.int32) for number, length in enumerate(lengths)]
    if rank is None:
        pq.write_table(pa.table({"tokens": pa.array(documents, pa.list_(pa.int32()))}), folder / "documents.parquet")
    source = ol.Parquet(str(folder / "documents.parquet"))
    return ol.Job(sources={"a": source}, batch=ol.Batch(tokens=256, sequence_length=128))


def _let_megatron_run_on_cpu() -> None:
    """Its functions allocate on a GPU by name; what they compute is the same here."""
    make = torch.tensor
    torch.tensor = lambda *values, device=None, **options: make(*values, **options)  # type: ignore[assignment]
    empty = torch.empty
    torch.empty = lambda *shape, device=None, **options: empty(*shape, **options)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]


KEYS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")
OTHERS = ("attention_mask", "hybrid_cp_group", "local_cp_size")


def _get_batch(batch: dict[str, Any] | None, cp: int, pp: int, has_bounds: bool) -> dict[str, Any]:
    """What Megatron-LM's `get_batch` makes of a batch, which is None where it does not read, by Megatron's functions. Those
    of releases before 0.18 are not in its package, and its general ones do the same."""
    from megatron.core import parallel_state, utils
    from megatron.core.tensor_parallel.data import broadcast_data

    cp_group = parallel_state.get_context_parallel_group()
    if not hasattr(utils, "get_batch_on_this_tp_rank"):
        whole = broadcast_data(["tokens", "labels", "position_ids"], batch, torch.int64)  # checks dtypes
        whole |= broadcast_data(["loss_mask"], batch, torch.float32)
        own = utils.get_batch_on_this_cp_rank(dict(whole), cp_group=cp_group)
        return own | (broadcast_data(["cu_seqlens", "max_seqlen"], batch, torch.int32) if has_bounds else {})
    assert set(batch or {}) <= set(KEYS)
    whole = utils.get_batch_on_this_tp_rank(
        dict.fromkeys((*KEYS, *OTHERS)) | (batch or {}),
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        has_cu_seqlens=has_bounds,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        cp_size=cp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        micro_batch_size=1,
        seq_length=128,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=pp,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    whole = utils.flatten_batch_for_packed_sequences(whole)
    if whole["tokens"] is None and whole["labels"] is None:
        return whole  # a stage in the middle
    return utils.get_batch_on_this_cp_rank(whole, is_hybrid_cp=False, cp_group=cp_group, use_per_sequence_balancing=True)


def _rank(rank: int, size: int, folder: Path, tp: int, cp: int, pp: int, has_bounds: bool) -> None:
    """Read two steps as Megatron's get_batch does on this rank, with Megatron's own functions."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    join_world(rank, size, folder)
    _let_megatron_run_on_cpu()
    from megatron.core import parallel_state

    from overlord.integrations import megatron

    parallel_state.initialize_model_parallel(tp, pp, context_parallel_size=cp)
    batches = megatron.open_batches(_write(folder, rank), seq_length=128, has_bounds=has_bounds, timeout_s=60)
    is_middle = not (parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage())
    reads_stage = has_bounds or not is_middle
    assert (batches is not None) == (reads_stage and parallel_state.get_tensor_model_parallel_rank() == 0)
    found = []
    for _ in range(2 * 256 // 128 // (size // (tp * cp * pp)) if reads_stage else 0):
        batch = _get_batch(next(batches) if batches is not None else None, cp, pp, has_bounds)
        if has_bounds:
            params = megatron.packed_seq_params({"cu_seqlens": batch["cu_seqlens"][0], "max_seqlen": batch["max_seqlen"]})
            assert params.cu_seqlens_q.dtype == torch.int32
            assert params.max_seqlen_q == params.cu_seqlens_q.diff().max()
        found.append({name: batch[name].tolist() for name in KEYS if batch.get(name) is not None})
    place = [parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()]
    (folder / f"{rank}.json").write_text(json.dumps({"place": place, "batches": found}))
    if batches is not None:
        batches.client.close()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("tp", "cp", "pp", "has_bounds"),
    [(2, 1, 1, True), (1, 2, 1, True), (2, 2, 1, True), (2, 1, 2, True), (1, 1, 4, True), (1, 1, 4, False)],
)
def test_batches_pass_through_megatrons_own_functions_and_make_the_whole_step(tmp_path, tp, cp, pp, has_bounds):
    _write(tmp_path)
    run_ranks(_rank, 4, 4, tmp_path, tp, cp, pp, has_bounds)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    parts: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for each in found:  # ranks of one place have the same, whoever read, or other fields of it
        known = parts.setdefault(tuple(each["place"]), [{} for _ in each["batches"]])
        for whole, batch in zip(known, each["batches"], strict=bool(each["batches"])):
            assert all(whole.setdefault(name, values) == values for name, values in batch.items())
    with ol.start(_write(tmp_path, 0), world_size=1) as loader:
        client = loader.client(0)
        steps = [next(client) for _ in range(2)]
    expected = sorted(token for step in steps for micro in step for token in micro["tokens"].tolist() if token)
    assert sorted(token for part in parts.values() for batch in part for token in batch["tokens"][0] if token) == expected
    labels = [
        label
        for part in parts.values()
        for batch in part
        for label, has_loss in zip(batch["labels"][0], batch["loss_mask"][0], strict=True)
        if has_loss
    ]
    own = [label for step in steps for micro in step for label in micro["labels"].tolist() if label != -100]
    assert sorted(labels) == sorted(own)
    assert len(labels) == sum(step.loss_tokens for step in steps)


def _hdp_rank(rank: int, size: int, folder: Path) -> None:
    """Documents over aligned groups of ranks: the parts that Megatron's own cut gives this rank, in its own groups."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    join_world(rank, size, folder)
    _let_megatron_run_on_cpu()
    from megatron.core import parallel_state, utils

    from overlord.integrations import megatron
    from overlord.trainer import attach

    parallel_state.initialize_model_parallel(1, 1, hybrid_context_parallel=True)
    cost = ol.TransformerCost(per_token=1.0, per_length_squared=0.02)
    job = _write(folder, rank)
    strategy = ol.strategies.hdp(cost, capacity=32, aligned=True)
    job = ol.Job(sources=job.sources, batch=job.batch, mesh=ol.Mesh(dp=size), strategy=strategy)
    sizes = []
    with attach(job, timeout_s=60) as client:
        for _ in range(3):
            for micro in next(client):
                params = megatron.packed_seq_params(micro)
                sizes.append(params.local_cp_size)
                if params.local_cp_size == 1:
                    continue
                assert dist.get_process_group_ranks(params.cp_group) == micro["hdp_ranks"].tolist()
                length, token = params.max_seqlen_q, int(micro["tokens"][0])
                whole = {"position_ids": torch.arange(length)[None], "tokens": torch.full((1, length), token)}
                is_later = hasattr(utils, "get_batch_on_this_tp_rank")  # from 0.18 on it asks for more
                more = {"is_hybrid_cp": False} if is_later else {}
                own = utils.get_batch_on_this_cp_rank(whole, cp_group=params.cp_group, **more)
                assert own["position_ids"][0].tolist() == micro["position_ids"].tolist()
                assert own["tokens"][0].tolist() == micro["tokens"].tolist()
    (folder / f"hdp-{rank}.json").write_text(json.dumps(sizes))
    dist.destroy_process_group()


def test_hdp_plans_run_in_the_groups_of_megatrons_dynamic_context_parallelism(tmp_path):
    _write(tmp_path)
    run_ranks(_hdp_rank, 4, 4, tmp_path)
    sizes = {size for rank in range(4) for size in json.loads((tmp_path / f"hdp-{rank}.json").read_text())}
    assert {2, 4} <= sizes <= {1, 2, 4}


@pytest.mark.timeout(400)
@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM is no folder of a checkout of Megatron-LM 0.19")
def test_megatron_lms_own_code_reads_saves_and_continues(tmp_path):
    path = os.pathsep.join([os.environ["MEGATRON_LM"], environment()["PYTHONPATH"]])
    python("-W", "ignore", "-m", "tests.integrations.megatron_lm", tmp_path, timeout_s=350, PYTHONPATH=path)
    facts = json.loads((tmp_path / "facts.json").read_text())
    with ol.start(import_tiny().declare(tmp_path / "data"), world_size=1) as loader:
        client = loader.client(0)
        steps = [next(client) for _ in range(4)]
    read = facts["first"] + facts["after"]
    for batch, micro in zip(read, [micro for step in steps for micro in step], strict=True):
        width = len(micro["tokens"])
        assert batch["tokens"][0][:width] == micro["tokens"].tolist()
        assert sum(batch["loss_mask"][0]) == (micro["labels"] != -100).sum()
        bounds = micro["cu_seqlens"].tolist()
        assert batch["cu_seqlens"][0] == (bounds if width == 128 else [*bounds, 128])
    assert facts["resumed"] == facts["after"]
    assert facts["validated"] == facts["first"][:4]


def test_rings_that_megatron_has_no_group_for_are_refused():
    from overlord.integrations.megatron import packed_seq_params

    bounds = torch.tensor([0, 4], dtype=torch.int32)
    micro = {"cu_seqlens": bounds, "max_seqlen": 4, "whole_lengths": torch.tensor([30])}
    with pytest.raises(SpecError, match=r"on the 3 ranks \[0, 1, 2\].*declare strategies.hdp\(\.\.\., aligned=True\)"):
        packed_seq_params({**micro, "hdp_ranks": torch.tensor([0, 1, 2])})
    with pytest.raises(
        SpecError, match="a document of 30 tokens is on 4 ranks, and Megatron's attention takes 2 x 4 equal parts"
    ):
        packed_seq_params({**micro, "hdp_ranks": torch.tensor([0, 1, 2, 3])})
