"""transformers' Trainer on Overlord: torchrun --nproc-per-node 2 examples/integrations/on_transformers.py --until 10"""

from tiny import LEARNING_RATE, VOCABULARY, Journal, declare, microbatches_per_rank, options
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from overlord.integrations.transformers import OverlordTrainer


def main() -> None:
    given = options()
    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(shape)
    journal = Journal(given.folder, given.until)
    journal.watch(model, "input_ids")
    args = TrainingArguments(
        output_dir=str(given.folder),
        max_steps=given.until,
        gradient_accumulation_steps=microbatches_per_rank(),  # of a step of the job on this rank
        save_steps=5,
        logging_steps=1,
        lr_scheduler_type="constant",
        learning_rate=LEARNING_RATE,
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = OverlordTrainer(job=declare(given.data), model=model, args=args)
    begun = trainer.train(resume_from_checkpoint=any(given.folder.glob("checkpoint-*"))).metrics
    assert begun["train_loss"] > 0
    journal.write([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)


if __name__ == "__main__":
    main()
