"""Megatron-LM and Megatron-Core on Overlord's steps, by `--dataloader-type external`.

`datasets_provider(job)` is what `pretrain` takes as its provider. Megatron cuts batches for context parallelism and
broadcasts them along tensor parallelism by its own functions, so every rank that reads gets whole microbatches: the first
rank of each tensor-parallel group, on the first and the last stage of a pipeline and, for packed batches, on those between.
The others leave the run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.batches.framework_layouts import megatron
from overlord.errors import SpecError, StateError
from overlord.integrations.frameworks import is_before, require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from overlord.declare.job import Job
    from overlord.messages import MicrobatchWithColumns
    from overlord.service.client import Client

_ORDER = "tp-cp-ep-dp-pp"


class MegatronBatches:
    """An iterator over the microbatches of this rank, as Megatron's `get_batch` expects them from an external loader:
    `tokens`, `labels` and `position_ids` int64 [1, N], `loss_mask` float32, `cu_seqlens` int32 [1, n], `max_seqlen` int32
    [1].

    `save_state` is what Megatron saves for `--dataloader-save`.
    """

    def __init__(
        self,
        client: Client,
        *,
        seq_length: int | None = None,
        has_bounds: bool = True,
        num_microbatches: Callable[[], int] | None = None,
    ) -> None:
        """`seq_length`: the width that Megatron allocates on ranks that receive by broadcast; shorter microbatches are
        padded to it. `has_bounds`: whether Megatron uses `cu_seqlens`. `num_microbatches`: what Megatron accumulates in a
        step, to compare with the job's."""
        self.client = client
        self._seq_length, self._has_bounds = seq_length, has_bounds
        self._num_microbatches = num_microbatches
        self._left: list[MicrobatchWithColumns] = []
        self.loss_tokens: int | float = 0
        """The loss tokens of the step that is being trained on, over all ranks."""

    def __iter__(self) -> MegatronBatches:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self._left:
            step = next(self.client)
            expected = len(step) if self._num_microbatches is None else self._num_microbatches()
            if len(step) != expected:
                raise SpecError(
                    f"Megatron accumulates {expected} microbatches, but step {step.number} has {len(step)} on this rank: "
                    "make --global-batch-size x --seq-length equal to Batch(tokens=...), with --micro-batch-size 1 and "
                    "micro_tokens = --seq-length"
                )
            self._left, self.loss_tokens = list(step), step.loss_tokens
        return batch_of(self._left.pop(0), self._seq_length, has_bounds=self._has_bounds)

    def save_state(self) -> dict[str, Any]:
        if self._left:
            raise SpecError(
                f"Megatron saves in the middle of step {self.client.step - 1}: {len(self._left)} microbatches are left"
            )
        return dict(self.client.state_dict())


def datasets_provider(
    job: Job, eval_job: Job | None = None, *, options: Mapping[str, Any] | None = None
) -> Callable[..., tuple[MegatronBatches | None, MegatronBatches | None, None]]:
    """The `train_valid_test_datasets_provider` of Megatron's `pretrain`, for `--dataloader-type external`.

    It reads sizes from Megatron's arguments, and continues from the state in `--dataloader-save` at the iteration that
    Megatron has loaded. `options` are more arguments of `overlord.trainer.attach`.
    """

    def provide(_: Any, vp_stage: int | None = None) -> tuple[MegatronBatches | None, MegatronBatches | None, None]:
        del vp_stage
        args = require("megatron-core", "megatron.training").get_args()
        if args.dataloader_type != "external":
            raise SpecError(f"pass --dataloader-type external: Overlord is one, and it is {args.dataloader_type!r}")
        if args.micro_batch_size != 1 and job.batch.layout == "packed":
            raise SpecError(f"a packed microbatch is one row: pass --micro-batch-size 1, got {args.micro_batch_size}")
        folder = getattr(args, "dataloader_save", None)
        saved = None if not folder or not args.iteration else saved_state(folder, args.iteration)
        packed = getattr(args, "sft", False) or getattr(args, "dataloader_inter_document_masking", False)
        if packed and args.tensor_model_parallel_size * args.pipeline_model_parallel_size > 1:
            _check_broadcast()
        sizes = {"seq_length": args.seq_length, "has_bounds": packed, **(options or {})}
        train = open_batches(job, resume=saved, **sizes)
        return train, None if eval_job is None else open_batches(eval_job, checks_count=False, **sizes), None

    provide.is_distributed = True  # type: ignore[attr-defined] - so that Megatron calls it on every rank
    return provide


def open_batches(
    job: Job, *, seq_length: int | None = None, has_bounds: bool = True, checks_count: bool = True, **options: Any
) -> MegatronBatches | None:
    """Start a job for Megatron's parallel state, which is initialised; returns the iterator of this rank, None if Megatron
    does not read here. Every rank calls it. `has_bounds`: whether Megatron uses `cu_seqlens`, so that all stages read."""
    from overlord.trainer.launch import attach

    state = require("megatron-core", "megatron.core.parallel_state")
    if (state.get_virtual_pipeline_model_parallel_world_size() or 1) > 1 and not has_bounds:
        raise SpecError(
            "with virtual pipeline stages only some of a rank's model chunks read a batch without cu_seqlens, and the "
            "others would wait: pass --dataloader-inter-document-masking (or --sft), or leave virtual stages out"
        )
    client = attach(on_megatron_mesh(job), cut=(), **options)
    if not reads_here(has_bounds):
        client.close()  # the others need not wait for this rank
        return None
    counter = require("megatron-core", "megatron.core.num_microbatches_calculator")
    is_counted = checks_count and counter._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None  # noqa: SLF001 - it has no other sign
    return MegatronBatches(
        client,
        seq_length=seq_length,
        has_bounds=has_bounds,
        num_microbatches=counter.get_num_microbatches if is_counted else None,
    )


def _check_broadcast() -> None:
    if is_before("megatron-core", "0.17"):
        raise SpecError(
            "Megatron-LM before 0.17 broadcasts cu_seqlens along tensor and pipeline parallelism in another order than it "
            "receives them: take a later release, or leave --sft and --dataloader-inter-document-masking out"
        )


def on_megatron_mesh(job: Job, order: str = _ORDER) -> Job:
    """The job on the mesh of Megatron's parallel state."""
    import torch.distributed as dist

    state = require("megatron-core", "megatron.core.parallel_state")
    tree = ClientPlaceTree.from_megatron(
        order,
        world_size=dist.get_world_size(),
        tp=state.get_tensor_model_parallel_world_size(),
        cp=state.get_context_parallel_world_size(),
        pp=state.get_pipeline_model_parallel_world_size(),
    )
    return replace(job, mesh=tree.mesh)


def reads_here(has_bounds: bool = True) -> bool:
    """Whether Megatron's `get_batch` calls `next` on this rank."""
    state = require("megatron-core", "megatron.core.parallel_state")
    is_end = state.is_pipeline_first_stage(ignore_virtual=True) or state.is_pipeline_last_stage(ignore_virtual=True)
    return state.get_tensor_model_parallel_rank() == 0 and (is_end or has_bounds)


def saved_state(folder: str | Path, iteration: int) -> dict[str, Any]:
    """The loader's state that Megatron saved to `--dataloader-save` at an iteration: the same in the file of every rank."""
    import torch

    found = sorted(Path(folder, f"iter_{iteration:07d}").glob("**/train_dataloader_dprank000.pt"))
    if not found:
        raise StateError(
            f"there is no state of the loader in {folder} for iteration {iteration}: pass the --dataloader-save of the run "
            "that wrote the checkpoint"
        )
    return torch.load(found[0], weights_only=False)["dataloader_state_dict"]


def batch_of(micro: Mapping[str, Any], seq_length: int | None = None, *, has_bounds: bool = True) -> dict[str, Any]:
    """A microbatch as a batch of Megatron's external loader, packed ones padded to `seq_length`. Without `has_bounds` it has
    no `cu_seqlens`: some releases take their presence for a sign that all ranks use them."""
    # Releases before 0.18 move whatever there is under this name to the device, None too.
    batch = {name: value for name, value in _padded(micro, seq_length).items() if name != "attention_mask"}
    if not has_bounds:
        for name in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen"):
            batch.pop(name, None)
    return batch


def _padded(micro: Mapping[str, Any], seq_length: int | None) -> dict[str, Any]:
    batch = megatron(micro)
    width = batch["tokens"].shape[1]
    if seq_length is None or width == seq_length:
        return batch
    if width > seq_length or "cu_seqlens" not in batch:
        raise SpecError(
            f"a microbatch has rows of {width} tokens, and Megatron's --seq-length is {seq_length}: declare "
            f"Batch(micro_tokens={seq_length}), and pad_to='sequence_length' for layout='padded'"
        )
    import torch
    import torch.nn.functional as F

    short = seq_length - width
    for name in ("tokens", "labels", "loss_mask"):
        batch[name] = F.pad(batch[name], (0, short))
    ramp = torch.arange(short, device=batch["tokens"].device)[None]  # padding is a segment of its own
    batch["position_ids"] = torch.cat([batch["position_ids"], ramp], dim=1)
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if name in batch:
            batch[name] = F.pad(batch[name], (0, 1), value=seq_length)
    batch["max_seqlen"] = batch["max_seqlen"].clamp(min=short)
    return batch


def packed_seq_params(micro: Mapping[str, Any]) -> Any:
    """Megatron's `PackedSeqParams` of a microbatch, for a `forward_step` of your own.

    Under `strategies.hdp(..., aligned=True)`, a document on several ranks has the group of these ranks that Megatron made
    for its dynamic context parallelism (`local_cp_size`, `cp_group`). Its length must be a multiple of twice their number,
    since Megatron's attention takes equal parts.
    """
    import torch

    core = require("megatron-core", "megatron.core.packed_seq_params")
    bounds, longest = micro["cu_seqlens"], int(micro["max_seqlen"])
    padded = micro.get("cu_seqlens_padded")
    ring: dict[str, Any] = {}
    if "hdp_ranks" in micro:
        size = len(micro["hdp_ranks"])
        ring = {"local_cp_size": size}
        if size > 1:
            longest = int(micro["whole_lengths"][0])
            _check_ring(micro, size, longest)
            bounds = torch.tensor([0, longest], dtype=torch.int32, device=bounds.device)
            state = require("megatron-core", "megatron.core.parallel_state")
            ring["cp_group"] = _group(state, size)
    return core.PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **ring,
    )


def _group(state: Any, size: int) -> Any:
    whole = state.get_data_parallel_group(with_context_parallel=True)
    return whole if whole.size() == size else state.get_hybrid_data_context_parallel_groups(group_size=size)


def _check_ring(micro: Mapping[str, Any], size: int, length: int) -> None:
    ranks = [int(rank) for rank in micro["hdp_ranks"]]
    if size & (size - 1):
        raise SpecError(
            f"a document is on the {size} ranks {ranks}, and Megatron has groups of 2, 4, 8, ... ranks: declare "
            "strategies.hdp(..., aligned=True)"
        )
    if length % (2 * size):
        raise SpecError(
            f"a document of {length} tokens is on {size} ranks, and Megatron's attention takes 2 x {size} equal parts: pad "
            "documents to a multiple of twice the ranks when they are tokenized"
        )
