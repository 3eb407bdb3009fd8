"""Megatron-Core on Overlord: torchrun --nproc-per-node 2 examples/integrations/on_megatron.py --until 10

A GPTModel and Megatron's parallel state. With `pretrain` of Megatron-LM the loader is `datasets_provider(job)` and nothing
else is needed; here the loop around it is spelled out, because Megatron's own allocates on a GPU.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from tiny import LEARNING_RATE, VOCABULARY, Journal, declare, options

torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment] - where Megatron allocates buffers

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from overlord.integrations.megatron import open_batches, saved_state  # noqa: E402

CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # type: ignore[assignment] - the state of a GPU's generator
SEQ_LENGTH = 128


def main() -> None:
    given = options()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=SEQ_LENGTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    saves = given.folder / "saves"
    first = max((int(path.name.removeprefix("iter_")) for path in saves.glob("iter_*")), default=0)
    if first:
        saved = torch.load(saves / f"iter_{first:07d}" / "model.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    batches = open_batches(declare(given.data), seq_length=SEQ_LENGTH, resume=saved_state(saves, first) if first else None)
    assert batches is not None  # without tensor parallelism every rank reads
    journal, losses = Journal(given.folder, given.until), []

    for _ in range(first, given.until):
        total = 0.0
        for _ in range(4 // dist.get_world_size()):
            batch = next(batches)
            journal.note(batch["tokens"], batch["position_ids"])
            document = (batch["position_ids"][0] == 0).cumsum(0)
            hidden = ~(document[:, None] == document[None, :]).tril()  # Transformer Engine takes packed_seq_params instead
            output = model(batch["tokens"], batch["position_ids"], hidden[None, None], labels=batch["labels"])
            summed = (output * batch["loss_mask"]).sum()  # what Megatron's loss_func returns
            summed.backward()
            total += summed.item()
        for parameter in model.parameters():  # as Megatron's finalize_model_grads does with calculate_per_token_loss
            dist.all_reduce(parameter.grad)
            parameter.grad /= batches.loss_tokens
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / batches.loss_tokens)
    if dist.get_rank() == 0:
        folder = saves / f"iter_{given.until:07d}" / "mp_rank_00"
        folder.mkdir(parents=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder.parent / "model.pt")
        torch.save({"dataloader_state_dict": batches.save_state()}, folder / "train_dataloader_dprank000.pt")
    dist.barrier()
    batches.client.close()
    journal.write(losses, model, is_partial=True)


if __name__ == "__main__":
    main()
