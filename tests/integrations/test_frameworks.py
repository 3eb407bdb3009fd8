"""What integrations share: clear errors for frameworks that are missing or of another release, light imports, microbatches
one by one, and batches in the forms of frameworks that need not be installed for that."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from typing import Any

import numpy as np
import pytest
import torch

import overlord as ol
from overlord.errors import SpecError, StateError
from overlord.integrations import megatron
from overlord.integrations.frameworks import SUPPORTED, is_before, require
from overlord.integrations.microbatches import OneByOne
from overlord.integrations.verl import Prompts
from tests.commands import ROOT
from tests.integrations.training import EXAMPLES
from tests.small_sources import Numbered, job_of, tokens_of

FILES = sorted((ROOT / "src" / "overlord" / "integrations").glob("*.py"))


def test_a_release_that_is_not_supported_is_refused_with_the_releases_that_are(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "4.57.1")
    with pytest.raises(
        SpecError, match=r"transformers 4\.57\.1 is installed, and this integration is written for releases from"
    ):
        require("transformers")
    monkeypatch.setattr(metadata, "version", lambda name: "3.0.0.dev0+cpu")
    with pytest.raises(SpecError, match=r"pip install 'accelerate>=1\.10,<2', or use overlord\.trainer\.attach"):
        require("accelerate")


def test_a_framework_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setitem(SUPPORTED, "no-such-framework", ("0.3", "0.4"))
    with pytest.raises(
        ModuleNotFoundError, match=r"this integration needs no-such-framework: pip install 'no-such-framework>=0\.3,<0\.4'"
    ):
        require("no-such-framework")


def test_a_framework_that_runs_from_a_checkout_says_its_release_itself(monkeypatch, tmp_path):
    package = tmp_path / "unpackaged" / "inner"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.2.1'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(SUPPORTED, "unpackaged-inner", ("0.2", "0.3"))
    assert require("unpackaged-inner").__version__ == "0.2.1"
    assert is_before("unpackaged-inner", "0.3")
    assert not is_before("unpackaged-inner", "0.2.1")
    monkeypatch.setitem(SUPPORTED, "unpackaged-inner", ("0.3", "0.4"))
    with pytest.raises(SpecError, match=r"unpackaged-inner 0\.2\.1 is installed"):
        require("unpackaged-inner")


def test_no_integration_imports_its_framework_before_it_is_used():
    names = [path.stem for path in FILES]
    code = (
        "import sys, overlord.integrations, overlord.integrations.megatron, overlord.integrations.ray_train, "
        "overlord.integrations.deepspeed, overlord.integrations.torchft, overlord.integrations.verl, "
        "overlord.integrations.accelerate; print([m for m in sys.modules if m in "
        "{'torch', 'ray', 'accelerate', "
        " 'transformers', 'lightning', 'deepspeed', 'torchtitan', 'megatron', 'torchft', 'trl'}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    for path in FILES:  # the others subclass their framework's classes, and import it only through `require`
        imported = {node.module for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)}
        assert not [name for name in imported if name and name.split(".")[0] in {"torch", *SUPPORTED} - {"overlord"}], (
            path.name
        )
    assert {"accelerate", "lightning", "transformers"} <= set(names)


def test_microbatches_come_one_by_one_and_go_on_where_a_loop_was_left():
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        steps = [[np.asarray(micro["tokens"]).tolist() for micro in next(loader.client(0))] for _ in range(1)]
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        client = loader.client(0)
        each = OneByOne(client, 4, lambda micro, step: (step.number, micro["tokens"].tolist()), option="accumulation")
        first = [next(iter(each)) for _ in range(3)]
        assert first == [(0, tokens) for tokens in steps[0][:3]]
        assert next(iter(each)) == (0, steps[0][3])
        assert next(each)[0] == 1
        with pytest.raises(TypeError):
            len(each)


def test_a_step_of_another_number_of_microbatches_is_refused():
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        each = OneByOne(loader.client(0), 3, lambda micro, step: micro, option="gradient_accumulation_steps")
        with pytest.raises(
            SpecError, match=r"gradient_accumulation_steps is 3, but step 0 has 4 microbatches on this rank.*set grad.*=4"
        ):
            next(each)


def test_a_second_epoch_of_a_run_that_was_resumed_is_a_whole_one():
    job = job_of(
        {"a": Numbered(rows=60, first=1, repeat=False)}, batch=ol.Batch(tokens=64, sequence_length=16, drop_last=True)
    )
    with ol.start(job) as loader:
        client = loader.client(0)
        num_steps = len(list(client))
        again = OneByOne(loader.client(0), 4, lambda micro, step: step.number, option="accumulation")
        assert len(again) == 4 * num_steps
        whole = list(again)
        assert list(again) == whole  # a second epoch
        next(iter(client))
        state = client.state_dict()
    with ol.start(job, resume=state) as loader:
        each = OneByOne(loader.client(0), 4, lambda micro, step: step.number, option="accumulation")
        assert list(each) == whole[4:]
        assert list(each) == whole


def test_prompts_are_padded_on_the_left_and_carry_their_columns():
    job = job_of({"a": Numbered(first=1)}, batch=ol.Batch(samples=4, sequence_length=16, columns=("document",)))
    with ol.start(job) as loader:
        plain = next(loader.client(0))
        client = loader.client(0)
        client.rewind()
        prompts = Prompts(client, pad_token=7, max_length=20, repeats=2)
        batch = next(iter(prompts))
        assert prompts.state_dict()["step"] == 1
    assert batch["input_ids"].shape == (8, 20)
    assert batch["input_ids"].dtype == batch["position_ids"].dtype == torch.int64
    rows = [row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert rows == batch["raw_prompt_ids"].tolist()
    assert sorted(token for row in rows[::2] for token in row) == sorted(tokens_of(plain).tolist())
    assert rows[::2] == rows[1::2]
    assert [row[0] // 1000 for row in rows] == batch["document"].tolist()
    assert all(row[-1] == len(ids) - 1 for row, ids in zip(batch["position_ids"].tolist(), rows, strict=True))
    assert batch["uid"][0] == batch["uid"][1] != batch["uid"][2]


def test_a_prompt_that_is_too_long_and_no_rollouts_are_refused():
    with ol.start(job_of({"a": Numbered(first=1)}, batch=ol.Batch(samples=4, sequence_length=16))) as loader:
        client = loader.client(0)
        with pytest.raises(
            SpecError, match=r"has \d+ tokens, more than max_length=2: declare Batch\(sequence_length=2, long_"
        ):
            next(iter(Prompts(client, pad_token=0, max_length=2)))
        with pytest.raises(SpecError, match="repeats is how many rollouts each prompt gets, at least 1, got 0"):
            Prompts(client, pad_token=0, repeats=0)


def packed(**more: Any) -> dict[str, Any]:
    with ol.start(job_of({"a": Numbered(first=1)}), world_size=1) as loader:
        micro = dict(next(loader.client(0, torch=True)).microbatches[0])
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in micro.items()} | more


def test_a_batch_of_megatron_is_padded_to_its_sequence_length():
    micro = packed()
    width = len(micro["tokens"])
    batch = megatron.batch_of(micro, width + 5)
    assert batch["tokens"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, width + 5)
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    assert batch["loss_mask"].dtype == torch.float32
    assert batch["loss_mask"].sum() == (micro["labels"] != -100).sum()
    assert batch["cu_seqlens"].tolist() == [[*micro["cu_seqlens"].tolist(), width + 5]]
    assert batch["position_ids"][0, width:].tolist() == [0, 1, 2, 3, 4]
    assert batch["max_seqlen"].tolist() == [max(5, micro["max_seqlen"])]
    assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen"}
    assert set(megatron.batch_of(micro, width + 5, has_bounds=False)) == {"tokens", "labels", "loss_mask", "position_ids"}
    with pytest.raises(
        SpecError, match=rf"rows of {width} tokens, and Megatron's --seq-length is 3: declare Batch\(micro_tokens=3\)"
    ):
        megatron.batch_of(micro, 3)


def test_megatron_counts_the_microbatches_of_a_step_and_saves_between_steps(tmp_path):
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        client = loader.client(0, torch=True)
        with pytest.raises(SpecError, match="Megatron accumulates 3 microbatches, but step 0 has 4 on this rank"):
            next(megatron.MegatronBatches(client, num_microbatches=lambda: 3))
        client.rewind()
        batches = megatron.MegatronBatches(client, num_microbatches=lambda: 4)
        next(batches)
        with pytest.raises(SpecError, match="Megatron saves in the middle of step 0: 3 microbatches are left"):
            batches.save_state()
        for _ in range(3):
            next(batches)
        folder = tmp_path / "iter_0000001" / "mp_rank_00"
        folder.mkdir(parents=True)
        torch.save({"dataloader_state_dict": batches.save_state()}, folder / "train_dataloader_dprank000.pt")
    assert megatron.saved_state(tmp_path, 1)["step"] == 1
    with pytest.raises(StateError, match=r"no state of the loader in .* for iteration 7: pass the --dataloader-save"):
        megatron.saved_state(tmp_path, 7)


def test_every_example_is_run_by_a_test_of_its_framework():
    names = {path.stem for path in EXAMPLES.glob("on_*.py")}
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "integrations").glob("test_on_*.py")}
    assert names <= tests
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"tiny.py", *(f"{name}.py" for name in names)}


def lines_of_ours(block: str) -> int:
    """The lines of a block that name something imported from Overlord, a variable that was made by it, or the number of loss
    tokens."""
    tree = ast.parse(block)
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("overlord")
    ]
    ours = {alias.asname or alias.name for node in imports for alias in node.names}
    found = {node.lineno for node in imports}

    def is_ours(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in ours

    for node in ast.walk(tree):  # parents before children, so that variables are known before they are used
        made = [(node.value, node.targets)] if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.With):
            made = [(item.context_expr, [item.optional_vars]) for item in node.items]
        for value, targets in made:
            if isinstance(value, ast.Call) and any(is_ours(part) for part in ast.walk(value.func)):
                ours |= {name.id for target in targets if isinstance(target, ast.Name) for name in [target]}
    for node in ast.walk(tree):
        if is_ours(node) or (isinstance(node, ast.Attribute) and node.attr == "loss_tokens"):
            found.add(node.lineno)  # type: ignore[attr-defined] - a name or an attribute
    return len(found)


def test_a_framework_takes_at_most_five_lines_of_ours():
    rows = re.findall(r"^\|.*\]\((with_\w+\.md)\).*\| (\d) \|$", (ROOT / "docs" / "integrations.md").read_text(), re.M)
    assert {page for page, _ in rows} == {path.name for path in (ROOT / "docs").glob("with_*.md")}
    for page, number in rows:
        blocks = re.findall(r"```python no-run\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
        assert max(map(lines_of_ours, blocks)) == int(number) <= 5, page


def calls_of_ours(code: str) -> dict[str, set[int]]:
    """The calls of what is imported from Overlord, by full name, with the numbers of their positional arguments."""
    tree = ast.parse(code)
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("overlord")]
    full = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    found: dict[str, set[int]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, *rest = ast.unparse(node.func).split(".")
            if first in full:
                found.setdefault(".".join([full[first], *rest]), set()).add(len(node.args))
    return found


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("with_*.md")), ids=lambda page: page.stem)
def test_a_page_calls_what_an_example_or_a_test_of_its_framework_calls(page):
    run: dict[str, set[int]] = {}
    for path in (*EXAMPLES.glob("on_*.py"), *(ROOT / "tests" / "integrations").glob("*.py")):
        for name, counts in calls_of_ours(path.read_text()).items():
            run[name] = run.get(name, set()) | counts
    blocks = re.findall(r"```python no-run\n(.*?)```", page.read_text(), re.S)
    called = {name: counts for block in blocks for name, counts in calls_of_ours(block).items()}
    assert called
    for name, counts in called.items():
        assert counts <= run.get(name, set()), f"nothing that is run calls {name} with {counts} arguments"
