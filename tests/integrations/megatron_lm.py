"""Megatron-LM's own code around the loader, in a process of its own that takes a CPU for a GPU: it builds its iterators from
`datasets_provider`, reads through the `get_batch` of pretrain_gpt.py, saves the loader's state and continues from it.

python -m tests.integrations.megatron_lm FOLDER, with a checkout of Megatron-LM in PYTHONPATH, writes FOLDER/facts.json.
"""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

from tests.integrations.training import import_tiny

if not hasattr(typing, "override"):  # Megatron-LM 0.19 is written for Python 3.12, and needs no more than this of it
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
NUM_MICROBATCHES = 4  # of a step of the job


def take_cpu_for_gpu() -> None:
    make, empty = torch.tensor, torch.empty
    torch.tensor = lambda *values, device=None, **options: make(*values, **options)  # type: ignore[assignment]
    torch.empty = lambda *shape, device=None, **options: empty(*shape, **options)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]


def arguments(folder: Path, iteration: int) -> SimpleNamespace:
    """As much of Megatron-LM's arguments as these functions read."""
    return SimpleNamespace(
        consumed_train_samples=iteration * NUM_MICROBATCHES,
        consumed_valid_samples=0,
        context_parallel_size=1,
        create_attention_mask_in_dataloader=False,
        dataloader_inter_document_masking=True,
        dataloader_save=str(folder / "loader"),
        dataloader_type="external",
        eval_global_batch_size=NUM_MICROBATCHES,
        eval_interval=10,
        eval_iters=2,
        full_validation=False,
        global_batch_size=NUM_MICROBATCHES,
        hybrid_context_parallel=False,
        iteration=iteration,
        micro_batch_size=1,
        multiple_validation_sets=False,
        perform_rl_step=False,
        phase_transition_iterations=None,
        pipeline_model_parallel_size=1,
        seq_length=128,
        sft=False,
        skip_train=False,
        start_eval_at_iter=None,
        tensor_model_parallel_size=1,
        train_iters=15,
        train_samples=None,
        virtual_pipeline_model_parallel_size=None,
    )


def main(folder: Path) -> None:
    take_cpu_for_gpu()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    import pretrain_gpt  # type: ignore[import-not-found]
    from megatron.core import parallel_state
    from megatron.training import checkpointing, global_vars, training  # type: ignore[import-not-found]

    from overlord.integrations.megatron import datasets_provider

    parallel_state.initialize_model_parallel()
    layout = SimpleNamespace(pipeline_model_parallel_layout=None, mtp_num_layers=None)
    pretrain_gpt.core_transformer_config_from_args = lambda _: layout
    (folder / "data").mkdir()
    job = import_tiny().declare(folder / "data")

    def open_at(iteration: int) -> tuple[Any, Any]:
        global_vars._GLOBAL_ARGS = arguments(folder, iteration)
        return training.build_train_valid_test_data_iterators(datasets_provider(job, job))[:2]

    def read(iterator: Any, steps: int) -> list[dict[str, Any]]:
        found = []
        for _ in range(steps * NUM_MICROBATCHES):
            batch = dict(zip(pretrain_gpt.BATCH_KEYS, pretrain_gpt.get_batch(iterator), strict=True))
            found.append({name: value.tolist() for name, value in batch.items() if value is not None})
        return found

    train, valid = open_at(0)
    first = read(train, 2)
    checkpointing.maybe_save_dataloader_state(train, 2, str(folder / "loader"))
    after, validated = read(train, 2), read(valid, 1)
    resumed = read(open_at(2)[0], 2)
    facts = {"first": first, "after": after, "resumed": resumed, "validated": validated}
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
