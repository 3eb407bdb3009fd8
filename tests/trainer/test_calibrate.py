"""Measuring a model: the designed shapes tell the coefficients apart, and what comes out can be read back."""

import json
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

import overlord as ol
from overlord.cli import main
from overlord.trainer.calibrate import calibrate_model, fitted_shapes, held_out_shapes
from overlord.trainer.llama_blocks import TINY, BlockShape, attention_for, steps_of
from tests.commands import python


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for cores that others use would take seconds for what takes one a millisecond."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TRUE = ol.TransformerCost(per_token=4.7e-6, per_length_squared=1.76e-10, constant=2e-5)
BESIDE = 0.0024


class Machine:
    """A device whose time is known: its clock goes on by what the documents it was given cost."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_runs = 0

    def step(self, lengths: Sequence[int]) -> None:
        self.num_runs += 1
        drift = 1.0 + 0.01 * ((self.num_runs * 7) % 5 - 2)  # by up to 2 %
        per_document = [n * TRUE.per_token + n * n * TRUE.per_length_squared + TRUE.constant for n in lengths]
        self.now += (sum(per_document) + BESIDE) * drift

    def stopwatch(self, work: Callable[[], None]) -> float:
        began = self.now
        work()
        return self.now - began


def test_known_coefficients_are_found_again():
    machine = Machine()
    found = calibrate_model(machine.step, tokens=65_536, repeats=5, device="cpu", stopwatch=machine.stopwatch)
    assert found.cost.per_token == pytest.approx(TRUE.per_token, rel=0.03)
    assert found.cost.per_length_squared == pytest.approx(TRUE.per_length_squared, rel=0.03)
    assert found.cost.constant == pytest.approx(TRUE.constant, rel=0.25)
    assert found.held_out_error < 0.03
    assert found.fit_error < 0.03
    assert not {shape.lengths for shape in found.held_out} & {shape.lengths for shape in found.fitted}


@pytest.mark.parametrize(("tokens", "longest"), [(512, 512), (65_536, 65_536), (65_536, 4096), (100_000, 77_777)])
def test_shapes_stay_within_what_was_asked_for(tokens, longest):
    for lengths in (*fitted_shapes(tokens, longest), *held_out_shapes(tokens, longest)):
        assert sum(lengths) <= tokens
        assert min(lengths) >= 1
        assert max(lengths) <= longest
    assert {len(set(lengths)) for lengths in fitted_shapes(tokens, longest)} == {1}


def test_packed_documents_do_not_see_each_other():
    attention = attention_for("cpu")
    query, key, value = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    whole = attention(query, key, value, [4, 5])
    apart = [attention(query[part], key[part], value[part], [n]) for part, n in ((slice(4), 4), (slice(4, 9), 5))]
    torch.testing.assert_close(whole, torch.cat(apart))
    again = attention(query[:1], key[:1], value[:1], [1])
    torch.testing.assert_close(whole[:1], again)  # causal: the first token sees itself alone


def test_the_built_in_blocks_are_measured_from_the_command_line_and_read_back(tmp_path, capsys):
    path = tmp_path / "costs.json"
    arguments = ["--preset", "tiny", "--device", "cpu", "--tokens", 512, "--longest", 256, "--repeats", 1, "--layers", 1]
    assert main(["calibrate", *map(str, arguments), "--out", str(path)]) == 0
    told = capsys.readouterr().out
    assert "tiny, 1 blocks, attention one document at a time on cpu" in told
    assert "Off by up to" in told
    saved = json.loads(path.read_text())
    assert len(saved["held_out"]) == 6
    assert saved["unit"] == "seconds"
    assert ol.load_cost(path).coefficients == (saved["per_token"], saved["per_length_squared"], saved["constant"])


MODEL = """
import torch


def build(device):
    weights = torch.ones(8, 8, device=device, requires_grad=True)

    def step(lengths):
        for length in lengths:
            (torch.ones(length, 8, device=device) @ weights).sum().backward()
        weights.grad = None

    return step
"""


def test_a_model_of_ones_own_is_a_file_with_build(tmp_path, capsys):
    path = tmp_path / "own_model.py"
    path.write_text(MODEL)
    arguments = ["--device", "cpu", "--tokens", 512, "--repeats", 1, "--json"]
    assert main(["calibrate", str(path), *map(str, arguments)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == "own_model.py"
    assert min(told["per_token"], told["per_length_squared"], told["constant"]) >= 0
    assert told["held_out_error"] >= 0


def test_calibrating_imports_nothing_that_training_machines_lack():
    code = (
        "import sys; import overlord.cli.calibrate, overlord.cli; "
        "print([m for m in ('ray', 'msgspec', 'orjson', 'rich', 'pyarrow', 'zstandard') if m in sys.modules])"
    )
    assert python("-c", code).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a Python file with build"),
        (["--preset", "gpt-9"], "there is no preset 'gpt-9'; there are llama-8b-like"),
        (["nowhere.py"], "there is no file nowhere.py"),
        (["--preset", "tiny", "--tokens", "100"], "at least 512 tokens"),
        (["--preset", "tiny", "--longest", "5"], "documents from 128 tokens"),
    ],
)
def test_what_cannot_be_measured_is_said(capsys, arguments, message):
    assert main(["calibrate", *arguments, "--device", "cpu"]) == 1
    assert message in capsys.readouterr().err


def test_a_stack_without_blocks_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["calibrate", "--preset", "tiny", "--layers", "0", "--device", "cpu"])
    assert "argument --layers: must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "nothing", '{"overlord_cost": 99}', "[1]"])
def test_a_file_that_holds_no_costs_is_refused(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ol.errors.SpecError, match=str(path)):
        ol.load_cost(path)
    with pytest.raises(ol.errors.SpecError, match="cannot be read"):
        ol.load_cost(tmp_path / "missing")


def test_a_block_that_cannot_be_is_refused():
    with pytest.raises(ol.errors.SpecError, match="heads must divide hidden"):
        BlockShape(hidden=10, heads=4, kv_heads=2, ffn=8)
    assert TINY.head_size == 16
    assert callable(steps_of(TINY, 1, "cpu"))
