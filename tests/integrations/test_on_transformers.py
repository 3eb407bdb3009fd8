"""transformers' Trainer: two processes train, stop, and resume exactly, also on one; labels are shifted once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import overlord as ol
from overlord.errors import SpecError, StateError
from overlord.integrations.transformers import OverlordTrainer, batch_of, saved_state
from tests.integrations.training import Reference, check_stop_and_resume, import_tiny, train_alone

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=import_tiny().VOCABULARY, **shape))


def train_llama(job: ol.Job) -> Reference:
    """Without the trainer and without the model's own loss: documents one by one, labels shifted by hand."""
    model = small_model()

    def summed(micro: Any) -> torch.Tensor:
        total = torch.zeros(())
        for start, length in zip(micro["document_starts"].tolist(), micro["document_lengths"].tolist(), strict=True):
            tokens = micro["tokens"][start : start + length].long()
            logits = model(input_ids=tokens[None]).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
        return total

    return train_alone(job, model, summed)


@pytest.mark.timeout(900)
def test_the_trainer_trains_stops_and_resumes_exactly_on_other_ranks_too(tmp_path):
    check_stop_and_resume("transformers", tmp_path, reference=train_llama, other_ranks="program")


def trainer_of(folder: Path, **options: Any) -> OverlordTrainer:
    (folder / "data").mkdir(exist_ok=True)
    job = options.pop("job", None) or import_tiny().declare(folder / "data")
    more = {"max_steps": 2, "gradient_accumulation_steps": 4, **options.pop("args", {})}
    args = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", **more)
    return OverlordTrainer(job=job, model=small_model(), args=args, **options)


def test_evaluation_is_the_mean_over_all_tokens_of_the_same_steps(tmp_path):
    trainer = trainer_of(tmp_path, eval_job=import_tiny().declare(tmp_path), eval_limit=3)
    found = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    total, tokens = 0.0, 0
    with ol.start(import_tiny().declare(tmp_path)) as loader, torch.no_grad():
        client = loader.client(0, torch=True)
        for _ in range(3):
            step = next(client)
            tokens += step.loss_tokens
            for micro in step:
                batch = batch_of(micro)
                total += trainer.model(**batch, num_items_in_batch=1).loss.item()
    assert found == pytest.approx([total / tokens] * 2, rel=1e-5)


def test_what_would_shift_labels_twice_or_mix_steps_is_refused(tmp_path):
    with pytest.raises(SpecError, match="label_smoothing_factor shifts labels, which Overlord has shifted already"):
        trainer_of(tmp_path, args={"label_smoothing_factor": 0.1})
    with pytest.raises(SpecError, match=r"gradient_accumulation_steps is 3, but step 0 has 4 microbatches on this rank"):
        trainer_of(tmp_path, args={"gradient_accumulation_steps": 3}).train()
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    with pytest.raises(
        StateError, match=r"has no state of Overlord in trainer_state\.json: it was written by another trainer"
    ):
        saved_state(tmp_path / "checkpoint-5")
