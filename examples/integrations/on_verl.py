"""GRPO with verl's parts on Overlord's prompts: torchrun --nproc-per-node 2 examples/integrations/on_verl.py --until 10

A small policy learns to repeat the last token of a prompt. Batches are verl's DataProto; advantages and the loss are
computed by verl's own functions. Rollouts are sampled here: verl's engines for them need a GPU.
"""

from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tiny import VOCABULARY, Journal, declare_prompts, options
from torch import Tensor, nn
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage

from overlord.integrations.verl import Prompts
from overlord.trainer import attach

NUM_ROLLOUTS, NUM_NEW = 4, 3
LEARNING_RATE = 1.0


class Policy(nn.Module):
    """Logits of the next token from the mean of all tokens so far and the last one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(2 * width, VOCABULARY)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(tokens) * mask[..., None]
        mean = x.cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None]
        return self.head(torch.cat([x, mean], dim=-1))


def roll_out(policy: Policy, batch: DataProto, step: int) -> DataProto:
    """Sample some tokens for each prompt, by random numbers that depend on the prompt and not on the rank that has it."""
    tokens, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
    for index in range(NUM_NEW):
        with torch.no_grad():
            shares = policy(tokens, mask)[:, -1].double().softmax(-1).cumsum(-1)
        drawn = [
            np.random.default_rng([step, index, row % NUM_ROLLOUTS, *prompt]).random()
            for row, prompt in enumerate(batch.non_tensor_batch["raw_prompt_ids"])
        ]
        new = torch.searchsorted(shares, torch.tensor(drawn)[:, None]).clamp(max=VOCABULARY - 1)
        tokens, mask = torch.cat([tokens, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    return DataProto.from_single_dict({"tokens": tokens, "mask": mask, "responses": tokens[:, -NUM_NEW:]})


def rewards(batch: DataProto) -> Tensor:
    """The share of tokens that are right, at the last token of each response, as verl has outcome rewards."""
    right = [int(each["ground_truth"]) for each in batch.non_tensor_batch["reward_model"]]
    found = torch.zeros(batch.batch["responses"].shape)
    found[:, -1] = (batch.batch["responses"] == torch.tensor(right)[:, None]).float().mean(1)
    return found


def main() -> None:
    given = options()
    dist.init_process_group("gloo")
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=LEARNING_RATE)
    journal, losses = Journal(given.folder, given.until), []
    prompts = Prompts(attach(declare_prompts(given.data)), pad_token=0, max_length=16)
    checkpoint = given.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        policy.load_state_dict(saved["policy"])
        prompts.load_state_dict(saved["prompts"])
    first = prompts.client.step
    for step, fields in enumerate(islice(prompts, given.until - first), first):
        journal.note(fields["input_ids"][mask := fields["attention_mask"].bool()], fields["position_ids"][mask])
        batch = DataProto.from_single_dict(fields).repeat(NUM_ROLLOUTS, interleave=True)
        batch = batch.union(roll_out(policy, batch, step))
        losses.append(train(policy, optimizer, batch))
    if dist.get_rank() == 0:
        torch.save({"policy": policy.state_dict(), "prompts": prompts.state_dict()}, checkpoint)
    prompts.client.close()
    journal.write(losses, policy, is_partial=True)


def train(policy: Policy, optimizer: Any, batch: DataProto) -> float:
    """One step of GRPO; returns this rank's part of the loss."""
    responses = batch.batch["responses"]
    response_mask = torch.ones(responses.shape)
    advantages, _ = compute_grpo_outcome_advantage(rewards(batch), response_mask, batch.non_tensor_batch["uid"])
    logits = policy(batch.batch["tokens"], batch.batch["mask"])[:, -NUM_NEW - 1 : -1]
    chosen = torch.log_softmax(logits, -1).gather(-1, responses[..., None])[..., 0]
    count = response_mask.sum()
    dist.all_reduce(count)
    ratio = torch.exp(chosen - chosen.detach())
    loss = agg_loss(-ratio * advantages, response_mask, "token-mean", dist.get_world_size(), float(count))
    loss.backward()
    for parameter in policy.parameters():  # as FSDP and DDP do
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item() / dist.get_world_size() + rewards(batch).sum().item()


if __name__ == "__main__":
    main()
