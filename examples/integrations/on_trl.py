"""TRL's SFTTrainer on Overlord: torchrun --nproc-per-node 2 examples/integrations/on_trl.py --until 10"""

from tiny import LEARNING_RATE, VOCABULARY, Journal, declare, microbatches_per_rank, options
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from overlord.integrations.trl import OverlordSFTTrainer


def main() -> None:
    given = options()
    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(shape)
    words = Tokenizer(models.WordLevel({"<pad>": 0, **{str(token): token for token in range(1, VOCABULARY)}}, "<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
    journal = Journal(given.folder, given.until)
    journal.watch(model, "input_ids")
    args = SFTConfig(
        output_dir=str(given.folder),
        max_steps=given.until,
        gradient_accumulation_steps=microbatches_per_rank(),  # of a step of the job on this rank
        save_steps=5,
        logging_steps=1,
        lr_scheduler_type="constant",
        learning_rate=LEARNING_RATE,
        optim="sgd",
        max_grad_norm=0.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = OverlordSFTTrainer(model, args, job=declare(given.data), processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=any(given.folder.glob("checkpoint-*")))
    journal.write([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)


if __name__ == "__main__":
    main()
