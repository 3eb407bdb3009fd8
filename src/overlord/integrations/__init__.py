"""Overlord inside training frameworks, one module a framework. Nothing is imported before it is used.

- `torch`: the state of a run in torch's checkpoints.
- `transformers`: `OverlordTrainer`, and `OverlordMixin` for other subclasses of transformers' `Trainer`.
- `trl`: `OverlordSFTTrainer`.
- `accelerate`: a client that `Accelerator.save_state` saves, and the loss and microbatches of a step.
- `lightning`: `OverlordDataModule`, and the loss of a step.
- `deepspeed`: a client that the engine's checkpoints keep, and `train_step`.
- `torchtitan`: `OverlordDataLoader`.
- `ray_train`: a client that follows the size of the worker group.
- `megatron`: iterators for `dataloader_type="external"`.
- `torchft`: a client that follows the replicas that are alive.
- `verl`: prompts for reinforcement learning.
"""
