"""torchtitan on Overlord: torchrun --nproc-per-node 2 examples/integrations/on_torchtitan.py --until 10

FSDP2 over all ranks, with torchtitan's own Trainer, checkpoints and Validator. What belongs to Overlord is the loader's
Config.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from tiny import VOCABULARY, Journal, declare, options
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

# torchtitan looks for an accelerator when it is imported. These few lines let it take the CPU for one.
torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
torch.cpu.get_device_name = lambda *_: "CPU"  # type: ignore[attr-defined]
torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 30)  # type: ignore[attr-defined]
for name in ("reset_peak_memory_stats", "empty_cache"):
    setattr(torch.cpu, name, lambda *_: None)
torch.cpu.memory_stats = lambda *_: {}  # type: ignore[attr-defined]
torch.cpu.current_device = lambda: 0  # type: ignore[assignment]

if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3 is written for a later torch
    torch.distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss  # noqa: E402

from overlord.integrations.torchtitan import OverlordDataLoader  # noqa: E402


class NoTokenizer(BaseTokenizer):
    """The documents of this example are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: object) -> None:
        super().__init__()

    def encode(self, *args: object, **options: object) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: object, **options: object) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def initialize(model: torch.nn.Module) -> None:
    """The same weights on any number of ranks; those of torchtitan depend on how FSDP has cut them."""
    torch.manual_seed(0)
    for weight in model.parameters():
        whole = torch.randn(weight.shape) * (0.02 if weight.ndim > 1 else 0.0) + float(weight.ndim == 1)
        cut = distribute_tensor(whole, weight.device_mesh, weight.placements) if isinstance(weight, DTensor) else whole
        weight.data.copy_(cut)


def main() -> None:
    given = options()
    config = llama3_debugmodel_ce_loss()
    config.dump_folder = str(given.folder)
    config.tokenizer = NoTokenizer.Config()
    layers = config.model_spec.model.layers
    del layers[2:]
    for layer in layers:  # the attention that separates documents, FlexAttention, has no backward pass on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training = TrainingConfig(
        local_batch_size=2,
        seq_len=64,
        global_batch_size=8,
        steps=given.until,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
        max_norm=1e9,  # clipping would hide how gradients are scaled; so would AdamW, but for this large epsilon
    )
    config.optimizer = default_adamw(lr=0.2, eps=1.0, weight_decay=0.0)
    config.dataloader = OverlordDataLoader.Config(job=declare(given.data))
    config.checkpoint = CheckpointManager.Config(enable=True, interval=5, last_save_model_only=False)
    config.validator = Validator.Config(enable=True, freq=5, steps=2, dataloader=config.dataloader)
    config.parallelism.spmd_backend = "partial_dtensor"
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0)  # the same whatever --until is
    config.metrics = MetricsProcessor.Config(log_freq=1)
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    initialize(trainer.model_parts[0])
    journal, losses = Journal(given.folder, given.until), []

    def note(step: int, loss: float, *_: object, **__: object) -> None:
        losses.append(loss)

    def watch(module: torch.nn.Module, given: tuple, named: dict) -> None:
        if module.training:
            journal.note(given[0], named["positions"])

    trainer.metrics_processor.log = note
    trainer.model_parts[0].register_forward_pre_hook(watch, with_kwargs=True)
    trainer.train()
    journal.write(losses, trainer.model_parts[0])
    trainer.dataloader.close()
    trainer.close()


if __name__ == "__main__":
    main()
