"""Every example runs as a user would run it, and says what it is there to show."""

import re

import pytest

from tests.commands import ROOT, python

EXAMPLES = ROOT / "examples"
SHOWS = {
    "elastic_training.py": r"on 4 (-> \d )*-> 3 (-> \d )*-> 4 ranks: (.|\n)*every step is that of the undisturbed run",
    "find_bad_document.py": r"found row 1234 among 16 documents of step \d+, on rank \d",
    "log_metrics.py": r"logged 20 steps to output; rank 0 waited",
    "image_text.py": r"rank 0 saw 30 of the 60 pictures in one epoch, each beside its own caption",
    "own_source.py": r"one epoch: 1000 documents in \d+ steps",
    "resume_on_new_mesh.py": r"resumed on 6 ranks: all 20 steps hold the documents of the run never stopped",
    "vlm_exchange.py": r"pictures of step 0 were encoded somewhere and reached their captions",
    "text_pretraining_torch.py": r"resumed to step 40: loss",
}


def output_of(name: str) -> str:
    return python("-W", "error", EXAMPLES / name, timeout_s=300.0).stdout


def test_every_example_is_run_here():
    # tests/trainer/test_tempbalance_example.py, tests/trainer/test_long_context_example.py
    elsewhere = {"low_data_finetune.py", "long_context_llama.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SHOWS) | elsewhere


@pytest.mark.parametrize("name", sorted(set(SHOWS) - {"text_pretraining_torch.py"}))
def test_an_example_shows_what_it_is_there_for(name):
    assert re.search(SHOWS[name], output_of(name))


def test_pre_training_learns_and_goes_on_learning_where_it_was_stopped():
    output = output_of("text_pretraining_torch.py")
    assert re.search(SHOWS["text_pretraining_torch.py"], output)
    first, stopped, resumed, last = (float(loss) for loss in re.findall(r"\d+\.\d+", output))
    assert last < stopped < first
    assert abs(resumed - stopped) < 0.5 * (first - stopped), "a model that was not restored would begin anew"
