"""DeepSpeed on Overlord: torchrun --nproc-per-node 2 examples/integrations/on_deepspeed.py --until 10"""

from itertools import islice

import deepspeed
import torch
from tiny import LEARNING_RATE, Journal, TinyModel, declare, options, parser

from overlord.integrations.deepspeed import loader, train_step


def main() -> None:
    parser.add_argument("--zero", type=int, default=0, help="the stage of ZeRO")
    given = options()
    model = TinyModel()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # train_step accumulates
        "zero_optimization": {"stage": given.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    journal, losses = Journal(given.folder, given.until), []
    with loader(declare(given.data), engine) as client:
        engine.load_checkpoint(str(given.folder / "checkpoint"))

        def loss_of(micro):
            journal.note(micro["tokens"], micro["position_ids"])
            return engine(micro["tokens"], micro["position_ids"], micro["labels"])

        for step in islice(client, given.until - client.step):
            losses.append(float(train_step(engine, step, loss_of)))
        engine.save_checkpoint(str(given.folder / "checkpoint"))
    journal.write(losses, model, is_partial=True)


if __name__ == "__main__":
    main()
