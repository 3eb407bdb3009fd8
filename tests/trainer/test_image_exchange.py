"""A small VLM on several processes that encode each other's images learns what it learns on one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import overlord as ol
from overlord.trainer import exchange
from tests.pictures import encoded, picture_documents, picture_job
from tests.trainer.ranks import join_world, run_ranks

_RANKS = 2
_WIDTH = 8
_VOCABULARY = 3100
_STEPS = 2


class TinyVlm(nn.Module):
    """An encoder of picture rows, a table of tokens, and a backbone that sees the place before each place of a document."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(2, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH))
        self.table = nn.Embedding(_VOCABULARY, _WIDTH)
        self.backbone = nn.Sequential(nn.Linear(2 * _WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _VOCABULARY))
        self.double()

    def encoded(self, images: Any) -> torch.Tensor:
        rows = [encoded(np.asarray(image)) / 100 for image in images]
        return self.encoder(torch.from_numpy(np.concatenate([np.zeros((0, 2)), *rows])))

    def loss(self, micro: Mapping[str, Any], image_rows: torch.Tensor) -> torch.Tensor:
        """Summed over the tokens of the microbatch."""
        seen = self.table(micro["tokens"].long())
        at = micro["image_row"]
        places = (at >= 0).nonzero().squeeze(1)
        seen = seen.index_copy(0, places, image_rows[at[places].long()])
        before = torch.roll(seen, 1, 0) * (micro["position_ids"] > 0).double()[:, None]
        logits = self.backbone(torch.cat([seen, before], dim=1))
        return cross_entropy(logits, micro["labels"], reduction="sum")


def _trained(client: ol.Client, together: bool) -> dict[str, Any]:
    """Loss of each step and the gradients of all steps, summed over ranks where there are several."""
    model, losses, num_foreign = TinyVlm(), [], 0
    for _ in range(_STEPS):
        step = next(client)
        total = torch.zeros((), dtype=torch.float64)
        for micro in step:
            if together:
                rows = exchange(model.encoded(micro["encode_images"]), micro)
                num_foreign += int(micro["send_counts"].sum() - micro["send_counts"][dist.get_rank()])
            else:
                rows = model.encoded(micro.get("images", ()))
            loss = model.loss(micro, rows) / step.loss_tokens
            loss.backward()
            total += loss.detach()
        if together:
            dist.all_reduce(total)
        losses.append(total.item())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradient in gradients.values() if together else ():
        dist.all_reduce(gradient)
    return {"losses": losses, "gradients": gradients, "num_foreign": num_foreign}


def _one_rank(rank: int, address: str, folder: Path) -> None:
    torch.set_num_threads(1)
    join_world(rank, _RANKS, folder)
    with ol.connect(address, rank=rank, timeout_s=60, torch=True) as client:
        torch.save(_trained(client, together=True), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_loss_and_gradients_are_those_of_one_process(tmp_path):
    path = picture_documents(tmp_path / "pictures.parquet", 80)
    with ol.start(picture_job(path, ol.Mesh(), None)) as loader:
        alone = _trained(loader.client(0, timeout_s=60, torch=True), together=False)
    with ol.start(picture_job(path, ol.Mesh(dp=_RANKS), "cp")) as loader:
        run_ranks(_one_rank, _RANKS, loader.serve(), tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(_RANKS)]
    assert sum(rank["num_foreign"] for rank in found) > 0
    for rank in found:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        for name, gradient in alone["gradients"].items():
            torch.testing.assert_close(rank["gradients"][name], gradient, rtol=1e-9, atol=1e-12)


def test_what_does_not_fit_the_routes_is_refused_before_anything_is_sent(tmp_path):
    with pytest.raises(ol.errors.SpecError, match="has no exchange"):
        exchange(torch.zeros(1, 2), {"tokens": np.zeros(1)})
    path = picture_documents(tmp_path / "pictures.parquet", 20)
    with ol.start(picture_job(path, ol.Mesh(), "cp")) as loader:
        micro = next(loader.client(0, timeout_s=60)).microbatches[0]
    with pytest.raises(ol.errors.SpecError, match="the encoder returned 1 rows"):
        exchange(torch.zeros(1, 2), micro)
