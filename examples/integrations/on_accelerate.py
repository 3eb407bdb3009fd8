"""Accelerate on Overlord: torchrun --nproc-per-node 2 examples/integrations/on_accelerate.py --until 10"""

from itertools import islice

import torch
from accelerate import Accelerator
from tiny import LEARNING_RATE, Journal, TinyModel, declare, options

from overlord.integrations.accelerate import loader, microbatches, scaled_loss


def main() -> None:
    given = options()
    accelerator = Accelerator(cpu=True)
    model = TinyModel()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    client = loader(declare(given.data), accelerator)  # not prepared: it is of this rank already
    checkpoint = given.folder / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    journal, losses = Journal(given.folder, given.until), []
    for step in islice(client, given.until - client.step):
        total = torch.zeros(())
        for micro in microbatches(accelerator, model, step):
            journal.note(micro["tokens"], micro["position_ids"])
            summed = model(micro["tokens"], micro["position_ids"], micro["labels"])
            accelerator.backward(scaled_loss(accelerator, summed, step))
            total += summed.detach() / step.loss_tokens
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(total, "sum").item())
    accelerator.save_state(str(checkpoint))
    journal.write(losses, model)
    client.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
