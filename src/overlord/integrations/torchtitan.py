"""torchtitan on Overlord's steps: a `BaseDataLoader`, for training and for its `Validator`.

The loader's state is in torchtitan's checkpoints (DCP) and continues on any number of ranks. torchtitan counts loss tokens
by itself, over all ranks and microbatches.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from overlord.batches.framework_layouts import torchtitan
from overlord.declare.mesh import Mesh
from overlord.errors import SpecError
from overlord.integrations.frameworks import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from overlord.declare.job import Job
    from overlord.messages import MicrobatchWithColumns
    from overlord.service.client import Client

    _BaseDataLoader: Any = object
else:
    require("torchtitan")
    # Releases have it in components/dataloader.py; in the main branch it moved.
    _MOVED = importlib.util.find_spec("torchtitan.components.dataloader") is None
    _BaseDataLoader = require(
        "torchtitan", "torchtitan.components.data.loader" if _MOVED else "torchtitan.components.dataloader"
    ).BaseDataLoader


class OverlordDataLoader(_BaseDataLoader):
    """The batches of a job for torchtitan's `Trainer` and `Validator`: name its `Config` as their `dataloader`.

    A step of the job is a step of the trainer, so Batch(tokens=...) is global_batch_size x seq_len and micro_tokens is
    local_batch_size x seq_len. Batches have whole rows of documents, with `positions` from 0 in each of them; labels are
    shifted. torchtitan cuts them for context, tensor and pipeline parallelism itself.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_BaseDataLoader.Config):
        job: Any = None
        """What to read. Leave its mesh out."""
        options: Any = None
        """More arguments of `overlord.trainer.attach`, as a dict: timeout_s, engine, log, accept_changes ..."""
        infinite: bool = True
        """Set by the Validator. A job says itself whether it ends: sources with repeat=False do."""
        repeat: bool = True
        """The same in later versions of torchtitan."""

        def to_dict(self) -> dict[str, Any]:
            return {"job": repr(self.job), "options": repr(self.options), "infinite": self.infinite, "repeat": self.repeat}

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int | None = None,
        max_context_length: int | None = None,
        local_batch_size: int | None = None,
        num_tokens_per_batch: int | None = None,
        **_: Any,
    ) -> None:
        from overlord.trainer.launch import attach

        if config.job is None:
            raise SpecError("OverlordDataLoader.Config needs a job: Config(job=...)")
        length = seq_len or max_context_length
        rows = local_batch_size or (num_tokens_per_batch or 0) // (length or 1)
        _check_batch(config.job, length or 0, rows, dp_world_size)
        self._is_flat = num_tokens_per_batch is not None  # later versions take tokens of all rows in one dimension
        mesh, place = _place(dp_world_size, dp_rank)
        self._client: Client = attach(replace(config.job, mesh=mesh), **place, **(config.options or {}))
        self._left: list[MicrobatchWithColumns] = []  # of the step that is being trained on

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        while True:
            while self._left:
                yield self._batch_of(self._left.pop(0))
            step = next(iter(self._client), None)
            if step is None:
                return
            self._left = list(step)

    def _batch_of(self, micro: MicrobatchWithColumns) -> tuple[dict[str, Any], Any]:
        inputs, labels = torchtitan(micro)
        # Rows of seq_len tokens, unless a strategy has filled the microbatch otherwise.
        rows = 1 if labels.numel() % micro["num_rows"] else micro["num_rows"]
        shape = (-1,) if self._is_flat else (rows, -1)
        return {name: values.reshape(shape) for name, values in inputs.items()}, labels.reshape(shape)

    def state_dict(self) -> dict[str, Any]:
        if self._left:
            raise SpecError(
                f"torchtitan saves in the middle of step {self._client.step - 1} of the job: {len(self._left)} of its "
                "microbatches are left on this rank. One step of the trainer is one of the job: make Batch(tokens=...) "
                "equal to global_batch_size x seq_len"
            )
        return dict(self._client.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if state_dict:
            self._left = []
            self._client.load_state_dict(state_dict)

    def close(self) -> None:
        self._client.close()


def _check_batch(job: Job, length: int, rows: int, dp: int) -> None:
    batch = job.batch
    if batch.layout != "packed" or batch.tokens is None:
        raise SpecError("torchtitan takes packed batches of a fixed size: declare Batch(tokens=..., layout='packed')")
    if batch.sequence_length != length or (batch.micro_tokens or batch.sequence_length) != rows * length:
        raise SpecError(
            f"torchtitan's microbatches are {rows} x {length} tokens; the job's are {batch.rows_per_microbatch} x "
            f"{batch.sequence_length}: declare Batch(sequence_length={length}, micro_tokens={rows * length}), or change "
            "local_batch_size and seq_len"
        )
    sizes = [batch.tokens] if batch.phases is None else batch.phases.size
    if uneven := [size for size in sizes if size % (rows * length * dp)]:
        raise SpecError(
            f"a step of {uneven[0]} tokens is no whole number of microbatches of {rows * length} on {dp} data-parallel ranks"
        )


def _place(dp: int, dp_rank: int) -> tuple[Mesh, dict[str, int]]:
    """The mesh and this rank in it. Ranks that torchtitan gives one batch are neighbours there, wherever they are in its own
    mesh: it cuts batches itself."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == dp:
        return Mesh(dp=dp), {}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dp_rank)
    if sorted(ranks) != sorted(list(range(dp)) * (len(ranks) // dp)):
        raise SpecError(f"a world of {len(ranks)} ranks does not fit a data-parallel degree of {dp}: {ranks}")
    copies = len(ranks) // dp
    index = ranks[: dist.get_rank()].count(dp_rank)
    return Mesh(dp=dp, tp=copies), {"rank": dp_rank * copies + index}
